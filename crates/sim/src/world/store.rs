//! Store of the simulated manager. A commit is atomic; after a failed commit, the outcome is
//! unknown. [`MemoryStore`] is a map in memory. System tests use the real store on a simulated disk
//! instead.

use std::collections::BTreeMap;

use pool::record::{Key, Meta, Record};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;

/// Maximum number of backups that a store keeps.
pub const BACKUPS_MAX: usize = 4;

/// Store for the records of the manager, with backups and injected faults.
pub trait Store: std::fmt::Debug {
    /// Commits the records and returns whether the commit succeeded. After a failure, either all or
    /// none of the records are durable.
    fn commit(&mut self, records: &[Record]) -> bool;
    /// Simulates a crash of the manager. The records in progress may become durable or not.
    fn crash(&mut self, in_progress: Option<&[Record]>);
    /// Reopens the store and reads all records except decisions. Returns `None` on failure.
    fn load(&mut self) -> Option<(Option<Meta>, Vec<Record>)>;
    /// Stops injecting faults.
    fn stop_faults(&mut self);
    /// Saves a backup of the records. The store keeps the latest [`BACKUPS_MAX`] backups.
    fn backup(&mut self);
    /// Restores a backup with a new generation, which is higher than all earlier generations. `age`
    /// is the number of newer backups to skip; 0 is the latest backup. Returns `false` if there is
    /// no backup.
    fn restore(&mut self, age: usize) -> bool;
    /// Fills the disk of the store, or frees space.
    fn set_full(&mut self, full: bool);
    /// Returns whether a backup was restored and nothing has been committed since.
    fn is_restored(&self) -> bool;
}

/// Store in memory that fails on demand.
#[derive(Debug)]
pub struct MemoryStore {
    records: BTreeMap<Key, Record>,
    rng: Pcg64,
    failure_rate: f64,
    /// Backups, oldest first.
    backups: Vec<BTreeMap<Key, Record>>,
    generation: u64,
    restored: bool,
    full: bool,
}

impl MemoryStore {
    /// Creates an empty store. `failure_rate` is the fraction of commits and loads that fail.
    pub fn new(seed: u64, failure_rate: f64) -> Self {
        Self {
            records: BTreeMap::new(),
            rng: Pcg64::seed_from_u64(seed),
            failure_rate,
            backups: Vec::new(),
            generation: 1,
            restored: false,
            full: false,
        }
    }

    fn apply_batch(&mut self, records: &[Record]) {
        self.restored = false;
        for record in records {
            match record {
                Record::Deleted(key) => drop(self.records.remove(key)),
                Record::Decision(..) => {}
                record => drop(self.records.insert(record.key(), record.clone())),
            }
        }
    }
}

impl Store for MemoryStore {
    fn commit(&mut self, records: &[Record]) -> bool {
        let ok = !self.rng.random_bool(self.failure_rate) && !self.full;
        if ok || self.rng.random_bool(0.5) {
            self.apply_batch(records);
        }
        ok
    }

    fn crash(&mut self, in_progress: Option<&[Record]>) {
        if let Some(records) = in_progress.filter(|_| self.rng.random_bool(0.5)) {
            self.apply_batch(records);
        }
    }

    fn load(&mut self) -> Option<(Option<Meta>, Vec<Record>)> {
        // Reopening may fail on a full disk, because a repair needs space.
        if self.rng.random_bool(self.failure_rate) || (self.full && self.rng.random_bool(0.5)) {
            return None;
        }
        let meta = self.records.get(&Key::Meta).and_then(|record| match record {
            Record::Meta(meta) => Some(meta.clone()),
            _ => None,
        });
        let others = self.records.values().filter(|record| record.key() != Key::Meta);
        Some((meta, others.cloned().collect()))
    }

    fn stop_faults(&mut self) {
        (self.failure_rate, self.full) = (0.0, false);
    }

    fn backup(&mut self) {
        if self.records.contains_key(&Key::Meta) {
            if self.backups.len() == BACKUPS_MAX {
                self.backups.remove(0);
            }
            self.backups.push(self.records.clone());
        }
    }

    fn set_full(&mut self, full: bool) {
        self.full = full;
    }

    fn restore(&mut self, age: usize) -> bool {
        let newest = self.backups.len().checked_sub(1);
        let Some(mut records) = newest.map(|n| self.backups[n.saturating_sub(age)].clone()) else {
            return false;
        };
        self.generation += 1;
        if let Some(Record::Meta(meta)) = records.get_mut(&Key::Meta) {
            meta.generation = self.generation;
        }
        (self.records, self.restored) = (records, true);
        true
    }

    fn is_restored(&self) -> bool {
        self.restored
    }
}
