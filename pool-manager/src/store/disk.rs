//! Storage of a store: a directory of a file system, held by one process at a time. The store
//! interprets the file.

use std::{
    fs::{DirBuilder, File, OpenOptions, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use redb::StorageBackend;
use rustix::{fs::FallocateFlags, io::Errno};

use super::StoreError;

/// Name of the store's file in its directory.
pub const FILE: &str = "ledger.redb";
/// Name of the file whose lock permits the use of the directory.
pub const LOCK: &str = "lock";

/// Storage of a store.
pub trait Disk: Send {
    /// Open storage.
    type Backend: StorageBackend;

    /// Opens the storage, or creates an empty one.
    ///
    /// # Errors
    /// Those of the operating system.
    fn open(&self) -> io::Result<Self::Backend>;

    /// Returns the number of bytes that can still be written, or `None` without a limit.
    ///
    /// # Errors
    /// Those of the operating system.
    fn free_bytes(&self) -> io::Result<Option<u64>>;

    /// Returns the name in messages.
    fn place(&self) -> &Path;
}

/// Returns the number of bytes that this process can still write to the file system of a path.
///
/// # Errors
/// The file system cannot be examined.
pub fn free_bytes_at(path: &Path) -> io::Result<u64> {
    let free = rustix::fs::statvfs(path)?;
    Ok(free.f_bavail.saturating_mul(free.f_frsize))
}

/// Directory on a file system, locked against other processes until it is dropped.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    file: PathBuf,
    _lock: File,
}

impl Directory {
    /// Locks the directory, which is created with mode 0700 if it is missing.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if another process uses it, [`StoreError::Io`] if it cannot be created
    /// or locked.
    pub fn take(path: &Path) -> Result<Self, StoreError> {
        Self::take_for(path, FILE)
    }

    /// Locks the directory for a file other than the ledger's.
    ///
    /// # Errors
    /// As [`Directory::take`].
    pub fn take_for(path: &Path, file: &str) -> Result<Self, StoreError> {
        let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
        created.map_err(StoreError::io("create the directory of", path))?;
        let lock = private().create(true).open(path.join(LOCK));
        let lock = lock.map_err(StoreError::io("open the lock of", path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), file: path.join(file), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(StoreError::InUse { place: path.to_owned() }),
            Err(TryLockError::Error(errno)) => Err(StoreError::io("lock", path)(errno)),
        }
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Disk for Directory {
    type Backend = StoreFile;

    fn open(&self) -> io::Result<StoreFile> {
        open_file(&self.file)
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        free_bytes_at(&self.path).map(Some)
    }

    fn place(&self) -> &Path {
        &self.file
    }
}

/// File without a lock of its own, in a directory that the caller has locked: a backup or a store
/// that is being written.
#[derive(Debug)]
pub(super) struct UnlockedFile(pub(super) PathBuf);

impl Disk for UnlockedFile {
    type Backend = StoreFile;

    fn open(&self) -> io::Result<StoreFile> {
        open_file(&self.0)
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn place(&self) -> &Path {
        &self.0
    }
}

/// File of a store. Its space is allocated when it grows, so that it can be opened and repaired on
/// a disk that others have filled. The directory is locked, not the file.
#[derive(Debug)]
pub struct StoreFile(File);

impl StoreFile {
    /// Opens an existing file for reading only.
    pub(super) fn open_to_read(path: &Path) -> io::Result<Self> {
        File::open(path).map(Self)
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
            taken => Ok(taken?),
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }
}

fn open_file(path: &Path) -> io::Result<StoreFile> {
    let file = private().create(true).open(path)?;
    sync_parent(path)?;
    Ok(StoreFile(file))
}

/// Returns options for reading and writing by the owner only.
pub(crate) fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).truncate(false).mode(0o600);
    options
}

/// Makes the creation, renaming or removal of a file durable.
pub(crate) fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)?.sync_all()
}
