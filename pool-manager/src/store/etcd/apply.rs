//! Applies batches of the log to the entries of the tables.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ::etcd::messages::{RequestOp, delete, delete_range, put};
use tokio::sync::Notify;

use super::{
    StoreError, Table,
    keys::{Chain, Keys, Position},
    log::{Batch, EntryKey},
};

/// Maximum size of the log, in bytes. Writes wait while it is larger.
const LOG_BYTES_MAX: usize = 32 << 20;
/// Maximum number of operations in a transaction. etcd accepts 128.
const OPERATIONS_MAX: usize = 120;
/// Maximum size of the values in a transaction, in bytes. etcd accepts requests of 1.5 MiB.
const TRANSACTION_BYTES_MAX: usize = 1 << 20;
/// Maximum size of a value, or of a chunk of a larger value, in bytes.
pub(super) const VALUE_BYTES_MAX: usize = 128 << 10;
/// Size of the log, in bytes, from which batches are applied although more batches are added. A larger log means fewer
/// writes, because entries that change several times are written once, but a longer take-over.
const LAZY_LOG_BYTES: usize = 4 << 20;
/// Time without a new batch after which all batches are applied.
const IDLE_DELAY: Duration = Duration::from_millis(100);
/// Delay before batches are applied again after a failure.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Number of entries after which the batches that are applied together end, so that the log becomes shorter even if
/// the task is aborted soon.
const ROUND_ENTRIES: usize = 16_384;
/// First byte of an entry with the value itself.
pub(super) const VALUE: u8 = 0;
/// First byte of an entry with the number of the value's chunks.
pub(super) const CHUNKS: u8 = 1;

/// Batches that are not yet applied.
#[derive(Debug)]
pub(super) struct Pending {
    queue: Mutex<Queue>,
    added: Notify,
    removed: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    batches: VecDeque<Arc<Batch>>,
    /// Size of all batches, in bytes.
    bytes: usize,
}

impl Queue {
    fn push(&mut self, batch: Batch) {
        self.bytes += batch.bytes();
        self.batches.push_back(Arc::new(batch));
    }
}

impl Pending {
    pub(super) fn new(batches: Vec<Batch>) -> Self {
        let mut queue = Queue::default();
        batches.into_iter().for_each(|batch| queue.push(batch));
        Self { queue: Mutex::new(queue), added: Notify::new(), removed: Notify::new() }
    }

    pub(super) fn push(&self, batch: Batch) {
        self.lock().push(batch);
        self.added.notify_one();
    }

    /// Waits while the log is too large.
    ///
    /// # Errors
    /// [`StoreError::Behind`] after `timeout`.
    pub(super) async fn wait_for_space(&self, timeout: Duration, keys: &Keys) -> Result<(), StoreError> {
        let wait = async {
            loop {
                let mut removed = std::pin::pin!(self.removed.notified());
                removed.as_mut().enable(); // registers for notifications before the check
                if self.lock().bytes <= LOG_BYTES_MAX {
                    return;
                }
                removed.await;
            }
        };
        let behind = |_| StoreError::Behind { path: keys.location() };
        tokio::time::timeout(timeout, wait).await.map_err(behind)
    }

    /// Returns the first batches, with about [`ROUND_ENTRIES`] entries.
    fn first_batches(&self) -> Vec<Arc<Batch>> {
        let mut entries = 0;
        let has_space = |batch: &&Arc<Batch>| {
            let has_space = entries < ROUND_ENTRIES;
            entries += batch.writes.len();
            has_space
        };
        self.lock().batches.iter().take_while(has_space).cloned().collect()
    }

    /// Waits until the log is large, or not empty while no batches are added.
    async fn wait_for_batches(&self) {
        loop {
            let bytes = self.lock().bytes;
            let added = self.added.notified();
            match bytes {
                0 => added.await,
                LAZY_LOG_BYTES.. => return,
                _ if tokio::time::timeout(IDLE_DELAY, added).await.is_err() => return,
                _ => {}
            }
        }
    }

