//! Integration tests of soft memory: the real socket of the daemon, with clients as processes that are stopped, killed,
//! or forked.

#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

#[path = "../src/skipped.rs"]
mod skipped;

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader, Write as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use host_agent::{
    config::soft_memory::SoftMemory,
    host::sysfs::Sysfs,
    metrics::Metrics,
    report_slot::ReportSlot,
    soft_memory::{Inputs, SoftMemoryServer},
    soft_memory_report::Report,
};
use rustix::{
    net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, connect, recv, send, socket},
    process::{Pid, Signal, kill_process},
};
use skipped::report_skipped;
use soft::{
    budget::Settings,
    protocol::{ClientMessage, DaemonMessage, Refusal, VERSION},
};
use tokio::runtime::Runtime;
use units::{Bytes, Name, UserId};

/// Time after which a condition must hold.
const DEADLINE: Duration = Duration::from_secs(60);
/// User that may not use soft memory.
const NOBODY: u32 = 65534;

/// Daemon in this process.
struct Daemon {
    dir: tempfile::TempDir,
    runtime: Option<Runtime>,
    reports: Arc<ReportSlot<Report>>,
    mib: u64,
}

impl Daemon {
    fn start(mib: u64) -> Self {
        let dir = tempfile::Builder::new().prefix("tarn-soft-").tempdir().unwrap();
        // Other users connect, too.
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let mut daemon = Self { dir, runtime: None, reports: Arc::default(), mib };
        daemon.restart();
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("soft.sock")
    }

    /// Ends the daemon with all connections, and starts another one.
    fn restart(&mut self) {
        drop(self.runtime.take());
        let user = UserId::new(rustix::process::geteuid().as_raw()).unwrap();
        let config = SoftMemory {
            socket: None,
            allowed_uids: None,
            size: Bytes::mib(self.mib),
            reserve: Bytes::mib(1),
            stalled_percent: 100,
            reservation: None,
            settings: Settings { over_reclaim_percent: 0, ..Settings::default() },
        };
        self.reports = Arc::default();
        let reports = Arc::clone(&self.reports);
        let inputs = Inputs {
            config,
            allowed_uids: BTreeSet::from([user]),
            slices: None,
            proc: Sysfs::at("/proc"),
            reports,
            metrics: Arc::new(Metrics::new(&Name::new("h0").unwrap(), "emulated")),
        };
        let runtime = Runtime::new().unwrap();
        let server = runtime.block_on(async { SoftMemoryServer::listen(&self.socket(), inputs).unwrap() });
        runtime.spawn(server.serve());
        self.runtime = Some(runtime);
    }

    fn client(&self) -> Client {
        Client::start(&self.socket(), &[]).unwrap()
    }

    /// Waits until a later report fulfils a condition.
    #[track_caller]
    fn wait(&self, condition: impl Fn(&Report) -> bool) -> Report {
        let before = self.reports.last().map(|report| report.at);
        wait_for(|| self.reports.last().filter(|report| Some(report.at) > before && condition(report)))
    }

    /// Waits until a report contains all pages in the free part and the budgets of `clients` clients.
    #[track_caller]
    fn check_books(&self, clients: usize) -> Report {
        let total = Bytes::mib(self.mib).get();
        self.wait(|report| {
            let budgets: u64 = report.clients.iter().map(|client| client.state.sample.budget).sum();
            report.client_count == clients
                && report.total.get() == total
                && report.free.get() + budgets * 4096 == total
        })
    }
}

