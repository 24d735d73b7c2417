//! Tests of the vector.

use std::sync::Mutex;

use proptest::prelude::*;

use super::*;

fn vec_with_budget<T: Send>(pages: usize) -> SoftVec<T> {
    SoftVec::new(&Pool::new(pages).unwrap(), Priority(0)).unwrap()
}

#[test]
fn reclamation_evicts_all_elements() {
    let pool = Pool::new(100).unwrap();
    let evicted: Arc<Mutex<Vec<u64>>> = Arc::default();
    let in_callback = evicted.clone();
    let vec =
        SoftVec::with_callback(&pool, Priority(0), move |value| in_callback.lock().unwrap().push(value))
            .unwrap();
    (0..2000).for_each(|value| vec.push(value).unwrap());
    let held = pool.stats().held;
    assert_eq!((vec.reclaim(0), vec.len()), (0, 2000));
    assert_eq!((vec.reclaim(1), vec.len(), vec.capacity(), pool.stats().held), (held, 0, 0, 0));
    assert_eq!(*evicted.lock().unwrap(), (0..2000).rev().collect::<Vec<_>>());
    assert_eq!((vec.revocations(), vec.usage().evicted), (1, 1));
    vec.push(5).unwrap();
    assert_eq!((vec.get(0, |value| *value), vec.get(1, |value| *value)), (Some(5), None));
}

#[test]
fn empty_vector_has_nothing_to_reclaim() {
    let vec = vec_with_budget::<u64>(1);
    assert_eq!((vec.reclaim(1), vec.revocations()), (0, 0));
}

#[test]
fn overflow_of_the_size_is_an_error() {
    let vec = vec_with_budget::<u64>(16);
    vec.push(1).unwrap();
    for count in [usize::MAX, usize::MAX / 8, isize::MAX as usize / 8, 1 << 40] {
        assert_eq!(vec.try_reserve(count), Err(SoftError::TooLarge), "{count}");
    }
    assert_eq!(vec.try_reserve(1 << 20), Err(SoftError::OutOfBudget { pages: 2049 }));
    assert_eq!(vec.with_slice(<[u64]>::to_vec), [1]);
}

#[test]
fn growth_uses_the_last_pages_of_the_budget() {
    let vec = vec_with_budget::<[u8; 4096]>(20);
    (0..8).for_each(|value| vec.push([value; 4096]).unwrap());
    // Doubling needs 16 more pages beside the 8 of the old block. One more element needs 9.
    vec.push([8; 4096]).unwrap();
    assert_eq!((vec.capacity(), vec.usage().held_pages), (9, 9));
    vec.with_slice(|values| (0..9).for_each(|value| assert_eq!(values[usize::from(value)], [value; 4096])));
}

#[test]
fn growth_near_the_budget_moves_elements_rarely() {
    let vec = vec_with_budget::<u64>(90);
    let (mut capacities, mut pushed) = (vec![0], 0);
    while vec.push(pushed).is_ok() {
        pushed += 1;
        if vec.capacity() != *capacities.last().unwrap() {
            capacities.push(vec.capacity());
        }
    }
    let last = capacities.len() - 1;
    assert_eq!(capacities[last - 3..], [16_384, 18_432, 20_992, 24_064], "32, 36, 41 and 47 pages");
    assert_eq!(pushed, 24_064);
}

#[test]
fn elements_without_bytes_need_no_pages() {
    let vec = vec_with_budget::<()>(0);
    (0..100).for_each(|_| vec.push(()).unwrap());
    assert_eq!((vec.len(), vec.pop(), vec.len(), vec.usage().held_pages), (100, Some(()), 99, 0));
    vec.clear();
    assert!(vec.is_empty());
}

#[test]
fn elements_can_be_changed() {
    let vec = vec_with_budget(1);
    (0..3).for_each(|value| vec.push(value).unwrap());
    assert_eq!(vec.get_mut(1, |value| std::mem::replace(value, 9)), Some(1));
    vec.with_mut_slice(|values| values.reverse());
    assert_eq!(vec.with_slice(<[i32]>::to_vec), [2, 9, 0]);
}

#[test]
fn retained_elements_keep_their_order() {
    let vec = vec_with_budget(4);
    vec.try_extend((0..10).map(Box::new)).unwrap();
    vec.retain(|value| **value % 3 != 0);
    assert!(vec.with_slice(|values| values.iter().map(|value| **value).eq([1, 2, 4, 5, 7, 8])));
    let panic = std::panic::AssertUnwindSafe(|| vec.retain(|value| **value < 5 && panic!("closure")));
    std::panic::catch_unwind(panic).unwrap_err();
    assert_eq!(vec.len(), 6);
    vec.truncate(2);
    vec.truncate(3);
    assert!(vec.with_slice(|values| values.iter().map(|value| **value).eq([1, 2])));
    let numbers = vec_with_budget(4);
    numbers.try_extend(0..1000_u64).unwrap();
    numbers.retain(|number| number % 2 == 0);
    assert_eq!((numbers.len(), numbers.get(499, |number| *number)), (500, Some(998)));
}

#[test]
fn element_that_is_rejected_ends_an_extension() {
    let vec = vec_with_budget(4);
    let mut elements = 0_u64..;
    let error = vec.try_extend(elements.by_ref()).unwrap_err();
    assert_eq!((error.into_value(), vec.len(), elements.next()), (1024, 1024, Some(1025)));
}

#[test]
fn memory_shrinks_to_the_elements_if_both_blocks_fit() {
    let vec = vec_with_budget::<[u8; 4096]>(20);
    vec.try_reserve(16).unwrap();
    vec.try_extend((0..16).map(|value| [value; 4096])).unwrap();
    vec.truncate(5);
    // The old block has 16 pages, and the new one needs 5.
    vec.shrink_to_fit();
    assert_eq!((vec.capacity(), vec.usage().held_pages), (16, 16));
    vec.truncate(4);
    vec.shrink_to_fit();
    assert_eq!((vec.capacity(), vec.usage().held_pages), (4, 4));
    vec.with_slice(|values| (0..4).for_each(|value| assert_eq!(values[usize::from(value)], [value; 4096])));
    vec.truncate(0);
    vec.shrink_to_fit();
    assert_eq!((vec.capacity(), vec.usage().held_pages), (0, 0));
    vec.push([7; 4096]).unwrap();
    assert_eq!((vec.len(), vec.revocations()), (1, 0));
    let without_bytes = vec_with_budget::<()>(1);
    without_bytes.push(()).unwrap();
    without_bytes.shrink_to_fit();
    assert_eq!((without_bytes.len(), without_bytes.push(())), (1, Ok(())));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn vector_matches_a_vec(operations in prop::collection::vec(0..20_u8, 0..if cfg!(miri) { 100 } else { 2000 })) {
        let vec = vec_with_budget(8);
        let mut model: Vec<Box<usize>> = Vec::new();
        for (number, operation) in operations.into_iter().enumerate() {
            match operation {
                0..4 => prop_assert_eq!(vec.pop(), model.pop()),
                4 if number % 7 == 0 => {
                    vec.reclaim(1);
                    model.clear();
                }
                5 => drop(vec.try_reserve(number)),
                _ => match vec.push(Box::new(number)) {
                    Ok(()) => model.push(Box::new(number)),
                    Err(rejected) => prop_assert_eq!(*rejected.value, number),
                },
            }
            prop_assert_eq!(vec.len(), model.len());
            prop_assert!(vec.usage().held_pages <= 8);
        }
        prop_assert!(vec.with_slice(|values| values == model));
    }
}
