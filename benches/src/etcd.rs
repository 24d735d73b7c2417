//! Debian's etcd, alone, on loopback, as it comes: one member, fsync on. And a client that puts two records in one
//! transaction, which is the least that a slice lent through etcd would need.

use std::{
    io::ErrorKind,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use proto::bearer::{Bearer, ClientChannel};

use crate::{
    child::Child,
    etcdserverpb::{
        PutRequest, RangeRequest, RequestOp, TxnRequest, kv_client::KvClient, request_op::Request,
    },
    failure::Failure,
    load::Writer,
    loopback::{connect, free_port, until},
};

/// How long etcd may take to elect itself.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// A slice's record: state, owner, epoch, EMC.
const SLICE_RECORD: [u8; 64] = [0x5A; 64];
/// A request id's record: reservation, content hash, times.
const REQUEST_RECORD: [u8; 100] = [0xC3; 100];
/// Slices that are written over and over, so that the store does not grow without end.
const SLICES: u64 = 65_536;

/// A running etcd.
#[derive(Debug)]
pub struct Etcd {
    /// Its process.
    pub child: Child,
    /// Where clients connect.
    pub uri: String,
    /// Its own word for its version.
    pub version: String,
}

impl Etcd {
    /// Starts one with its data in `folder` and waits until it answers.
    ///
    /// # Errors
    /// There is no etcd on this machine, or it does not answer.
    pub async fn start(folder: &Path, logs: &Path) -> Result<Self, Failure> {
        let version = version()?;
        let uri = format!("http://127.0.0.1:{}", free_port()?);
        let peers = format!("http://127.0.0.1:{}", free_port()?);
        let mut command = Command::new("etcd");
        // Debian's service may have left settings for a real cluster in the environment.
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
        let mut child = Child::start("etcd", &mut command, logs)?;
        until("an answer from etcd", READY_WITHIN, async || {
            child.still_runs()?;
            Ok(answers(&uri).await.map_err(|failure| failure.story()))
        })
        .await?;
        Ok(Self { child, uri, version })
    }
}

async fn answers(uri: &str) -> Result<(), Failure> {
    let channel = connect(uri, &Bearer::default(), 1).await?.swap_remove(0);
    let question = RangeRequest { key: b"anything".to_vec() };
    KvClient::new(channel).range(question).await.map_err(Failure::refused("read a key of etcd"))?;
    Ok(())
}

fn version() -> Result<String, Failure> {
    let out =
        Command::new("etcd").arg("--version").stdin(Stdio::null()).output().map_err(|source| match source
            .kind()
        {
            ErrorKind::NotFound => Failure::NoEtcd,
            _ => Failure::Start { program: "etcd".into(), source },
        })?;
    Ok(String::from_utf8_lossy(&out.stdout).lines().next().unwrap_or("etcd of unknown version").to_owned())
}

/// Writes a slice's and a request's record in one transaction.
#[derive(Clone, Debug)]
pub struct Pair {
    kv: KvClient<ClientChannel>,
    round: String,
}

impl Pair {
    /// A client on this connection; `round` makes its request ids unique.
    pub fn new(channel: ClientChannel, round: &str) -> Self {
        Self { kv: KvClient::new(channel), round: round.to_owned() }
    }
}

impl Writer for Pair {
    async fn write(&mut self, number: u64) -> Result<(), Failure> {
        let slice = put(format!("slices/{:05}", number % SLICES), SLICE_RECORD.to_vec());
        let request = put(format!("requests/{}-{number}", self.round), REQUEST_RECORD.to_vec());
        let asked = TxnRequest { success: vec![slice, request] };
        let answer =
            self.kv.txn(asked).await.map_err(Failure::refused("put two records into etcd"))?.into_inner();
        if answer.succeeded && answer.responses.len() == 2 {
            Ok(())
        } else {
            Err(Failure::Answer {
                what: "put two records into etcd".to_owned(),
                answer: format!("{answer:?}"),
            })
        }
    }
}

fn put(key: String, value: Vec<u8>) -> RequestOp {
    RequestOp { request: Some(Request::RequestPut(PutRequest { key: key.into_bytes(), value })) }
}
