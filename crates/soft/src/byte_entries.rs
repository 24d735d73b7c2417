//! Entries of a key and a value of different lengths, with a hash index and an order of eviction.
//!
//! The block of an entry contains the length of the key in two bytes, the key, and the value.

use std::sync::Arc;

use units::limits::SOFT_KEY_BYTES_MAX;

use crate::{
    error::SoftError,
    heap::{Block, ByteValues, Pool},
    index::{EntryRecord, Index, KeyHash},
    structure::{EntryPriority, State},
};

/// Size of the length of a key, in bytes.
const KEY_LENGTH_BYTES: usize = size_of::<u16>();

/// Entry that is not stored yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewEntry<'a> {
    hash: KeyHash,
    priority: EntryPriority,
    key: &'a [u8],
    key_len: [u8; KEY_LENGTH_BYTES],
    /// Parts of the value.
    value: &'a [&'a [u8]],
}

impl<'a> NewEntry<'a> {
    /// Creates an entry whose value is the concatenation of the parts.
    ///
    /// # Errors
    /// Returns [`SoftError::KeyTooLong`].
    pub(crate) fn new(
        hash: KeyHash,
        priority: EntryPriority,
        key: &'a [u8],
        value: &'a [&'a [u8]],
    ) -> Result<Self, SoftError> {
        let too_long = |_| SoftError::KeyTooLong { bytes: key.len(), maximum: SOFT_KEY_BYTES_MAX };
        let key_len = u16::try_from(key.len()).map_err(too_long)?.to_le_bytes();
        Ok(Self { hash, priority, key, key_len, value })
    }

    /// Returns the length of the block of the entry in bytes.
    fn block_bytes(&self) -> usize {
        let head = KEY_LENGTH_BYTES + self.key.len();
        self.value.iter().fold(head, |sum, part| sum.saturating_add(part.len()))
    }
}

/// Entries by key.
#[derive(Debug)]
pub(crate) struct ByteEntries {
    values: ByteValues<EntryRecord>,
    index: Index,
}

impl ByteEntries {
    /// Creates an empty structure without pages.
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Self { values: ByteValues::new(pool), index: Index::default() }
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns the entry of a key.
    #[inline]
    pub(crate) fn find(&self, hash: KeyHash, key: &[u8]) -> Option<Block> {
        self.index.find(&self.values, hash, |block| self.get(block).0 == key)
    }

    /// Returns the key and the value of an entry.
    #[inline]
    pub(crate) fn get(&self, block: Block) -> (&[u8], &[u8]) {
        let (len, bytes) = split_length(self.values.get(block));
        bytes.split_at(len)
    }

    /// Returns the value of an entry.
    pub(crate) fn value_mut(&mut self, block: Block) -> &mut [u8] {
        let (len, _) = split_length(self.values.get(block));
        &mut self.values.get_mut(block)[KEY_LENGTH_BYTES + len..]
    }

    /// Adds an entry, or replaces the value and the priority of its key. The entry is evicted after the other
    /// entries of its priority. Returns whether the key had a value.
    ///
    /// # Errors
    /// Returns [`SoftError::TooLarge`], [`SoftError::OutOfBudget`] or [`SoftError::OutOfAddressSpace`]. The old
    /// value is then unchanged.
    pub(crate) fn insert(&mut self, entry: &NewEntry<'_>) -> Result<bool, SoftError> {
        let old = self.find(entry.hash, entry.key);
        if let Some(block) = old
            && self.overwrite(block, entry.value)
        {
            self.index.set_priority(&mut self.values, block, entry.priority);
            return Ok(true);
        }
        let head = [&entry.key_len[..], entry.key];
        let block = self.values.insert(&head, entry.value, EntryRecord::new(entry.hash, entry.priority))?;
        if let Some(old) = old {
            self.remove(old);
        }
        self.index.add(&mut self.values, block);
        Ok(old.is_some())
    }

    /// Overwrites a value with one of the same length. Returns whether the lengths are equal.
    fn overwrite(&mut self, block: Block, parts: &[&[u8]]) -> bool {
        let mut rest = self.value_mut(block);
        let len = parts.iter().try_fold(0_usize, |sum, part| sum.checked_add(part.len()));
        if len != Some(rest.len()) {
            return false;
        }
        for part in parts {
            let (target, next) = rest.split_at_mut(part.len());
            target.copy_from_slice(part);
            rest = next;
        }
        true
    }

    /// Removes an entry.
    pub(crate) fn remove(&mut self, block: Block) {
        self.index.remove(&mut self.values, block);
        self.values.remove(block);
    }

    /// Makes an entry the last one to be evicted of its priority.
    #[inline]
    pub(crate) fn touch(&mut self, block: Block) {
        self.index.touch(&mut self.values, block);
    }

    /// Returns whether a new entry fits into a free slot.
    pub(crate) fn has_free_slot(&self, entry: &NewEntry<'_>) -> bool {
        self.values.has_free_slot(entry.block_bytes())
    }

    /// Evicts entries of at most the priority of a new entry, until `pages` pages are unused or the new entry fits
    /// into a free slot, at most `maximum` entries. Returns the number of evicted entries.
    pub(crate) fn evict_for(&mut self, entry: &NewEntry<'_>, pages: usize, maximum: usize) -> usize {
        let mut evicted = 0;
        while evicted < maximum
            && self.unused_pages() < pages
            && !self.has_free_slot(entry)
            && let Some((block, priority)) = self.index.next_evicted(&self.values)
            && priority <= entry.priority
        {
            self.remove(block);
            evicted += 1;
        }
        evicted
    }

    /// Returns the entries in the order of their eviction.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.index.iter(&self.values).map(|block| self.get(block))
    }

    /// Returns the number of held pages without an entry.
    pub(crate) fn idle_pages(&self) -> usize {
        self.values.idle_pages()
    }

    /// Returns the entries in the span or run that starts at page `page` of the heap.
    pub(crate) fn blocks_at(&self, page: u32) -> impl Iterator<Item = Block> {
        self.values.blocks_at(page)
    }

    /// Returns the number of pages of the heap.
    pub(crate) fn page_numbers(&self) -> u32 {
        self.values.page_numbers()
    }

    /// Returns the contents, and becomes empty.
    pub(crate) fn take(&mut self) -> Self {
        Self { values: self.values.take(), index: std::mem::take(&mut self.index) }
    }
}

/// Splits a block into the length of the key and the other bytes.
#[inline]
fn split_length(block: &[u8]) -> (usize, &[u8]) {
    let (len, bytes) = block.split_first_chunk().expect("each block begins with the length of its key");
    (u16::from_le_bytes(*len).into(), bytes)
}

impl State for ByteEntries {
    type Evicted = ();

    fn evict(&mut self) -> Option<()> {
        let (block, _) = self.index.next_evicted(&self.values)?;
        self.remove(block);
        Some(())
    }

    fn discard(&mut self) -> Option<()> {
        self.evict()
    }

    fn evictable(&self) -> usize {
        self.len()
    }

    fn held_pages(&self) -> usize {
        self.values.held_pages()
    }

    fn unused_pages(&self) -> usize {
        self.values.unused_pages()
    }

    fn free_unused(&mut self, pages: usize) {
        self.index.free_unused(&mut self.values, pages);
    }
}
