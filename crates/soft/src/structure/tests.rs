//! Tests of properties that all structures share: locks, callbacks, revocation and budget.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use crate::{
    BudgetSource, EntryPriority, InsertError, Pinned, Pool, PoolStats, Priority, SoftBlocks, SoftByteCache,
    SoftCache, SoftError, SoftHashMap, SoftList, SoftVec,
};

fn is_send_and_sync<T: Send + Sync>() {}

#[test]
fn structures_of_send_values_are_send_and_sync() {
    use std::cell::Cell;
    is_send_and_sync::<Pool>();
    is_send_and_sync::<SoftVec<Cell<u8>>>();
    is_send_and_sync::<SoftList<Cell<u8>>>();
    is_send_and_sync::<SoftHashMap<u8, Cell<u8>>>();
    is_send_and_sync::<SoftCache<u8, Cell<u8>>>();
    is_send_and_sync::<SoftByteCache>();
    is_send_and_sync::<SoftBlocks>();
    is_send_and_sync::<Pinned>();
    is_send_and_sync::<InsertError<u8>>();
}

#[test]
fn structures_and_errors_are_printable() {
    let pool = Pool::new(4).unwrap();
    let (list, map) = (list_of(&pool, 0, 1), SoftHashMap::<u8, u8>::new(&pool, Priority::default()).unwrap());
    assert_eq!(format!("{list:?}"), "SoftList { structure: Structure { number: 0, .. } }");
    assert!(
        format!("{map:?}").starts_with("SoftHashMap { keyed: Keyed { structure: Structure { number: 1, .. }")
    );
    assert_eq!(format!("{pool:?}"), "Pool { stats: PoolStats { budget: 4, held: 1 }, .. }");
    assert_eq!((Priority::default(), EntryPriority::default()), (Priority(0), EntryPriority::Normal));
}

/// List of values of 2 KiB, two per page.
fn list_of(pool: &Arc<Pool>, priority: u8, values: u64) -> SoftList<[u64; 256]> {
    let list = SoftList::new(pool, Priority(priority)).unwrap();
    (0..values).for_each(|value| list.push_back([value; 256]).unwrap());
    list
}

#[test]
fn revocation_takes_unused_budget_first_and_low_priorities_next() {
    let pool = Pool::new(64).unwrap();
    let (high, low) = (list_of(&pool, 9, 20), list_of(&pool, 1, 20));
    let middle = list_of(&pool, 5, 20);
    assert_eq!(pool.stats(), PoolStats { budget: 64, held: 30 });
    assert_eq!((pool.revoke(34), pool.stats()), (34, PoolStats { budget: 30, held: 30 }));
    assert_eq!((low.len(), middle.len(), high.len()), (20, 20, 20));
    assert_eq!(pool.revoke(12), 12);
    assert_eq!((low.len(), middle.len(), high.len()), (0, 16, 20));
    assert_eq!((pool.revoke(1000), pool.stats()), (18, PoolStats { budget: 0, held: 0 }));
    assert_eq!((middle.len(), high.len()), (0, 0));
}

#[test]
fn revocation_takes_unused_pages_of_all_structures_before_values() {
    let pool = Pool::new(20).unwrap();
    let (low, high) = (list_of(&pool, 1, 20), list_of(&pool, 9, 20));
    for _ in 0..8 {
        high.pop_front();
    }
    assert_eq!((pool.revoke(4), low.len(), high.len()), (4, 20, 12));
    assert_eq!((pool.revoke(1), low.len(), high.len()), (1, 18, 12));
}

#[test]
fn equal_priorities_are_revoked_from_the_oldest_structure() {
    let pool = Pool::new(20).unwrap();
    let (first, second) = (list_of(&pool, 1, 20), list_of(&pool, 1, 20));
    assert_eq!((pool.revoke(5), first.len(), second.len()), (5, 10, 20));
}

