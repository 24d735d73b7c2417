//! List whose oldest values are evicted first.

use std::sync::Arc;

use crate::{
    chain::{Chain, Links},
    error::{InsertError, SoftError},
    heap::{Block, Compact as _, Pool, Records as _, Values},
    panics::count_panics,
    structure::{Deliver, Priority, State, Structure, Usage},
};

/// Doubly ended list in soft memory. A reclamation evicts values from the front, where the oldest
/// values are if values are appended with [`push_back`](Self::push_back) (Soft Memory, section 3.2).
///
/// A panic of an access closure leaves the list unchanged. All methods panic inside an access closure;
/// see [`locks`](crate#locks).
#[derive(Debug)]
pub struct SoftList<T: Send + 'static> {
    structure: Structure<ListState<T>>,
}

#[derive(Debug)]
struct ListState<T> {
    values: Values<T, Links>,
    chain: Chain,
}

impl<T: Send + 'static> SoftList<T> {
    /// Creates an empty list. Evicted values are dropped.
    ///
    /// # Errors
    /// Returns an error if `T` is too large, or if the pool has too many structures.
    pub fn new(pool: &Arc<Pool>, priority: Priority) -> Result<Self, SoftError> {
        Self::with_delivery(pool, priority, None)
    }

    /// Creates an empty list. Each evicted value is passed to the callback, which runs without a lock.
    ///
    /// # Errors
    /// Returns an error if `T` is too large, or if the pool has too many structures.
    pub fn with_callback(
        pool: &Arc<Pool>,
        priority: Priority,
        callback: impl Fn(T) + Send + Sync + 'static,
    ) -> Result<Self, SoftError> {
        let deliver = move |value| count_panics(|| callback(value));
        Self::with_delivery(pool, priority, Some(Box::new(deliver)))
    }

    fn with_delivery(
        pool: &Arc<Pool>,
        priority: Priority,
        deliver: Option<Deliver<T>>,
    ) -> Result<Self, SoftError> {
        let state = ListState { values: Values::new(pool.clone())?, chain: Chain::default() };
        Structure::new(pool, priority, state, deliver).map(|structure| Self { structure })
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.structure.lock().values.len()
    }

    /// Returns whether the list has no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends a value.
    ///
    /// # Errors
    /// Returns the value if the budget or the address space does not suffice.
    pub fn push_back(&self, value: T) -> Result<(), InsertError<T>> {
        self.structure.insert(value, |state, value| {
            let block = state.values.insert(value, Links::default())?;
            state.chain.push_back(&mut state.values, block);
            Ok(())
        })
    }

    /// Prepends a value, which is then evicted first.
    ///
    /// # Errors
    /// Returns the value if the budget or the address space does not suffice.
    pub fn push_front(&self, value: T) -> Result<(), InsertError<T>> {
        self.structure.insert(value, |state, value| {
            let block = state.values.insert(value, Links::default())?;
            state.chain.push_front(&mut state.values, block);
            Ok(())
        })
    }

    /// Removes and returns the first value.
    pub fn pop_front(&self) -> Option<T> {
        self.structure.lock().pop_front()
    }

    /// Removes and returns the last value.
    pub fn pop_back(&self) -> Option<T> {
        let mut state = self.structure.lock();
        let state = &mut *state;
        let block = state.chain.last()?;
        state.chain.unlink(&mut state.values, block);
        Some(state.values.remove(block).0)
    }

    /// Passes the first value to a closure.
    pub fn front<R>(&self, access: impl FnOnce(&T) -> R) -> Option<R> {
        let state = self.structure.lock();
        state.chain.first().map(|block| access(state.values.get(block)))
    }

    /// Passes the last value to a closure.
    pub fn back<R>(&self, access: impl FnOnce(&T) -> R) -> Option<R> {
        let state = self.structure.lock();
        state.chain.last().map(|block| access(state.values.get(block)))
    }

    /// Passes the first value to a closure that can change it.
    pub fn front_mut<R>(&self, access: impl FnOnce(&mut T) -> R) -> Option<R> {
        let mut state = self.structure.lock();
        state.chain.first().map(|block| access(state.values.get_mut(block)))
    }

    /// Passes the last value to a closure that can change it.
    pub fn back_mut<R>(&self, access: impl FnOnce(&mut T) -> R) -> Option<R> {
        let mut state = self.structure.lock();
        state.chain.last().map(|block| access(state.values.get_mut(block)))
    }

    /// Appends values until one is rejected. The iterator runs without the lock.
    ///
    /// # Errors
    /// Returns the rejected value. The values before it stay in the list. To continue later, pass a mutable
    /// reference to the iterator.
    pub fn try_extend(&self, values: impl IntoIterator<Item = T>) -> Result<(), InsertError<T>> {
        values.into_iter().try_for_each(|value| self.push_back(value))
    }

    /// Passes each value to a closure, from the first to the last, and removes those for which it returns `false`.
    /// The removed values are dropped after the lock is released. A panic of the closure ends the operation.
    pub fn retain(&self, keep: impl FnMut(&T) -> bool) {
        let mut removed = Vec::new(); // dropped after the lock is released
        self.structure.lock().retain(keep, &mut removed);
    }

    /// Passes each value to a closure, from the first to the last.
    pub fn for_each(&self, mut access: impl FnMut(&T)) {
        let state = self.structure.lock();
        state.chain.iter(&state.values).for_each(|block| access(state.values.get(block)));
    }

    /// Removes and drops all values.
    pub fn clear(&self) {
        let mut state = self.structure.lock();
        let cleared = state.take();
        drop(state);
        drop(cleared);
    }

    /// Moves values together, and frees pages and memory that are not needed.
    pub fn shrink_to_fit(&self) {
        self.structure.shrink_to_fit();
    }

    /// Changes the priority of the structure. A running [`Pool::revoke`] uses the old one.
    pub fn set_priority(&self, priority: Priority) {
        self.structure.set_priority(priority);
    }

    /// Evicts the oldest values until `pages` pages are free, and returns the number of freed pages.
    /// Frees unused pages first.
    pub fn reclaim(&self, pages: usize) -> usize {
        self.structure.reclaim(pages)
    }

    /// Returns the use of soft memory.
    pub fn usage(&self) -> Usage {
        self.structure.usage()
    }
}

