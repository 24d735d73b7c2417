//! Store in one redb file. Each batch needs only one sync, because checksums of redb's pages
//! distinguish a complete commit from a torn one.
//!
//! All tables of the store share one redb table and use separate key ranges, because each redb
//! table in a commit writes additional pages. Most commits write the newest decisions, the metadata
//! and the newest reservations. These entries have adjacent keys.

use std::{
    cell::Cell,
    fmt,
    io::{self, Read as _},
    panic::{self, AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Once,
};

use ::redb::{
    Database, DatabaseError, ReadTransaction, ReadableDatabase, RepairSession, StorageBackend,
    TableDefinition, TableError, TableHandle,
};
use units::limits::STORE_CACHE_BYTES;

use super::{
    Scan, Store, StoreError, Table, Write, check_format,
    disk::{DATABASE_FILE, Directory, Disk, StoreFile},
    read_only::ReadOnlyDirectory,
    redb_header::Header,
};

/// Size of the chunks in which a file is rewritten after a failure, in bytes. Chunks of zeros are
/// skipped, so that holes in the file are preserved.
const REWRITE_CHUNK_BYTES: usize = 64 << 10;
/// Size of the first page in bytes. The page contains redb's header, which begins with the magic
/// number.
const HEADER_PAGE_BYTES: u64 = 4096;
/// Magic number of redb's files. redb writes it last when it creates a file.
const MAGIC_NUMBER: [u8; 9] = *b"redb\x1a\x0a\xa9\x0d\x0a";

/// redb table with all entries. Each key begins with the [`Table::tag`].
const ENTRIES: TableDefinition<'static, &'static [u8], &'static [u8]> = TableDefinition::new("facts");

/// Store in a redb database on a [`Disk`].
pub struct RedbStore<D: Disk = Directory> {
    disk: D,
    /// Open database; `None` after a failure until the store is reopened.
    database: Option<Database>,
}

impl<D: Disk> fmt::Debug for RedbStore<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedbStore").field("path", &self.disk.file_path()).finish_non_exhaustive()
    }
}

impl RedbStore<Directory> {
    /// Locks a directory and opens its store, or creates an empty store.
    ///
    /// # Errors
    /// Returns any [`StoreError`] except `Poisoned`.
    pub fn open_directory(path: &Path) -> Result<Self, StoreError> {
        Self::open(Directory::lock(path)?)
    }

    /// Locks a directory and opens its store, which must exist.
    ///
    /// # Errors
    /// [`StoreError::Missing`] if there is no store, [`StoreError::Io`] if the operating system
    /// does not report whether there is one, or an error of [`RedbStore::open_directory`].
    pub fn open_existing(path: &Path) -> Result<Self, StoreError> {
        let file = path.join(DATABASE_FILE);
        let exists = file.try_exists().map_err(StoreError::io_error("find", &file))?;
        if exists { Self::open_directory(path) } else { Err(StoreError::Missing { path: file }) }
    }
}

impl RedbStore<ReadOnlyDirectory> {
    /// Opens a copy of the existing store of a directory, and changes no file of the directory.
    ///
    /// # Errors
    /// An error of [`ReadOnlyDirectory::open`] or [`RedbStore::open`].
    pub fn open_read_only(path: &Path) -> Result<Self, StoreError> {
        Self::open(ReadOnlyDirectory::open(path)?)
    }
}

impl<D: Disk> RedbStore<D> {
    /// Opens the store on a disk and verifies the checksums of all pages, or creates an empty
    /// store.
    ///
    /// # Errors
    /// Returns any [`StoreError`] except `Poisoned`.
    pub fn open(disk: D) -> Result<Self, StoreError> {
        let database = open(&disk)?;
        check_tables(&database, disk.file_path())?;
        let mut store = Self { disk, database: Some(database) };
        let path = store.disk.file_path().to_owned();
        check_format(&mut store, &path)?;
        Ok(store)
    }

    /// Closes the database. Errors are only logged: redb can detect damage while it closes.
    fn close(&mut self) {
        let (path, database) = (self.disk.file_path(), self.database.take());
        if let Err(error) = catch_redb_panic(path, "close", || {
            drop(database);
            Ok(())
        }) {
            tracing::warn!(%error, "cannot close the store cleanly");
        }
    }

    fn read(&self) -> Result<Snapshot, StoreError> {
        let path = self.disk.file_path();
        let database = self.database.as_ref().ok_or_else(|| poisoned_error(path))?;
        let transaction = catch_redb_panic(path, "read", || Ok(database.begin_read()?))?;
        Ok(Snapshot { transaction, path: path.to_owned() })
    }

    /// Returns the disk of the store.
    pub fn disk(&self) -> &D {
        &self.disk
    }
}

impl<D: Disk> Drop for RedbStore<D> {
    fn drop(&mut self) {
        self.close();
    }
}

/// Consistent snapshot of a store.
pub struct Snapshot {
    transaction: ReadTransaction,
    path: PathBuf,
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Scan for Snapshot {
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        let transaction = &self.transaction;
        catch_redb_panic(&self.path, "read", || scan(transaction, table, each))
    }
}

