//! Tests of the cache of byte strings.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, AtomicUsize},
};

use proptest::prelude::*;

use super::*;
use crate::BudgetSource;

fn cache(pages: usize) -> (Arc<Pool>, SoftByteCache) {
    let pool = Pool::new(pages).unwrap();
    let cache = SoftByteCache::new(&pool, Priority(0)).unwrap();
    (pool, cache)
}

/// Returns the keys in the order of eviction.
fn keys(cache: &SoftByteCache) -> Vec<Vec<u8>> {
    let mut keys = Vec::new();
    cache.for_each(|key, _| keys.push(key.to_vec()));
    keys
}

fn value(cache: &SoftByteCache, key: &[u8]) -> Option<Vec<u8>> {
    cache.peek(key, <[u8]>::to_vec)
}

/// Inserts entries `first..last` with keys of four bytes. With 94 bytes, an entry fills a slot of 112 bytes after
/// the length of the key and 12 unused bytes, and a page has 36 slots.
fn fill(cache: &SoftByteCache, numbers: std::ops::Range<u32>, value_bytes: usize) {
    for number in numbers {
        cache.insert(&number.to_be_bytes(), &[&vec![7; value_bytes]]).unwrap();
    }
}

#[test]
fn values_are_replaced_by_values_of_other_lengths() {
    let (pool, cache) = cache(64);
    assert_eq!(cache.insert(b"a", &[b"one", b"", b"two"]), Ok(false));
    assert_eq!(value(&cache, b"a"), Some(b"onetwo".to_vec()));
    assert_eq!(cache.insert(b"a", &[b"", b"sixsix"]), Ok(true));
    assert_eq!(value(&cache, b"a"), Some(b"sixsix".to_vec()));
    assert_eq!(cache.insert(b"a", &[&[5; 40_000]]), Ok(true));
    assert_eq!((value(&cache, b"a"), cache.len()), (Some(vec![5; 40_000]), 1));
    assert_eq!(cache.insert(b"a", &[]), Ok(true));
    assert_eq!((value(&cache, b"a"), pool.stats().held), (Some(Vec::new()), 1));
    assert_eq!(cache.insert(b"", &[b"empty key"]), Ok(false));
    assert_eq!((value(&cache, b""), cache.contains_key(b"b")), (Some(b"empty key".to_vec()), false));
    assert_eq!((cache.remove(b"a"), cache.remove(b"a"), cache.len()), (true, false, 1));
    cache.clear();
    assert!(cache.is_empty());
    assert_eq!(pool.stats().held, 0);
}

#[test]
fn entries_are_retained_by_key_and_value() {
    let (pool, cache) = cache(64);
    fill(&cache, 0..360, 94);
    cache.insert(b"large", &[&[8; 40_000]]).unwrap();
    assert_eq!(pool.stats().held, 20);
    cache.retain(|key, value| value[0] == 8 || key[3] % 2 == 0);
    assert_eq!(
        (cache.len(), cache.contains_key(b"large"), cache.contains_key(&[0, 0, 0, 1])),
        (181, true, false)
    );
    cache.shrink_to_fit();
    assert_eq!((pool.stats().held, keys(&cache)[1].clone()), (15, vec![0, 0, 0, 2]));
    cache.retain(|_, _| false);
    assert_eq!((cache.len(), cache.usage().evicted), (0, 0));
}

#[test]
fn memory_that_became_available_after_an_error_is_used() {
    let (pool, cache) = cache(4);
    let entry = |key| NewEntry::new(cache.hash(key), EntryPriority::Normal, key, &[&[7; 94]]).unwrap();
    let error = SoftError::OutOfBudget { pages: 1 };
    assert_eq!(cache.insert_by_eviction(&entry(b"a"), error), Ok(false), "budget");
    assert_eq!(pool.revoke(3), 3);
    assert_eq!(cache.insert_by_eviction(&entry(b"b"), error), Ok(false), "free slot");
    assert_eq!((cache.len(), cache.usage().evicted), (2, 0));
}

#[test]
fn values_are_changed_in_place() {
    let (_, cache) = cache(16);
    cache.insert(b"k", &[b"abc"]).unwrap();
    cache.get_mut(b"k", |value| value[1] = b'x').unwrap();
    assert_eq!((value(&cache, b"k"), cache.get_mut(b"l", |_| ())), (Some(b"axc".to_vec()), None));
}