#[test]
fn pages_that_cannot_be_freed_stay_in_the_budget() {
    let pool = Pool::new(20).unwrap();
    let (in_callback, revoked) = (pool.clone(), Arc::new(Mutex::new(Vec::new())));
    let results = revoked.clone();
    // The elements are evicted already, but their pages are held until the last callback returns.
    let vec = SoftVec::with_callback(&pool, Priority(0), move |_: [u8; 4096]| {
        results.lock().unwrap().push((in_callback.revoke(12), in_callback.stats().budget));
    })
    .unwrap();
    vec.try_reserve(16).unwrap();
    (0..2).for_each(|_| vec.push([0; 4096]).unwrap());
    assert_eq!((pool.stats().held, vec.reclaim(1)), (16, 16));
    assert_eq!(*revoked.lock().unwrap(), [(4, 16), (0, 16)]);
    assert_eq!(pool.stats(), PoolStats { budget: 16, held: 0 });
}

#[test]
fn unused_pages_of_other_structures_are_used_before_a_request() {
    let pool = Pool::new(20).unwrap();
    let (first, second) = (list_of(&pool, 0, 40), list_of(&pool, 0, 0));
    (0..10).for_each(|_| assert!(first.pop_front().is_some()));
    (0..10).for_each(|value| second.push_back([value; 256]).unwrap());
    assert_eq!((first.len(), second.len(), pool.stats().held), (30, 10, 20));
    assert!(second.push_back([10; 256]).is_err());
}

/// Source that revokes the requested pages of the pool that requests them.
#[derive(Default)]
struct OwnPool(OnceLock<Weak<Pool>>);

impl BudgetSource for OwnPool {
    fn request(&self, pages: usize) -> usize {
        self.0.get().and_then(Weak::upgrade).map_or(0, |pool| pool.revoke(pages))
    }

    fn give_back(&self, _: usize) {}
}

#[test]
fn callback_of_a_revocation_by_the_source_does_not_wait_for_the_source() {
    let source = Arc::new(OwnPool::default());
    let pool = Pool::with_source(10, 64, source.clone()).unwrap();
    source.0.set(Arc::downgrade(&pool)).unwrap();
    let kept = Arc::new(SoftList::new(&pool, Priority(9)).unwrap());
    let (in_callback, rejected) = (kept.clone(), Arc::new(AtomicUsize::new(0)));
    let counter = rejected.clone();
    let evicting = SoftList::with_callback(&pool, Priority(0), move |value: [u64; 256]| {
        counter.fetch_add(usize::from(in_callback.push_back(value).is_err()), Ordering::Relaxed);
    })
    .unwrap();
    (0..20).for_each(|value| evicting.push_back([value; 256]).unwrap());
    kept.push_back([99; 256]).unwrap();
    let kept_values = kept.len() - 1;
    assert_eq!(kept_values + rejected.load(Ordering::Relaxed) + evicting.len(), 20);
    assert!(rejected.load(Ordering::Relaxed) > 0 && evicting.len() < 20);
}

/// List whose callback blocks in each call until `resume` is dropped, and the channel of the calls.
struct Blocking<T: Send + 'static> {
    list: T,
    is_started: mpsc::Receiver<()>,
    resume: mpsc::Sender<()>,
}

impl<T: Send> Blocking<T> {
    fn new<V>(create: impl FnOnce(Box<dyn Fn(V) + Send + Sync>) -> T) -> Self {
        let (started, is_started) = mpsc::channel();
        let (resume, is_resumed) = mpsc::channel::<()>();
        let is_resumed = Mutex::new(is_resumed);
        let callback = move |value: V| {
            std::mem::forget(value);
            started.send(()).unwrap();
            is_resumed.lock().unwrap().recv().unwrap_err();
        };
        Self { list: create(Box::new(callback)), is_started, resume }
    }
}

#[test]
fn revocation_evicts_no_values_for_another_one_whose_callback_runs() {
    let pool = Pool::new(20).unwrap();
    let Blocking { list: vec, is_started, resume } =
        Blocking::new(|callback| SoftVec::with_callback(&pool, Priority(0), callback).unwrap());
    vec.try_reserve(10).unwrap();
    vec.push([0_u8; 4096]).unwrap();
    let list = list_of(&pool, 1, 20);
    assert_eq!(pool.stats(), PoolStats { budget: 20, held: 20 });
    thread::scope(|scope| {
        let first = scope.spawn(|| pool.revoke(10));
        is_started.recv().unwrap();
        assert_eq!((pool.revoke(5), list.len()), (5, 10));
        drop(resume);
        assert_eq!(first.join().unwrap(), 10);
    });
    assert_eq!(pool.stats(), PoolStats { budget: 5, held: 5 });
}

