//! Creates the socket at which VMMs attach to memory. Replaces the socket of an ended process, but
//! no socket that a process serves.

use std::{
    fs, io,
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen as listen_on,
        socket_with,
    },
};

/// Maximum number of connections that the kernel queues until they are accepted.
const LISTEN_BACKLOG: i32 = 128;

/// Reason why the agent cannot listen on the socket.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The operating system rejected an operation.
    #[error("agent.socket: cannot {operation} {}", path.display())]
    Io {
        /// Operation, such as `listen on`.
        operation: &'static str,
        /// Path of the socket.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// A file that is not a socket has the configured path.
    #[error("agent.socket: {} exists and is not a socket", path.display())]
    NotASocket {
        /// Configured path of the socket.
        path: PathBuf,
    },
    /// Another process listens on the socket.
    #[error(
        "agent.socket: another process serves the socket {}: stop the process, or choose another path",
        path.display()
    )]
    InUse {
        /// Configured path of the socket.
        path: PathBuf,
    },
}

/// Creates a socket at `path` to which every user can connect, and listens on it. Replaces a socket
/// that no process serves.
///
/// # Errors
/// [`ListenError`]. The path is then unchanged, unless setting the mode failed.
pub(super) fn listen(path: &Path) -> Result<OwnedFd, ListenError> {
    let io_error = |operation| move |errno| ListenError::Io { operation, path: path.to_owned(), errno };
    remove_stale_socket(path)?;
    let listener = open_listener(path).map_err(io_error("listen on"))?;
    // Every user may connect; each request is checked by the user id of the caller.
    fs::set_permissions(path, fs::Permissions::from_mode(0o666)).map_err(io_error("set the mode of"))?;
    Ok(listener)
}

fn remove_stale_socket(path: &Path) -> Result<(), ListenError> {
    let io_error =
        |operation| move |errno: io::Error| ListenError::Io { operation, path: path.to_owned(), errno };
    match fs::symlink_metadata(path) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(errno) => return Err(io_error("inspect")(errno)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ListenError::NotASocket { path: path.to_owned() });
        }
        Ok(_) => {}
    }
    match try_connect(path) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(io_error("remove the stale socket")),
        // PROTOTYPE: a process serves a socket of another type. AGAIN: its queue is full.
        Ok(()) | Err(Errno::PROTOTYPE | Errno::AGAIN) => Err(ListenError::InUse { path: path.to_owned() }),
        Err(errno) => Err(io_error("connect to")(errno.into())),
    }
}

fn try_connect(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

fn open_listener(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&listener, &SocketAddrUnix::new(path)?)?;
    listen_on(&listener, LISTEN_BACKLOG)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn socket_of_an_ended_process_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("host-memory.sock");
        drop(listen(&path).unwrap());
        let _listener = listen(&path).unwrap();
        try_connect(&path).unwrap();
        drop(UnixListener::bind(dir.path().join("stream")).unwrap());
        listen(&dir.path().join("stream")).unwrap();
    }

    #[test]
    fn socket_that_a_process_serves_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (path, stream) = (dir.path().join("host-memory.sock"), dir.path().join("manager.sock"));
        let _listeners = (listen(&path).unwrap(), UnixListener::bind(&stream).unwrap());
        for path in [path, stream] {
            let error = listen(&path).unwrap_err();
            assert!(error.to_string().contains("another process serves the socket"), "{error:?}");
            assert!(path.exists());
        }
    }

    #[test]
    fn other_file_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "data").unwrap();
        assert!(matches!(listen(&path), Err(ListenError::NotASocket { .. })));
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }
}
