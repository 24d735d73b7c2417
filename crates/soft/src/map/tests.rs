//! Tests of the hash map.

use std::{
    collections::BTreeMap,
    hash::{BuildHasherDefault, Hasher},
};

use proptest::prelude::*;

use super::*;

/// Hasher that returns the same hash for all keys.
#[derive(Default)]
struct Constant;

impl Hasher for Constant {
    fn finish(&self) -> u64 {
        7
    }

    fn write(&mut self, _: &[u8]) {}
}

fn map<K: Eq + Hash + Send, V: Send>(pages: usize) -> SoftHashMap<K, V> {
    SoftHashMap::new(&Pool::new(pages).unwrap(), Priority(0)).unwrap()
}

#[test]
fn oldest_entries_are_evicted_first_with_their_keys() {
    let map = map(64);
    for key in 0..64_u64 {
        map.insert(key, [key; 255]).unwrap();
    }
    map.get(&0, |_| ()).unwrap();
    map.insert(1, [100; 255]).unwrap();
    assert_eq!((map.reclaim(2), map.len()), (2, 60));
    assert!((0..4).all(|key| !map.contains_key(&key)));
    assert_eq!(map.get(&4, |value| value[0]), Some(4));
}

#[test]
fn borrowed_keys_find_entries() {
    let map = map(4);
    assert_eq!(map.insert("one".to_owned(), 1), Ok(None));
    assert_eq!(map.insert("one".to_owned(), 2), Ok(Some(1)));
    assert_eq!((map.get("one", |value| *value), map.get("two", |value| *value)), (Some(2), None));
    assert_eq!((map.remove("one"), map.remove("one"), map.is_empty()), (Some(2), None, true));
}

#[test]
fn colliding_hashes_are_distinguished() {
    let pool = Pool::new(64).unwrap();
    let hasher = BuildHasherDefault::<Constant>::default();
    let map = SoftHashMap::with_hasher(&pool, Priority(0), hasher).unwrap();
    for key in 0..50_u64 {
        map.insert(key, [key; 100]).unwrap();
    }
    map.reclaim(5);
    map.for_each(|key, value| assert_eq!(value, &[*key; 100]));
    let len = map.len();
    assert_eq!((0..50).filter(|key| map.get(key, |value| value[0]) == Some(*key)).count(), len);
}

#[test]
fn cleared_map_holds_no_pages() {
    let map = map(64);
    for key in 0..100 {
        map.insert(key, key).unwrap();
    }
    map.clear();
    assert_eq!((map.len(), map.usage().held_pages, map.contains_key(&5)), (0, 0, false));
}

#[test]
fn entries_are_retained_by_key_and_value() {
    let map = map(64);
    map.try_extend((0..1000_u32).map(|key| (key.to_string(), key))).unwrap();
    let held = map.usage().held_pages;
    map.retain(|key, value| {
        *value += 1;
        key.len() == 3 && *value % 2 == 1
    });
    assert_eq!((map.len(), map.contains_key("10"), map.contains_key("101")), (450, false, false));
    assert_eq!((map.get("100", |value| *value), map.get("998", |value| *value)), (Some(101), Some(999)));
    map.shrink_to_fit();
    assert_eq!((map.len(), map.usage().evicted), (450, 0));
    assert!(map.usage().held_pages <= held / 2 + 1, "{} of {held}", map.usage().held_pages);
    // Removed entries that need no drop are not copied.
    let numbers = self::map(8);
    numbers.try_extend((0..100_u64).map(|key| (key, [key; 10]))).unwrap();
    numbers.retain(|key, _| *key >= 90);
    assert_eq!((numbers.len(), numbers.get(&95, |value| value[9])), (10, Some(95)));
}

#[test]
fn rejected_entry_ends_an_extension() {
    let map = map(2);
    let error = map.try_extend((0..10_u64).map(|key| (key, [key; 255]))).unwrap_err();
    assert_eq!((error.into_value().0, map.len()), (4, 4));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn map_matches_a_hash_map(operations in prop::collection::vec((0..12_u8, 0..80_u64), 0..if cfg!(miri) { 60 } else { 500 })) {
        let map = map(8);
        let mut model: BTreeMap<u64, u64> = BTreeMap::new();
        let mut order: Vec<u64> = Vec::new();
        for (number, (operation, key)) in (0..).zip(operations) {
            match operation {
                0..3 => {
                    prop_assert_eq!(map.remove(&key).map(|value: [u64; 50]| value[0]), model.remove(&key));
                    order.retain(|other| *other != key);
                }
                3 => {
                    map.reclaim(1);
                    let evicted = order.len() - map.len();
                    for key in order.drain(..evicted) {
                        model.remove(&key);
                    }
                }
                4..6 => prop_assert_eq!(map.get(&key, |value| value[0]), model.get(&key).copied()),
                _ => if let Ok(replaced) = map.insert(key, [number; 50]) {
                    prop_assert_eq!(replaced.map(|value| value[0]), model.insert(key, number));
                    if replaced.is_none() {
                        order.push(key);
                    }
                },
            }
            prop_assert_eq!(map.len(), model.len());
        }
        let mut entries = Vec::new();
        map.for_each(|key, value| entries.push((*key, value[0])));
        prop_assert_eq!(entries, order.iter().map(|key| (*key, model[key])).collect::<Vec<_>>());
    }
}
