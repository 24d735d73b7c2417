//! Store in etcd, for a manager that another one can replace.
//!
//! Each batch is appended to a log, whose entries contain one part of a batch each. A batch is durable when its last
//! part is. A task [applies](apply) the batches to the entries of the tables, and then deletes them from the log. A
//! batch can therefore be larger than a transaction of etcd (128 operations, 1.5 MiB).
//!
//! ```text
//! PREFIX/leader               the manager that may write, with its lease
//! PREFIX/managers/NAME        each running manager, with its lease
//! PREFIX/transfer             name of the manager that must become the leader, during a transfer
//! PREFIX/head                 number of the last transaction that appended to the log
//! PREFIX/log/BATCH PART       part of a batch
//! PREFIX/applied              number of the last transaction that applied batches
//! PREFIX/entry/TABLE KEY      value of an entry, or the number of its chunks
//! PREFIX/chunk/TABLE KEY NUM  chunk of a value that is too large for one entry
//! ```
//!
//! Every transaction has two conditions. The entry `leader` must be the one that this manager created, so that a
//! manager that was paused until another one was elected cannot write. And `head` or `applied`, which the transaction
//! writes, must not have changed since the last transaction of this manager, so that a transaction that is delivered
//! late or twice has no effect.

mod apply;
mod compaction;
mod keys;
mod log;
mod prefix;
mod snapshot;
mod worker;

use std::{fmt, path::PathBuf, sync::Arc};

use ::etcd::{Client, client::Settings, election::Leadership};
use tokio::task::JoinHandle;
use units::Name;

use self::{
    apply::Pending,
    keys::{CALL_TIMEOUT, Chain, Keys, Position},
    log::Batch,
    snapshot::Snapshot,
    worker::Worker,
};
use super::{Scan, Store, StoreError, Table, Write, check_format, read_format};

/// Connection to a cluster of etcd, with the prefix of the keys of a rack.
#[derive(Clone)]
pub struct Cluster {
    worker: Arc<Worker>,
    client: Client,
    prefix: String,
    quota_bytes: u64,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("client", &self.client)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

impl Cluster {
    /// Prepares a connection. All keys begin with `prefix`, which ends without a slash. `quota_bytes` is
    /// `--quota-backend-bytes` of the members.
    ///
    /// # Errors
    /// [`StoreError::Etcd`] if an address or a TLS setting cannot be used, [`StoreError::Io`] if no thread can be
    /// created.
    pub fn new(settings: Settings, prefix: String, quota_bytes: u64) -> Result<Self, StoreError> {
        let worker = Worker::start().map_err(StoreError::io_error("start the thread of", prefix.as_ref()))?;
        let client = worker.enter(|| Client::new(settings));
        let client = client.map_err(|cause| StoreError::etcd_error("connect to", &prefix, cause))?;
        Ok(Self { worker: Arc::new(worker), client, prefix, quota_bytes })
    }

    /// Returns the client of the cluster.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the key of the leader.
    pub fn leader_key(&self) -> Vec<u8> {
        format!("{}/leader", self.prefix).into_bytes()
    }

    /// Returns the prefix of the keys of all managers. It is followed by the name of the manager.
    pub fn managers_prefix(&self) -> Vec<u8> {
        format!("{}/managers/", self.prefix).into_bytes()
    }

    /// Returns the key of the name of the manager that must be elected next.
    pub fn hand_over_key(&self) -> Vec<u8> {
        format!("{}/transfer", self.prefix).into_bytes()
    }

    /// Returns the location of the store, for messages.
    pub fn location(&self) -> PathBuf {
        PathBuf::from(format!("etcd:{}", self.prefix))
    }

    /// Returns the error of a failed call. `operation` is part of the message, such as "read".
    pub fn error(&self, operation: &'static str, cause: ::etcd::Error) -> StoreError {
        StoreError::etcd_error(operation, &self.prefix, cause)
    }

    /// Returns the same cluster with the prefix of an EMC's record of grants.
    pub fn for_emc(&self, emc: &Name) -> Self {
        Self { prefix: format!("{}/emc/{emc}", self.prefix), ..self.clone() }
    }

    /// Returns a snapshot of the store without being the leader. A store without entries can be read, too.
    ///
    /// # Errors
    /// [`StoreError::Etcd`], [`StoreError::Newer`] or [`StoreError::Corrupt`].
    pub fn read(&self) -> Result<Box<dyn Scan>, StoreError> {
        let mut snapshot = self.read_unchecked()?;
        read_format(snapshot.as_mut(), &self.location())?;
        Ok(snapshot)
    }

    /// Returns a snapshot of a store that may be incomplete after an interrupted restore.
    ///
    /// # Errors
    /// [`StoreError::Etcd`] or [`StoreError::Corrupt`].
    pub fn read_unchecked(&self) -> Result<Box<dyn Scan>, StoreError> {
        let keys = Arc::new(Keys::new(self.client.clone(), &self.prefix, None));
        Ok(Box::new(Snapshot::take(Arc::clone(&self.worker), keys)?))
    }

    /// Runs a future on the thread of the cluster.
    pub fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send,
    {
        self.worker.spawn(future)
    }