#[test]
fn destructor_that_panics_during_a_revocation_does_not_change_its_result() {
    struct Bomb([u8; 2048]);
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("destructor of value {}", self.0[0]);
        }
    }
    let pool = Pool::new(10).unwrap();
    let Blocking { list, is_started, resume } =
        Blocking::new(|callback| SoftList::with_callback(&pool, Priority(0), callback).unwrap());
    (0..20).for_each(|value| list.push_back(Bomb([value; 2048])).unwrap());
    thread::scope(|scope| {
        let revocation = scope.spawn(|| pool.revoke(3));
        is_started.recv().unwrap();
        // The revocation drops the remaining values at its end.
        drop(list);
        drop(resume);
        assert_eq!(revocation.join().unwrap(), 3);
    });
    assert_eq!(pool.stats(), PoolStats { budget: 7, held: 0 });
}

#[test]
fn concurrent_revocations_take_no_pages_of_a_higher_priority() {
    for _ in 0..if cfg!(miri) { 2 } else { 2000 } {
        let pool = Pool::new(100).unwrap();
        let (low, high) = (list_of(&pool, 1, 160), list_of(&pool, 2, 40));
        thread::scope(|scope| {
            let revoke = || (0..20).for_each(|_| assert_eq!(pool.revoke(1), 1));
            (0..4).for_each(|_| drop(scope.spawn(revoke)));
        });
        assert_eq!((low.len(), high.len(), pool.stats()), (0, 40, PoolStats { budget: 20, held: 20 }));
    }
}

#[test]
fn revocation_uses_the_last_priority_of_a_structure() {
    let pool = Pool::new(20).unwrap();
    let (first, second) = (list_of(&pool, 0, 20), list_of(&pool, 1, 20));
    first.set_priority(Priority(2));
    assert_eq!((pool.revoke(5), first.len(), second.len()), (5, 20, 10));
    // At equal priority, the oldest structure is first, whenever its priority was set.
    first.set_priority(Priority(1));
    assert_eq!((pool.revoke(5), first.len(), second.len()), (5, 10, 10));
    let nested = catch_unwind(AssertUnwindSafe(|| first.front(|_| second.set_priority(Priority(0)))));
    assert!(nested.is_err());
    assert_eq!((pool.revoke(5), first.len(), second.len()), (5, 0, 10));
}

#[test]
fn revocations_find_each_structure_while_priorities_change() {
    for _ in 0..if cfg!(miri) { 2 } else { 200 } {
        let pool = Pool::new(30).unwrap();
        let lists: Vec<_> = (0..3).map(|priority| list_of(&pool, priority, 20)).collect();
        thread::scope(|scope| {
            let change = |shift: u8| {
                let lists = &lists;
                move || {
                    for (number, list) in (0_u8..60).zip(lists.iter().cycle()) {
                        list.set_priority(Priority((number + shift) % 7));
                    }
                }
            };
            let changes = [scope.spawn(change(0)), scope.spawn(change(3))];
            let revocations = [(); 2].map(|()| scope.spawn(|| pool.revoke(15)));
            assert_eq!(revocations.map(|revocation| revocation.join().unwrap()), [15, 15]);
            changes.into_iter().for_each(|change| change.join().unwrap());
        });
        assert_eq!(pool.stats(), PoolStats { budget: 0, held: 0 });
    }
}

#[test]
fn concurrent_revocations_evict_no_more_than_all_need() {
    for _ in 0..if cfg!(miri) { 2 } else { 1_000 } {
        let pool = Pool::new(100).unwrap();
        let list = list_of(&pool, 0, 200);
        thread::scope(|scope| {
            (0..4).for_each(|_| drop(scope.spawn(|| assert_eq!(pool.revoke(10), 10))));
        });
        assert_eq!((list.len(), pool.stats()), (120, PoolStats { budget: 60, held: 60 }));
    }
}

#[test]
fn each_page_of_a_small_budget_can_belong_to_another_structure() {
    let pool = Pool::new(64).unwrap();
    let lists: Vec<_> = (0..64).map(|_| list_of(&pool, 0, 1)).collect();
    assert_eq!((lists.len(), pool.stats().held), (64, 64));
}

