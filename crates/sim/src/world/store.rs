//! Store of the simulated manager: it commits all or nothing, and after a failure the outcome is
//! unknown. This one is a map; system tests use the real store on a simulated disk.

use std::collections::BTreeMap;

use pool::record::{Key, Meta, Record};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;

/// Number of backups that a store keeps.
pub const BACKUPS_MAX: usize = 4;

/// Store of the manager's records.
pub trait Store: std::fmt::Debug {
    /// Commits the records. On `false`, all or none of them are durable.
    fn commit(&mut self, records: &[Record]) -> bool;
    /// The manager crashes during this commit.
    fn crash(&mut self, in_progress: Option<&[Record]>);
    /// Reopens the store and reads everything except decisions; `None` if that fails.
    fn load(&mut self) -> Option<(Option<Meta>, Vec<Record>)>;
    /// Stops injecting faults.
    fn stop_faults(&mut self);
    /// Saves a backup of the content, as the latest of [`BACKUPS_MAX`].
    fn backup(&mut self);
    /// Restores the latest backup, or one that is `age` backups older if it exists, under a
    /// generation above all earlier ones. Returns `false` without a backup.
    fn restore(&mut self, age: usize) -> bool;
    /// Fills the disk, or frees it.
    fn set_full(&mut self, full: bool);
    /// Returns whether the content was restored and not written since.
    fn is_restored(&self) -> bool;
}

/// A store in memory.
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
    /// Creates an empty store, of whose commits and loads the given fraction fails.
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

    fn apply(&mut self, records: &[Record]) {
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
            self.apply(records);
        }
        ok
    }

    fn crash(&mut self, in_progress: Option<&[Record]>) {
        if let Some(records) = in_progress.filter(|_| self.rng.random_bool(0.5)) {
            self.apply(records);
        }
    }

    fn load(&mut self) -> Option<(Option<Meta>, Vec<Record>)> {
        // Reopening may require a repair, which needs space.
        if self.rng.random_bool(self.failure_rate) || (self.full && self.rng.random_bool(0.5)) {
            return None;
        }
        let meta = self.records.get(&Key::Meta).and_then(|record| match record {
            Record::Meta(meta) => Some(meta.clone()),
            _ => None,
        });
        let rest = self.records.values().filter(|record| record.key() != Key::Meta);
        Some((meta, rest.cloned().collect()))
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