#[track_caller]
fn wait_for<T>(mut condition: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(result) = condition() {
            return result;
        }
        assert!(started.elapsed() < DEADLINE, "the condition does not hold");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Client process, which is killed when the value is dropped.
struct Client {
    process: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Client {
    /// Starts a client, and waits until it is connected.
    fn start(socket: &Path, user: &[&str]) -> Result<Self, String> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_host-agent-test-soft-client"));
        command.arg(socket).args(user).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let (stdin, stdout) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let mut client = Self { process, stdin, stdout: BufReader::new(stdout) };
        if client.read_line() == "connected" {
            return Ok(client);
        }
        let mut error = String::new();
        std::io::Read::read_to_string(client.process.stderr.as_mut().unwrap(), &mut error).unwrap();
        Err(error)
    }

    fn send(&mut self, request: &str) {
        writeln!(self.stdin, "{request}").unwrap();
    }

    fn read_line(&mut self) -> String {
        let mut reply = String::new();
        self.stdout.read_line(&mut reply).unwrap();
        reply.trim_end().to_owned()
    }

    fn request(&mut self, request: &str) -> String {
        self.send(request);
        self.read_line()
    }

    fn push(&mut self, values: u64) -> u64 {
        self.request(&format!("push {values}")).parse().unwrap()
    }

    /// Returns the budget, the held pages and the number of evicted values.
    fn stats(&mut self) -> (u64, u64, u64) {
        let stats = self.request("stats");
        let numbers: Vec<u64> = stats.split(' ').map(|number| number.parse().unwrap()).collect();
        (numbers[0], numbers[1], numbers[2])
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.process.id().cast_signed()).unwrap(), signal).unwrap();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.process.kill(); // the process may have ended
        let _ = self.process.wait();
    }
}

/// Connects without the client library.
fn connect_raw(daemon: &Daemon) -> OwnedFd {
    let raw = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&raw, &SocketAddrUnix::new(daemon.socket()).unwrap()).unwrap();
    raw
}

fn send_raw(socket: &OwnedFd, bytes: &[u8]) {
    send(socket, bytes, SendFlags::NOSIGNAL).unwrap();
}

/// Receives a message; `None` at the end of the connection.
fn receive_raw(socket: &OwnedFd) -> Option<DaemonMessage> {
    let mut buffer = [0; 32];
    let bytes = recv(socket, &mut buffer, RecvFlags::empty()).map_or(0, |(bytes, _)| bytes);
    (bytes > 0).then(|| DaemonMessage::decode(&buffer[..bytes]).unwrap())
}

const HELLO: ClientMessage = ClientMessage::Hello { version: VERSION, budget: 0 };

/// The paper's figure 2: a cache with 10 MiB, and a process that needs 12 MiB of 20 MiB.
#[test]
fn memory_moves_from_a_cache_to_another_process() {
    let daemon = Daemon::start(20);
    let (mut cache, mut batch) = (daemon.client(), daemon.client());
    assert_eq!(cache.push(2560), 2560);
    assert_eq!(batch.push(3072), 3072);
    let ((cache_budget, cache_held, evicted), (batch_budget, batch_held, _)) = (cache.stats(), batch.stats());
    // A value needs a page. The processes may have requested a few pages more, and 1 MiB in advance.
    assert!((512..=512 + 600).contains(&evicted) && cache_held >= 2560 - evicted, "{cache_held} {evicted}");
    assert!(batch_held >= 3072 && cache_budget + batch_budget <= 5120, "{cache_budget} {batch_budget}");
    let report = daemon.check_books(2);
    assert!(report.counters.reclaimed >= 512, "{report:?}");
    assert_eq!(report.clients[0].program, "host-agent-test"); // the kernel shortens the name
}

#[test]
fn budget_of_a_killed_process_is_free_at_once() {
    let daemon = Daemon::start(8);
    let (mut first, mut second) = (daemon.client(), daemon.client());
    assert_eq!(first.push(2048), 2048);
    drop(first);
    daemon.check_books(1);
    assert_eq!(second.push(2048), 2048);
    assert_eq!(daemon.check_books(1).counters.reclaimed, 0);
}

