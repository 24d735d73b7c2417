//! Byte strings that can be pinned: a pinned value is readable without the lock of its structure.
//!
//! Each pin holds a reference of two counters. The counter of the value, the *token*, prevents that the value is
//! removed. The counter of the heap, the *keeper*, prevents that compaction moves values, and owns the memory of a
//! heap that is dropped before its last pin. A pin is therefore dropped without a lock.

use std::{
    fmt,
    ops::Deref,
    ptr::NonNull,
    sync::{Arc, PoisonError},
};

use units::limits::SOFT_PINS_MAX;

use super::{
    bytes::{ByteValues, WithLength},
    detached::DetachedBytes,
    pool::Pool,
    slots::{Block, Compact as _, Records, RecordsMut},
};
use crate::{
    error::{HandleError, SoftError},
    sync::Mutex,
};

/// Record of a value.
#[derive(Debug)]
pub(crate) struct PinRecord<M> {
    /// Has more than one reference while the value is pinned. Exists from the first pin on.
    token: Option<Arc<()>>,
    record: M,
}

impl<M> AsRef<M> for PinRecord<M> {
    fn as_ref(&self) -> &M {
        &self.record
    }
}

impl<M> AsMut<M> for PinRecord<M> {
    fn as_mut(&mut self) -> &mut M {
        &mut self.record
    }
}

/// Counter of the pins of a heap, and owner of the values that remain when the heap is dropped.
#[derive(Default)]
struct Keeper {
    remaining: Mutex<Option<Box<dyn Send>>>,
}

/// Pinned block of [`SoftBlocks`](crate::SoftBlocks). Until it is dropped, the block is not evicted, moved or freed,
/// also if the structure and the pool are dropped.
///
/// The bytes are readable by [`Deref`]. While a block is pinned, no safe method changes it.
pub struct Pinned {
    bytes: NonNull<[u8]>,
    _token: Arc<()>,
    _keeper: Arc<Keeper>,
}

// SAFETY: a pin gives shared access to bytes, and the counters are atomic.
unsafe impl Send for Pinned {}
// SAFETY: as for `Send`.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Returns the address of the block, aligned to 16 bytes. A write to this address is only sound while no
    /// reference to the bytes exists.
    pub fn as_ptr(&self) -> *mut u8 {
        self.bytes.as_ptr().cast()
    }
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `pin` creates the value with initialized bytes. The token and the keeper prevent that they are
        // changed, moved or freed.
        unsafe { self.bytes.as_ref() }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("len", &self.bytes.len()).finish_non_exhaustive()
    }
}

/// Byte strings that can be pinned, each with a record `M` in ordinary memory.
pub(crate) struct PinnableValues<M: Send + 'static> {
    values: ByteValues<PinRecord<M>>,
    keeper: Arc<Keeper>,
}

impl<M: Send + 'static> PinnableValues<M> {
    /// Creates a heap without pages.
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Self { values: ByteValues::new(pool), keeper: Arc::default() }
    }

    /// Returns the number of values.
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// Stores a value of zeros.
    ///
    /// # Errors
    /// As [`ByteValues::insert_zeros`].
    pub(crate) fn insert_zeros(&mut self, bytes: usize, record: M) -> Result<Block, SoftError> {
        self.values.insert_zeros(bytes, PinRecord { token: None, record })
    }

    /// Pins a value.
    ///
    /// # Errors
    /// Returns [`HandleError::TooManyPins`] if the heap has [`SOFT_PINS_MAX`] pins.
    ///
    /// # Panics
    /// Panics if the block is not allocated, as all methods with a block do.
    pub(crate) fn pin(&mut self, block: Block) -> Result<Pinned, HandleError> {
        if Arc::strong_count(&self.keeper) > SOFT_PINS_MAX {
            return Err(HandleError::TooManyPins);
        }
        let token = self.values.record_mut(block).as_mut().token.get_or_insert_default().clone();
        let bytes = self.values.address(block);
        Ok(Pinned { bytes, _token: token, _keeper: self.keeper.clone() })
    }

    /// Returns whether a value is pinned.
    pub(crate) fn is_pinned(&mut self, block: Block) -> bool {
        let token = self.values.record_mut(block).as_mut().token.as_mut();
        // `get_mut` also synchronizes with the end of the access by the last pin.
        token.is_some_and(|token| Arc::get_mut(token).is_none())
    }

    /// Removes a value, and returns its record.
    ///
    /// # Panics
    /// Panics if the value is pinned.
    pub(crate) fn remove(&mut self, block: Block) -> M {
        assert!(!self.is_pinned(block), "a pinned block cannot be removed");
        self.values.remove(block).record
    }

    /// Removes a value, and returns its record and its bytes.
    ///
    /// # Panics
    /// Panics if the value is pinned.
    pub(crate) fn detach(&mut self, block: Block) -> (M, DetachedBytes) {
        assert!(!self.is_pinned(block), "a pinned block cannot be removed");
        let (record, bytes) = self.values.detach(block);
        (record.record, bytes)
    }

    /// Returns a value.
    pub(crate) fn get(&self, block: Block) -> &[u8] {
        self.values.get(block)
    }

    /// Returns a value.
    ///
    /// # Errors
    /// Returns [`HandleError::Pinned`] if the value is pinned.
    pub(crate) fn get_mut(&mut self, block: Block) -> Result<&mut [u8], HandleError> {
        if self.is_pinned(block) { Err(HandleError::Pinned) } else { Ok(self.values.get_mut(block)) }
    }

    /// Returns the length of a value in bytes.
    pub(crate) fn len_of(&self, block: Block) -> usize {
        self.values.address(block).len()
    }

    /// Returns the number of pages that count against the budget.
    pub(crate) fn held_pages(&self) -> usize {
        self.values.held_pages()
    }

    /// Returns the number of pages that [`free_unused`](Self::free_unused) can free.
    pub(crate) fn unused_pages(&self) -> usize {
        // The caller can pin no value meanwhile, so the result is at most too small.
        if Arc::strong_count(&self.keeper) > 1 {
            self.values.idle_pages()
        } else {
            self.values.unused_pages()
        }
    }

    /// Frees up to about `pages` pages without removing a value. Moves values only if no value is pinned, and calls
    /// `moved` for each with its old and new block. Returns the number of freed pages.
    pub(crate) fn free_unused(
        &mut self,
        pages: usize,
        moved: impl FnMut(&mut RecordsMut<'_, WithLength<PinRecord<M>>>, Block, Block),
    ) -> usize {
        match Arc::get_mut(&mut self.keeper) {
            Some(_) => self.values.free_unused(pages, moved),
            None => self.values.release_idle(pages),
        }
    }
}

impl<M: Send + 'static> Records for PinnableValues<M> {
    type Record = M;

    fn record(&self, block: Block) -> &M {
        self.values.record(block).as_ref().as_ref()
    }

    fn record_mut(&mut self, block: Block) -> &mut M {
        self.values.record_mut(block).as_mut().as_mut()
    }
}

impl<M: Send + 'static> Drop for PinnableValues<M> {
    fn drop(&mut self) {
        if Arc::get_mut(&mut self.keeper).is_none() {
            let values = self.values.take();
            *self.keeper.remaining.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(values));
        }
    }
}

impl<M: Send + 'static> fmt::Debug for PinnableValues<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnableValues").field("len", &self.len()).finish_non_exhaustive()
    }
}
