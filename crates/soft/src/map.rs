//! Hash map whose oldest entries are evicted first.

use std::{
    borrow::Borrow,
    hash::{BuildHasher, Hash, RandomState},
    sync::Arc,
};

use crate::{
    entries::{Entries, KeyHash},
    error::{Rejected, SoftError},
    heap::Pool,
    structure::{Deliver, EntryPriority, Priority, Structure, Usage, count_panics},
};

/// Hash map in soft memory. A reclamation evicts entries in the order of their insertion. A key and its
/// value are evicted together.
///
/// All methods panic inside an access closure; see [`locks`](crate#locks).
#[derive(Debug)]
pub struct SoftHashMap<K: Eq + Send + 'static, V: Send + 'static, S = RandomState> {
    structure: Structure<Entries<K, V>>,
    hasher: S,
}

impl<K: Eq + Hash + Send + 'static, V: Send + 'static> SoftHashMap<K, V> {
    /// Creates an empty map. Evicted entries are dropped.
    ///
    /// # Errors
    /// Returns an error if an entry is too large, or if the pool has too many structures.
    pub fn new(pool: &Arc<Pool>, priority: Priority) -> Result<Self, SoftError> {
        Self::with_delivery(pool, priority, RandomState::new(), None)
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
        Self::with_hasher(pool, priority, RandomState::new(), callback)
    }
}

impl<K: Eq + Hash + Send + 'static, V: Send + 'static, S: BuildHasher> SoftHashMap<K, V, S> {
    /// Creates an empty map with a hasher and a callback.
    ///
    /// # Errors
    /// Returns an error if an entry is too large, or if the pool has too many structures.
    pub fn with_hasher(
        pool: &Arc<Pool>,
        priority: Priority,
        hasher: S,
        callback: impl Fn(K, V) + Send + Sync + 'static,
    ) -> Result<Self, SoftError> {
        let deliver = move |(key, value)| count_panics(|| callback(key, value));
        Self::with_delivery(pool, priority, hasher, Some(Box::new(deliver)))
    }

    fn with_delivery(
        pool: &Arc<Pool>,
        priority: Priority,
        hasher: S,
        deliver: Option<Deliver<(K, V)>>,
    ) -> Result<Self, SoftError> {
        let structure = Structure::new(pool, priority, Entries::new(pool.clone())?, deliver)?;
        Ok(Self { structure, hasher })
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.structure.lock().len()
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
        let hash = self.hash(key);
        let entries = self.structure.lock();
        entries.find(hash, key).map(|block| access(&entries.get(block).1))
    }

    /// Passes the value of a key to a closure that can change it.
    pub fn get_mut<Q: Eq + Hash + ?Sized, R>(&self, key: &Q, access: impl FnOnce(&mut V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
    {
        let hash = self.hash(key);
        let mut entries = self.structure.lock();
        entries.find(hash, key).map(|block| access(entries.value_mut(block)))
    }

    /// Inserts an entry, or replaces the value of the key. Returns the replaced value. A replaced entry
    /// keeps its place in the order of eviction.
    ///
    /// # Errors
    /// Returns the entry if the budget or the address space does not suffice.
    pub fn insert(&self, key: K, value: V) -> Result<Option<V>, Rejected<(K, V)>> {
        let hash = self.hash(&key);
        let replaced = self.structure.insert((key, value), |entries, (key, value)| {
            match entries.find(hash, &key) {
                Some(block) => {
                    let old = std::mem::replace(entries.value_mut(block), value);
                    // The key is dropped after the lock is released.
                    Ok(Some((key, old)))
                }
                None => entries.insert_new(hash, EntryPriority::Normal, (key, value)).map(|()| None),
            }
        });
        replaced.map(|replaced| replaced.map(|(_, old)| old))
    }

    /// Removes a key, and returns its value.
    pub fn remove<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let hash = self.hash(key);
        let mut entries = self.structure.lock();
        let removed = entries.find(hash, key).map(|block| entries.remove(block));
        drop(entries);
        removed.map(|(_, value)| value)
    }

    /// Passes each entry to a closure, from the oldest to the newest.
    pub fn for_each(&self, mut access: impl FnMut(&K, &V)) {
        self.structure.lock().iter().for_each(|(key, value)| access(key, value));
    }

    /// Removes and drops all entries.
    pub fn clear(&self) {
        let cleared = self.structure.lock().take();
        drop(cleared);
    }

    /// Evicts the oldest entries until `pages` pages are free, and returns the number of freed pages.
    /// Frees unused pages first.
    pub fn reclaim(&self, pages: usize) -> usize {
        self.structure.reclaim(pages)
    }

    /// Returns the use of soft memory.
    pub fn usage(&self) -> Usage {
        self.structure.usage()
    }

    fn hash<Q: Hash + ?Sized>(&self, key: &Q) -> KeyHash {
        KeyHash::new(self.hasher.hash_one(key))
    }
}

#[cfg(test)]
mod tests;