#[test]
fn stopped_process_is_passed_over_and_answers_later() {
    let daemon = Daemon::start(16);
    let (mut stopped, mut other, mut requester) = (daemon.client(), daemon.client(), daemon.client());
    stopped.request("use 20000"); // the weight is larger than that of the others
    assert_eq!((stopped.push(2048), other.push(1792)), (2048, 1792));
    daemon.wait(|report| report.clients.iter().any(|client| client.state.sample.footprint > 20_000));
    stopped.signal(Signal::STOP);
    assert_eq!(requester.push(1500), 1500);
    let report = daemon.check_books(3);
    assert!(report.counters.unanswered >= 1);
    let silent: Vec<u32> = report
        .clients
        .iter()
        .filter(|client| client.state.is_silent)
        .map(|client| client.state.sample.pid.0)
        .collect();
    assert_eq!(silent, [stopped.process.id()]);
    // Only the stopped process has memory left, so that the request is denied.
    other.request("give-back");
    let pushed = requester.push(10_000);
    assert!(pushed < 2600, "{pushed}");
    stopped.signal(Signal::CONT);
    daemon.wait(|report| report.clients.iter().all(|client| !client.state.is_silent));
    wait_for(|| (requester.push(100) == 100).then_some(()));
    assert!(stopped.stats().2 > 0, "values were evicted after the process continued");
    daemon.check_books(3);
}

#[test]
fn clients_keep_their_memory_when_the_daemon_restarts() {
    let mut daemon = Daemon::start(8);
    let (mut first, mut second) = (daemon.client(), daemon.client());
    assert_eq!((first.push(1000), second.push(500)), (1000, 500));
    daemon.restart();
    let report = daemon.check_books(2);
    let budgets: u64 = report.clients.iter().map(|client| client.state.sample.budget).sum();
    assert!(budgets >= 1500, "{report:?}");
    assert_eq!((first.stats().2, second.stats().2), (0, 0), "no value was evicted");
    wait_for(|| (second.push(100) == 100).then_some(()));
    // A smaller daemon accepts a part of the budgets only.
    daemon.mib = 2;
    daemon.restart();
    daemon.check_books(2);
    assert!(first.stats().1 + second.stats().1 <= 512);
}

#[test]
fn forked_child_cannot_use_the_connection_and_does_not_keep_the_budget() {
    let daemon = Daemon::start(8);
    let mut parent = daemon.client();
    assert_eq!(parent.push(1000), 1000);
    let budget = parent.stats().0;
    let reply = parent.request("fork");
    let words: Vec<&str> = reply.split(' ').collect();
    let child = words[1].parse::<u32>().unwrap();
    assert_eq!((words[0], words[2].parse::<u64>().unwrap()), ("child", budget - 1000));
    assert_eq!(daemon.check_books(1).clients[0].state.sample.budget, budget);
    parent.process.kill().unwrap();
    daemon.check_books(0);
    assert!(Path::new(&format!("/proc/{child}")).exists(), "the child still has the socket");
}

#[test]
fn other_users_are_refused() {
    if !rustix::process::geteuid().is_root() {
        return report_skipped("a client of another user of soft memory, which requires root");
    }
    let daemon = Daemon::start(8);
    let user = NOBODY.to_string();
    let error = Client::start(&daemon.socket(), &["user", &user]).err().unwrap();
    assert!(error.contains("reason: UserNotAllowed"), "{error}");
    assert_eq!(daemon.check_books(0).client_count, 0);
}

#[test]
fn process_has_one_connection() {
    let daemon = Daemon::start(8);
    let pool = soft::client::connect(&daemon.socket(), 1024).unwrap();
    let error = soft::client::connect(&daemon.socket(), 1024).unwrap_err().to_string();
    assert!(error.ends_with("refused the connection: this process is connected already"), "{error}");
    drop(pool);
    daemon.check_books(0);
    wait_for(|| soft::client::connect(&daemon.socket(), 1024).ok());
}

#[test]
fn missing_daemon_is_reported_with_its_path() {
    let error = soft::client::connect(Path::new("/nonexistent/soft.sock"), 1024).unwrap_err().to_string();
    let expected = "cannot connect to the soft memory daemon at /nonexistent/soft.sock: \
                    No such file or directory (os error 2)";
    assert_eq!(error, expected);
}

