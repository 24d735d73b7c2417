//! File access of a store, in a directory that one process locks at a time. `redb` defines the
//! contents of the file.

use std::{
    fs::{DirBuilder, File, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, FileExt},
    path::{Path, PathBuf},
};

use redb::StorageBackend;
use rustix::{
    fs::{FallocateFlags, Mode, OFlags},
    io::Errno,
};

use super::StoreError;
use crate::folder_access;

/// Name of the store's database file in its directory.
pub const DATABASE_FILE: &str = "ledger.redb";
/// Name of the file that a process locks to use the directory.
pub const LOCK_FILE: &str = "lock";

/// Storage for the bytes of a store. Tests use a simulated disk.
pub trait Disk: Send {
    /// Handle of the open storage, as redb requires it.
    type Backend: StorageBackend;

    /// Opens the storage, or creates an empty one.
    ///
    /// # Errors
    /// Returns the error of the operating system.
    fn open(&self) -> io::Result<Self::Backend>;

    /// Returns the free space in bytes, or `None` if there is no limit.
    ///
    /// # Errors
    /// Returns the error of the operating system.
    fn free_bytes(&self) -> io::Result<Option<u64>>;

    /// Returns the path that identifies the storage in messages.
    fn file_path(&self) -> &Path;
}

/// Returns the free space on the file system of `path` for this process, in bytes.
///
/// # Errors
/// Returns the error of the operating system if the file system cannot be examined.
pub fn free_bytes_at(path: &Path) -> io::Result<u64> {
    let free = rustix::fs::statvfs(path)?;
    Ok(free.f_bavail.saturating_mul(free.f_frsize))
}

/// Directory that is locked against other processes until this value is dropped.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    file: PathBuf,
    _lock: File,
}

impl Directory {
    /// Locks the directory of the ledger's store. Creates a missing directory with mode 0700.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if another process has locked the directory, [`StoreError::Io`] if the
    /// directory cannot be created or locked.
    pub fn lock(path: &Path) -> Result<Self, StoreError> {
        Self::lock_with_file(path, DATABASE_FILE)
    }

    /// Locks a directory for a store with another file name.
    ///
    /// # Errors
    /// Returns the same errors as [`Directory::lock`].
    pub fn lock_with_file(path: &Path, file: &str) -> Result<Self, StoreError> {
        let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
        created.map_err(StoreError::io_error("create the directory of", path))?;
        let lock = open_private_file(&path.join(LOCK_FILE));
        let lock = lock.map_err(StoreError::io_error("open the lock of", path))?;
        lock.try_lock().map_err(lock_error(path))?;
        Ok(Self { path: path.to_owned(), file: path.join(file), _lock: lock })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Disk for Directory {
    type Backend = StoreFile;

    fn open(&self) -> io::Result<StoreFile> {
        open_private_file(&self.file).and_then(|file| to_store_file(file, &self.file))
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        free_bytes_at(&self.path).map(Some)
    }

    fn file_path(&self) -> &Path {
        &self.file
    }
}

/// File that is opened without a lock, such as a backup, or a new store in a directory that the
/// caller has locked.
#[derive(Debug)]
pub(super) struct UnlockedFile(pub(super) PathBuf);

impl Disk for UnlockedFile {
    type Backend = StoreFile;

    /// Does not check the mode of the file, because a backup can be on a file system without modes.
    fn open(&self) -> io::Result<StoreFile> {
        open_or_create_file(&self.0).and_then(|file| to_store_file(file, &self.0))
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn file_path(&self) -> &Path {
        &self.0
    }
}

/// Open file of a store. Disk space is allocated when the file grows, so that a store can be opened
/// and repaired on a full disk.
#[derive(Debug)]
pub struct StoreFile(File);

impl StoreFile {
    /// Returns the storage in an open file.
    pub(super) fn new(file: File) -> Self {
        Self(file)
    }

    /// Opens an existing file read-only.
    pub(super) fn open_read_only(path: &Path) -> io::Result<Self> {
        config_file::open_regular(path).map(Self)
    }
}

impl StorageBackend for StoreFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let before = StorageBackend::len(self)?;
        if len <= before {
            return self.0.set_len(len);
        }
        match rustix::fs::fallocate(&self.0, FallocateFlags::empty(), before, len - before) {
            Err(Errno::OPNOTSUPP) => self.0.set_len(len),
            allocated => Ok(allocated?),
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }
}

/// Converts the failure to lock the directory `path`.
pub(super) fn lock_error(path: &Path) -> impl Fn(TryLockError) -> StoreError {
    |error| match error {
        TryLockError::WouldBlock => StoreError::InUse { path: path.to_owned() },
        TryLockError::Error(errno) => StoreError::io_error("lock", path)(errno),
    }
}

fn to_store_file(file: File, path: &Path) -> io::Result<StoreFile> {
    sync_parent_directory(path)?;
    Ok(StoreFile(file))
}

/// Opens a file that only root and the manager's user can access, as [`open_or_create_file`].
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] if other users can access the file, or an error of
/// [`open_or_create_file`].
pub(crate) fn open_private_file(path: &Path) -> io::Result<File> {
    let file = open_or_create_file(path)?;
    folder_access::check_private_file(&file, path)?;
    Ok(file)
}

/// Opens an existing file read-only, if only root and the manager's user can access it.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] if other users can access the file, or an error of
/// [`open_file`].
pub(super) fn open_private_file_read_only(path: &Path) -> io::Result<File> {
    let file = open_file(path, OFlags::RDONLY)?;
    folder_access::check_private_file(&file, path)?;
    Ok(file)
}

/// Opens a regular file for reading and writing, or creates it with mode 0600.
///
/// # Errors
/// Errors of [`open_file`].
fn open_or_create_file(path: &Path) -> io::Result<File> {
    open_file(path, OFlags::RDWR | OFlags::CREATE)
}

/// Opens a regular file. Follows no symbolic link at `path`, and never waits. A created file has mode
/// 0600.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] if `path` is not a regular file, or another error of the
/// operating system.
fn open_file(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR);
    config_file::check_regular(opened.map(File::from).map_err(|errno| match errno {
        Errno::LOOP => config_file::not_regular_error(),
        errno => errno.into(),
    })?)
}

/// Syncs the parent directory of `path`, to make the creation, renaming or removal of the file
/// durable.
pub(crate) fn sync_parent_directory(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)?.sync_all()
}
