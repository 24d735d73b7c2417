//! Creates the manager's unix socket with its owner, group and mode.

use std::{
    fs::{self, DirBuilder},
    os::unix::{
        fs::{DirBuilderExt as _, PermissionsExt as _},
        net::UnixListener,
    },
    path::Path,
};

use rustix::net::SocketType;
use service_files::sockets::{SocketError, SocketPath};
use units::limits::ACCEPT_BACKLOG;

/// Returns the path of the socket with its field in rack.toml.
pub fn socket_path(path: &Path) -> SocketPath<'_> {
    SocketPath { field: "manager.listen", path }
}

/// Creates a socket at `path` and listens on it. Root and the manager's user can connect (mode
/// 0600) and, with `group`, also the members of this group (mode 0660). Replaces a socket of an
/// earlier process, but no other file.
///
/// # Errors
/// [`SocketError`] if the socket cannot be created. In this case the path is unchanged, unless
/// setting the group or mode failed.
pub fn bind(path: &Path, group: Option<u32>) -> Result<UnixListener, SocketError> {
    let socket = socket_path(path);
    if let Some(folder) = path.parent() {
        let created = DirBuilder::new().recursive(true).mode(0o755).create(folder);
        created.map_err(socket.io_error("create the directory of"))?;
    }
    let listener = socket.listen(SocketType::STREAM, ACCEPT_BACKLOG)?;
    if let Some(group) = group {
        std::os::unix::fs::chown(path, None, Some(group)).map_err(socket.io_error("set the group of"))?;
        let mode = fs::Permissions::from_mode(0o660);
        fs::set_permissions(path, mode).map_err(socket.io_error("set the mode of"))?;
    }
    Ok(listener.into())
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
        assert!(matches!(bind(&path, None), Err(SocketError::InUse { .. })));
        drop(listener);
        let own = rustix::process::getegid().as_raw();
        let _listener = bind(&path, Some(own)).unwrap();
        assert_eq!((mode(&path), fs::metadata(&path).unwrap().gid()), (0o660, own));
    }
}
