//! Tests that `check` and `backup` do not change the folder of the store.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt as _, chown},
};

use super::*;
use crate::{
    store::{
        Store as _, Table, Write,
        disk::{DATABASE_FILE, LOCK_FILE},
    },
    test_files::write_private_file,
};

/// Offset of the flags in redb's header, and the flag of a file that was not closed cleanly.
const FLAGS_OFFSET: usize = 9;
const RECOVERY_REQUIRED: u8 = 2;

/// Owner, group, mode, time of the last modification in nanoseconds, and contents of a file or
/// folder.
type FileState = (u32, u32, u32, i128, Vec<u8>);

/// Returns the state of a folder and of all files and folders in it, by path.
fn file_states(path: &Path) -> BTreeMap<PathBuf, FileState> {
    let metadata = fs::symlink_metadata(path).unwrap();
    let modified = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
    let contents = if metadata.is_file() { fs::read(path).unwrap() } else { Vec::new() };
    let state = (metadata.uid(), metadata.gid(), metadata.mode(), modified, contents);
    let mut states = BTreeMap::from([(path.to_owned(), state)]);
    if metadata.is_dir() {
        let entries = fs::read_dir(path).unwrap();
        states.extend(entries.flat_map(|entry| file_states(&entry.unwrap().path())));
    }
    states
}

/// Creates a rack in `folder`, and returns the paths of `rack.toml` and of the store.
fn create_rack(folder: &Path) -> (PathBuf, PathBuf) {
    let (rack_toml, store) = (folder.join("rack.toml"), folder.join("store"));
    let text = "[manager]\nstore = \"store\"\nlisten = \"unix:manager.sock\"\n\
                [[emc]]\nname = \"emc0\"\nslices = 2\ndriver = \"emulated\"\npath = \"emc0\"\n\
                [[host]]\nname = \"h0\"\ncores = 8\nlocal_mib = 1024\nemcs = [\"emc0\"]\n";
    fs::write(&rack_toml, text).unwrap();
    init(&rack_toml).unwrap();
    (rack_toml, store)
}

/// Replaces the ledger by a copy that was made while the ledger was open, as after a power failure.
fn close_uncleanly(store: &Path) {
    let ledger = store.join(DATABASE_FILE);
    let mut open = RedbStore::open_directory(store).unwrap();
    open.commit(&[Write::number(Table::Meta, b"unclean", 1)]).unwrap();
    let bytes = fs::read(&ledger).unwrap();
    assert_ne!(bytes[FLAGS_OFFSET] & RECOVERY_REQUIRED, 0, "the ledger was closed cleanly");
    drop(open);
    write_private_file(&ledger, bytes);
}

/// Makes another user the owner of the store, if this process may do so.
fn change_owner(store: &Path) {
    if rustix::process::geteuid().is_root() {
        file_states(store).keys().for_each(|path| chown(path, Some(65534), Some(65534)).unwrap());
    }
}

#[test]
fn check_and_backup_leave_the_store_unchanged() {
    for (is_clean, has_lock) in [(true, true), (true, false), (false, true), (false, false)] {
        let folder = tempfile::tempdir().unwrap();
        let (rack_toml, store) = create_rack(folder.path());
        if !is_clean {
            close_uncleanly(&store);
        }
        if !has_lock {
            fs::remove_file(store.join(LOCK_FILE)).unwrap();
        }
        change_owner(&store);
        let before = file_states(folder.path());
        check(&rack_toml).unwrap();
        assert!(file_states(folder.path()) == before, "check: clean {is_clean}, lock {has_lock}");
        let copy = tempfile::tempdir().unwrap();
        backup(&rack_toml, &copy.path().join("backup")).unwrap();
        assert!(file_states(folder.path()) == before, "backup: clean {is_clean}, lock {has_lock}");
    }
}

#[test]
fn check_is_rejected_while_a_manager_runs() {
    let folder = tempfile::tempdir().unwrap();
    let (rack_toml, store) = create_rack(folder.path());
    let manager = RedbStore::open_directory(&store).unwrap();
    let error = check(&rack_toml).unwrap_err();
    assert!(matches!(error, OfflineError::Store(StoreError::InUse { .. })), "{error:?}");
    drop(manager);
    check(&rack_toml).unwrap();
}

#[test]
fn check_reports_a_ledger_that_is_accessible_to_others() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let (rack_toml, store) = create_rack(folder.path());
    for name in [LOCK_FILE, DATABASE_FILE] {
        let set_mode =
            |mode| fs::set_permissions(store.join(name), fs::Permissions::from_mode(mode)).unwrap();
        set_mode(0o644);
        let error = units::chain(&check(&rack_toml).unwrap_err());
        assert!(error.contains("has mode 0644: must be accessible to its owner only"), "{error}");
        set_mode(0o600);
    }
}
