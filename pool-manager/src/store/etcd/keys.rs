//! Keys of a store, and transactions with the conditions of the store.

use std::{
    path::PathBuf,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ::etcd::{
    Client, Error,
    election::Leadership,
    messages::{
        Compare, KeyValue, RangeRequest, RangeResponse, RequestOp, TxnRequest, delete_range, get,
        is_written_in, prefix_end, put,
    },
};

use super::{StoreError, Table, compaction::Compaction};

/// Time in which a call is repeated while no member answers.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay before a call is repeated.
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// Maximum number of attempts to take over a chain whose transactions are still delivered.
const TAKE_OVER_ATTEMPTS_MAX: u32 = 16;

/// Number of times that this process has taken over a chain.
static OPENINGS: AtomicU64 = AtomicU64::new(1);

/// Entry that the transactions of one kind change in turn, so that none of them takes effect late or twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chain {
    /// Transactions that append to the log.
    Head,
    /// Transactions that apply batches.
    Applied,
}

/// Last transaction of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    /// Number of the transaction.
    number: u64,
    /// Number of the store's opening, see [`Keys::take_over`]. Together with the number of the transaction and the
    /// leader, it identifies the transaction.
    opening: u64,
    revision: i64,
}

/// Keys under one prefix, and the condition under which this manager may write.
#[derive(Debug)]
pub(super) struct Keys {
    client: Client,
    prefix: String,
    /// `None` if this manager may only read.
    leadership: Option<Condition>,
    /// Compaction of the history, which continues when the store is reopened.
    compaction: Mutex<Compaction>,
}

/// Condition that this manager is the elected one.
#[derive(Debug)]
struct Condition {
    is_leader: Compare,
    token: i64,
}

/// Entries to read, and the revision in which they are read.
#[derive(Clone, Debug)]
pub(super) struct KeyRange {
    start: Vec<u8>,
    end: Vec<u8>,
    /// Revision; 0 stands for the newest one until the first page was read.
    revision: i64,
    /// Maximum number of entries that one call reads.
    page_entries: i64,
    /// Whether the last page was read.
    is_complete: bool,
}

impl KeyRange {
    /// Returns the range of keys from `start` to before `end`.
    pub(super) fn new(start: Vec<u8>, end: Vec<u8>, revision: i64, page_entries: i64) -> Self {
        Self { start, end, revision, page_entries, is_complete: false }
    }

    /// Returns the range of all keys with a prefix.
    pub(super) fn of_prefix(prefix: Vec<u8>, revision: i64, page_entries: i64) -> Self {
        let end = prefix_end(&prefix);
        Self::new(prefix, end, revision, page_entries)
    }
}

impl Position {
    fn encode(self) -> Vec<u8> {
        [self.number.to_be_bytes(), self.opening.to_be_bytes()].concat()
    }

    /// Returns the revision of the last transaction.
    pub(super) fn revision(self) -> i64 {
        self.revision
    }
}

