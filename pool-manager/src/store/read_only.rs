//! Read-only access to the folder of a store. redb repairs an unclean store when it opens the file, so
//! it opens a temporary copy.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use super::{
    StoreError,
    disk::{DATABASE_FILE, Disk, LOCK_FILE, StoreFile, lock_error, open_private_file_read_only},
};

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
        let lock = match open_private_file_read_only(&path.join(LOCK_FILE)) {
            Err(errno) if errno.kind() == io::ErrorKind::NotFound => None,
            opened => Some(opened.map_err(StoreError::io_error("open the lock of", path))?),
        };
        lock.as_ref().map_or(Ok(()), File::try_lock_shared).map_err(lock_error(path))?;
        let file = path.join(DATABASE_FILE);
        let mut ledger = match open_private_file_read_only(&file) {
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
