//! Unix sockets that every user of the host can reach: listening, the process and the user of a connection, permits
//! for open connections, and warnings about dropped ones.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::sys::socket::{getsockopt, sockopt};
use rustix::net::{SocketFlags, SocketType, accept_with};
use service_files::sockets::{SocketError, SocketPath};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use units::{UserId, limits::ACCEPT_BACKLOG};

use crate::readiness;

/// Minimum interval between warnings about dropped connections.
const WARNING_INTERVAL: Duration = Duration::from_secs(10);

/// Listening socket to which every user can connect.
#[derive(Debug)]
pub struct LocalListener {
    listener: AsyncFd<OwnedFd>,
}

impl LocalListener {
    /// Creates a socket, and listens on it. Replaces a socket that no process serves.
    ///
    /// # Errors
    /// [`SocketError`]. The path is then unchanged, unless setting the mode failed.
    pub fn listen(socket: SocketPath<'_>) -> Result<Self, SocketError> {
        let listener = socket.listen(SocketType::SEQPACKET, ACCEPT_BACKLOG)?;
        // Every user may connect; each request is checked by the user id of the caller.
        socket.set_mode(0o666)?;
        let listener = readiness::watch(listener).map_err(socket.io_error("listen on"))?;
        Ok(Self { listener })
    }

    /// Accepts connections, whose sockets do not block, until the future is dropped. `start` begins to serve a
    /// connection, or fails if the connection must be dropped. `name` describes the socket in warnings about dropped
    /// connections. After a dropped connection, the next one is accepted before other tasks run, so that a user who
    /// opens many connections does not fill the queue of the kernel.
    pub async fn accept_all(self, name: &str, mut start: impl FnMut(OwnedFd) -> io::Result<()>) {
        let mut warnings = DropWarnings::default();
        loop {
            match self.listener.async_io(Interest::READABLE, accept).await {
                Ok(socket) => {
                    if let Err(error) = start(socket) {
                        warnings.warn(name, &error);
                    }
                }
                Err(error) => {
                    warnings.warn(name, &error);
                    tokio::task::yield_now().await; // if no descriptor is free, other tasks may close some
                }
            }
        }
    }
}

fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
}

/// Process and user that opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process ID, or `None` if the PID namespace of the agent does not contain the process.
    pub pid: Option<u32>,
    /// Effective user at the time of the connection.
    pub user: UserId,
}

impl PeerCredentials {
    /// Reads the credentials of a connected socket.
    ///
    /// # Errors
    /// The error of the operating system, or the user has no valid ID.
    pub fn read(socket: &OwnedFd) -> io::Result<Self> {
        // rustix represents the PID by a type that cannot be 0.
        let credentials = getsockopt(socket, sockopt::PeerCredentials)?;
        Ok(Self {
            pid: u32::try_from(credentials.pid()).ok().filter(|pid| *pid != 0),
            user: UserId::new(credentials.uid()).map_err(io::Error::other)?,
        })
    }
}

/// Permits for open connections. Each allowed user has separate permits. All other users, whose requests are
/// refused, share a few permits. So no user can exhaust the permits of another.
#[derive(Debug)]
pub struct ConnectionPermits {
    per_allowed_user: BTreeMap<UserId, Arc<Semaphore>>,
    others: Arc<Semaphore>,
}

impl ConnectionPermits {
    /// Creates the permits of the allowed users, and of all other users together.
    pub fn new(allowed_uids: BTreeSet<UserId>, per_user: usize, others: usize) -> Self {
        let semaphore = |_| Arc::new(Semaphore::new(per_user));
        Self {
            per_allowed_user: allowed_uids.into_iter().map(|uid| (uid, semaphore(uid))).collect(),
            others: Arc::new(Semaphore::new(others)),
        }
    }

    /// Returns whether the user may send requests.
    pub fn is_allowed(&self, uid: UserId) -> bool {
        self.per_allowed_user.contains_key(&uid)
    }

    /// Takes a permit, which ends when it is dropped.
    ///
    /// # Errors
    /// The user has no free permit.
    pub fn acquire(&self, uid: UserId) -> io::Result<OwnedSemaphorePermit> {
        let semaphore = self.per_allowed_user.get(&uid).unwrap_or(&self.others);
        let permit = Arc::clone(semaphore).try_acquire_owned();
        permit.map_err(|_| io::Error::other(format!("uid {uid} has too many connections")))
    }
}

/// Warnings about dropped connections, of which clients could cause many.
#[derive(Debug, Default)]
struct DropWarnings {
    last: Option<Instant>,
}

impl DropWarnings {
    /// Logs a dropped connection, unless another one was logged recently.
    fn warn(&mut self, socket: &str, error: &io::Error) {
        let now = Instant::now();
        if self.last.is_none_or(|at| now.duration_since(at) >= WARNING_INTERVAL) {
            self.last = Some(now);
            tracing::warn!(%error, "dropped connection to the {socket} socket");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt as _};

    use super::*;

    #[tokio::test]
    async fn every_user_may_connect_to_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("host-memory.sock");
        let _listener = LocalListener::listen(SocketPath { field: "agent.socket", path: &path }).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o666);
    }
}
