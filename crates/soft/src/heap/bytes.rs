//! Byte strings of different lengths in the blocks of a heap.

use std::{alloc::Layout, fmt, ptr::NonNull, slice, sync::Arc};

use super::{
    classes::BlockKind,
    detached::{ALIGN, AlignedCopy, DetachedBytes, LargeBytes},
    pool::Pool,
    slots::{Block, Compact, Records, RecordsMut, Slots},
};
use crate::error::SoftError;

/// Record of a value in ordinary memory.
#[derive(Debug)]
pub(crate) struct WithLength<M> {
    /// Length of the value in bytes.
    len: u32,
    record: M,
}

impl<M> AsRef<M> for WithLength<M> {
    fn as_ref(&self) -> &M {
        &self.record
    }
}

impl<M> AsMut<M> for WithLength<M> {
    fn as_mut(&mut self) -> &mut M {
        &mut self.record
    }
}

/// Byte strings, each with a record `M` in ordinary memory.
///
/// All bytes of an allocated block of `slots` up to its length are initialized.
pub(crate) struct ByteValues<M> {
    slots: Slots<WithLength<M>>,
}

impl<M> ByteValues<M> {
    /// Creates a heap without pages.
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Self { slots: Slots::new(pool) }
    }

    /// Returns the number of values.
    pub(crate) fn len(&self) -> usize {
        self.slots.live()
    }

    /// Returns all values, and becomes empty.
    pub(crate) fn take(&mut self) -> Self {
        let empty = Slots::new(self.slots.arena().pool().clone());
        Self { slots: std::mem::replace(&mut self.slots, empty) }
    }

    /// Stores the concatenation of the parts of `head` and `tail`.
    ///
    /// # Errors
    /// Returns [`SoftError::TooLarge`], [`SoftError::OutOfBudget`] or [`SoftError::OutOfAddressSpace`].
    pub(crate) fn insert(&mut self, head: &[&[u8]], tail: &[&[u8]], record: M) -> Result<Block, SoftError> {
        let parts = || head.iter().chain(tail);
        let bytes = parts().try_fold(0_usize, |sum, part| sum.checked_add(part.len()));
        let block = self.allocate(bytes.ok_or(SoftError::TooLarge)?, record)?;
        let mut to = self.slots.address(block);
        for part in parts() {
            // SAFETY: the new block has memory for all parts, and no reference to it exists.
            unsafe { to.copy_from_nonoverlapping(NonNull::from(*part).cast(), part.len()) };
            // SAFETY: after the last part, the result is at most the end of the block.
            to = unsafe { to.add(part.len()) };
        }
        Ok(block)
    }

    /// Stores a value of zeros.
    ///
    /// # Errors
    /// As [`insert`](Self::insert).
    pub(crate) fn insert_zeros(&mut self, bytes: usize, record: M) -> Result<Block, SoftError> {
        let block = self.allocate(bytes, record)?;
        // SAFETY: the new block has memory for `bytes` bytes, and no reference to it exists.
        unsafe { self.slots.address(block).write_bytes(0, bytes) };
        Ok(block)
    }

    /// Allocates a block whose bytes are not initialized. The caller initializes them.
    fn allocate(&mut self, bytes: usize, record: M) -> Result<Block, SoftError> {
        let len = u32::try_from(bytes).map_err(|_| SoftError::TooLarge)?;
        let kind = kind_of(bytes)?;
        self.slots.allocate(kind, WithLength { len, record }).map_err(|(_, error)| error)
    }

    /// Returns whether a value of this length can be stored without further pages.
    pub(crate) fn has_free_slot(&self, bytes: usize) -> bool {
        kind_of(bytes).is_ok_and(|kind| self.slots.has_free_slot(kind))
    }

    /// Removes a value, and returns its record.
    ///
    /// # Panics
    /// Panics if the block is not allocated, as all methods with a block do.
    pub(crate) fn remove(&mut self, block: Block) -> M {
        self.slots.free(block).record
    }

    /// Removes a value, and returns its record and its bytes. The bytes of a value in slots are copied, and the
    /// pages of a larger value are freed when the result is dropped.
    pub(crate) fn detach(&mut self, block: Block) -> (M, DetachedBytes) {
        let len = self.slots.record(block).len as usize;
        if !self.slots.is_run(block) {
            let copy = AlignedCopy::new(self.get(block));
            return (self.remove(block), DetachedBytes::Copy(copy));
        }
        let (record, run) = self.slots.detach_run(block);
        // SAFETY: the first `len` bytes of an allocated block are initialized.
        let bytes = unsafe { LargeBytes::new(run, len) };
        (record.record, DetachedBytes::Run(bytes))
    }

    /// Returns the address and length of a value, without a reference to its bytes.
    pub(super) fn address(&self, block: Block) -> NonNull<[u8]> {
        let len = self.slots.record(block).len as usize;
        NonNull::slice_from_raw_parts(self.slots.address(block), len)
    }

    /// Returns a value.
    #[inline]
    pub(crate) fn get(&self, block: Block) -> &[u8] {
        let len = self.slots.record(block).len as usize;
        // SAFETY: the block is allocated, as checked by `record`, and `len` bytes of it are initialized. `&self`
        // prevents changes meanwhile.
        unsafe { slice::from_raw_parts(self.slots.address(block).as_ptr(), len) }
    }

    /// Returns a value.
    #[inline]
    pub(crate) fn get_mut(&mut self, block: Block) -> &mut [u8] {
        let len = self.slots.record(block).len as usize;
        // SAFETY: as in `get`. `&mut self` prevents other access meanwhile.
        unsafe { slice::from_raw_parts_mut(self.slots.address(block).as_ptr(), len) }
    }

    /// Returns the values of the span or run that starts at page `page` of the heap. Returns none for other pages.
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

    /// Returns the number of held pages without a value.
    pub(crate) fn idle_pages(&self) -> usize {
        self.slots.arena().idle_pages()
    }

    /// Returns idle pages to the kernel, without moving a value. Returns their number.
    pub(crate) fn release_idle(&mut self, pages: usize) -> usize {
        self.slots.release_idle(pages)
    }

    /// Returns the number of pages that [`free_unused`](Self::free_unused) can free.
    pub(crate) fn unused_pages(&self) -> usize {
        self.slots.unused_pages()
    }
}

/// Returns the smallest kind of block for a value of this length.
fn kind_of(bytes: usize) -> Result<BlockKind, SoftError> {
    BlockKind::for_layout(Layout::from_size_align(bytes, ALIGN).map_err(|_| SoftError::TooLarge)?)
}

impl<M> Records for ByteValues<M> {
    type Record = WithLength<M>;

    #[inline]
    fn record(&self, block: Block) -> &WithLength<M> {
        self.slots.record(block)
    }

    #[inline]
    fn record_mut(&mut self, block: Block) -> &mut WithLength<M> {
        self.slots.record_mut(block)
    }
}

impl<M> Compact for ByteValues<M> {
    fn free_unused(
        &mut self,
        pages: usize,
        moved: impl FnMut(&mut RecordsMut<'_, WithLength<M>>, Block, Block),
    ) -> usize {
        self.slots.free_unused(pages, moved)
    }
}

impl<M> fmt::Debug for ByteValues<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ByteValues").field("len", &self.len()).finish_non_exhaustive()
    }
}