impl<D: Disk> Scan for RedbStore<D> {
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        self.read()?.scan(table, each)
    }
}

impl<D: Disk> Store for RedbStore<D> {
    fn commit(&mut self, batch: &[Write]) -> Result<(), StoreError> {
        let path = self.disk.file_path();
        let database = self.database.as_ref().ok_or_else(|| poisoned_error(path))?;
        let result = catch_redb_panic(path, "write", || commit(database, batch));
        if result.is_err() {
            self.close();
        }
        result
    }

    fn reopen(&mut self) -> Result<(), StoreError> {
        self.close();
        self.database = Some(open(&self.disk)?);
        let path = self.disk.file_path().to_owned();
        check_format(self, &path).inspect_err(|_| self.close())
    }

    fn snapshot(&self) -> Result<Box<dyn Scan>, StoreError> {
        Ok(Box::new(self.read()?))
    }

    fn free_bytes(&self) -> Result<Option<u64>, StoreError> {
        self.disk.free_bytes().map_err(StoreError::io_error("get the free space of", self.disk.file_path()))
    }
}

/// Opens the database, unless its newest commit is damaged. If the database was not closed cleanly,
/// a write or sync of the previous process may have failed. In this case the file is rewritten
/// before redb repairs it.
fn open<D: Disk>(disk: &D) -> Result<Database, StoreError> {
    catch_redb_panic(disk.file_path(), "open", || {
        let mut builder = Database::builder();
        builder.set_cache_size(STORE_CACHE_BYTES).set_repair_callback(RepairSession::abort);
        let backend = disk.open()?;
        reset_unfinished_file(&backend)?;
        if let Some(header) = Header::read(&backend)? {
            header.find_damage().map_or(Ok(()), |what| Err(::redb::Error::Corrupted(what)))?;
            if header.select_newer_commit(&backend)? {
                tracing::warn!(path = %disk.file_path().display(), "the header of the store selected an older commit; selected the newest one");
            }
        }
        match builder.create_with_backend(backend) {
            Err(DatabaseError::RepairAborted) => {
                rewrite_file(&disk.open()?)?;
                Ok(builder.set_repair_callback(|_| ()).create_with_backend(disk.open()?)?)
            }
            opened => check_integrity(opened?),
        }
    })
}

/// Rejects a database with unknown tables, which would otherwise look like an empty store.
fn check_tables(database: &Database, path: &Path) -> Result<(), StoreError> {
    let tables = catch_redb_panic(path, "read", || {
        let transaction = database.begin_read()?;
        let tables = transaction.list_tables()?;
        Ok(tables.map(|table| table.name().to_owned()).collect::<Vec<_>>())
    })?;
    match tables.into_iter().find(|name| name != ENTRIES.name()) {
        None => Ok(()),
        Some(name) => {
            let what = format!("table {name:?} is unknown to this version of pool-manager");
            Err(StoreError::Corrupt { path: path.to_owned(), what })
        }
    }
}

/// Verifies all pages, because redb does not verify them when it opens a cleanly closed file.
fn check_integrity(mut database: Database) -> Result<Database, ::redb::Error> {
    if !database.check_integrity()? {
        tracing::warn!("repaired the store");
    }
    Ok(database)
}

/// Truncates a file whose creation was interrupted, because redb would reject the file. Such a file
/// has no magic number and only zeros after the header, and never contained entries.
fn reset_unfinished_file(backend: &impl StorageBackend) -> io::Result<()> {
    let must_reset = backend.len()? > 0 && is_unfinished_file(backend)?;
    if must_reset { backend.set_len(0) } else { Ok(()) }
}

/// Contents of a store's file, as far as they are known without opening the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileContents {
    /// The file does not exist.
    Missing,
    /// The file is empty, or its creation was interrupted. It never contained entries.
    Blank,
    /// The file is not empty and has only zeros: its contents are lost, or its creation was
    /// interrupted.
    Zeros,
    /// The file has other contents.
    Other,
}

/// Determines the contents of a store's file. Does not change the file.
///
/// # Errors
/// [`StoreError::Io`] if the file cannot be read.
pub fn inspect_file(file: &Path) -> Result<FileContents, StoreError> {
    match StoreFile::open_read_only(file) {
        Ok(backend) => inspect_contents(&backend).map_err(StoreError::io_error("read", file)),
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(FileContents::Missing),
        Err(errno) => Err(StoreError::io_error("open", file)(errno)),
    }
}

fn inspect_contents(backend: &impl StorageBackend) -> io::Result<FileContents> {
    let len = backend.len()?;
    if !is_unfinished_file(backend)? {
        return Ok(FileContents::Other);
    }
    let header = read_chunk(backend, 0, len.min(HEADER_PAGE_BYTES))?;
    Ok(if len > 0 && is_zero(&header) { FileContents::Zeros } else { FileContents::Blank })
}

