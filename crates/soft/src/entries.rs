//! Entries of a key and its value, with a hash index and an order of eviction.

use std::{borrow::Borrow, sync::Arc};

use crate::{
    error::{InsertError, SoftError},
    heap::{Block, Pool, Values},
    index::{EntryRecord, Index, KeyHash},
    structure::{EntryPriority, State},
};

/// Result of an insertion: the passed key and the replaced value, which the caller drops after it has released
/// the lock, or the rejected entry.
pub(crate) type Insertion<K, V> = Result<Option<(K, V)>, InsertError<(K, V)>>;

/// Entries by key.
#[derive(Debug)]
pub(crate) struct Entries<K, V> {
    values: Values<(K, V), EntryRecord>,
    index: Index,
}

impl<K: Eq, V> Entries<K, V> {
    /// Creates an empty structure without pages.
    ///
    /// # Errors
    /// Returns [`SoftError::AlignmentTooLarge`] or [`SoftError::TooLarge`].
    pub(crate) fn new(pool: Arc<Pool>) -> Result<Self, SoftError> {
        Ok(Self { values: Values::new(pool)?, index: Index::default() })
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns the entry of a key.
    #[inline]
    pub(crate) fn find<Q: Eq + ?Sized>(&self, hash: KeyHash, key: &Q) -> Option<Block>
    where
        K: Borrow<Q>,
    {
        self.index.find(&self.values, hash, |block| self.values.get(block).0.borrow() == key)
    }

    /// Returns an entry.
    pub(crate) fn get(&self, block: Block) -> &(K, V) {
        self.values.get(block)
    }

    /// Returns the value of an entry.
    pub(crate) fn value_mut(&mut self, block: Block) -> &mut V {
        &mut self.values.get_mut(block).1
    }

    /// Adds an entry, or replaces the value of its key and passes the entry to `replaced`. A new entry is evicted
    /// after the other entries of its priority.
    ///
    /// # Errors
    /// Returns the entry if the budget or the address space does not suffice.
    pub(crate) fn insert(
        &mut self,
        hash: KeyHash,
        priority: EntryPriority,
        (key, value): (K, V),
        replaced: impl FnOnce(&mut Self, Block),
    ) -> Insertion<K, V> {
        let Some(block) = self.find(hash, &key) else {
            let block = self.values.insert((key, value), EntryRecord::new(hash, priority))?;
            self.index.add(&mut self.values, block);
            return Ok(None);
        };
        let old = std::mem::replace(self.value_mut(block), value);
        replaced(self, block);
        Ok(Some((key, old)))
    }

    /// Removes an entry.
    pub(crate) fn remove(&mut self, block: Block) -> (K, V) {
        self.index.remove(&mut self.values, block);
        self.values.remove(block).0
    }

    /// Removes an entry without dropping it.
    fn forget(&mut self, block: Block) {
        self.index.remove(&mut self.values, block);
        self.values.forget(block);
    }

    /// Removes the entries for which `keep` returns `false`. Adds those that need a drop to `removed`.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&K, &mut V) -> bool, removed: &mut Vec<(K, V)>) {
        for page in 0..self.values.page_numbers() {
            let blocks: Vec<Block> = self.values.blocks_at(page).collect();
            for block in blocks {
                let (key, value) = self.values.get_mut(block);
                if keep(key, value) {
                    continue;
                }
                if std::mem::needs_drop::<(K, V)>() {
                    removed.push(self.remove(block));
                } else {
                    self.forget(block);
                }
            }
        }
    }

    /// Makes an entry the last one to be evicted of its priority.
    pub(crate) fn touch(&mut self, block: Block) {
        self.index.touch(&mut self.values, block);
    }

    /// Changes the priority of an entry, and makes it the last one of this priority to be evicted.
    pub(crate) fn set_priority(&mut self, block: Block, priority: EntryPriority) {
        self.index.set_priority(&mut self.values, block, priority);
    }

    /// Returns the entry that is evicted next, and its priority.
    pub(crate) fn next_evicted(&self) -> Option<(Block, EntryPriority)> {
        self.index.next_evicted(&self.values)
    }

    /// Returns all entries in the order of their eviction.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &(K, V)> {
        self.index.iter(&self.values).map(|block| self.values.get(block))
    }

    /// Returns the contents, and becomes empty.
    pub(crate) fn take(&mut self) -> Self {
        Self { values: self.values.take(), index: std::mem::take(&mut self.index) }
    }
}

impl<K: Eq + Send + 'static, V: Send + 'static> State for Entries<K, V> {
    type Evicted = (K, V);

    fn evict(&mut self) -> Option<(K, V)> {
        let (block, _) = self.next_evicted()?;
        Some(self.remove(block))
    }

    fn discard(&mut self) -> Option<()> {
        let (block, _) = self.next_evicted()?;
        self.forget(block);
        Some(())
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
