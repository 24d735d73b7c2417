//! Pool of a process: the budget, the chunks of the address range, and the registered structures.

use std::{
    cell::Cell,
    collections::BTreeMap,
    fmt,
    sync::{Arc, PoisonError, Weak},
};

use units::limits::{
    SOFT_POOL_PAGES_MAX, SOFT_REQUEST_PAGES_MAX, SOFT_REQUEST_PAGES_MIN, SOFT_STRUCTURES_MAX,
};

use super::{
    classes::CHUNK_PAGES,
    extents::Extents,
    mapping::{Mapping, PAGE_BYTES},
};
use crate::{
    error::{PoolError, SoftError},
    lock_mark::{CallbackMark, LockMark},
    panics::count_panics,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

/// Address space of [`Pool::new`] in multiples of the budget. Free pages inside chunks use address space
/// but no budget.
const ADDRESS_SPACE_FACTOR: usize = 4;
/// Smallest address space of [`Pool::new`], in pages: 64 MiB. Each structure takes a chunk at least.
const ADDRESS_SPACE_PAGES_MIN: usize = 16 << 10;
/// Budget divided by the pages that are requested in advance.
const REQUEST_DIVISOR: usize = 64;

/// Source of budget, such as a connection to the soft memory daemon.
///
/// The pool calls the methods without holding a lock of a structure. The methods may call
/// [`Pool::revoke`], but must not allocate soft memory from the same pool. Callbacks never wait for a source: an
/// insertion in a callback fails if the budget does not suffice.
pub trait BudgetSource: Send + Sync {
    /// Requests more pages, and returns the number of granted pages, which may be 0 or more than
    /// requested. May block. The pool makes one request at a time.
    fn request(&self, pages: usize) -> usize;
    /// Reports that less than half of `pages` pages of the budget are unused, so that the source can obtain
    /// `pages` more pages in the background and add them with [`Pool::grant`]. Must not block. Called once
    /// between two grants.
    fn request_ahead(&self, _pages: usize) {}
    /// Returns the largest budget that the source can provide, in pages. Insertions that need more make no request.
    fn maximum(&self) -> usize {
        usize::MAX
    }
    /// Returns pages that the pool does not use.
    fn give_back(&self, pages: usize);
    /// Waits until the threads of the source have ended, if nothing but the source uses the pool.
    fn wait_for_end(&self) {}
}

/// Source that grants no pages. The budget of the pool stays constant.
#[derive(Clone, Copy, Debug)]
struct FixedBudget;

impl BudgetSource for FixedBudget {
    fn request(&self, _: usize) -> usize {
        0
    }

    fn give_back(&self, _: usize) {}
}

/// Structure from which the pool can take pages.
pub(crate) trait Revocable: Send + Sync {
    /// Frees pages without an eviction until no pages are missing. `missing` returns the number of missing pages
    /// for the number of pages that this call has freed. Returns the number of freed pages.
    fn free_unused(&self, missing: &dyn Fn(usize) -> usize) -> usize;
    /// Frees up to `pages` pages without an eviction, unless the structure is in use by another thread.
    fn try_free_unused(&self, pages: usize);
    /// Evicts values until no pages are missing or no value is left. `missing` is as for
    /// [`free_unused`](Self::free_unused). Returns the number of freed pages.
    fn reclaim(&self, missing: &dyn Fn(usize) -> usize) -> usize;
}

/// Registered structure.
struct Registered {
    priority: u8,
    structure: Weak<dyn Revocable>,
}

/// Structures of a pool at one time. If the owner of a structure drops it meanwhile, its values are dropped with this
/// list.
struct Snapshot(Vec<Arc<dyn Revocable>>);

impl Drop for Snapshot {
    fn drop(&mut self) {
        for structure in self.0.drain(..) {
            // A destructor of a value can panic. The caller has books to close, and is not the owner.
            count_panics(|| drop(structure));
        }
    }
}

/// Memory that the soft structures of a process share.
pub struct Pool {
    mapping: Mapping,
    state: Mutex<PoolState>,
    /// Structures by number. A structure has a larger number than older ones.
    structures: Mutex<BTreeMap<u64, Registered>>,
    source: Arc<dyn BudgetSource>,
    /// Held during a request to the source.
    request: Mutex<()>,
    /// Whether the budget is nearly used up and the source was not informed yet.
    is_low: AtomicBool,
}

#[derive(Debug)]
struct PoolState {
    budget: usize,
    held: usize,
    /// Held pages that unfinished revocations have taken from the budget. No other pages are held above the budget.
    revoking: usize,
    /// Number of times that all unfinished revocations were fulfilled.
    fulfilments: u64,
    free_chunks: Extents,
    /// Whether the unused budget fell below the threshold since the last grant.
    was_low: bool,
}

/// Running revocation.
struct Revocation {
    /// Pages that it has taken from the budget.
    pages: usize,
    /// The part of them that was held. The other pages were unused.
    held: usize,
    /// [`PoolState::fulfilments`] at its start.
    fulfilments: u64,
}

impl PoolState {
    /// Returns the number of pages of the budget that are not held.
    fn unused(&self) -> usize {
        self.budget.saturating_sub(self.held)
    }

    /// Returns the number of pages to request. It increases with the budget, so that a program that grows makes few
    /// requests.
    fn request_step(&self) -> usize {
        (self.budget / REQUEST_DIVISOR).clamp(SOFT_REQUEST_PAGES_MIN, SOFT_REQUEST_PAGES_MAX)
    }

    /// Returns the number of held pages above the budget.
    fn excess(&self) -> usize {
        self.held.saturating_sub(self.budget)
    }

    /// Marks all revocations as fulfilled if no page is held above the budget. Called after each change that can
    /// cause this.
    fn settle(&mut self) {
        if self.revoking > 0 && self.held <= self.budget {
            self.revoking = 0;
            self.fulfilments += 1;
        }
    }

    /// Takes up to `pages` pages from the budget.
    fn start(&mut self, pages: usize) -> Revocation {
        let pages = pages.min(self.budget);
        let held = pages.saturating_sub(self.unused());
        self.budget -= pages;
        self.revoking += held;
        Revocation { pages, held, fulfilments: self.fulfilments }
    }

    /// Returns the number of pages that a revocation must still free, if it has freed `freed` pages. It frees no
    /// pages for other revocations, also if these start later, or if their callbacks run and hold pages.
    fn missing(&self, revocation: &Revocation, freed: usize) -> usize {
        let is_fulfilled = self.fulfilments != revocation.fulfilments;
        if is_fulfilled { 0 } else { self.excess().min(revocation.held.saturating_sub(freed)) }
    }

    /// Ends a revocation, and returns the number of revoked pages. Pages that could not be freed return to the
    /// budget. Other revocations may still free theirs.
    fn finish(&mut self, revocation: &Revocation) -> usize {
        if self.fulfilments != revocation.fulfilments {
            return revocation.pages;
        }
        self.revoking -= revocation.held;
        let missing = self.excess().saturating_sub(self.revoking);
        self.budget += missing;
        revocation.pages - missing
    }
}

/// Numbers of pages of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolStats {
    /// Maximum number of pages that structures may hold.
    pub budget: usize,
    /// Pages that structures hold. Exceeds the budget only during [`Pool::revoke`].
    pub held: usize,
}

