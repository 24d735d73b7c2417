//! Runtime directory of the agent, which contains the lock file, the instance number and the rack
//! of this host. All contents are durable before they are used. [`crate::records`] handles the VM
//! records in it.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use units::{InstanceId, limits::STATE_FILE_BYTES_MAX};

use crate::protected_dir::{DirError, ProtectedDir, TRAVERSABLE_MODE};

/// Name of the configuration key for the runtime directory.
pub(crate) const RUNTIME_DIR_FIELD: &str = "agent.runtime_dir";

/// Reason why the runtime directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeDirError {
    /// The operating system rejected an operation.
    #[error("cannot {operation} {}", path.display())]
    Io {
        /// Operation, such as `read`.
        operation: &'static str,
        /// File or directory of the operation.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// The directory or its lock file cannot be used, or another user can change the directory.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// Another agent has locked the directory.
    #[error("another host-agent uses {}", path.display())]
    InUse {
        /// Path of the directory.
        path: PathBuf,
    },
    /// A file has invalid contents.
    #[error("{} contains {:?}: must be {rule}", path.display(), units::shortened(text))]
    Corrupt {
        /// Path of the file.
        path: PathBuf,
        /// Contents of the file.
        text: String,
        /// Rule for the contents, such as `a whole number`.
        rule: &'static str,
    },
}

pub(crate) fn io_error(
    operation: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(io::Error) -> RuntimeDirError {
    let path = path.into();
    move |errno| RuntimeDirError::Io { operation, path, errno }
}

/// Runtime directory, which is locked until this value is dropped.
#[derive(Debug)]
pub struct RuntimeDir {
    path: PathBuf,
    _lock: File,
}

impl RuntimeDir {
    /// Creates the directory if it is missing, and locks it. Other users may traverse the
    /// directory, for example to reach a socket; each file has its own permissions.
    ///
    /// # Errors
    /// [`RuntimeDirError::InUse`] if another agent has locked the directory,
    /// [`RuntimeDirError::Dir`] if another user can change it, or [`RuntimeDirError::Io`].
    pub fn lock(path: &Path) -> Result<Self, RuntimeDirError> {
        let lock = lock_file(&ProtectedDir::create(RUNTIME_DIR_FIELD, path, TRAVERSABLE_MODE)?, "lock")?;
        let lock = lock.ok_or_else(|| RuntimeDirError::InUse { path: path.to_owned() })?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a new instance number for this start of the agent. It is greater than all earlier
    /// numbers, even if the clock was set back. If the file was lost, the clock ensures this.
    ///
    /// # Errors
    /// [`RuntimeDirError::Corrupt`] if the file does not contain a number, or
    /// [`RuntimeDirError::Io`].
    pub fn next_instance(&self) -> Result<InstanceId, RuntimeDirError> {
        let path = self.path.join("instance");
        let last = match read(&path)? {
            None => 0,
            Some(text) => parse_instance(&path, text)?,
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let clock = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        let next = last.saturating_add(1).max(clock);
        write_durably(&path, next.to_string().as_bytes())?;
        Ok(InstanceId(next))
    }

    /// Returns the UUID of the rack to which this host belongs; `None` if it has never been
    /// connected to a manager.
    ///
    /// # Errors
    /// [`RuntimeDirError::Corrupt`] if the file does not contain a UUID, or
    /// [`RuntimeDirError::Io`].
    pub fn rack(&self) -> Result<Option<String>, RuntimeDirError> {
        let path = self.path.join("rack");
        let Some(text) = read(&path)? else { return Ok(None) };
        let well_formed = (1..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
        if well_formed {
            Ok(Some(text))
        } else {
            Err(RuntimeDirError::Corrupt { path, text, rule: "the UUID of a rack" })
        }
    }

    /// Stores the UUID of the rack to which this host belongs.
    ///
    /// # Errors
    /// [`RuntimeDirError::Io`].
    pub fn store_rack(&self, rack: &str) -> Result<(), RuntimeDirError> {
        write_durably(&self.path.join("rack"), rack.as_bytes())
    }
}

/// Locks a file of `directory` until the result is dropped, and creates the file if it is missing.
/// Returns `None` if another process has locked the file.
pub(crate) fn lock_file(directory: &ProtectedDir, name: &str) -> Result<Option<File>, RuntimeDirError> {
    let file = directory.open_or_create_file(name)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(errno)) => Err(io_error("lock", directory.path().join(name))(errno)),
    }
}

fn parse_instance(path: &Path, text: String) -> Result<u64, RuntimeDirError> {
    let corrupt = |text| RuntimeDirError::Corrupt { path: path.to_owned(), text, rule: "a whole number" };
    text.parse().map_err(|_| corrupt(text))
}

pub(crate) fn read(path: &Path) -> Result<Option<String>, RuntimeDirError> {
    let Some(bytes) = read_state(path)? else { return Ok(None) };
    let text = String::from_utf8(bytes);
    let text = text.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "must be UTF-8"));
    text.map(Some).map_err(io_error("read", path))
}

/// Reads a file of the runtime directory. Returns `None` if it does not exist.
///
/// # Errors
/// [`RuntimeDirError::Io`] if the file cannot be read, is not a regular file, or has more than
/// [`STATE_FILE_BYTES_MAX`].
pub(crate) fn read_state(path: &Path) -> Result<Option<Vec<u8>>, RuntimeDirError> {
    match config_file::read_file(path, STATE_FILE_BYTES_MAX) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some).map_err(io_error("read", path)),
    }
}

