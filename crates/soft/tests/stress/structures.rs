//! All structures of a pool, while several threads revoke pages, return budget and change priorities. The final books
//! are compared with independent counts.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use soft::{
    BudgetSource, EntryPriority, Handle, Pinned, Pool, Priority, ScanCursor, ScanDecision, SoftBlocks,
    SoftByteCache, SoftCache, SoftHashMap, SoftList, SoftVec, Usage,
};

use crate::{Load, mix};

/// Number of operations of each thread by default.
const OPERATIONS: u64 = if cfg!(miri) { 40 } else { 20_000 };
/// Pages of the source, which are less than the threads use.
const TOTAL: usize = if cfg!(miri) { 24 } else { 256 };
/// Number of threads that revoke pages.
const REVOKERS: u64 = 3;
/// Maximum number of blocks, and of pins, that a thread keeps.
const BLOCKS_MAX: usize = 20;
const PINS_MAX: usize = 3;

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

/// Source with a constant number of pages, to which revoked pages return.
struct Bank(AtomicUsize);

impl Bank {
    /// Takes up to this number of pages.
    fn take(&self, pages: usize) -> usize {
        let take = |free: usize| Some(free - free.min(pages));
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).unwrap_or(0);
        before.min(pages)
    }
}

impl BudgetSource for Bank {
    fn request(&self, pages: usize) -> usize {
        self.take(pages)
    }

    fn give_back(&self, pages: usize) {
        self.0.fetch_add(pages, Ordering::Relaxed);
    }
}

/// Numbers of values of the list, and of blocks, as counted by the threads and callbacks.
#[derive(Default)]
struct Counts {
    pushed: AtomicU64,
    popped: AtomicU64,
    evicted: AtomicU64,
    allocated: AtomicU64,
    freed: AtomicU64,
    evicted_blocks: AtomicU64,
}

fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Ordering::Relaxed);
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

struct Structures {
    list: SoftList<Checked>,
    vec: SoftVec<Checked>,
    map: SoftHashMap<u64, Checked>,
    cache: SoftCache<u64, Checked>,
    bytes: SoftByteCache,
    blocks: SoftBlocks,
    live: Arc<AtomicUsize>,
    counts: Arc<Counts>,
}

impl Structures {
    fn new(pool: &Arc<Pool>) -> Self {
        let counts = Arc::new(Counts::default());
        let (of_list, of_blocks) = (counts.clone(), counts.clone());
        let evicted = move |value: Checked| {
            value.check();
            add(&of_list.evicted, 1);
        };
        let evicted_block = move |_, bytes: &[u8]| {
            check_equal(bytes);
            add(&of_blocks.evicted_blocks, 1);
        };
        Self {
            list: SoftList::with_callback(pool, Priority(2), evicted).unwrap(),
            vec: SoftVec::new(pool, Priority(0)).unwrap(),
            map: SoftHashMap::new(pool, Priority(3)).unwrap(),
            cache: SoftCache::new(pool, Priority(1)).unwrap(),
            bytes: SoftByteCache::new(pool, Priority(1)).unwrap(),
            blocks: SoftBlocks::with_callback(pool, Priority(2), evicted_block).unwrap(),
            live: Arc::default(),
            counts,
        }
    }

    fn usages(&self) -> [Usage; 6] {
        let Self { list, vec, map, cache, bytes, blocks, .. } = self;
        [list.usage(), vec.usage(), map.usage(), cache.usage(), bytes.usage(), blocks.usage()]
    }

    fn set_priority(&self, number: u64) {
        let priority = Priority((number >> 8) as u8 % 4);
        match number % 6 {
            0 => self.list.set_priority(priority),
            1 => self.vec.set_priority(priority),
            2 => self.map.set_priority(priority),
            3 => self.cache.set_priority(priority),
            4 => self.bytes.set_priority(priority),
            _ => self.blocks.set_priority(priority),
        }
    }

