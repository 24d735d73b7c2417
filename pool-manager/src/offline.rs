//! What is done to a rack while its manager is down: checking, copying, restoring.

use std::path::Path;

use crate::{
    config::{Config, ConfigError},
    records::{self, LoadError},
    store::{StoreError, Table, redb::RedbStore},
};

/// Why it could not be done.
#[derive(Debug, thiserror::Error)]
pub enum OfflineError {
    /// rack.toml.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What is in it.
    #[error(transparent)]
    Load(#[from] LoadError),
}

/// Checks rack.toml and says what it describes.
///
/// # Errors
/// Everything that is wrong with it.
pub fn check_config(path: &Path) -> Result<(), OfflineError> {
    let config = Config::load(path)?;
    let slices: u32 = config.emcs.iter().map(|emc| emc.slices).sum();
    println!(
        "{}: {} hosts, {} EMCs, {slices} slices: ok",
        path.display(),
        config.hosts.len(),
        config.emcs.len()
    );
    Ok(())
}

/// Checks rack.toml, every page of the store and every record in it.
///
/// # Errors
/// The first thing that is wrong.
pub fn check(path: &Path) -> Result<(), OfflineError> {
    check_config(path)?;
    let config = Config::load(path)?;
    let mut store = RedbStore::open_directory(&config.manager.store)?;
    let sound = store.verify()?;
    let loaded = records::load(&mut store)?;
    let mut decisions = 0_u64;
    records::scan(&mut store, Table::Audit, &mut |_| decisions += 1)?;
    let place = config.manager.store.display();
    let revision = loaded.meta.map_or(0, |meta| meta.revision.0);
    let repaired = if sound { "" } else { ", put right after a crash" };
    println!(
        "{place}: revision {revision}, {} records, {decisions} decisions: ok{repaired}",
        loaded.records.len()
    );
    Ok(())
}
