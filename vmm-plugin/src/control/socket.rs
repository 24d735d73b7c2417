//! Creates the control sockets: one file per VM, all in one directory. The process that listens on
//! the socket of a VM runs this VM, so that a VM cannot run twice at the same time. A confined
//! process cannot remove files, so the socket file of an ended VM remains, without a listener. The
//! next start of the VM replaces the file.

use std::{
    fs::{DirBuilder, File},
    io,
    os::{
        fd::OwnedFd,
        unix::{fs::DirBuilderExt as _, net::UnixListener},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, Mode, fchmod, flock},
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with, sockopt,
    },
    process::Pid,
};
use units::{Name, limits::SOCKET_PATH_BYTES_MAX};

/// Maximum number of connections that wait in the kernel to be accepted.
const CONTROL_BACKLOG: i32 = 128;

/// Error returned when the control socket of a VM cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another process listens on the control socket: the VM is already running.
    #[error("VM {vm} is already running: process {pid} listens on {}", path.display())]
    AlreadyRunning {
        /// Name of the VM.
        vm: Name,
        /// ID of the process that runs the VM.
        pid: i32,
        /// Path of the control socket.
        path: PathBuf,
    },
    /// The path exceeds the length limit of a Unix socket address.
    #[error("--run-dir: the path {} is too long for a socket: must have at most {SOCKET_PATH_BYTES_MAX} bytes", path.display())]
    PathTooLong {
        /// Path of the control socket.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("--run-dir: cannot {operation} {}", path.display())]
    System {
        /// Failed operation, completing "cannot …".
        operation: &'static str,
        /// File or directory that the system call accessed.
        path: PathBuf,
        /// Error returned by the system call.
        #[source]
        errno: io::Error,
    },
}

/// Returns the path of the control socket of a VM.
pub fn socket_path(run_dir: &Path, vm: &Name) -> PathBuf {
    run_dir.join(format!("{vm}.sock"))
}

/// Listening control socket of a VM that has not started yet. Drop removes the socket file.
#[derive(Debug)]
pub struct ControlSocket {
    path: PathBuf,
    listener: Option<UnixListener>,
}

impl ControlSocket {
    /// Returns the absolute path of the socket file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the listener for a VM that starts. The socket file is then no longer removed on
    /// drop.
    pub fn into_listener(mut self) -> UnixListener {
        self.listener.take().expect("the listener is present until self is consumed")
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if self.listener.is_some() {
            let _ = remove_if_exists(&self.path); // a remaining file is replaced when the VM starts again
        }
    }
}

/// Creates the control socket of a VM, and the directory if it is missing. Only the user of this
/// process can access them. Replaces a socket file without a listener.
///
/// # Errors
/// [`SocketError::AlreadyRunning`] if a process already runs the VM, and [`SocketError`] if the
/// socket cannot be created.
pub fn claim_control_socket(run_dir: &Path, vm: &Name) -> Result<ControlSocket, SocketError> {
    let failed = |operation, path: &Path| {
        let path = path.to_owned();
        move |errno: io::Error| SocketError::System { operation, path, errno }
    };
    let run_dir = std::path::absolute(run_dir).map_err(failed("resolve", run_dir))?;
    let path = socket_path(&run_dir, vm);
    let address = SocketAddrUnix::new(&path).map_err(|_| SocketError::PathTooLong { path: path.clone() })?;
    DirBuilder::new().recursive(true).mode(0o700).create(&run_dir).map_err(failed("create", &run_dir))?;
    let dir_file = File::open(&run_dir).map_err(failed("open", &run_dir))?;
    // The lock makes the check and the creation one atomic step: several processes may start the
    // same VM at the same time.
    flock(&dir_file, FlockOperation::LockExclusive)
        .map_err(|errno| failed("lock", &run_dir)(errno.into()))?;
    if let Some(process) = listener_pid(&path).map_err(failed("find the listener on", &path))? {
        return Err(SocketError::AlreadyRunning {
            vm: vm.clone(),
            pid: process.as_raw_nonzero().get(),
            path,
        });
    }
    remove_if_exists(&path).map_err(failed("remove the stale socket", &path))?;
    let listener = bind_and_listen(&address).map_err(failed("listen at", &path))?;
    flock(&dir_file, FlockOperation::Unlock).map_err(|errno| failed("unlock", &run_dir)(errno.into()))?;
    Ok(ControlSocket { path, listener: Some(listener) })
}

/// Returns the ID of the process that listens on a socket. Returns `None` if the file does not
/// exist or has no listener.
///
/// # Errors
/// The error returned by connect(2), such as `WouldBlock` if the backlog is full.
pub fn listener_pid(path: &Path) -> io::Result<Option<Pid>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(Some(sockopt::socket_peercred(&socket)?.pid)),
        Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn remove_if_exists(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Creates a listening socket. The mode is set before bind(2) creates the file, so that other users
/// can never connect.
fn bind_and_listen(address: &SocketAddrUnix) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, address)?;
    listen(&socket, CONTROL_BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
        sync::Barrier,
    };

    use super::*;

    fn vm_name() -> Name {
        Name::new("v").unwrap()
    }

    fn file_mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn socket_and_directory_are_accessible_to_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("run/vms");
        let _listener = claim_control_socket(&run_dir, &vm_name()).unwrap();
        assert_eq!((file_mode(&run_dir), file_mode(&socket_path(&run_dir, &vm_name()))), (0o700, 0o600));
    }

    #[test]
    fn socket_with_listener_is_rejected_and_stale_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let first = claim_control_socket(dir.path(), &vm_name()).unwrap().into_listener();
        let error = claim_control_socket(dir.path(), &vm_name()).unwrap_err().to_string();
        let expected = format!("VM v is already running: process {} listens on ", std::process::id());
        assert!(error.starts_with(&expected), "{error}");
        drop(first);
        assert!(fs::symlink_metadata(socket_path(dir.path(), &vm_name())).unwrap().file_type().is_socket());
        claim_control_socket(dir.path(), &vm_name()).unwrap();
    }

    #[test]
    fn socket_of_a_vm_that_did_not_start_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        drop(claim_control_socket(dir.path(), &vm_name()).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn exactly_one_of_concurrent_claims_succeeds() {
        const THREAD_COUNT: usize = 8;
        for _ in 0..20 {
            let dir = tempfile::tempdir().unwrap();
            let start = Barrier::new(THREAD_COUNT);
            let results: Vec<_> = std::thread::scope(|scope| {
                let claim_control_socket = || {
                    start.wait();
                    claim_control_socket(dir.path(), &vm_name())
                };
                let threads: Vec<_> = (0..THREAD_COUNT).map(|_| scope.spawn(claim_control_socket)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1, "{results:?}");
        }
    }

    #[test]
    fn too_long_socket_path_is_rejected_without_creating_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("x".repeat(100));
        let error = claim_control_socket(&run_dir, &vm_name()).unwrap_err().to_string();
        assert!(error.ends_with("is too long for a socket: must have at most 107 bytes"), "{error}");
        assert!(!run_dir.exists());
    }
}
