//! Operations on a rack without a running manager: check, backup, restore.

use std::{
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use crate::{
    config::{Config, ConfigError},
    records::{self, LoadError},
    store::{
        Scan, StoreError,
        backup::{self, BackupError, Restore},
        redb::RedbStore,
    },
    store_folder::{self, StoreFolderError},
    tls::{self, TlsError},
    tokens::{self, TokenError, Tokens},
};

/// Error of an operation.
#[derive(Debug, thiserror::Error)]
pub enum OfflineError {
    /// Error in rack.toml.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Error in the store's contents.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Error of a backup or restore.
    #[error(transparent)]
    Backup(#[from] BackupError),
    /// Error of the store's folder.
    #[error(transparent)]
    StoreFolder(#[from] StoreFolderError),
    /// The socket cannot be given to its group.
    #[error(
        "access.group: the manager's user is not in group {group}: it must be, for example by SupplementaryGroups= of its unit"
    )]
    Group {
        /// Group id.
        group: u32,
    },
    /// Error of a certificate or key.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Error of a token file.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The store has no rack.
    #[error(
        "store {place} holds no rack: create one with `pool-manager init`, or restore one with `pool-manager restore`"
    )]
    NoRack {
        /// Store.
        place: String,
    },
    /// Entries cannot be read.
    #[error(
        "store {place}: {invalid} entries are invalid ({errors}): restore it with `pool-manager restore`"
    )]
    InvalidEntries {
        /// Store.
        place: String,
        /// Number of entries.
        invalid: u64,
        /// First error.
        errors: String,
    },
}

/// Creates a rack in a folder that never held one, with its hosts' tokens.
///
/// # Errors
/// rack.toml is invalid, or the folder holds a rack or has lost one.
pub fn init(path: &Path) -> Result<(), OfflineError> {
    let config = Config::load(path)?;
    let (store, uuid) = (&config.manager.store, store_folder::uuid());
    store_folder::init(store, &uuid)?;
    Tokens::load(store, &config.hosts)?;
    println!(
        "{}: rack {uuid} created; tokens of its hosts are in {}, of schedulers and administrators in {}",
        store.display(),
        tokens::directory(store).display(),
        tokens::role_directory(store).display()
    );
    Ok(())
}

/// Checks rack.toml with its certificates and keys, and prints a summary.
///
/// # Errors
/// All violations in rack.toml, or the first unusable certificate or key.
pub fn check_config(path: &Path) -> Result<(), OfflineError> {
    let config = Config::load(path)?;
    let slices: u32 = config.emcs.iter().map(|emc| emc.slices).sum();
    println!(
        "{}: {} hosts, {} EMCs, {slices} slices: ok",
        path.display(),
        config.hosts.len(),
        config.emcs.len()
    );
    if let Some(group) = config.access.group.filter(|group| !may_assign(*group)) {
        return Err(OfflineError::Group { group });
    }
    if let Some(tls) = &config.tls {
        let loaded = tls::load(tls)?;
        let (names, days) = (loaded.names.join(", "), loaded.days_left());
        println!("{}: certificate of {names}: ok, {days} days left", tls.certificate.display());
        if days < tls::EXPIRY_WARNING_DAYS {
            eprintln!(
                "warning: tls: a certificate expires in {days} days: renew it, then reload pool-manager"
            );
        }
    }
    if let Some(address) = config.manager.metrics_listen.filter(|address| !address.ip().is_loopback()) {
        eprintln!(
            "warning: manager.metrics_listen = {address}: everyone who reaches this address can read the metrics"
        );
    }
    Ok(())
}

/// Returns whether this process may give a file to a group.
fn may_assign(group: u32) -> bool {
    let own = rustix::process::getegid().as_raw() == group;
    let listed = || rustix::process::getgroups().is_ok_and(|all| all.iter().any(|gid| gid.as_raw() == group));
    rustix::process::geteuid().is_root() || own || listed()
}

/// Checks rack.toml, every page of the store and every record.
///
/// # Errors
/// The first error.
pub fn check(path: &Path) -> Result<(), OfflineError> {
    check_config(path)?;
    let config = Config::load(path)?;
    store_folder::check_file(&config.manager.store)?;
    let mut store = RedbStore::open_existing(&config.manager.store)?;
    let checked = backup::check(&mut store, &mut |table, key, value| {
        records::check_entry(table, key, value).map_err(|error| error.to_string())
    })?;
    let place = config.manager.store.display();
    if checked.invalid > 0 {
        let errors: Vec<_> = checked.errors.into_iter().map(|(_, error)| error).collect();
        return Err(OfflineError::InvalidEntries {
            place: place.to_string(),
            invalid: checked.invalid,
            errors: errors.join("; "),
        });
    }
    let meta = records::load(&mut store)?.meta;
    store_folder::check_rack(&config.manager.store, meta.as_ref())?;
    let Some(meta) = meta else {
        return Err(OfflineError::NoRack { place: place.to_string() });
    };
    let (uuid, revision, entries) = (meta.rack_uuid, meta.revision.0, checked.entries.values().sum::<u64>());
    println!("{place}: rack {uuid}, revision {revision}, {entries} entries: ok");
    Ok(())
}

/// Copies the store into a new file.
///
/// # Errors
/// A manager is running, the store cannot be read, or the file cannot be written.
pub fn backup(path: &Path, to: &Path) -> Result<(), OfflineError> {
    let config = Config::load(path)?;
    let mut store = RedbStore::open_existing(&config.manager.store)?;
    let entries = backup::backup(&mut store, to)?;
    println!(
        "{}: {} entries of {}",
        to.display(),
        entries.values().sum::<u64>(),
        config.manager.store.display()
    );
    Ok(())
}

/// Creates the store from a backup. Its slices are quarantined until their hosts have reported.
///
/// # Errors
/// A manager is running, a store exists without `force`, or the backup is unusable.
pub fn restore(path: &Path, from: &Path, force: bool) -> Result<(), OfflineError> {
    let config = Config::load(path)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let generation = |store: &mut dyn Scan| records::load(store).ok()?.meta.map(|meta| meta.generation);
    let into = &config.manager.store;
    let restored =
        Restore { from, into, force, unix_seconds: now.as_secs(), generation: &generation }.run()?;
    println!("{}: restored from {}, generation {}", into.display(), from.display(), restored.generation);
    if let Some(replaced) = restored.replaced_store {
        println!("the previous store is now {}", replaced.display());
    }
    println!("every slice is quarantined until its hosts have reported");
    Ok(())
}
