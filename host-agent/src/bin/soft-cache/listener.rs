//! Sockets on which the server accepts clients.

use std::{
    fs, io,
    net::SocketAddr,
    os::{
        fd::{AsFd, AsRawFd as _},
        unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{Mode, OFlags, open},
    net::{SocketType, sockopt},
};
use service_files::{
    folders::check_socket_folder_owner,
    sockets::{SocketError, SocketPath},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    task::JoinSet,
};
use units::limits::{SOFT_CACHE_ACCEPT_RETRY, SOFT_CACHE_BACKLOG};

use crate::{connection::serve, server::Server};

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
    /// Sets the mode of the socket at a path without following links.
    fn with_mode(path: &Path, mode: u32) -> io::Result<Self> {
        let file = open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        // The path leads to the opened file, also if another one has its name meanwhile.
        let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
        let metadata = fs::metadata(&opened)?;
        if !metadata.file_type().is_socket() {
            return Err(io::Error::other("another file replaced the socket"));
        }
        fs::set_permissions(&opened, fs::Permissions::from_mode(mode))?;
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

/// Checks that only root and the server's user can replace files in a folder.
fn check_folder(folder: &Path) -> Result<(), String> {
    check_socket_folder_owner(folder, rustix::process::geteuid().as_raw())?;
    // A missing folder is reported with the socket.
    let mode = fs::metadata(folder).map_or(0, |metadata| metadata.mode());
    if mode & 0o022 == 0 || mode & 0o1000 != 0 {
        return Ok(());
    }
    let (folder, mode) = (folder.display(), mode & 0o7777);
    Err(format!(
        "the folder {folder} has mode {mode:o}: must not be writable for group or others unless the sticky bit is set, \
         because they can replace the socket"
    ))
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
        check_folder(folder).map_err(ListenError::Folder)?;
        let socket = SocketPath { field: UNIX_SOCKET_OPTION, path };
        let listener =
            std::os::unix::net::UnixListener::from(socket.listen(SocketType::STREAM, SOFT_CACHE_BACKLOG)?);
        let listener = UnixListener::from_std(listener).map_err(socket.io_error("listen on"))?;
        let file = SocketFile::with_mode(path, mode).map_err(socket.io_error("set the mode of"))?;
        tracing::info!(path = %path.display(), "listening");
        Ok((Self::Unix(listener), file))
    }

    /// Accepts clients until the server stops, and then waits for the end of their connections.
    pub async fn accept_clients(self, server: Arc<Server>) {
        let mut clients = JoinSet::new();
        while !server.is_stopping() {
            tokio::select! {
                accepted = self.accept() => match accepted {
                    Ok(Client::Tcp(stream)) => admit(&mut clients, stream, &server, TcpStream::try_write),
                    Ok(Client::Unix(stream)) => admit(&mut clients, stream, &server, UnixStream::try_write),
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

    async fn accept(&self) -> io::Result<Client> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                set_options(&stream);
                Ok(Client::Tcp(stream))
            }
            Self::Unix(listener) => Ok(Client::Unix(listener.accept().await?.0)),
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
    server: &Arc<Server>,
    try_write: impl FnOnce(&S, &[u8]) -> io::Result<usize>,
) {
    match server.add_client() {
        Some(client) => drop(clients.spawn(serve(stream, server.clone(), client))),
        None => {
            // The client is rejected whether it receives the reason or not.
            let _ = try_write(&stream, TOO_MANY_CLIENTS);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixListener as StdListener};

    use super::*;

    #[test]
    fn mode_is_set_without_following_links() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, file, link) =
            (dir.path().join("socket"), dir.path().join("file"), dir.path().join("link"));
        let _listener = StdListener::bind(&socket).unwrap();
        SocketFile::with_mode(&socket, 0o660).unwrap();
        assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o660);
        fs::write(&file, "data").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        symlink(&file, &link).unwrap();
        for path in [&file, &link] {
            let error = SocketFile::with_mode(path, 0o666).unwrap_err();
            assert_eq!(error.to_string(), "another file replaced the socket");
        }
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn only_the_own_socket_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _first = StdListener::bind(&path).unwrap();
        let (own, replaced) =
            (SocketFile::with_mode(&path, 0o600).unwrap(), SocketFile::with_mode(&path, 0o600).unwrap());
        fs::rename(&path, dir.path().join("other")).unwrap();
        let _second = StdListener::bind(&path).unwrap();
        replaced.remove();
        assert!(path.exists());
        fs::rename(dir.path().join("other"), &path).unwrap();
        own.remove();
        assert!(!path.exists());
    }

    #[test]
    fn folder_in_which_others_can_replace_the_socket_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        for (mode, is_accepted) in [(0o755, true), (0o1777, true), (0o777, false), (0o775, false)] {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(check_folder(dir.path()).is_ok(), is_accepted, "{mode:o}");
        }
        let error = check_folder(dir.path()).unwrap_err();
        assert!(error.contains("has mode 775: must not be writable for group or others"), "{error}");
    }
}
