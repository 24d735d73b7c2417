//! Debian's etcd on loopback with default settings: one member, fsync enabled. The client puts two
//! records in one transaction, the minimum for a reservation stored in etcd.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use ::etcd::messages::{KeyValue, RangeRequest, TxnRequest, kv_client::KvClient, prefix_end, put};
use local_rack::Process;
use proto::bearer::{Bearer, ClientChannel};
use tokio::sync::{mpsc, oneshot};

use crate::{
    failure::Failure,
    load::Writer,
    loopback::{connect, free_port, wait_until},
};

/// Environment variable with the folder of etcd. `cargo xtask bench` sets it.
const ETCD_ENV: &str = "TARN_ETCD";
/// Maximum time from the start of etcd to its first reply.
const READY_TIMEOUT: Duration = Duration::from_secs(30);
/// Value that is stored for a slice. It is as long as the state, owner, epoch and EMC of a slice.
const SLICE_RECORD: [u8; 64] = [0x5A; 64];
/// Value that is stored for a request ID. It is as long as the reservation, content hash and times
/// of a request.
const REQUEST_RECORD: [u8; 100] = [0xC3; 100];
/// Number of slice keys. Writes reuse these keys, which bounds the number of keys in the store.
const SLICE_KEY_COUNT: u64 = 65_536;

/// Running etcd server.
#[derive(Debug)]
pub struct Etcd {
    /// Process of the server.
    pub process: Process,
    /// URI to which clients connect.
    pub uri: String,
    /// First line of the output of `etcd --version`.
    pub version: String,
}

impl Etcd {
    /// Starts etcd with its data in `folder` and waits until it replies.
    ///
    /// # Errors
    /// [`Failure`] if etcd was not downloaded or does not reply.
    pub async fn start(folder: &Path, logs: &Path) -> Result<Self, Failure> {
        let program = std::env::var_os(ETCD_ENV).map(|folder| PathBuf::from(folder).join("etcd"));
        let program = program.ok_or(Failure::EtcdMissing)?;
        let version = read_version(&program)?;
        let uri = format!("http://127.0.0.1:{}", free_port()?);
        let peers = format!("http://127.0.0.1:{}", free_port()?);
        let mut command = Command::new(&program);
        // The removed variables may contain the settings of a production cluster.
        std::env::vars_os().filter(|(key, _)| key.to_string_lossy().starts_with("ETCD_")).for_each(
            |(key, _)| {
                command.env_remove(key);
            },
        );
        command.arg("--data-dir").arg(folder).args([
            "--name",
            "bench",
            "--logger",
            "zap",
            "--log-level",
            "warn",
        ]);
        command.args(["--listen-client-urls", &uri, "--advertise-client-urls", &uri]);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        command.args(["--initial-cluster", &format!("bench={peers}")]);
        let mut process = Process::start("etcd", &mut command, logs.join("etcd.log"))?;
        wait_until("a reply from etcd", READY_TIMEOUT, async || {
            process.check_running()?;
            Ok(check_ready(&uri).await.map_err(|failure| failure.error_chain()))
        })
        .await?;
        Ok(Self { process, uri, version })
    }
}

async fn check_ready(uri: &str) -> Result<(), Failure> {
    let channel = connect(uri, &Bearer::default(), 1).await?.swap_remove(0);
    let request = RangeRequest { key: b"anything".to_vec(), ..RangeRequest::default() };
    KvClient::new(channel).range(request).await.map_err(Failure::rejection("read a key of etcd"))?;
    Ok(())
}

fn read_version(program: &Path) -> Result<String, Failure> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    let output = output.map_err(|source| Failure::Start { program: "etcd".into(), source })?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or("etcd of unknown version").to_owned())
}

/// Client that writes the records of a slice and of a request in one transaction.
#[derive(Clone, Debug)]
pub struct TwoPutWriter {
    kv: KvClient<ClientChannel>,
    round: String,
}

impl TwoPutWriter {
    /// Returns a client that uses this connection. `round` makes the keys of its requests unique.
    pub fn new(channel: ClientChannel, round: &str) -> Self {
        Self { kv: KvClient::new(channel), round: round.to_owned() }
    }
}

impl Writer for TwoPutWriter {
    async fn write(&mut self, number: u64) -> Result<(), Failure> {
        let slice = format!("slices/{:05}", number % SLICE_KEY_COUNT).into_bytes();
        let request = format!("requests/{}-{number}", self.round).into_bytes();
        let success = vec![put(slice, SLICE_RECORD.to_vec()), put(request, REQUEST_RECORD.to_vec())];
        let request = TxnRequest { success, ..TxnRequest::default() };
        let reply =
            self.kv.txn(request).await.map_err(Failure::rejection("put two records into etcd"))?.into_inner();
        if reply.succeeded && reply.responses.len() == 2 {
            Ok(())
        } else {
            Err(Failure::UnexpectedReply {
                subject: "put two records into etcd".to_owned(),
                reply: format!("{reply:?}"),
            })
        }
    }
}