    /// Performs one operation that depends on the number.
    fn operate(&self, number: u64) {
        let Self { list, vec, map, cache, live, counts, .. } = self;
        let value = || Checked::new(number, live);
        let key = number % 997;
        match number % 19 {
            0 | 1 => add(&counts.pushed, usize::from(list.push_back(value()).is_ok())),
            2 => add(&counts.popped, usize::from(list.pop_front().is_some())),
            3 => drop(list.front(Checked::check)),
            4 => drop(vec.push(value())),
            5 => vec.with_slice(|values| values.iter().take(20).for_each(Checked::check)),
            6 => drop(map.insert(key, value())),
            7 => drop(map.get(&key, Checked::check)),
            8 => drop(map.remove(&key)),
            9 | 10 => drop(cache.insert_with(EntryPriority::Normal, key, value())),
            11 => drop(cache.get(&key, Checked::check)),
            12..=15 => self.operate_on_bytes(number % 19, number),
            16 => self.remove_many(number >> 5),
            _ => drop(cache.reclaim(usize::from(number.is_multiple_of(2)))),
        }
    }

    fn operate_on_bytes(&self, operation: u64, number: u64) {
        let key = (number % 997).to_le_bytes();
        match operation {
            12 | 13 => {
                let parts: [&[u8]; 2] = [&[key[0]; 100], &vec![key[0]; (number >> 8) as usize % 6000]];
                let _ = self.bytes.insert_with(EntryPriority::Normal, &key, &parts);
            }
            14 => drop(self.bytes.get(&key, |value| check_bytes(&key, value))),
            _ => {
                self.bytes.scan(ScanCursor::default(), 8, |key, value| {
                    check_bytes(key, value);
                    if key[0] % 8 == 0 { ScanDecision::Remove } else { ScanDecision::Keep }
                });
            }
        }
    }

    /// Removes values of one of the structures, or moves its values together.
    fn remove_many(&self, number: u64) {
        let Self { list, vec, map, cache, bytes, counts, .. } = self;
        let keep = |value: &Checked| {
            value.check();
            !value.numbers[0].is_multiple_of(8)
        };
        match number % 8 {
            0 => {
                let mut removed = 0;
                list.retain(|value| {
                    let is_kept = keep(value);
                    removed += usize::from(!is_kept);
                    is_kept
                });
                add(&counts.popped, removed);
            }
            1 => vec.retain(keep),
            2 => map.retain(|_, value| keep(value)),
            3 => cache.retain(|_, value| keep(value)),
            4 => bytes.retain(|key, value| {
                check_bytes(key, value);
                key[0] % 8 != 0
            }),
            5 => vec.truncate((number >> 8) as usize % 100),
            6 => vec.shrink_to_fit(),
            _ => {
                list.shrink_to_fit();
                map.shrink_to_fit();
                cache.shrink_to_fit();
                bytes.shrink_to_fit();
            }
        }
    }
}

/// Checks that all bytes are equal.
fn check_equal(bytes: &[u8]) {
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
}

/// Checks that all bytes of a value are the first byte of its key.
fn check_bytes(key: &[u8], value: &[u8]) {
    assert!(value.iter().all(|byte| *byte == key[0]));
}

/// Blocks and pins of a thread. All bytes of its blocks are the number of the thread.
struct BlockUser<'a> {
    structures: &'a Structures,
    byte: u8,
    handles: VecDeque<Handle>,
    pins: VecDeque<Pinned>,
}

impl BlockUser<'_> {
    /// Performs one operation that depends on the number.
    fn operate(&mut self, number: u64) {
        let Structures { blocks, counts, .. } = self.structures;
        match number % 4 {
            0 => {
                // Some blocks have pages of their own.
                let bytes = (number >> 8) as usize % if number.is_multiple_of(64) { 70_000 } else { 1500 };
                let Ok(handle) = blocks.allocate(bytes) else { return };
                add(&counts.allocated, 1);
                if blocks.get_mut(handle, |block| block.fill(self.byte)).is_ok() {
                    self.handles.push_back(handle);
                }
            }
            1 => {
                let index = (number >> 8) as usize % self.handles.len().max(1);
                let pin = self.handles.get(index).and_then(|handle| blocks.pin(*handle).ok());
                self.pins.extend(pin);
            }
            2 => self.pins.clear(),
            _ => {
                let handle = self.handles.get(number as usize % BLOCKS_MAX);
                let _ = handle.map(|handle| blocks.get(*handle, |bytes| self.check(bytes)));
            }
        }
        self.pins.iter().for_each(|pin| self.check(pin));
        self.pins.truncate(PINS_MAX);
        if self.handles.len() > BLOCKS_MAX
            && let Some(handle) = self.handles.pop_front()
        {
            add(&counts.freed, usize::from(blocks.free(handle).is_ok()));
        }
    }

    fn check(&self, bytes: &[u8]) {
        assert!(bytes.iter().all(|byte| *byte == self.byte));
    }
}

