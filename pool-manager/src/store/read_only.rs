//! Read-only access to the folder of a store. Repairs of an unclean store are kept in memory, so
//! that the files do not change.

use std::{
    collections::BTreeMap,
    fs::{File, TryLockError},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
};

use redb::StorageBackend;
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use units::limits::STORE_CHECK_CHANGED_BYTES_MAX;

use super::{
    StoreError,
    disk::{DATABASE_FILE, Disk, LOCK_FILE, StoreFile},
};
use crate::folder_access;

/// Unit in which changes are kept in memory, in bytes.
const PAGE_BYTES: usize = 4096;

/// Folder of a store. Its files are only read. Its lock file is locked until this value is dropped,
/// if it exists.
#[derive(Debug)]
pub struct ReadOnlyDirectory {
    file: PathBuf,
    contents: MemoryOverlay,
    _lock: Option<File>,
}

impl ReadOnlyDirectory {
    /// Locks the folder of the ledger's store and opens the ledger. Creates no file: without a lock
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
        let ledger = match open_private_file(&file) {
            Err(errno) if errno.kind() == io::ErrorKind::NotFound => {
                return Err(StoreError::Missing { path: file });
            }
            opened => opened.map_err(StoreError::io_error("open", &file))?,
        };
        let contents = MemoryOverlay::new(ledger).map_err(StoreError::io_error("read", &file))?;
        Ok(Self { file, contents, _lock: lock })
    }
}

impl Disk for ReadOnlyDirectory {
    type Backend = MemoryOverlay;

    fn open(&self) -> io::Result<MemoryOverlay> {
        Ok(self.contents.clone())
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

/// Contents of a file with changes that exist only in memory. Clones share the changes.
#[derive(Clone, Debug)]
pub struct MemoryOverlay {
    file: Arc<StoreFile>,
    changes: Arc<Mutex<Changes>>,
}

#[derive(Debug)]
struct Changes {
    /// Length of the changed contents, in bytes.
    len: u64,
    /// Number of bytes at the beginning of the file that are visible where no page has changed.
    file_len: u64,
    /// Changed pages, by page number.
    pages: BTreeMap<u64, [u8; PAGE_BYTES]>,
}

impl MemoryOverlay {
    fn new(file: File) -> io::Result<Self> {
        let file = StoreFile::new(file);
        let len = StorageBackend::len(&file)?;
        let changes = Changes { len, file_len: len, pages: BTreeMap::new() };
        Ok(Self { file: Arc::new(file), changes: Arc::new(Mutex::new(changes)) })
    }

    fn lock(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().expect("no thread panics under this lock")
    }

    fn read_page(&self, changes: &Changes, number: u64) -> io::Result<[u8; PAGE_BYTES]> {
        if let Some(page) = changes.pages.get(&number) {
            return Ok(*page);
        }
        let (mut page, start) = ([0; PAGE_BYTES], number * PAGE_BYTES as u64);
        let visible = usize::try_from(changes.file_len.saturating_sub(start)).unwrap_or(PAGE_BYTES);
        self.file.read(start, &mut page[..visible.min(PAGE_BYTES)])?;
        Ok(page)
    }
}

impl StorageBackend for MemoryOverlay {
    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().len)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let changes = self.lock();
        if offset.saturating_add(out.len() as u64) > changes.len {
            // The same error as for the file itself.
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "failed to fill whole buffer"));
        }
        for part in parts(offset, out.len()) {
            let page = self.read_page(&changes, part.page)?;
            out[part.in_data()].copy_from_slice(&page[part.in_page()]);
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut changes = self.lock();
        if len < changes.len {
            let (last, kept) = (len / PAGE_BYTES as u64, offset_in_page(len));
            drop(changes.pages.split_off(&(last + u64::from(kept > 0))));
            if let Some(page) = changes.pages.get_mut(&last) {
                page[kept..].fill(0);
            }
            changes.file_len = changes.file_len.min(len);
        }
        changes.len = len;
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut changes = self.lock();
        for part in parts(offset, data.len()) {
            changes.len = changes.len.max(offset + part.in_data().end as u64);
            let mut page = self.read_page(&changes, part.page)?;
            let (new, old) = (&data[part.in_data()], &mut page[part.in_page()]);
            if new == old {
                continue;
            }
            old.copy_from_slice(new);
            if changes.pages.len() >= STORE_CHECK_CHANGED_BYTES_MAX / PAGE_BYTES {
                let rule = format!("the repair must change at most {STORE_CHECK_CHANGED_BYTES_MAX} bytes");
                return Err(io::Error::new(io::ErrorKind::OutOfMemory, rule));
            }
            changes.pages.insert(part.page, page);
        }
        Ok(())
    }
}

