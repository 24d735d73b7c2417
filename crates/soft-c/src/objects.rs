//! Objects by identifier.
//!
//! The identifiers of a process increase and are never used again.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::error::Error;

/// Number of parts of a map, each with its own lock, so that threads with different objects rarely share a lock.
const SHARDS: usize = 16;

/// Next identifier, which is not 0. A forked child continues with the number of its parent.
static NEXT_ID: AtomicUsize = AtomicUsize::new(1);

/// Returns an identifier that is larger than all identifiers in use.
pub fn next_id() -> usize {
    NEXT_ID.load(Ordering::Relaxed)
}

/// Objects of one type.
#[derive(Debug)]
pub struct Objects<T> {
    shards: [Shard<T>; SHARDS],
    len: AtomicUsize,
    len_max: usize,
    /// Smallest identifier of this process. Smaller identifiers are from its parent.
    first_id: usize,
    /// Error for identifiers that do not exist.
    unknown: Error,
}

/// Part of the objects. Shards do not share cache lines. An empty map owns no memory, so that Valgrind reports no leak
/// at the end of a program that has destroyed all objects.
#[derive(Debug)]
#[repr(align(64))]
struct Shard<T>(RwLock<BTreeMap<usize, Arc<T>>>);

impl<T> Default for Shard<T> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<T> Objects<T> {
    /// Creates an empty map.
    pub fn new(first_id: usize, len_max: usize, unknown: Error) -> Self {
        Self { shards: Default::default(), len: AtomicUsize::new(0), len_max, first_id, unknown }
    }

    fn shard(&self, id: usize) -> &RwLock<BTreeMap<usize, Arc<T>>> {
        &self.shards[id % SHARDS].0
    }

    /// Adds an object, and returns its identifier.
    ///
    /// # Errors
    /// Returns [`Error::TooMany`].
    pub fn insert(&self, object: Arc<T>) -> Result<usize, Error> {
        let add = |len: usize| (len < self.len_max).then_some(len + 1);
        self.len.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).map_err(|_| Error::TooMany)?;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        self.shard(id).write().unwrap_or_else(PoisonError::into_inner).insert(id, object);
        Ok(id)
    }

    /// Returns an object.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for 0, [`Error::Forked`] for an identifier of the parent process, and
    /// otherwise the error for unknown objects of this type.
    pub fn get(&self, id: usize) -> Result<Arc<T>, Error> {
        let found = self.shard(id).read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned();
        found.ok_or_else(|| self.missing(id))
    }

    /// Removes an object.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn remove(&self, id: usize) -> Result<Arc<T>, Error> {
        let removed = self.shard(id).write().unwrap_or_else(PoisonError::into_inner).remove(&id);
        let removed = removed.ok_or_else(|| self.missing(id))?;
        self.len.fetch_sub(1, Ordering::Relaxed);
        Ok(removed)
    }

    fn missing(&self, id: usize) -> Error {
        match id {
            0 => Error::InvalidArgument,
            id if id < self.first_id => Error::Forked,
            _ => self.unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_never_used_again() {
        let objects = Objects::new(next_id(), 2, Error::InvalidPool);
        let (first, second) =
            (objects.insert(Arc::new('a')).unwrap(), objects.insert(Arc::new('b')).unwrap());
        assert_eq!(objects.insert(Arc::new('c')), Err(Error::TooMany));
        assert_eq!(
            (objects.remove(first).as_deref(), objects.remove(first)),
            (Ok(&'a'), Err(Error::InvalidPool))
        );
        let third = objects.insert(Arc::new('c')).unwrap();
        assert!(third > second && second > first && first > 0);
        assert_eq!((objects.get(third).as_deref(), objects.get(first)), (Ok(&'c'), Err(Error::InvalidPool)));
    }

    #[test]
    fn null_inherited_and_unknown_identifiers_have_different_errors() {
        let objects: Objects<()> = Objects::new(100, 2, Error::InvalidContext);
        assert_eq!(
            [0, 99, 100].map(|id| objects.get(id)),
            [Err(Error::InvalidArgument), Err(Error::Forked), Err(Error::InvalidContext)]
        );
    }
}
