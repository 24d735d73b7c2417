//! Debian's etcd on loopback with default settings: one member, fsync enabled. The client puts two
//! records in one transaction, the minimum for a reservation stored in etcd.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use ::etcd::messages::{RangeRequest, TxnRequest, kv_client::KvClient, put};
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

/// Maximum number of writes in a transaction. etcd accepts 128 operations.
const WRITES_PER_TRANSACTION_MAX: usize = 60;

/// Client whose writes a task collects in transactions, with one transaction at a time.
#[derive(Clone, Debug)]
pub struct BatchedWriter {
    writes: mpsc::Sender<PendingWrite>,
    key: String,
}

/// Write that waits for its transaction.
#[derive(Debug)]
struct PendingWrite {
    slice: Vec<u8>,
    request: Vec<u8>,
    done: oneshot::Sender<()>,
}

impl BatchedWriter {
    /// Returns `count` clients that share transactions on this connection. `round` makes their keys unique.
    pub fn start(channel: ClientChannel, count: usize, round: u32) -> Vec<Self> {
        let (writes, received) = mpsc::channel(count);
        tokio::spawn(write_batches(KvClient::new(channel), received));
        vec![Self { writes, key: format!("batched-{round}") }; count]
    }
}

impl Writer for BatchedWriter {
    async fn write(&mut self, number: u64) -> Result<(), Failure> {
        let (done, written) = oneshot::channel();
        let slice = format!("slices/{:05}", number % SLICE_KEY_COUNT).into_bytes();
        let request = format!("requests/{}-{number}", self.key).into_bytes();
        let failure = || Failure::UnexpectedReply {
            subject: "put a batch into etcd".to_owned(),
            reply: "the transaction failed".to_owned(),
        };
        self.writes.send(PendingWrite { slice, request, done }).await.map_err(|_| failure())?;
        written.await.map_err(|_| failure())
    }
}

/// Writes all collected writes in one transaction, again and again, until a transaction fails.
async fn write_batches(mut kv: KvClient<ClientChannel>, mut received: mpsc::Receiver<PendingWrite>) {
    let mut batch = Vec::new();
    while received.recv_many(&mut batch, WRITES_PER_TRANSACTION_MAX).await > 0 {
        let puts = batch.iter().flat_map(|write| {
            [
                put(write.slice.clone(), SLICE_RECORD.to_vec()),
                put(write.request.clone(), REQUEST_RECORD.to_vec()),
            ]
        });
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
