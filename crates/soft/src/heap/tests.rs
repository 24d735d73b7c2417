//! Tests of the allocator.

use std::sync::Arc;

use proptest::prelude::*;

use super::{
    arena::Arena,
    bytes::ByteValues,
    classes::CHUNK_PAGES,
    pool::{Pool, PoolStats},
    slots::{Block, Compact as _, Records as _},
    values::Values,
};
use crate::error::{PoolError, SoftError};

/// Number of cases of the property tests, which Miri executes slowly.
fn cases() -> ProptestConfig {
    if cfg!(miri) {
        return ProptestConfig { cases: 4, failure_persistence: None, ..ProptestConfig::default() };
    }
    ProptestConfig::default()
}

fn stats(budget: usize, held: usize) -> PoolStats {
    PoolStats { budget, held }
}

#[test]
fn arena_takes_chunks_in_steps_and_reuses_idle_pages() {
    let pool = Pool::new(100).unwrap();
    let mut arena = Arena::new(pool.clone());
    let pages: Vec<_> = (0..20).map(|_| arena.take(1).unwrap()).collect();
    assert_eq!((pages.clone(), arena.held_pages()), ((0..20).collect(), 20));
    arena.give_back(3, 1);
    arena.give_back(4, 2);
    assert_eq!((arena.idle_pages(), arena.take(2), arena.take(1)), (3, Ok(3), Ok(5)));
    assert_eq!(pool.stats(), stats(100, 20));
    drop(arena);
    assert_eq!(pool.stats(), stats(100, 0));
}

#[test]
fn scattered_idle_pages_are_released_if_the_budget_lacks_consecutive_pages() {
    let pool = Pool::new(16).unwrap();
    let mut arena = Arena::new(pool.clone());
    (0..16).for_each(|page| assert_eq!(arena.take(1), Ok(page)));
    (0..8).for_each(|page| arena.give_back(2 * page, 1));
    assert_eq!(arena.take(2), Ok(16));
    assert_eq!((arena.held_pages(), arena.idle_pages()), (10, 0));
    assert_eq!(arena.take(7), Err(SoftError::OutOfBudget { pages: 7 }));
    assert_eq!((arena.take_run(6).is_ok(), arena.held_pages()), (true, 16));
}

#[test]
fn empty_chunks_return_to_the_pool() {
    let pool = Pool::with_source(64, 32, Arc::new(NoSource)).unwrap();
    let mut arena = Arena::new(pool.clone());
    let page = arena.take_run(32).unwrap();
    assert_eq!(arena.take(1), Err(SoftError::OutOfAddressSpace { pages: 16 }));
    arena.give_back_run(page);
    let pages: Vec<_> = (0..32).map(|_| arena.take(1).unwrap()).collect();
    pages.into_iter().for_each(|page| arena.give_back(page, 1));
    assert_eq!((arena.release_idle(5), arena.held_pages()), (5, 27));
    assert_eq!((arena.release_idle(100), pool.stats().held), (27, 0));
    assert!(Arena::new(pool).take_run(32).is_ok(), "all chunks are free");
}

/// Scattered pages of 40 chunks were returned to the kernel. Runs of three pages only exist in the first chunk.
#[test]
fn all_chunks_are_searched_if_no_chunk_is_free() {
    let pages = 40 * CHUNK_PAGES;
    let pool = Pool::with_source(pages as usize, pages as usize, Arc::new(NoSource)).unwrap();
    let mut arena = Arena::new(pool);
    (0..pages).for_each(|page| assert_eq!(arena.take(1), Ok(page)));
    arena.give_back(2, 3);
    arena.release_idle(3);
    for chunk in 1..40 {
        arena.give_back(chunk * CHUNK_PAGES, 1);
        arena.release_idle(1);
    }
    assert_eq!(arena.take(3), Ok(2));
    assert_eq!(arena.take(2), Err(SoftError::OutOfAddressSpace { pages: 16 }));
    assert_eq!((0..39).map(|_| arena.take(1).is_ok()).filter(|is_taken| *is_taken).count(), 39);
}

struct NoSource;

impl super::BudgetSource for NoSource {
    fn request(&self, _: usize) -> usize {
        0
    }

    fn give_back(&self, _: usize) {}
}

#[test]
fn idle_pages_of_a_heap_are_limited() {
    let pool = Pool::new(1000).unwrap();
    let mut arena = Arena::new(pool);
    let pages: Vec<_> = (0..500).map(|_| arena.take(1).unwrap()).collect();
    for page in pages {
        arena.give_back(page, 1);
        assert!(arena.idle_pages() <= units::limits::SOFT_IDLE_PAGES_MAX);
    }
    assert_eq!(arena.held_pages(), arena.idle_pages());
}

#[test]
fn address_space_has_limits() {
    for pages in [0, units::limits::SOFT_POOL_PAGES_MAX + 1] {
        let error = Pool::with_source(1, pages, Arc::new(NoSource)).unwrap_err();
        assert!(matches!(error, PoolError::AddressSpace { .. }), "{error}");
    }
    let pool = Pool::with_source(1, 1, Arc::new(NoSource)).unwrap();
    assert_eq!(pool.address_range().len(), CHUNK_PAGES as usize * super::PAGE_BYTES);
    assert!(matches!(Pool::new(usize::MAX), Err(PoolError::AddressSpace { .. })));
}

