//! The store in one file, by redb. One durable write per batch: redb checksums its pages, so that one sync tells a whole
//! commit from a torn one.
//!
//! All tables are one to redb, each a range of its keys: every table a commit touches costs it pages of its own. The
//! newest decisions, what concerns the whole store and the newest reservations, which most commits write, lie side by side.

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
    Scan, Store, StoreError, Table, Write,
    disk::{Directory, Disk, FILE, StoreFile},
    settle_format,
};

/// How much is read and written again at a time after a failure. Also the size of a hole that stays one.
const SETTLE_BYTES: usize = 64 << 10;
/// redb's header, magic number first, fits into its first page.
const HEADER_BYTES: u64 = 4096;
/// The length of redb's magic number, which it writes last when it makes a file.
const MAGIC_BYTES: usize = 9;

/// Everything, under keys that begin with the [`Table::tag`].
const FACTS: TableDefinition<'static, &'static [u8], &'static [u8]> = TableDefinition::new("facts");

/// The store on a [`Disk`].
pub struct RedbStore<D: Disk = Directory> {
    disk: D,
    /// `None` after a failure, until it is opened again.
    database: Option<Database>,
}

impl<D: Disk> fmt::Debug for RedbStore<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedbStore").field("place", &self.disk.place()).finish_non_exhaustive()
    }
}

impl RedbStore<Directory> {
    /// Opens the store in a directory, or makes an empty one.
    ///
    /// # Errors
    /// Every kind of [`StoreError`] but `Poisoned`.
    pub fn open_directory(path: &Path) -> Result<Self, StoreError> {
        Self::open(Directory::take(path)?)
    }

    /// Opens the store in a directory.
    ///
    /// # Errors
    /// [`StoreError::Missing`] where there is none, else as [`RedbStore::open_directory`].
    pub fn open_existing(path: &Path) -> Result<Self, StoreError> {
        let place = path.join(FILE);
        if place.exists() { Self::open_directory(path) } else { Err(StoreError::Missing { place }) }
    }
}

impl<D: Disk> RedbStore<D> {
    /// Opens the store on a disk and compares every page with its checksum, or makes an empty one.
    ///
    /// # Errors
    /// Every kind of [`StoreError`] but `Poisoned`.
    pub fn open(disk: D) -> Result<Self, StoreError> {
        let database = open(&disk)?;
        only_facts(&database, disk.place())?;
        let mut store = Self { disk, database: Some(database) };
        let place = store.disk.place().to_owned();
        settle_format(&mut store, &place)?;
        Ok(store)
    }

    /// redb tidies up when it closes, and may find damage then.
    fn close(&mut self) {
        let (place, database) = (self.disk.place(), self.database.take());
        if let Err(error) = guarded(place, "close", || {
            drop(database);
            Ok(())
        }) {
            tracing::warn!(%error, "store not closed cleanly");
        }
    }

    fn read(&self) -> Result<Snapshot, StoreError> {
        let place = self.disk.place();
        let database = self.database.as_ref().ok_or_else(|| poisoned(place))?;
        let transaction = guarded(place, "read", || Ok(database.begin_read()?))?;
        Ok(Snapshot { transaction, place: place.to_owned() })
    }

    /// Its disk.
    pub fn disk(&self) -> &D {
        &self.disk
    }
}

impl<D: Disk> Drop for RedbStore<D> {
    fn drop(&mut self) {
        self.close();
    }
}

/// A store as it was at one moment.
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
        guarded(&self.place, "read", || scan(transaction, table, each))
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
        let wrote = guarded(place, "write", || commit(database, batch));
        if wrote.is_err() {
            self.close();
        }
        wrote
    }

    fn reopen(&mut self) -> Result<(), StoreError> {
        self.close();
        self.database = Some(open(&self.disk)?);
        let place = self.disk.place().to_owned();
        settle_format(self, &place).inspect_err(|_| self.close())
    }

    fn snapshot(&self) -> Result<Box<dyn Scan>, StoreError> {
        Ok(Box::new(self.read()?))
    }

    fn free_bytes(&self) -> Result<Option<u64>, StoreError> {
        self.disk.free_bytes().map_err(StoreError::io("ask the free space of", self.disk.place()))
    }
}