impl Pool {
    /// Creates a pool with a constant budget in pages of 4 KiB, and with address space for four times
    /// the budget, at least 64 MiB.
    ///
    /// # Errors
    /// Returns an error if the address space cannot be reserved, or if the system has other pages.
    pub fn new(budget: usize) -> Result<Arc<Self>, PoolError> {
        Self::with_source(budget, Self::address_space_for(budget), Arc::new(FixedBudget))
    }

    /// Returns the address space of a pool with this largest budget, in pages.
    pub(crate) fn address_space_for(budget: usize) -> usize {
        let pages = budget.saturating_mul(ADDRESS_SPACE_FACTOR);
        pages.clamp(ADDRESS_SPACE_PAGES_MIN, SOFT_POOL_PAGES_MAX.max(budget))
    }

    /// Creates a pool with an initial budget, the size of its address space, both in pages of 4 KiB,
    /// and a source of more budget.
    ///
    /// # Errors
    /// Returns an error if the address space is 0 or larger than `units::limits::SOFT_POOL_PAGES_MAX`, if it
    /// cannot be reserved, or if the system has other pages.
    pub fn with_source(
        budget: usize,
        address_space: usize,
        source: Arc<dyn BudgetSource>,
    ) -> Result<Arc<Self>, PoolError> {
        let range_error = PoolError::AddressSpace { pages: address_space, maximum: SOFT_POOL_PAGES_MAX };
        if address_space == 0 || address_space > SOFT_POOL_PAGES_MAX {
            return Err(range_error);
        }
        let chunks = address_space.div_ceil(CHUNK_PAGES as usize);
        let chunks = u32::try_from(chunks).map_err(|_| range_error)?;
        let mapping = Mapping::reserve(chunks * CHUNK_PAGES)?;
        let state = PoolState {
            budget,
            held: 0,
            revoking: 0,
            fulfilments: 0,
            free_chunks: Extents::new(chunks),
            was_low: false,
        };
        Ok(Arc::new(Self {
            mapping,
            state: Mutex::new(state),
            structures: Mutex::default(),
            source,
            request: Mutex::default(),
            is_low: AtomicBool::new(false),
        }))
    }

