//! Creates the socket at which VMMs attach to memory.

use std::{
    fs,
    os::{fd::OwnedFd, unix::fs::PermissionsExt as _},
    path::Path,
};

use rustix::net::SocketType;
use service_files::sockets::{SocketError, SocketPath};

/// Maximum number of connections that the kernel queues until they are accepted.
const LISTEN_BACKLOG: u32 = 128;

/// Returns the path of the socket with its field in host.toml.
pub fn socket_path(path: &Path) -> SocketPath<'_> {
    SocketPath { field: "agent.socket", path }
}

/// Creates a socket at `path` to which every user can connect, and listens on it. Replaces a socket
/// that no process serves.
///
/// # Errors
/// [`SocketError`]. The path is then unchanged, unless setting the mode failed.
pub(super) fn listen(path: &Path) -> Result<OwnedFd, SocketError> {
    let socket = socket_path(path);
    let listener = socket.listen(SocketType::SEQPACKET, LISTEN_BACKLOG)?;
    // Every user may connect; each request is checked by the user id of the caller.
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))
        .map_err(socket.io_error("set the mode of"))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn every_user_may_connect_to_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("host-memory.sock");
        let _listener = listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o666);
    }
}
