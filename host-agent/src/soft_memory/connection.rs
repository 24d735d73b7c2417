//! Connection of a client: receives its messages, and notices its end.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use host_memory::datagram;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{SendFlags, send},
};
use service_files::log_limit::RejectionLog;
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
    local_socket::{ConnectionPermits, PeerCredentials},
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
        send_to(&self.socket, message)
    }

    /// Returns whether one side has closed the connection. Messages may still be received.
    pub fn is_closed(&self) -> bool {
        is_closed(self.socket.get_ref())
    }
}

fn is_closed(socket: &OwnedFd) -> bool {
    let mut sockets = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut sockets, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok()
        && sockets[0].revents().contains(PollFlags::HUP)
}

fn send_to(socket: &AsyncFd<OwnedFd>, message: DaemonMessage) -> bool {
    send(socket.as_fd(), &message.encode(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_ok()
}

/// Event of a connection.
#[derive(Debug)]
pub enum Event {
    /// A client sent its first message. Its measured memory in pages is the last value.
    Connected(Peer, ClientMessage, u64),
    /// A client sent a message.
    Message(u32, ConnectionNumber, ClientMessage),
    /// A client sent an invalid message.
    Invalid(u32, ConnectionNumber),
    /// The connection is lost.
    Lost(u32, ConnectionNumber),
    /// The process of the client has ended.
    Ended(u32, ConnectionNumber),
}

/// Parts of the daemon that all connections share.
#[derive(Debug)]
pub struct Shared {
    pub permits: ConnectionPermits,
    pub events: mpsc::Sender<Event>,
    /// Rate-limited log of refused clients.
    pub log: Arc<RejectionLog>,
}

/// Begins to serve an accepted connection.
///
/// # Errors
/// The process has ended, or its user has too many connections.
pub fn start(socket: OwnedFd, number: ConnectionNumber, shared: &Shared) -> io::Result<()> {
    let PeerCredentials { pid, user } = PeerCredentials::read(&socket)?;
    let is_allowed = shared.permits.is_allowed(user);
    if !is_allowed && is_closed(&socket) {
        return Ok(()); // no process receives the reason
    }
    let permit = shared.permits.acquire(user)?;
    let socket = Arc::new(readiness::watch(socket)?);
    let Some(pid) = pid.filter(|_| is_allowed) else {
        let reason = if is_allowed { Refusal::PidNamespace } else { Refusal::UserNotAllowed };
        shared.log.log(&format_args!("client of soft memory of user {user}"), &reason);
        tokio::spawn(refuse(socket, reason, permit));
        return Ok(());
    };
    let process = process::identify_peer(pid, user).map_err(io::Error::other)?;
    let handle = ProcessHandle::open(&process).map_err(io::Error::other)?;
    let handle = handle.ok_or_else(|| io::Error::other(format!("process {pid} has ended")))?;
    let program = process::program_name(pid);
    let connection = Connection {
        peer: Peer { number, pid, user, program, socket },
        process: readiness::watch(handle.into())?,
        events: shared.events.clone(),
        _permit: permit,
    };
    tokio::spawn(connection.serve());
    Ok(())
}

/// Refuses a client after its first message: closing the socket before would reset it, and the client would not receive
/// the reason.
async fn refuse(socket: Arc<AsyncFd<OwnedFd>>, reason: Refusal, _permit: OwnedSemaphorePermit) {
    let first = tokio::time::timeout(SOFT_HELLO_TIMEOUT.as_duration(), receive(&socket)).await;
    drop(first); // the reason does not depend on it
    send_to(&socket, DaemonMessage::Refused(reason));
}

/// Connection of a permitted user, before its first message.
struct Connection {
    peer: Peer,
    process: AsyncFd<OwnedFd>,
    events: mpsc::Sender<Event>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    /// Passes the messages of the client to the daemon until the client has ended.
    async fn serve(self) {
        let Self { peer, process, events, _permit } = self;
        let (pid, number, socket) = (peer.pid, peer.number, Arc::clone(&peer.socket));
        let hello = tokio::time::timeout(SOFT_HELLO_TIMEOUT.as_duration(), receive(&socket)).await;
        let Ok(Received::Message(hello)) = hello else {
            peer.send(DaemonMessage::Refused(Refusal::InvalidMessage));
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
                Received::Message(message) => Event::Message(pid, number, message),
                Received::Invalid => Event::Invalid(pid, number),
                Received::End => Event::Lost(pid, number),
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

/// Result of the wait for a message.
enum Received {
    Message(ClientMessage),
    /// The message is invalid.
    Invalid,
    /// The connection has ended.
    End,
}

async fn receive(socket: &AsyncFd<OwnedFd>) -> Received {
    let mut buffer = [0; MESSAGE_BYTES];
    let receive = |socket: &OwnedFd| datagram::receive(socket, &mut buffer);
    match socket.async_io(Interest::READABLE, receive).await {
        Ok(Some(0)) | Err(_) => Received::End,
        Ok(Some(bytes)) => {
            ClientMessage::decode(&buffer[..bytes]).map_or(Received::Invalid, Received::Message)
        }
        Ok(None) => Received::Invalid, // longer than a message
    }
}
