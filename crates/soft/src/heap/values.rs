//! Values of one type in the blocks of a heap.

use std::{alloc::Layout, fmt, marker::PhantomData, ptr::NonNull, sync::Arc};

use super::{
    classes::BlockKind,
    pool::Pool,
    slots::{Block, Compact, Records, RecordsMut, Slots},
};
use crate::error::{InsertError, SoftError};

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
    pub(crate) fn insert(&mut self, value: T, record: M) -> Result<Block, InsertError<T>> {
        match self.slots.allocate(self.kind, record) {
            Ok(block) => {
                // SAFETY: the new block has the layout of `T`, and no other reference to it exists.
                unsafe { self.address(block).write(value) };
                Ok(block)
            }
            Err((_, reason)) => Err(InsertError { value, reason }),
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

    /// Returns the values in the span or run that starts at page `page` of the heap. Returns none for other pages.
    pub(crate) fn blocks_at(&self, page: u32) -> impl Iterator<Item = Block> {
        self.slots.blocks_at(page)
    }

    /// Returns the number of pages of the heap, including pages that it does not hold.
    pub(crate) fn page_numbers(&self) -> u32 {
        self.slots.page_numbers()
    }

    /// Returns the number of pages that count against the budget.
    pub(crate) fn held_pages(&self) -> usize {
        self.slots.arena().held_pages()
    }

    /// Returns the number of pages that [`free_unused`](Self::free_unused) can free.
    pub(crate) fn unused_pages(&self) -> usize {
        self.slots.unused_pages()
    }

    #[inline]
    fn address(&self, block: Block) -> NonNull<T> {
        self.slots.address(block).cast()
    }
}

impl<T, M> Records for Values<T, M> {
    type Record = M;

    #[inline]
    fn record(&self, block: Block) -> &M {
        self.slots.record(block)
    }

    #[inline]
    fn record_mut(&mut self, block: Block) -> &mut M {
        self.slots.record_mut(block)
    }
}

impl<T, M> Compact for Values<T, M> {
    fn free_unused(
        &mut self,
        pages: usize,
        moved: impl FnMut(&mut RecordsMut<'_, M>, Block, Block),
    ) -> usize {
        self.slots.free_unused(pages, moved)
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
