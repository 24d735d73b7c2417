//! The simulated rack on the real store, on a disk that tears and loses writes: power failures and
//! failed writes and syncs at any operation. Fewer seeds than the simulation, because a disk is
//! slower.

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
use sim::world::{BACKUPS_MAX, Store, Summary, World};

const SEEDS: u64 = 300;
const STEPS: u64 = 3000;
/// Events printed before a failure.
const EVENTS_TOLD: usize = 100;
/// One in so many commits has a fault somewhere on its way.
const FAULT_EVERY: u32 = 12;
/// Operations of the disk in which a commit's fault may strike.
const OPERATIONS_AHEAD: u64 = 12;
/// Operations of the disk that fail while it is full, before anybody looks for room again.
const OPERATIONS_FULL: u64 = 200;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

#[derive(Debug)]
struct DiskStore {
    disk: FaultyDisk,
    store: Option<RedbStore<FaultyDisk>>,
    rng: Pcg64,
    calm: bool,
    power_cuts: Arc<AtomicU64>,
    full: bool,
    /// Every entry of the store at earlier times, oldest first.
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
        let mut chance = Pcg64::seed_from_u64(seed);
        let disk = FaultyDisk::new(move |n| chance.random_range(0..n));
        let rng = Pcg64::seed_from_u64(seed + 1);
        Self {
            disk,
            store: None,
            rng,
            calm: false,
            power_cuts,
            torn_writes,
            full: false,
            backups: Vec::new(),
            generation: 1,
            restored: false,
        }
    }

    fn write(&mut self, batch: &[Record]) -> bool {
        let mut writes: Vec<_> = batch.iter().map(records::write).collect();
        if self.restored {
            writes.extend(records::restored_noted());
        }
        let ok = self.store.as_mut().is_some_and(|store| store.commit(&writes).is_ok());
        self.restored &= !ok;
        ok
    }

    /// All entries as they are now, if they can be read.
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

    /// Something will go wrong with one of the next operations.
    fn plan(&mut self, fault: Fault) {
        let ahead = self.rng.random_range(0..OPERATIONS_AHEAD);
        self.disk.fail_at(self.disk.operations() + ahead, fault);
    }

    /// Lets every write, sync and change of length fail with ENOSPC, from one of the next
    /// operations on.
    fn plan_full(&mut self) {
        let first = self.disk.operations() + self.rng.random_range(0..OPERATIONS_AHEAD);
        (first..first + OPERATIONS_FULL).for_each(|n| self.disk.fail_at(n, Fault::Errno(ENOSPC)));
    }

    /// Restores the power; the previous user of the disk is gone.
    fn restart(&mut self) {
        self.disk.power_off();
        self.store = None;
        self.disk.fail_no_more();
        self.disk.power_on();
        self.power_cuts.fetch_add(1, Ordering::Relaxed);
    }
}

impl Store for DiskStore {
    fn commit(&mut self, batch: &[Record]) -> bool {
        if self.full {
            self.plan_full();
        } else if !self.calm && self.rng.random_ratio(1, FAULT_EVERY) {
            let fault = if self.rng.random_bool(0.5) { Fault::PowerCut } else { Fault::Errno(EIO) };
            self.plan(fault);
        }
        self.write(batch)
    }

    /// The manager dies alone, or with the power of its machine in the middle of a write.
    fn crash(&mut self, under_way: Option<&[Record]>) {
        if let Some(batch) = under_way {
            if !self.calm {
                self.plan(Fault::PowerCut);
            }
            self.write(batch);
        }
        if under_way.is_some() || self.rng.random_bool(0.3) {
            self.restart();
        }
        self.store = None;
        self.disk.fail_no_more();
    }

    fn load(&mut self) -> Option<(Option<Meta>, Vec<Record>)> {
        if self.store.as_mut().is_none_or(|store| store.reopen().is_err()) {
            self.restart();
            if self.full {
                self.plan_full();
            }
            let opened = RedbStore::open(self.disk.clone());
            assert!(
                opened.is_ok() || self.full,
                "a disk with power and room gives its store back: {opened:?}"
            );
            self.store = opened.ok();
        }
        let loaded = records::load(self.store.as_mut()?).expect("a store that opens can be read");
        self.restored = loaded.restored;
        Some((loaded.meta, loaded.records))
    }

    fn stop_faults(&mut self) {
        (self.calm, self.full) = (true, false);
        self.disk.fail_no_more();
    }

    fn backup(&mut self) {
        let Some(entries) = self.entries().filter(|entries| !entries.is_empty()) else { return };
        if self.backups.len() == BACKUPS_MAX {
            self.backups.remove(0);
        }
        self.backups.push(entries);
    }

    fn set_full(&mut self, full: bool) {
        self.full = full;
        self.disk.fail_no_more();
    }

    /// On a disk of its own, as `pool-manager restore` makes a new file.
    fn restore(&mut self, age: usize) -> bool {
        let newest = self.backups.len().checked_sub(1);
        let Some(mut entries) = newest.map(|n| self.backups[n.saturating_sub(age)].clone()) else {
            return false;
        };
        self.full = false; // a new disk has room
        self.generation += 1;
        entries.push(Write::number(Table::Meta, meta::RESTORED, 1));
        entries.push(Write::number(Table::Meta, meta::GENERATION, self.generation));
        let mut chance = Pcg64::seed_from_u64(self.rng.random());
        self.disk = FaultyDisk::new(move |n| chance.random_range(0..n));
        let mut store = RedbStore::open(self.disk.clone()).expect("a new disk takes a store");
        store.commit(&entries).expect("a new disk takes every entry");
        (self.store, self.restored) = (Some(store), true);
        true
    }

    fn is_restored(&self) -> bool {
        self.restored
    }
}

#[test]
fn every_promise_is_kept_on_the_real_store_when_the_power_fails_at_any_write() {
    let (power_cuts, torn_writes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut sum = Summary::default();
    for seed in 0..SEEDS {
        let store = Box::new(DiskStore::new(seed, Arc::clone(&power_cuts), Arc::clone(&torn_writes)));
        match World::with_store(seed, store).with_event_log(EVENTS_TOLD).run(STEPS) {
            Ok(summary) => sum += summary,
            Err(failure) => panic!("{failure}"),
        }
    }
    let cuts = power_cuts.load(Ordering::Relaxed);
    let torn = torn_writes.load(Ordering::Relaxed);
    println!("{SEEDS} seeds, {cuts} cuts of the power, {torn} torn writes: {sum:?}");
    assert!(torn > SEEDS, "too few writes were torn: {torn}");
    assert!(
        cuts > SEEDS && sum.reserved > SEEDS && sum.restored > SEEDS / 10,
        "too little happened: {cuts} cuts, {sum:?}"
    );
}
