//! Key-value store on a cache in soft memory, with expiry times.
//!
//! An expired value is removed when a command accesses it, or by [`Store::expire_step`].

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use soft::{Pool, Priority, ScanCursor, ScanDecision, SoftByteCache, SoftError, Usage};
use units::UnixMs;

use crate::value::{Header, split_value};

/// Values by key.
#[derive(Debug)]
pub struct Store {
    cache: SoftByteCache,
    /// Whether a value with an expiry time was stored since the start of the last complete search.
    has_expiring: AtomicBool,
    /// Values with an expiry time in the last complete search.
    expiring: Mutex<ExpiringValues>,
    hits: AtomicU64,
    misses: AtomicU64,
    expired: AtomicU64,
    unstored: AtomicU64,
}

/// Numbers of accesses and expired values since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreCounts {
    /// Reads that found a value.
    pub hits: u64,
    /// Reads that found no value.
    pub misses: u64,
    /// Removed expired values.
    pub expired: u64,
    /// New values that were evicted at once, because there was no budget for them.
    pub unstored: u64,
}

/// Values with an expiry time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpiringValues {
    /// Number of values.
    pub values: u64,
    /// Mean time to the expiry in milliseconds; 0 without values.
    pub mean_ttl_ms: u64,
}

/// Search for expired values, in steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpirySearch {
    /// Position, or `None` between two searches.
    cursor: Option<ScanCursor>,
    /// Values with an expiry time so far, and the sum of the times to their expiry.
    values: u64,
    ttl_sum_ms: u64,
}

impl ExpirySearch {
    fn expiring_values(&self) -> ExpiringValues {
        let mean_ttl_ms = self.ttl_sum_ms.checked_div(self.values).unwrap_or(0);
        ExpiringValues { values: self.values, mean_ttl_ms }
    }
}

/// Result of an access to a value.
enum Access<R> {
    Live(R),
    Expired,
}

impl Store {
    /// Creates an empty store.
    ///
    /// # Errors
    /// Returns an error if the pool has too many structures.
    pub fn new(pool: &Arc<Pool>) -> Result<Self, SoftError> {
        Ok(Self {
            cache: SoftByteCache::new(pool, Priority(0))?,
            has_expiring: AtomicBool::new(false),
            expiring: Mutex::default(),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            unstored: AtomicU64::new(0),
        })
    }

    /// Returns the number of values, including expired values that are not removed yet.
    pub fn len(&self) -> usize {
        self.cache.len()
    }

    /// Returns the use of soft memory.
    pub fn usage(&self) -> Usage {
        self.cache.usage()
    }

    /// Returns the counts of accesses.
    pub fn counts(&self) -> StoreCounts {
        StoreCounts {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            expired: self.expired.load(Ordering::Relaxed),
            unstored: self.unstored.load(Ordering::Relaxed),
        }
    }

