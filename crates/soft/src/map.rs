//! Hash map whose oldest entries are evicted first.

use std::{
    borrow::Borrow,
    hash::{BuildHasher, Hash, RandomState},
    sync::Arc,
};

use crate::{
    error::{InsertError, SoftError},
    heap::Pool,
    keyed::Keyed,
    structure::{EntryPriority, Priority, Usage},
};

/// Hash map in soft memory. A reclamation evicts entries in the order of their insertion. A key and its
/// value are evicted together.
///
/// All methods panic inside an access closure; see [`locks`](crate#locks).
#[derive(Debug)]
pub struct SoftHashMap<K: Eq + Send + 'static, V: Send + 'static, S = RandomState> {
    keyed: Keyed<K, V, S>,
}

impl<K: Eq + Hash + Send + 'static, V: Send + 'static> SoftHashMap<K, V> {
    /// Creates an empty map. Evicted entries are dropped.
    ///
    /// # Errors
    /// Returns an error if an entry is too large, or if the pool has too many structures.
    pub fn new(pool: &Arc<Pool>, priority: Priority) -> Result<Self, SoftError> {
        Self::with_hasher(pool, priority, RandomState::new())
    }

    /// Creates an empty map. Each evicted entry is passed to the callback, which runs without a lock.
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

impl<K: Eq + Hash + Send + 'static, V: Send + 'static, S: BuildHasher> SoftHashMap<K, V, S> {
    /// Creates an empty map with a hasher. Evicted entries are dropped.
    ///
    /// # Errors
    /// Returns an error if an entry is too large, or if the pool has too many structures.
    pub fn with_hasher(pool: &Arc<Pool>, priority: Priority, hasher: S) -> Result<Self, SoftError> {
        Keyed::new(pool, priority, hasher).map(|keyed| Self { keyed })
    }

    /// Creates an empty map with a callback, as [`with_callback`](SoftHashMap::with_callback), and a hasher.
    ///
    /// # Errors
    /// Returns an error if an entry is too large, or if the pool has too many structures.
    pub fn with_callback_and_hasher(
        pool: &Arc<Pool>,
        priority: Priority,
        callback: impl Fn(K, V) + Send + Sync + 'static,
        hasher: S,
    ) -> Result<Self, SoftError> {
        Keyed::with_callback(pool, priority, callback, hasher).map(|keyed| Self { keyed })
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.keyed.len()
    }

    /// Returns whether the map has no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the map contains a key.
    pub fn contains_key<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.get(key, |_| ()).is_some()
    }

    /// Passes the value of a key to a closure.
    pub fn get<Q: Eq + Hash + ?Sized, R>(&self, key: &Q, access: impl FnOnce(&V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
    {
        self.keyed.peek(key, access)
    }

    /// Passes the value of a key to a closure that can change it.
    pub fn get_mut<Q: Eq + Hash + ?Sized, R>(&self, key: &Q, access: impl FnOnce(&mut V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
    {
        let hash = self.keyed.hash(key);
        let mut entries = self.keyed.structure.lock();
        entries.find(hash, key).map(|block| access(entries.value_mut(block)))
    }

    /// Inserts an entry, or replaces the value of the key. Returns the replaced value. A replaced entry
    /// keeps its place in the order of eviction.
    ///
    /// # Errors
    /// Returns the entry if the budget or the address space does not suffice.
    pub fn insert(&self, key: K, value: V) -> Result<Option<V>, InsertError<(K, V)>> {
        let hash = self.keyed.hash(&key);
        let replaced = self.keyed.structure.insert((key, value), |entries, entry| {
            entries.insert(hash, EntryPriority::Normal, entry, |_, _| {})
        });
        replaced.map(|replaced| replaced.map(|(_, old)| old))
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

    /// Passes each entry to a closure, from the oldest to the newest.
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

    /// Evicts the oldest entries until `pages` pages are free, and returns the number of freed pages.
    /// Frees unused pages first.
    pub fn reclaim(&self, pages: usize) -> usize {
        self.keyed.structure.reclaim(pages)
    }

    /// Returns the use of soft memory.
    pub fn usage(&self) -> Usage {
        self.keyed.structure.usage()
    }
}

#[cfg(test)]
mod tests;
