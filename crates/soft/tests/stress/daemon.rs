//! The daemon behind a real socket. Each connection counts as a process.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Instant,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
        listen, recv, send, socket_with,
    },
};
use soft::{
    budget::{Daemon, HostMemory, Pid, Settings},
    protocol::{ClientMessage, DaemonMessage, MESSAGE_BYTES},
};
use units::{
    Ns, UserId,
    limits::{SOFT_ADAPT_INTERVAL, SOFT_RECONNECT_TIME, SOFT_TICK_INTERVAL},
};

/// User of all clients.
const USER: UserId = UserId::ROOT;
/// Measured memory of each client in pages, which is more than its soft memory.
const FOOTPRINT: u64 = 1 << 20;

/// Running daemon.
pub struct Server {
    pub daemon: Arc<Mutex<Daemon>>,
    thread: JoinHandle<()>,
    is_stopped: Arc<AtomicBool>,
    folder: tempfile::TempDir,
}

impl Server {
    /// Starts a daemon with this number of pages of soft memory. Half of them are available at times only.
    pub fn start(pages: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(folder.path().join("soft.sock")).unwrap()).unwrap();
        listen(&listener, 64).unwrap();
        let daemon = Arc::new(Mutex::new(Daemon::new(Settings::default(), pages, Ns::ZERO)));
        let is_stopped = Arc::new(AtomicBool::new(false));
        let connections = Connections {
            daemon: daemon.clone(),
            pages,
            sockets: BTreeMap::new(),
            last_pid: 0,
            started: Instant::now(),
            adapted: Ns::ZERO,
        };
        let is_ended = is_stopped.clone();
        let thread = thread::spawn(move || connections.run(&listener, &is_ended));
        Self { daemon, thread, is_stopped, folder }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("soft.sock")
    }

    /// Ends the daemon. Panics if it has received an invalid message.
    pub fn stop(self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

struct Connections {
    daemon: Arc<Mutex<Daemon>>,
    pages: u64,
    sockets: BTreeMap<Pid, OwnedFd>,
    /// The processes have the numbers of their connections, from 1 on.
    last_pid: u32,
    started: Instant,
    /// Time of the last adaptation to the memory of the host.
    adapted: Ns,
}

impl Connections {
    /// Returns the time of a daemon that waits for no client of an earlier one.
    fn now(&self) -> Ns {
        SOFT_RECONNECT_TIME.after(Ns::from(self.started.elapsed()))
    }

    fn run(mut self, listener: &OwnedFd, is_stopped: &AtomicBool) {
        let timeout = Timespec::try_from(SOFT_TICK_INTERVAL.as_duration()).unwrap();
        while !is_stopped.load(Ordering::Relaxed) {
            let sockets = std::iter::once(listener).chain(self.sockets.values());
            let mut polled: Vec<_> = sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
            poll(&mut polled, Some(&timeout)).unwrap();
            let is_ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
            drop(polled);
            let pids: Vec<Pid> = self.sockets.keys().copied().collect();
            for (pid, _) in pids.into_iter().zip(&is_ready[1..]).filter(|(_, is_ready)| **is_ready) {
                self.receive(pid);
            }
            if is_ready[0] {
                self.last_pid += 1;
                self.sockets.insert(Pid(self.last_pid), accept_with(listener, SocketFlags::CLOEXEC).unwrap());
            }
            self.tick();
        }
    }

    fn receive(&mut self, pid: Pid) {
        let mut buffer = [0; MESSAGE_BYTES + 1];
        let (received, _) = match recv(&self.sockets[&pid], &mut buffer, RecvFlags::DONTWAIT) {
            Err(Errno::CONNRESET) => (0, 0),
            result => result.unwrap(),
        };
        let now = self.now();
        let mut daemon = self.daemon.lock().unwrap();
        if received == 0 {
            self.sockets.remove(&pid);
            daemon.disconnect(pid, now);
            return;
        }
        let message = ClientMessage::decode(&buffer[..received]).unwrap();
        match message {
            ClientMessage::Hello { .. } => daemon.connect(pid, USER, message, FOOTPRINT).unwrap(),
            message => daemon.receive(pid, message, now).unwrap(),
        }
    }

    /// Continues with requests, changes the memory of the host, and sends messages.
    fn tick(&mut self) {
        let now = self.now();
        let mut daemon = self.daemon.lock().unwrap();
        daemon.tick(now);
        if now >= self.adapted.after(SOFT_ADAPT_INTERVAL) {
            self.adapted = now;
            let is_short = (now.as_ms() / 1000).is_multiple_of(2);
            let limit = if is_short { self.pages / 2 } else { self.pages };
            daemon.adapt_to_host(HostMemory { limit, headroom: self.pages.cast_signed() }, now);
        }
        for outgoing in daemon.take_outgoing() {
            let message: DaemonMessage = outgoing.message;
            // The client may have ended.
            if let Some(socket) = self.sockets.get(&outgoing.pid) {
                let _ = send(socket, &message.encode(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
            }
        }
    }
}
