//! Pools that are connected to the daemon, and take pages from each other.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use soft::{
    Pool, Priority, SoftBlocks, SoftByteCache, SoftList,
    budget::{Counters, Pid},
    client::connect,
};

use crate::{Load, daemon::Server};

/// Number of operations of each thread by default.
const OPERATIONS: u64 = 20_000;
/// Soft memory of all pools in pages, which is less than the threads use.
const PAGES: u64 = 1024;
/// Number of pools.
const POOLS: u32 = 4;
/// Time after which the books must agree.
const DEADLINE: Duration = Duration::from_secs(60);

/// Structures of a pool.
struct Client {
    pool: Arc<Pool>,
    pid: Pid,
    list: SoftList<[u64; 100]>,
    bytes: SoftByteCache,
    blocks: SoftBlocks,
}

impl Client {
    fn new(server: &Server, pid: Pid) -> Self {
        let pool = connect(&server.socket(), 2 * PAGES as usize).unwrap();
        Self {
            list: SoftList::with_callback(&pool, Priority(1), |value: [u64; 100]| check(&value)).unwrap(),
            bytes: SoftByteCache::new(&pool, Priority(0)).unwrap(),
            blocks: SoftBlocks::with_callback(&pool, Priority(2), |_, bytes| check(bytes)).unwrap(),
            pool,
            pid,
        }
    }

    /// Performs one operation that depends on the number.
    fn operate(&self, number: u64) {
        let Self { pool, list, bytes, blocks, .. } = self;
        let byte = number as u8;
        let key = (number >> 8) as u16;
        match number % 32 {
            0..10 => drop(list.push_back([number; 100])),
            10 => drop(list.pop_front()),
            11 => drop(list.front(|value| check(value))),
            12..20 => {
                let value = vec![byte; (number >> 8) as usize % 3000];
                let _ = bytes.insert(&key.to_le_bytes(), &[&value]);
            }
            20..24 => drop(bytes.get(&key.to_le_bytes(), check)),
            24..28 => {
                let Ok(handle) = blocks.allocate((number >> 8) as usize % 2000) else { return };
                let _ = blocks.get_mut(handle, |block| block.fill(byte));
                let _ = blocks.pin(handle).map(|pin| check(&pin));
            }
            28 => list.set_priority(Priority(byte % 3)),
            29 => drop(pool.give_back_unused()),
            30 if number.is_multiple_of(64) => drop(pool.give_back(key as usize % 100)),
            _ => drop(list.reclaim(2)),
        }
    }
}

/// Checks that all parts of a value are equal.
fn check<T: PartialEq>(parts: &[T]) {
    assert!(parts.iter().all(|part| *part == parts[0]));
}

fn wait_until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < deadline, "the books do not agree");
        thread::yield_now();
    }
}

#[test]
fn connected_pools_and_the_daemon_have_the_same_books() {
    let load = Load::from_environment(OPERATIONS);
    let server = Server::start(PAGES);
    let clients: Vec<_> = (1..=POOLS).map(|pid| Client::new(&server, Pid(pid))).collect();
    thread::scope(|scope| {
        for (thread, client) in (0..load.threads).zip(clients.iter().cycle()) {
            scope.spawn(move || load.run(thread, |number| client.operate(number)));
        }
    });
    let daemon = server.daemon.clone();
    // Messages can be on their way.
    wait_until(|| {
        let daemon = daemon.lock().unwrap();
        let has_budget =
            |client: &Client| daemon.ledger().budget(client.pid) == client.pool.stats().budget as u64;
        clients.iter().all(has_budget)
    });
    for Client { pool, list, bytes, blocks, .. } in &clients {
        let usages = [list.usage(), bytes.usage(), blocks.usage()];
        assert_eq!(usages.map(|usage| usage.held_pages).iter().sum::<usize>(), pool.stats().held);
        assert_eq!(usages.map(|usage| usage.callback_panics), [0; 3]);
    }
    let Counters { granted, reclaimed, .. } = daemon.lock().unwrap().counters();
    assert!(granted > PAGES && reclaimed > 0, "granted: {granted}, reclaimed: {reclaimed}");
    drop(clients);
    wait_until(|| daemon.lock().unwrap().ledger().clients().count() == 0);
    let ledger = daemon.lock().unwrap().ledger().clone();
    assert_eq!(ledger.free(), ledger.total());
    server.stop();
}