#[test]
fn invalid_messages_end_the_connection_and_nothing_else() {
    let daemon = Daemon::start(8);
    let mut client = daemon.client();
    let refused = Some(DaemonMessage::Refused(Refusal::InvalidMessage));
    for first in [&b"x"[..], &[0; 24], &[1; 100], &ClientMessage::Usage { held: 1 }.encode()] {
        let raw = connect_raw(&daemon);
        send_raw(&raw, first);
        assert_eq!((receive_raw(&raw), receive_raw(&raw)), (refused, None), "{first:?}");
    }
    let raw = connect_raw(&daemon);
    send_raw(&raw, &ClientMessage::Hello { version: 9, budget: 0 }.encode());
    assert_eq!(receive_raw(&raw), Some(DaemonMessage::Refused(Refusal::Version)));
    let raw = connect_raw(&daemon);
    send_raw(&raw, &HELLO.encode());
    assert_eq!(receive_raw(&raw), Some(DaemonMessage::Welcome { budget: 0 }));
    send_raw(&raw, &ClientMessage::Answered { demand: 7, held: 0 }.encode());
    assert_eq!((receive_raw(&raw), receive_raw(&raw)), (refused, None));
    assert_eq!(client.push(500), 500);
    daemon.check_books(1);
}

#[test]
fn client_that_claims_much_and_returns_nothing_gets_no_more_than_others() {
    let daemon = Daemon::start(8);
    let raw = connect_raw(&daemon);
    send_raw(&raw, &ClientMessage::Hello { version: VERSION, budget: u64::MAX }.encode());
    let welcome = receive_raw(&raw);
    // The memory of this process bounds the claim, too.
    assert!(matches!(welcome, Some(DaemonMessage::Welcome { budget: ..=2048 })), "{welcome:?}");
    send_raw(&raw, &ClientMessage::Returned { pages: u64::MAX, held: u64::MAX }.encode());
    send_raw(&raw, &ClientMessage::Request { pages: u64::MAX, held: u64::MAX }.encode());
    assert_eq!(receive_raw(&raw), Some(DaemonMessage::Granted { pages: 0 }));
    let mut client = daemon.client();
    assert_eq!(client.push(2048), 2048);
    daemon.check_books(2);
}

#[test]
fn client_that_floods_the_daemon_without_reading_is_disconnected() {
    let daemon = Daemon::start(8);
    let mut client = daemon.client();
    let raw = connect_raw(&daemon);
    send_raw(&raw, &HELLO.encode());
    let request = ClientMessage::Request { pages: u64::MAX, held: 0 }.encode();
    wait_for(|| send(&raw, &request, SendFlags::NOSIGNAL).is_err().then_some(()));
    assert_eq!(client.push(2048), 2048);
    daemon.check_books(1);
}

#[test]
fn killed_clients_leave_exact_books() {
    const KILLS: usize = 200;
    let daemon = Daemon::start(64);
    let mut clients: Vec<Client> = (0..8).map(|_| daemon.client()).collect();
    for round in 0..KILLS {
        let victim = (round * 7919) % clients.len();
        for (index, client) in clients.iter_mut().enumerate() {
            client.send(&format!("push {}", 500 + 300 * ((index + round) % 8)));
        }
        clients[victim] = daemon.client(); // kills the old one while it requests memory
        for (index, client) in clients.iter_mut().enumerate() {
            if index != victim {
                client.read_line();
            }
        }
    }
    let report = daemon.check_books(8);
    assert!(report.counters.reclaimed > 0);
    for client in &mut clients {
        let (budget, held, _) = client.stats();
        let pid = client.process.id();
        let recorded = report.clients.iter().find(|client| client.state.sample.pid.0 == pid).unwrap();
        assert!(held <= budget && budget <= recorded.state.sample.budget, "{budget} {recorded:?}");
    }
}
