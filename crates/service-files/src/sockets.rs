//! Creates listening unix sockets. Replaces the socket of an ended process, but no socket that a
//! process serves.

use std::{
    fs, io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::{FileTypeExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FileType, Mode, OFlags, fchmod, fstat, open as open_file},
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen as listen_on,
        socket_with,
    },
};

/// Reason why a socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path exists and is not a socket.
    #[error("{field}: {} is not a socket: remove the file, or choose another path", path.display())]
    NotASocket {
        /// Field of the configuration file.
        field: &'static str,
        /// Path of the socket.
        path: PathBuf,
    },
    /// Another process listens on the socket.
    #[error("{field}: another process serves the socket {}: stop the process, or choose another path", path.display())]
    InUse {
        /// Field of the configuration file.
        field: &'static str,
        /// Path of the socket.
        path: PathBuf,
    },
    /// The operating system rejected an operation.
    #[error("{field}: cannot {operation} {}", path.display())]
    Io {
        /// Field of the configuration file.
        field: &'static str,
        /// Operation, such as "listen on".
        operation: &'static str,
        /// Path of the socket.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
}

/// Path of a socket, and the field of the configuration file that names it.
#[derive(Clone, Copy, Debug)]
pub struct SocketPath<'a> {
    /// Field of the configuration file, for messages.
    pub field: &'static str,
    /// Absolute path.
    pub path: &'a Path,
}

impl SocketPath<'_> {
    /// Creates a socket to which only root and the user of this process can connect (mode 0600),
    /// and listens on it. Replaces a socket that no process serves. `backlog` is the maximum number
    /// of connections that the kernel queues until they are accepted.
    ///
    /// # Errors
    /// [`SocketError`]. The path is then unchanged, unless a stale socket was removed.
    pub fn listen(self, kind: SocketType, backlog: u32) -> Result<OwnedFd, SocketError> {
        if self.exists()? {
            self.remove_stale_socket(kind)?;
        }
        let open = || {
            let socket = open_socket(kind)?;
            // The mode is set before the socket has a path, so that no other user can connect in
            // between.
            fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
            bind(&socket, &SocketAddrUnix::new(self.path)?)?;
            listen_on(&socket, backlog.cast_signed())?;
            Ok(socket)
        };
        open().map_err(|errno: Errno| self.io_error("listen on")(errno.into()))
    }

    /// Sets the mode of the socket, which belongs to the user of this process. Does not follow a link, and does not
    /// change another kind of file or a file of another user in place of the socket.
    ///
    /// # Errors
    /// [`SocketError::NotASocket`] or [`SocketError::Io`].
    pub fn set_mode(self, mode: u32) -> Result<(), SocketError> {
        let failed = |errno: Errno| self.io_error("set the mode of")(errno.into());
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = open_file(self.path, flags, Mode::empty()).map_err(failed)?;
        let found = fstat(&file).map_err(failed)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
            return Err(SocketError::NotASocket { field: self.field, path: self.path.to_owned() });
        }
        if found.st_uid != rustix::process::geteuid().as_raw() {
            return Err(failed(Errno::PERM));
        }
        // fchmod(2) rejects descriptors of this kind. The path of a descriptor always leads to its file.
        let same_file = format!("/proc/self/fd/{}", file.as_raw_fd());
        fs::set_permissions(same_file, fs::Permissions::from_mode(mode))
            .map_err(self.io_error("set the mode of"))
    }

    /// Returns whether the socket exists, also if no process serves it.
    ///
    /// # Errors
    /// [`SocketError::NotASocket`] if the path exists and is not a socket, or [`SocketError::Io`].
    pub fn exists(self) -> Result<bool, SocketError> {
        match fs::symlink_metadata(self.path) {
            Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(errno) => Err(self.io_error("inspect")(errno)),
            Ok(metadata) if metadata.file_type().is_socket() => Ok(true),
            Ok(_) => Err(SocketError::NotASocket { field: self.field, path: self.path.to_owned() }),
        }
    }

    fn remove_stale_socket(self, kind: SocketType) -> Result<(), SocketError> {
        match self.try_connect(kind) {
            Err(Errno::CONNREFUSED) => {
                fs::remove_file(self.path).map_err(self.io_error("remove the stale socket"))
            }
            // PROTOTYPE: a process serves a socket of another type. AGAIN: its queue is full.
            Ok(()) | Err(Errno::PROTOTYPE | Errno::AGAIN) => {
                Err(SocketError::InUse { field: self.field, path: self.path.to_owned() })
            }
            Err(errno) => Err(self.io_error("connect to")(errno.into())),
        }
    }

    fn try_connect(self, kind: SocketType) -> Result<(), Errno> {
        connect(&open_socket(kind)?, &SocketAddrUnix::new(self.path)?)
    }

    /// Returns a function that converts an error of the operating system.
    pub fn io_error(self, operation: &'static str) -> impl FnOnce(io::Error) -> SocketError {
        let (field, path) = (self.field, self.path.to_owned());
        move |errno| SocketError::Io { field, operation, path, errno }
    }
}

fn open_socket(kind: SocketType) -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::{
        fs::{MetadataExt as _, symlink},
        net::UnixListener,
    };

    use super::*;

    fn listen_on(path: &Path) -> Result<OwnedFd, SocketError> {
        SocketPath { field: "agent.socket", path }.listen(SocketType::SEQPACKET, 8)
    }

    #[test]
    fn socket_of_an_ended_process_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("host-memory.sock");
        drop(listen_on(&path).unwrap());
        let _listener = listen_on(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        drop(UnixListener::bind(dir.path().join("stream")).unwrap());
        listen_on(&dir.path().join("stream")).unwrap();
    }

    #[test]
    fn socket_that_a_process_serves_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (path, stream) = (dir.path().join("host-memory.sock"), dir.path().join("manager.sock"));
        let _listeners = (listen_on(&path).unwrap(), UnixListener::bind(&stream).unwrap());
        for path in [path, stream] {
            let error = listen_on(&path).unwrap_err();
            assert!(error.to_string().contains("another process serves the socket"), "{error:?}");
            assert!(path.exists());
        }
    }

    #[test]
    fn mode_of_a_socket_is_set_but_not_that_of_other_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mode = |name: &str| fs::metadata(path(name)).unwrap().mode() & 0o777;
        let set = |name: &str| SocketPath { field: "agent.socket", path: &path(name) }.set_mode(0o666);
        let _listener = listen_on(&path("socket")).unwrap();
        fs::write(path("file"), "data").unwrap();
        fs::set_permissions(path("file"), fs::Permissions::from_mode(0o600)).unwrap();
        symlink("file", path("link")).unwrap();
        symlink("socket", path("link-to-socket")).unwrap();
        for name in ["file", "link", "link-to-socket"] {
            assert!(matches!(set(name), Err(SocketError::NotASocket { .. })), "{name}");
        }
        assert_eq!((mode("file"), mode("socket")), (0o600, 0o600));
        assert!(matches!(set("missing"), Err(SocketError::Io { .. })));
        set("socket").unwrap();
        assert_eq!(mode("socket"), 0o666);
    }

    #[test]
    fn other_file_or_link_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link, socket) = (dir.path().join("file"), dir.path().join("link"), dir.path().join("s"));
        fs::write(&file, "data").unwrap();
        drop(listen_on(&socket).unwrap());
        symlink(&socket, &link).unwrap();
        for path in [&file, &link, dir.path()] {
            assert!(matches!(listen_on(path), Err(SocketError::NotASocket { .. })));
        }
        assert_eq!(fs::read(&file).unwrap(), b"data");
    }
}
