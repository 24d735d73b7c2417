//! Array that is evicted as a whole.

use std::sync::Arc;

use crate::{
    error::{InsertError, SoftError},
    heap::{Buffer, Pool},
    panics::count_panics,
    structure::{Deliver, Priority, State, Structure, Usage},
};

/// Growable array in soft memory. A reclamation evicts all elements, because the array is one block of
/// memory (Soft Memory, section 3.2). The vector is then empty, and can be filled again.
///
/// All methods panic inside an access closure; see [`locks`](crate#locks).
#[derive(Debug)]
pub struct SoftVec<T: Send + 'static> {
    structure: Structure<VecState<T>>,
}

#[derive(Debug)]
struct VecState<T> {
    buffer: Buffer<T>,
    revocations: u64,
}

impl<T: Send + 'static> SoftVec<T> {
    /// Creates an empty vector. Evicted elements are dropped.
    ///
    /// # Errors
    /// Returns an error if the pool has too many structures.
    pub fn new(pool: &Arc<Pool>, priority: Priority) -> Result<Self, SoftError> {
        Self::with_delivery(pool, priority, None)
    }

    /// Creates an empty vector. Each evicted element is passed to the callback, from the last to the
    /// first. The callback runs without a lock. The memory is freed after the last callback.
    ///
    /// # Errors
    /// Returns an error if the pool has too many structures.
    pub fn with_callback(
        pool: &Arc<Pool>,
        priority: Priority,
        callback: impl Fn(T) + Send + Sync + 'static,
    ) -> Result<Self, SoftError> {
        let elements = |mut buffer: Buffer<T>| std::iter::from_fn(move || buffer.pop());
        let deliver =
            move |buffer| elements(buffer).map(|value| count_panics(|| callback(value))).sum::<u64>();
        Self::with_delivery(pool, priority, Some(Box::new(deliver)))
    }

    fn with_delivery(
        pool: &Arc<Pool>,
        priority: Priority,
        deliver: Option<Deliver<Buffer<T>>>,
    ) -> Result<Self, SoftError> {
        let state = VecState { buffer: Buffer::new(pool.clone()), revocations: 0 };
        Structure::new(pool, priority, state, deliver).map(|structure| Self { structure })
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.structure.lock().buffer.as_slice().len()
    }

    /// Returns whether the vector has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of elements for which memory is allocated.
    pub fn capacity(&self) -> usize {
        self.structure.lock().buffer.capacity()
    }

    /// Returns how often all elements were evicted. Indexes that a program obtained before a revocation
    /// refer to other elements afterwards.
    pub fn revocations(&self) -> u64 {
        self.structure.lock().revocations
    }

    /// Reserves memory for `additional` more elements.
    ///
    /// # Errors
    /// Returns an error if the size overflows, or if the budget or the address space does not suffice.
    pub fn try_reserve(&self, additional: usize) -> Result<(), SoftError> {
        let reserve = |state: &mut VecState<T>, ()| {
            state.buffer.reserve(additional).map_err(|reason| InsertError { value: (), reason })
        };
        self.structure.insert((), reserve).map_err(SoftError::from)
    }

    /// Appends an element.
    ///
    /// # Errors
    /// Returns the element if the budget or the address space does not suffice.
    pub fn push(&self, value: T) -> Result<(), InsertError<T>> {
        self.structure.insert(value, |state, value| match state.buffer.reserve(1) {
            Ok(()) => {
                state.buffer.push(value);
                Ok(())
            }
            Err(reason) => Err(InsertError { value, reason }),
        })
    }

    /// Appends elements until one is rejected. The iterator runs without the lock.
    ///
    /// # Errors
    /// Returns the rejected element. The elements before it stay in the vector. To continue later, pass a mutable
    /// reference to the iterator.
    pub fn try_extend(&self, elements: impl IntoIterator<Item = T>) -> Result<(), InsertError<T>> {
        elements.into_iter().try_for_each(|element| self.push(element))
    }

    /// Removes and returns the last element.
    pub fn pop(&self) -> Option<T> {
        self.structure.lock().buffer.pop()
    }

    /// Passes an element to a closure.
    pub fn get<R>(&self, index: usize, access: impl FnOnce(&T) -> R) -> Option<R> {
        self.structure.lock().buffer.as_slice().get(index).map(access)
    }

    /// Passes an element to a closure that can change it.
    pub fn get_mut<R>(&self, index: usize, access: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.structure.lock().buffer.as_mut_slice().get_mut(index).map(access)
    }

    /// Passes all elements to a closure.
    pub fn with_slice<R>(&self, access: impl FnOnce(&[T]) -> R) -> R {
        access(self.structure.lock().buffer.as_slice())
    }

    /// Passes all elements to a closure that can change them.
    pub fn with_mut_slice<R>(&self, access: impl FnOnce(&mut [T]) -> R) -> R {
        access(self.structure.lock().buffer.as_mut_slice())
    }

    /// Removes the elements from `len` on, and drops them after the lock is released.
    pub fn truncate(&self, len: usize) {
        let removed = self.structure.lock().buffer.truncate(len);
        drop(removed);
    }

    /// Passes each element to a closure, and removes those for which it returns `false`. The other elements keep
    /// their order. The removed elements are dropped after the lock is released. A panic of the closure removes no
    /// element, and may change the order.
    pub fn retain(&self, keep: impl FnMut(&T) -> bool) {
        let removed = self.structure.lock().retain(keep);
        drop(removed);
    }

    /// Moves the elements to the smallest sufficient block of memory, and frees the old one. Keeps the old one if the
    /// budget or the address space does not suffice for both.
    pub fn shrink_to_fit(&self) {
        self.structure.lock().buffer.shrink_to_fit();
    }

    /// Removes and drops all elements, and frees their memory.
    pub fn clear(&self) {
        let cleared = self.structure.lock().take();
        drop(cleared);
    }

    /// Changes the priority of the structure. A running [`Pool::revoke`] uses the old one.
    pub fn set_priority(&self, priority: Priority) {
        self.structure.set_priority(priority);
    }

    /// Evicts all elements if `pages` is not 0 and more than the unused pages. Returns the number of freed
    /// pages, which may be larger than `pages`.
    pub fn reclaim(&self, pages: usize) -> usize {
        self.structure.reclaim(pages)
    }

    /// Returns the use of soft memory. An eviction of all elements counts as one.
    pub fn usage(&self) -> Usage {
        self.structure.usage()
    }
}

