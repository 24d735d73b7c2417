//! Starts of the manager without a usable store, and rejected reloads.

use std::{fs, os::unix::fs::PermissionsExt as _};

use super::*;
use crate::{offline, store::disk::DATABASE_FILE, store_folder::StoreFolderError, token_paths};

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

/// The ledger has another size of the EMC than the new configuration, and therefore rejects the new
/// host.
#[tokio::test]
async fn reload_rejected_by_the_ledger_creates_no_token() {
    let folder = tempfile::tempdir().unwrap();
    let path = rack_toml(folder.path());
    offline::init(&path).unwrap();
    let config = Config::load(&path).unwrap();
    let opened = store_folder::open(&config.manager.folder, &path).unwrap();
    let OpenedStore { store, meta, records, restored } = opened;
    let settings = manager_settings(&config);
    let initial = InitialState { settings, fence_command: None, meta, records, restored, leader: None };
    let (handle, driver) = driver::start(initial, store, Arc::new(Metrics::default())).unwrap();
    configure(&path, &handle, &config).await.unwrap();
    let rejections = Arc::new(RejectionLog::default());
    let rules = prepare_rules(&config).unwrap().0;
    let identity = Arc::new(Identity::new(rules, Arc::clone(&rejections)));
    let (tls, tls_receiver) = watch::channel(None);
    let access = AccessControl { identity, rejections, tls, tls_receiver };

    let text = fs::read_to_string(&path).unwrap();
    let host = "[[host]]\nname = \"h1\"\ncores = 1\nlocal_mib = 1\nemcs = [\"emc0\"]\n";
    let added = format!("{text}{host}");
    fs::write(&path, added.replace("slices = 1\n", "slices = 2\n")).unwrap();
    let mut old = config.clone();
    old.emcs[0].slices = 2;
    let token = token_paths::host_token_path(&config.manager.folder, &units::Name::new("h1").unwrap());
    let error = reload(&path, &old, &handle, &access).await.unwrap_err();
    assert!(matches!(error, ServeError::Configure { .. }), "{error:?}");
    assert!(!token.exists());

    fs::write(&path, added).unwrap();
    reload(&path, &config, &handle, &access).await.unwrap();
    assert!(token.exists());
    handle.close();
    let _ended = tokio::time::timeout(WAIT_TIMEOUT, driver).await.expect("the driver did not end");
}

#[test]
fn check_rejects_tokens_on_which_serve_fails() {
    let folder = tempfile::tempdir().unwrap();
    let path = rack_toml(folder.path());
    offline::init(&path).unwrap();
    offline::check(&path).unwrap();
    let token = token_paths::role_token_path(&folder.path().join("store"), crate::role::Role::Admin);
    for contents in [&b""[..], b"\xff\0"] {
        fs::write(&token, contents).unwrap();
        let error = offline::check(&path).unwrap_err().to_string();
        assert!(error.starts_with(&format!("token {} is malformed", token.display())), "{error}");
    }
    fs::remove_file(&token).unwrap();
    offline::check(&path).unwrap();
    assert!(!token.exists(), "the check created a token");
}

#[tokio::test]
async fn folder_writable_by_others_is_rejected_at_start_or_by_check_config() {
    for (field, name) in [("manager.store", "store"), ("emc[0].path", "emc0"), ("emc[0].path", "emc0/slices")]
    {
        let folder = tempfile::tempdir().unwrap();
        let path = rack_toml(folder.path());
        offline::init(&path).unwrap();
        let writable = folder.path().join(name);
        fs::create_dir_all(&writable).unwrap();
        for parent in [folder.path().join("emc0"), writable.clone()] {
            let _ = fs::set_permissions(&parent, fs::Permissions::from_mode(0o711)); // the EMC may not exist
        }
        fs::set_permissions(&writable, fs::Permissions::from_mode(0o775)).unwrap();
        let at = writable.display();
        let expected = format!(
            "{}: {field} = {at}: has mode 0775: must not be writable by group or others; run `chmod go-w {at}`",
            path.display()
        );
        if field == "manager.store" {
            // The folders of an EMC are checked when the EMC is opened.
            assert_eq!(failed_start_error(&path).await.to_string(), expected);
        }
        assert_eq!(offline::check_config(&path).unwrap_err().to_string(), expected);
    }
}