#[test]
fn least_recently_used_entries_of_the_lowest_priority_are_evicted_first() {
    let (_, cache) = cache(16);
    for (key, priority) in [
        (b"high", EntryPriority::High),
        (b"norm", EntryPriority::Normal),
        (b"old!", EntryPriority::Normal),
        (b"low1", EntryPriority::Low),
        (b"low2", EntryPriority::Low),
    ] {
        cache.insert_with(priority, key, &[&[1; 4000]]).unwrap();
    }
    cache.get(b"norm", |_| ()).unwrap();
    cache.get_mut(b"low1", |_| ()).unwrap();
    cache.peek(b"old!", |_| ()).unwrap();
    assert_eq!(keys(&cache), [b"low2", b"low1", b"old!", b"norm", b"high"]);
    assert_eq!((cache.reclaim(3), keys(&cache)), (3, vec![b"norm".to_vec(), b"high".to_vec()]));
    // Replacing a value by one of the same length changes the priority, too.
    cache.insert_with(EntryPriority::Low, b"high", &[&[2; 4000]]).unwrap();
    assert_eq!(keys(&cache), [b"high", b"norm"]);
    let usage = cache.usage();
    assert_eq!((usage.held_pages, usage.evicted, usage.reclamations), (2, 3, 1));
}

#[test]
fn entry_of_the_same_class_replaces_one_entry() {
    let (pool, cache) = cache(4);
    fill(&cache, 0..144, 94);
    assert_eq!((cache.len(), pool.stats().held), (144, 4));
    fill(&cache, 144..146, 94);
    assert_eq!((cache.len(), keys(&cache)[0].clone()), (144, vec![0, 0, 0, 2]));
    assert_eq!((cache.usage().evicted, cache.usage().reclamations), (2, 0));
}

#[test]
fn entry_of_another_class_replaces_a_page_of_entries() {
    let (pool, cache) = cache(16);
    fill(&cache, 0..576, 94);
    assert_eq!((cache.len(), pool.stats().held), (576, 16));
    // Every second entry is used again, so that the evicted entries are spread over all pages.
    (0..288).for_each(|number: u32| cache.get(&(2 * number).to_be_bytes(), |_| ()).unwrap());
    cache.insert(b"large", &[&[9; 4000]]).unwrap();
    assert_eq!((cache.len(), pool.stats().held), (541, 16));
    assert_eq!(keys(&cache)[0], 73_u32.to_be_bytes());
    assert_eq!(value(&cache, b"large"), Some(vec![9; 4000]));
    // Compaction moved the remaining entries. Their contents are unchanged.
    let mut count = 0;
    cache.for_each(|key, value| count += usize::from(key.len() == 4 && value == [7; 94]));
    assert_eq!(count, 540);
}

#[test]
fn large_entry_evicts_in_several_steps() {
    let (pool, cache) = cache(16);
    fill(&cache, 0..576, 94);
    cache.insert(b"large", &[&[9; 9 * 4096 - 7]]).unwrap();
    assert_eq!((cache.len(), pool.stats().held), (253, 16));
    assert_eq!(keys(&cache)[0], 324_u32.to_be_bytes());
}

#[test]
fn entry_that_exceeds_the_budget_evicts_nothing() {
    let (_, cache) = cache(16);
    fill(&cache, 0..100, 94);
    let error = cache.insert(b"large", &[&[9; 17 * 4096]]).unwrap_err();
    assert_eq!((error, cache.len()), (SoftError::OutOfBudget { pages: 18 }, 100));
    // The largest entry that fits evicts all others.
    cache.insert(b"large", &[&[9; 16 * 4096 - 7]]).unwrap();
    assert_eq!(keys(&cache), [b"large"]);
    assert_eq!(
        cache.insert(&vec![1; 1 << 16], &[]),
        Err(SoftError::KeyTooLong { bytes: 65_536, maximum: 65_535 })
    );
    assert_eq!(cache.insert(&vec![1; (1 << 16) - 1], &[]), Err(SoftError::OutOfBudget { pages: 17 }));
}

#[test]
fn entry_of_low_priority_does_not_displace_others() {
    let (_, cache) = cache(2);
    cache.insert_with(EntryPriority::High, b"high", &[&[1; 4000]]).unwrap();
    cache.insert_with(EntryPriority::Low, b"low", &[&[2; 4000]]).unwrap();
    cache.insert_with(EntryPriority::Low, b"low2", &[&[3; 4000]]).unwrap();
    assert_eq!(keys(&cache), [b"low2".to_vec(), b"high".to_vec()]);
    cache.insert_with(EntryPriority::High, b"high2", &[&[4; 4000]]).unwrap();
    let error = cache.insert_with(EntryPriority::Normal, b"norm", &[&[5; 4000]]).unwrap_err();
    assert_eq!(
        (error, keys(&cache)),
        (SoftError::OutOfBudget { pages: 1 }, vec![b"high".to_vec(), b"high2".to_vec()])
    );
}