/// Number of records that a reservation needs: of the slice, the reservation and the decision.
const RECORDS: usize = 3;
/// Number of entries of a table that are read to get their size.
const ENTRIES_READ_MAX: i64 = 100;
/// Maximum number of writes in a transaction. etcd accepts 128 operations.
const WRITES_PER_TRANSACTION_MAX: usize = 128 / RECORDS;

/// Mean sizes of the records of a reservation in the ledger of a manager, in bytes: of the slice, the reservation and
/// the decision.
#[derive(Clone, Copy, Debug)]
pub struct RecordSizes([usize; RECORDS]);

impl RecordSizes {
    /// Reads the sizes from the ledger with a prefix. `tables` are the tags of the tables. Waits until the manager has written reservations to its tables.
    ///
    /// # Errors
    /// [`Failure`] if etcd rejects a call, or a table is still empty after 30 s.
    pub async fn read(channel: ClientChannel, prefix: &str, tables: [u8; RECORDS]) -> Result<Self, Failure> {
        let kv = KvClient::new(channel);
        wait_until("records of reservations in etcd", READY_TIMEOUT, async || {
            let mut sizes = [0; RECORDS];
            for (size, table) in sizes.iter_mut().zip(tables) {
                let entries = read_entries(kv.clone(), prefix, table).await?;
                let sum: usize = entries.iter().map(|entry| entry.value.len()).sum();
                match sum.checked_div(entries.len()) {
                    Some(mean) => *size = mean,
                    None => return Ok(Err(format!("table {table} is empty"))),
                }
            }
            Ok(Ok(Self(sizes)))
        })
        .await
    }
}

/// Reads the first entries of a table.
async fn read_entries(
    mut kv: KvClient<ClientChannel>,
    prefix: &str,
    table: u8,
) -> Result<Vec<KeyValue>, Failure> {
    let key = [format!("{prefix}/entry/").as_bytes(), &[table]].concat();
    let range_end = prefix_end(&key);
    let request = RangeRequest { key, range_end, limit: ENTRIES_READ_MAX, ..RangeRequest::default() };
    let entries = kv.range(request).await.map_err(Failure::rejection("read entries of etcd"))?;
    Ok(entries.into_inner().kvs)
}

impl fmt::Display for RecordSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [slice, reservation, decision] = self.0;
        write!(f, "slice {slice} bytes, reservation {reservation} bytes, decision {decision} bytes")
    }
}

/// Client whose writes a task collects in transactions, with one transaction at a time. Each write has the records of a
/// reservation.
#[derive(Clone, Debug)]
pub struct BatchedWriter {
    writes: mpsc::Sender<PendingWrite>,
    round: u32,
}

/// Write that waits for its transaction.
#[derive(Debug)]
struct PendingWrite {
    keys: [String; RECORDS],
    done: oneshot::Sender<()>,
}

impl BatchedWriter {
    /// Returns `count` clients that share transactions on this connection. `round` makes their keys unique.
    pub fn start(channel: ClientChannel, count: usize, round: u32, sizes: RecordSizes) -> Vec<Self> {
        let (writes, received) = mpsc::channel(count);
        tokio::spawn(write_batches(KvClient::new(channel), received, sizes));
        vec![Self { writes, round }; count]
    }
}

impl Writer for BatchedWriter {
    async fn write(&mut self, number: u64) -> Result<(), Failure> {
        let (done, written) = oneshot::channel();
        let (slice, round) = (number % SLICE_KEY_COUNT, self.round);
        let keys = [
            format!("slices/{slice:05}"),
            format!("reservations/{round}-{number}"),
            format!("decisions/{round}-{number}"),
        ];
        let failure = || Failure::UnexpectedReply {
            subject: "put a batch into etcd".to_owned(),
            reply: "the transaction failed".to_owned(),
        };
        self.writes.send(PendingWrite { keys, done }).await.map_err(|_| failure())?;
        written.await.map_err(|_| failure())
    }
}

/// Writes all collected writes in one transaction, again and again, until a transaction fails.
async fn write_batches(
    mut kv: KvClient<ClientChannel>,
    mut received: mpsc::Receiver<PendingWrite>,
    RecordSizes(sizes): RecordSizes,
) {
    let mut batch: Vec<PendingWrite> = Vec::new();
    while received.recv_many(&mut batch, WRITES_PER_TRANSACTION_MAX).await > 0 {
        let records =
            batch.iter_mut().flat_map(|write| std::mem::take(&mut write.keys).into_iter().zip(sizes));
        let puts = records.map(|(key, size)| put(key.into_bytes(), vec![0x5A; size]));
        let request = TxnRequest { success: puts.collect(), ..TxnRequest::default() };
        match kv.txn(request).await {
            Ok(reply) if reply.get_ref().succeeded => {}
            _ => return, // the waiting clients fail
        }
        for write in batch.drain(..) {
            let _ = write.done.send(()); // the client may have stopped
        }
    }
}
