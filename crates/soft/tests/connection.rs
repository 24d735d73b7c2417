//! Connections to a daemon that accepts or refuses them.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]
#![allow(clippy::disallowed_methods, reason = "the tests read the names of threads")]

use std::{
    fs,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Mutex,
    thread,
};

use rustix::{
    net::{
        AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept, bind,
        listen, recv, send, shutdown, socket_with,
    },
    param::page_size,
};
use soft::{
    Pool, PoolStats, Priority, SoftByteCache,
    client::{ConnectError, Connection, connect, connect_without_waiting},
    protocol::{ClientMessage, DaemonMessage, MESSAGE_BYTES, Refusal},
};

/// Number of connections and ends in a row.
const CONNECTIONS: usize = 200;

/// The tests count the threads of this process.
static ALONE: Mutex<()> = Mutex::new(());

fn listen_at(path: &Path) -> OwnedFd {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&socket, 8).unwrap();
    socket
}

/// Accepts a connection and receives its first message. Returns `None` after the listening socket was shut down.
fn accept_hello(listener: &OwnedFd) -> Option<(OwnedFd, ClientMessage)> {
    let socket = accept(listener).ok()?;
    let message = receive(&socket)?;
    Some((socket, message))
}

fn receive(socket: &OwnedFd) -> Option<ClientMessage> {
    let mut buffer = [0; MESSAGE_BYTES];
    let (len, _) = recv(socket, &mut buffer, RecvFlags::empty()).ok()?;
    ClientMessage::decode(&buffer[..len]).ok()
}

fn reply(socket: &OwnedFd, message: DaemonMessage) {
    send(socket, &message.encode(), SendFlags::NOSIGNAL).unwrap();
}

fn connection_threads() -> usize {
    let names = fs::read_dir("/proc/self/task").unwrap();
    let names = names.filter_map(|task| fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name == "tarn-soft\n").count()
}

/// Runs a daemon with the socket, and a function that uses it.
fn with_daemon<R>(serve: impl FnOnce(&OwnedFd) + Send, run: impl FnOnce(&Path) -> R) -> R {
    let _alone = ALONE.lock();
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("soft.sock");
    let listener = listen_at(&path);
    thread::scope(|scope| {
        let listener = &listener;
        scope.spawn(move || serve(listener));
        let _stop = StopAtDrop(listener);
        run(&path)
    })
}

/// Ends the daemon when the test ends or panics.
struct StopAtDrop<'a>(&'a OwnedFd);

impl Drop for StopAtDrop<'_> {
    fn drop(&mut self) {
        shutdown(self.0, Shutdown::Both).unwrap();
    }
}

#[test]
fn dropped_pool_leaves_no_thread_and_the_next_one_connects_at_once() {
    // As a daemon that notices the end of a connection late, it refuses each second one.
    let serve = |listener: &OwnedFd| {
        let mut answers = [
            DaemonMessage::Welcome { budget: 0, maximum: 1 << 20 },
            DaemonMessage::Refused(Refusal::AlreadyConnected),
        ]
        .into_iter()
        .cycle();
        while let Some((socket, hello)) = accept_hello(listener) {
            assert!(matches!(hello, ClientMessage::Hello { budget: 0, .. }));
            reply(&socket, answers.next().unwrap());
        }
    };
    with_daemon(serve, |path| {
        for number in 0..CONNECTIONS {
            let pool = connect(path, 1024).unwrap();
            if number % 2 == 0 {
                drop(pool)
            } else {
                Pool::release(pool)
            }
            // The kernel lists a thread for a short time after its end. A thread that does not end is a hang here.
            while connection_threads() > 0 {
                thread::yield_now();
            }
        }
    });
}

#[test]
fn pool_that_is_refused_after_a_restart_gives_its_budget_up() {
    let serve = |listener: &OwnedFd| {
        let (socket, _) = accept_hello(listener).unwrap();
        reply(&socket, DaemonMessage::Welcome { budget: 0, maximum: 1 << 20 });
        loop {
            if let ClientMessage::Request { .. } = receive(&socket).unwrap() {
                reply(&socket, DaemonMessage::Granted { pages: 256 });
                break;
            }
        }
        drop(socket);
        while let Some((socket, _)) = accept_hello(listener) {
            reply(&socket, DaemonMessage::Refused(Refusal::UserNotAllowed));
        }
    };
    with_daemon(serve, |path| {
        let (pool, requests) = connect_without_waiting(path, 1024, |_| {}).unwrap();
        assert_eq!(requests.connection(), Connection::Connected);
        let cache = SoftByteCache::new(&pool, Priority(0)).unwrap();
        assert!(requests.request(256).is_some());
        while pool.stats().budget == 0 {
            thread::yield_now();
        }
        cache.insert(b"key", &[&vec![7; 10 * page_size()]]).unwrap();
        while requests.connection() != Connection::Refused(Refusal::UserNotAllowed) {
            thread::yield_now();
        }
        assert_eq!((pool.stats().budget, cache.len()), (256, 1), "the budget is kept for some time");
        while pool.stats() != (PoolStats { budget: 0, held: 0 }) {
            thread::yield_now();
        }
        assert_eq!(cache.len(), 0);
    });
}

#[test]
fn second_pool_of_a_process_is_refused_with_the_reason() {
    let serve = |listener: &OwnedFd| {
        while let Some((socket, _)) = accept_hello(listener) {
            reply(&socket, DaemonMessage::Refused(Refusal::AlreadyConnected));
        }
    };
    let error = with_daemon(serve, |path| connect(path, 1024).unwrap_err());
    assert!(matches!(error, ConnectError::Refused { reason: Refusal::AlreadyConnected, .. }), "{error}");
}
