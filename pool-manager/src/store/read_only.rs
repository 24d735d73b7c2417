//! Read-only access to the folder of a store. redb repairs an unclean store when it opens the file, so
//! it opens a temporary copy.

use std::{
    fs::{File, TryLockError},
    io,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use super::{
    StoreError,
    disk::{DATABASE_FILE, Disk, LOCK_FILE, StoreFile},
};
use crate::folder_access;

/// Copy of the ledger of a folder. The folder's lock file is locked until this value is dropped, if
/// it exists.
#[derive(Debug)]
pub struct ReadOnlyDirectory {
    file: PathBuf,
    copy: File,
    _lock: Option<File>,
}

impl ReadOnlyDirectory {
    /// Locks the folder of the ledger's store, and copies the ledger into an unnamed file in the
    /// folder for temporary files (`TMPDIR`). Creates no file in the store's folder: without a lock
    /// file, the folder is not locked.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if another process has locked the folder, [`StoreError::Missing`] if
    /// there is no ledger, or [`StoreError::Io`].
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let lock = match open_private_file(&path.join(LOCK_FILE)) {
            Err(errno) if errno.kind() == io::ErrorKind::NotFound => None,
            opened => Some(opened.map_err(StoreError::io_error("open the lock of", path))?),
        };
        match lock.as_ref().map_or(Ok(()), File::try_lock_shared) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StoreError::InUse { path: path.to_owned() }),
            Err(TryLockError::Error(errno)) => return Err(StoreError::io_error("lock", path)(errno)),
        }
        let file = path.join(DATABASE_FILE);
        let mut ledger = match open_private_file(&file) {
            Err(errno) if errno.kind() == io::ErrorKind::NotFound => {
                return Err(StoreError::Missing { path: file });
            }
            opened => opened.map_err(StoreError::io_error("open", &file))?,
        };
        let copy = tempfile::tempfile().and_then(|mut copy| io::copy(&mut ledger, &mut copy).map(|_| copy));
        let copy = copy.map_err(StoreError::io_error("copy the ledger to", &std::env::temp_dir()))?;
        Ok(Self { file, copy, _lock: lock })
    }
}

impl Disk for ReadOnlyDirectory {
    type Backend = StoreFile;

    fn open(&self) -> io::Result<StoreFile> {
        self.copy.try_clone().map(StoreFile::new)
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn file_path(&self) -> &Path {
        &self.file
    }
}

/// Opens an existing regular file read-only, if only root and the manager's user can access it.
/// Follows no symbolic link at `path`, and never waits.
fn open_private_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::LOOP => config_file::not_regular_error(),
        errno => errno.into(),
    });
    let file = config_file::check_regular(opened?.into())?;
    folder_access::check_private_file(&file, path)?;
    Ok(file)
}