#[test]
fn pool_without_budget_rejects_values() {
    let pool = Pool::new(0).unwrap();
    let (vec, list) = (SoftVec::new(&pool, Priority(0)).unwrap(), SoftList::new(&pool, Priority(0)).unwrap());
    let reason = SoftError::OutOfBudget { pages: 1 };
    assert_eq!(vec.push(7_u8), Err(InsertError { value: 7, reason }));
    assert_eq!(list.push_front(8_u8), Err(InsertError { value: 8, reason }));
    let cache = SoftCache::new(&pool, Priority(0)).unwrap();
    assert_eq!(cache.insert(1_u8, 2_u8), Err(InsertError { value: (1, 2), reason }));
    assert_eq!((pool.revoke(5), pool.stats()), (0, PoolStats { budget: 0, held: 0 }));
}

#[test]
fn values_without_bytes_and_huge_values_are_defined() {
    let pool = Pool::new(64).unwrap();
    let list = SoftList::new(&pool, Priority(0)).unwrap();
    (0..1000).for_each(|_| list.push_back(()).unwrap());
    assert_eq!((list.len(), list.usage().held_pages), (1000, 4));
    assert_eq!((list.reclaim(1), list.len()), (1, 768));

    let large = SoftList::new(&pool, Priority(0)).unwrap();
    assert_eq!(large.push_back([0_u8; 65 * 4096]).unwrap_err().reason, SoftError::OutOfBudget { pages: 65 });
    #[repr(align(8192))]
    struct Aligned;
    assert_eq!(
        SoftList::<Aligned>::new(&pool, Priority(0)).err(),
        Some(SoftError::AlignmentTooLarge { align: 8192 })
    );
}

#[test]
fn nested_access_panics_and_releases_the_lock() {
    let pool = Pool::new(16).unwrap();
    let (outer, inner) = (list_of(&pool, 0, 2), list_of(&pool, 0, 2));
    for nested in [
        &(|| inner.len()) as &dyn Fn() -> usize,
        &|| outer.len(),
        &|| outer.pop_front().iter().len(),
        &|| pool.revoke(1000),
    ] {
        let result = catch_unwind(AssertUnwindSafe(|| outer.front(|_| nested())));
        let message = *result.unwrap_err().downcast::<&str>().unwrap();
        assert_eq!(message, "a soft structure must not be accessed inside an access closure");
    }
    assert_eq!((outer.len(), inner.len()), (2, 2));
    assert_eq!(pool.stats(), PoolStats { budget: 16, held: 2 });
}

#[test]
fn panic_of_an_access_closure_keeps_the_contents() {
    let pool = Pool::new(16).unwrap();
    let map = SoftHashMap::new(&pool, Priority(0)).unwrap();
    map.insert(1, 10).unwrap();
    catch_unwind(AssertUnwindSafe(|| map.get_mut(&1, |_| panic!("closure")))).unwrap_err();
    assert_eq!((map.get(&1, |value| *value), map.insert(2, 20)), (Some(10), Ok(None)));
}

#[test]
fn callback_panics_are_counted_and_do_not_stop_a_reclamation() {
    let pool = Pool::new(16).unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let counter = count.clone();
    let list = SoftList::with_callback(&pool, Priority(0), move |value: [u64; 256]| {
        counter.fetch_add(1, Ordering::Relaxed);
        assert!(!value[0].is_multiple_of(3), "callback");
    })
    .unwrap();
    (0..12).for_each(|value| list.push_back([value; 256]).unwrap());
    assert_eq!((list.reclaim(6), list.len(), count.load(Ordering::Relaxed)), (6, 0, 12));
    assert_eq!((list.usage().callback_panics, list.usage().evicted), (4, 12));
}

#[test]
fn panics_of_destructors_are_counted() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            assert!(thread::panicking(), "destructor");
        }
    }
    let pool = Pool::new(16).unwrap();
    let list = SoftList::new(&pool, Priority(0)).unwrap();
    (0..3).for_each(|_| list.push_back(Bomb).unwrap());
    assert_eq!((list.reclaim(1), list.usage().callback_panics, pool.stats().held), (1, 3, 0));
}

