//! Backup of a store in one file, restore from it, and checks. A restored store only records that
//! it was restored; the ledger acts on it.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, RenameFlags};
use units::limits::{BATCH_CHANGES_MAX, CHECK_FAULTS_MAX};

use super::{
    Scan, Store, StoreError, Table, Write,
    disk::{Directory, FILE, Loose, sync_parent},
    is_empty, meta, meta_number,
    redb::RedbStore,
};

/// How many entries of each table.
pub type Entries = BTreeMap<Table, u64>;

/// Why there is no backup, or no store from one.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// A backup never replaces another.
    #[error("{} is there already: choose another name", path.display())]
    Exists {
        /// Where the backup was to be.
        path: PathBuf,
    },
    /// The file is no backup, or damaged.
    #[error("{} cannot be restored", path.display())]
    Unusable {
        /// Which file.
        path: PathBuf,
        /// Why not.
        #[source]
        cause: StoreError,
    },
    /// It is a backup of nothing, more likely a wrong file.
    #[error("{} cannot be restored: there is nothing in it", path.display())]
    Empty {
        /// Which file.
        path: PathBuf,
    },
    /// There is a store already.
    #[error("{} holds a store: give --force to put it aside and restore over it", path.display())]
    Occupied {
        /// Where.
        path: PathBuf,
    },
    /// The store that is read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The operating system refused.
    #[error("{doing} {}", path.display())]
    Io {
        /// Operation.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        #[source]
        errno: io::Error,
    },
}

fn io_error(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> BackupError {
    move |errno| BackupError::Io { doing, path: path.to_owned(), errno }
}

/// The name under which a file is put together.
fn partial(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

/// Removes a file, if there is one.
///
/// # Errors
/// [`BackupError::Io`].
pub fn remove_if_there(path: &Path) -> Result<(), BackupError> {
    match fs::remove_file(path) {
        Err(errno) if errno.kind() != io::ErrorKind::NotFound => Err(io_error("remove", path)(errno)),
        _ => Ok(()),
    }
}

/// Writes all that `from` shows into a new file, whole or not at all. From a [snapshot](super::redb::Snapshot) it is
/// consistent while the manager goes on.
///
/// # Errors
/// [`BackupError`]; then there is no such file.
pub fn backup(from: &mut dyn Scan, to: &Path) -> Result<Entries, BackupError> {
    if to.exists() {
        return Err(BackupError::Exists { path: to.to_owned() });
    }
    let partial = partial(to);
    remove_if_there(&partial)?;
    let copied = RedbStore::open(Loose(partial.clone())).and_then(|mut to| copy(from, &mut to));
    let entries = match copied {
        Ok(entries) => entries,
        Err(error) => {
            let _ = fs::remove_file(&partial); // the first error is the one to report
            return Err(error.into());
        }
    };
    let renamed = rustix::fs::renameat_with(CWD, &partial, CWD, to, RenameFlags::NOREPLACE);
    renamed.map_err(|errno| io_error("name the backup", to)(errno.into()))?;
    sync_parent(to).map_err(io_error("sync the directory of", to))?;
    Ok(entries)
}

fn copy(from: &mut dyn Scan, to: &mut dyn Store) -> Result<Entries, StoreError> {
    let mut entries = Entries::new();
    for table in Table::ALL {
        let mut writes = Vec::new();
        from.scan(table, &mut |key, value| {
            writes.push(Write::Put { table, key: key.to_vec(), value: value.to_vec() });
        })?;
        writes.chunks(BATCH_CHANGES_MAX).try_for_each(|batch| to.commit(batch))?;
        entries.insert(table, writes.len() as u64);
    }
    Ok(entries)
}

/// How to restore.
pub struct Restore<'a> {
    /// The backup.
    pub from: &'a Path,
    /// The directory of the store.
    pub into: &'a Path,
    /// Even if there is a store already; that one is put aside.
    pub force: bool,
    /// Seconds since 1970.
    pub unix_seconds: u64,
    /// The generation that the ledger in a store has; `None` if there is no ledger in it.
    pub generation: &'a dyn Fn(&mut dyn Scan) -> Option<u64>,
}

impl std::fmt::Debug for Restore<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Restore").field("from", &self.from).field("into", &self.into).finish_non_exhaustive()
    }
}

/// Result of a restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// The generation the ledger goes on with: higher than any before, so that orders of the forgotten future stay older.
    pub generation: u64,
    /// Where the store that was there before is now.
    pub put_aside: Option<PathBuf>,
}

