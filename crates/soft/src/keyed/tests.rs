//! Tests of keys whose `Hash` or `Eq` panics.

use std::{
    cell::Cell,
    hash::Hasher,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
};

use crate::{Pool, Priority, SoftCache, SoftHashMap};

thread_local! {
    /// Whether `Hash` panics.
    static HASH_PANICS: Cell<bool> = const { Cell::new(false) };
    /// Number of calls of `Eq` before the one that panics.
    static EQ_CALLS_LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Key with the same hash as all other keys.
#[derive(Debug)]
struct Key(u64);

impl std::hash::Hash for Key {
    fn hash<H: Hasher>(&self, _: &mut H) {
        assert!(!HASH_PANICS.get(), "hash");
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        let left = EQ_CALLS_LEFT.get().checked_sub(1);
        EQ_CALLS_LEFT.set(left.unwrap_or(usize::MAX));
        assert!(left.is_some(), "eq");
        self.0 == other.0
    }
}

impl Eq for Key {}

/// Value of half a page, and a counter of the values.
type Value = ([u64; 250], Arc<()>);

fn value(number: u64, counter: &Arc<()>) -> Value {
    ([number; 250], counter.clone())
}

/// Checks that a panic of `Hash` or `Eq` in each operation leaves three entries unchanged.
fn check_map(mut arm: impl FnMut()) {
    let (pool, counter) = (Pool::new(8).unwrap(), Arc::new(()));
    let map = SoftHashMap::new(&pool, Priority(0)).unwrap();
    let cache = SoftCache::new(&pool, Priority(0)).unwrap();
    for number in 0..3 {
        map.insert(Key(number), value(number, &counter)).unwrap();
        cache.insert(Key(number), value(number, &counter)).unwrap();
    }
    let operations: [&dyn Fn() -> bool; 9] = [
        &|| map.get(&Key(0), |_| ()).is_some(),
        &|| map.get_mut(&Key(0), |_| ()).is_some(),
        &|| map.contains_key(&Key(0)),
        &|| map.insert(Key(0), value(9, &counter)).is_ok(),
        &|| map.insert(Key(9), value(9, &counter)).is_ok(),
        &|| map.remove(&Key(0)).is_some(),
        &|| cache.get(&Key(0), |_| ()).is_some(),
        &|| cache.insert(Key(0), value(9, &counter)).is_ok(),
        &|| cache.remove(&Key(0)).is_some(),
    ];
    for operation in operations {
        arm();
        catch_unwind(AssertUnwindSafe(operation)).unwrap_err();
        HASH_PANICS.set(false);
        assert_eq!((map.len(), cache.len(), Arc::strong_count(&counter), pool.stats().held), (3, 3, 7, 4));
    }
    let (mut of_map, mut of_cache) = (Vec::new(), Vec::new());
    map.for_each(|key, (numbers, _)| of_map.push((key.0, numbers[249])));
    cache.for_each(|key, (numbers, _)| of_cache.push((key.0, numbers[249])));
    assert_eq!((&of_map[..], &of_cache[..]), (&[(0, 0), (1, 1), (2, 2)][..], &[(0, 0), (1, 1), (2, 2)][..]));
}

#[test]
fn panic_of_hash_changes_nothing() {
    check_map(|| HASH_PANICS.set(true));
}

#[test]
fn panic_of_eq_changes_nothing() {
    check_map(|| EQ_CALLS_LEFT.set(0));
}

#[test]
fn revocation_calls_neither_hash_nor_eq() {
    let (pool, counter) = (Pool::new(8).unwrap(), Arc::new(()));
    let map = SoftHashMap::new(&pool, Priority(0)).unwrap();
    let cache = SoftCache::new(&pool, Priority(1)).unwrap();
    for number in 0..8 {
        map.insert(Key(number), value(number, &counter)).unwrap();
        cache.insert(Key(number), value(number, &counter)).unwrap();
    }
    // Compaction moves the remaining entries.
    map.remove(&Key(0)).unwrap();
    map.remove(&Key(3)).unwrap();
    HASH_PANICS.set(true);
    EQ_CALLS_LEFT.set(0);
    assert_eq!((pool.revoke(3), map.len(), cache.len()), (3, 2, 8));
    map.retain(|key, _| key.0 != 6);
    cache.shrink_to_fit();
    assert_eq!((pool.revoke(8), map.len(), cache.len()), (5, 0, 0));
    assert_eq!((Arc::strong_count(&counter), pool.stats().held, EQ_CALLS_LEFT.get()), (1, 0, 0));
}

#[test]
fn entry_that_was_evicted_before_a_panic_of_eq_is_passed_to_the_callback() {
    let (pool, counter, evicted) = (Pool::new(2).unwrap(), Arc::new(()), Arc::new(Mutex::new(Vec::new())));
    let in_callback = evicted.clone();
    let cache = SoftCache::with_callback(&pool, Priority(0), move |key: Key, _: Value| {
        in_callback.lock().unwrap().push(key.0);
    })
    .unwrap();
    (0..4).for_each(|number| drop(cache.insert(Key(number), value(number, &counter)).unwrap()));
    // The insertion of a fifth entry compares its key several times with each other key.
    let mut panics = 0;
    loop {
        EQ_CALLS_LEFT.set(panics);
        let insert = || cache.insert(Key(100), value(100, &counter)).unwrap().is_some();
        let result = catch_unwind(AssertUnwindSafe(insert));
        let evicted = evicted.lock().unwrap();
        assert_eq!(cache.len() + evicted.len(), 4 + usize::from(result.is_ok()), "{panics} comparisons");
        assert_eq!(Arc::strong_count(&counter), 1 + cache.len());
        assert_eq!((cache.usage().evicted, pool.stats().held <= 2), (evicted.len() as u64, true));
        if result.is_ok() {
            break;
        }
        panics += 1;
    }
    EQ_CALLS_LEFT.set(usize::MAX);
    assert!(panics > 4, "{panics}");
    assert_eq!(evicted.lock().unwrap()[..], [0]);
    assert_eq!(cache.get(&Key(100), |(numbers, _)| numbers[0]), Some(100));
}