#[test]
fn callback_may_use_its_own_and_other_structures() {
    let pool = Pool::new(32).unwrap();
    let own: Arc<OnceLock<SoftList<[u64; 256]>>> = Arc::default();
    let other = Arc::new(SoftVec::new(&pool, Priority(1)).unwrap());
    let (own_list, other_vec) = (Arc::downgrade(&own), other.clone());
    let list = SoftList::with_callback(&pool, Priority(0), move |value: [u64; 256]| {
        let own = own_list.upgrade().unwrap();
        let own = own.get().unwrap();
        other_vec.push(value[0]).unwrap();
        own.push_back(value).unwrap();
        assert!(own.reclaim(0) == 0 && !own.is_empty());
    })
    .unwrap();
    (0..20).for_each(|value| list.push_back([value; 256]).unwrap());
    let list = own.get_or_init(|| list);
    // Ten pages. Each callback inserts its value again, so that the result is only a lower bound.
    list.reclaim(3);
    assert_eq!((list.len(), other.len()), (20, 6));
    assert_eq!(other.with_slice(<[u64]>::to_vec), [0, 1, 2, 3, 4, 5]);
    assert_eq!(list.usage().callback_panics, 0);
}

#[test]
fn callback_may_reclaim_its_own_structure() {
    let pool = Pool::new(32).unwrap();
    let own: Arc<OnceLock<SoftCache<u64, [u64; 255]>>> = Arc::default();
    let in_callback = Arc::downgrade(&own);
    let cache = SoftCache::with_callback(&pool, Priority(0), move |key, _| {
        if key == 0 {
            in_callback.upgrade().unwrap().get().unwrap().reclaim(2);
        }
    })
    .unwrap();
    for key in 0..20 {
        cache.insert(key, [key; 255]).unwrap();
    }
    let cache = own.get_or_init(|| cache);
    assert_eq!((cache.reclaim(1), cache.len()), (1, 14));
}

#[test]
fn blocked_callback_blocks_only_its_reclamation() {
    let pool = Pool::new(32).unwrap();
    let (started, is_started) = mpsc::channel();
    let (resume, is_resumed) = mpsc::channel::<()>();
    let is_resumed = Mutex::new(is_resumed);
    let list = SoftList::with_callback(&pool, Priority(0), move |value: [u64; 256]| {
        started.send(value[0]).unwrap();
        is_resumed.lock().unwrap().recv().unwrap();
    })
    .unwrap();
    (0..4).for_each(|value| list.push_back([value; 256]).unwrap());
    thread::scope(|scope| {
        let reclamation = scope.spawn(|| list.reclaim(1));
        assert_eq!(is_started.recv(), Ok(0));
        assert_eq!((list.len(), list.pop_back().map(|value| value[0])), (2, Some(3)));
        list.push_back([4; 256]).unwrap();
        (0..2).for_each(|_| resume.send(()).unwrap());
        assert_eq!(reclamation.join().unwrap(), 1);
    });
    assert_eq!(list.front(|value| value[0]), Some(2));
}

#[test]
fn structure_may_be_dropped_during_its_reclamation() {
    let pool = Pool::new(32).unwrap();
    let (started, is_started) = mpsc::channel();
    let (resume, is_resumed) = mpsc::channel::<()>();
    let is_resumed = Mutex::new(is_resumed);
    let dropped = Arc::new(AtomicUsize::new(0));
    let count = dropped.clone();
    let callback = move |value: [Arc<()>; 256]| {
        count.fetch_add(Arc::strong_count(&value[0]) / 256, Ordering::Relaxed);
        started.send(()).unwrap();
        is_resumed.lock().unwrap().recv().unwrap();
    };
    let list = SoftList::with_callback(&pool, Priority(0), callback).unwrap();
    for _ in 0..8 {
        let owned = Arc::new(());
        list.push_back(std::array::from_fn(|_| owned.clone())).unwrap();
    }
    thread::scope(|scope| {
        let revocation = scope.spawn(|| pool.revoke(30));
        is_started.recv().unwrap();
        drop(list);
        drop(resume);
        assert_eq!(revocation.join().unwrap(), 30);
    });
    assert_eq!((pool.stats(), dropped.load(Ordering::Relaxed)), (PoolStats { budget: 2, held: 0 }, 4));
}

