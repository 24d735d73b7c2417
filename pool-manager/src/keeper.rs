//! Store as used by the driver: writes records in batches and reads everything. It does not know
//! the ledger.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use pool::{audit::Decision, record::Record};
use units::limits::{
    EXPLAIN_ENTRIES_MAX, STORE_FREE_BYTES_MIN, STORE_LOW_SPACE_CHECK_INTERVAL, STORE_SPACE_CHECK_INTERVAL,
};

use crate::{
    records::{self, LoadError, Loaded},
    store::{Scan, Store, StoreError, Table, Write},
};

/// Store with its state between batches.
pub struct Keeper {
    store: Box<dyn Store>,
    note_restored: bool,
    space_low: bool,
    space_checked: Option<Instant>,
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper").field("note_restored", &self.note_restored).finish_non_exhaustive()
    }
}

impl Keeper {
    /// Creates it for a store that may have been restored from a backup and not used since.
    pub fn new(store: Box<dyn Store>, restored: bool) -> Self {
        Self { store, note_restored: restored, space_low: false, space_checked: None }
    }

    /// Makes records durable, all or none.
    ///
    /// # Errors
    /// The outcome is unknown; the store has to be read again.
    pub fn commit(&mut self, records: &[Record]) -> Result<(), StoreError> {
        let mut writes: Vec<Write> = records.iter().map(records::write).collect();
        if self.note_restored {
            writes.extend(records::restored_noted());
        }
        self.store.commit(&writes)?;
        self.note_restored = false;
        Ok(())
    }

    /// Makes entries other than the ledger's durable, all or none. A failed store is reopened, so
    /// that the ledger finds its own durable state.
    ///
    /// # Errors
    /// The outcome is unknown. [`StoreError::Full`] writes nothing; deletions are always tried.
    pub fn keep(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let needs_room = writes.iter().any(|write| matches!(write, Write::Put { .. }));
        if self.space_low && needs_room {
            return Err(StoreError::Full);
        }
        self.store.commit(writes).inspect_err(|_| {
            if let Err(error) = self.store.reopen() {
                tracing::error!(error = units::chain(&error), "store not opened again"); // the ledger's next write reports it, too
            }
        })
    }

    /// Returns whether the disk is too full for reservations, if that has changed. Checks at most
    /// once per [`STORE_SPACE_CHECK_INTERVAL`]: the limit leaves space for all writes meanwhile.
    pub fn space_changed(&mut self) -> Option<bool> {
        let every = STORE_SPACE_CHECK_INTERVAL.as_duration();
        if self.space_checked.is_some_and(|at| at.elapsed() < every) {
            return None;
        }
        self.space_checked = Some(Instant::now());
        let free = self.store.free_bytes().ok().flatten()?;
        let low = free < STORE_FREE_BYTES_MIN;
        (low != std::mem::replace(&mut self.space_low, low)).then_some(low)
    }

    /// Returns how long the driver's thread may sleep: while the disk is full nothing is written,
    /// and only a check shows free space.
    pub fn sleep_max(&self) -> Option<Duration> {
        self.space_low.then(|| STORE_LOW_SPACE_CHECK_INTERVAL.as_duration())
    }

    /// Reopens the store and reads everything.
    ///
    /// # Errors
    /// The call may be repeated.
    pub fn reload(&mut self) -> Result<Loaded, LoadError> {
        self.store.reopen()?;
        records::load(self.store.as_mut())
    }

    /// Returns a snapshot of the store.
    ///
    /// # Errors
    /// It failed, and was not read again.
    pub fn snapshot(&self) -> Result<Box<dyn Scan>, StoreError> {
        self.store.snapshot()
    }
}

/// Returns the newest decisions about a subject, in order.
///
/// # Errors
/// They cannot be read.
pub fn decisions(store: &mut dyn Scan, subject: &str) -> Result<Vec<(u64, Decision)>, LoadError> {
    let mut found = VecDeque::new();
    records::scan(store, Table::Audit, &mut |record| {
        if let Record::Decision(seq, decision) = record
            && decision.subject.to_string() == subject
        {
            if found.len() == EXPLAIN_ENTRIES_MAX {
                found.pop_front();
            }
            found.push_back((seq, decision));
        }
    })?;
    Ok(found.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{
        faulty::{Fault, FaultyDisk},
        redb::RedbStore,
    };

    fn keeper() -> (FaultyDisk, Keeper) {
        let disk = FaultyDisk::new(|_| 0);
        let store = RedbStore::open(disk.clone()).unwrap();
        (disk, Keeper::new(Box::new(store), false))
    }

    fn put(key: &[u8]) -> Write {
        Write::Put { table: Table::Outcomes, key: key.to_vec(), value: vec![1] }
    }

    fn delete(key: &[u8]) -> Write {
        Write::Delete { table: Table::Outcomes, key: key.to_vec() }
    }

    fn outcomes(keeper: &Keeper) -> usize {
        let mut entries = 0;
        keeper.snapshot().unwrap().scan(Table::Outcomes, &mut |_, _| entries += 1).unwrap();
        entries
    }

    #[test]
    fn what_is_left_of_a_full_disk_is_for_the_ledger_and_deletes_make_room() {
        let (_disk, mut keeper) = keeper();
        keeper.keep(&[put(b"a")]).unwrap();
        keeper.space_low = true;
        assert!(matches!(keeper.keep(&[delete(b"a"), put(b"b")]), Err(StoreError::Full)));
        assert_eq!(outcomes(&keeper), 1);
        keeper.keep(&[delete(b"a")]).unwrap();
        assert_eq!(outcomes(&keeper), 0);
        keeper.commit(&[]).unwrap();
    }

    #[test]
    fn a_write_past_the_ledger_that_fails_leaves_the_store_open_for_the_ledger() {
        let (disk, mut keeper) = keeper();
        disk.fail_at(disk.operations() + 1, Fault::Errno(5));
        assert!(keeper.keep(&[put(b"a")]).is_err());
        disk.fail_no_more();
        keeper.commit(&[]).unwrap();
        keeper.keep(&[put(b"b")]).unwrap();
    }
}
