//! Commands of `pool-manager` other than `serve`: init, check, backup and restore run without a running manager, and
//! transfer lets another manager take over.

use std::{
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use service_files::{certificates::CertificateError, sockets::SocketError};

use crate::{
    config::{Config, ConfigError, Listen},
    etcd_connection::EtcdConnectionError,
    records::{self, LoadError},
    rpc::connections::socket_path,
    store::{
        Scan, StoreError,
        backup::{self, BackupError, Restore},
        etcd::Cluster,
        is_empty,
        redb::RedbStore,
    },
    store_folder::{self, EtcdManager, StoreFolderError},
    tls, token_paths,
    tokens::{TokenError, Tokens},
};

mod etcd;

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
    /// A file or an address of section `[etcd]` cannot be used.
    #[error("{}", path.display())]
    Etcd {
        /// Configuration file.
        path: PathBuf,
        /// Error that names the field and the violated rule.
        #[source]
        error: EtcdConnectionError,
    },
    /// A manager serves the rack in etcd.
    #[error("store {} is in use by the pool-manager {leader}: stop all managers first", store.display())]
    InUse {
        /// Location of the store in etcd.
        store: PathBuf,
        /// Name and address of the manager that was elected.
        leader: String,
    },
    /// The ledger is not in etcd, so that there is only one manager.
    #[error("{}: manager.store = {store}: must be in etcd (etcd://HOST:PORT) for a transfer", path.display())]
    OnlyManager {
        /// Configuration file.
        path: PathBuf,
        /// Value of `manager.store`.
        store: String,
    },
    /// No manager can take over.
    #[error("cannot transfer the leadership: {0}")]
    Transfer(String),
    /// The store contains invalid entries.
    #[error(
        "store {place}: {invalid} entries are invalid ({errors}): restore a backup with `pool-manager restore`"
    )]
    InvalidEntries {
        /// Directory of the store, or its location in etcd.
        place: String,
        /// Number of invalid entries.
        invalid: u64,
        /// Descriptions of the first invalid entries.
        errors: String,
    },
}

/// Store that was created from a backup.
struct RestoredStore {
    generation: u64,
    /// File with the replaced store, if there was one.
    replaced: Option<PathBuf>,
}