    /// Drops a reference to a pool. If it is the last one, waits for the end of the threads of the source, which may
    /// still use the pool.
    pub fn release(pool: Arc<Self>) {
        let source = pool.source.clone();
        drop(pool);
        source.wait_for_end();
    }

    /// Returns the budget and its use.
    pub fn stats(&self) -> PoolStats {
        let state = self.state();
        PoolStats { budget: state.budget, held: state.held }
    }

    /// Returns the address range of the pool, to find it in `/proc/self/smaps` or `/proc/self/pagemap`.
    pub fn address_range(&self) -> std::ops::Range<usize> {
        let start = self.mapping.page(0).addr().get();
        start..start + self.mapping.pages() as usize * PAGE_BYTES
    }

    /// Adds pages to the budget.
    pub fn grant(&self, pages: usize) {
        let mut state = self.state();
        state.budget = state.budget.saturating_add(pages);
        state.was_low = false;
        state.settle();
    }

    /// Returns the unused budget to the source, and returns its number of pages.
    ///
    /// # Panics
    /// Panics inside an access closure.
    pub fn give_back_unused(&self) -> usize {
        LockMark::assert_unset();
        let mut state = self.state();
        let unused = state.unused();
        state.budget -= unused;
        drop(state);
        self.source.give_back(unused);
        unused
    }

    /// Revokes up to `pages` pages, and returns them to the source. Returns their number. See
    /// [`revoke`](Self::revoke).
    ///
    /// # Panics
    /// Panics inside an access closure.
    pub fn give_back(&self, pages: usize) -> usize {
        let revoked = self.revoke(pages);
        self.source.give_back(revoked);
        revoked
    }

    /// Takes pages away from the budget, and returns the number of these pages. The source of the budget is not
    /// informed: use [`give_back`](Self::give_back) if it is not the caller.
    ///
    /// Uses in this order: unused budget; pages of structures without values, after compaction; pages
    /// with values, of structures with ascending priority and, at equal priority, of the oldest structure
    /// first (Soft Memory, section 3.1, Non-Disruptiveness). The priorities are those at the start. The result is
    /// smaller than `pages` only if the budget is used up, if callbacks and other threads insert values meanwhile,
    /// or if another thread runs callbacks with the elements of a vector or with large blocks.
    ///
    /// # Panics
    /// Panics inside an access closure.
    pub fn revoke(&self, pages: usize) -> usize {
        LockMark::assert_unset();
        let revocation = self.state().start(pages);
        let freed = Cell::new(0);
        let missing = |freed_now: usize| self.state().missing(&revocation, freed.get() + freed_now);
        let structures = self.structures();
        for free in [Revocable::free_unused, Revocable::reclaim] {
            for structure in structures.0.iter().take_while(|_| missing(0) > 0) {
                freed.set(freed.get() + free(&**structure, &missing));
            }
        }
        // May free the pages of structures without an owner.
        drop(structures);
        self.state().finish(&revocation)
    }

    /// Returns the structures by ascending priority, the oldest first.
    fn structures(&self) -> Snapshot {
        let mut structures: Vec<_> = {
            let registered = self.registered();
            let upgrade = |entry: &Registered| Some((entry.priority, entry.structure.upgrade()?));
            registered.values().filter_map(upgrade).collect()
        };
        structures.sort_by_key(|(priority, _)| *priority); // keeps the order of their age
        Snapshot(structures.into_iter().map(|(_, structure)| structure).collect())
    }

    fn registered(&self) -> MutexGuard<'_, BTreeMap<u64, Registered>> {
        self.structures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a structure, and returns its number.
    ///
    /// # Errors
    /// Returns [`SoftError::TooManyStructures`].
    pub(crate) fn register(&self, priority: u8, structure: Weak<dyn Revocable>) -> Result<u64, SoftError> {
        let mut registered = self.registered();
        if registered.len() >= SOFT_STRUCTURES_MAX {
            return Err(SoftError::TooManyStructures(SOFT_STRUCTURES_MAX));
        }
        let number = registered.last_key_value().map_or(0, |(last, _)| last + 1);
        registered.insert(number, Registered { priority, structure });
        Ok(number)
    }