    /// Runs a future on the thread of the cluster, and waits for its result. Blocks the calling thread.
    pub fn block_on<F>(&self, future: F) -> F::Output
    where
        F: Future + Send + 'static,
        F::Output: Send,
    {
        self.worker.block_on(future)
    }
}

/// Store in etcd. Only the leader can write.
pub struct EtcdStore {
    cluster: Cluster,
    keys: Arc<Keys>,
    /// Log of this manager; `None` after a failure until the store is reopened.
    log: Option<OpenLog>,
}

struct OpenLog {
    head: Position,
    next_batch: u64,
    pending: Arc<Pending>,
    /// Task that applies the batches; `None` until the format of the store is checked.
    applier: Option<JoinHandle<()>>,
}

impl fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdStore").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

impl EtcdStore {
    /// Opens the store as the elected leader, or creates an empty store.
    ///
    /// # Errors
    /// Returns any [`StoreError`] except `Poisoned`.
    pub fn open(cluster: Cluster, leadership: &Leadership) -> Result<Self, StoreError> {
        let keys = Arc::new(Keys::new(cluster.client.clone(), &cluster.prefix, Some(leadership)));
        let mut store = Self { cluster, keys, log: None };
        store.reopen()?;
        Ok(store)
    }

    /// Deletes all entries as the elected leader, and opens the empty store without its format version. The caller
    /// must write this version last, so that an interrupted restore is detected.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn replace(cluster: Cluster, leadership: &Leadership) -> Result<Self, StoreError> {
        let keys = Arc::new(Keys::new(cluster.client.clone(), &cluster.prefix, Some(leadership)));
        let deleting = Arc::clone(&keys);
        cluster.block_on(async move {
            deleting.take_over(Chain::Applied).await?; // stops an earlier task that applies batches
            let mut head = deleting.take_over(Chain::Head).await?;
            deleting.advance(Chain::Head, &mut head, deleting.delete_all(), "delete the entries of").await
        })?;
        let mut store = Self { cluster, keys, log: None };
        let applied = store.open_log()?;
        store.start_applier(applied);
        Ok(store)
    }

    /// Opens the log, and returns the position of the task that applies it.
    fn open_log(&mut self) -> Result<Position, StoreError> {
        self.close();
        let keys = Arc::clone(&self.keys);
        let opened = self.cluster.worker.block_on(async move {
            // The order matters: after these transactions, no earlier transaction of this process takes effect.
            let head = keys.take_over(Chain::Head).await?;
            let applied = keys.take_over(Chain::Applied).await?;
            let log = log::read(&keys).await?;
            // An incomplete batch keeps its number, so that its parts are not mistaken for those of another one.
            let next_batch = log.last_number + 1;
            let pending = Arc::new(Pending::new(log.batches));
            Ok((OpenLog { head, next_batch, pending, applier: None }, applied))
        });
        let (log, applied) = opened?;
        self.log = Some(log);
        Ok(applied)
    }

    fn start_applier(&mut self, applied: Position) {
        if let Some(log) = &mut self.log {
            let applier = apply::run(Arc::clone(&self.keys), Arc::clone(&log.pending), applied);
            log.applier = Some(self.cluster.worker.spawn(applier));
        }
    }

    fn close(&mut self) {
        if let Some(applier) = self.log.take().and_then(|log| log.applier) {
            applier.abort();
        }
    }

    fn poisoned_error(&self) -> StoreError {
        StoreError::Poisoned { path: self.keys.location() }
    }

    fn append(&mut self, batch: &[Write]) -> Result<(), StoreError> {
        let log = self.log.as_mut().ok_or_else(|| StoreError::Poisoned { path: self.keys.location() })?;
        let (keys, pending) = (Arc::clone(&self.keys), Arc::clone(&log.pending));
        let batch = Batch::new(log.next_batch, batch.to_vec());
        let mut head = log.head;
        let appended = self.cluster.worker.block_on(async move {
            pending.wait_for_space(CALL_TIMEOUT, &keys).await?;
            for operation in batch.parts(&keys) {
                keys.advance(Chain::Head, &mut head, vec![operation], "write").await?;
            }
            keys.compaction().add_written(batch.bytes());
            pending.push(batch);
            Ok(head)
        });
        log.head = appended?;
        log.next_batch += 1;
        Ok(())
    }
}

impl Scan for EtcdStore {
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        self.snapshot()?.scan(table, each)
    }
}

impl Store for EtcdStore {
    fn commit(&mut self, batch: &[Write]) -> Result<(), StoreError> {
        if batch.is_empty() && self.log.is_some() {
            return Ok(());
        }
        self.append(batch).inspect_err(|_| self.close())
    }

    fn reopen(&mut self) -> Result<(), StoreError> {
        let applied = self.open_log()?;
        let path = self.keys.location();
        check_format(self, &path).inspect_err(|_| self.close())?;
        self.start_applier(applied);
        Ok(())
    }

    fn snapshot(&self) -> Result<Box<dyn Scan>, StoreError> {
        if self.log.is_none() {
            return Err(self.poisoned_error());
        }
        Ok(Box::new(Snapshot::take(Arc::clone(&self.cluster.worker), Arc::clone(&self.keys))?))
    }

    fn free_bytes(&self) -> Result<Option<u64>, StoreError> {
        let client = self.cluster.client.clone();
        let size = self.cluster.worker.block_on(async move { client.database_bytes().await });
        let size = size
            .map_err(|cause| StoreError::etcd_error("get the free space of", &self.cluster.prefix, cause));
        Ok(Some(size?.map_or(0, |size| self.cluster.quota_bytes.saturating_sub(size))))
    }
}

impl Drop for EtcdStore {
    fn drop(&mut self) {
        self.close();
    }
}
