//! Tests of blocks.

use std::{
    collections::VecDeque,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use proptest::prelude::*;

use super::*;
use crate::PoolStats;

fn blocks(pages: usize) -> (Arc<Pool>, SoftBlocks) {
    let pool = Pool::new(pages).unwrap();
    let blocks = SoftBlocks::new(&pool, Priority(0)).unwrap();
    (pool, blocks)
}

/// Allocates a block with these bytes.
fn store(blocks: &SoftBlocks, bytes: &[u8]) -> Handle {
    let handle = blocks.allocate(bytes.len()).unwrap();
    blocks.get_mut(handle, |block| block.copy_from_slice(bytes)).unwrap();
    handle
}

fn bytes_of(blocks: &SoftBlocks, handle: Handle) -> Result<Vec<u8>, HandleError> {
    blocks.get(handle, <[u8]>::to_vec)
}

#[test]
fn block_is_zeroed_and_keeps_its_bytes() {
    let (_, blocks) = blocks(16);
    let first = store(&blocks, &[7; 40]);
    blocks.free(first).unwrap();
    let second = blocks.allocate(40).unwrap();
    assert_eq!(bytes_of(&blocks, second), Ok(vec![0; 40]));
    assert_eq!(blocks.get_mut(second, |bytes| bytes[39] = 1), Ok(()));
    assert_eq!((blocks.size(second), blocks.len()), (Ok(40), 1));
    assert_eq!(blocks.get(second, |bytes| bytes[39]), Ok(1));
}

#[test]
fn empty_block_has_a_handle() {
    let (_, blocks) = blocks(1);
    let handle = blocks.allocate(0).unwrap();
    assert_eq!((blocks.size(handle), bytes_of(&blocks, handle)), (Ok(0), Ok(vec![])));
    assert_eq!(blocks.pin(handle).unwrap().as_ptr().addr() % 16, 0);
    assert_eq!(blocks.free(handle), Ok(()));
}

#[test]
fn stale_handles_are_rejected() {
    let (_, blocks) = blocks(2);
    let freed = blocks.allocate(1).unwrap();
    assert_eq!((blocks.free(freed), blocks.free(freed)), (Ok(()), Err(HandleError::Stale)));
    let other = blocks.allocate(1).unwrap();
    assert_eq!(freed.index(), other.index());
    assert_eq!(blocks.pin(freed).err(), Some(HandleError::Stale));
    assert_eq!(blocks.get_mut(freed, |_| ()), Err(HandleError::Stale));
    assert_eq!(
        (blocks.size(freed), bytes_of(&blocks, freed)),
        (Err(HandleError::Stale), Err(HandleError::Stale))
    );
    let invented = Handle::from_raw(u64::MAX).unwrap();
    assert_eq!((blocks.free(invented), Handle::from_raw(0)), (Err(HandleError::Stale), None));
    assert_eq!(blocks.free(other), Ok(()));
}

#[test]
fn oversized_and_unaffordable_blocks_are_rejected() {
    let (_, blocks) = blocks(2);
    assert_eq!(blocks.allocate(usize::MAX), Err(SoftError::TooLarge));
    assert_eq!(blocks.allocate(1 << 32), Err(SoftError::TooLarge));
    assert_eq!(blocks.allocate(40_000), Err(SoftError::OutOfBudget { pages: 10 }));
    assert_eq!((blocks.len(), blocks.usage().held_pages), (0, 0));
}

#[test]
fn oldest_unused_blocks_are_evicted_first() {
    let (pool, blocks) = blocks(4);
    let handles: Vec<_> = (0..8).map(|number| store(&blocks, &[number; 2048])).collect();
    drop(blocks.pin(handles[0]));
    blocks.get(handles[1], |_| ()).unwrap();
    assert_eq!(pool.revoke(1), 1);
    let live: Vec<_> = handles.iter().map(|handle| blocks.size(*handle).is_ok()).collect();
    assert_eq!(live, [true, true, false, false, true, true, true, true]);
    assert_eq!(
        bytes_of(&blocks, handles[7]),
        Ok(vec![7; 2048]),
        "compaction moves blocks with their handles"
    );
}

#[test]
fn pinned_block_is_neither_evicted_nor_moved_nor_freed() {
    let (pool, blocks) = blocks(8);
    let handles: Vec<_> = (0..16).map(|number| store(&blocks, &[number; 2048])).collect();
    let (first, second) = (blocks.pin(handles[5]).unwrap(), blocks.pin(handles[5]).unwrap());
    let address = first.as_ptr();
    assert_eq!(blocks.free(handles[5]), Err(HandleError::Pinned));
    assert_eq!(blocks.get_mut(handles[5], |_| ()), Err(HandleError::Pinned));
    assert_eq!((pool.revoke(8), blocks.len()), (7, 1));
    assert_eq!((first.as_ptr(), &*first, &*second), (address, &[5; 2048][..], &[5; 2048][..]));
    drop(first);
    assert_eq!((pool.revoke(8), blocks.free(handles[5])), (0, Err(HandleError::Pinned)));
    drop(second);
    assert_eq!((pool.revoke(8), blocks.free(handles[5])), (1, Err(HandleError::Stale)));
}

#[test]
fn blocks_are_moved_only_while_none_is_pinned() {
    let (_, blocks) = blocks(16);
    let handles: Vec<_> = (0..16).map(|number| store(&blocks, &[number; 2048])).collect();
    handles.iter().skip(1).step_by(2).for_each(|handle| blocks.free(*handle).unwrap());
    let pinned = blocks.pin(handles[0]).unwrap();
    assert_eq!((blocks.usage().held_pages, blocks.reclaim(1)), (8, 1));
    assert_eq!(blocks.usage().evicted, 1, "the block of another page is evicted, because no block is moved");
    drop(pinned);
    assert_eq!((blocks.reclaim(3), blocks.usage().evicted), (3, 1));
    assert_eq!(bytes_of(&blocks, handles[14]), Ok(vec![14; 2048]));
}

#[test]
fn pin_keeps_memory_of_a_dropped_structure_and_pool() {
    let (pool, blocks) = blocks(16);
    let handle = store(&blocks, &[9; 100]);
    let large = store(&blocks, &[8; 40_000]);
    let pins = [blocks.pin(handle).unwrap(), blocks.pin(large).unwrap()];
    drop(blocks);
    assert_eq!(pool.stats(), PoolStats { budget: 16, held: 11 });
    let weak = Arc::downgrade(&pool);
    drop(pool);
    let sum: usize = thread::scope(|scope| {
        let bytes =
            move || pins.iter().map(|pin| pin.iter().map(|byte| usize::from(*byte)).sum::<usize>()).sum();
        scope.spawn(bytes).join().unwrap()
    });
    assert_eq!(sum, 9 * 100 + 8 * 40_000);
    assert!(weak.upgrade().is_none(), "the last pin frees the pool");
}

#[test]
#[cfg(not(miri))] // too slow
fn number_of_pins_is_limited() {
    let (_, blocks) = blocks(1);
    let handle = blocks.allocate(1).unwrap();
    let pins: Vec<_> = (0..65_536).map(|_| blocks.pin(handle).unwrap()).collect();
    assert_eq!(blocks.pin(handle).err(), Some(HandleError::TooManyPins));
    drop(pins);
    assert!(blocks.pin(handle).is_ok());
}

#[test]
fn callback_receives_handle_and_bytes_before_pages_of_large_blocks_are_freed() {
    let pool = Pool::new(64).unwrap();
    let (log, held) = (Arc::new(Mutex::new(Vec::new())), pool.clone());
    let entries = log.clone();
    let callback = move |handle: Handle, bytes: &[u8]| {
        assert_eq!(bytes.as_ptr().addr() % 16, 0);
        entries.lock().unwrap().push((handle, bytes.to_vec(), held.stats().held));
    };
    let blocks = SoftBlocks::with_callback(&pool, Priority(0), callback).unwrap();
    let (small, large) = (store(&blocks, &[1; 100]), store(&blocks, &[2; 40_000]));
    assert_eq!((blocks.reclaim(64), blocks.usage().evicted), (11, 2));
    assert_eq!(*log.lock().unwrap(), [(small, vec![1; 100], 10), (large, vec![2; 40_000], 10)]);
    assert_eq!((blocks.usage().callback_panics, pool.stats().held, blocks.len()), (0, 0, 0));
}

#[test]
#[cfg(not(miri))] // the smallest address space is too large
fn address_space_of_evicted_large_blocks_is_used_again() {
    let pool = Pool::new(10).unwrap();
    let blocks = SoftBlocks::with_callback(&pool, Priority(0), |_, _| ()).unwrap();
    // The address space of 64 MiB has 1024 chunks.
    for _ in 0..1025 {
        assert!(blocks.allocate(40_000).is_ok());
        assert_eq!(blocks.reclaim(10), 10);
    }
}

#[test]
fn freed_and_dropped_blocks_are_not_passed_to_the_callback() {
    let pool = Pool::new(64).unwrap();
    let calls = Arc::new(AtomicU64::new(0));
    let counter = calls.clone();
    let callback = move |_: Handle, _: &[u8]| counter.store(1, Ordering::Relaxed);
    let blocks = SoftBlocks::with_callback(&pool, Priority(0), callback).unwrap();
    blocks.free(store(&blocks, &[1; 100])).unwrap();
    store(&blocks, &[2; 100]);
    drop(blocks);
    assert_eq!((calls.load(Ordering::Relaxed), pool.stats().held), (0, 0));
}

#[test]
fn callback_can_use_the_structure() {
    let pool = Pool::new(64).unwrap();
    let blocks = Arc::new_cyclic(|weak: &std::sync::Weak<SoftBlocks>| {
        let weak = weak.clone();
        let callback = move |stale: Handle, bytes: &[u8]| {
            let blocks = weak.upgrade().expect("the structure exists");
            assert_eq!(blocks.free(stale), Err(HandleError::Stale));
            assert_eq!(bytes_of(&blocks, store(&blocks, &bytes[..1])).unwrap(), [3]);
            panic!("counted");
        };
        SoftBlocks::with_callback(&pool, Priority(0), callback).unwrap()
    });
    store(&blocks, &[3; 10]);
    assert_eq!((blocks.reclaim(1), blocks.len()), (1, 1));
    assert_eq!((blocks.usage().evicted, blocks.usage().callback_panics), (1, 1));
}

#[derive(Clone, Debug)]
enum Operation {
    Allocate(usize),
    Free(prop::sample::Index),
    FreeStale(prop::sample::Index),
    Pin(prop::sample::Index),
    Unpin(prop::sample::Index),
    Read(prop::sample::Index),
    Reclaim(usize),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let index = any::<prop::sample::Index>;
    let operation = prop_oneof![
        6 => (0..3000_usize).prop_map(Operation::Allocate),
        1 => (30_000..50_000_usize).prop_map(Operation::Allocate),
        2 => index().prop_map(Operation::Free),
        1 => index().prop_map(Operation::FreeStale),
        2 => index().prop_map(Operation::Pin),
        2 => index().prop_map(Operation::Unpin),
        2 => index().prop_map(Operation::Read),
        1 => (0..8_usize).prop_map(Operation::Reclaim),
    ];
    prop::collection::vec(operation, 0..if cfg!(miri) { 40 } else { 300 })
}

/// Block of the model.
#[derive(Debug)]
struct ModelBlock {
    handle: Handle,
    bytes: Vec<u8>,
    pins: Vec<(Pinned, *mut u8)>,
}

/// Blocks in the order of eviction, and handles of freed and evicted blocks.
#[derive(Debug, Default)]
struct Model {
    blocks: VecDeque<ModelBlock>,
    stale: Vec<Handle>,
}

type Log = Arc<Mutex<Vec<(Handle, Vec<u8>)>>>;

impl Model {
    /// Returns the position of a block.
    fn position(&self, index: prop::sample::Index) -> Option<usize> {
        (!self.blocks.is_empty()).then(|| index.index(self.blocks.len()))
    }

    /// Removes the evicted blocks, which are the oldest that are not pinned.
    fn evict(&mut self, evicted: Vec<(Handle, Vec<u8>)>) -> Result<(), TestCaseError> {
        for (handle, bytes) in evicted {
            let pinned = self.blocks.iter().take_while(|block| !block.pins.is_empty()).count();
            self.blocks.rotate_left(pinned);
            let oldest = self.blocks.pop_front().expect("evicted blocks are in the model");
            prop_assert_eq!((oldest.handle, oldest.bytes), (handle, bytes));
            self.stale.push(handle);
        }
        Ok(())
    }

    fn move_to_end(&mut self, position: usize) -> &mut ModelBlock {
        let block = self.blocks.remove(position).expect("the position is valid");
        self.blocks.push_back(block);
        self.blocks.back_mut().expect("it was added")
    }

    fn apply(&mut self, blocks: &SoftBlocks, number: u8, operation: &Operation) -> Result<(), TestCaseError> {
        match operation {
            Operation::Allocate(bytes) => {
                if let Ok(handle) = blocks.allocate(*bytes) {
                    prop_assert_eq!(bytes_of(blocks, handle), Ok(vec![0; *bytes]));
                    blocks.get_mut(handle, |block| block.fill(number)).unwrap();
                    self.blocks.push_back(ModelBlock {
                        handle,
                        bytes: vec![number; *bytes],
                        pins: Vec::new(),
                    });
                }
            }
            Operation::Free(index) => {
                if let Some(position) = self.position(*index) {
                    let ModelBlock { handle, pins, .. } = &self.blocks[position];
                    let expected = if pins.is_empty() { Ok(()) } else { Err(HandleError::Pinned) };
                    prop_assert_eq!(blocks.free(*handle), expected);
                    if expected.is_ok() {
                        self.stale.extend(self.blocks.remove(position).map(|block| block.handle));
                    }
                }
            }
            Operation::FreeStale(index) => {
                if !self.stale.is_empty() {
                    prop_assert_eq!(blocks.free(*index.get(&self.stale)), Err(HandleError::Stale));
                }
            }
            Operation::Pin(index) => {
                if let Some(position) = self.position(*index) {
                    let block = self.move_to_end(position);
                    let pin = blocks.pin(block.handle).unwrap();
                    let address = pin.as_ptr();
                    block.pins.push((pin, address));
                }
            }
            Operation::Unpin(index) => {
                if let Some(position) = self.position(*index) {
                    drop(self.blocks[position].pins.pop());
                }
            }
            Operation::Read(index) => {
                if let Some(position) = self.position(*index) {
                    let block = self.move_to_end(position);
                    prop_assert_eq!(bytes_of(blocks, block.handle), Ok(block.bytes.clone()));
                }
            }
            Operation::Reclaim(_) => {}
        }
        Ok(())
    }

    fn reclaim(&mut self, blocks: &SoftBlocks, log: &Log, pages: usize) -> Result<(), TestCaseError> {
        let held = blocks.usage().held_pages;
        let freed = blocks.reclaim(pages);
        let evicted = std::mem::take(&mut *log.lock().unwrap());
        prop_assert!(pages > 0 || evicted.is_empty());
        self.evict(evicted)?;
        prop_assert_eq!(blocks.usage().held_pages, held - freed);
        let is_pinned = |block: &ModelBlock| !block.pins.is_empty();
        prop_assert!(freed >= pages.min(held) || self.blocks.iter().all(is_pinned));
        prop_assert!(freed >= pages.min(held) || self.blocks.iter().any(is_pinned));
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn blocks_match_a_model(operations in operations()) {
        const BUDGET: usize = 40;
        let (pool, log) = (Pool::new(BUDGET).unwrap(), Log::default());
        let entries = log.clone();
        let callback = move |handle: Handle, bytes: &[u8]| entries.lock().unwrap().push((handle, bytes.to_vec()));
        let blocks = SoftBlocks::with_callback(&pool, Priority(0), callback).unwrap();
        let mut model = Model::default();
        for (number, operation) in (1_u8..=255).cycle().zip(operations) {
            model.apply(&blocks, number, &operation)?;
            if let Operation::Reclaim(pages) = operation {
                model.reclaim(&blocks, &log, pages)?;
            }
            prop_assert_eq!(blocks.len(), model.blocks.len());
            for block in &model.blocks {
                prop_assert_eq!(blocks.size(block.handle), Ok(block.bytes.len()));
                for (pin, address) in &block.pins {
                    prop_assert_eq!((pin.as_ptr(), &**pin), (*address, &block.bytes[..]));
                }
            }
        }
        for handle in &model.stale {
            prop_assert_eq!(blocks.size(*handle), Err(HandleError::Stale));
        }
        drop(blocks);
        drop(model);
        prop_assert_eq!(pool.stats(), PoolStats { budget: BUDGET, held: 0 });
    }
}

#[test]
fn pinned_bytes_stay_unchanged_while_other_threads_use_the_structure() {
    const THREADS: u8 = if cfg!(miri) { 3 } else { 8 };
    const OPERATIONS: usize = if cfg!(miri) { 30 } else { 5000 };
    let pool = Pool::new(if cfg!(miri) { 12 } else { 64 }).unwrap();
    let blocks = SoftBlocks::with_callback(&pool, Priority(0), |_, bytes| {
        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    })
    .unwrap();
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let revocations = scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                pool.grant(pool.revoke(8));
                thread::yield_now();
            }
        });
        let user = |thread: u8| {
            let mut handles = VecDeque::new();
            for number in 0..OPERATIONS {
                let bytes = 1 + (number * 37 + usize::from(thread)) % 1500;
                let Ok(handle) = blocks.allocate(bytes) else { continue };
                let _ = blocks.get_mut(handle, |block| block.fill(thread));
                handles.push_back(handle);
                let pin = handles.get(number % handles.len()).and_then(|handle| blocks.pin(*handle).ok());
                if handles.len() > 20 {
                    let _ = blocks.free(handles.pop_front().unwrap());
                }
                // A block can be evicted between its allocation and its first change, but not changed later.
                assert!(pin.is_none_or(|pin| pin.iter().all(|byte| *byte == thread)));
            }
        };
        let users: Vec<_> = (1..=THREADS).map(|thread| scope.spawn(move || user(thread))).collect();
        let results: Vec<_> = users.into_iter().map(thread::ScopedJoinHandle::join).collect();
        is_done.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
        revocations.join().unwrap();
    });
    assert_eq!(blocks.usage().callback_panics, 0);
    drop(blocks);
    assert_eq!(pool.stats().held, 0);
}