#[test]
fn each_value_is_dropped_once() {
    let pool = Pool::new(256).unwrap();
    let value = Arc::new(());
    let list = SoftList::new(&pool, Priority(0)).unwrap();
    let vec = SoftVec::new(&pool, Priority(0)).unwrap();
    let cache = SoftCache::new(&pool, Priority(0)).unwrap();
    for key in 0..300 {
        list.push_back(value.clone()).unwrap();
        vec.push(value.clone()).unwrap();
        cache.insert(key % 200, value.clone()).unwrap();
    }
    assert_eq!(Arc::strong_count(&value), 801);
    list.reclaim(1);
    cache.reclaim(1);
    assert_eq!(Arc::strong_count(&value), 1 + list.len() + vec.len() + cache.len());
    vec.reclaim(1);
    list.clear();
    drop(cache);
    assert_eq!((Arc::strong_count(&value), pool.stats().held), (1, 0));
}

/// Source with a limited number of pages, which records requests.
struct Limited {
    pages: Arc<Mutex<usize>>,
    requests: Arc<AtomicUsize>,
    ahead: Arc<AtomicUsize>,
}

impl BudgetSource for Limited {
    fn request(&self, pages: usize) -> usize {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let mut left = self.pages.lock().unwrap();
        let granted = if pages <= *left { pages } else { 0 };
        *left -= granted;
        granted
    }

    fn request_ahead(&self, pages: usize) {
        self.ahead.fetch_add(pages, Ordering::Relaxed);
    }

    fn give_back(&self, pages: usize) {
        *self.pages.lock().unwrap() += pages;
    }
}

/// Source that can provide eight pages in all.
#[derive(Default)]
struct Capped(AtomicUsize);

impl BudgetSource for Capped {
    fn request(&self, pages: usize) -> usize {
        let granted = pages.min(8 - self.0.load(Ordering::Relaxed));
        self.0.fetch_add(granted, Ordering::Relaxed);
        granted
    }

    fn maximum(&self) -> usize {
        8
    }

    fn give_back(&self, _: usize) {}
}

#[test]
fn no_budget_is_requested_for_a_value_that_cannot_fit() {
    let pool = Pool::with_source(0, 1024, Arc::new(Capped::default())).unwrap();
    let blocks = SoftBlocks::new(&pool, Priority(0)).unwrap();
    assert!(matches!(blocks.allocate(9 * 4096), Err(SoftError::OutOfBudget { .. })));
    assert_eq!(pool.stats(), PoolStats { budget: 0, held: 0 });
    blocks.allocate(10_000).unwrap();
    let before = pool.stats();
    assert!(blocks.allocate(6 * 4096).is_err());
    assert_eq!(pool.stats(), before);
}

#[test]
fn pages_that_can_be_freed_do_not_prevent_a_request() {
    let pool = Pool::with_source(4, 1024, Arc::new(Capped(AtomicUsize::new(4)))).unwrap();
    let unused = SoftBlocks::new(&pool, Priority(0)).unwrap();
    let handles: Vec<_> = (0..16).map(|_| unused.allocate(1000).unwrap()).collect();
    handles.into_iter().for_each(|handle| unused.free(handle).unwrap());
    let held = pool.stats().held;
    let blocks = SoftBlocks::new(&pool, Priority(0)).unwrap();
    blocks.allocate(7 * 4096).unwrap();
    assert!(
        held > 0 && pool.stats().budget == 8,
        "{held} pages were held without blocks: {:?}",
        pool.stats()
    );
}

#[test]
fn cache_requests_its_largest_budget_before_it_evicts() {
    let pool = Pool::with_source(3, 1024, Arc::new(Capped(AtomicUsize::new(3)))).unwrap();
    let cache = SoftByteCache::new(&pool, Priority(0)).unwrap();
    cache.insert(b"old", &[&[1; 2 * 4096]]).unwrap();
    cache.insert(b"new", &[&[2; 6 * 4096]]).unwrap();
    assert_eq!((cache.len(), cache.get(b"new", <[u8]>::len)), (1, Some(6 * 4096)));
    assert!(cache.insert(b"huge", &[&[3; 20 * 4096]]).is_err());
    assert_eq!(cache.len(), 1, "no value is evicted for one that cannot fit");
}

