//! Common part of all structures: the lock, the reclamation of values, and callbacks.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::{Arc, PoisonError, TryLockError},
};

use units::limits::{
    SOFT_DISCARD_BATCH, SOFT_EVICTION_BATCH, SOFT_EVICTION_BATCH_BYTES, SOFT_GRANT_ATTEMPTS_MAX,
    SOFT_LOCK_YIELDS_MAX,
};

use crate::{
    error::{InsertError, SoftError},
    heap::{Pool, Revocable},
    lock_mark::{CallbackMark, LockMark},
    panics::count_panics,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        thread,
    },
};

/// Priority of a structure among the structures of a process. A revocation takes values of structures
/// with a low priority first. The default is the lowest one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(pub u8);

/// Priority of an entry within its [`SoftCache`](crate::SoftCache).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EntryPriority {
    /// Evicted before all other entries.
    Low,
    /// Evicted after low entries.
    #[default]
    Normal,
    /// Evicted last.
    High,
}

/// Use of a structure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Pages that count against the budget of the pool.
    pub held_pages: usize,
    /// Number of values that were evicted since the creation of the structure.
    pub evicted: u64,
    /// Number of callbacks and destructors of evicted values that panicked.
    pub callback_panics: u64,
    /// Number of reclamations that evicted values, such as those of [`Pool::revoke`]. An insertion into a full
    /// cache is none.
    pub reclamations: u64,
}

/// Contents of a structure.
pub(crate) trait State: Send + 'static {
    /// Unit of eviction.
    type Evicted: Send;

    /// Removes the values that are evicted next. Returns `None` if there are none.
    fn evict(&mut self) -> Option<Self::Evicted>;
    /// Removes the same values as [`evict`](Self::evict) without dropping them, if they need no drop. Returns
    /// `None` if there are none.
    fn discard(&mut self) -> Option<()>;
    /// Returns the number of evictable units.
    fn evictable(&self) -> usize;
    /// Returns the number of pages that count against the budget.
    fn held_pages(&self) -> usize;
    /// Returns the number of pages that [`free_unused`](Self::free_unused) can free.
    fn unused_pages(&self) -> usize;
    /// Frees up to about `pages` pages without an eviction. Frees fewer, but at least one, if more than about
    /// `units::limits::SOFT_MOVED_VALUES_MAX` values must be moved for it.
    fn free_unused(&mut self, pages: usize);
}

/// Runs the callback for evicted values, and returns the number of panics.
pub(crate) type Deliver<E> = Box<dyn Fn(E) -> u64 + Send + Sync>;

/// Part of a structure that the pool can reach.
struct Shared<S: State> {
    state: Mutex<S>,
    /// Number of threads that wait for the lock.
    waiting: AtomicUsize,
    /// Without it, evicted values are dropped.
    deliver: Option<Deliver<S::Evicted>>,
    evicted: AtomicU64,
    callback_panics: AtomicU64,
    reclamations: AtomicU64,
}

/// Structure that is registered with its pool.
pub(crate) struct Structure<S: State> {
    shared: Arc<Shared<S>>,
    pool: Arc<Pool>,
    /// Number in the pool.
    number: u64,
}

/// Exclusive access to the contents of a structure.
pub(crate) struct Guard<'a, S> {
    state: MutexGuard<'a, S>,
    _mark: LockMark,
}

impl<S> Deref for Guard<'_, S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.state
    }
}

impl<S> DerefMut for Guard<'_, S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.state
    }
}

/// Evicted values that need a delivery. They are delivered when this list is dropped, also if code of the user panics
/// before that. The owner of the list releases the lock first.
pub(crate) struct Evicted<'a, S: State> {
    structure: &'a Structure<S>,
    values: Vec<S::Evicted>,
}

impl<S: State> Evicted<'_, S> {
    /// Returns the number of values.
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// Adds a value.
    pub(crate) fn push(&mut self, value: S::Evicted) {
        self.values.push(value);
    }
}