    fn remove_up_to(&self, number: u64) {
        let mut queue = self.lock();
        while queue.batches.front().is_some_and(|batch| batch.number <= number) {
            queue.bytes -= queue.batches.pop_front().map_or(0, |batch| batch.bytes());
        }
        drop(queue);
        self.removed.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Applies batches until this manager is not the leader any more.
pub(super) async fn run(keys: Arc<Keys>, pending: Arc<Pending>, mut applied: Position) {
    loop {
        pending.wait_for_batches().await;
        let batches = pending.first_batches();
        let Some(last) = batches.last().map(|batch| batch.number) else { continue };
        match apply(&keys, &batches, last, &mut applied).await {
            Ok(()) => {
                pending.remove_up_to(last);
                compact(&keys, applied).await;
            }
            Err(StoreError::NotLeader { .. }) => return, // the next write reports this
            Err(error) => {
                tracing::warn!(
                    error = units::chain(&error),
                    "cannot apply the log of the store; trying again"
                );
                tokio::time::sleep(RETRY_DELAY).await;
                if let Ok(position) = keys.take_over(Chain::Applied).await {
                    applied = position;
                }
            }
        }
    }
}

/// Applies batches and deletes them from the log.
async fn apply(
    keys: &Keys,
    batches: &[Arc<Batch>],
    last: u64,
    applied: &mut Position,
) -> Result<(), StoreError> {
    let mut writes: BTreeMap<&EntryKey, Option<&Vec<u8>>> = BTreeMap::new();
    for batch in batches {
        writes.extend(batch.writes.iter().map(|(key, value)| (key, value.as_ref())));
    }
    let mut transaction = Transaction { keys, applied, operations: Vec::new(), bytes: 0 };
    for ((tag, key), value) in writes {
        transaction.write(*tag, key, value.map(Vec::as_slice)).await?;
    }
    transaction.finish().await?;
    let parts = delete_range(keys.log_key(0, 0), keys.log_key(last + 1, 0));
    keys.advance(Chain::Applied, applied, vec![parts], "write").await
}

/// Transaction of the applied entries that is being filled.
struct Transaction<'a> {
    keys: &'a Keys,
    applied: &'a mut Position,
    operations: Vec<RequestOp>,
    bytes: usize,
}

impl Transaction<'_> {
    async fn write(&mut self, tag: u8, key: &[u8], value: Option<&[u8]>) -> Result<(), StoreError> {
        let entry = self.keys.entry_key(tag, key);
        let mut chunks = 0;
        match value {
            None => self.add(delete(entry), 0).await?,
            Some(value) if value.len() <= VALUE_BYTES_MAX => {
                self.add(put(entry, with_kind(VALUE, value)), value.len()).await?;
            }
            Some(value) => {
                for chunk in value.chunks(VALUE_BYTES_MAX) {
                    let key = self.keys.chunk_key(tag, key, chunks);
                    self.add(put(key, chunk.to_vec()), chunk.len()).await?;
                    chunks += 1;
                }
                self.add(put(entry, with_kind(CHUNKS, &chunks.to_be_bytes())), 0).await?;
            }
        }
        if chunks > 0 || tag == Table::Models.tag() {
            // Other tables have no values of several chunks. The former value may have had more chunks. Only these
            // are deleted, so that the value is complete if the batch is applied again after the log was deleted.
            let (first, end) =
                (self.keys.chunk_key(tag, key, chunks), self.keys.chunk_key(tag, key, u32::MAX));
            self.add(delete_range(first, end), 0).await?;
        }
        Ok(())
    }

    async fn add(&mut self, operation: RequestOp, bytes: usize) -> Result<(), StoreError> {
        if self.operations.len() == OPERATIONS_MAX || self.bytes + bytes > TRANSACTION_BYTES_MAX {
            self.finish().await?;
        }
        self.operations.push(operation);
        self.bytes += bytes;
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), StoreError> {
        self.keys.compaction().add_written(std::mem::take(&mut self.bytes));
        if self.operations.is_empty() {
            return Ok(());
        }
        let operations = std::mem::take(&mut self.operations);
        self.keys.advance(Chain::Applied, self.applied, operations, "write").await
    }
}

fn with_kind(kind: u8, value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind];
    bytes.extend_from_slice(value);
    bytes
}

/// Removes old history, if this is due.
async fn compact(keys: &Keys, applied: Position) {
    let due = keys.compaction().take_due(applied.revision());
    if let Some(revision) = due
        && let Err(error) = keys.client().compact(revision).await
    {
        tracing::warn!(error = units::chain(&error), "cannot compact the history of etcd");
    }
}
