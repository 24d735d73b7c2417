//! Runs the simulated rack with the real store on a simulated disk. The disk tears and loses
//! writes: power failures and failed writes or syncs occur at any operation. The test uses fewer
//! seeds than the simulation with a store in memory, because it is slower.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use pool::record::{Meta, Record};
use pool_manager::{
    records,
    store::{
        Scan as _, Store as _, Table, Write,
        faulty::{Fault, FaultyDisk},
        meta,
        redb::RedbStore,
    },
};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;
use sim::world::{BACKUPS_MAX, RunSummary, Store, World};

const SEED_COUNT: u64 = 300;
const STEP_COUNT: u64 = 3000;
/// Maximum number of events printed before a failure.
const PRINTED_EVENTS_MAX: usize = 100;
/// Average number of commits per injected fault.
const COMMITS_PER_FAULT: u32 = 12;
/// A planned fault occurs at one of this number of next disk operations.
const FAULT_WINDOW_OPERATIONS: u64 = 12;
/// Number of disk operations that fail on a full disk.
const FULL_DISK_OPERATIONS: u64 = 200;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

#[derive(Debug)]
struct DiskStore {
    disk: FaultyDisk,
    store: Option<RedbStore<FaultyDisk>>,
    rng: Pcg64,
    has_faults_stopped: bool,
    power_cuts: Arc<AtomicU64>,
    is_full: bool,
    /// Backups of all entries of the store, oldest first.
    backups: Vec<Vec<Write>>,
    generation: u64,
    restored: bool,
    torn_writes: Arc<AtomicU64>,
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.torn_writes.fetch_add(self.disk.torn_writes(), Ordering::Relaxed);
    }
}

impl DiskStore {
    fn new(seed: u64, power_cuts: Arc<AtomicU64>, torn_writes: Arc<AtomicU64>) -> Self {
        let mut random = Pcg64::seed_from_u64(seed);
        let disk = FaultyDisk::new(move |n| random.random_range(0..n));
        let rng = Pcg64::seed_from_u64(seed + 1);
        Self {
            disk,
            store: None,
            rng,
            has_faults_stopped: false,
            power_cuts,
            torn_writes,
            is_full: false,
            backups: Vec::new(),
            generation: 1,
            restored: false,
        }
    }

    fn write_batch(&mut self, batch: &[Record]) -> bool {
        let mut writes: Vec<_> = batch.iter().map(records::write).collect();
        if self.restored {
            writes.extend(records::clear_restored_marks());
        }
        let ok = self.store.as_mut().is_some_and(|store| store.commit(&writes).is_ok());
        self.restored &= !ok;
        ok
    }

    /// Returns all entries of the store, or `None` if the store cannot be read.
    fn entries(&mut self) -> Option<Vec<Write>> {
        let store = self.store.as_mut()?;
        let mut entries = Vec::new();
        for table in Table::ALL {
            let mut put = |key: &[u8], value: &[u8]| {
                entries.push(Write::Put { table, key: key.to_vec(), value: value.to_vec() });
            };
            store.scan(table, &mut put).ok()?;
        }
        Some(entries)
    }

    /// Plans a fault at one of the next disk operations.
    fn plan_fault(&mut self, fault: Fault) {
        let ahead = self.rng.random_range(0..FAULT_WINDOW_OPERATIONS);
        self.disk.fail_at(self.disk.operations() + ahead, fault);
    }

    /// Makes every write, sync and change of length fail with ENOSPC, starting at one of the next
    /// disk operations.
    fn plan_full_disk(&mut self) {
        let first = self.disk.operations() + self.rng.random_range(0..FAULT_WINDOW_OPERATIONS);
        (first..first + FULL_DISK_OPERATIONS).for_each(|n| self.disk.fail_at(n, Fault::Errno(ENOSPC)));
    }

    /// Turns the power of the disk off and on. The open store is closed, and planned faults are
    /// cleared.
    fn restart(&mut self) {
        self.disk.power_off();
        self.store = None;
        self.disk.clear_faults();
        self.disk.power_on();
        self.power_cuts.fetch_add(1, Ordering::Relaxed);
    }
}

