//! The thread that owns the store: it writes batches in order, loads, and reads decisions. It knows no ledger.

use std::sync::{Arc, mpsc};

use pool::{audit::Decision, record::Record};
use tokio::sync::oneshot;

use crate::{
    records::{self, LoadError, Loaded},
    store::{Store, StoreError, Table, Write},
};

/// What the store's thread is asked to do.
#[derive(Debug)]
pub enum Job {
    /// Make these durable, all or none.
    Commit {
        /// To be named in the answer.
        batch: u64,
        /// What.
        records: Arc<Vec<Record>>,
    },
    /// Open again and read everything.
    Reload,
    /// Read the decisions that a filter keeps, at most so many, the newest.
    Decisions {
        /// Which.
        keep: fn(&Decision, &str) -> bool,
        /// What the filter is asked about.
        subject: String,
        /// How many.
        most: usize,
        /// Where they go.
        reply: oneshot::Sender<Result<Vec<(u64, Decision)>, LoadError>>,
    },
}

/// What the store's thread answers.
#[derive(Debug)]
pub enum Done {
    /// A batch is durable, or nobody knows.
    Stored {
        /// Which.
        batch: u64,
        /// How it went.
        result: Result<(), StoreError>,
    },
    /// Everything was read again.
    Reloaded(Result<Loaded, LoadError>),
    /// The disk has room for new reservations, or not.
    Space {
        /// Below the limit.
        low: bool,
    },
}

/// Serves jobs until nobody can ask any more. `done` is called with each answer, in order.
pub fn serve(mut store: Box<dyn Store>, restored: bool, jobs: &mpsc::Receiver<Job>, done: impl Fn(Done)) {
    let mut keeper = Keeper { note_restored: restored, space_low: false };
    while let Ok(job) = jobs.recv() {
        match job {
            Job::Commit { batch, records } => {
                let result = keeper.commit(store.as_mut(), &records);
                done(Done::Stored { batch, result });
                if let Some(low) = keeper.space_changed(store.as_ref()) {
                    done(Done::Space { low });
                }
            }
            Job::Reload => done(Done::Reloaded(reload(store.as_mut()))),
            Job::Decisions { keep, subject, most, reply } => {
                let _ = reply.send(decisions(store.as_mut(), keep, &subject, most));
            }
        }
    }
}

struct Keeper {
    note_restored: bool,
    space_low: bool,
}

impl Keeper {
    fn commit(&mut self, store: &mut dyn Store, records: &[Record]) -> Result<(), StoreError> {
        let mut writes: Vec<Write> = records.iter().map(records::write).collect();
        if self.note_restored {
            writes.extend(records::restored_noted());
        }
        store.commit(&writes)?;
        self.note_restored = false;
        Ok(())
    }

    /// Whether the answer to "is there room" has changed.
    fn space_changed(&mut self, store: &dyn Store) -> Option<bool> {
        let free = store.free_bytes().ok().flatten()?;
        let low = free < units::limits::STORE_FREE_BYTES_MIN;
        (low != std::mem::replace(&mut self.space_low, low)).then_some(low)
    }
}

fn reload(store: &mut dyn Store) -> Result<Loaded, LoadError> {
    store.reopen()?;
    records::load(store)
}

fn decisions(
    store: &mut dyn Store,
    keep: fn(&Decision, &str) -> bool,
    subject: &str,
    most: usize,
) -> Result<Vec<(u64, Decision)>, LoadError> {
    let mut found = std::collections::VecDeque::with_capacity(most.min(64));
    records::scan(store, Table::Audit, &mut |record| {
        if let Record::Decision(seq, decision) = record
            && keep(&decision, subject)
        {
            if found.len() == most {
                found.pop_front();
            }
            found.push_back((seq, decision));
        }
    })?;
    Ok(found.into())
}