/// Part of a range of bytes that is in one page.
#[derive(Clone, Copy, Debug)]
struct Part {
    page: u64,
    /// Offset in the page.
    start: usize,
    /// Offset in the range.
    at: usize,
    len: usize,
}

impl Part {
    fn in_page(self) -> std::ops::Range<usize> {
        self.start..self.start + self.len
    }

    fn in_data(self) -> std::ops::Range<usize> {
        self.at..self.at + self.len
    }
}

fn offset_in_page(position: u64) -> usize {
    usize::try_from(position % PAGE_BYTES as u64).expect("an offset in a page is small")
}

/// Divides the range of `len` bytes at `offset` at the boundaries of pages.
fn parts(offset: u64, len: usize) -> impl Iterator<Item = Part> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let position = offset + at as u64;
        let start = offset_in_page(position);
        let part =
            Part { page: position / PAGE_BYTES as u64, start, at, len: (len - at).min(PAGE_BYTES - start) };
        at += part.len;
        (part.len > 0).then_some(part)
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;
    use crate::test_files::write_private_file;

    /// Operation on the contents of a file.
    #[derive(Clone, Debug)]
    enum Operation {
        Write(u64, Vec<u8>),
        SetLen(u64),
    }

    fn operation() -> impl Strategy<Value = Operation> {
        let data = proptest::collection::vec(any::<u8>(), 0..3 * PAGE_BYTES);
        prop_oneof![
            (0..5 * PAGE_BYTES as u64, data).prop_map(|(offset, data)| Operation::Write(offset, data)),
            (0..6 * PAGE_BYTES as u64).prop_map(Operation::SetLen),
        ]
    }

    proptest! {
        #[test]
        fn overlay_behaves_like_a_file_and_does_not_change_it(
            len in 0..4 * PAGE_BYTES,
            operations in proptest::collection::vec(operation(), 0..8),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let (path, copy) = (folder.path().join("file"), folder.path().join("copy"));
            let before: Vec<u8> = (0..len).map(|i| u8::try_from(i % 251).unwrap()).collect();
            write_private_file(&path, &before);
            write_private_file(&copy, &before);
            let overlay = MemoryOverlay::new(open_private_file(&path).unwrap()).unwrap();
            let file = StoreFile::new(File::options().read(true).write(true).open(&copy).unwrap());
            for operation in operations {
                match operation {
                    Operation::Write(offset, data) => {
                        overlay.write(offset, &data).unwrap();
                        if !data.is_empty() {
                            file.write(offset, &data).unwrap();
                        }
                    }
                    Operation::SetLen(len) => {
                        overlay.set_len(len).unwrap();
                        file.set_len(len).unwrap();
                    }
                }
            }
            let expected = fs::read(&copy).unwrap();
            let mut contents = vec![0; expected.len()];
            overlay.clone().read(0, &mut contents).unwrap();
            prop_assert!(contents == expected);
            prop_assert!(overlay.read(1, &mut contents).is_err() || contents.is_empty());
            prop_assert!(fs::read(&path).unwrap() == before);
        }
    }

    #[test]
    fn overlay_keeps_only_changed_pages() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write_private_file(&path, [7; 3 * PAGE_BYTES]);
        let overlay = MemoryOverlay::new(open_private_file(&path).unwrap()).unwrap();
        overlay.write(0, &[7; 3 * PAGE_BYTES]).unwrap();
        assert!(overlay.lock().pages.is_empty());
        overlay.write(PAGE_BYTES as u64, &[8]).unwrap();
        assert_eq!(overlay.lock().pages.keys().collect::<Vec<_>>(), [&1]);
    }
}
