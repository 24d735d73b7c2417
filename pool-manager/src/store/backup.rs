//! Copies a store into a backup file, restores a store from a backup, and checks entries. A restore
//! marks the new store, and the ledger handles the mark at the next start.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, RenameFlags};
use units::limits::{CHANGES_PER_BATCH_MAX, CORRUPT_ENTRIES_DESCRIBED_MAX};

use super::{
    FORMAT, Scan, Store, StoreError, Table, Write,
    disk::{DATABASE_FILE, Directory, UnlockedFile, open_private_file, sync_parent_directory},
    is_empty, meta, read_meta_number,
    redb::RedbStore,
};

/// Number of entries by table.
pub type Entries = BTreeMap<Table, u64>;

/// Error of a backup or restore.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The backup file exists, and a backup never replaces a file.
    #[error("{} already exists: choose another name", path.display())]
    Exists {
        /// Path of the existing file.
        path: PathBuf,
    },
    /// The file is not a backup, or is damaged.
    #[error("cannot restore {}", path.display())]
    Unusable {
        /// Backup file.
        path: PathBuf,
        /// Error from opening the file as a store.
        #[source]
        cause: StoreError,
    },
    /// The backup has no entries, and is probably the wrong file.
    #[error("cannot restore {}: it has no entries", path.display())]
    Empty {
        /// Backup file.
        path: PathBuf,
    },
    /// A store exists, and `force` is not set.
    #[error("{} is an existing store: use --force to rename it and restore", path.display())]
    Occupied {
        /// File of the existing store.
        path: PathBuf,
    },
    /// The store cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The operating system rejected an operation.
    #[error("cannot {operation} {}", path.display())]
    Io {
        /// Operation, such as "remove".
        operation: &'static str,
        /// File of the operation.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
}

fn io_error(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> BackupError {
    move |errno| BackupError::Io { operation, path: path.to_owned(), errno }
}

/// Returns the temporary name under which a file is written before it is renamed to `path`.
fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

/// Removes a file, if it exists.
///
/// # Errors
/// [`BackupError::Io`] if the file exists and cannot be removed.
pub fn remove_if_exists(path: &Path) -> Result<(), BackupError> {
    match fs::remove_file(path) {
        Err(errno) if errno.kind() != io::ErrorKind::NotFound => Err(io_error("remove", path)(errno)),
        _ => Ok(()),
    }
}

/// Copies all entries of `from` into a new file `to`, and returns the number of entries of each
/// table. The file appears atomically after it is complete. The copy of a
/// [snapshot](super::redb::Snapshot) is consistent even while the manager writes.
///
/// # Errors
/// [`BackupError`] if `to` exists or the copy fails. An incomplete copy never appears as `to`.
pub fn backup(from: &mut dyn Scan, to: &Path) -> Result<Entries, BackupError> {
    if to.exists() {
        return Err(BackupError::Exists { path: to.to_owned() });
    }
    let partial = partial_path(to);
    remove_if_exists(&partial)?;
    let copied = RedbStore::open(UnlockedFile(partial.clone()))
        .and_then(|mut to| copy_entries(from, &mut to, &|_, _| true));
    let entries = match copied {
        Ok(entries) => entries,
        Err(error) => {
            let _ = fs::remove_file(&partial); // best effort: the first error is reported
            return Err(error.into());
        }
    };
    let renamed = rustix::fs::renameat_with(CWD, &partial, CWD, to, RenameFlags::NOREPLACE);
    renamed.map_err(|errno| io_error("rename the backup to", to)(errno.into()))?;
    sync_parent_directory(to).map_err(io_error("sync the directory of", to))?;
    Ok(entries)
}

/// Copies the entries that `includes` accepts, by table and key.
fn copy_entries(
    from: &mut dyn Scan,
    to: &mut dyn Store,
    includes: &dyn Fn(Table, &[u8]) -> bool,
) -> Result<Entries, StoreError> {
    let mut entries = Entries::new();
    for table in Table::ALL {
        let mut writes = Vec::new();
        from.scan(table, &mut |key, value| {
            if includes(table, key) {
                writes.push(Write::Put { table, key: key.to_vec(), value: value.to_vec() });
            }
        })?;
        writes.chunks(CHANGES_PER_BATCH_MAX).try_for_each(|batch| to.commit(batch))?;
        entries.insert(table, writes.len() as u64);
    }
    Ok(entries)
}

/// Parameters of a restore.
pub struct Restore<'a> {
    /// Backup file.
    pub from: &'a Path,
    /// Directory of the new store.
    pub into: &'a Path,
    /// Whether an existing store is renamed and replaced.
    pub force: bool,
    /// Current time, in seconds since the Unix epoch.
    pub unix_seconds: u64,
    /// Function that returns the generation of the ledger in a store, or `None` without a ledger.
    pub generation: &'a dyn Fn(&mut dyn Scan) -> Option<u64>,
}