/// Opens what is there. If whoever had it last did not close it, a write or sync of theirs may have failed.
fn open<D: Disk>(disk: &D) -> Result<Database, StoreError> {
    guarded(disk.place(), "open", || {
        let mut builder = Database::builder();
        builder.set_cache_size(STORE_CACHE_BYTES).set_repair_callback(RepairSession::abort);
        let backend = disk.open()?;
        forget_interrupted_making(&backend)?;
        match builder.create_with_backend(backend) {
            Err(DatabaseError::RepairAborted) => {
                settle(&disk.open()?)?;
                Ok(builder.set_repair_callback(|_| ()).create_with_backend(disk.open()?)?)
            }
            opened => verified(opened?),
        }
    })
}

/// A file with other tables than ours is no empty store, though we see nothing in it.
fn only_facts(database: &Database, place: &Path) -> Result<(), StoreError> {
    let names = guarded(place, "read", || {
        let transaction = database.begin_read()?;
        let tables = transaction.list_tables()?;
        Ok(tables.map(|table| table.name().to_owned()).collect::<Vec<_>>())
    })?;
    match names.into_iter().find(|name| name != FACTS.name()) {
        None => Ok(()),
        Some(name) => {
            let what = format!("a table {name:?}, which no pool-manager of this or a later version made");
            Err(StoreError::Corrupt { place: place.to_owned(), what })
        }
    }
}

/// A file that was closed is opened without a look at its pages; rot is found here, and not when it is believed.
fn verified(mut database: Database) -> Result<Database, ::redb::Error> {
    if !database.check_integrity()? {
        tracing::warn!("store put right");
    }
    Ok(database)
}

/// redb refuses a file whose making was cut short, which is one without a magic number and without anything after the
/// header. Such a store never held anything; a damaged one has pages.
fn forget_interrupted_making(backend: &impl StorageBackend) -> io::Result<()> {
    let is_unfinished = backend.len()? > 0 && was_never_made(backend)?;
    if is_unfinished { backend.set_len(0) } else { Ok(()) }
}

/// Whether the file of a store was never finished, as an empty one; `None` if there is no file. Changes nothing.
///
/// # Errors
/// It cannot be read.
pub fn is_blank(file: &Path) -> Result<Option<bool>, StoreError> {
    match StoreFile::open_to_read(file) {
        Ok(backend) => Ok(Some(was_never_made(&backend).map_err(StoreError::io("read", file))?)),
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(errno) => Err(StoreError::io("open", file)(errno)),
    }
}

fn was_never_made(backend: &impl StorageBackend) -> io::Result<bool> {
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

/// After a failed sync the operating system may show bytes that never reached the disk, and believe them clean. Writing
/// again what can be read, and syncing that, makes true what is shown; redb's checksums sort out the rest.
fn settle(backend: &impl StorageBackend) -> io::Result<()> {
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
    let rest = usize::try_from(len - at).unwrap_or(SETTLE_BYTES);
    let mut chunk = vec![0; rest.min(SETTLE_BYTES)];
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
    let entries = match transaction.open_table(FACTS) {
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
    let mut facts = transaction.open_table(FACTS)?;
    let mut place = Vec::new();
    for write in batch {
        let (Write::Put { table, key, .. } | Write::Delete { table, key }) = write;
        place.clear();
        place.push(table.tag());
        place.extend_from_slice(key);
        match write {
            Write::Put { value, .. } => drop(facts.insert(place.as_slice(), value.as_slice())?),
            Write::Delete { .. } => drop(facts.remove(place.as_slice())?),
        }
    }
    drop(facts);
    Ok(transaction.commit()?)
}

fn poisoned(place: &Path) -> StoreError {
    StoreError::Poisoned { place: place.to_owned() }
}

thread_local! {
    /// Whether this thread runs redb.
    static IN_REDB: Cell<bool> = const { Cell::new(false) };
}

/// Runs a piece of redb. It asserts what its file promises, so a damaged file makes it panic: the error says so, and the
/// panic itself is not printed.
fn guarded<T>(
    place: &Path,
    doing: &'static str,
    run: impl FnOnce() -> Result<T, ::redb::Error>,
) -> Result<T, StoreError> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IN_REDB.get() {
                others(info)
            }
        }));
    });
    IN_REDB.set(true);
    // State left by a panic is inside redb's database, which is dropped with the error.
    let done = catch_unwind(AssertUnwindSafe(run));
    IN_REDB.set(false);
    match done {
        Ok(done) => done.map_err(|error| explained(place, doing, error)),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            let what = format!("redb stopped on {doing}: {text}");
            Err(StoreError::Corrupt { place: place.to_owned(), what })
        }
    }
}

fn explained(place: &Path, doing: &'static str, error: ::redb::Error) -> StoreError {
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
