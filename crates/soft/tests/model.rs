//! Models of concurrent use. With `--cfg shuttle`, Shuttle runs the threads of a model one at a time, and switches
//! between them at each use of a lock or an atomic. It finds wrong results and deadlocks in orders that are rare with
//! threads of the system. `cargo xtask test` runs the models.

#![cfg(shuttle)]
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::sync::Arc;

use shuttle::{
    sync::{Condvar, Mutex},
    thread,
};
use soft::{BudgetSource, Pool, PoolStats, Priority, SoftBlocks, SoftByteCache, SoftError, SoftList};

/// Number of orders of each kind, random and of few switches, if `TARN_MODEL_ORDERS` is not set.
const ORDERS_DEFAULT: usize = 1000;
/// Number of switches between runnable threads, at most, in orders of few switches (probabilistic concurrency testing).
const SWITCHES_MAX: usize = 3;

/// Value of which two fit into a page.
type Value = [u8; 2000];

fn check(model: impl Fn() + Send + Sync + Clone + 'static) {
    let orders = std::env::var("TARN_MODEL_ORDERS").map_or(ORDERS_DEFAULT, |orders| orders.parse().unwrap());
    shuttle::check_random(model.clone(), orders);
    shuttle::check_pct(model, orders, SWITCHES_MAX);
}

/// Runs functions on a thread each, and returns their results.
fn run_all<R: Send + 'static>(functions: Vec<Box<dyn FnOnce() -> R + Send>>) -> Vec<R> {
    let threads: Vec<_> = functions.into_iter().map(thread::spawn).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn list_of(pool: &Arc<Pool>, priority: u8, values: u8) -> SoftList<Value> {
    let list = SoftList::new(pool, Priority(priority)).unwrap();
    (0..values).for_each(|value| list.push_back([value; 2000]).unwrap());
    list
}

/// Values of a list in their order. Each must be intact.
fn values_of(list: &SoftList<Value>) -> Vec<u8> {
    let value = |value: Value| {
        assert!(value.iter().all(|byte| *byte == value[0]));
        value[0]
    };
    std::iter::from_fn(|| list.pop_front()).map(value).collect()
}

type Revocation = Box<dyn FnOnce() -> usize + Send>;

fn revoke(pool: &Arc<Pool>, pages: usize) -> Revocation {
    let pool = pool.clone();
    Box::new(move || pool.revoke(pages))
}

#[test]
fn concurrent_revocations_take_what_all_need_in_the_order_of_priorities() {
    check(|| {
        let pool = Pool::new(10).unwrap();
        let (low, high) = (list_of(&pool, 1, 12), list_of(&pool, 2, 8));
        assert_eq!(run_all(vec![revoke(&pool, 1), revoke(&pool, 2), revoke(&pool, 3)]), [1, 2, 3]);
        assert_eq!((low.len(), high.len(), pool.stats()), (0, 8, PoolStats { budget: 4, held: 4 }));
    });
}

