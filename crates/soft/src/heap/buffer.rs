//! Growable array of values of one type in one block of a heap.

use std::{alloc::Layout, fmt, marker::PhantomData, ptr::NonNull, sync::Arc};

use super::{
    classes::BlockKind,
    pool::Pool,
    slots::{Block, Slots},
};
use crate::error::SoftError;

/// Smallest capacity of a buffer that is not empty.
const CAPACITY_MIN: usize = 4;
/// A buffer grows by this part of its capacity at least.
const GROWTH_DIVISOR_MAX: usize = 8;

/// Array of values. The first `len` elements of the block are initialized.
pub(crate) struct Buffer<T> {
    slots: Slots<()>,
    block: Option<Block>,
    capacity: usize,
    len: usize,
    owned: PhantomData<T>,
}

impl<T> Buffer<T> {
    /// Creates an empty buffer without pages.
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        let capacity = if size_of::<T>() == 0 { usize::MAX } else { 0 };
        Self { slots: Slots::new(pool), block: None, capacity, len: 0, owned: PhantomData }
    }

    /// Returns the pool of the buffer.
    pub(crate) fn pool(&self) -> Arc<Pool> {
        self.slots.arena().pool().clone()
    }

    /// Returns the number of elements for which the buffer has memory.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of pages that count against the budget.
    pub(crate) fn held_pages(&self) -> usize {
        self.slots.arena().held_pages()
    }

    /// Returns the number of held pages that contain no elements.
    pub(crate) fn idle_pages(&self) -> usize {
        self.slots.arena().idle_pages()
    }

    /// Frees up to `pages` pages that contain no elements, and returns their number.
    pub(crate) fn free_unused(&mut self, pages: usize) -> usize {
        self.slots.release_idle(pages)
    }

    /// Reserves memory for `additional` more elements, if the capacity is insufficient.
    ///
    /// # Errors
    /// Returns [`SoftError::TooLarge`] if the size overflows, or the error of the allocation. The buffer is
    /// unchanged then.
    fn reserve_block(&mut self, additional: usize) -> Result<(), SoftError> {
        let count = self.len.checked_add(additional).ok_or(SoftError::TooLarge)?;
        if count <= self.capacity {
            return Ok(());
        }
        self.move_to(Self::kind_for(count)?)
    }

    /// Returns the smallest kind of block for a number of elements, which is not 0.
    ///
    /// # Errors
    /// Returns [`SoftError::TooLarge`] if the size overflows.
    fn kind_for(count: usize) -> Result<BlockKind, SoftError> {
        BlockKind::for_layout(Layout::array::<T>(count).map_err(|_| SoftError::TooLarge)?)
    }

    /// Moves the elements to a new block that is large enough.
    ///
    /// # Errors
    /// Returns the error of the allocation. The buffer is unchanged then.
    fn move_to(&mut self, kind: BlockKind) -> Result<(), SoftError> {
        let block = self.slots.allocate(kind, ()).map_err(|((), error)| error)?;
        let from = self.start();
        let to = self.slots.address(block).cast::<T>();
        // SAFETY: the new block has memory for `len` elements and does not overlap the old block, which is freed
        // without dropping the moved elements.
        unsafe { to.copy_from_nonoverlapping(from, self.len) };
        if let Some(old) = self.block.replace(block) {
            self.slots.free(old);
            // The next block has another size, so these pages are unlikely to be used again.
            self.slots.release_idle(usize::MAX);
        }
        self.capacity = kind.bytes() / size_of::<T>();
        Ok(())
    }

    /// Reserves memory for `additional` more elements. If the capacity is insufficient, it doubles or, without
    /// budget for that, grows by 1/8, so that the elements are moved rarely.
    ///
    /// # Errors
    /// Returns [`SoftError::TooLarge`] if the size overflows, or the error of the allocation. The buffer is
    /// unchanged then.
    pub(crate) fn reserve(&mut self, additional: usize) -> Result<(), SoftError> {
        let minimum = self.len.checked_add(additional).ok_or(SoftError::TooLarge)?;
        if minimum <= self.capacity {
            return Ok(());
        }
        let larger = |capacity: usize| capacity.max(CAPACITY_MIN).max(minimum) - self.len;
        let doubled = larger(self.capacity.saturating_mul(2));
        let more = larger(self.capacity.saturating_add(self.capacity / GROWTH_DIVISOR_MAX));
        self.reserve_block(doubled).or_else(|_| self.reserve_block(more))
    }

    /// Appends an element.
    ///
    /// # Panics
    /// Panics if the capacity is used up.
    pub(crate) fn push(&mut self, value: T) {
        assert!(self.len < self.capacity, "the buffer is full");
        let end = self.end();
        // SAFETY: the block has memory for `capacity` elements, and the element at `len` is not initialized.
        unsafe { end.write(value) };
        self.len += 1;
    }

    /// Removes the last element.
    pub(crate) fn pop(&mut self) -> Option<T> {
        self.len = self.len.checked_sub(1)?;
        let end = self.end();
        // SAFETY: the element was initialized, and is outside of the buffer now, so that it is read only once.
        Some(unsafe { end.read() })
    }

    /// Removes the elements from `len` on, and returns those that need a drop.
    pub(crate) fn truncate(&mut self, len: usize) -> Vec<T> {
        let mut removed = Vec::new();
        if std::mem::needs_drop::<T>() {
            while self.len > len {
                removed.extend(self.pop());
            }
        }
        self.len = self.len.min(len);
        removed
    }

    /// Frees memory that the elements do not need, if the budget and the address space suffice for a smaller block
    /// beside the old one.
    pub(crate) fn shrink_to_fit(&mut self) {
        if size_of::<T>() == 0 {
            return; // has no block
        }
        if self.len > 0 {
            let smaller = Self::kind_for(self.len).ok();
            let smaller = smaller.filter(|kind| kind.bytes() / size_of::<T>() < self.capacity);
            // Without memory for both blocks, the old one stays.
            let _ = smaller.map(|kind| self.move_to(kind));
        } else if let Some(block) = self.block.take() {
            self.slots.free(block);
            self.capacity = 0;
        }
        self.slots.release_idle(usize::MAX);
    }

    /// Returns all elements.
    pub(crate) fn as_slice(&self) -> &[T] {
        // SAFETY: the first `len` elements are initialized, and `&self` prevents changes meanwhile.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len) }
    }

    /// Returns all elements.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: the first `len` elements are initialized, and `&mut self` prevents other access meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len) }
    }

    /// Returns the address of the first element, which is dangling without a block.
    fn start(&self) -> NonNull<T> {
        self.block.map_or(NonNull::dangling(), |block| self.slots.address(block).cast())
    }

    /// Returns the address after the last element.
    fn end(&self) -> NonNull<T> {
        // SAFETY: the block has memory for `capacity` elements, and `len` is at most `capacity`.
        unsafe { self.start().add(self.len) }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let elements: *mut [T] = self.as_mut_slice();
        self.len = 0;
        // SAFETY: the elements are initialized and, as `len` is 0, not used later.
        unsafe { elements.drop_in_place() };
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}
