//! Cache that evicts by the priority of entries, and least recently used entries first.

use std::{
    borrow::Borrow,
    hash::{BuildHasher, Hash, RandomState},
    sync::Arc,
};

use units::limits::{SOFT_CACHE_REQUEST_INTERVAL, SOFT_EVICTION_BATCH};

use crate::{
    entries::{Entries, Insertion},
    error::{InsertError, SoftError},
    heap::Pool,
    index::KeyHash,
    keyed::Keyed,
    structure::{EntryPriority, Priority, Usage},
    sync::atomic::{AtomicU32, Ordering},
};

/// Cache in soft memory. Entries of a lower [`EntryPriority`] are evicted first, and the least recently
/// used entries of a priority first. A key and its value are evicted together.
///
/// When the budget does not suffice for a new entry, the cache evicts an entry of the same or a lower
/// priority. It requests more budget once per `units::limits::SOFT_CACHE_REQUEST_INTERVAL` such entries.
/// All methods panic inside an access closure; see [`locks`](crate#locks).
#[derive(Debug)]
pub struct SoftCache<K: Eq + Send + 'static, V: Send + 'static, S = RandomState> {
    keyed: Keyed<K, V, S>,
    /// Number of insertions for which the budget did not suffice, since the last one for which it grew.
    rejections: AtomicU32,
}

impl<K: Eq + Hash + Send + 'static, V: Send + 'static> SoftCache<K, V> {
    /// Creates an empty cache. Evicted entries are dropped.
    ///
    /// # Errors
    /// Returns an error if an entry is too large, or if the pool has too many structures.
    pub fn new(pool: &Arc<Pool>, priority: Priority) -> Result<Self, SoftError> {
        Self::with_hasher(pool, priority, RandomState::new())
    }

    /// Creates an empty cache. Each evicted entry is passed to the callback, which runs without a lock.
    ///
    /// # Errors
    /// Returns an error if an entry is too large, or if the pool has too many structures.
    pub fn with_callback(
        pool: &Arc<Pool>,
        priority: Priority,
        callback: impl Fn(K, V) + Send + Sync + 'static,
    ) -> Result<Self, SoftError> {
        Self::with_callback_and_hasher(pool, priority, callback, RandomState::new())
    }
}

impl<K: Eq + Hash + Send + 'static, V: Send + 'static, S: BuildHasher> SoftCache<K, V, S> {
    /// Creates an empty cache with a hasher. Evicted entries are dropped.
    ///
    /// # Errors
    /// Returns an error if an entry is too large, or if the pool has too many structures.
    pub fn with_hasher(pool: &Arc<Pool>, priority: Priority, hasher: S) -> Result<Self, SoftError> {
        Keyed::new(pool, priority, hasher).map(Self::from_keyed)
    }

    /// Creates an empty cache with a callback, as [`with_callback`](SoftCache::with_callback), and a hasher.
    ///
    /// # Errors
    /// Returns an error if an entry is too large, or if the pool has too many structures.
    pub fn with_callback_and_hasher(
        pool: &Arc<Pool>,
        priority: Priority,
        callback: impl Fn(K, V) + Send + Sync + 'static,
        hasher: S,
    ) -> Result<Self, SoftError> {
        Keyed::with_callback(pool, priority, callback, hasher).map(Self::from_keyed)
    }

    fn from_keyed(keyed: Keyed<K, V, S>) -> Self {
        Self { keyed, rejections: AtomicU32::new(0) }
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.keyed.len()
    }