#[test]
fn concurrent_revocations_with_callbacks_evict_each_value_once() {
    check(|| {
        let pool = Pool::new(6).unwrap();
        let evicted = Arc::new(Mutex::new(Vec::new()));
        let sink = evicted.clone();
        let list = SoftList::with_callback(&pool, Priority(0), move |value: Value| {
            sink.lock().unwrap().push(value[0]);
        });
        let list = list.unwrap();
        (0..12).for_each(|value| list.push_back([value; 2000]).unwrap());
        assert_eq!(run_all(vec![revoke(&pool, 1), revoke(&pool, 1), revoke(&pool, 2)]), [1, 1, 2]);
        let mut evicted = evicted.lock().unwrap().clone();
        evicted.sort_unstable();
        assert_eq!(evicted, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(pool.stats(), PoolStats { budget: 2, held: 2 });
    });
}

#[test]
fn budget_is_exact_after_revocations_insertions_and_grants() {
    check(|| {
        let pool = Pool::new(4).unwrap();
        let list = Arc::new(list_of(&pool, 0, 8));
        let (revoker, granter) = (pool.clone(), pool.clone());
        let (producer, consumer) = (list.clone(), list.clone());
        let revoked = run_all::<usize>(vec![
            Box::new(move || revoker.revoke(2) + revoker.revoke(1)),
            Box::new(move || {
                granter.grant(2);
                0
            }),
            Box::new(move || {
                (10..14).for_each(|value| drop(producer.push_back([value; 2000])));
                0
            }),
            Box::new(move || {
                let _ = (consumer.pop_front(), consumer.pop_front());
                0
            }),
        ]);
        let PoolStats { budget, held } = pool.stats();
        assert_eq!(budget + revoked[0], 6);
        assert!(held <= budget && list.usage().held_pages == held, "{budget} {held} {:?}", list.usage());
        let values = values_of(&list);
        assert!(values.is_sorted(), "{values:?}");
        assert_eq!(pool.stats().held, list.usage().held_pages);
    });
}

/// Source that demands pages from the pool before it answers a request, as the daemon can.
#[derive(Default)]
struct DemandingSource {
    state: Mutex<Exchange>,
    changed: Condvar,
}

#[derive(Default)]
struct Exchange {
    requested: usize,
    granted: Option<usize>,
    returned: usize,
}

impl DemandingSource {
    /// Takes a page from the pool, and then grants the next request.
    fn demand_and_grant(&self, pool: &Pool) -> usize {
        let revoked = pool.revoke(1);
        let mut state = self.state.lock().unwrap();
        while state.requested == 0 {
            state = self.changed.wait(state).unwrap();
        }
        state.granted = Some(state.requested);
        self.changed.notify_all();
        revoked
    }
}

impl BudgetSource for DemandingSource {
    fn request(&self, _: usize) -> usize {
        let mut state = self.state.lock().unwrap();
        state.requested = 2;
        self.changed.notify_all();
        loop {
            match state.granted {
                Some(granted) => return granted,
                None => state = self.changed.wait(state).unwrap(),
            }
        }
    }

    fn give_back(&self, pages: usize) {
        self.state.lock().unwrap().returned += pages;
    }
}

#[test]
fn pool_answers_demands_while_it_waits_for_budget() {
    check(|| {
        let source = Arc::new(DemandingSource::default());
        let pool = Pool::with_source(2, 1024, source.clone()).unwrap();
        let list = Arc::new(list_of(&pool, 0, 4));
        let (demanding, revocable, growing) = (source.clone(), pool.clone(), list.clone());
        let results = run_all::<usize>(vec![
            Box::new(move || demanding.demand_and_grant(&revocable)),
            Box::new(move || (4..6).filter(|value| growing.push_back([*value; 2000]).is_ok()).count()),
        ]);
        assert_eq!(results, [1, 2]);
        // The two oldest values are evicted in all orders.
        assert_eq!(values_of(&list), [2, 3, 4, 5]);
        drop(list);
        let PoolStats { budget, .. } = pool.stats();
        drop(pool);
        assert_eq!(source.state.lock().unwrap().returned, budget);
    });
}

#[test]
fn pinned_block_is_intact_until_its_pin_is_dropped() {
    check(|| {
        let pool = Pool::new(4).unwrap();
        let blocks = Arc::new(SoftBlocks::new(&pool, Priority(0)).unwrap());
        let handles: Vec<_> = (0..3).map(|_| blocks.allocate(1000).unwrap()).collect();
        for (byte, handle) in (1..).zip(&handles) {
            blocks.get_mut(*handle, |block| block.fill(byte)).unwrap();
        }
        let (revoker, pinner) = (pool.clone(), blocks.clone());
        drop(blocks); // the last thread drops the structure
        run_all::<usize>(vec![
            Box::new(move || revoker.revoke(4)),
            Box::new(move || {
                let Ok(pin) = pinner.pin(handles[1]) else { return 0 };
                drop(pinner);
                thread::yield_now();
                assert!(pin.iter().all(|byte| *byte == 2));
                0
            }),
        ]);
        assert_eq!(pool.stats().held, 0, "the structure and its pins are dropped");
    });
}

#[test]
fn callback_can_insert_into_another_structure() {
    check(|| {
        let pool = Pool::new(8).unwrap();
        let saved = Arc::new(SoftByteCache::new(&pool, Priority(9)).unwrap());
        let (evicted, cache) = (Arc::new(Mutex::new(0)), saved.clone());
        let counter = evicted.clone();
        let list = SoftList::with_callback(&pool, Priority(0), move |value: Value| {
            assert!(value.iter().all(|byte| *byte == value[0]));
            *counter.lock().unwrap() += 1;
            match cache.insert(&value[..1], &[b"evicted"]) {
                Ok(_) | Err(SoftError::OutOfBudget { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        });
        let list = Arc::new(list.unwrap());
        (0..8).for_each(|value| list.push_back([value; 2000]).unwrap());
        let (one, other, reader) = (pool.clone(), pool.clone(), list.clone());
        let revoked = run_all::<usize>(vec![
            Box::new(move || one.revoke(3)),
            Box::new(move || other.revoke(3)),
            Box::new(move || reader.front(|value| usize::from(value[0] > 7)).unwrap_or(0)),
        ]);
        let PoolStats { budget, held } = pool.stats();
        assert_eq!((budget + revoked[0] + revoked[1], revoked[2]), (8, 0));
        assert!(held <= budget && list.usage().held_pages + saved.usage().held_pages == held);
        assert_eq!(*evicted.lock().unwrap() + list.len(), 8, "each value is evicted once");
    });
}
