//! Runtime directory of the agent, which contains the lock file, the instance number and the rack
//! of this host. All contents are durable before they are used. [`crate::records`] handles the VM
//! records in it.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use units::InstanceId;

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
    /// Another agent has locked the directory.
    #[error("another host-agent uses {}", path.display())]
    InUse {
        /// Path of the directory.
        path: PathBuf,
    },
    /// A file has invalid contents.
    #[error("{} contains {text:?}: must be {rule}", path.display())]
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
    /// Creates the directory if it is missing, and locks it.
    ///
    /// # Errors
    /// [`RuntimeDirError::InUse`] if another agent has locked the directory, or
    /// [`RuntimeDirError::Io`].
    pub fn lock(path: &Path) -> Result<Self, RuntimeDirError> {
        create_dir(path)?;
        let lock = lock_file(&path.join("lock"))?;
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

/// Creates a directory and its parents, unless they exist. Other users may traverse them, for
/// example to reach a socket; each file has its own permissions.
pub(crate) fn create_dir(path: &Path) -> Result<(), RuntimeDirError> {
    let created = DirBuilder::new().recursive(true).mode(0o711).create(path);
    created.map_err(io_error("create", path))
}

/// Locks a file until the result is dropped, and creates the file if it is missing. Returns `None`
/// if another process has locked the file.
pub(crate) fn lock_file(path: &Path) -> Result<Option<File>, RuntimeDirError> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = file.map_err(io_error("open", path))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(errno)) => Err(io_error("lock", path)(errno)),
    }
}

fn parse_instance(path: &Path, text: String) -> Result<u64, RuntimeDirError> {
    let corrupt = |text| RuntimeDirError::Corrupt { path: path.to_owned(), text, rule: "a whole number" };
    text.parse().map_err(|_| corrupt(text))
}

fn read(path: &Path) -> Result<Option<String>, RuntimeDirError> {
    match fs::read_to_string(path) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some).map_err(io_error("read", path)),
    }
}

/// Replaces the contents of a file atomically and durably. After a crash during the call, the file
/// has either its old or its new contents.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> Result<(), RuntimeDirError> {
    let new = path.with_extension("new");
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(&new);
    let mut file = file.map_err(io_error("create", &new))?;
    file.write_all(bytes).map_err(io_error("write", &new))?;
    file.sync_all().map_err(io_error("sync", &new))?;
    fs::rename(&new, path).map_err(io_error("replace", path))?;
    sync_parent_directory(path)
}

/// Makes the creation, renaming or removal of a file durable, by syncing its directory.
pub(crate) fn sync_parent_directory(path: &Path) -> Result<(), RuntimeDirError> {
    let parent = path.parent().expect("a file is in a directory");
    let synced = File::open(parent).and_then(|directory| directory.sync_all());
    synced.map_err(io_error("sync", parent))
}

#[cfg(test)]
mod tests {
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
    fn stored_rack_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let runtime_dir = RuntimeDir::lock(dir.path()).unwrap();
        assert_eq!(runtime_dir.rack().unwrap(), None);
        runtime_dir.store_rack("rack-1").unwrap();
        assert_eq!(runtime_dir.rack().unwrap().as_deref(), Some("rack-1"));
    }
}