    /// Changes the priority of a structure. Running revocations use the old one.
    pub(crate) fn set_priority(&self, number: u64, priority: u8) {
        if let Some(structure) = self.registered().get_mut(&number) {
            structure.priority = priority;
        }
    }

    /// Removes a structure.
    pub(crate) fn unregister(&self, number: u64) {
        self.registered().remove(&number);
    }

    /// Frees unused pages of structures, and requests budget from the source, until `pages` pages of the
    /// budget are unused. Returns whether they are. Makes no request if the largest budget does not suffice: other
    /// processes would lose memory for nothing. The caller holds no lock of a structure.
    pub(crate) fn request(&self, pages: usize) -> bool {
        self.request_beside(|| self.stats().held, pages)
    }

    /// Does the same for a caller that evicts own values if the budget does not suffice: all held pages can become
    /// unused.
    pub(crate) fn request_before_eviction(&self, pages: usize) -> bool {
        self.request_beside(|| 0, pages)
    }

    /// Makes a request unless the largest budget is too small for the pages that remain held, and for `pages` others.
    fn request_beside(&self, held: impl FnOnce() -> usize, pages: usize) -> bool {
        for structure in &self.structures().0 {
            // An access closure of another thread may wait for a lock that the caller holds.
            structure.try_free_unused(pages.saturating_sub(self.unused()));
        }
        if CallbackMark::is_set() || held().saturating_add(pages) > self.source.maximum() {
            return self.unused() >= pages;
        }
        let _request = self.request.lock().unwrap_or_else(PoisonError::into_inner);
        // A larger request amortizes its cost over many allocations, but may be denied.
        let step = self.state().request_step();
        for wanted in [pages.max(step), pages] {
            let unused = self.unused();
            if unused >= pages {
                return true;
            }
            let granted = self.source.request(wanted - unused);
            if granted > 0 {
                self.grant(granted);
            }
        }
        self.unused() >= pages
    }

    fn unused(&self) -> usize {
        self.state().unused()
    }

    /// Counts `minimum` to `wanted` pages as held, as far as the budget suffices. Returns their number.
    ///
    /// # Errors
    /// Returns [`SoftError::OutOfBudget`] if the budget does not suffice for `minimum`.
    pub(super) fn hold(&self, minimum: u32, wanted: u32) -> Result<u32, SoftError> {
        let mut state = self.state();
        let unused = state.unused();
        if unused < minimum as usize {
            return Err(SoftError::OutOfBudget { pages: minimum as usize });
        }
        let count = u32::try_from(unused).map_or(wanted, |unused| unused.min(wanted));
        state.held += count as usize;
        if !state.was_low && unused - (count as usize) < state.request_step() / 2 {
            state.was_low = true;
            self.is_low.store(true, Ordering::Relaxed);
        }
        Ok(count)
    }

    /// Informs the source if the budget is nearly used up. The caller holds no lock of a structure.
    #[inline]
    pub(crate) fn request_ahead(&self) {
        if self.is_low.load(Ordering::Relaxed) && self.is_low.swap(false, Ordering::Relaxed) {
            let step = self.state().request_step();
            self.source.request_ahead(step);
        }
    }

    /// Counts pages as not held. The caller has returned them to the kernel.
    pub(super) fn unhold(&self, pages: u32) {
        let mut state = self.state();
        state.held -= pages as usize;
        state.settle();
    }

    /// Takes consecutive chunks out of the address range, and returns the first page. The pages are not
    /// backed, and belong to the caller.
    ///
    /// # Errors
    /// Returns [`SoftError::OutOfAddressSpace`].
    pub(super) fn take_chunks(&self, count: u32) -> Result<u32, SoftError> {
        let error = SoftError::OutOfAddressSpace { pages: count as usize * CHUNK_PAGES as usize };
        self.state().free_chunks.take(count).map(|chunk| chunk * CHUNK_PAGES).ok_or(error)
    }

    /// Returns chunks that the caller owns and whose pages it has released.
    pub(super) fn give_chunks(&self, first_page: u32, count: u32) {
        self.state().free_chunks.give_back(first_page / CHUNK_PAGES, count);
    }

    #[inline]
    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let budget = self.state().budget;
        self.source.give_back(budget);
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("stats", &self.stats()).finish_non_exhaustive()
    }
}
