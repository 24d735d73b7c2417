//! Common part of the map and the cache: entries under the lock of a structure, and the hasher of their keys.

use std::{
    borrow::Borrow,
    hash::{BuildHasher, Hash},
    sync::Arc,
};

use crate::{
    entries::Entries,
    error::SoftError,
    heap::Pool,
    index::KeyHash,
    panics::count_panics,
    structure::{Deliver, Priority, Structure},
};

/// Structure with entries of keys and values.
#[derive(Debug)]
pub(crate) struct Keyed<K: Eq + Send + 'static, V: Send + 'static, S> {
    pub structure: Structure<Entries<K, V>>,
    hasher: S,
}

impl<K: Eq + Hash + Send + 'static, V: Send + 'static, S: BuildHasher> Keyed<K, V, S> {
    /// Creates an empty structure. Evicted entries are dropped.
    ///
    /// # Errors
    /// Returns an error if an entry is too large, or if the pool has too many structures.
    pub fn new(pool: &Arc<Pool>, priority: Priority, hasher: S) -> Result<Self, SoftError> {
        Self::with_delivery(pool, priority, hasher, None)
    }

    /// Creates an empty structure. Each evicted entry is passed to the callback, which runs without a lock.
    ///
    /// # Errors
    /// Returns an error if an entry is too large, or if the pool has too many structures.
    pub fn with_callback(
        pool: &Arc<Pool>,
        priority: Priority,
        callback: impl Fn(K, V) + Send + Sync + 'static,
        hasher: S,
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

    /// Returns the hash of a key.
    pub fn hash<Q: Hash + ?Sized>(&self, key: &Q) -> KeyHash {
        KeyHash::new(self.hasher.hash_one(key))
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.structure.lock().len()
    }

    /// Passes the value of a key to a closure, without a change of the order of eviction.
    pub fn peek<Q: Eq + Hash + ?Sized, R>(&self, key: &Q, access: impl FnOnce(&V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
    {
        let hash = self.hash(key);
        let entries = self.structure.lock();
        entries.find(hash, key).map(|block| access(&entries.get(block).1))
    }

    /// Removes a key, and returns its value. The key is dropped after the lock is released.
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

    /// Passes each entry to a closure, in the order of eviction.
    pub fn for_each(&self, mut access: impl FnMut(&K, &V)) {
        self.structure.lock().iter().for_each(|(key, value)| access(key, value));
    }

    /// Passes each entry to a closure, in arbitrary order, and removes those for which it returns `false`. The removed
    /// entries are dropped after the lock is released.
    pub fn retain(&self, keep: impl FnMut(&K, &mut V) -> bool) {
        let mut removed = Vec::new(); // dropped after the lock is released
        self.structure.lock().retain(keep, &mut removed);
    }

    /// Removes all entries, and drops them after the lock is released.
    pub fn clear(&self) {
        let cleared = self.structure.lock().take();
        drop(cleared);
    }
}

#[cfg(test)]
mod tests;