#[test]
fn wrong_blocks_are_detected() {
    let pool = Pool::new(16).unwrap();
    let mut values: Values<u64, ()> = Values::new(pool).unwrap();
    let first = values.insert(1, ()).unwrap();
    values.insert(2, ()).unwrap();
    assert_eq!(values.remove(first), (1, ()));
    let access = |values: &mut Values<u64, ()>| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| values.remove(first).0))
    };
    assert!(access(&mut values).is_err());
    assert_eq!(values.len(), 1);
}

#[test]
fn compaction_moves_values_of_sparse_spans_to_dense_ones() {
    let pool = Pool::new(64).unwrap();
    let mut values: Values<[u8; 1024], usize> = Values::new(pool.clone()).unwrap();
    let blocks: Vec<_> = (0..40_u8).map(|n| values.insert([n; 1024], n.into()).unwrap()).collect();
    // Ten pages of four slots. One value stays in each of eight pages, and four in two pages.
    for (n, block) in blocks.iter().enumerate().filter(|(n, _)| n % 4 != 0 && *n < 32) {
        assert_eq!(values.remove(*block), ([u8::try_from(n).unwrap(); 1024], n));
    }
    assert_eq!((values.held_pages(), values.unused_pages()), (10, 6));
    let mut moved = Vec::new();
    let freed = values.free_unused(usize::MAX, |records, _, to| moved.push((to, *records.record(to))));
    assert!(moved.iter().all(|(to, n)| usize::from(values.get(*to)[1023]) == *n));
    assert_eq!((freed, moved.len(), pool.stats().held, values.unused_pages()), (6, 6, 4, 0));
}

#[cfg(not(miri))]
#[test]
fn held_pages_are_exactly_the_resident_pages() {
    use crate::resident::resident_pages;

    let pool = Pool::new(1000).unwrap();
    assert_eq!(resident_pages(&pool), 0);
    let mut values: Values<[u8; 100], ()> = Values::new(pool.clone()).unwrap();
    let blocks: Vec<_> = (0..10_000).map(|_| values.insert([7; 100], ()).unwrap()).collect();
    assert_eq!(resident_pages(&pool), values.held_pages());
    let first = values.held_pages();
    for block in blocks.iter().enumerate().filter(|(n, _)| n % 3 > 0).map(|(_, block)| block) {
        values.forget(*block);
    }
    let freed = values.free_unused(usize::MAX, |_, _, _| {});
    assert!(freed >= first / 2);
    assert_eq!(values.held_pages(), 10_000_usize.div_ceil(3).div_ceil(36));
    assert_eq!(resident_pages(&pool), values.held_pages());
    // Released pages are backed again.
    for _ in 0..5000 {
        values.insert([8; 100], ()).unwrap();
    }
    assert_eq!(resident_pages(&pool), values.held_pages());
    drop(values);
    assert_eq!(resident_pages(&pool), 0);
}

/// Operation of the model test.
#[derive(Clone, Debug)]
enum Operation {
    Insert,
    Remove(prop::sample::Index),
    FreeUnused(usize),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![
        4 => Just(Operation::Insert),
        3 => any::<prop::sample::Index>().prop_map(Operation::Remove),
        1 => (0..6_usize).prop_map(Operation::FreeUnused),
    ];
    prop::collection::vec(operation, 0..if cfg!(miri) { 60 } else { 400 })
}

/// Value with a padding to `N` bytes.
fn value<const N: usize>(number: u64) -> (u64, [u8; N], Arc<u64>) {
    (number, [number.to_le_bytes()[0]; N], Arc::new(number))
}