impl std::fmt::Debug for Restore<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Restore").field("from", &self.from).field("into", &self.into).finish_non_exhaustive()
    }
}

/// Result of a restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoreResult {
    /// Generation of the restored ledger. It is higher than all earlier generations, so that agents
    /// prefer new desired states to those sent after the backup.
    pub generation: u64,
    /// New path of the replaced store, if there was one.
    pub replaced_store: Option<PathBuf>,
}

impl Restore<'_> {
    /// Creates a store from a backup, atomically, and marks it as restored, see [`meta::RESTORED_KEY`].
    ///
    /// # Errors
    /// [`BackupError`] if the restore is not possible. In this case, nothing is changed.
    pub fn run(&self) -> Result<RestoreResult, BackupError> {
        let directory = Directory::lock(self.into)?;
        let file = directory.path().join(DATABASE_FILE);
        let before = self.existing_generation(&file)?;
        let partial = partial_path(&file);
        let restored = self.prepare_store(&partial, before);
        let generation = match restored {
            Ok(generation) => generation,
            Err(error) => return remove_if_exists(&partial).and(Err(error)),
        };
        let replaced_store = self.link_replaced_store(&file)?;
        fs::rename(&partial, &file).map_err(io_error("rename the store to", &file))?;
        sync_parent_directory(&file).map_err(io_error("sync the directory of", &file))?;
        Ok(RestoreResult { generation, replaced_store })
    }

    /// Returns the generation of the existing store, or 0 if there is none or it cannot be read.
    /// Rejects an existing store with entries unless `force` is set.
    fn existing_generation(&self, file: &Path) -> Result<u64, BackupError> {
        if !file.try_exists().map_err(io_error("find", file))? {
            return Ok(0);
        }
        let mut present = RedbStore::open(UnlockedFile(file.to_owned())).ok();
        let empty = present.as_mut().is_some_and(|store| is_empty(store).unwrap_or(false));
        if !empty && !self.force {
            return Err(BackupError::Occupied { path: file.to_owned() });
        }
        Ok(present.map_or(0, |mut store| (self.generation)(&mut store).unwrap_or(0)))
    }

    /// Prepares the new store under a temporary name, and returns its generation.
    fn prepare_store(&self, partial: &Path, before: u64) -> Result<u64, BackupError> {
        let mut store = open_copy(self.from, partial)?;
        let generation = next_generation(self.from, &mut store, before, self.unix_seconds, self.generation)?;
        store.commit(&restored_marks(generation))?;
        Ok(generation)
    }

    /// Links the existing store under a second name, and returns the second name. The first name
    /// stays until the new store replaces it. Otherwise a manager that starts in between would find
    /// no ledger.
    fn link_replaced_store(&self, file: &Path) -> Result<Option<PathBuf>, BackupError> {
        if !file.try_exists().map_err(io_error("find", file))? {
            return Ok(None);
        }
        let second = file.with_file_name(format!("{DATABASE_FILE}.replaced-{}", self.unix_seconds));
        remove_if_exists(&second)?;
        fs::hard_link(file, &second).map_err(io_error("create a second link to", file))?;
        Ok(Some(second))
    }
}