impl<S: State> Drop for Evicted<'_, S> {
    fn drop(&mut self) {
        self.values.drain(..).for_each(|value| self.structure.shared.deliver(value));
    }
}

impl<S: State> Shared<S> {
    /// Maximum number of units of a batch. The values of a batch are in ordinary memory.
    const BATCH: usize = {
        let by_bytes = SOFT_EVICTION_BATCH_BYTES / (size_of::<S::Evicted>() + 1) + 1;
        if by_bytes < SOFT_EVICTION_BATCH { by_bytes } else { SOFT_EVICTION_BATCH }
    };

    /// Locks the structure unless another thread holds the lock.
    fn try_lock(&self) -> Option<Guard<'_, S>> {
        let mark = LockMark::set();
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Guard { state, _mark: mark })
    }

    fn lock(&self) -> Guard<'_, S> {
        let mark = LockMark::set();
        // The contents are consistent whenever code of the user runs, which is the only code that panics.
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.waiting.fetch_add(1, Ordering::Relaxed);
                let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                state
            }
        };
        Guard { state, _mark: mark }
    }

    /// Lets other threads take the lock, which this thread does not hold. The mutex is not fair: a thread that locks
    /// it in a loop would keep others waiting.
    fn yield_lock(&self) {
        for _ in 0..SOFT_LOCK_YIELDS_MAX {
            if self.waiting.load(Ordering::Relaxed) == 0 {
                break;
            }
            thread::yield_now();
        }
    }

    /// Returns whether evicted values need a callback or a drop.
    fn needs_delivery(&self) -> bool {
        self.deliver.is_some() || std::mem::needs_drop::<S::Evicted>()
    }

    fn deliver(&self, evicted: S::Evicted) {
        let _mark = CallbackMark::set();
        self.evicted.fetch_add(1, Ordering::Relaxed);
        let panics = match &self.deliver {
            Some(deliver) => deliver(evicted),
            None => count_panics(|| drop(evicted)),
        };
        self.callback_panics.fetch_add(panics, Ordering::Relaxed);
    }

    /// Evicts one unit. Returns `None` if there is none. Adds it to the batch unless it needs no delivery,
    /// which saves a copy of the value.
    fn evict(&self, state: &mut S, batch: &mut Vec<S::Evicted>) -> Option<()> {
        if self.needs_delivery() {
            batch.push(state.evict()?);
        } else {
            state.discard()?;
            self.evicted.fetch_add(1, Ordering::Relaxed);
        }
        Some(())
    }

    /// Evicts up to [`Self::BATCH`] units, or [`SOFT_DISCARD_BATCH`] without a delivery, until no pages are missing, or
    /// until compaction can free them, and decrements `units` for each. `missing` returns the number of missing pages.
    /// Returns the number of freed pages, and whether no more must or can be evicted.
    fn evict_batch(&self, missing: impl Fn() -> usize, units: &mut usize) -> (usize, bool) {
        let batch_max = if self.needs_delivery() { Self::BATCH } else { SOFT_DISCARD_BATCH };
        let mut batch = Vec::new();
        let mut state = self.lock();
        // Under the lock, because another thread may have freed pages while this one waited for it.
        let pages = missing();
        let held = state.held_pages();
        let freed = |state: &S| held.saturating_sub(state.held_pages());
        let mut evicted = 0;
        let is_done = loop {
            if *units == 0 || freed(&state) + state.unused_pages() >= pages {
                break true;
            }
            if evicted == batch_max {
                break false;
            }
            if self.evict(&mut state, &mut batch).is_none() {
                break true;
            }
            evicted += 1;
            *units -= 1;
        };
        if is_done {
            let missing = pages.saturating_sub(freed(&state));
            state.free_unused(missing);
        }
        let freed = freed(&state);
        drop(state);
        batch.into_iter().for_each(|evicted| self.deliver(evicted));
        (freed, is_done)
    }

    /// Evicts up to `units` units until no pages are missing, and decrements `units` for each. Returns the number
    /// of freed pages.
    fn reclaim_units(&self, missing: &dyn Fn(usize) -> usize, units: &mut usize) -> usize {
        let mut freed = 0;
        loop {
            if missing(freed) == 0 {
                return freed;
            }
            let (freed_now, is_done) = self.evict_batch(|| missing(freed), units);
            self.yield_lock();
            freed += freed_now;
            if is_done {
                let freed_later = self.free_unused_in_steps(&|now| missing(freed + now));
                freed += freed_later;
                // Another thread may have freed the pages of the evicted values.
                if *units == 0 || freed_now + freed_later == 0 {
                    return freed;
                }
            }
        }
    }

    /// Evicts values that need no delivery, and moves the others together, until no pages are missing or no value is
    /// left. Holds the lock meanwhile, so that other threads cannot use the freed memory for new values. Returns the
    /// number of freed pages.
    fn reclaim_under_lock(&self, missing: &dyn Fn(usize) -> usize) -> usize {
        let mut state = self.lock();
        let held = state.held_pages();
        let freed = |state: &S| held.saturating_sub(state.held_pages());
        loop {
            let pages = missing(freed(&state));
            while state.unused_pages() < pages && state.discard().is_some() {
                self.evicted.fetch_add(1, Ordering::Relaxed);
            }
            let held_before = state.held_pages();
            state.free_unused(pages);
            // Each step frees a page, or is the last one.
            if state.held_pages() == held_before {
                return freed(&state);
            }
        }
    }

    /// Frees pages without an eviction until no pages are missing, and returns their number. Releases the lock
    /// between two steps.
    fn free_unused_in_steps(&self, missing: &dyn Fn(usize) -> usize) -> usize {
        let mut freed = 0;
        while missing(freed) > 0 {
            let mut state = self.lock();
            let held = state.held_pages();
            // Under the lock, because another thread may have freed pages while this one waited for it.
            state.free_unused(missing(freed));
            let now = held - state.held_pages();
            drop(state);
            self.yield_lock();
            if now == 0 {
                break;
            }
            freed += now;
        }
        freed
    }
}

