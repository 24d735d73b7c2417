//! Concurrent use of all structures while pages are revoked. Also runs under the thread sanitizer and the
//! address sanitizer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use soft::{
    BudgetSource, EntryPriority, Pool, Priority, ScanCursor, ScanDecision, SoftByteCache, SoftCache,
    SoftHashMap, SoftList, SoftVec,
};

/// Number of threads that use the structures.
const THREADS: u64 = if cfg!(miri) { 3 } else { 8 };
/// Number of operations per thread.
const OPERATIONS: u64 = if cfg!(miri) { 40 } else { 20_000 };
/// Budget in pages, which is less than the threads use.
const BUDGET: usize = if cfg!(miri) { 24 } else { 256 };

/// Value that detects a mix of the bytes of two values, a use after drop, and a missing drop.
struct Checked {
    numbers: [u64; 20],
    live: Arc<AtomicUsize>,
}

impl Checked {
    fn new(number: u64, live: &Arc<AtomicUsize>) -> Self {
        live.fetch_add(1, Ordering::Relaxed);
        Self { numbers: [number; 20], live: live.clone() }
    }

    fn check(&self) {
        assert!(self.numbers.iter().all(|number| *number == self.numbers[0]));
    }
}

impl Drop for Checked {
    fn drop(&mut self) {
        self.check();
        self.numbers = [u64::MAX; 20];
        self.numbers[0] = 0;
        self.live.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Source to which revoked pages return.
struct Shared(AtomicUsize);

impl BudgetSource for Shared {
    fn request(&self, pages: usize) -> usize {
        let take = |free: usize| Some(free - free.min(pages));
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).unwrap_or(0);
        before.min(pages)
    }

    fn give_back(&self, pages: usize) {
        self.0.fetch_add(pages, Ordering::Relaxed);
    }
}

struct Structures {
    list: SoftList<Checked>,
    vec: SoftVec<Checked>,
    map: SoftHashMap<u64, Checked>,
    cache: SoftCache<u64, Checked>,
    bytes: SoftByteCache,
}

/// Checks that all bytes of a value are the first byte of its key.
fn check_bytes(key: &[u8], value: &[u8]) {
    assert!(value.iter().all(|byte| *byte == key[0]));
}

/// Performs one operation that depends on the number.
fn operate(structures: &Structures, number: u64, live: &Arc<AtomicUsize>) {
    let Structures { list, vec, map, cache, bytes } = structures;
    let value = || Checked::new(number, live);
    let key = number % 997;
    let byte_key = key.to_le_bytes();
    match number % 17 {
        0 | 1 => drop(list.push_back(value())),
        2 => drop(list.pop_front()),
        3 => drop(list.front(Checked::check)),
        4 => drop(vec.push(value())),
        5 => vec.with_slice(|values| values.iter().take(20).for_each(Checked::check)),
        6 => drop(map.insert(key, value())),
        7 => drop(map.get(&key, Checked::check)),
        8 => drop(map.remove(&key)),
        9 | 10 => drop(cache.insert_with(EntryPriority::Normal, key, value())),
        11 => drop(cache.get(&key, Checked::check)),
        12 | 13 => {
            let parts: [&[u8]; 2] = [&[byte_key[0]; 100], &vec![byte_key[0]; (number >> 8) as usize % 6000]];
            let _ = bytes.insert_with(EntryPriority::Normal, &byte_key, &parts);
        }
        14 => drop(bytes.get(&byte_key, |value| check_bytes(&byte_key, value))),
        15 => {
            bytes.scan(ScanCursor::default(), 8, |key, value| {
                check_bytes(key, value);
                if key[0] % 8 == 0 { ScanDecision::Remove } else { ScanDecision::Keep }
            });
        }
        _ => drop(cache.reclaim(usize::from(number.is_multiple_of(2)))),
    }
}

#[test]
fn structures_stay_consistent_while_pages_are_revoked() {
    let live = Arc::new(AtomicUsize::new(0));
    let source = Arc::new(Shared(AtomicUsize::new(BUDGET)));
    let pool = Pool::with_source(0, 8 * BUDGET, source.clone()).unwrap();
    let structures = Structures {
        list: SoftList::with_callback(&pool, Priority(2), |value: Checked| value.check()).unwrap(),
        vec: SoftVec::new(&pool, Priority(0)).unwrap(),
        map: SoftHashMap::new(&pool, Priority(3)).unwrap(),
        cache: SoftCache::new(&pool, Priority(1)).unwrap(),
        bytes: SoftByteCache::new(&pool, Priority(1)).unwrap(),
    };
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let revocations = scope.spawn(|| {
            let mut revoked = 0;
            while !is_done.load(Ordering::Relaxed) {
                let pages = pool.revoke(BUDGET / 4);
                source.give_back(pages);
                revoked += pages;
                let stats = pool.stats();
                assert!(stats.budget <= BUDGET, "{stats:?}");
                thread::yield_now();
            }
            revoked
        });
        let users: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (structures, live) = (&structures, &live);
                let mix = move |n: u64| (thread * OPERATIONS + n).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
                scope.spawn(move || (0..OPERATIONS).for_each(|n| operate(structures, mix(n), live)))
            })
            .collect();
        users.into_iter().for_each(|user| user.join().unwrap());
        is_done.store(true, Ordering::Relaxed);
        assert!(revocations.join().unwrap() > 0 || cfg!(miri));
    });
    drop(structures);
    assert_eq!((live.load(Ordering::Relaxed), pool.stats().held), (0, 0));
    drop(pool);
    assert_eq!(source.0.load(Ordering::Relaxed), BUDGET, "all pages return to the source");
}
