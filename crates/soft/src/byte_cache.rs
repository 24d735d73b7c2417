//! Cache of byte strings of different lengths that evicts by the priority of entries, and least recently used
//! entries first.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
};

use units::limits::{SOFT_CACHE_REQUEST_INTERVAL, SOFT_EVICTION_BATCH, SOFT_INSERT_EVICTIONS_MIN};

use crate::{
    byte_entries::{ByteEntries, NewEntry},
    error::{InsertError, SoftError},
    heap::{Block, PAGE_BYTES, Pool, PoolStats},
    index::KeyHash,
    structure::{EntryPriority, Priority, State as _, Structure, Usage},
    sync::atomic::{AtomicU32, Ordering},
};

/// Cache of byte strings in soft memory. Keys and values may have different lengths. The key and the value of an
/// entry are in one block, and are evicted together. Entries of a lower [`EntryPriority`] are evicted first, and the
/// least recently used entries of a priority first.
///
/// When the budget does not suffice for a new entry, the cache evicts entries of the same or a lower priority until
/// the new entry fits. It requests more budget once per `units::limits::SOFT_CACHE_REQUEST_INTERVAL` such entries, and
/// for each entry that does not fit after evictions.
/// All methods panic inside an access closure; see [`locks`](crate#locks).
///
/// ```
/// use soft::{Pool, Priority, SoftByteCache};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let cache = SoftByteCache::new(&Pool::new(256)?, Priority(1))?;
/// cache.insert(b"user:1", &[b"Ada", b" ", b"Lovelace"])?;
/// assert_eq!(cache.get(b"user:1", <[u8]>::to_vec), Some(b"Ada Lovelace".to_vec()));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SoftByteCache {
    structure: Structure<ByteEntries>,
    pool: Arc<Pool>,
    hasher: RandomState,
    /// Number of insertions for which the budget did not suffice, since the last one for which it grew.
    rejections: AtomicU32,
}

/// Position of a [scan](SoftByteCache::scan). The default is the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanCursor(u32);

/// Decision of a [scan](SoftByteCache::scan) on an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanDecision {
    /// The entry stays in the cache.
    Keep,
    /// The entry is removed.
    Remove,
}

impl SoftByteCache {
    /// Creates an empty cache.
    ///
    /// # Errors
    /// Returns an error if the pool has too many structures.
    pub fn new(pool: &Arc<Pool>, priority: Priority) -> Result<Self, SoftError> {
        let structure = Structure::new(pool, priority, ByteEntries::new(pool.clone()), None)?;
        Ok(Self { structure, pool: pool.clone(), hasher: RandomState::new(), rejections: AtomicU32::new(0) })
    }

    fn hash(&self, key: &[u8]) -> KeyHash {
        KeyHash::new(self.hasher.hash_one(key))
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.structure.lock().len()
    }

    /// Returns whether the cache has no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the cache has an entry, without a change of the order of eviction.
    pub fn contains_key(&self, key: &[u8]) -> bool {
        self.peek(key, |_| ()).is_some()
    }

    /// Passes the value of a key to a closure. The entry becomes the most recently used one.
    pub fn get<R>(&self, key: &[u8], access: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let hash = self.hash(key);
        let mut entries = self.structure.lock();
        let block = entries.find(hash, key)?;
        entries.touch(block);
        Some(access(entries.get(block).1))
    }

    /// Passes the value of a key to a closure that can change its bytes, but not its length. The entry becomes the
    /// most recently used one.
    pub fn get_mut<R>(&self, key: &[u8], access: impl FnOnce(&mut [u8]) -> R) -> Option<R> {
        let hash = self.hash(key);
        let mut entries = self.structure.lock();
        let block = entries.find(hash, key)?;
        entries.touch(block);
        Some(access(entries.value_mut(block)))
    }

    /// Passes the value of a key to a closure, without a change of the order of eviction.
    pub fn peek<R>(&self, key: &[u8], access: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let hash = self.hash(key);
        let entries = self.structure.lock();
        entries.find(hash, key).map(|block| access(entries.get(block).1))
    }

    /// Inserts an entry of normal priority. See [`insert_with`](Self::insert_with).
    ///
    /// # Errors
    /// See [`insert_with`](Self::insert_with).
    pub fn insert(&self, key: &[u8], value: &[&[u8]]) -> Result<bool, SoftError> {
        self.insert_with(EntryPriority::Normal, key, value)
    }