/// Runs operations on a heap and on a vector, and compares them.
fn compare_with_model<const N: usize>(
    budget: usize,
    operations: Vec<Operation>,
) -> Result<(), TestCaseError> {
    let pool = Pool::new(budget).unwrap();
    let mut values: Values<(u64, [u8; N], Arc<u64>), u64> = Values::new(pool.clone()).unwrap();
    let mut model: Vec<(Block, u64)> = Vec::new();
    let mut counter = 0;
    for operation in operations {
        match operation {
            Operation::Insert => {
                counter += 1;
                match values.insert(value(counter), counter) {
                    Ok(block) => model.push((block, counter)),
                    Err(rejected) => prop_assert_eq!(rejected.value.0, counter),
                }
            }
            Operation::Remove(index) if !model.is_empty() => {
                let (block, number) = model.swap_remove(index.index(model.len()));
                let (value, record) = values.remove(block);
                prop_assert_eq!((value.0, *value.2, record), (number, number, number));
                prop_assert!(value.1.iter().all(|byte| *byte == number.to_le_bytes()[0]));
            }
            Operation::Remove(_) => {}
            Operation::FreeUnused(pages) => {
                let (held, unused) = (values.held_pages(), values.unused_pages());
                let freed = values.free_unused(pages, |_, from, to| {
                    let entry = model.iter_mut().find(|(block, _)| *block == from);
                    entry.expect("only values are moved").0 = to;
                });
                prop_assert_eq!(values.held_pages(), held - freed);
                prop_assert!(freed >= pages.min(unused) && freed <= unused);
            }
        }
        prop_assert_eq!(values.len(), model.len());
        prop_assert_eq!(pool.stats(), stats(budget, values.held_pages()));
        prop_assert!(values.held_pages() <= budget);
    }
    for (block, number) in model {
        prop_assert_eq!((values.get(block).0, *values.record(block)), (number, number));
    }
    drop(values);
    prop_assert_eq!(pool.stats(), stats(budget, 0));
    Ok(())
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn small_values_match_a_model(operations in operations()) {
        compare_with_model::<0>(8, operations)?;
    }

    #[test]
    fn values_in_spans_of_several_pages_match_a_model(operations in operations()) {
        compare_with_model::<2900>(64, operations)?;
    }

    #[test]
    fn values_in_runs_match_a_model(operations in operations()) {
        compare_with_model::<40_000>(300, operations)?;
    }
}

/// Operation on byte strings.
#[derive(Clone, Debug)]
enum ByteOperation {
    Insert(Vec<u8>, usize),
    InsertZeros(usize),
    Remove(prop::sample::Index),
    FreeUnused(usize),
}

fn byte_operations() -> impl Strategy<Value = Vec<ByteOperation>> {
    let bytes = prop_oneof![
        4 => prop::collection::vec(any::<u8>(), 0..300),
        1 => prop::collection::vec(any::<u8>(), 5000..40_000),
    ];
    let operation = prop_oneof![
        4 => (bytes, any::<usize>()).prop_map(|(bytes, split)| ByteOperation::Insert(bytes, split)),
        1 => (0..5000_usize).prop_map(ByteOperation::InsertZeros),
        4 => any::<prop::sample::Index>().prop_map(ByteOperation::Remove),
        1 => (0..20_usize).prop_map(ByteOperation::FreeUnused),
    ];
    prop::collection::vec(operation, 0..if cfg!(miri) { 30 } else { 300 })
}

/// Runs operations on a heap of byte strings and on a vector, and compares them.
fn compare_bytes_with_model(budget: usize, operations: Vec<ByteOperation>) -> Result<(), TestCaseError> {
    let pool = Pool::new(budget).unwrap();
    let mut values: ByteValues<u64> = ByteValues::new(pool.clone());
    let mut model: Vec<(Block, Vec<u8>, u64)> = Vec::new();
    for (number, operation) in (0..).zip(operations) {
        match operation {
            ByteOperation::Insert(bytes, split) => {
                let (first, second) = bytes.split_at(split % (bytes.len() + 1));
                if let Ok(block) = values.insert(&[first], &[second], number) {
                    model.push((block, bytes, number));
                }
            }
            ByteOperation::InsertZeros(bytes) => {
                if let Ok(block) = values.insert_zeros(bytes, number) {
                    values.get_mut(block).fill(7);
                    model.push((block, vec![7; bytes], number));
                }
            }
            ByteOperation::Remove(index) if !model.is_empty() => {
                let (block, _, number) = model.swap_remove(index.index(model.len()));
                prop_assert_eq!(values.remove(block), number);
            }
            ByteOperation::Remove(_) => {}
            ByteOperation::FreeUnused(pages) => {
                let unused = values.unused_pages();
                let freed = values.free_unused(pages, |_, from, to| {
                    let moved = model.iter_mut().find(|(block, _, _)| *block == from);
                    moved.expect("the block is allocated").0 = to;
                });
                prop_assert!(freed >= pages.min(unused));
            }
        }
        prop_assert_eq!((values.len(), values.held_pages()), (model.len(), pool.stats().held));
        prop_assert!(pool.stats().held <= budget);
    }
    for (block, bytes, number) in &model {
        prop_assert_eq!((values.get(*block), *values.record(*block).as_ref()), (&bytes[..], *number));
    }
    drop(values);
    prop_assert_eq!(pool.stats().held, 0);
    Ok(())
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn byte_strings_keep_their_contents(budget in 1..200_usize, operations in byte_operations()) {
        compare_bytes_with_model(budget, operations)?;
    }
}

#[test]
fn byte_strings_longer_than_a_pool_are_rejected() {
    let pool = Pool::new(4).unwrap();
    let mut values: ByteValues<()> = ByteValues::new(pool);
    assert_eq!(values.insert_zeros(usize::MAX, ()), Err(SoftError::TooLarge));
    assert_eq!(values.insert_zeros(1 << 32, ()), Err(SoftError::TooLarge));
    assert_eq!(values.insert_zeros(5 << 12, ()), Err(SoftError::OutOfBudget { pages: 5 }));
    let empty = values.insert(&[], &[], ()).unwrap();
    assert_eq!(values.get(empty), b"");
}