/// Copies a backup to `partial`, and opens the copy.
fn open_copy(from: &Path, partial: &Path) -> Result<RedbStore<UnlockedFile>, BackupError> {
    let mut backup = config_file::open_regular(from).map_err(io_error("open backup", from))?;
    remove_if_exists(partial)?;
    let mut copy = open_private_file(partial).map_err(io_error("create", partial))?;
    io::copy(&mut backup, &mut copy).map_err(io_error("copy", from))?;
    drop(copy);
    let unusable = |cause| BackupError::Unusable { path: from.to_owned(), cause };
    let mut store = RedbStore::open(UnlockedFile(partial.to_owned())).map_err(unusable)?;
    if is_empty(&mut store)? { Err(BackupError::Empty { path: from.to_owned() }) } else { Ok(store) }
}

/// Returns the generation after a restore from `store`, the copy of the backup `from`. It is higher than `before`, the
/// generation of the replaced store.
fn next_generation(
    from: &Path,
    store: &mut dyn Scan,
    before: u64,
    unix_seconds: u64,
    generation: &dyn Fn(&mut dyn Scan) -> Option<u64>,
) -> Result<u64, BackupError> {
    let unusable = |cause| BackupError::Unusable { path: from.to_owned(), cause };
    let marked = read_meta_number(store, from, meta::GENERATION_KEY).map_err(unusable)?.unwrap_or(0);
    let ledger = generation(store).unwrap_or(0);
    Ok(unix_seconds.max(before.max(marked).max(ledger) + 1))
}

/// Returns the writes that mark a store as restored.
fn restored_marks(generation: u64) -> [Write; 2] {
    [
        Write::number(Table::Meta, meta::RESTORED_KEY, 1),
        Write::number(Table::Meta, meta::GENERATION_KEY, generation),
    ]
}

/// Backup that is restored into a store other than a file.
pub struct BackupCopy {
    from: PathBuf,
    partial: PathBuf,
    store: RedbStore<UnlockedFile>,
}

impl std::fmt::Debug for BackupCopy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BackupCopy").field("from", &self.from).finish_non_exhaustive()
    }
}

impl BackupCopy {
    /// Copies the backup `from` to the temporary file `partial`, and checks it.
    ///
    /// # Errors
    /// [`BackupError`] if the backup is unusable or has no entries, or the file cannot be written.
    pub fn open(from: &Path, partial: &Path) -> Result<Self, BackupError> {
        let opened = open_copy(from, partial);
        let store = opened.inspect_err(|_| drop(fs::remove_file(partial)))?; // best effort: the first error is reported
        Ok(Self { from: from.to_owned(), partial: partial.to_owned(), store })
    }

    /// Copies all entries into the empty store `into`, and marks it as restored. `before` is the generation of the
    /// store that it replaces. The format version is written last, so that an interrupted restore is detected. Returns
    /// the generation.
    ///
    /// # Errors
    /// [`BackupError`] if an entry cannot be read or written.
    pub fn restore(
        &mut self,
        into: &mut dyn Store,
        before: u64,
        unix_seconds: u64,
        generation: &dyn Fn(&mut dyn Scan) -> Option<u64>,
    ) -> Result<u64, BackupError> {
        let generation = next_generation(&self.from, &mut self.store, before, unix_seconds, generation)?;
        copy_entries(&mut self.store, into, &|table, key| (table, key) != (Table::Meta, meta::FORMAT))?;
        let mut marks = restored_marks(generation).to_vec();
        marks.push(Write::number(Table::Meta, meta::FORMAT, FORMAT));
        into.commit(&marks)?;
        Ok(generation)
    }
}

impl Drop for BackupCopy {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.partial); // a later restore removes it, too
    }
}

/// Result of checking all entries of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreCheckResult {
    /// Number of checked entries by table.
    pub entries: Entries,
    /// Number of invalid entries.
    pub invalid: u64,
    /// Tables and descriptions of the first [`CORRUPT_ENTRIES_DESCRIBED_MAX`] invalid entries.
    pub errors: Vec<(Table, String)>,
}

/// Function that checks table, key and value of an entry, and describes the defect.
pub type EntryCheck<'a> = dyn FnMut(Table, &[u8], &[u8]) -> Result<(), String> + 'a;