/// Source that counts requests and grants nothing.
#[derive(Default)]
struct Counting(AtomicUsize);

impl BudgetSource for Counting {
    fn request(&self, _: usize) -> usize {
        self.0.fetch_add(1, Ordering::Relaxed);
        0
    }

    fn give_back(&self, _: usize) {}
}

#[test]
fn full_cache_requests_budget_once_per_interval() {
    let source = Arc::new(Counting::default());
    let pool = Pool::with_source(4, 1024, source.clone()).unwrap();
    let cache = SoftByteCache::new(&pool, Priority(0)).unwrap();
    fill(&cache, 0..144, 94);
    assert_eq!(source.0.load(Ordering::Relaxed), 0);
    fill(&cache, 144..145, 94);
    // One insertion requests a large and a small number of pages.
    assert_eq!(source.0.load(Ordering::Relaxed), 2);
    fill(&cache, 145..400, 94);
    assert_eq!(source.0.load(Ordering::Relaxed), 2);
    fill(&cache, 400..401, 94);
    assert_eq!((source.0.load(Ordering::Relaxed), cache.len()), (4, 144));
}

#[test]
fn entries_are_evicted_if_the_address_space_is_exhausted() {
    // Address space of four chunks of 16 pages, and a larger budget.
    let pool = Pool::with_source(1000, 64, Arc::new(Counting::default())).unwrap();
    let cache = SoftByteCache::new(&pool, Priority(0)).unwrap();
    fill(&cache, 0..64, 4000);
    assert_eq!((cache.len(), pool.stats().held), (64, 64));
    fill(&cache, 64..70, 4000);
    assert_eq!((cache.len(), keys(&cache)[0].clone()), (64, 6_u32.to_be_bytes().to_vec()));
    // A run of 17 pages needs two adjacent chunks.
    cache.insert(b"run", &[&[1; 17 * 4096 - 16]]).unwrap();
    assert_eq!(value(&cache, b"run"), Some(vec![1; 17 * 4096 - 16]));
    let error = cache.insert(b"long", &[&[1; 65 * 4096]]).unwrap_err();
    assert_eq!((error, cache.contains_key(b"run")), (SoftError::OutOfAddressSpace { pages: 80 }, true));
}

#[test]
fn revoked_budget_shrinks_the_cache_by_its_least_recent_entries() {
    let (pool, cache) = cache(16);
    fill(&cache, 0..576, 94);
    assert_eq!((pool.revoke(8), pool.stats().held, cache.len()), (8, 8, 288));
    assert_eq!(keys(&cache)[0], 288_u32.to_be_bytes());
    assert_eq!((pool.revoke(100), cache.len(), cache.get(&[0; 4], |_| ())), (8, 0, None));
    assert_eq!(cache.insert(b"a", &[b"b"]), Err(SoftError::OutOfBudget { pages: 1 }));
    assert_eq!((cache.usage().evicted, cache.usage().reclamations), (576, 2));
}

#[test]
fn panicking_closures_leave_the_cache_usable() {
    let (pool, cache) = cache(16);
    fill(&cache, 0..3, 94);
    let key = 0_u32.to_be_bytes();
    let calls: [&dyn Fn(); 5] = [
        &|| cache.get(&key, |_| panic!("in a test")).unwrap(),
        &|| cache.peek(&key, |_| panic!("in a test")).unwrap(),
        &|| {
            cache.get_mut(&key, |value| {
                value[0] = 8;
                panic!("in a test")
            });
        },
        &|| cache.for_each(|_, _| panic!("in a test")),
        &|| {
            cache.scan(ScanCursor::default(), 16, |_, _| panic!("in a test"));
        },
    ];
    for call in calls {
        catch_unwind(AssertUnwindSafe(call)).unwrap_err();
        assert_eq!(cache.len(), 3);
    }
    assert_eq!(value(&cache, &key).unwrap()[..2], [8, 7]);
    assert_eq!((pool.revoke(16), cache.len()), (16, 0));
}

#[test]
fn nested_access_is_detected() {
    let (_, cache) = cache(16);
    cache.insert(b"a", &[b"b"]).unwrap();
    let nested = || cache.get(b"a", |_| cache.len());
    assert!(catch_unwind(AssertUnwindSafe(nested)).is_err());
    assert_eq!(cache.len(), 1);
}

