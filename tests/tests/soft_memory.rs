//! Integration tests of soft memory: the real socket of the daemon, with clients as processes that are stopped, killed,
//! or forked.

#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{os::fd::OwnedFd, path::Path};

use rustix::{
    net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, connect, recv, send, socket},
    process::Signal,
};
use soft::{
    budget::Settings,
    protocol::{ClientMessage, DaemonMessage, Refusal, VERSION},
};
use tests::{
    small_guests::report_skipped,
    soft_client::{ClientStats, SoftClient},
    soft_daemon::{SoftDaemon, wait_for},
};
use units::Bytes;

/// User that may not use soft memory.
const NOBODY: u32 = 65534;

fn start_daemon(mib: u64) -> SoftDaemon {
    SoftDaemon::start(Bytes::mib(mib), Settings { over_reclaim_percent: 0, ..Settings::default() })
}

fn start_client(daemon: &SoftDaemon) -> SoftClient {
    SoftClient::start(&daemon.socket()).unwrap()
}

/// Connects without the client library.
fn connect_raw(daemon: &SoftDaemon) -> OwnedFd {
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
    let daemon = start_daemon(20);
    let (mut cache, mut batch) = (start_client(&daemon), start_client(&daemon));
    assert_eq!(cache.push(2560), 2560);
    assert_eq!(batch.push(3072), 3072);
    let (cache, batch) = (cache.stats(), batch.stats());
    // A value needs a page. The processes may have requested a few pages more, and 1 MiB in advance.
    assert!((512..=512 + 600).contains(&cache.evicted) && cache.held >= 2560 - cache.evicted, "{cache:?}");
    assert!(batch.held >= 3072 && cache.budget + batch.budget <= 5120, "{cache:?} {batch:?}");
    let report = daemon.check_books(2);
    assert!(report.counters.reclaimed >= 512, "{report:?}");
    assert_eq!(report.clients[0].program, "host-agent-test"); // the kernel shortens the name
}

#[test]
fn budget_of_a_killed_process_is_free_at_once() {
    let daemon = start_daemon(8);
    let (mut first, mut second) = (start_client(&daemon), start_client(&daemon));
    assert_eq!(first.push(2048), 2048);
    drop(first);
    daemon.check_books(1);
    assert_eq!(second.push(2048), 2048);
    assert_eq!(daemon.check_books(1).counters.reclaimed, 0);
}

#[test]
fn stopped_process_is_passed_over_and_answers_later() {
    let daemon = start_daemon(16);
    let (mut stopped, mut other, mut requester) =
        (start_client(&daemon), start_client(&daemon), start_client(&daemon));
    stopped.request("use 20000"); // the weight is larger than that of the others
    assert_eq!((stopped.push(2048), other.push(1792)), (2048, 1792));
    daemon
        .wait_for_report(|report| report.clients.iter().any(|client| client.state.sample.footprint > 20_000));
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
    assert_eq!(silent, [stopped.pid()]);
    // Only the stopped process has memory left, so that the request is denied.
    other.request("give-back");
    let pushed = requester.push(10_000);
    assert!(pushed < 2600, "{pushed}");
    stopped.signal(Signal::CONT);
    daemon.wait_for_report(|report| report.clients.iter().all(|client| !client.state.is_silent));
    wait_for(|| (requester.push(100) == 100).then_some(()));
    assert!(stopped.stats().evicted > 0, "values were evicted after the process continued");
    daemon.check_books(3);
}

#[test]
fn clients_keep_their_memory_when_the_daemon_restarts() {
    let mut daemon = start_daemon(8);
    let (mut first, mut second) = (start_client(&daemon), start_client(&daemon));
    assert_eq!((first.push(1000), second.push(500)), (1000, 500));
    daemon.restart(Bytes::mib(8));
    let report = daemon.check_books(2);
    let budgets: u64 = report.clients.iter().map(|client| client.state.sample.budget).sum();
    assert!(budgets >= 1500, "{report:?}");
    assert_eq!((first.stats().evicted, second.stats().evicted), (0, 0), "no value was evicted");
    wait_for(|| (second.push(100) == 100).then_some(()));
    // A smaller daemon accepts a part of the budgets only, and the processes give up the rest.
    daemon.restart(Bytes::mib(2));
    daemon.check_books(2);
    wait_for(|| (first.stats().held + second.stats().held <= 512).then_some(()));
}