/// Reads and checks every entry. The checksums of pages were already verified when the store was
/// opened.
///
/// # Errors
/// [`StoreError`] if the store cannot be read.
pub fn check(store: &mut dyn Scan, check_entry: &mut EntryCheck<'_>) -> Result<StoreCheckResult, StoreError> {
    let mut checked = StoreCheckResult::default();
    for table in Table::ALL {
        let mut entries = 0;
        store.scan(table, &mut |key, value| {
            entries += 1;
            if let Err(error) = check_entry(table, key, value) {
                checked.add_invalid_entry(table, error);
            }
        })?;
        checked.entries.insert(table, entries);
    }
    Ok(checked)
}

impl StoreCheckResult {
    fn add_invalid_entry(&mut self, table: Table, error: String) {
        self.invalid += 1;
        if self.errors.len() < CORRUPT_ENTRIES_DESCRIBED_MAX {
            self.errors.push((table, error));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        store::number,
        test_files::{create_fifo, run_with_timeout},
    };

    /// Key under which these tests store the ledger's generation.
    const LEDGER_KEY: &[u8] = b"ledger";

    fn generation(store: &mut dyn Scan) -> Option<u64> {
        read_meta_number(store, Path::new("test"), LEDGER_KEY).unwrap()
    }

    fn store(directory: &Path, generation: u64) -> RedbStore {
        let mut store = RedbStore::open_directory(directory).unwrap();
        let slice = |i: u32| Write::number(Table::Slices, &i.to_be_bytes(), u64::from(i));
        store.commit(&(0..100).map(slice).collect::<Vec<_>>()).unwrap();
        store.commit(&[Write::number(Table::Meta, LEDGER_KEY, generation)]).unwrap();
        store
    }

    fn restore(from: &Path, into: &Path, force: bool) -> Result<RestoreResult, BackupError> {
        Restore { from, into, force, unix_seconds: 1000, generation: &generation }.run()
    }

    fn stored_meta_number(directory: &Path, key: &[u8]) -> Option<u64> {
        read_meta_number(&mut RedbStore::open_existing(directory).unwrap(), directory, key).unwrap()
    }

    #[test]
    fn backup_of_a_running_store_restores_its_snapshot() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new, file) =
            (folder.path().join("old"), folder.path().join("new"), folder.path().join("b"));
        let mut store = store(&old, 7);
        let mut snapshot = store.snapshot().unwrap();
        store.commit(&[Write::number(Table::Slices, b"late", 1)]).unwrap();
        let entries = backup(snapshot.as_mut(), &file).unwrap();
        assert_eq!((entries[&Table::Slices], entries[&Table::Hosts]), (100, 0));
        assert_eq!(
            restore(&file, &new, false).unwrap(),
            RestoreResult { generation: 1000, replaced_store: None }
        );
        let mut restored = RedbStore::open_existing(&new).unwrap();
        let checked = check(&mut restored, &mut |table, key, value| match table {
            Table::Slices if number(value).is_some_and(|n| n.to_be_bytes().ends_with(key)) => Ok(()),
            Table::Meta => Ok(()),
            _ => Err(format!("{key:?}")),
        });
        let checked = checked.unwrap();
        assert_eq!((checked.errors, checked.entries[&Table::Slices]), (vec![], 100));
        drop(restored);
        assert_eq!(stored_meta_number(&new, meta::RESTORED_KEY), Some(1));
        assert_eq!(stored_meta_number(&new, meta::GENERATION_KEY), Some(1000));
    }

    #[test]
    fn check_counts_invalid_entries_and_lists_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = store(folder.path(), 1);
        let checked = check(&mut store, &mut |table, _, value| match table {
            Table::Slices => Err(format!("invalid {}", value[0])),
            _ => Ok(()),
        });
        let checked = checked.unwrap();
        assert_eq!((checked.invalid, checked.errors.len()), (100, CORRUPT_ENTRIES_DESCRIBED_MAX));
        assert_eq!(checked.errors[1], (Table::Slices, "invalid 1".to_owned()));
    }

    #[test]
    fn restored_store_has_a_higher_generation() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, file) = (folder.path().join("store"), folder.path().join("b"));
        let mut store = store(&directory, 2000);
        backup(&mut store, &file).unwrap();
        store.commit(&[Write::number(Table::Meta, LEDGER_KEY, 3000)]).unwrap();
        drop(store);
        assert_eq!(restore(&file, &directory, true).unwrap().generation, 3001);
        assert_eq!(restore(&file, &folder.path().join("elsewhere"), true).unwrap().generation, 2001);
    }

    #[test]
    fn existing_store_is_renamed_and_replaced_only_with_force() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, file) = (folder.path().join("store"), folder.path().join("b"));
        backup(&mut store(&directory, 1), &file).unwrap();
        let error = restore(&file, &directory, false).unwrap_err().to_string();
        assert!(error.ends_with("is an existing store: use --force to rename it and restore"), "{error}");
        assert_eq!(stored_meta_number(&directory, meta::RESTORED_KEY), None);
        fs::write(directory.join(DATABASE_FILE), b"damaged").unwrap();
        assert!(matches!(restore(&file, &directory, false), Err(BackupError::Occupied { .. })));
        let renamed = restore(&file, &directory, true).unwrap().replaced_store.unwrap();
        assert_eq!(fs::read(renamed).unwrap(), b"damaged");
        assert_eq!(stored_meta_number(&directory, meta::RESTORED_KEY), Some(1));
    }

    #[test]
    fn restore_is_rejected_while_a_manager_runs() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, file) = (folder.path().join("store"), folder.path().join("b"));
        let mut running = store(&directory, 1);
        backup(&mut running, &file).unwrap();
        let error = restore(&file, &directory, true).unwrap_err();
        assert!(matches!(error, BackupError::Store(StoreError::InUse { .. })), "{error}");
    }

    #[test]
    fn damaged_backup_leaves_the_store_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, file) = (folder.path().join("store"), folder.path().join("b"));
        backup(&mut store(&directory, 1), &file).unwrap();
        let whole = fs::read(&file).unwrap();
        let value = [41_u64.to_le_bytes(), 42_u64.to_le_bytes()].concat();
        let mut flipped = whole.clone();
        let found = (0..whole.len() - value.len()).filter(|at| whole[*at..].starts_with(&value));
        assert!(
            found.map(|at| flipped[at] ^= 1).count() > 0,
            "the backup does not contain the expected entries"
        );
        for damaged in [&b""[..], b"hello", &whole[..whole.len() / 2], &flipped] {
            fs::write(&file, damaged).unwrap();
            let error = restore(&file, &directory, true).unwrap_err();
            assert!(matches!(error, BackupError::Unusable { .. } | BackupError::Empty { .. }), "{error}");
        }
        assert_eq!(
            (stored_meta_number(&directory, LEDGER_KEY), stored_meta_number(&directory, meta::RESTORED_KEY)),
            (Some(1), None)
        );
        assert!(!directory.join("ledger.redb.partial").exists());
    }

    #[test]
    fn special_file_in_place_of_a_backup_or_ledger_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, file) = (folder.path().join("store"), folder.path().join("b"));
        create_fifo(&file);
        for from in [file.clone(), "/dev/zero".into()] {
            let (path, into) = (from.clone(), directory.clone());
            let error = run_with_timeout(move || restore(&path, &into, true)).unwrap_err();
            let expected = format!("cannot open backup {}: must be a regular file", from.display());
            assert_eq!(units::chain(&error), expected);
        }
        create_fifo(&directory.join(DATABASE_FILE));
        let path = directory.clone();
        let error = run_with_timeout(move || RedbStore::open_existing(&path)).unwrap_err();
        assert!(units::chain(&error).ends_with("ledger.redb: must be a regular file"), "{error:?}");
        let ledger = directory.join(DATABASE_FILE);
        let blank = run_with_timeout(move || crate::store::redb::inspect_file(&ledger)).unwrap_err();
        assert!(units::chain(&blank).ends_with("ledger.redb: must be a regular file"), "{blank:?}");
    }

    #[test]
    fn backup_does_not_replace_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("b");
        fs::write(&file, b"data").unwrap();
        let mut store = store(&folder.path().join("store"), 1);
        assert!(matches!(backup(&mut store, &file), Err(BackupError::Exists { .. })));
        assert_eq!(fs::read(&file).unwrap(), b"data");
    }

    #[test]
    fn missing_store_is_not_created_by_open_existing() {
        let folder = tempfile::tempdir().unwrap();
        let error = RedbStore::open_existing(folder.path()).unwrap_err().to_string();
        assert!(error.starts_with("no store at "), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