impl<T> VecState<T> {
    /// Returns all elements with their memory, and becomes empty.
    fn take(&mut self) -> Buffer<T> {
        let empty = Buffer::new(self.buffer.pool());
        std::mem::replace(&mut self.buffer, empty)
    }

    /// Removes the elements for which `keep` returns `false`, and returns those that need a drop.
    fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) -> Vec<T> {
        let elements = self.buffer.as_mut_slice();
        let mut kept = 0;
        for index in 0..elements.len() {
            if keep(&elements[index]) {
                elements.swap(kept, index);
                kept += 1;
            }
        }
        self.buffer.truncate(kept)
    }
}

impl<T: Send + 'static> State for VecState<T> {
    type Evicted = Buffer<T>;

    fn evict(&mut self) -> Option<Buffer<T>> {
        let has_pages = self.buffer.held_pages() > 0;
        self.revocations += u64::from(has_pages);
        has_pages.then(|| self.take())
    }

    fn discard(&mut self) -> Option<()> {
        self.evict().map(drop)
    }

    fn evictable(&self) -> usize {
        usize::from(self.buffer.held_pages() > 0)
    }

    fn held_pages(&self) -> usize {
        self.buffer.held_pages()
    }

    fn unused_pages(&self) -> usize {
        self.buffer.idle_pages()
    }

    fn free_unused(&mut self, pages: usize) {
        self.buffer.free_unused(pages);
    }
}

#[cfg(test)]
mod tests;