impl<S: State> Revocable for Shared<S> {
    fn free_unused(&self, missing: &dyn Fn(usize) -> usize) -> usize {
        self.free_unused_in_steps(missing)
    }

    fn try_free_unused(&self, pages: usize) {
        if pages > 0
            && let Some(mut state) = self.try_lock()
        {
            state.free_unused(pages);
        }
    }

    fn reclaim(&self, missing: &dyn Fn(usize) -> usize) -> usize {
        // Values that callbacks and other threads insert meanwhile are not evicted at first, so that the loop ends.
        let evictable = self.lock().evictable();
        let mut units = evictable;
        let mut freed = self.reclaim_units(missing, &mut units);
        if missing(freed) > 0 && !self.needs_delivery() {
            freed += self.reclaim_under_lock(&|now| missing(freed + now));
        }
        if units < evictable {
            self.reclamations.fetch_add(1, Ordering::Relaxed);
        }
        freed
    }
}

impl<S: State> Structure<S> {
    /// Registers a structure with its pool.
    ///
    /// # Errors
    /// Returns [`SoftError::TooManyStructures`].
    pub(crate) fn new(
        pool: &Arc<Pool>,
        priority: Priority,
        state: S,
        deliver: Option<Deliver<S::Evicted>>,
    ) -> Result<Self, SoftError> {
        let shared = Shared {
            state: Mutex::new(state),
            waiting: AtomicUsize::new(0),
            deliver,
            evicted: AtomicU64::new(0),
            callback_panics: AtomicU64::new(0),
            reclamations: AtomicU64::new(0),
        };
        let shared = Arc::new(shared);
        let revocable: Arc<dyn Revocable> = shared.clone();
        let number = pool.register(priority.0, Arc::downgrade(&revocable))?;
        Ok(Self { shared, pool: pool.clone(), number })
    }