#[test]
fn scan_visits_each_entry_once_and_removes_by_decision() {
    let (_, cache) = cache(64);
    fill(&cache, 0..100, 94);
    fill(&cache, 100..110, 5000);
    fill(&cache, 110..112, 40_000);
    let mut visited = Vec::new();
    let mut cursor = Some(ScanCursor::default());
    let mut steps = 0;
    while let Some(position) = cursor {
        steps += 1;
        cursor = cache.scan(position, 2, |key, _| {
            let number = u32::from_be_bytes(key.try_into().unwrap());
            visited.push(number);
            if number % 2 == 0 { ScanDecision::Remove } else { ScanDecision::Keep }
        });
    }
    visited.sort_unstable();
    assert_eq!((visited, cache.len()), ((0..112).collect::<Vec<_>>(), 56));
    assert!((10..200).contains(&steps), "{steps}");
    assert_eq!(keys(&cache)[..2], [1_u32.to_be_bytes(), 3_u32.to_be_bytes()]);
    assert_eq!(cache.scan(ScanCursor(u32::MAX), 2, |_, _| ScanDecision::Remove), None);
}

const PRIORITIES: [EntryPriority; 3] = [EntryPriority::Low, EntryPriority::Normal, EntryPriority::High];

/// Operation of the model test. Keys have different lengths.
#[derive(Clone, Debug)]
enum Operation {
    Insert { key: u8, priority: usize, bytes: usize, split: usize },
    Get(u8),
    Remove(u8),
    Reclaim(usize),
    Scan { page: u32, pages: u32 },
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let bytes = prop_oneof![6 => 0..300_usize, 2 => 300..5000_usize, 1 => 5000..60_000_usize];
    let operation = prop_oneof![
        8 => (any::<u8>(), 0..3_usize, bytes, any::<usize>())
            .prop_map(|(key, priority, bytes, split)| Operation::Insert { key, priority, bytes, split }),
        4 => any::<u8>().prop_map(Operation::Get),
        1 => any::<u8>().prop_map(Operation::Remove),
        1 => (0..5_usize).prop_map(Operation::Reclaim),
        1 => (0..60_u32, 0..20_u32).prop_map(|(page, pages)| Operation::Scan { page, pages }),
    ];
    prop::collection::vec(operation, 0..if cfg!(miri) { 40 } else { 400 })
}

fn key_bytes(key: u8) -> Vec<u8> {
    vec![key; usize::from(key % 40)].into_iter().chain([key]).collect()
}

/// Entry of the model: priority, key and value.
type ModelEntry = (usize, Vec<u8>, Vec<u8>);

/// Model of a cache: a list in the order of eviction.
#[derive(Clone, Debug, Default)]
struct Model(Vec<ModelEntry>);

impl Model {
    fn remove(&mut self, key: &[u8]) -> Option<ModelEntry> {
        let position = self.0.iter().position(|(_, other, _)| other == key)?;
        Some(self.0.remove(position))
    }

    fn push(&mut self, entry: ModelEntry) {
        let position = self.0.iter().take_while(|(priority, _, _)| *priority <= entry.0).count();
        self.0.insert(position, entry);
    }

    /// Drops entries from the front until as many entries are left as the cache has, without `kept`. Returns the
    /// highest priority of the dropped entries.
    fn evict_to(&mut self, len: usize, kept: Option<&[u8]>) -> Option<usize> {
        let mut highest = None;
        while self.0.len() > len {
            let next = self.0.iter().position(|(_, key, _)| Some(&key[..]) != kept)?;
            highest = highest.max(Some(self.0.remove(next).0));
        }
        highest
    }
}

fn contents(cache: &SoftByteCache) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut contents = Vec::new();
    cache.for_each(|key, value| contents.push((key.to_vec(), value.to_vec())));
    contents
}