    /// Returns whether the cache has no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the cache contains a key, without a change of the order of eviction.
    pub fn contains_key<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.peek(key, |_| ()).is_some()
    }

    /// Passes the value of a key to a closure. The entry becomes the most recently used one.
    pub fn get<Q: Eq + Hash + ?Sized, R>(&self, key: &Q, access: impl FnOnce(&V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
    {
        self.get_mut(key, |value| access(value))
    }

    /// Passes the value of a key to a closure that can change it. The entry becomes the most recently
    /// used one.
    pub fn get_mut<Q: Eq + Hash + ?Sized, R>(&self, key: &Q, access: impl FnOnce(&mut V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
    {
        let hash = self.keyed.hash(key);
        let mut entries = self.keyed.structure.lock();
        let block = entries.find(hash, key)?;
        entries.touch(block);
        Some(access(entries.value_mut(block)))
    }

    /// Passes the value of a key to a closure, without a change of the order of eviction.
    pub fn peek<Q: Eq + Hash + ?Sized, R>(&self, key: &Q, access: impl FnOnce(&V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
    {
        self.keyed.peek(key, access)
    }

    /// Inserts an entry of normal priority. See [`insert_with`](Self::insert_with).
    ///
    /// # Errors
    /// See [`insert_with`](Self::insert_with).
    pub fn insert(&self, key: K, value: V) -> Result<Option<V>, InsertError<(K, V)>> {
        self.insert_with(EntryPriority::Normal, key, value)
    }

    /// Inserts an entry, or replaces the value and the priority of the key. Returns the replaced value.
    /// The entry becomes the most recently used one.
    ///
    /// # Errors
    /// Returns the entry if the address space does not suffice, or if the budget does not suffice and the
    /// cache has no entry of the same or a lower priority.
    pub fn insert_with(
        &self,
        priority: EntryPriority,
        key: K,
        value: V,
    ) -> Result<Option<V>, InsertError<(K, V)>> {
        let hash = self.keyed.hash(&key);
        let try_insert = |entries: &mut _, entry| insert(entries, hash, priority, entry);
        let mut result = self.keyed.structure.try_insert((key, value), try_insert);
        if let Err(InsertError { value: entry, reason: SoftError::OutOfBudget { .. } }) = result {
            result = self.insert_without_budget(hash, priority, entry);
        }
        result.map(|replaced| replaced.map(|(_, old)| old))
    }

    /// Requests budget, or inserts an entry in place of another one.
    fn insert_without_budget(
        &self,
        hash: KeyHash,
        priority: EntryPriority,
        entry: (K, V),
    ) -> Insertion<K, V> {
        if !self.rejections.fetch_add(1, Ordering::Relaxed).is_multiple_of(SOFT_CACHE_REQUEST_INTERVAL) {
            return self.insert_by_eviction(hash, priority, entry);
        }
        match self
            .keyed
            .structure
            .insert_before_eviction(entry, |entries, entry| insert(entries, hash, priority, entry))
        {
            Err(InsertError { value: entry, reason: SoftError::OutOfBudget { .. } }) => {
                self.insert_by_eviction(hash, priority, entry)
            }
            result => {
                self.rejections.store(0, Ordering::Relaxed);
                result
            }
        }
    }

    /// Evicts entries until there is memory for a new one, and inserts it. One eviction suffices, unless another
    /// thread takes the freed pages.
    fn insert_by_eviction(
        &self,
        hash: KeyHash,
        priority: EntryPriority,
        mut entry: (K, V),
    ) -> Insertion<K, V> {
        let mut evicted = self.keyed.structure.evicted(); // delivered after the lock is released
        let mut entries = self.keyed.structure.lock();
        loop {
            let next = entries.next_evicted().filter(|(_, next_priority)| *next_priority <= priority);
            let can_evict = next.is_some() && evicted.len() < SOFT_EVICTION_BATCH;
            if let Some((block, _)) = next.filter(|_| can_evict) {
                evicted.push(entries.remove(block));
            }
            entry = match insert(&mut entries, hash, priority, entry) {
                Err(InsertError { value, reason: SoftError::OutOfBudget { .. } }) if can_evict => value,
                result => return result,
            };
        }
    }

    /// Inserts entries as [`insert`](Self::insert) until one is rejected, and drops the replaced values. The iterator
    /// runs without the lock.
    ///
    /// # Errors
    /// Returns the rejected entry. The entries before it are inserted. To continue later, pass a mutable reference to
    /// the iterator.
    pub fn try_extend(&self, entries: impl IntoIterator<Item = (K, V)>) -> Result<(), InsertError<(K, V)>> {
        entries.into_iter().try_for_each(|(key, value)| self.insert(key, value).map(drop))
    }

    /// Removes a key, and returns its value.
    pub fn remove<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.keyed.remove(key)
    }

    /// Passes each entry to a closure, in the order of eviction.
    pub fn for_each(&self, access: impl FnMut(&K, &V)) {
        self.keyed.for_each(access);
    }

    /// Passes each entry to a closure, in arbitrary order, and removes those for which it returns `false`. The
    /// removed entries are dropped after the lock is released. The order of eviction does not change. A panic of the
    /// closure ends the operation.
    pub fn retain(&self, keep: impl FnMut(&K, &mut V) -> bool) {
        self.keyed.retain(keep);
    }

    /// Removes and drops all entries.
    pub fn clear(&self) {
        self.keyed.clear();
    }

    /// Moves entries together, and frees pages and memory that are not needed.
    pub fn shrink_to_fit(&self) {
        self.keyed.structure.shrink_to_fit();
    }

    /// Changes the priority of the structure. A running [`Pool::revoke`] uses the old one.
    pub fn set_priority(&self, priority: Priority) {
        self.keyed.structure.set_priority(priority);
    }

    /// Evicts entries until `pages` pages are free, and returns the number of freed pages. Frees unused
    /// pages first.
    pub fn reclaim(&self, pages: usize) -> usize {
        self.keyed.structure.reclaim(pages)
    }

    /// Returns the use of soft memory.
    pub fn usage(&self) -> Usage {
        self.keyed.structure.usage()
    }
}

/// Inserts an entry or replaces a value.
fn insert<K: Eq, V>(
    entries: &mut Entries<K, V>,
    hash: KeyHash,
    priority: EntryPriority,
    entry: (K, V),
) -> Insertion<K, V> {
    entries.insert(hash, priority, entry, |entries, block| entries.set_priority(block, priority))
}

#[cfg(test)]
mod tests;