#[test]
fn budget_grows_by_requests_and_returns_to_the_source() {
    let (pages, requests) = (Arc::new(Mutex::new(300)), Arc::new(AtomicUsize::new(0)));
    let source = Limited { pages: pages.clone(), requests: requests.clone(), ahead: Arc::default() };
    let pool = Pool::with_source(0, 1024, Arc::new(source)).unwrap();
    let list = list_of(&pool, 0, 512);
    assert_eq!((pool.stats(), requests.load(Ordering::Relaxed)), (PoolStats { budget: 256, held: 256 }, 1));
    // A whole step is denied now. The smallest sufficient request is granted.
    list.push_back([0; 256]).unwrap();
    assert_eq!((pool.stats().budget, requests.load(Ordering::Relaxed)), (257, 3));
    let rejected = (0..).find_map(|value| list.push_back([value; 256]).err()).unwrap();
    assert_eq!((rejected.value[0], rejected.reason), (87, SoftError::OutOfBudget { pages: 1 }));
    assert_eq!((pool.stats().budget, *pages.lock().unwrap()), (300, 0));
    list.reclaim(100);
    assert_eq!((pool.give_back_unused(), *pages.lock().unwrap()), (100, 100));
    drop((list, pool));
    assert_eq!(*pages.lock().unwrap(), 300);
}

/// Returns the number of pages that a pool with this budget requests for one more page.
fn first_request(budget: usize) -> usize {
    let pages = Arc::new(Mutex::new(1 << 20));
    let source = Limited { pages: pages.clone(), requests: Arc::default(), ahead: Arc::default() };
    let pool = Pool::with_source(budget, 1 << 20, Arc::new(source)).unwrap();
    let list = list_of(&pool, 0, 2 * budget as u64);
    let before = *pages.lock().unwrap();
    list.push_back([0; 256]).unwrap();
    before - *pages.lock().unwrap()
}

#[test]
fn requests_increase_with_the_budget_within_limits() {
    assert_eq!([0, 100, 16_384, 32_768].map(first_request), [256, 256, 256, 512]);
    assert_eq!(first_request(300_000), 4096);
}

#[test]
fn nearly_used_up_budget_is_reported_once_per_grant() {
    let (pages, ahead) = (Arc::new(Mutex::new(0)), Arc::new(AtomicUsize::new(0)));
    let source = Limited { pages, requests: Arc::default(), ahead: ahead.clone() };
    let pool = Pool::with_source(200, 1024, Arc::new(source)).unwrap();
    let list = list_of(&pool, 0, 100);
    assert_eq!((pool.stats().held, ahead.load(Ordering::Relaxed)), (54, 0));
    (0..200).for_each(|value| list.push_back([value; 256]).unwrap());
    assert_eq!(ahead.load(Ordering::Relaxed), 256);
    pool.grant(256);
    (0..200).for_each(|value| list.push_back([value; 256]).unwrap());
    assert_eq!(ahead.load(Ordering::Relaxed), 256);
    (0..200).for_each(|value| list.push_back([value; 256]).unwrap());
    assert_eq!(ahead.load(Ordering::Relaxed), 512);
}

#[test]
fn number_of_structures_is_limited() {
    let pool = Pool::new(0).unwrap();
    let limit = units::limits::SOFT_STRUCTURES_MAX;
    let vecs: Vec<SoftVec<u8>> = (0..limit).map(|_| SoftVec::new(&pool, Priority(0)).unwrap()).collect();
    let error = SoftVec::<u8>::new(&pool, Priority(0)).unwrap_err();
    assert_eq!(error, SoftError::TooManyStructures(limit));
    drop(vecs);
    SoftVec::<u8>::new(&pool, Priority(0)).unwrap();
}

#[cfg(not(miri))]
#[test]
fn reclaimed_pages_are_not_resident() {
    use crate::resident::resident_pages;

    let pool = Pool::new(625).unwrap();
    let cache = SoftCache::new(&pool, Priority(0)).unwrap();
    for key in 0..10_000_u64 {
        cache.insert(key, [key; 30]).unwrap();
    }
    for key in (0..10_000).filter(|key| key % 5 == 0) {
        cache.get(&key, |_| ()).unwrap();
    }
    let held = pool.stats().held;
    assert_eq!((resident_pages(&pool), cache.reclaim(200)), (held, 200));
    assert_eq!((resident_pages(&pool), pool.stats().held), (held - 200, held - 200));
    cache.for_each(|key, value| assert_eq!(value, &[*key; 30]));
    assert_eq!(cache.len(), 10_000 - 200 * 16, "16 entries fill a page");
    drop(cache);
    assert_eq!(resident_pages(&pool), 0);
}