impl Keys {
    pub(super) fn new(client: Client, prefix: &str, leadership: Option<&Leadership>) -> Self {
        let condition =
            |leader: &Leadership| Condition { is_leader: leader.condition(), token: leader.token() };
        Self {
            client,
            prefix: prefix.to_owned(),
            leadership: leadership.map(condition),
            compaction: Mutex::new(Compaction::new()),
        }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn compaction(&self) -> MutexGuard<'_, Compaction> {
        self.compaction.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the prefix, for messages.
    pub(super) fn location(&self) -> PathBuf {
        PathBuf::from(format!("etcd:{}", self.prefix))
    }

    pub(super) fn log_key(&self, batch: u64, part: u32) -> Vec<u8> {
        self.key("log", &[&batch.to_be_bytes(), &part.to_be_bytes()])
    }

    /// Returns the operations that delete the log and all entries.
    pub(super) fn delete_all(&self) -> Vec<RequestOp> {
        let folders = ["log", "entry", "chunk"].map(|folder| self.key(folder, &[]));
        folders.into_iter().map(|prefix| delete_range(prefix.clone(), prefix_end(&prefix))).collect()
    }

    /// Returns the prefix of the keys of all parts of the log.
    pub(super) fn log_prefix(&self) -> Vec<u8> {
        self.key("log", &[])
    }

    /// Returns the key of an entry of a table, or with an empty `key`, the prefix of all of them.
    pub(super) fn entry_key(&self, tag: u8, key: &[u8]) -> Vec<u8> {
        self.key("entry", &[&[tag], key])
    }

    pub(super) fn table_prefix(&self, table: Table) -> Vec<u8> {
        self.entry_key(table.tag(), &[])
    }

    /// Returns the key of a chunk of a value. The length of the entry's key separates the chunks of an entry from
    /// those of entries whose keys begin with the same bytes.
    pub(super) fn chunk_key(&self, tag: u8, key: &[u8], chunk: u32) -> Vec<u8> {
        let len = u32::try_from(key.len()).unwrap_or(u32::MAX).to_be_bytes();
        self.key("chunk", &[&[tag], &len, key, &chunk.to_be_bytes()])
    }

    fn key(&self, folder: &str, parts: &[&[u8]]) -> Vec<u8> {
        let mut bytes = format!("{}/{folder}/", self.prefix).into_bytes();
        parts.iter().for_each(|part| bytes.extend_from_slice(part));
        bytes
    }

    fn chain_key(&self, chain: Chain) -> Vec<u8> {
        let name = match chain {
            Chain::Head => "head",
            Chain::Applied => "applied",
        };
        format!("{}/{name}", self.prefix).into_bytes()
    }

    /// Performs a transaction, which becomes the last one of its chain. Repeats it for [`CALL_TIMEOUT`] while no
    /// member answers.
    ///
    /// # Errors
    /// [`StoreError::NotLeader`] if another manager was elected, [`StoreError::Changed`] if the chain was changed
    /// otherwise, [`StoreError::Etcd`].
    pub(super) async fn advance(
        &self,
        chain: Chain,
        position: &mut Position,
        operations: Vec<RequestOp>,
        operation: &'static str,
    ) -> Result<(), StoreError> {
        let Some(Condition { is_leader, token }) = &self.leadership else {
            return Err(StoreError::NotLeader { path: self.location() });
        };
        let number = position.number + 1;
        let key = self.chain_key(chain);
        let next = Position { number, ..*position };
        let mut success = vec![put(key.clone(), next.encode())];
        success.extend(operations);
        let request = TxnRequest {
            compare: vec![is_leader.clone(), is_written_in(key.clone(), position.revision)],
            success,
            failure: vec![get(key), get(is_leader.key.clone())],
        };
        let started = Instant::now();
        let response = loop {
            let result = self.client.txn(request.clone()).await;
            if let Some(response) = self.take_result(result, operation, started).await? {
                break response;
            }
        };
        if response.succeeded {
            *position = Position { revision: response.revision(), ..next };
            return Ok(());
        }
        let (last, leader) = (response.entries(0).first(), response.entries(1).first());
        if leader.is_none_or(|leader| leader.create_revision != *token) {
            return Err(StoreError::NotLeader { path: self.location() });
        }
        // An attempt whose answer was lost may have been successful.
        match last.and_then(read_position) {
            Some(last) if (last.number, last.opening) == (next.number, next.opening) => {
                *position = last;
                Ok(())
            }
            _ => Err(StoreError::Changed { path: self.location() }),
        }
    }

    /// Performs an empty transaction, so that no earlier transaction of the chain can take effect any more. Returns
    /// the new position.
    pub(super) async fn take_over(&self, chain: Chain) -> Result<Position, StoreError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let key = self.chain_key(chain);
            let entries = self.read_page(RangeRequest { key, ..RangeRequest::default() }).await?;
            let mut position = Position { number: 0, opening: 0, revision: 0 };
            if let Some(entry) = entries.kvs.first() {
                position = read_position(entry).ok_or_else(|| StoreError::Corrupt {
                    path: self.location(),
                    what: format!("the value of {} is not a number", String::from_utf8_lossy(&entry.key)),
                })?;
            }
            position.opening = OPENINGS.fetch_add(1, Ordering::Relaxed);
            match self.advance(chain, &mut position, Vec::new(), "open").await {
                Ok(()) => return Ok(position),
                Err(StoreError::Changed { .. }) if attempts < TAKE_OVER_ATTEMPTS_MAX => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads all entries of a range in one revision: a given one, or the newest one. Returns the revision.
    pub(super) async fn read_range(
        &self,
        mut range: KeyRange,
        mut each: impl FnMut(KeyValue),
    ) -> Result<i64, StoreError> {
        loop {
            let page = self.next_page(&mut range).await?;
            let is_last = page.is_empty();
            page.into_iter().for_each(&mut each);
            if is_last {
                return Ok(range.revision);
            }
        }
    }

    /// Reads the next entries of a range, and moves its start behind them. Returns no entries at the end.
    pub(super) async fn next_page(&self, range: &mut KeyRange) -> Result<Vec<KeyValue>, StoreError> {
        if range.is_complete {
            return Ok(Vec::new());
        }
        let page = self
            .read_page(RangeRequest {
                key: range.start.clone(),
                range_end: range.end.clone(),
                limit: range.page_entries,
                revision: range.revision,
                ..RangeRequest::default()
            })
            .await?;
        if range.revision == 0 {
            range.revision = page.header.as_ref().map_or(0, |header| header.revision);
        }
        range.is_complete = !page.more;
        if let Some(last) = page.kvs.last() {
            range.start.clone_from(&last.key);
            range.start.push(0); // the smallest larger key
        }
        Ok(page.kvs)
    }

    pub(super) async fn read_page(&self, request: RangeRequest) -> Result<RangeResponse, StoreError> {
        let started = Instant::now();
        loop {
            let result = self.client.range(request.clone()).await;
            if let Some(page) = self.take_result(result, "read", started).await? {
                return Ok(page);
            }
        }
    }

    /// Returns the result of a call, or `None` after a delay if the caller must repeat the call: no member answered, and
    /// less than [`CALL_TIMEOUT`] has passed.
    async fn take_result<T>(
        &self,
        result: Result<T, Error>,
        operation: &'static str,
        started: Instant,
    ) -> Result<Option<T>, StoreError> {
        match result {
            Ok(response) => Ok(Some(response)),
            Err(Error::Unavailable { .. }) if started.elapsed() < CALL_TIMEOUT => {
                tokio::time::sleep(RETRY_DELAY).await;
                Ok(None)
            }
            Err(cause) => Err(StoreError::etcd_error(operation, &self.prefix, cause)),
        }
    }
}

fn read_position(entry: &KeyValue) -> Option<Position> {
    let (number, opening) = entry.value.split_first_chunk::<8>()?;
    let opening = u64::from_be_bytes(opening.try_into().ok()?);
    Some(Position { number: u64::from_be_bytes(*number), opening, revision: entry.mod_revision })
}
