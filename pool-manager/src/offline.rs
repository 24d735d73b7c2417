//! Commands that run without a running manager: init, check, backup and restore.

use std::{
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use service_files::{certificates::CertificateError, sockets::SocketError};

use crate::{
    config::{Config, ConfigError, Listen},
    records::{self, LoadError},
    rpc::connections::socket_path,
    store::{
        Scan, StoreError,
        backup::{self, BackupError, Restore},
        redb::RedbStore,
    },
    store_folder::{self, StoreFolderError},
    tls, token_paths,
    tokens::{TokenError, Tokens},
};

/// Error of a command that runs without a manager.
#[derive(Debug, thiserror::Error)]
pub enum OfflineError {
    /// `rack.toml` cannot be read or is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The store cannot be opened or read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The contents of the store are invalid.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The backup or restore failed.
    #[error(transparent)]
    Backup(#[from] BackupError),
    /// The directory of the store cannot be used.
    #[error(transparent)]
    StoreFolder(#[from] StoreFolderError),
    /// The manager is not permitted to change the socket's group.
    #[error(
        "{}: access.group: group {group}: the manager's user must be a member; add it, for example with SupplementaryGroups= in the systemd unit",
        path.display()
    )]
    Group {
        /// Configuration file.
        path: PathBuf,
        /// ID of the configured group.
        group: u32,
    },
    /// A certificate or key cannot be used.
    #[error("{}", path.display())]
    Tls {
        /// Configuration file that names the certificate or key.
        path: PathBuf,
        /// Field and rule.
        #[source]
        error: CertificateError,
    },
    /// A file that is not a socket has the path of the socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A token file cannot be read or written.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The store contains invalid entries.
    #[error(
        "store {place}: {invalid} entries are invalid ({errors}): restore a backup with `pool-manager restore`"
    )]
    InvalidEntries {
        /// Directory of the store.
        place: String,
        /// Number of invalid entries.
        invalid: u64,
        /// Descriptions of the first invalid entries.
        errors: String,
    },
}

/// Creates a new rack and its tokens in the store's directory. The directory must never have
/// contained a rack.
///
/// # Errors
/// [`OfflineError`] if `rack.toml` is invalid, or the directory contains or contained a rack.
pub fn init(path: &Path) -> Result<(), OfflineError> {
    let config = Config::load(path)?;
    config.check_folders(path, rustix::process::geteuid().as_raw())?;
    let (store, uuid) = (&config.manager.store, store_folder::random_uuid());
    store_folder::init(store, &uuid, path)?;
    Tokens::load(store, &config.hosts)?;
    println!(
        "{}: created rack {uuid}; tokens: of hosts in {}, of schedulers and administrators in {}",
        store.display(),
        token_paths::host_token_directory(store).display(),
        token_paths::role_token_directory(store).display()
    );
    Ok(())
}

/// Checks `rack.toml` with its folders, socket, certificates and keys, and prints a summary.
///
/// # Errors
/// [`OfflineError`] with all violations in `rack.toml`, all folders that other users can change, or
/// the first unusable socket, certificate or key.
pub fn check_config(path: &Path) -> Result<(), OfflineError> {
    let config = Config::load(path)?;
    let own = rustix::process::geteuid().as_raw();
    let manager_uid = manager_uid(&config, own);
    if manager_uid != own {
        println!("{}: checking for user {manager_uid}, the owner of manager.store", path.display());
    }
    config.check_usable(path, manager_uid)?;
    config.check_folders(path, manager_uid)?;
    if let Listen::Unix(socket) = &config.manager.listen {
        socket_path(socket).exists()?;
    }
    let slices: u32 = config.emcs.iter().map(|emc| emc.slices).sum();
    println!(
        "{}: {} hosts, {} EMCs, {slices} slices: ok",
        path.display(),
        config.hosts.len(),
        config.emcs.len()
    );
    if let Some(group) = config.access.group.filter(|group| !can_assign_group(*group)) {
        return Err(OfflineError::Group { path: path.to_owned(), group });
    }
    if let Some(tls) = &config.tls {
        let loaded = tls::load(tls).map_err(|error| OfflineError::Tls { path: path.to_owned(), error })?;
        let (names, days) = (loaded.names.join(", "), loaded.days_left());
        println!("{}: certificate of {names}: ok, {days} days left", tls.certificate.display());
        if days < tls::EXPIRY_WARNING_DAYS {
            eprintln!("warning: tls: a certificate expires in {days} days: renew it and reload pool-manager");
        }
    }
    if let Some(address) = config.manager.metrics_listen.filter(|address| !address.ip().is_loopback()) {
        eprintln!(
            "warning: manager.metrics_listen = {address}: every client that can reach this address can read the metrics"
        );
    }
    Ok(())
}

/// Returns the ID of the manager's user. Root often checks the configuration of a manager that runs
/// as another user. This user owns the folder of the store.
fn manager_uid(config: &Config, own: u32) -> u32 {
    let owner = std::fs::metadata(&config.manager.store).map(|store| store.uid());
    if own == 0 { owner.unwrap_or(own) } else { own }
}

/// Returns whether this process may change the group of a file to `group`.
fn can_assign_group(group: u32) -> bool {
    let own = rustix::process::getegid().as_raw() == group;
    let listed = || rustix::process::getgroups().is_ok_and(|all| all.iter().any(|gid| gid.as_raw() == group));
    rustix::process::geteuid().is_root() || own || listed()
}

/// Checks `rack.toml`, every page of the store, every record and every token, and prints a summary.
/// Changes no file. A missing token is no error, because `serve` creates it.
///
/// # Errors
/// [`OfflineError`] at the first failed check.
pub fn check(path: &Path) -> Result<(), OfflineError> {
    check_config(path)?;
    let config = Config::load(path)?;
    store_folder::check_file(&config.manager.store, path)?;
    let mut store = RedbStore::open_read_only(&config.manager.store)?;
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
    let meta = store_folder::check_rack(&config.manager.store, meta, path)?;
    Tokens::prepare(&config.manager.store, &config.hosts)?;
    let (uuid, revision, entries) = (meta.rack_uuid, meta.revision.0, checked.entries.values().sum::<u64>());
    println!("{place}: rack {uuid}, revision {revision}, {entries} entries: ok");
    Ok(())
}

/// Copies the store into a new file. Changes no file of the store.
///
/// # Errors
/// [`OfflineError`] if a manager is running, the store cannot be read, or the file cannot be
/// written.
pub fn backup(path: &Path, to: &Path) -> Result<(), OfflineError> {
    let config = Config::load(path)?;
    store_folder::check_file(&config.manager.store, path)?;
    let mut store = RedbStore::open_read_only(&config.manager.store)?;
    let entries = backup::backup(&mut store, to)?;
    println!(
        "{}: backup of {}, {} entries",
        to.display(),
        config.manager.store.display(),
        entries.values().sum::<u64>()
    );
    Ok(())
}

/// Creates the store from a backup. All slices are quarantined until their hosts have reported.
/// With `force`, an existing store is renamed first.
///
/// # Errors
/// [`OfflineError`] if a manager is running, a store exists and `force` is not set, or the backup
/// is unusable.
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

#[cfg(test)]
mod tests;