fn apply(cache: &SoftByteCache, model: &mut Model, operation: Operation) -> Result<(), TestCaseError> {
    match operation {
        Operation::Insert { key, priority, bytes, split } => {
            let key = key_bytes(key);
            let value: Vec<u8> = (0..bytes).map(|n| n.to_le_bytes()[0] ^ key[0]).collect();
            let (first, second) = value.split_at(split % (bytes + 1));
            let result = cache.insert_with(PRIORITIES[priority], &key, &[first, second]);
            let mut kept = None;
            if let Ok(replaced) = result {
                let old = model.remove(&key);
                // The old value may have been evicted for the new one.
                prop_assert!(old.is_some() || !replaced);
                model.push((priority, key.clone(), value));
                kept = Some(&key[..]);
            }
            let highest = model.evict_to(cache.len(), kept);
            prop_assert!(highest.is_none_or(|highest| highest <= priority));
        }
        Operation::Get(key) => {
            let key = key_bytes(key);
            let found = cache.get(&key, <[u8]>::to_vec);
            let entry = model.remove(&key);
            prop_assert_eq!(found, entry.as_ref().map(|(_, _, value)| value.clone()));
            entry.into_iter().for_each(|entry| model.push(entry));
        }
        Operation::Remove(key) => {
            prop_assert_eq!(cache.remove(&key_bytes(key)), model.remove(&key_bytes(key)).is_some());
        }
        Operation::Reclaim(pages) => {
            let held = cache.usage().held_pages;
            let freed = cache.reclaim(pages);
            prop_assert!(freed >= pages.min(held) && cache.usage().held_pages == held - freed);
            model.evict_to(cache.len(), None);
        }
        Operation::Scan { page, pages } => {
            let mut removed = Vec::new();
            cache.scan(ScanCursor(page), pages, |key, _| {
                if key[0] % 8 != 0 {
                    return ScanDecision::Keep;
                }
                removed.push(key.to_vec());
                ScanDecision::Remove
            });
            for key in removed {
                prop_assert!(model.remove(&key).is_some());
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cache_matches_a_list_by_recency(
        budget in 1..60_usize,
        chunks in prop_oneof![3 => Just(100_usize), 1 => 1..6_usize],
        operations in operations(),
    ) {
        let pool = Pool::with_source(budget, chunks * 16, Arc::new(Counting::default())).unwrap();
        let cache = SoftByteCache::new(&pool, Priority(0)).unwrap();
        let mut model = Model::default();
        for operation in operations {
            apply(&cache, &mut model, operation)?;
            let expected = model.0.iter().map(|(_, key, value)| (key.clone(), value.clone()));
            prop_assert_eq!(contents(&cache), expected.collect::<Vec<_>>());
            prop_assert!(pool.stats().held <= budget && pool.stats().held == cache.usage().held_pages);
        }
    }
}

/// Source that has a number of pages.
#[derive(Default)]
struct Reserve(AtomicUsize);

impl BudgetSource for Reserve {
    fn request(&self, pages: usize) -> usize {
        let granted = pages.min(self.0.load(Ordering::Relaxed));
        self.0.fetch_sub(granted, Ordering::Relaxed);
        granted
    }

    fn give_back(&self, pages: usize) {
        self.0.fetch_add(pages, Ordering::Relaxed);
    }
}

#[test]
fn empty_cache_without_budget_requests_budget_for_each_entry() {
    let source = Arc::new(Reserve::default());
    let pool = Pool::with_source(0, 1024, source.clone()).unwrap();
    let cache = SoftByteCache::new(&pool, Priority(0)).unwrap();
    for key in [b"a", b"b", b"c"] {
        assert_eq!(cache.insert(key, &[b"value"]), Err(SoftError::OutOfBudget { pages: 1 }));
    }
    source.give_back(1);
    assert_eq!(cache.insert(b"d", &[b"value"]), Ok(false));
    // A full cache requests budget for an entry that does not fit in place of others.
    source.give_back(8);
    assert_eq!(cache.insert(b"large", &[&[1; 20_000]]), Ok(false));
    assert_eq!((cache.len(), pool.stats().budget), (2, 9));
}

#[test]
fn revocations_are_complete_while_another_thread_inserts_without_errors() {
    let rounds = if cfg!(miri) { 2 } else { 100 };
    for value_bytes in [94, 3000, 20_000] {
        let (pool, cache) = cache(256);
        let (is_done, inserted) = (AtomicBool::new(false), AtomicUsize::new(0));
        let (error, revoked) = std::thread::scope(|scope| {
            let inserter = scope.spawn(|| {
                let mut numbers = (0..u32::MAX).take_while(|_| !is_done.load(Ordering::Relaxed));
                let value = vec![7; value_bytes];
                numbers.find_map(|number| {
                    inserted.fetch_add(1, Ordering::Relaxed);
                    cache.insert(&number.to_be_bytes(), &[&value]).err()
                })
            });
            let revoked = (0..rounds).map(|round| {
                let before = inserted.load(Ordering::Relaxed);
                while inserted.load(Ordering::Relaxed) < before + 300 && !inserter.is_finished() {
                    std::thread::yield_now();
                }
                let pages = if round % 2 == 0 { 240 } else { 32 };
                let revoked = pool.revoke(pages);
                pool.grant(revoked);
                revoked
            });
            let revoked: Vec<_> = revoked.collect();
            is_done.store(true, Ordering::Relaxed);
            (inserter.join().unwrap(), revoked)
        });
        assert_eq!(error, None, "{value_bytes} bytes");
        assert_eq!(revoked, [240, 32].repeat(rounds / 2), "{value_bytes} bytes");
    }
}
