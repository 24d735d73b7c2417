//! Hash index and order of eviction of entries.

use hashbrown::HashTable;

use crate::{
    chain::{Chain, Linked, Links},
    heap::{Block, Compact, Records},
    structure::EntryPriority,
};

/// Number of entry priorities.
const PRIORITIES: usize = EntryPriority::High as usize + 1;
/// Odd multiplier that spreads the bits of a stored hash (golden ratio).
const HASH_MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;
/// The index shrinks when it has room for this multiple of the entries.
const CAPACITY_SLACK: usize = 4;

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

/// Record of an entry, in ordinary memory.
#[derive(Debug)]
pub(crate) struct EntryRecord {
    links: Links,
    hash: KeyHash,
    priority: EntryPriority,
}

impl EntryRecord {
    /// Creates the record of an entry that is not in an index.
    pub(crate) fn new(hash: KeyHash, priority: EntryPriority) -> Self {
        Self { links: Links::default(), hash, priority }
    }
}

impl Linked for EntryRecord {
    fn links(&self) -> Links {
        self.links
    }

    fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }
}

impl AsRef<Self> for EntryRecord {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl AsMut<Self> for EntryRecord {
    fn as_mut(&mut self) -> &mut Self {
        self
    }
}

/// Heap whose records contain an [`EntryRecord`].
pub(crate) trait EntryHeap: Records<Record: Linked + AsRef<EntryRecord> + AsMut<EntryRecord>> {}

impl<R: Records<Record: Linked + AsRef<EntryRecord> + AsMut<EntryRecord>>> EntryHeap for R {}

/// Index of the entries of a heap by hash and by order of eviction. Entries of a lower priority are evicted first,
/// and entries of the same priority from the front of their chain.
#[derive(Debug, Default)]
pub(crate) struct Index {
    table: HashTable<Block>,
    chains: [Chain; PRIORITIES],
}

impl Index {
    /// Returns the entry with this hash for which `is_equal` is true.
    #[inline]
    pub(crate) fn find<H: EntryHeap>(
        &self,
        heap: &H,
        hash: KeyHash,
        is_equal: impl Fn(Block) -> bool,
    ) -> Option<Block> {
        let has_key = |block: &Block| heap.record(*block).as_ref().hash == hash && is_equal(*block);
        self.table.find(hash.spread(), has_key).copied()
    }

    /// Adds an entry. It is evicted after the other entries of its priority.
    pub(crate) fn add<H: EntryHeap>(&mut self, heap: &mut H, block: Block) {
        let EntryRecord { hash, priority, .. } = *heap.record(block).as_ref();
        let hash_of = |block: &Block| heap.record(*block).as_ref().hash.spread();
        self.table.insert_unique(hash.spread(), block, hash_of);
        self.chains[priority as usize].push_back(heap, block);
    }

    /// Removes an entry. Its block stays allocated.
    pub(crate) fn remove<H: EntryHeap>(&mut self, heap: &mut H, block: Block) {
        let EntryRecord { hash, priority, .. } = *heap.record(block).as_ref();
        if let Ok(entry) = self.table.find_entry(hash.spread(), |other| *other == block) {
            entry.remove();
        }
        self.chains[priority as usize].unlink(heap, block);
    }

    /// Makes an entry the last one to be evicted of its priority.
    pub(crate) fn touch<H: EntryHeap>(&mut self, heap: &mut H, block: Block) {
        let priority = heap.record(block).as_ref().priority;
        self.set_priority(heap, block, priority);
    }

    /// Changes the priority of an entry, and makes it the last one of this priority to be evicted.
    pub(crate) fn set_priority<H: EntryHeap>(&mut self, heap: &mut H, block: Block, priority: EntryPriority) {
        let old = std::mem::replace(&mut heap.record_mut(block).as_mut().priority, priority);
        self.chains[old as usize].unlink(heap, block);
        self.chains[priority as usize].push_back(heap, block);
    }

    /// Returns the entry that is evicted next, and its priority.
    pub(crate) fn next_evicted<H: EntryHeap>(&self, heap: &H) -> Option<(Block, EntryPriority)> {
        let block = self.chains.iter().find_map(Chain::first)?;
        Some((block, heap.record(block).as_ref().priority))
    }

    /// Returns all entries in the order of their eviction.
    pub(crate) fn iter<H: EntryHeap>(&self, heap: &H) -> impl Iterator<Item = Block> {
        self.chains.iter().flat_map(|chain| chain.iter(heap))
    }

    /// Frees up to about `pages` pages of a heap without removing an entry, and memory of the index if it has room for
    /// many more entries than it has.
    pub(crate) fn free_unused<H: EntryHeap + Compact>(&mut self, heap: &mut H, pages: usize) {
        heap.free_unused(pages, |records, from, to| self.update_moved(records, from, to));
        if self.table.capacity() / CAPACITY_SLACK > self.table.len() {
            let hash_of = |block: &Block| heap.record(*block).as_ref().hash.spread();
            self.table.shrink_to(self.table.len(), hash_of);
        }
    }

    /// Updates the index after a compaction moved an entry to another block.
    fn update_moved<H: EntryHeap>(&mut self, heap: &mut H, from: Block, to: Block) {
        let EntryRecord { hash, priority, .. } = *heap.record(to).as_ref();
        if let Some(block) = self.table.find_mut(hash.spread(), |block| *block == from) {
            *block = to;
        }
        self.chains[priority as usize].relink(heap, to);
    }
}