/// Changes the budget of the pool until the users are done. Returns the number of pages that it has revoked.
fn change_budget(
    pool: &Pool,
    bank: &Bank,
    structures: &Structures,
    thread: u64,
    is_done: &AtomicBool,
) -> u64 {
    let mut revoked = 0;
    for number in (0..).map(|number| mix((thread << 40) | number)) {
        if is_done.load(Ordering::Relaxed) {
            break;
        }
        let pages = (number >> 8) as usize % (TOTAL / 3);
        match number % 8 {
            0 => drop(pool.give_back_unused()),
            1 => pool.grant(bank.take(pages)),
            2 => structures.set_priority(number >> 16),
            3 => {
                // The pages do not return to the source meanwhile.
                let pages = pool.revoke(pages);
                revoked += pages as u64;
                pool.grant(pages);
            }
            _ => revoked += pool.give_back(pages) as u64,
        }
        assert!(pool.stats().budget <= TOTAL, "{:?}", pool.stats());
        thread::yield_now();
    }
    revoked
}

#[test]
fn structures_and_books_stay_consistent_while_pages_are_revoked() {
    let load = Load::from_environment(OPERATIONS);
    let bank = Arc::new(Bank(AtomicUsize::new(TOTAL)));
    let pool = Pool::with_source(0, 16 * TOTAL, bank.clone()).unwrap();
    let structures = Structures::new(&pool);
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (pool, bank, structures, is_done) = (&pool, &bank, &structures, &is_done);
        let revokers: Vec<_> = (0..REVOKERS)
            .map(|n| scope.spawn(move || change_budget(pool, bank, structures, load.threads + n, is_done)))
            .collect();
        let user = |thread: u64| {
            let (handles, pins) = (VecDeque::new(), VecDeque::new());
            let mut blocks = BlockUser { structures, byte: thread as u8 + 1, handles, pins };
            load.run(thread, |number| match number % 5 {
                0 => blocks.operate(number >> 3),
                _ => structures.operate(number >> 3),
            });
        };
        let users: Vec<_> = (0..load.threads).map(|thread| scope.spawn(move || user(thread))).collect();
        let results: Vec<_> = users.into_iter().map(thread::ScopedJoinHandle::join).collect();
        is_done.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
        let revoked: u64 = revokers.into_iter().map(|revoker| revoker.join().unwrap()).sum();
        assert!(revoked > 0 || cfg!(miri));
    });
    check_books(&pool, &bank, &structures);
    let live = structures.live.clone();
    drop(structures);
    assert_eq!((live.load(Ordering::Relaxed), pool.stats().held), (0, 0));
    drop(pool);
    assert_eq!(bank.0.load(Ordering::Relaxed), TOTAL, "all pages return to the source");
}

/// Compares the books of an unused pool with independent counts.
fn check_books(pool: &Pool, bank: &Bank, structures: &Structures) {
    let Structures { list, vec, map, cache, blocks, counts, live, .. } = structures;
    let stats = pool.stats();
    assert_eq!(stats.budget + bank.0.load(Ordering::Relaxed), TOTAL);
    assert!(stats.held <= stats.budget, "{stats:?}");
    let usages = structures.usages();
    assert_eq!(usages.iter().map(|usage| usage.held_pages).sum::<usize>(), stats.held);
    assert_eq!(usages.map(|usage| usage.callback_panics), [0; 6]);
    assert_eq!(live.load(Ordering::Relaxed), list.len() + vec.len() + map.len() + cache.len());
    let list_len = list.len() as u64;
    assert_eq!(get(&counts.pushed), get(&counts.popped) + get(&counts.evicted) + list_len);
    assert_eq!(usages[0].evicted, get(&counts.evicted));
    let blocks_len = blocks.len() as u64;
    assert_eq!(get(&counts.allocated), get(&counts.freed) + get(&counts.evicted_blocks) + blocks_len);
    assert_eq!(usages[5].evicted, get(&counts.evicted_blocks));
    #[cfg(not(miri))]
    assert_eq!(crate::resident::resident_pages(pool), stats.held);
    // A revocation of all pages frees each of them. No pin is left.
    assert_eq!(pool.give_back(usize::MAX), stats.budget);
    assert_eq!((pool.stats().held, pool.stats().budget), (0, 0));
}
