//! Starts of the manager without a usable store.

use std::fs;

use super::*;
use crate::{store::disk::DATABASE_FILE, store_folder::StoreFolderError};

/// Time limit for a start that must fail.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Writes a `rack.toml` with its store in the directory `store`. Returns the path of the file.
fn rack_toml(folder: &Path) -> PathBuf {
    let path = folder.join("rack.toml");
    let text = "[manager]\nlisten = \"unix:manager.sock\"\nstore = \"store\"\n\
                [[emc]]\nname = \"emc0\"\nslices = 1\ndriver = \"emulated\"\npath = \"emc0\"\n\
                [[host]]\nname = \"h0\"\ncores = 1\nlocal_mib = 1\nemcs = [\"emc0\"]\n";
    fs::write(&path, text).unwrap();
    path
}

async fn failed_start_error(rack_toml: &Path) -> ServeError {
    let started = tokio::time::timeout(WAIT_TIMEOUT, serve(rack_toml.to_owned())).await;
    started.expect("the manager started").expect_err("the manager ended without an error")
}

/// An unmounted disk leaves an empty or missing store folder. A new rack there would take over the
/// slices of the existing rack.
#[tokio::test]
async fn start_without_a_store_fails_and_creates_nothing() {
    for (state, prepare) in [
        ("the folder does not exist", (|_| ()) as fn(&Path)),
        ("the folder is empty", |store| fs::create_dir(store).unwrap()),
        ("ledger.redb is missing", |store| fs::create_dir_all(store.join("lost+found")).unwrap()),
        ("ledger.redb is empty", |store| {
            fs::create_dir(store).unwrap();
            fs::write(store.join(DATABASE_FILE), "").unwrap();
        }),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (path, store) = (rack_toml(folder.path()), folder.path().join("store"));
        prepare(&store);
        let list = || -> Option<Vec<_>> {
            let entries = fs::read_dir(&store).ok()?.map(Result::unwrap);
            Some(entries.map(|entry| (entry.file_name(), entry.metadata().unwrap().len())).collect())
        };
        let before = list();
        let error = failed_start_error(&path).await;
        assert!(matches!(error, ServeError::StoreFolder(StoreFolderError::NoRack { .. })), "{error:?}");
        let (error, rack_toml) = (units::chain(&error), path.display());
        assert!(error.starts_with(&format!("no store at {}: {state}: mount ", store.display())), "{error}");
        for command in [
            format!("`pool-manager init --config {rack_toml}`"),
            format!("`pool-manager restore --config {rack_toml} --from BACKUP`"),
        ] {
            assert!(error.contains(&command), "{error}");
        }
        assert_eq!(list(), before, "{state}");
    }
}
