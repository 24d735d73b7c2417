//! Store in one redb file. One durable write per batch: redb checksums its pages, so that one sync
//! distinguishes a complete commit from a torn one.
//!
//! All tables share one table of redb, each with a range of its keys, because each redb table in a
//! commit costs additional pages. The newest decisions, the state of the whole store and the newest
//! reservations, which most commits write, have adjacent keys.

use std::{
    cell::Cell,
    fmt, io,
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
    disk::{Directory, Disk, FILE, StoreFile},
};

/// Bytes rewritten at a time after a failure; chunks of zeros are skipped, so that holes remain.
const REWRITE_BYTES: usize = 64 << 10;
/// Size of the first page, which contains redb's header with the magic number first.
const HEADER_BYTES: u64 = 4096;
/// Length of redb's magic number, which is written last when a file is created.
const MAGIC_BYTES: usize = 9;

/// All entries, with keys that begin with the [`Table::tag`].
const ENTRIES: TableDefinition<'static, &'static [u8], &'static [u8]> = TableDefinition::new("facts");

/// Store on a [`Disk`].
pub struct RedbStore<D: Disk = Directory> {
    disk: D,
    /// `None` after a failure until the store is reopened.
    database: Option<Database>,
}

impl<D: Disk> fmt::Debug for RedbStore<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedbStore").field("place", &self.disk.place()).finish_non_exhaustive()
    }
}

impl RedbStore<Directory> {
    /// Opens the store in a directory, or creates an empty one.
    ///
    /// # Errors
    /// Every kind of [`StoreError`] but `Poisoned`.
    pub fn open_directory(path: &Path) -> Result<Self, StoreError> {
        Self::open(Directory::take(path)?)
    }

    /// Opens the existing store in a directory.
    ///
    /// # Errors
    /// [`StoreError::Missing`] without a store, otherwise as [`RedbStore::open_directory`].
    pub fn open_existing(path: &Path) -> Result<Self, StoreError> {
        let place = path.join(FILE);
        if place.exists() { Self::open_directory(path) } else { Err(StoreError::Missing { place }) }
    }
}

impl<D: Disk> RedbStore<D> {
    /// Opens the store on a disk and checks every page against its checksum, or creates an empty
    /// one.
    ///
    /// # Errors
    /// Every kind of [`StoreError`] but `Poisoned`.
    pub fn open(disk: D) -> Result<Self, StoreError> {
        let database = open(&disk)?;
        check_tables(&database, disk.place())?;
        let mut store = Self { disk, database: Some(database) };
        let place = store.disk.place().to_owned();
        check_format(&mut store, &place)?;
        Ok(store)
    }

    /// Closes the database; redb may detect damage during its cleanup.
    fn close(&mut self) {
        let (place, database) = (self.disk.place(), self.database.take());
        if let Err(error) = catch_redb_panic(place, "close", || {
            drop(database);
            Ok(())
        }) {
            tracing::warn!(%error, "cannot close store cleanly");
        }
    }

    fn read(&self) -> Result<Snapshot, StoreError> {
        let place = self.disk.place();
        let database = self.database.as_ref().ok_or_else(|| poisoned(place))?;
        let transaction = catch_redb_panic(place, "read", || Ok(database.begin_read()?))?;
        Ok(Snapshot { transaction, place: place.to_owned() })
    }

    /// Returns the disk.
    pub fn disk(&self) -> &D {
        &self.disk
    }
}

impl<D: Disk> Drop for RedbStore<D> {
    fn drop(&mut self) {
        self.close();
    }
}

/// Snapshot of a store.
pub struct Snapshot {
    transaction: ReadTransaction,
    place: PathBuf,
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Scan for Snapshot {
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        let transaction = &self.transaction;
        catch_redb_panic(&self.place, "read", || scan(transaction, table, each))
    }
}

impl<D: Disk> Scan for RedbStore<D> {
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        self.read()?.scan(table, each)
    }
}

impl<D: Disk> Store for RedbStore<D> {
    fn commit(&mut self, batch: &[Write]) -> Result<(), StoreError> {
        let place = self.disk.place();
        let database = self.database.as_ref().ok_or_else(|| poisoned(place))?;
        let result = catch_redb_panic(place, "write", || commit(database, batch));
        if result.is_err() {
            self.close();
        }
        result
    }

    fn reopen(&mut self) -> Result<(), StoreError> {
        self.close();
        self.database = Some(open(&self.disk)?);
        let place = self.disk.place().to_owned();
        check_format(self, &place).inspect_err(|_| self.close())
    }

    fn snapshot(&self) -> Result<Box<dyn Scan>, StoreError> {
        Ok(Box::new(self.read()?))
    }

    fn free_bytes(&self) -> Result<Option<u64>, StoreError> {
        self.disk.free_bytes().map_err(StoreError::io("get the free space of", self.disk.place()))
    }
}

/// Opens the database. If it was not closed, a write or sync of the previous process may have
/// failed, and the file is rewritten before the repair.
fn open<D: Disk>(disk: &D) -> Result<Database, StoreError> {
    catch_redb_panic(disk.place(), "open", || {
        let mut builder = Database::builder();
        builder.set_cache_size(STORE_CACHE_BYTES).set_repair_callback(RepairSession::abort);
        let backend = disk.open()?;
        reset_unfinished_file(&backend)?;
        match builder.create_with_backend(backend) {
            Err(DatabaseError::RepairAborted) => {
                rewrite(&disk.open()?)?;
                Ok(builder.set_repair_callback(|_| ()).create_with_backend(disk.open()?)?)
            }
            opened => check_integrity(opened?),
        }
    })
}

