//! Values of one type in the blocks of a heap.

use std::{alloc::Layout, fmt, marker::PhantomData, ptr::NonNull, sync::Arc};

use units::limits::SOFT_MOVED_VALUES_MAX;

use super::{
    classes::BlockKind,
    pool::Pool,
    slots::{Block, Slots},
};
use crate::error::{Rejected, SoftError};

/// Values of type `T`, each with a record `M` in ordinary memory.
///
/// Each allocated block of `slots` contains an initialized `T`. A block that is not allocated is detected,
/// so that a wrong block leads to a panic or to another value of the same type.
pub(crate) struct Values<T, M> {
    slots: Slots<M>,
    kind: BlockKind,
    owned: PhantomData<T>,
}

impl<T, M> Values<T, M> {
    /// Creates a heap without pages.
    ///
    /// # Errors
    /// Returns [`SoftError::AlignmentTooLarge`] or [`SoftError::TooLarge`].
    pub(crate) fn new(pool: Arc<Pool>) -> Result<Self, SoftError> {
        let kind = BlockKind::for_layout(Layout::new::<T>())?;
        Ok(Self { slots: Slots::new(pool), kind, owned: PhantomData })
    }

    /// Returns the number of values.
    pub(crate) fn len(&self) -> usize {
        self.slots.live()
    }

    /// Returns all values, and becomes empty.
    pub(crate) fn take(&mut self) -> Self {
        let empty = Slots::new(self.slots.arena().pool().clone());
        Self { slots: std::mem::replace(&mut self.slots, empty), kind: self.kind, owned: PhantomData }
    }

    /// Stores a value.
    ///
    /// # Errors
    /// Returns the value, and [`SoftError::OutOfBudget`] or [`SoftError::OutOfAddressSpace`].
    #[inline]
    pub(crate) fn insert(&mut self, value: T, record: M) -> Result<Block, Rejected<T>> {
        match self.slots.allocate(self.kind, record) {
            Ok(block) => {
                // SAFETY: the new block has the layout of `T`, and no other reference to it exists.
                unsafe { self.address(block).write(value) };
                Ok(block)
            }
            Err((_, reason)) => Err(Rejected { value, reason }),
        }
    }

    /// Removes a value.
    ///
    /// # Panics
    /// Panics if the block is not allocated, as all methods with a block do.
    pub(crate) fn remove(&mut self, block: Block) -> (T, M) {
        self.slots.record(block);
        // SAFETY: the block is allocated, as checked by `record`, so it contains a value. It is freed below, so
        // that the value is read only once.
        let value = unsafe { self.address(block).read() };
        (value, self.slots.free(block))
    }

    /// Frees the block of a value without dropping the value. Returns the record.
    pub(crate) fn forget(&mut self, block: Block) -> M {
        self.slots.free(block)
    }

    /// Returns a value.
    #[inline]
    pub(crate) fn get(&self, block: Block) -> &T {
        self.slots.record(block);
        // SAFETY: the block is allocated, as checked by `record`. `&self` prevents changes meanwhile.
        unsafe { self.address(block).as_ref() }
    }

    /// Returns a value.
    #[inline]
    pub(crate) fn get_mut(&mut self, block: Block) -> &mut T {
        self.slots.record(block);
        // SAFETY: the block is allocated, as checked by `record`. `&mut self` prevents other access meanwhile.
        unsafe { self.address(block).as_mut() }
    }

    /// Returns the record of a value.
    #[inline]
    pub(crate) fn record(&self, block: Block) -> &M {
        self.slots.record(block)
    }

    /// Returns the record of a value.
    #[inline]
    pub(crate) fn record_mut(&mut self, block: Block) -> &mut M {
        self.slots.record_mut(block)
    }

    /// Returns the number of pages that count against the budget.
    pub(crate) fn held_pages(&self) -> usize {
        self.slots.arena().held_pages()
    }

    /// Returns the number of pages that [`free_unused`](Self::free_unused) can free.
    pub(crate) fn unused_pages(&self) -> usize {
        self.slots.arena().idle_pages() + self.slots.compactable_pages()
    }

    /// Frees up to `pages` pages (or a few more, as a span may have several pages), without removing a
    /// value. Calls `moved` for each moved value with its old and new block. Stops after about
    /// [`SOFT_MOVED_VALUES_MAX`] moved values. Returns the number of freed pages.
    pub(crate) fn free_unused(
        &mut self,
        pages: usize,
        mut moved: impl FnMut(&mut Self, Block, Block),
    ) -> usize {
        let held = self.held_pages();
        let target = held.saturating_sub(pages);
        self.slots.release_idle(pages);
        let mut count = 0;
        while self.held_pages() - self.slots.arena().idle_pages() > target
            && count < SOFT_MOVED_VALUES_MAX
            && let Some(span) = self.slots.start_evacuation()
        {
            while let Some((from, to)) = self.slots.relocate_next(span) {
                moved(self, from, to);
                count += 1;
            }
        }
        // Many pages at once need fewer system calls.
        self.slots.release_idle(self.held_pages().saturating_sub(target));
        held - self.held_pages()
    }

    #[inline]
    fn address(&self, block: Block) -> NonNull<T> {
        self.slots.address(block).cast()
    }
}

impl<T, M> Drop for Values<T, M> {
    fn drop(&mut self) {
        if std::mem::needs_drop::<T>() {
            for block in self.slots.blocks() {
                // SAFETY: the block contains a value, which is not used later: the heap is being dropped.
                unsafe { self.address(block).drop_in_place() };
            }
        }
    }
}

impl<T, M> fmt::Debug for Values<T, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Values").field("len", &self.len()).finish_non_exhaustive()
    }
}