/// Replaces the contents of a file atomically and durably. After a crash during the call, the file
/// has either its old or its new contents.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> Result<(), RuntimeDirError> {
    let new = path.with_extension("new");
    let mut file = create_temporary(&new)?;
    file.write_all(bytes).map_err(io_error("write", &new))?;
    file.sync_all().map_err(io_error("sync", &new))?;
    fs::rename(&new, path).map_err(io_error("replace", path))?;
    sync_parent_directory(path)
}

/// Creates a temporary file, after removing the file that an interrupted call left.
fn create_temporary(path: &Path) -> Result<File, RuntimeDirError> {
    match fs::remove_file(path) {
        Err(errno) if errno.kind() != io::ErrorKind::NotFound => return Err(io_error("remove", path)(errno)),
        _ => {}
    }
    // `create_new` is O_EXCL, which follows no symbolic link.
    let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    created.map_err(io_error("create", path))
}

/// Makes the creation, renaming or removal of a file durable, by syncing its directory.
pub(crate) fn sync_parent_directory(path: &Path) -> Result<(), RuntimeDirError> {
    let parent = path.parent().expect("a file is in a directory");
    let synced = File::open(parent).and_then(|directory| directory.sync_all());
    synced.map_err(io_error("sync", parent))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn runtime_dir_is_locked_by_one_agent_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = RuntimeDir::lock(dir.path()).unwrap();
        assert!(matches!(RuntimeDir::lock(dir.path()), Err(RuntimeDirError::InUse { .. })));
        drop(first);
        RuntimeDir::lock(dir.path()).unwrap();
    }

    #[test]
    fn instance_number_increases_despite_clock_setback() {
        let dir = tempfile::tempdir().unwrap();
        let runtime_dir = RuntimeDir::lock(dir.path()).unwrap();
        let first = runtime_dir.next_instance().unwrap();
        let second = runtime_dir.next_instance().unwrap();
        assert!(second > first);
        let future = u64::MAX / 2;
        fs::write(dir.path().join("instance"), future.to_string()).unwrap();
        assert_eq!(runtime_dir.next_instance().unwrap(), InstanceId(future + 1));
    }

    #[test]
    fn corrupt_file_is_an_error_with_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let runtime_dir = RuntimeDir::lock(dir.path()).unwrap();
        fs::write(dir.path().join("instance"), "12x").unwrap();
        fs::write(dir.path().join("rack"), "").unwrap();
        let instance = runtime_dir.next_instance().unwrap_err().to_string();
        assert!(instance.contains("instance contains \"12x\": must be a whole number"), "{instance}");
        let rack = runtime_dir.rack().unwrap_err().to_string();
        assert!(rack.contains("must be the UUID of a rack"), "{rack}");
    }

    #[test]
    fn irregular_or_endless_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let runtime_dir = RuntimeDir::lock(dir.path()).unwrap();
        let path = dir.path().join("instance");
        let error = || units::chain(&runtime_dir.next_instance().unwrap_err());
        make_fifo(&path);
        assert!(error().ends_with("instance: must be a regular file"), "{}", error());
        fs::remove_file(&path).unwrap();
        symlink("/dev/zero", &path).unwrap();
        assert!(error().ends_with("instance: must be a regular file"), "{}", error());
        fs::remove_file(&path).unwrap();
        File::create(&path).unwrap().set_len(STATE_FILE_BYTES_MAX as u64 + 1).unwrap();
        assert!(error().contains("must have at most"), "{}", error());
        fs::write(&path, [0xff]).unwrap();
        assert!(error().ends_with("instance: must be UTF-8"), "{}", error());
    }

    #[test]
    fn lock_that_is_not_a_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = || units::chain(&RuntimeDir::lock(dir.path()).unwrap_err());
        make_fifo(&dir.path().join("lock"));
        assert!(error().ends_with("lock: must be a regular file"), "{}", error());
        fs::remove_file(dir.path().join("lock")).unwrap();
        symlink(dir.path().join("missing"), dir.path().join("lock")).unwrap();
        assert!(error().ends_with("lock: must be a regular file"), "{}", error());
    }

    #[test]
    fn runtime_dir_that_others_can_change_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let error = units::chain(&RuntimeDir::lock(dir.path()).unwrap_err());
        assert!(error.starts_with("agent.runtime_dir: ") && error.contains("has mode 0777"), "{error}");
    }

    #[test]
    fn temporary_file_follows_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let runtime_dir = RuntimeDir::lock(dir.path()).unwrap();
        let other = dir.path().join("other");
        fs::write(&other, "precious").unwrap();
        symlink(&other, dir.path().join("rack.new")).unwrap();
        runtime_dir.store_rack("rack-1").unwrap();
        assert_eq!(fs::read_to_string(&other).unwrap(), "precious");
        assert_eq!(runtime_dir.rack().unwrap().as_deref(), Some("rack-1"));
        make_fifo(&dir.path().join("rack.new"));
        runtime_dir.store_rack("rack-2").unwrap();
        assert_eq!(runtime_dir.rack().unwrap().as_deref(), Some("rack-2"));
    }

    fn make_fifo(path: &Path) {
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, path, mode).unwrap();
    }

    #[test]
    fn stored_rack_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let runtime_dir = RuntimeDir::lock(dir.path()).unwrap();
        assert_eq!(runtime_dir.rack().unwrap(), None);
        runtime_dir.store_rack("rack-1").unwrap();
        assert_eq!(runtime_dir.rack().unwrap().as_deref(), Some("rack-1"));
    }
}