/// Creates a new rack in the store, and its tokens. The store must never have contained a rack.
///
/// # Errors
/// [`OfflineError`] if `rack.toml` is invalid, or the directory contains or contained a rack.
pub fn init(path: &Path) -> Result<(), OfflineError> {
    let config = Config::load(path)?;
    config.check_folders(path, rustix::process::geteuid().as_raw())?;
    let (folder, uuid) = (&config.manager.folder, store_folder::random_uuid());
    match &config.manager.etcd {
        None => store_folder::init(folder, &uuid, path)?,
        Some(etcd) => etcd::init(path, &config, etcd, &uuid)?,
    }
    Tokens::load(folder, &config.hosts)?;
    println!(
        "{}: created rack {uuid}; tokens: of hosts in {}, of schedulers and administrators in {}",
        config.manager.store(),
        token_paths::host_token_directory(folder).display(),
        token_paths::role_token_directory(folder).display()
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
        let field = config.manager.folder_field();
        println!("{}: checking for user {manager_uid}, the owner of {field}", path.display());
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
    if let Some(etcd) = &config.manager.etcd {
        etcd::connect(path, etcd)?; // reads the files, but calls no member
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
    let owner = std::fs::metadata(&config.manager.folder).map(|store| store.uid());
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
    let (mut store, cluster) = open_for_reading(path, &config)?;
    let checked = backup::check(store.as_mut(), &mut |table, key, value| {
        records::check_entry(table, key, value).map_err(|error| error.to_string())
    })?;
    let place = config.manager.store();
    if checked.invalid > 0 {
        let errors: Vec<_> = checked.errors.into_iter().map(|(_, error)| error).collect();
        return Err(OfflineError::InvalidEntries {
            place,
            invalid: checked.invalid,
            errors: errors.join("; "),
        });
    }
    let (meta, folder) = (records::load(store.as_mut())?.meta, &config.manager.folder);
    let meta = match cluster {
        None => store_folder::check_rack(folder, meta, path)?,
        Some(cluster) => {
            EtcdManager { ledger: &cluster.location(), folder, rack_toml: path }.check_rack(meta)?
        }
    };
    Tokens::prepare(&config.manager.folder, &config.hosts)?;
    let (uuid, revision, entries) = (meta.rack_uuid, meta.revision.0, checked.entries.values().sum::<u64>());
    println!("{place}: rack {uuid}, revision {revision}, {entries} entries: ok");
    Ok(())
}

/// Opens the store without changing it, and returns the cluster if it is in etcd. A store in etcd may be in use.
fn open_for_reading(path: &Path, config: &Config) -> Result<(Box<dyn Scan>, Option<Cluster>), OfflineError> {
    if let Some(etcd) = &config.manager.etcd {
        let cluster = etcd::connect(path, etcd)?;
        let mut store = cluster.read()?;
        if is_empty(store.as_mut())? {
            let (ledger, rack_toml) = (cluster.location(), path.to_owned());
            return Err(StoreFolderError::NoRackInEtcd { ledger, rack_toml }.into());
        }
        return Ok((store, Some(cluster)));
    }
    store_folder::check_file(&config.manager.folder, path)?;
    Ok((Box::new(RedbStore::open_read_only(&config.manager.folder)?), None))
}

/// Copies the store into a new file. Changes no file of the store.
///
/// # Errors
/// [`OfflineError`] if a manager is running, the store cannot be read, or the file cannot be
/// written.
pub fn backup(path: &Path, to: &Path) -> Result<(), OfflineError> {
    let config = Config::load(path)?;
    let (mut store, _) = open_for_reading(path, &config)?;
    let entries = backup::backup(store.as_mut(), to)?;
    println!(
        "{}: backup of {}, {} entries",
        to.display(),
        config.manager.store(),
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
    let restored = match &config.manager.etcd {
        Some(etcd) => {
            let restored = etcd::restore(path, &config, etcd, (from, force, now.as_secs()))?;
            Tokens::load(&config.manager.folder, &config.hosts)?; // a manager does not create the tokens of an existing rack
            restored
        }
        None => restore_folder(&config, from, force, now.as_secs())?,
    };
    println!(
        "{}: restored from {}, generation {}",
        config.manager.store(),
        from.display(),
        restored.generation
    );
    if let Some(replaced) = restored.replaced {
        println!("the previous store is now {}", replaced.display());
    }
    println!("every slice is quarantined until its hosts have reported");
    Ok(())
}

/// Lets the manager `to`, or the first standby, take over from the leader.
///
/// # Errors
/// [`OfflineError`] if there is no such standby, or it does not take over in time.
pub fn transfer(path: &Path, to: Option<&str>) -> Result<(), OfflineError> {
    let config = Config::load(path)?;
    let Some(etcd) = &config.manager.etcd else {
        return Err(OfflineError::OnlyManager { path: path.to_owned(), store: config.manager.store() });
    };
    let leader = etcd::transfer(path, etcd, to)?;
    println!("{} at {} is now the leader", leader.name, leader.address);
    Ok(())
}

/// Returns the generation of the ledger in a store; `None` if it cannot be read, or there is none.
fn ledger_generation(store: &mut dyn Scan) -> Option<u64> {
    records::load(store).ok()?.meta.map(|meta| meta.generation)
}

fn restore_folder(
    config: &Config,
    from: &Path,
    force: bool,
    unix_seconds: u64,
) -> Result<RestoredStore, OfflineError> {
    let into = &config.manager.folder;
    let restored = Restore { from, into, force, unix_seconds, generation: &ledger_generation }.run()?;
    Ok(RestoredStore { generation: restored.generation, replaced: restored.replaced_store })
}

#[cfg(test)]
mod tests;