impl Store for DiskStore {
    fn commit(&mut self, batch: &[Record]) -> bool {
        if self.is_full {
            self.plan_full_disk();
        } else if !self.has_faults_stopped && self.rng.random_ratio(1, COMMITS_PER_FAULT) {
            let fault = if self.rng.random_bool(0.5) { Fault::PowerCut } else { Fault::Errno(EIO) };
            self.plan_fault(fault);
        }
        self.write_batch(batch)
    }

    /// Crashes the manager. If a batch is in progress, the machine crashes in the middle of its
    /// write.
    fn crash(&mut self, interrupted_batch: Option<&[Record]>) {
        if let Some(batch) = interrupted_batch {
            if !self.has_faults_stopped {
                self.plan_fault(Fault::PowerCut);
            }
            self.write_batch(batch);
        }
        if interrupted_batch.is_some() || self.rng.random_bool(0.3) {
            self.restart();
        }
        self.store = None;
        self.disk.clear_faults();
    }

    fn load(&mut self) -> Option<(Option<Meta>, Vec<Record>)> {
        if self.store.as_mut().is_none_or(|store| store.reopen().is_err()) {
            self.restart();
            if self.is_full {
                self.plan_full_disk();
            }
            let opened = RedbStore::open(self.disk.clone());
            assert!(opened.is_ok() || self.is_full, "a disk with power and space must open: {opened:?}");
            self.store = opened.ok();
        }
        let loaded = records::load(self.store.as_mut()?).expect("an open store is readable");
        self.restored = loaded.restored;
        Some((loaded.meta, loaded.records))
    }

    fn stop_faults(&mut self) {
        (self.has_faults_stopped, self.is_full) = (true, false);
        self.disk.clear_faults();
    }

    fn backup(&mut self) {
        let Some(entries) = self.entries().filter(|entries| !entries.is_empty()) else { return };
        if self.backups.len() == BACKUPS_MAX {
            self.backups.remove(0);
        }
        self.backups.push(entries);
    }

    fn set_full(&mut self, full: bool) {
        self.is_full = full;
        self.disk.clear_faults();
    }

    /// Restores a backup to a new disk, because `pool-manager restore` creates a new file.
    fn restore(&mut self, age: usize) -> bool {
        let newest = self.backups.len().checked_sub(1);
        let Some(mut entries) = newest.map(|n| self.backups[n.saturating_sub(age)].clone()) else {
            return false;
        };
        self.is_full = false; // a new disk has space
        self.generation += 1;
        entries.push(Write::number(Table::Meta, meta::RESTORED_KEY, 1));
        entries.push(Write::number(Table::Meta, meta::GENERATION_KEY, self.generation));
        let mut random = Pcg64::seed_from_u64(self.rng.random());
        self.disk = FaultyDisk::new(move |n| random.random_range(0..n));
        let mut store = RedbStore::open(self.disk.clone()).expect("a new disk is writable");
        store.commit(&entries).expect("a new disk is writable");
        (self.store, self.restored) = (Some(store), true);
        true
    }

    fn is_restored(&self) -> bool {
        self.restored
    }
}

#[test]
fn invariants_hold_on_real_store_under_disk_faults() {
    let (power_cuts, torn_writes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut sum = RunSummary::default();
    for seed in 0..SEED_COUNT {
        let store = Box::new(DiskStore::new(seed, Arc::clone(&power_cuts), Arc::clone(&torn_writes)));
        match World::with_store(seed, store).with_event_log(PRINTED_EVENTS_MAX).run(STEP_COUNT) {
            Ok(summary) => sum += summary,
            Err(failure) => panic!("{failure}"),
        }
    }
    let cuts = power_cuts.load(Ordering::Relaxed);
    let torn = torn_writes.load(Ordering::Relaxed);
    println!("{SEED_COUNT} seeds, {cuts} power failures, {torn} torn writes: {sum:?}");
    assert!(torn > SEED_COUNT, "too few torn writes: {torn}");
    assert!(
        cuts > SEED_COUNT && sum.reserved > SEED_COUNT && sum.restored > SEED_COUNT / 10,
        "too few events: {cuts} power failures, {sum:?}"
    );
}
