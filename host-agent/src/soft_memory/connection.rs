//! Connection of a client: receives its messages, and notices its end.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use host_memory::datagram;
use rustix::net::{SendFlags, send, sockopt};
use soft::protocol::{ClientMessage, DaemonMessage, MESSAGE_BYTES, Refusal};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{OwnedSemaphorePermit, mpsc},
};
use units::{
    UserId,
    limits::{SOFT_HELLO_TIMEOUT, SOFT_RECONNECT_TIME},
};

use super::pressure::PAGE_BYTES;
use crate::{
    host::{
        process::{self, ProcessHandle},
        process_memory::used_memory,
    },
    local_socket::ConnectionPermits,
    readiness,
};

/// Number of a connection, so that late events of an earlier connection of a process are recognized.
pub type ConnectionNumber = u64;

/// Client of a connection.
#[derive(Debug)]
pub struct Peer {
    pub number: ConnectionNumber,
    pub pid: u32,
    pub user: UserId,
    pub program: String,
    pub socket: Arc<AsyncFd<OwnedFd>>,
}

impl Peer {
    /// Sends a message. Returns whether the client can have received it: a client that does not read its messages
    /// is disconnected.
    pub fn send(&self, message: DaemonMessage) -> bool {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        send(self.socket.as_fd(), &message.encode(), flags).is_ok()
    }
}

/// Event of a connection.
#[derive(Debug)]
pub enum Event {
    /// A client sent its first message. Its measured memory in pages is the last value.
    Connected(Peer, ClientMessage, u64),
    /// A client sent a message.
    Message(u32, ConnectionNumber, ClientMessage),
    /// The connection is lost, or the client sent an invalid message.
    Lost(u32, ConnectionNumber),
    /// The process of the client has ended.
    Ended(u32, ConnectionNumber),
}

/// Accepted connection, before its first message.
pub struct Connection {
    peer: Peer,
    process: AsyncFd<OwnedFd>,
    events: mpsc::Sender<Event>,
    is_allowed: bool,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    /// Identifies the process of an accepted connection.
    ///
    /// # Errors
    /// The process has ended, or its user has too many connections.
    pub fn new(
        socket: OwnedFd,
        number: ConnectionNumber,
        permits: &ConnectionPermits,
        events: mpsc::Sender<Event>,
    ) -> io::Result<Self> {
        let credentials = sockopt::socket_peercred(&socket)?;
        let user = UserId::new(credentials.uid.as_raw()).map_err(io::Error::other)?;
        let permit = permits.acquire(user)?;
        let pid = credentials.pid.as_raw_nonzero().get().unsigned_abs();
        let process = process::identify_peer(pid, user).map_err(io::Error::other)?;
        let handle = ProcessHandle::open(&process).map_err(io::Error::other)?;
        let handle = handle.ok_or_else(|| io::Error::other(format!("process {pid} has ended")))?;
        let program = process::program_name(pid);
        let socket = Arc::new(readiness::watch(socket)?);
        Ok(Self {
            peer: Peer { number, pid, user, program, socket },
            process: readiness::watch(handle.into())?,
            events,
            is_allowed: permits.is_allowed(user),
            _permit: permit,
        })
    }

    /// Passes the messages of the client to the daemon until the client has ended.
    pub async fn serve(self) {
        let Self { peer, process, events, is_allowed, _permit } = self;
        let (pid, number, socket) = (peer.pid, peer.number, Arc::clone(&peer.socket));
        // The first message of a refused client is received, too, because closing the socket before would reset it.
        let hello = tokio::time::timeout(SOFT_HELLO_TIMEOUT.as_duration(), receive(&socket)).await;
        let (true, Ok(Some(hello))) = (is_allowed, hello) else {
            let reason = if is_allowed { Refusal::InvalidMessage } else { Refusal::UserNotAllowed };
            peer.send(DaemonMessage::Refused(reason));
            return;
        };
        // Each send waits until the daemon has accepted the event, so that a client has one waiting message at most.
        let footprint = used_memory(pid).map_or(0, |bytes| bytes.get() / PAGE_BYTES);
        if events.send(Event::Connected(peer, hello, footprint)).await.is_err() {
            return;
        }
        loop {
            let received = tokio::select! {
                received = receive(&socket) => received,
                _ = process.readable() => break,
            };
            let event = match received {
                Some(message) => Event::Message(pid, number, message),
                None => Event::Lost(pid, number),
            };
            let is_lost = matches!(event, Event::Lost(..));
            if events.send(event).await.is_err() {
                return;
            }
            if is_lost {
                let ended = tokio::time::timeout(SOFT_RECONNECT_TIME.as_duration(), process.readable()).await;
                if ended.is_err() {
                    return;
                }
                break;
            }
        }
        events.send(Event::Ended(pid, number)).await.ok();
    }
}

/// Receives a message. Returns `None` at the end of the connection, or for an invalid message.
async fn receive(socket: &AsyncFd<OwnedFd>) -> Option<ClientMessage> {
    let mut buffer = [0; MESSAGE_BYTES];
    let receive = |socket: &OwnedFd| datagram::receive(socket, &mut buffer);
    let bytes = socket.async_io(Interest::READABLE, receive).await.ok()??;
    ClientMessage::decode(&buffer[..bytes]).ok()
}