    /// Changes the priority of the structure.
    ///
    /// # Panics
    /// Panics if the thread holds the lock of a structure.
    pub(crate) fn set_priority(&self, priority: Priority) {
        LockMark::assert_unset();
        self.pool.set_priority(self.number, priority.0);
    }

    /// Locks the structure.
    ///
    /// # Panics
    /// Panics if the thread holds the lock of a structure.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, S> {
        self.shared.lock()
    }

    /// Frees all pages that can be freed without an eviction.
    pub(crate) fn shrink_to_fit(&self) {
        self.shared.free_unused_in_steps(&|_| usize::MAX);
    }

    /// Evicts values until `pages` pages are free. Returns the number of freed pages.
    pub(crate) fn reclaim(&self, pages: usize) -> usize {
        self.shared.reclaim(&|freed| pages.saturating_sub(freed))
    }

    /// Returns an empty list for values that the caller evicts.
    pub(crate) fn evicted(&self) -> Evicted<'_, S> {
        Evicted { structure: self, values: Vec::new() }
    }

    /// Counts values that the caller evicted, and that need no delivery.
    pub(crate) fn count_evicted(&self, count: usize) {
        self.shared.evicted.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Returns the use of the structure.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            held_pages: self.lock().held_pages(),
            evicted: self.shared.evicted.load(Ordering::Relaxed),
            callback_panics: self.shared.callback_panics.load(Ordering::Relaxed),
            reclamations: self.shared.reclamations.load(Ordering::Relaxed),
        }
    }

    /// Calls `insert` under the lock. If the budget does not suffice, requests more budget without the lock,
    /// and calls `insert` again, up to [`SOFT_GRANT_ATTEMPTS_MAX`] times.
    #[inline]
    pub(crate) fn insert<T, R>(
        &self,
        value: T,
        insert: impl FnMut(&mut S, T) -> Result<R, InsertError<T>>,
    ) -> Result<R, InsertError<T>> {
        self.insert_with_request(|pages| self.pool.request(pages), value, insert)
    }

    /// Does the same for a caller that evicts values of this structure if it fails.
    pub(crate) fn insert_before_eviction<T, R>(
        &self,
        value: T,
        insert: impl FnMut(&mut S, T) -> Result<R, InsertError<T>>,
    ) -> Result<R, InsertError<T>> {
        self.insert_with_request(|pages| self.pool.request_before_eviction(pages), value, insert)
    }

    #[inline]
    fn insert_with_request<T, R>(
        &self,
        request: impl Fn(usize) -> bool,
        mut value: T,
        mut insert: impl FnMut(&mut S, T) -> Result<R, InsertError<T>>,
    ) -> Result<R, InsertError<T>> {
        for _ in 0..SOFT_GRANT_ATTEMPTS_MAX {
            let rejected = match self.try_insert(value, &mut insert) {
                Ok(result) => return Ok(result),
                Err(rejected) => rejected,
            };
            match rejected.reason {
                SoftError::OutOfBudget { pages } if request(pages) => value = rejected.value,
                _ => return Err(rejected),
            }
        }
        self.try_insert(value, insert)
    }

    /// Calls `insert` under the lock, without a request for more budget if the budget does not suffice.
    #[inline]
    pub(crate) fn try_insert<T, R>(
        &self,
        value: T,
        insert: impl FnOnce(&mut S, T) -> Result<R, InsertError<T>>,
    ) -> Result<R, InsertError<T>> {
        let result = insert(&mut self.lock(), value);
        self.pool.request_ahead();
        result
    }
}

impl<S: State> Drop for Structure<S> {
    fn drop(&mut self) {
        self.pool.unregister(self.number);
    }
}

impl<S: State> fmt::Debug for Structure<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Structure").field("number", &self.number).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
