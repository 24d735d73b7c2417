//! Entries of a key and its value, with a hash index and an order of eviction.

use std::{borrow::Borrow, sync::Arc};

use hashbrown::HashTable;

use crate::{
    chain::{Chain, Linked, Links},
    error::{Rejected, SoftError},
    heap::{Block, Pool, Values},
    structure::{EntryPriority, State},
};

/// Number of entry priorities.
const PRIORITIES: usize = EntryPriority::High as usize + 1;
/// Odd multiplier that spreads the bits of a stored hash (golden ratio).
const HASH_MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;
/// The index shrinks when it has room for this multiple of the entries.
const INDEX_SLACK: usize = 4;

/// Hash of a key, as stored with its entry. The index grows without reading the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyHash(u32);

impl KeyHash {
    /// Folds a hash of 64 bits.
    #[expect(clippy::cast_possible_truncation, reason = "the lower half contains bits of both halves")]
    pub(crate) fn new(hash: u64) -> Self {
        Self((hash ^ (hash >> 32)) as u32)
    }

    fn spread(self) -> u64 {
        u64::from(self.0).wrapping_mul(HASH_MULTIPLIER)
    }
}

/// Result of an insertion: the passed key and the replaced value, which the caller drops after it has released
/// the lock, or the rejected entry.
pub(crate) type Insertion<K, V> = Result<Option<(K, V)>, Rejected<(K, V)>>;

#[derive(Debug)]
struct EntryRecord {
    links: Links,
    hash: KeyHash,
    priority: EntryPriority,
}

impl Linked for EntryRecord {
    fn links(&self) -> Links {
        self.links
    }

    fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }
}

/// Entries by key. Entries of a lower priority are evicted first, and entries of the same priority from
/// the front of their chain.
#[derive(Debug)]
pub(crate) struct Entries<K, V> {
    values: Values<(K, V), EntryRecord>,
    index: HashTable<Block>,
    chains: [Chain; PRIORITIES],
}

impl<K: Eq, V> Entries<K, V> {
    /// Creates an empty structure without pages.
    ///
    /// # Errors
    /// Returns [`SoftError::AlignmentTooLarge`] or [`SoftError::TooLarge`].
    pub(crate) fn new(pool: Arc<Pool>) -> Result<Self, SoftError> {
        Ok(Self { values: Values::new(pool)?, index: HashTable::new(), chains: Default::default() })
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
        let is_equal = |block: &Block| {
            self.values.record(*block).hash == hash && self.values.get(*block).0.borrow() == key
        };
        self.index.find(hash.spread(), is_equal).copied()
    }

    /// Returns an entry.
    pub(crate) fn get(&self, block: Block) -> &(K, V) {
        self.values.get(block)
    }

    /// Returns the value of an entry.
    pub(crate) fn value_mut(&mut self, block: Block) -> &mut V {
        &mut self.values.get_mut(block).1
    }

    /// Adds an entry whose key is not present. It is evicted after the other entries of its priority.
    ///
    /// # Errors
    /// Returns the entry if the budget or the address space does not suffice.
    fn insert_new(
        &mut self,
        hash: KeyHash,
        priority: EntryPriority,
        entry: (K, V),
    ) -> Result<(), Rejected<(K, V)>> {
        let record = EntryRecord { links: Links::default(), hash, priority };
        let block = self.values.insert(entry, record)?;
        let values = &self.values;
        self.index.insert_unique(hash.spread(), block, |block| values.record(*block).hash.spread());
        self.chains[priority as usize].push_back(&mut self.values, block);
        Ok(())
    }

    /// Adds an entry, or replaces the value of its key and passes the entry to `replaced`.
    ///
    /// # Errors
    /// See [`insert_new`](Self::insert_new).
    pub(crate) fn insert(
        &mut self,
        hash: KeyHash,
        priority: EntryPriority,
        (key, value): (K, V),
        replaced: impl FnOnce(&mut Self, Block),
    ) -> Insertion<K, V> {
        let Some(block) = self.find(hash, &key) else {
            return self.insert_new(hash, priority, (key, value)).map(|()| None);
        };
        let old = std::mem::replace(self.value_mut(block), value);
        replaced(self, block);
        Ok(Some((key, old)))
    }

    /// Removes an entry.
    pub(crate) fn remove(&mut self, block: Block) -> (K, V) {
        self.unlink(block);
        self.values.remove(block).0
    }

    /// Takes an entry out of the index and its chain.
    fn unlink(&mut self, block: Block) {
        let EntryRecord { hash, priority, .. } = *self.values.record(block);
        if let Ok(entry) = self.index.find_entry(hash.spread(), |other| *other == block) {
            entry.remove();
        }
        self.chains[priority as usize].unlink(&mut self.values, block);
    }

    /// Makes an entry the last one to be evicted of its priority.
    pub(crate) fn touch(&mut self, block: Block) {
        let priority = self.values.record(block).priority;
        self.set_priority(block, priority);
    }

    /// Changes the priority of an entry, and makes it the last one of this priority to be evicted.
    pub(crate) fn set_priority(&mut self, block: Block, priority: EntryPriority) {
        let old = std::mem::replace(&mut self.values.record_mut(block).priority, priority);
        self.chains[old as usize].unlink(&mut self.values, block);
        self.chains[priority as usize].push_back(&mut self.values, block);
    }

    /// Returns the entry that is evicted next, and its priority.
    pub(crate) fn next_evicted(&self) -> Option<(Block, EntryPriority)> {
        let block = self.chains.iter().find_map(Chain::first)?;
        Some((block, self.values.record(block).priority))
    }

    /// Returns all entries in the order of their eviction.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &(K, V)> {
        let blocks = self.chains.iter().flat_map(|chain| chain.iter(&self.values));
        blocks.map(|block| self.values.get(block))
    }

    /// Returns the contents, and becomes empty.
    pub(crate) fn take(&mut self) -> Self {
        Self {
            values: self.values.take(),
            index: std::mem::take(&mut self.index),
            chains: std::mem::take(&mut self.chains),
        }
    }

    fn shrink_index(&mut self) {
        if self.index.capacity() / INDEX_SLACK > self.values.len() {
            let values = &self.values;
            self.index.shrink_to(values.len(), |block| values.record(*block).hash.spread());
        }
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
        self.unlink(block);
        self.values.forget(block);
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
        let (index, chains) = (&mut self.index, &mut self.chains);
        self.values.free_unused(pages, |values, from, to| {
            let EntryRecord { hash, priority, .. } = *values.record(to);
            if let Some(block) = index.find_mut(hash.spread(), |block| *block == from) {
                *block = to;
            }
            chains[priority as usize].relink(values, to);
        });
        self.shrink_index();
    }
}
