//! Tests of the cache.

use std::sync::Mutex;

use proptest::prelude::*;

use super::*;

/// Cache whose entries of 2 KiB fill half a page each.
type Cache = SoftCache<u64, [u64; 255]>;

fn cache(pages: usize) -> Cache {
    SoftCache::new(&Pool::new(pages).unwrap(), Priority(0)).unwrap()
}

fn keys(cache: &Cache) -> Vec<u64> {
    let mut keys = Vec::new();
    cache.for_each(|key, _| keys.push(*key));
    keys
}

#[test]
fn least_recently_used_entries_are_evicted_first() {
    let cache = cache(16);
    for key in 0..8 {
        cache.insert(key, [key; 255]).unwrap();
    }
    cache.get(&0, |_| ()).unwrap();
    cache.peek(&1, |_| ()).unwrap();
    cache.insert(2, [20; 255]).unwrap().unwrap();
    assert_eq!((cache.reclaim(1), keys(&cache)), (1, vec![4, 5, 6, 7, 0, 2]));
}

#[test]
fn entries_of_low_priority_are_evicted_before_less_recent_ones() {
    let cache = cache(16);
    for (key, priority) in
        [EntryPriority::High, EntryPriority::Normal, EntryPriority::Low].into_iter().enumerate()
    {
        for key in [2 * key as u64, 2 * key as u64 + 1] {
            cache.insert_with(priority, key, [key; 255]).unwrap();
        }
    }
    assert_eq!(keys(&cache), [4, 5, 2, 3, 0, 1]);
    assert_eq!((cache.reclaim(1), keys(&cache)), (1, vec![2, 3, 0, 1]));
    cache.insert_with(EntryPriority::High, 2, [2; 255]).unwrap();
    assert_eq!((cache.reclaim(1), keys(&cache)), (1, vec![1, 2]));
}

#[test]
fn full_cache_evicts_for_new_entries() {
    let pool = Pool::new(2).unwrap();
    let evicted: Arc<Mutex<Vec<u64>>> = Arc::default();
    let in_callback = evicted.clone();
    let cache: Cache =
        SoftCache::with_callback(&pool, Priority(0), move |key, _| in_callback.lock().unwrap().push(key))
            .unwrap();
    (0..6).for_each(|key| assert_eq!(cache.insert(key, [key; 255]), Ok(None)));
    assert_eq!((keys(&cache), evicted.lock().unwrap().clone()), (vec![2, 3, 4, 5], vec![0, 1]));
    cache.insert_with(EntryPriority::High, 6, [6; 255]).unwrap();
    assert_eq!(keys(&cache), [3, 4, 5, 6]);
    // A low entry does not displace entries of higher priority.
    let rejected = cache.insert_with(EntryPriority::Low, 7, [7; 255]).unwrap_err();
    assert_eq!((rejected.value.0, keys(&cache)), (7, vec![3, 4, 5, 6]));
    assert_eq!(cache.usage().evicted, 3);
}

#[test]
fn removed_entries_are_returned() {
    let cache = cache(4);
    cache.insert(1, [5; 255]).unwrap();
    assert_eq!(
        (cache.remove(&1).map(|value| value[0]), cache.remove(&1), cache.is_empty()),
        (Some(5), None, true)
    );
}

#[test]
fn order_of_eviction_survives_retain_and_shrink() {
    let cache = cache(16);
    cache.try_extend((0..12).map(|key| (key, [key; 255]))).unwrap();
    cache.get(&0, |_| ()).unwrap();
    assert!(cache.contains_key(&1) && !cache.contains_key(&12));
    cache.retain(|key, value| *key == value[254] && key % 2 == 0);
    assert_eq!((keys(&cache), cache.usage().held_pages), (vec![2, 4, 6, 8, 10, 0], 6));
    cache.shrink_to_fit();
    assert_eq!((keys(&cache), cache.usage().held_pages), (vec![2, 4, 6, 8, 10, 0], 3));
    assert_eq!((cache.reclaim(1), keys(&cache)), (1, vec![6, 8, 10, 0]));
    // A full cache exchanges entries.
    cache.try_extend((20..60).map(|key| (key, [key; 255]))).unwrap();
    assert_eq!((cache.len(), keys(&cache)[0]), (32, 28));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cache_matches_a_list_by_recency(operations in prop::collection::vec((0..12_u8, 0..40_u64, 0..3_usize), 0..if cfg!(miri) { 60 } else { 500 })) {
        const PRIORITIES: [EntryPriority; 3] = [EntryPriority::Low, EntryPriority::Normal, EntryPriority::High];
        let cache = cache(8);
        let mut model: [Vec<u64>; 3] = Default::default();
        for (operation, key, priority) in operations {
            let position = model.iter().position(|keys| keys.contains(&key));
            match operation {
                0 => {
                    prop_assert_eq!(cache.remove(&key).is_some(), position.is_some());
                    model.iter_mut().for_each(|keys| keys.retain(|other| *other != key));
                }
                1 => {
                    cache.reclaim(1);
                    let mut evicted = model.iter().map(Vec::len).sum::<usize>() - cache.len();
                    for keys in &mut model {
                        let count = evicted.min(keys.len());
                        keys.drain(..count);
                        evicted -= count;
                    }
                }
                2..5 => {
                    prop_assert_eq!(cache.get(&key, |value| value[0]), position.map(|_| key));
                    if let Some(position) = position {
                        model[position].retain(|other| *other != key);
                        model[position].push(key);
                    }
                }
                _ => {
                    let is_full = position.is_none() && model.iter().map(Vec::len).sum::<usize>() == 16;
                    let next = model.iter().position(|keys| !keys.is_empty()).unwrap_or(0);
                    let result = cache.insert_with(PRIORITIES[priority], key, [key; 255]);
                    prop_assert_eq!(result.is_err(), is_full && next > priority);
                    if result.is_ok() {
                        if is_full {
                            model[next].remove(0);
                        }
                        model.iter_mut().for_each(|keys| keys.retain(|other| *other != key));
                        model[priority].push(key);
                    }
                }
            }
            prop_assert_eq!(keys(&cache), model.concat());
        }
    }
}