impl Restore<'_> {
    /// Creates a store from a backup, atomically. The store is marked as restored: see
    /// [`meta::RESTORED`].
    ///
    /// # Errors
    /// [`BackupError`]; then everything is as it was.
    pub fn run(&self) -> Result<Restored, BackupError> {
        let directory = Directory::take(self.into)?;
        let file = directory.path().join(FILE);
        let before = self.generation_of_present(&file)?;
        let partial = partial(&file);
        let restored = self.prepare(&partial, before);
        let generation = match restored {
            Ok(generation) => generation,
            Err(error) => return remove_if_there(&partial).and(Err(error)),
        };
        let put_aside = self.put_aside(&file)?;
        fs::rename(&partial, &file).map_err(io_error("name the store", &file))?;
        sync_parent(&file).map_err(io_error("sync the directory of", &file))?;
        Ok(Restored { generation, put_aside })
    }

    /// Of the store that is there, if there is one that can still be read; 0 otherwise.
    fn generation_of_present(&self, file: &Path) -> Result<u64, BackupError> {
        if !file.exists() {
            return Ok(0);
        }
        let mut present = RedbStore::open(Loose(file.to_owned())).ok();
        let empty = present.as_mut().is_some_and(|store| is_empty(store).unwrap_or(false));
        if !empty && !self.force {
            return Err(BackupError::Occupied { path: file.to_owned() });
        }
        Ok(present.map_or(0, |mut store| (self.generation)(&mut store).unwrap_or(0)))
    }

    /// The future store under another name; its generation.
    fn prepare(&self, partial: &Path, before: u64) -> Result<u64, BackupError> {
        fs::copy(self.from, partial).map_err(io_error("copy", self.from))?;
        let private = fs::set_permissions(partial, fs::Permissions::from_mode(0o600));
        private.map_err(io_error("set the mode of", partial))?;
        let unusable = |cause| BackupError::Unusable { path: self.from.to_owned(), cause };
        let mut store = RedbStore::open(Loose(partial.to_owned())).map_err(unusable)?;
        if is_empty(&mut store)? {
            return Err(BackupError::Empty { path: self.from.to_owned() });
        }
        let noted = meta_number(&mut store, partial, meta::GENERATION).map_err(unusable)?.unwrap_or(0);
        let ledger = (self.generation)(&mut store).unwrap_or(0);
        let generation = self.unix_seconds.max(before.max(noted).max(ledger) + 1);
        store.commit(&[
            Write::number(Table::Meta, meta::RESTORED, 1),
            Write::number(Table::Meta, meta::GENERATION, generation),
        ])?;
        Ok(generation)
    }

    /// Gives what is there a second name. The first stays until the new store takes it: without a store a manager would
    /// begin an empty one.
    fn put_aside(&self, file: &Path) -> Result<Option<PathBuf>, BackupError> {
        if !file.exists() {
            return Ok(None);
        }
        let aside = file.with_file_name(format!("{FILE}.replaced-{}", self.unix_seconds));
        remove_if_there(&aside)?;
        fs::hard_link(file, &aside).map_err(io_error("put aside", file))?;
        Ok(Some(aside))
    }
}

/// Result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// How many entries were read.
    pub entries: Entries,
    /// How many of them are wrong.
    pub wrong: u64,
    /// In what way, for the first of them.
    pub faults: Vec<(Table, String)>,
}

/// Whether an entry is sound, or why not.
pub type Judge<'a> = dyn FnMut(Table, &[u8], &[u8]) -> Result<(), String> + 'a;

/// Reads every entry and asks about each. That pages match their checksums was seen when the store was opened.
///
/// # Errors
/// When the store cannot be read.
pub fn check(store: &mut dyn Scan, judge: &mut Judge<'_>) -> Result<Checked, StoreError> {
    let mut checked = Checked::default();
    for table in Table::ALL {
        let mut entries = 0;
        store.scan(table, &mut |key, value| {
            entries += 1;
            if let Err(fault) = judge(table, key, value) {
                checked.note(table, fault);
            }
        })?;
        checked.entries.insert(table, entries);
    }
    Ok(checked)
}

impl Checked {
    fn note(&mut self, table: Table, fault: String) {
        self.wrong += 1;
        if self.faults.len() < CHECK_FAULTS_MAX {
            self.faults.push((table, fault));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::number;

    /// Stands for the ledger's own record.
    const LEDGER: &[u8] = b"ledger";

    fn generation(store: &mut dyn Scan) -> Option<u64> {
        meta_number(store, Path::new("test"), LEDGER).unwrap()
    }

    fn store(directory: &Path, generation: u64) -> RedbStore {
        let mut store = RedbStore::open_directory(directory).unwrap();
        let slice = |i: u32| Write::number(Table::Slices, &i.to_be_bytes(), u64::from(i));
        store.commit(&(0..100).map(slice).collect::<Vec<_>>()).unwrap();
        store.commit(&[Write::number(Table::Meta, LEDGER, generation)]).unwrap();
        store
    }

    fn restore(from: &Path, into: &Path, force: bool) -> Result<Restored, BackupError> {
        Restore { from, into, force, unix_seconds: 1000, generation: &generation }.run()
    }

    fn meta_of(directory: &Path, key: &[u8]) -> Option<u64> {
        meta_number(&mut RedbStore::open_existing(directory).unwrap(), directory, key).unwrap()
    }

    #[test]
    fn a_backup_of_a_running_store_restores_what_was_then_and_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new, file) =
            (folder.path().join("old"), folder.path().join("new"), folder.path().join("b"));
        let mut store = store(&old, 7);
        let mut snapshot = store.snapshot().unwrap();
        store.commit(&[Write::number(Table::Slices, b"late", 1)]).unwrap();
        let entries = backup(snapshot.as_mut(), &file).unwrap();
        assert_eq!((entries[&Table::Slices], entries[&Table::Hosts]), (100, 0));
        assert_eq!(restore(&file, &new, false).unwrap(), Restored { generation: 1000, put_aside: None });
        let mut restored = RedbStore::open_existing(&new).unwrap();
        let checked = check(&mut restored, &mut |table, key, value| match table {
            Table::Slices if number(value).is_some_and(|n| n.to_be_bytes().ends_with(key)) => Ok(()),
            Table::Meta => Ok(()),
            _ => Err(format!("{key:?}")),
        });
        let checked = checked.unwrap();
        assert_eq!((checked.faults, checked.entries[&Table::Slices]), (vec![], 100));
        drop(restored);
        assert_eq!(meta_of(&new, meta::RESTORED), Some(1));
        assert_eq!(meta_of(&new, meta::GENERATION), Some(1000));
    }