impl<T> ListState<T> {
    /// Returns the contents, and becomes empty.
    fn take(&mut self) -> Self {
        let values = self.values.take();
        Self { values, chain: std::mem::take(&mut self.chain) }
    }

    /// Unlinks the first value.
    fn unlink_front(&mut self) -> Option<Block> {
        let block = self.chain.first()?;
        self.chain.unlink(&mut self.values, block);
        Some(block)
    }

    fn pop_front(&mut self) -> Option<T> {
        self.unlink_front().map(|block| self.values.remove(block).0)
    }

    /// Removes the values for which `keep` returns `false`. Adds those that need a drop to `removed`.
    fn retain(&mut self, mut keep: impl FnMut(&T) -> bool, removed: &mut Vec<T>) {
        let mut next = self.chain.first();
        while let Some(block) = next {
            next = self.values.record(block).next();
            if keep(self.values.get(block)) {
                continue;
            }
            self.chain.unlink(&mut self.values, block);
            if std::mem::needs_drop::<T>() {
                removed.push(self.values.remove(block).0);
            } else {
                self.values.forget(block);
            }
        }
    }
}

impl<T: Send + 'static> State for ListState<T> {
    type Evicted = T;

    fn evict(&mut self) -> Option<T> {
        self.pop_front()
    }

    fn discard(&mut self) -> Option<()> {
        let block = self.unlink_front()?;
        self.values.forget(block);
        Some(())
    }

    fn evictable(&self) -> usize {
        self.values.len()
    }

    fn held_pages(&self) -> usize {
        self.values.held_pages()
    }

    fn unused_pages(&self) -> usize {
        self.values.unused_pages()
    }

    fn free_unused(&mut self, pages: usize) {
        let chain = &mut self.chain;
        self.values.free_unused(pages, |values, _, to| chain.relink(values, to));
    }
}

#[cfg(test)]
mod tests;
