//! Sockets on which the server accepts clients.

use std::{
    fs, io,
    net::SocketAddr,
    os::{fd::AsFd, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::net::{SocketType, sockopt};
use service_files::{
    folders::check_socket_folder,
    sockets::{SocketError, SocketPath},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    task::JoinSet,
};
use units::limits::{SOFT_CACHE_ACCEPT_RETRY, SOFT_CACHE_BACKLOG};

use crate::{connection::serve, server::Server, session::Peer};

/// Reply to a client above the limit of clients.
const TOO_MANY_CLIENTS: &[u8] = b"-ERR max number of clients reached\r\n";
/// Option that names the unix socket.
const UNIX_SOCKET_OPTION: &str = "--unix-socket";

/// Reason why the server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address cannot be used.
    #[error("--listen: cannot listen on {address}")]
    Tcp {
        /// Address of the socket.
        address: SocketAddr,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// The unix socket cannot be created.
    #[error(transparent)]
    Unix(#[from] SocketError),
    /// Another user could replace the unix socket.
    #[error("--unix-socket: {0}")]
    Folder(String),
}

/// File of the unix socket that the server has created.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    id: (u64, u64),
}

impl SocketFile {
    /// Returns the file of a path.
    fn new(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), id: (metadata.dev(), metadata.ino()) })
    }

    /// Removes the socket, unless another file has its name.
    pub fn remove(self) {
        let path = self.path.display();
        let removed = fs::symlink_metadata(&self.path).and_then(|metadata| {
            let is_own = (metadata.dev(), metadata.ino()) == self.id;
            if is_own { fs::remove_file(&self.path) } else { Err(io::Error::other("it was replaced")) }
        });
        if let Err(error) = removed {
            tracing::warn!(%error, %path, "cannot remove the socket");
        }
    }
}

/// Listening socket.
#[derive(Debug)]
pub enum Listener {
    /// Socket of an address and port.
    Tcp(TcpListener),
    /// Socket of a path.
    Unix(UnixListener),
}

impl Listener {
    /// Listens on an address, and logs it. With port 0, the kernel chooses a port.
    ///
    /// # Errors
    /// [`ListenError::Tcp`].
    pub async fn tcp(address: SocketAddr) -> Result<Self, ListenError> {
        let failed = |errno| ListenError::Tcp { address, errno };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        tracing::info!(%address, "listening");
        Ok(Self::Tcp(listener))
    }

    /// Listens on a unix socket with a mode. Replaces a socket that no process serves.
    ///
    /// # Errors
    /// [`ListenError::Unix`] or [`ListenError::Folder`].
    pub fn unix(path: &Path, mode: u32) -> Result<(Self, SocketFile), ListenError> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        check_socket_folder(folder, rustix::process::geteuid().as_raw()).map_err(ListenError::Folder)?;
        let socket = SocketPath { field: UNIX_SOCKET_OPTION, path };
        let listener =
            std::os::unix::net::UnixListener::from(socket.listen(SocketType::STREAM, SOFT_CACHE_BACKLOG)?);
        let listener = UnixListener::from_std(listener).map_err(socket.io_error("listen on"))?;
        socket.set_mode(mode)?;
        let file = SocketFile::new(path).map_err(socket.io_error("inspect"))?;
        tracing::info!(path = %path.display(), "listening");
        Ok((Self::Unix(listener), file))
    }

    /// Accepts clients until the server stops, and then waits for the end of their connections.
    pub async fn accept_clients(self, server: Arc<Server>) {
        let mut clients = JoinSet::new();
        while !server.is_stopping() {
            tokio::select! {
                accepted = self.accept() => match accepted {
                    Ok((Client::Tcp(stream), peer)) => {
                        admit(&mut clients, stream, peer, &server, TcpStream::try_write);
                    }
                    Ok((Client::Unix(stream), peer)) => {
                        admit(&mut clients, stream, peer, &server, UnixStream::try_write);
                    }
                    Err(error) => {
                        server.log.log(&"listening socket", &error);
                        tokio::time::sleep(SOFT_CACHE_ACCEPT_RETRY.as_duration()).await;
                    }
                },
                Some(_) = clients.join_next() => {}
                () = server.stopped() => {}
            }
        }
        drop(self);
        while clients.join_next().await.is_some() {}
    }

    async fn accept(&self) -> io::Result<(Client, Peer)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                set_options(&stream);
                Ok((Client::Tcp(stream), Peer::Tcp(address)))
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let peer = stream.peer_cred().map_or(Peer::Unknown, |process| Peer::Unix {
                    pid: process.pid().unwrap_or(0),
                    uid: process.uid(),
                });
                Ok((Client::Unix(stream), peer))
            }
        }
    }
}

/// Sends replies without delay, and detects clients that disappeared. A failure concerns only this connection.
fn set_options(stream: &TcpStream) {
    let result =
        stream.set_nodelay(true).and_then(|()| Ok(sockopt::set_socket_keepalive(stream.as_fd(), true)?));
    if let Err(error) = result {
        tracing::debug!(%error, "cannot set the options of a connection");
    }
}

/// Accepted connection.
enum Client {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Starts to serve a client, or rejects it if there are too many.
fn admit<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    clients: &mut JoinSet<()>,
    stream: S,
    peer: Peer,
    server: &Arc<Server>,
    try_write: impl FnOnce(&S, &[u8]) -> io::Result<usize>,
) {
    match server.add_client(peer) {
        Some(client) => drop(clients.spawn(serve(stream, server.clone(), client))),
        None => {
            // The client is rejected whether it receives the reason or not.
            let _ = try_write(&stream, TOO_MANY_CLIENTS);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener as StdListener;

    use super::*;

    #[test]
    fn only_the_own_socket_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _first = StdListener::bind(&path).unwrap();
        let (own, replaced) = (SocketFile::new(&path).unwrap(), SocketFile::new(&path).unwrap());
        fs::rename(&path, dir.path().join("other")).unwrap();
        let _second = StdListener::bind(&path).unwrap();
        replaced.remove();
        assert!(path.exists());
        fs::rename(dir.path().join("other"), &path).unwrap();
        own.remove();
        assert!(!path.exists());
    }
}