#[test]
fn forked_child_cannot_use_the_connection_and_does_not_keep_the_budget() {
    let daemon = start_daemon(8);
    let mut parent = start_client(&daemon);
    assert_eq!(parent.push(1000), 1000);
    let budget = parent.stats().budget;
    let reply = parent.request("fork");
    let words: Vec<&str> = reply.split(' ').collect();
    let child = words[1].parse::<u32>().unwrap();
    assert_eq!((words[0], words[2].parse::<u64>().unwrap()), ("child", budget - 1000));
    assert_eq!(daemon.check_books(1).clients[0].state.sample.budget, budget);
    parent.signal(Signal::KILL);
    daemon.check_books(0);
    assert!(Path::new(&format!("/proc/{child}")).exists(), "the child still has the socket");
}

#[test]
fn other_users_are_refused() {
    if !rustix::process::geteuid().is_root() {
        return report_skipped("a client of another user of soft memory, which requires root");
    }
    let daemon = start_daemon(8);
    let error = SoftClient::start_as(&daemon.socket(), NOBODY).err().unwrap();
    assert!(error.contains("reason: UserNotAllowed"), "{error}");
    assert_eq!(daemon.check_books(0).client_count, 0);
}

#[test]
fn process_has_one_connection() {
    let daemon = start_daemon(8);
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
    let daemon = start_daemon(8);
    let mut client = start_client(&daemon);
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
    assert!(matches!(receive_raw(&raw), Some(DaemonMessage::Welcome { budget: 0, .. })));
    send_raw(&raw, &ClientMessage::Answered { demand: 7, held: 0 }.encode());
    assert_eq!((receive_raw(&raw), receive_raw(&raw)), (refused, None));
    assert_eq!(client.push(500), 500);
    daemon.check_books(1);
}

#[test]
fn client_that_claims_much_and_returns_nothing_gets_no_more_than_others() {
    let daemon = start_daemon(8);
    let raw = connect_raw(&daemon);
    send_raw(&raw, &ClientMessage::Hello { version: VERSION, budget: u64::MAX }.encode());
    let welcome = receive_raw(&raw);
    // The memory of this process bounds the claim, too.
    assert!(matches!(welcome, Some(DaemonMessage::Welcome { budget: ..=2048, .. })), "{welcome:?}");
    send_raw(&raw, &ClientMessage::Returned { pages: u64::MAX, held: u64::MAX }.encode());
    send_raw(&raw, &ClientMessage::Request { pages: u64::MAX, held: u64::MAX }.encode());
    assert_eq!(receive_raw(&raw), Some(DaemonMessage::Granted { pages: 0 }));
    let mut client = start_client(&daemon);
    assert_eq!(client.push(2048), 2048);
    daemon.check_books(2);
}

#[test]
fn client_that_floods_the_daemon_without_reading_is_disconnected() {
    let daemon = start_daemon(8);
    let mut client = start_client(&daemon);
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
    let daemon = start_daemon(64);
    let mut clients: Vec<SoftClient> = (0..8).map(|_| start_client(&daemon)).collect();
    for round in 0..KILLS {
        let victim = (round * 7919) % clients.len();
        for (index, client) in clients.iter_mut().enumerate() {
            client.send(&format!("push {}", 500 + 300 * ((index + round) % 8)));
        }
        clients[victim] = start_client(&daemon); // kills the old one while it requests memory
        for (index, client) in clients.iter_mut().enumerate() {
            if index != victim {
                client.read_line();
            }
        }
    }
    let report = daemon.check_books(8);
    assert!(report.counters.reclaimed > 0);
    for client in &mut clients {
        let ClientStats { budget, held, .. } = client.stats();
        let pid = client.pid();
        let recorded = report.clients.iter().find(|client| client.state.sample.pid.0 == pid).unwrap();
        assert!(held <= budget && budget <= recorded.state.sample.budget, "{budget} {recorded:?}");
    }
}
