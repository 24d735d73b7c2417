//! The agent's directory: lock of one agent at a time, instance number, and rack of this host. Its
//! contents are durable before they are used. Records of VMs are in [`crate::records`].

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use units::InstanceId;

/// Reason why the directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeDirError {
    /// The operating system rejected an operation.
    #[error("{doing} {}", path.display())]
    Io {
        /// Operation.
        doing: &'static str,
        /// Object.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// Another agent serves this host.
    #[error("another host-agent uses {}", path.display())]
    InUse {
        /// Directory.
        path: PathBuf,
    },
    /// A file has invalid contents.
    #[error("{} holds {text:?}: must be {rule}", path.display())]
    Corrupt {
        /// File.
        path: PathBuf,
        /// Contents.
        text: String,
        /// Rule.
        rule: &'static str,
    },
}

pub(crate) fn io_error(
    doing: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(io::Error) -> RuntimeDirError {
    let path = path.into();
    move |errno| RuntimeDirError::Io { doing, path, errno }
}

/// Directory, locked until this is dropped.
#[derive(Debug)]
pub struct RuntimeDir {
    path: PathBuf,
    _lock: File,
}

impl RuntimeDir {
    /// Creates the directory if it is missing, and locks it.
    ///
    /// # Errors
    /// [`RuntimeDirError::InUse`], or the error of the operating system.
    pub fn lock(path: &Path) -> Result<Self, RuntimeDirError> {
        // Others may traverse it, for the socket in it; each file has its own permissions.
        let created = DirBuilder::new().recursive(true).mode(0o711).create(path);
        created.map_err(io_error("make", path))?;
        let lock_path = path.join("lock");
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&lock_path);
        let lock = file.map_err(io_error("open", &lock_path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(RuntimeDirError::InUse { path: path.to_owned() }),
            Err(TryLockError::Error(errno)) => Err(io_error("lock", lock_path)(errno)),
        }
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of this start, which is greater than all earlier ones, even if the clock
    /// was set back or the file was lost.
    ///
    /// # Errors
    /// The file is not a number, or the operating system rejected an operation.
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

    /// Returns the rack that this host has served before.
    ///
    /// # Errors
    /// The file is invalid, or the operating system rejected an operation.
    pub fn rack(&self) -> Result<Option<String>, RuntimeDirError> {
        let path = self.path.join("rack");
        let Some(text) = read(&path)? else { return Ok(None) };
        let well_formed = (1..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
        if well_formed {
            Ok(Some(text))
        } else {
            Err(RuntimeDirError::Corrupt { path, text, rule: "a rack's uuid" })
        }
    }

    /// Stores the rack that this host serves.
    ///
    /// # Errors
    /// The operating system rejected an operation.
    pub fn store_rack(&self, rack: &str) -> Result<(), RuntimeDirError> {
        write_durably(&self.path.join("rack"), rack.as_bytes())
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

/// Replaces a file atomically: after a crash it has either the old or the new contents, and after
/// the return the new ones.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> Result<(), RuntimeDirError> {
    let new = path.with_extension("new");
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(&new);
    let mut file = file.map_err(io_error("make", &new))?;
    file.write_all(bytes).map_err(io_error("write", &new))?;
    file.sync_all().map_err(io_error("sync", &new))?;
    fs::rename(&new, path).map_err(io_error("rename to", path))?;
    sync_parent(path)
}

/// Makes creations, renames and removals in a directory durable.
pub(crate) fn sync_parent(path: &Path) -> Result<(), RuntimeDirError> {
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
        assert!(instance.contains("instance holds \"12x\": must be a whole number"), "{instance}");
        let rack = runtime_dir.rack().unwrap_err().to_string();
        assert!(rack.contains("must be a rack's uuid"), "{rack}");
    }

    #[test]
    fn rack_is_stored() {
        let dir = tempfile::tempdir().unwrap();
        let runtime_dir = RuntimeDir::lock(dir.path()).unwrap();
        assert_eq!(runtime_dir.rack().unwrap(), None);
        runtime_dir.store_rack("rack-1").unwrap();
        assert_eq!(runtime_dir.rack().unwrap().as_deref(), Some("rack-1"));
    }
}
