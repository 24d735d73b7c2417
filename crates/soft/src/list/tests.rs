//! Tests of the list.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

fn list<T: Send>(pages: usize) -> SoftList<T> {
    SoftList::new(&Pool::new(pages).unwrap(), Priority(0)).unwrap()
}

/// Returns the first number of each value.
fn contents<const N: usize>(list: &SoftList<[u32; N]>) -> Vec<u32> {
    let mut contents = Vec::new();
    list.for_each(|value| contents.push(value[0]));
    contents
}

#[test]
fn three_pages_are_freed_by_eviction_of_the_six_oldest_of_2_kib() {
    // The example of section 3.1 of the paper. The budget leaves no idle pages.
    let list = list(50);
    (0..100).for_each(|value| list.push_back([value; 512]).unwrap());
    assert_eq!((list.usage().held_pages, list.reclaim(3)), (50, 3));
    assert_eq!(contents(&list), (6..100).collect::<Vec<_>>());
    assert_eq!((list.usage().held_pages, list.usage().evicted), (47, 6));
}

#[test]
fn holes_are_used_before_values_are_evicted() {
    let list = list(100);
    // Values at the front and at the back alternate in the pages.
    for value in 0..10 {
        list.push_front([value; 512]).unwrap();
        list.push_back([value; 512]).unwrap();
    }
    for _ in 0..8 {
        list.pop_front();
    }
    assert_eq!((list.usage().held_pages, list.reclaim(4)), (10, 4));
    assert_eq!((list.usage().evicted, contents(&list)), (0, vec![1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]));
}

#[test]
fn both_ends_are_accessible() {
    let list = list(1);
    assert_eq!((list.front(|value| *value), list.pop_back()), (None, None));
    list.push_back(1).unwrap();
    list.push_back(2).unwrap();
    list.push_front(0).unwrap();
    assert_eq!((list.front(|value| *value), list.back(|value| *value)), (Some(0), Some(2)));
    assert_eq!(
        (list.pop_back(), list.pop_front(), list.pop_front(), list.pop_front()),
        (Some(2), Some(0), Some(1), None)
    );
}

#[test]
fn values_at_both_ends_can_be_changed() {
    let list = list(1);
    assert_eq!((list.front_mut(|value: &mut u32| *value), list.back_mut(|value| *value)), (None, None));
    list.try_extend(1..=3).unwrap();
    list.front_mut(|value| *value += 10).unwrap();
    list.back_mut(|value| *value += 20).unwrap();
    assert_eq!((list.pop_front(), list.pop_front(), list.pop_front()), (Some(11), Some(2), Some(23)));
}

#[test]
fn rejected_value_ends_an_extension() {
    let list = list(2);
    let mut values = (0..10).map(|value| [value; 512]);
    let rejected = list.try_extend(values.by_ref()).unwrap_err();
    assert_eq!((rejected.into_value()[0], values.next().unwrap()[0]), (4, 5));
    assert_eq!(contents(&list), [0, 1, 2, 3]);
    list.reclaim(1);
    assert_eq!((list.try_extend(values.by_ref().take(2)), contents(&list)), (Ok(()), vec![2, 3, 6, 7]));
}

#[test]
fn rejected_values_of_retain_are_removed_in_order_and_dropped_without_the_lock() {
    struct Dropped(u32, Arc<SoftList<u32>>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.1.push_back(self.0).unwrap();
        }
    }
    let dropped = Arc::new(list(4));
    let list = list(4);
    (0..300).for_each(|value| list.push_back(Dropped(value, dropped.clone())).unwrap());
    let mut visited = Vec::new();
    list.retain(|value| {
        visited.push(value.0);
        value.0 % 3 == 0
    });
    assert_eq!((visited, list.len(), dropped.len()), ((0..300).collect(), 100, 200));
    let mut kept = 0;
    list.for_each(|value| kept += usize::from(value.0 % 3 == 0));
    assert_eq!((kept, list.usage().held_pages), (100, 2));
    list.shrink_to_fit();
    assert_eq!((list.len(), list.usage().held_pages, list.usage().evicted), (100, 1, 0));
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        list.retain(|value| {
            assert!(value.0 < 30, "closure");
            value.0 >= 9
        });
    }))
    .unwrap_err();
    assert_eq!((list.len(), dropped.len(), list.front(|value| value.0)), (97, 203, Some(9)));
}

#[derive(Clone, Debug)]
enum Operation {
    PushBack,
    PushFront,
    PopBack,
    PopFront,
    Reclaim(usize),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![
        8 => Just(Operation::PushBack),
        4 => Just(Operation::PushFront),
        3 => Just(Operation::PopBack),
        3 => Just(Operation::PopFront),
        1 => (0..5_usize).prop_map(Operation::Reclaim),
    ];
    prop::collection::vec(operation, 0..if cfg!(miri) { 60 } else { 400 })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn list_matches_a_deque(operations in operations()) {
        const BUDGET: usize = 16;
        let list = list(BUDGET);
        let mut model = VecDeque::new();
        for (number, operation) in (0..).zip(operations) {
            match operation {
                Operation::PushBack => match list.push_back([number; 256]) {
                    Ok(()) => model.push_back(number),
                    Err(rejected) => prop_assert_eq!(rejected.value[0], number),
                },
                Operation::PushFront => if list.push_front([number; 256]).is_ok() { model.push_front(number) },
                Operation::PopBack => prop_assert_eq!(list.pop_back().map(|value| value[0]), model.pop_back()),
                Operation::PopFront => prop_assert_eq!(list.pop_front().map(|value| value[0]), model.pop_front()),
                Operation::Reclaim(pages) => {
                    let held = list.usage().held_pages;
                    prop_assert_eq!(list.reclaim(pages), pages.min(held));
                    let evicted = model.len() - list.len();
                    // Four values fill a page. Without a need, nothing is evicted.
                    let needed = model.len().saturating_sub(4 * held.saturating_sub(pages));
                    prop_assert_eq!(evicted, if pages == 0 { 0 } else { needed });
                    model.drain(..evicted);
                }
            }
            prop_assert_eq!(list.len(), model.len());
            prop_assert!(model.len() <= 4 * list.usage().held_pages);
        }
        prop_assert_eq!(contents(&list), Vec::from(model));
    }
}