/// Rejects a file with other tables, which would look like an empty store.
fn check_tables(database: &Database, place: &Path) -> Result<(), StoreError> {
    let tables = catch_redb_panic(place, "read", || {
        let transaction = database.begin_read()?;
        let tables = transaction.list_tables()?;
        Ok(tables.map(|table| table.name().to_owned()).collect::<Vec<_>>())
    })?;
    match tables.into_iter().find(|name| name != ENTRIES.name()) {
        None => Ok(()),
        Some(name) => {
            let what = format!("table {name:?} is not of a pool-manager of this or an earlier version");
            Err(StoreError::Corrupt { place: place.to_owned(), what })
        }
    }
}

/// Checks all pages, because redb opens a closed file without checking them.
fn check_integrity(mut database: Database) -> Result<Database, ::redb::Error> {
    if !database.check_integrity()? {
        tracing::warn!("store repaired");
    }
    Ok(database)
}

/// Truncates a file whose creation was interrupted, which redb rejects: it has no magic number and
/// only zeros after the header. Such a store never had entries; a damaged one has pages.
fn reset_unfinished_file(backend: &impl StorageBackend) -> io::Result<()> {
    let must_reset = backend.len()? > 0 && is_unfinished(backend)?;
    if must_reset { backend.set_len(0) } else { Ok(()) }
}

/// Returns whether the creation of a store's file was not completed, as for an empty file; `None`
/// if there is no file. Changes nothing.
///
/// # Errors
/// The file cannot be read.
pub fn is_blank(file: &Path) -> Result<Option<bool>, StoreError> {
    match StoreFile::open_to_read(file) {
        Ok(backend) => Ok(Some(is_unfinished(&backend).map_err(StoreError::io("read", file))?)),
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(errno) => Err(StoreError::io("open", file)(errno)),
    }
}

fn is_unfinished(backend: &impl StorageBackend) -> io::Result<bool> {
    let len = backend.len()?;
    let mut magic = [0; MAGIC_BYTES];
    let head = MAGIC_BYTES.min(usize::try_from(len).unwrap_or(MAGIC_BYTES));
    backend.read(0, &mut magic[..head])?;
    let mut only_zeros = magic == [0; MAGIC_BYTES];
    let mut at = HEADER_BYTES;
    while only_zeros && at < len {
        let chunk = read_chunk(backend, at, len)?;
        only_zeros = is_zero(&chunk);
        at += chunk.len() as u64;
    }
    Ok(only_zeros)
}

/// Rewrites and syncs all readable bytes. After a failed sync the page cache may contain bytes that
/// never reached the disk, marked clean; redb's checksums detect the rest.
fn rewrite(backend: &impl StorageBackend) -> io::Result<()> {
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
    let rest = usize::try_from(len - at).unwrap_or(REWRITE_BYTES);
    let mut chunk = vec![0; rest.min(REWRITE_BYTES)];
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
    let mut place = Vec::new();
    for write in batch {
        let (Write::Put { table, key, .. } | Write::Delete { table, key }) = write;
        place.clear();
        place.push(table.tag());
        place.extend_from_slice(key);
        match write {
            Write::Put { value, .. } => drop(entries.insert(place.as_slice(), value.as_slice())?),
            Write::Delete { .. } => drop(entries.remove(place.as_slice())?),
        }
    }
    drop(entries);
    Ok(transaction.commit()?)
}

fn poisoned(place: &Path) -> StoreError {
    StoreError::Poisoned { place: place.to_owned() }
}

thread_local! {
    /// This thread runs redb.
    static IN_REDB: Cell<bool> = const { Cell::new(false) };
}

/// Runs a call of redb, and converts a panic into an error without printing it: a damaged file
/// violates redb's assertions.
fn catch_redb_panic<T>(
    place: &Path,
    doing: &'static str,
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
    // A panic leaves inconsistent state only in redb's database, which is dropped after the error.
    let result = catch_unwind(AssertUnwindSafe(run));
    IN_REDB.set(false);
    match result {
        Ok(result) => result.map_err(|error| store_error(place, doing, error)),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            let what = format!("redb failed an assertion during {doing}: {text}");
            Err(StoreError::Corrupt { place: place.to_owned(), what })
        }
    }
}

fn store_error(place: &Path, doing: &'static str, error: ::redb::Error) -> StoreError {
    use io::ErrorKind::{InvalidData, UnexpectedEof};
    let place = place.to_owned();
    match error {
        ::redb::Error::DatabaseAlreadyOpen => StoreError::InUse { place },
        ::redb::Error::PreviousIo | ::redb::Error::LockPoisoned(_) => StoreError::Poisoned { place },
        ::redb::Error::Io(errno) if !matches!(errno.kind(), InvalidData | UnexpectedEof) => {
            StoreError::Io { doing, place, errno }
        }
        other => StoreError::Corrupt { place, what: other.to_string() },
    }
}
