//! Creates the manager's unix socket with its owner, group and mode.

use std::{
    fs::{self, DirBuilder},
    io,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{DirBuilderExt as _, FileTypeExt as _, PermissionsExt as _},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, fchmod},
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind as bind_socket, connect, listen,
        socket_with,
    },
};

use units::limits::ACCEPT_BACKLOG;

use crate::config::SOCKET_PATH_BYTES_MAX;

/// Error from creating the unix socket with [`bind`].
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path exists and is not a socket.
    #[error("manager.listen: {} is not a socket: remove the file or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// Another process listens on the socket.
    #[error("manager.listen: another process listens on {}: stop the process or choose another path", .0.display())]
    InUse(PathBuf),
    /// The path exceeds the length limit of socket addresses.
    #[error("manager.listen: the path {} is too long for a socket: must have at most {SOCKET_PATH_BYTES_MAX} bytes", .0.display())]
    TooLong(PathBuf),
    /// A system call failed.
    #[error("manager.listen: cannot {operation} {}", path.display())]
    Io {
        /// Operation, such as "listen on".
        operation: &'static str,
        /// Path of the socket.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
}

/// Creates a socket at `path` and listens on it. Root and the manager's user can connect (mode
/// 0600) and, with `group`, also the members of this group (mode 0660). Replaces a socket of an
/// earlier process, but no other file.
///
/// # Errors
/// [`SocketError`] if the socket cannot be created. In this case the path is unchanged, unless
/// setting the group or mode failed.
pub fn bind(path: &Path, group: Option<u32>) -> Result<UnixListener, SocketError> {
    let io_error =
        |operation| move |errno: io::Error| SocketError::Io { operation, path: path.to_owned(), errno };
    let address = SocketAddrUnix::new(path).map_err(|_| SocketError::TooLong(path.to_owned()))?;
    if let Some(folder) = path.parent() {
        let created = DirBuilder::new().recursive(true).mode(0o755).create(folder);
        created.map_err(io_error("create the directory of"))?;
    }
    remove_stale_socket(path, &address)?;
    let listener = listen_at(&address).map_err(io_error("listen on"))?;
    if let Some(group) = group {
        std::os::unix::fs::chown(path, None, Some(group)).map_err(io_error("set the group of"))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o660)).map_err(io_error("set the mode of"))?;
    }
    Ok(listener)
}

fn remove_stale_socket(path: &Path, address: &SocketAddrUnix) -> Result<(), SocketError> {
    let io_error =
        |operation| move |errno: io::Error| SocketError::Io { operation, path: path.to_owned(), errno };
    match fs::symlink_metadata(path) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(errno) => return Err(io_error("inspect")(errno)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(SocketError::NotASocket(path.to_owned()));
        }
        Ok(_) => {}
    }
    match try_connect(address) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(io_error("remove the stale socket")),
        Ok(()) | Err(Errno::AGAIN) => Err(SocketError::InUse(path.to_owned())),
        Err(errno) => Err(io_error("connect to")(errno.into())),
    }
}

fn try_connect(address: &SocketAddrUnix) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    connect(&socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?, address)
}

/// Creates the socket and listens on it. The mode is set before the socket has a path, so that no
/// other user can connect in between.
fn listen_at(address: &SocketAddrUnix) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind_socket(&socket, address)?;
    listen(&socket, ACCEPT_BACKLOG.cast_signed())?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn socket_mode_admits_the_owner_and_a_configured_group() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/manager.sock");
        let listener = bind(&path, None).unwrap();
        assert_eq!(mode(&path), 0o600);
        drop(listener);
        let own = rustix::process::getegid().as_raw();
        let _listener = bind(&path, Some(own)).unwrap();
        assert_eq!((mode(&path), fs::metadata(&path).unwrap().gid()), (0o660, own));
    }

    #[test]
    fn socket_in_use_and_other_files_are_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("manager.sock");
        let _listener = bind(&path, None).unwrap();
        assert!(matches!(bind(&path, None), Err(SocketError::InUse(_))));
        let file = folder.path().join("precious");
        fs::write(&file, "data").unwrap();
        assert!(matches!(bind(&file, None), Err(SocketError::NotASocket(_))));
        assert_eq!(fs::read(&file).unwrap(), b"data");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(bind(&link, None), Err(SocketError::NotASocket(_))));
        let long = folder.path().join("x".repeat(100));
        assert!(matches!(bind(&long, None), Err(SocketError::TooLong(_))));
    }
}