    /// Inserts an entry, or replaces the value and the priority of the key. The value is the concatenation of the
    /// parts of `value`. The entry becomes the most recently used one. Returns whether the key had a value.
    ///
    /// # Errors
    /// Returns [`SoftError::KeyTooLong`] for a key of more than `units::limits::SOFT_KEY_BYTES_MAX` bytes,
    /// [`SoftError::TooLarge`] for a value that no pool can contain, or [`SoftError::OutOfBudget`] or
    /// [`SoftError::OutOfAddressSpace`] if the entry does not fit after the eviction of all entries of the same or a
    /// lower priority. The old value of the key may be evicted then, but is not changed.
    pub fn insert_with(
        &self,
        priority: EntryPriority,
        key: &[u8],
        value: &[&[u8]],
    ) -> Result<bool, SoftError> {
        let entry = NewEntry::new(self.hash(key), priority, key, value)?;
        match self.try_insert_entry(&entry) {
            Err(error @ SoftError::OutOfBudget { .. }) => self.insert_without_budget(&entry, error),
            Err(error @ SoftError::OutOfAddressSpace { .. }) => self.insert_by_eviction(&entry, error),
            result => result,
        }
    }

    /// Inserts an entry of normal priority, or replaces the value of the key, if the budget and the address space
    /// suffice without a request or an eviction. See [`insert_with`](Self::insert_with).
    ///
    /// # Errors
    /// See [`insert_with`](Self::insert_with). After an error, the cache is unchanged.
    pub fn try_insert(&self, key: &[u8], value: &[&[u8]]) -> Result<bool, SoftError> {
        self.try_insert_entry(&NewEntry::new(self.hash(key), EntryPriority::Normal, key, value)?)
    }

    fn try_insert_entry(&self, entry: &NewEntry<'_>) -> Result<bool, SoftError> {
        let result = self.structure.try_insert((), |entries, ()| insert(entries, entry));
        result.map_err(SoftError::from)
    }

    /// Requests budget, or inserts an entry in place of others. If the entry does not fit in place of others, requests
    /// budget in any case.
    fn insert_without_budget(&self, entry: &NewEntry<'_>, error: SoftError) -> Result<bool, SoftError> {
        if !self.rejections.fetch_add(1, Ordering::Relaxed).is_multiple_of(SOFT_CACHE_REQUEST_INTERVAL) {
            match self.insert_by_eviction(entry, error) {
                Err(SoftError::OutOfBudget { .. }) => {}
                result => return result,
            }
        }
        let result = self.structure.insert_before_eviction((), |entries, ()| insert(entries, entry));
        match result.map_err(SoftError::from) {
            Err(error) => self.insert_by_eviction(entry, error),
            replaced => {
                self.rejections.store(0, Ordering::Relaxed);
                replaced
            }
        }
    }

    /// Evicts entries until there is memory for a new one, and inserts it. `error` is the error of the insertion
    /// without an eviction. Releases the lock after [`SOFT_EVICTION_BATCH`] evictions and one step of compaction.
    fn insert_by_eviction(&self, entry: &NewEntry<'_>, mut error: SoftError) -> Result<bool, SoftError> {
        // Other threads can take the freed memory, or insert further entries. The limit ends the loop.
        let mut evictable = self.len().max(SOFT_INSERT_EVICTIONS_MIN);
        loop {
            let mut entries = self.structure.lock();
            let (held, maximum) = (entries.held_pages(), evictable.min(SOFT_EVICTION_BATCH));
            let Some(evicted) = self.free_memory(&mut entries, entry, error, maximum) else {
                return Err(error);
            };
            // An attempt without an effect counts as an eviction, so that the loop ends.
            let has_no_effect = evicted == 0 && entries.held_pages() == held;
            let result = entries.insert(entry);
            drop(entries);
            self.structure.count_evicted(evicted);
            evictable = evictable.saturating_sub(evicted + usize::from(has_no_effect));
            match result {
                Err(next) => error = next,
                result => return result,
            }
        }
    }