/// Returns whether a regular file begins like a store or a backup.
///
/// # Errors
/// Returns the error of the operating system if the file cannot be opened or read.
pub fn is_store_file(file: &Path) -> io::Result<bool> {
    let mut beginning = Vec::new();
    config_file::open_regular(file)?.take(MAGIC_NUMBER.len() as u64).read_to_end(&mut beginning)?;
    Ok(beginning == MAGIC_NUMBER)
}

fn is_unfinished_file(backend: &impl StorageBackend) -> io::Result<bool> {
    let len = backend.len()?;
    let mut only_zeros = is_zero(&read_chunk(backend, 0, len.min(MAGIC_NUMBER.len() as u64))?);
    let mut at = HEADER_PAGE_BYTES;
    while only_zeros && at < len {
        let chunk = read_chunk(backend, at, len)?;
        only_zeros = is_zero(&chunk);
        at += chunk.len() as u64;
    }
    Ok(only_zeros)
}

/// Reads and rewrites the whole file, and syncs it. After a failed sync, the page cache can contain
/// data that is marked as clean but is not on disk. Checksums of redb detect data that was lost
/// from the cache.
fn rewrite_file(backend: &impl StorageBackend) -> io::Result<()> {
    let len = backend.len()?;
    let mut at = 0;
    while at < len {
        let chunk = read_chunk(backend, at, len)?;
        if !is_zero(&chunk) {
            backend.write(at, &chunk)?;
        }
        at += chunk.len() as u64;
    }
    backend.sync_data()
}

fn read_chunk(backend: &impl StorageBackend, at: u64, len: u64) -> io::Result<Vec<u8>> {
    let rest = usize::try_from(len - at).unwrap_or(REWRITE_CHUNK_BYTES);
    let mut chunk = vec![0; rest.min(REWRITE_CHUNK_BYTES)];
    backend.read(at, &mut chunk)?;
    Ok(chunk)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|b| *b == 0)
}

fn scan(
    transaction: &ReadTransaction,
    table: Table,
    each: &mut dyn FnMut(&[u8], &[u8]),
) -> Result<(), ::redb::Error> {
    let entries = match transaction.open_table(ENTRIES) {
        Err(TableError::TableDoesNotExist(_)) => return Ok(()),
        opened => opened?,
    };
    let (first, end) = ([table.tag()], [table.tag() + 1]);
    for entry in entries.range::<&[u8]>(first.as_slice()..end.as_slice())? {
        let (key, value) = entry?;
        each(&key.value()[first.len()..], value.value());
    }
    Ok(())
}

fn commit(database: &Database, batch: &[Write]) -> Result<(), ::redb::Error> {
    let transaction = database.begin_write()?;
    let mut entries = transaction.open_table(ENTRIES)?;
    let mut prefixed_key = Vec::new();
    for write in batch {
        let (Write::Put { table, key, .. } | Write::Delete { table, key }) = write;
        prefixed_key.clear();
        prefixed_key.push(table.tag());
        prefixed_key.extend_from_slice(key);
        match write {
            Write::Put { value, .. } => drop(entries.insert(prefixed_key.as_slice(), value.as_slice())?),
            Write::Delete { .. } => drop(entries.remove(prefixed_key.as_slice())?),
        }
    }
    drop(entries);
    Ok(transaction.commit()?)
}

fn poisoned_error(path: &Path) -> StoreError {
    StoreError::Poisoned { path: path.to_owned() }
}

thread_local! {
    /// Whether this thread currently runs code of redb.
    static IN_REDB: Cell<bool> = const { Cell::new(false) };
}

/// Runs a call of redb. Converts a panic into [`StoreError::Corrupt`] without printing it, because
/// a damaged file can violate assertions in redb.
fn catch_redb_panic<T>(
    path: &Path,
    operation: &'static str,
    run: impl FnOnce() -> Result<T, ::redb::Error>,
) -> Result<T, StoreError> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IN_REDB.get() {
                previous(info)
            }
        }));
    });
    IN_REDB.set(true);
    // After a panic only the redb database can be inconsistent, and callers drop it after an error.
    let result = catch_unwind(AssertUnwindSafe(run));
    IN_REDB.set(false);
    match result {
        Ok(result) => result.map_err(|error| store_error(path, operation, error)),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            let what = format!("cannot {operation}: assertion in redb failed: {text}");
            Err(StoreError::Corrupt { path: path.to_owned(), what })
        }
    }
}

fn store_error(path: &Path, operation: &'static str, error: ::redb::Error) -> StoreError {
    use io::ErrorKind::{InvalidData, UnexpectedEof};
    let path = path.to_owned();
    match error {
        ::redb::Error::DatabaseAlreadyOpen => StoreError::InUse { path },
        ::redb::Error::PreviousIo | ::redb::Error::LockPoisoned(_) => StoreError::Poisoned { path },
        ::redb::Error::Io(errno) if !matches!(errno.kind(), InvalidData | UnexpectedEof) => {
            StoreError::Io { operation, path, errno }
        }
        other => StoreError::Corrupt { path, what: other.to_string() },
    }
}
