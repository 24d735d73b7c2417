//! Socket of the connection to the daemon, and its errors.

use std::{
    io,
    path::{Path, PathBuf},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, socket_with},
};
use units::Ns;

use crate::{
    error::PoolError,
    protocol::{DaemonMessage, MESSAGE_BYTES, Refusal},
};

/// Reason why a process cannot use the daemon.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The pool cannot be created.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The operating system rejected an operation.
    #[error("cannot {operation} the soft memory daemon at {}: {source}", path.display())]
    Io {
        /// Operation, such as `connect to`.
        operation: &'static str,
        /// Socket of the daemon.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The daemon refused the connection.
    #[error("the soft memory daemon at {} refused the connection: {reason}", path.display())]
    Refused {
        /// Socket of the daemon.
        path: PathBuf,
        /// Reason.
        reason: Refusal,
    },
}

impl ConnectError {
    /// Returns whether the next attempt may succeed: the daemon has not noticed the end of an earlier connection of
    /// this process, or its queue of connections is full.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Pool(_) => false,
            Self::Io { source, .. } => source.kind() == io::ErrorKind::WouldBlock,
            Self::Refused { reason, .. } => *reason == Refusal::AlreadyConnected,
        }
    }
}

/// Returns a function that adds the operation and the path to an error of the operating system.
pub(super) fn io_error<E: Into<io::Error>>(
    path: &Path,
    operation: &'static str,
) -> impl FnOnce(E) -> ConnectError {
    let path = path.to_owned();
    move |error| ConnectError::Io { operation, path, source: error.into() }
}

/// Connects to the socket of the daemon. Fails if the daemon is stopped and its queue of connections is full.
pub(super) fn connect_to(path: &Path) -> Result<OwnedFd, ConnectError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(io_error(path, "create a socket for"))?;
    let address = SocketAddrUnix::new(path).map_err(io_error(path, "connect to"))?;
    connect(&socket, &address).map_err(io_error(path, "connect to"))?;
    Ok(socket)
}

/// Waits until a message or the end of the connection can be received. Returns `false` after the timeout.
pub(super) fn wait_readable(socket: &OwnedFd, timeout: Ns) -> io::Result<bool> {
    let timeout = Timespec::try_from(timeout.as_duration()).map_err(io::Error::other)?;
    loop {
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Receives a message.
pub(super) fn receive(socket: &OwnedFd) -> io::Result<DaemonMessage> {
    let mut buffer = [0; MESSAGE_BYTES + 1]; // a longer message is detected by its length
    let (received, _) = recv(socket, &mut buffer, RecvFlags::empty())?;
    DaemonMessage::decode(&buffer[..received]).map_err(io::Error::other)
}