    /// Frees memory for an entry whose insertion failed with `error`: unused pages first, and then entries, at most
    /// `maximum`. Returns the number of evicted entries, or `None` if there is no memory.
    fn free_memory(
        &self,
        entries: &mut ByteEntries,
        entry: &NewEntry<'_>,
        error: SoftError,
        maximum: usize,
    ) -> Option<usize> {
        let held_before = entries.held_pages();
        let evicted = match error {
            SoftError::OutOfBudget { pages } => {
                let PoolStats { budget, held } = self.pool.stats();
                let missing = (held + pages).saturating_sub(budget);
                // Another thread may have freed memory since the error.
                if maximum > 0 && (entries.idle_pages() >= missing || entries.has_free_slot(entry)) {
                    return Some(0);
                }
                if missing > held_before {
                    return None; // an eviction of all entries would not suffice
                }
                let evicted = entries.evict_for(entry, missing, maximum);
                // The insertion uses idle pages. Entries are moved only if the result suffices.
                if entries.idle_pages() < missing && entries.unused_pages() >= missing {
                    entries.free_unused(missing);
                }
                evicted
            }
            SoftError::OutOfAddressSpace { pages }
                if pages <= self.pool.address_range().len() / PAGE_BYTES =>
            {
                // The address range of a chunk is free when all its pages are.
                if entries.unused_pages() > 0 {
                    entries.free_unused(usize::MAX);
                    0
                } else {
                    entries.evict_for(entry, 1, maximum)
                }
            }
            _ => 0,
        };
        (evicted > 0 || entries.held_pages() < held_before).then_some(evicted)
    }

    /// Removes a key. Returns whether it had a value.
    pub fn remove(&self, key: &[u8]) -> bool {
        let hash = self.hash(key);
        let mut entries = self.structure.lock();
        let found = entries.find(hash, key);
        found.into_iter().for_each(|block| entries.remove(block));
        found.is_some()
    }

    /// Passes each entry to a closure, in the order of eviction. Holds the lock meanwhile.
    pub fn for_each(&self, mut access: impl FnMut(&[u8], &[u8])) {
        self.structure.lock().iter().for_each(|(key, value)| access(key, value));
    }

    /// Passes the entries of the next `pages` pages of the heap to a closure, and removes entries by its decision.
    /// The order of eviction does not change. Returns the next position, or `None` at the end. A page has at most
    /// 256 entries. An entry that is inserted or moved by compaction during a scan may be omitted.
    pub fn scan(
        &self,
        cursor: ScanCursor,
        pages: u32,
        mut decide: impl FnMut(&[u8], &[u8]) -> ScanDecision,
    ) -> Option<ScanCursor> {
        let mut entries = self.structure.lock();
        let end = cursor.0.saturating_add(pages);
        for page in cursor.0..end.min(entries.page_numbers()) {
            let blocks: Vec<Block> = entries.blocks_at(page).collect();
            for block in blocks {
                let (key, value) = entries.get(block);
                if decide(key, value) == ScanDecision::Remove {
                    entries.remove(block);
                }
            }
        }
        (end < entries.page_numbers()).then_some(ScanCursor(end))
    }

    /// Passes each entry to a closure, in arbitrary order, and removes those for which it returns `false`. The order
    /// of eviction does not change.
    pub fn retain(&self, mut keep: impl FnMut(&[u8], &[u8]) -> bool) {
        let decide = |key: &[u8], value: &[u8]| match keep(key, value) {
            true => ScanDecision::Keep,
            false => ScanDecision::Remove,
        };
        self.scan(ScanCursor::default(), u32::MAX, decide);
    }

    /// Removes all entries.
    pub fn clear(&self) {
        let cleared = self.structure.lock().take();
        drop(cleared);
    }

    /// Moves entries together, and frees pages and memory that are not needed.
    pub fn shrink_to_fit(&self) {
        self.structure.shrink_to_fit();
    }

    /// Changes the priority of the structure. A running [`Pool::revoke`] uses the old one.
    pub fn set_priority(&self, priority: Priority) {
        self.structure.set_priority(priority);
    }

    /// Evicts entries until `pages` pages are free, and returns the number of freed pages. Frees unused
    /// pages first.
    pub fn reclaim(&self, pages: usize) -> usize {
        self.structure.reclaim(pages)
    }

    /// Returns the use of soft memory.
    pub fn usage(&self) -> Usage {
        self.structure.usage()
    }
}

/// Inserts an entry or replaces a value.
fn insert(entries: &mut ByteEntries, entry: &NewEntry<'_>) -> Result<bool, InsertError<()>> {
    entries.insert(entry).map_err(|reason| InsertError { value: (), reason })
}

#[cfg(test)]
mod tests;