    #[test]
    fn a_check_counts_what_is_wrong_and_shows_the_first_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = store(folder.path(), 1);
        let checked = check(&mut store, &mut |table, _, value| match table {
            Table::Slices => Err(format!("wrong {}", value[0])),
            _ => Ok(()),
        });
        let checked = checked.unwrap();
        assert_eq!((checked.wrong, checked.faults.len()), (100, CHECK_FAULTS_MAX));
        assert_eq!(checked.faults[1], (Table::Slices, "wrong 1".to_owned()));
    }

    #[test]
    fn a_restored_store_is_of_a_higher_generation_than_any_before() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, file) = (folder.path().join("store"), folder.path().join("b"));
        let mut store = store(&directory, 2000);
        backup(&mut store, &file).unwrap();
        store.commit(&[Write::number(Table::Meta, LEDGER, 3000)]).unwrap();
        drop(store);
        assert_eq!(restore(&file, &directory, true).unwrap().generation, 3001);
        assert_eq!(restore(&file, &folder.path().join("elsewhere"), true).unwrap().generation, 2001);
    }

    #[test]
    fn a_store_is_only_replaced_by_force_and_then_put_aside() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, file) = (folder.path().join("store"), folder.path().join("b"));
        backup(&mut store(&directory, 1), &file).unwrap();
        let error = restore(&file, &directory, false).unwrap_err().to_string();
        assert!(
            error.ends_with("holds a store: give --force to put it aside and restore over it"),
            "{error}"
        );
        assert_eq!(meta_of(&directory, meta::RESTORED), None);
        fs::write(directory.join(FILE), b"rotten").unwrap();
        assert!(matches!(restore(&file, &directory, false), Err(BackupError::Occupied { .. })));
        let aside = restore(&file, &directory, true).unwrap().put_aside.unwrap();
        assert_eq!(fs::read(aside).unwrap(), b"rotten");
        assert_eq!(meta_of(&directory, meta::RESTORED), Some(1));
    }

    #[test]
    fn nothing_is_restored_under_a_running_manager() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, file) = (folder.path().join("store"), folder.path().join("b"));
        let mut running = store(&directory, 1);
        backup(&mut running, &file).unwrap();
        let error = restore(&file, &directory, true).unwrap_err();
        assert!(matches!(error, BackupError::Store(StoreError::InUse { .. })), "{error}");
    }

    #[test]
    fn a_damaged_backup_leaves_the_store_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, file) = (folder.path().join("store"), folder.path().join("b"));
        backup(&mut store(&directory, 1), &file).unwrap();
        let whole = fs::read(&file).unwrap();
        let value = [41_u64.to_le_bytes(), 42_u64.to_le_bytes()].concat();
        let mut flipped = whole.clone();
        let found = (0..whole.len() - value.len()).filter(|at| whole[*at..].starts_with(&value));
        assert!(found.map(|at| flipped[at] ^= 1).count() > 0, "the entries are not where they were");
        for damaged in [&b""[..], b"hello", &whole[..whole.len() / 2], &flipped] {
            fs::write(&file, damaged).unwrap();
            let error = restore(&file, &directory, true).unwrap_err();
            assert!(matches!(error, BackupError::Unusable { .. } | BackupError::Empty { .. }), "{error}");
        }
        assert_eq!((meta_of(&directory, LEDGER), meta_of(&directory, meta::RESTORED)), (Some(1), None));
        assert!(!directory.join("ledger.redb.partial").exists());
    }

    #[test]
    fn a_backup_never_replaces_another() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("b");
        fs::write(&file, b"dear").unwrap();
        let mut store = store(&folder.path().join("store"), 1);
        assert!(matches!(backup(&mut store, &file), Err(BackupError::Exists { .. })));
        assert_eq!(fs::read(&file).unwrap(), b"dear");
    }

    #[test]
    fn a_missing_store_is_not_made_by_looking_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let error = RedbStore::open_existing(folder.path()).unwrap_err().to_string();
        assert!(error.starts_with("no store at "), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
