//! Stores the ledger's records for the driver: writes batches, reads all records, and checks the
//! free space on disk.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use pool::{audit::Decision, record::Record};
use units::limits::{
    EXPLAIN_ENTRIES_MAX, STORE_FREE_BYTES_MIN, STORE_LOW_SPACE_CHECK_INTERVAL, STORE_SPACE_CHECK_INTERVAL,
};

use crate::{
    records::{self, LoadError, StoreContents},
    store::{Scan, Store, StoreError, Table, Write},
};

/// Store of the ledger, with the state of the free space checks.
pub struct LedgerStore {
    store: Box<dyn Store>,
    is_restored: bool,
    is_space_low: bool,
    space_checked_at: Option<Instant>,
}

impl std::fmt::Debug for LedgerStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LedgerStore").field("is_restored", &self.is_restored).finish_non_exhaustive()
    }
}

impl LedgerStore {
    /// Creates the ledger's store. `restored` means that the store was restored from a backup and
    /// not written since.
    pub fn new(store: Box<dyn Store>, restored: bool) -> Self {
        Self { store, is_restored: restored, is_space_low: false, space_checked_at: None }
    }

    /// Writes records atomically and durably.
    ///
    /// # Errors
    /// After a [`StoreError`] the records may or may not be on disk. The caller must read the store
    /// again.
    pub fn commit(&mut self, records: &[Record]) -> Result<(), StoreError> {
        let mut writes: Vec<Write> = records.iter().map(records::write).collect();
        if self.is_restored {
            writes.extend(records::clear_restored_marks());
        }
        self.store.commit(&writes)?;
        self.is_restored = false;
        Ok(())
    }

    /// Writes entries that do not belong to the ledger, atomically and durably. After a failure the
    /// store is reopened, so that the ledger can write again.
    ///
    /// # Errors
    /// [`StoreError::Full`] if the disk is nearly full and `writes` does not only delete entries;
    /// in this case nothing is written. After another error the entries may or may not be on disk.
    pub fn write_entries(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let needs_space = writes.iter().any(|write| matches!(write, Write::Put { .. }));
        if self.is_space_low && needs_space {
            return Err(StoreError::Full);
        }
        self.store.commit(writes).inspect_err(|_| {
            if let Err(error) = self.store.reopen() {
                tracing::error!(error = units::chain(&error), "cannot reopen store"); // the ledger's next write fails and starts a reload
            }
        })
    }

    /// Checks the free space, at most once per [`STORE_SPACE_CHECK_INTERVAL`]. Returns `Some(true)`
    /// if the space has become too low for reservations, `Some(false)` if it has become sufficient,
    /// and `None` if nothing changed. The minimum leaves enough space for all writes between two
    /// checks.
    pub fn check_space_change(&mut self) -> Option<bool> {
        let every = STORE_SPACE_CHECK_INTERVAL.as_duration();
        if self.space_checked_at.is_some_and(|at| at.elapsed() < every) {
            return None;
        }
        self.space_checked_at = Some(Instant::now());
        let free = self.store.free_bytes().ok().flatten()?;
        let low = free < STORE_FREE_BYTES_MIN;
        (low != std::mem::replace(&mut self.is_space_low, low)).then_some(low)
    }

    /// Returns the longest time that the driver's thread may sleep while the free space is low.
    /// Nothing is written during this time, so the thread must wake up to check the space. Returns
    /// `None` while the space is sufficient.
    pub fn max_sleep(&self) -> Option<Duration> {
        self.is_space_low.then(|| STORE_LOW_SPACE_CHECK_INTERVAL.as_duration())
    }

    /// Reopens the store and reads the whole ledger.
    ///
    /// # Errors
    /// [`LoadError`] if the store cannot be opened or read. The caller may try again.
    pub fn reload(&mut self) -> Result<StoreContents, LoadError> {
        self.store.reopen()?;
        records::load(self.store.as_mut())
    }

    /// Returns a consistent snapshot of the store.
    ///
    /// # Errors
    /// [`StoreError`] if the store failed and has not been reopened.
    pub fn snapshot(&self) -> Result<Box<dyn Scan>, StoreError> {
        self.store.snapshot()
    }
}

/// Returns the newest decisions about a subject, at most [`EXPLAIN_ENTRIES_MAX`], oldest first.
///
/// # Errors
/// [`LoadError`] if the decisions cannot be read.
pub fn find_decisions(store: &mut dyn Scan, subject: &str) -> Result<Vec<(u64, Decision)>, LoadError> {
    let mut decisions = VecDeque::new();
    records::scan(store, Table::Audit, &mut |record| {
        if let Record::Decision(seq, decision) = record
            && decision.subject.to_string() == subject
        {
            if decisions.len() == EXPLAIN_ENTRIES_MAX {
                decisions.pop_front();
            }
            decisions.push_back((seq, decision));
        }
    })?;
    Ok(decisions.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{
        faulty::{Fault, FaultyDisk},
        redb::RedbStore,
    };

    fn open_store() -> (FaultyDisk, LedgerStore) {
        let disk = FaultyDisk::new(|_| 0);
        let store = RedbStore::open(disk.clone()).unwrap();
        (disk, LedgerStore::new(Box::new(store), false))
    }

    fn put(key: &[u8]) -> Write {
        Write::Put { table: Table::Outcomes, key: key.to_vec(), value: vec![1] }
    }

    fn delete(key: &[u8]) -> Write {
        Write::Delete { table: Table::Outcomes, key: key.to_vec() }
    }

    fn outcomes(store: &LedgerStore) -> usize {
        let mut entries = 0;
        store.snapshot().unwrap().scan(Table::Outcomes, &mut |_, _| entries += 1).unwrap();
        entries
    }

    #[test]
    fn full_disk_accepts_only_deletes_and_writes_of_the_ledger() {
        let (_disk, mut store) = open_store();
        store.write_entries(&[put(b"a")]).unwrap();
        store.is_space_low = true;
        assert!(matches!(store.write_entries(&[delete(b"a"), put(b"b")]), Err(StoreError::Full)));
        assert_eq!(outcomes(&store), 1);
        store.write_entries(&[delete(b"a")]).unwrap();
        assert_eq!(outcomes(&store), 0);
        store.commit(&[]).unwrap();
    }

    #[test]
    fn failed_write_of_entries_reopens_the_store() {
        let (disk, mut store) = open_store();
        disk.fail_at(disk.operations() + 1, Fault::Errno(5));
        assert!(store.write_entries(&[put(b"a")]).is_err());
        disk.clear_faults();
        store.commit(&[]).unwrap();
        store.write_entries(&[put(b"b")]).unwrap();
    }
}
