//! Where the world's manager keeps its records: anything that commits all or nothing, and may fail with nobody knowing
//! which. The one here is a map; the system tests put the real store on a simulated disk in its place.

use std::collections::BTreeMap;

use pool::record::{Key, Meta, Record};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;

/// Backups that a store keeps.
pub const BACKUPS_MAX: usize = 4;

/// What keeps the manager's records.
pub trait Store: std::fmt::Debug {
    /// Makes all of these durable (`true`), or nobody knows (`false`): then all or none of them are.
    fn commit(&mut self, records: &[Record]) -> bool;
    /// The manager dies; this was on its way.
    fn crash(&mut self, under_way: Option<&[Record]>);
    /// Opens again and reads everything but decisions; `None` if that fails for now.
    fn load(&mut self) -> Option<(Option<Meta>, Vec<Record>)>;
    /// From now on nothing goes wrong by itself.
    fn calm(&mut self);
    /// Keeps a copy of the present content as the latest of [`BACKUPS_MAX`] backups.
    fn backup(&mut self);
    /// Replaces the content by a backup, under a generation above all before: by the latest, or by one that many backups
    /// older if it is kept. `false` if there is no backup.
    fn restore(&mut self, age: usize) -> bool;
    /// From now on the disk has no room at all, or has room again.
    fn set_full(&mut self, full: bool);
    /// Whether the content was restored and has not been written to since.
    fn is_restored(&self) -> bool;
}

/// A store in memory.
#[derive(Debug)]
pub struct MemoryStore {
    records: BTreeMap<Key, Record>,
    rng: Pcg64,
    failing: f64,
    /// Copies of the content, oldest first.
    backups: Vec<BTreeMap<Key, Record>>,
    generation: u64,
    restored: bool,
    full: bool,
}

impl MemoryStore {
    /// An empty one, of whose commits and loads this part fails.
    pub fn new(seed: u64, failing: f64) -> Self {
        Self {
            records: BTreeMap::new(),
            rng: Pcg64::seed_from_u64(seed),
            failing,
            backups: Vec::new(),
            generation: 1,
            restored: false,
            full: false,
        }
    }

    fn put(&mut self, records: &[Record]) {
        self.restored = false;
        for record in records {
            match record {
                Record::Gone(key) => drop(self.records.remove(key)),
                Record::Decision(..) => {}
                kept => drop(self.records.insert(kept.key(), kept.clone())),
            }
        }
    }
}

impl Store for MemoryStore {
    fn commit(&mut self, records: &[Record]) -> bool {
        let ok = !self.rng.random_bool(self.failing) && !self.full;
        if ok || self.rng.random_bool(0.5) {
            self.put(records);
        }
        ok
    }

    fn crash(&mut self, under_way: Option<&[Record]>) {
        if let Some(records) = under_way.filter(|_| self.rng.random_bool(0.5)) {
            self.put(records);
        }
    }

    fn load(&mut self) -> Option<(Option<Meta>, Vec<Record>)> {
        // Opening it again may have to repair it, which needs room.
        if self.rng.random_bool(self.failing) || (self.full && self.rng.random_bool(0.5)) {
            return None;
        }
        let meta = self.records.get(&Key::Meta).and_then(|record| match record {
            Record::Meta(meta) => Some(meta.clone()),
            _ => None,
        });
        let rest = self.records.values().filter(|record| record.key() != Key::Meta);
        Some((meta, rest.cloned().collect()))
    }

    fn calm(&mut self) {
        (self.failing, self.full) = (0.0, false);
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
