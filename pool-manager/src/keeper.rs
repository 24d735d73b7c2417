//! The store as the driver sees it: records in, batch by batch, and everything out again. It knows no ledger.

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

/// A store, and what is to be remembered about it between two batches.
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
    /// Of a store that may have been restored from a backup and not used since.
    pub fn new(store: Box<dyn Store>, restored: bool) -> Self {
        Self { store, note_restored: restored, space_low: false, space_checked: None }
    }

    /// Makes records durable, all or none.
    ///
    /// # Errors
    /// Then nobody knows which; the store is to be read again.
    pub fn commit(&mut self, records: &[Record]) -> Result<(), StoreError> {
        let mut writes: Vec<Write> = records.iter().map(records::write).collect();
        if self.note_restored {
            writes.extend(records::restored_noted());
        }
        self.store.commit(&writes)?;
        self.note_restored = false;
        Ok(())
    }

    /// Makes entries durable that are not the ledger's, all or none. A store that failed is opened again, so that the ledger finds it
    /// as it left it: everything of its own was durable before.
    ///
    /// # Errors
    /// Then nobody knows which. [`StoreError::Full`] writes nothing; what only deletes is always tried.
    pub fn keep(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let needs_room = writes.iter().any(|write| matches!(write, Write::Put { .. }));
        if self.space_low && needs_room {
            return Err(StoreError::Full);
        }
        self.store.commit(writes).inspect_err(|_| {
            if let Err(error) = self.store.reopen() {
                tracing::error!(error = units::chain(&error), "store not opened again"); // the ledger's next write says so, too
            }
        })
    }

    /// Whether the disk is too full for new reservations, if the answer has changed. Looks at most once in
    /// [`STORE_SPACE_CHECK_INTERVAL`]: the limit leaves room for all that is written meanwhile.
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

    /// How long the driver's thread may sleep: while the disk is full nothing is written, and only a look tells when there is
    /// room again.
    pub fn sleep_max(&self) -> Option<Duration> {
        self.space_low.then(|| STORE_LOW_SPACE_CHECK_INTERVAL.as_duration())
    }

    /// Opens the store again and reads everything.
    ///
    /// # Errors
    /// May be tried again.
    pub fn reload(&mut self) -> Result<Loaded, LoadError> {
        self.store.reopen()?;
        records::load(self.store.as_mut())
    }

    /// The store as it is now.
    ///
    /// # Errors
    /// It failed, and has not been read again.
    pub fn snapshot(&self) -> Result<Box<dyn Scan>, StoreError> {
        self.store.snapshot()
    }
}

/// The newest decisions about a subject, in their order.
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