    /// Returns the values with an expiry time in the last complete search.
    pub fn expiring_values(&self) -> ExpiringValues {
        *self.expiring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes the value of a key to a closure. Counts a hit or a miss.
    pub fn get<R>(&self, key: &[u8], now: UnixMs, access: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let found = self.read(key, now, |_, value| access(value));
        let counter = if found.is_some() { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        found
    }

    /// Passes the expiry time and the value of a key to a closure.
    pub fn read<R>(
        &self,
        key: &[u8],
        now: UnixMs,
        access: impl FnOnce(Option<UnixMs>, &[u8]) -> R,
    ) -> Option<R> {
        let found = self.cache.get(key, |stored| access_live(stored, now, access));
        self.live_or_remove(key, found)
    }

    /// Passes the expiry time and the value of a key to a closure, without a change of the order of eviction.
    pub fn peek<R>(
        &self,
        key: &[u8],
        now: UnixMs,
        access: impl FnOnce(Option<UnixMs>, &[u8]) -> R,
    ) -> Option<R> {
        let found = self.cache.peek(key, |stored| access_live(stored, now, access));
        self.live_or_remove(key, found)
    }

    /// Returns a copy of the expiry time and the value of a key.
    pub fn copy(&self, key: &[u8], now: UnixMs) -> Option<(Option<UnixMs>, Vec<u8>)> {
        self.read(key, now, |expiry, value| (expiry, value.to_vec()))
    }

    /// Returns whether a key has a value.
    pub fn contains(&self, key: &[u8], now: UnixMs) -> bool {
        self.peek(key, now, |_, _| ()).is_some()
    }

    /// Stores a value that is the concatenation of two parts.
    ///
    /// # Errors
    /// Returns an error if the value does not fit after the eviction of all others.
    pub fn set(&self, key: &[u8], value: [&[u8]; 2], expiry: Option<UnixMs>) -> Result<(), SoftError> {
        self.set_by(SoftByteCache::insert, key, value, expiry)
    }

    /// Does the same only if the budget suffices without an eviction.
    ///
    /// # Errors
    /// Returns [`SoftError::OutOfBudget`] if it does not suffice, or another error of [`set`](Self::set).
    pub fn try_set(&self, key: &[u8], value: [&[u8]; 2], expiry: Option<UnixMs>) -> Result<(), SoftError> {
        self.set_by(SoftByteCache::try_insert, key, value, expiry)
    }

    fn set_by(
        &self,
        insert: impl FnOnce(&SoftByteCache, &[u8], &[&[u8]]) -> Result<bool, SoftError>,
        key: &[u8],
        value: [&[u8]; 2],
        expiry: Option<UnixMs>,
    ) -> Result<(), SoftError> {
        if expiry.is_some() {
            self.has_expiring.store(true, Ordering::Relaxed);
        }
        let header = Header::new(expiry);
        insert(&self.cache, key, &[header.as_bytes(), value[0], value[1]]).map(drop)
    }

    /// Records that a new value of a key was evicted at once, and removes the old one.
    pub fn evict_new_value(&self, key: &[u8]) {
        self.cache.remove(key);
        self.unstored.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a key. Returns whether it had a value that was not expired.
    pub fn remove(&self, key: &[u8], now: UnixMs) -> bool {
        self.contains(key, now) && self.cache.remove(key)
    }

    /// Removes all keys.
    pub fn clear(&self) {
        self.cache.clear();
    }

    /// Removes the expired values of the next pages of the cache. Does nothing if there are no values with an expiry
    /// time.
    pub fn expire_step(&self, search: &mut ExpirySearch, pages: u32, now: UnixMs) {
        let cursor = match search.cursor {
            Some(cursor) => cursor,
            None if self.has_expiring.swap(false, Ordering::Relaxed) => {
                *search = ExpirySearch::default();
                ScanCursor::default()
            }
            None => return,
        };
        let mut expired = 0;
        search.cursor = self.cache.scan(cursor, pages, |_, stored| match split_value(stored).0 {
            Some(expiry) if expiry <= now => {
                expired += 1;
                ScanDecision::Remove
            }
            Some(expiry) => {
                search.values += 1;
                search.ttl_sum_ms = search.ttl_sum_ms.saturating_add(expiry.0 - now.0);
                ScanDecision::Keep
            }
            None => ScanDecision::Keep,
        });
        self.expired.fetch_add(expired, Ordering::Relaxed);
        if search.values > 0 {
            self.has_expiring.store(true, Ordering::Relaxed);
        }
        if search.cursor.is_none() {
            *self.expiring.lock().unwrap_or_else(PoisonError::into_inner) = search.expiring_values();
        }
    }

    fn live_or_remove<R>(&self, key: &[u8], found: Option<Access<R>>) -> Option<R> {
        match found? {
            Access::Live(result) => Some(result),
            Access::Expired => {
                if self.cache.remove(key) {
                    self.expired.fetch_add(1, Ordering::Relaxed);
                }
                None
            }
        }
    }
}

/// Passes a stored value to a closure unless it is expired.
fn access_live<R>(stored: &[u8], now: UnixMs, access: impl FnOnce(Option<UnixMs>, &[u8]) -> R) -> Access<R> {
    match split_value(stored) {
        (Some(expiry), _) if expiry <= now => Access::Expired,
        (expiry, value) => Access::Live(access(expiry, value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> Store {
        Store::new(&Pool::new(256).unwrap()).unwrap()
    }

    fn value(store: &Store, now: u64) -> Option<Vec<u8>> {
        store.get(b"k", UnixMs(now), <[u8]>::to_vec)
    }

    #[test]
    fn value_is_absent_from_its_expiry_time_on() {
        let store = store();
        store.set(b"k", [b"a", b"b"], Some(UnixMs(100))).unwrap();
        assert_eq!((value(&store, 99), store.len()), (Some(b"ab".to_vec()), 1));
        assert_eq!((value(&store, 100), store.len()), (None, 0));
        assert_eq!(store.counts(), StoreCounts { hits: 1, misses: 1, expired: 1, unstored: 0 });
        store.set(b"k", [b"", b""], Some(UnixMs(100))).unwrap();
        assert!(store.contains(b"k", UnixMs(99)) && !store.remove(b"k", UnixMs(100)));
    }

    #[test]
    fn new_value_that_is_evicted_at_once_replaces_the_old_one() {
        let store = store();
        store.set(b"k", [b"old", b""], None).unwrap();
        store.evict_new_value(b"k");
        assert_eq!((value(&store, 0), store.counts().unstored), (None, 1));
    }

    #[test]
    fn search_removes_expired_values_and_ends_without_expiry_times() {
        let store = store();
        for number in 0..1000_u64 {
            let expiry = (number % 2 == 0).then_some(UnixMs(number));
            store.set(&number.to_le_bytes(), [&[1; 90], b""], expiry).unwrap();
        }
        let mut search = ExpirySearch::default();
        let mut run = |now| {
            for _ in 0..10 {
                store.expire_step(&mut search, 16, UnixMs(now));
            }
            (store.len(), store.has_expiring.load(Ordering::Relaxed), store.expiring_values())
        };
        // 250 values expire from 500 to 998 ms, 748 ms on average.
        assert_eq!(run(499), (750, true, ExpiringValues { values: 250, mean_ttl_ms: 250 }));
        assert_eq!(run(998), (500, false, ExpiringValues::default()));
        assert_eq!(store.counts().expired, 500);
    }
}
