//! Stored shares: the file `shares.json` in the runtime directory. The file is written before
//! limits are set, so that a restarted agent continues from the current shares.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use fairness::{
    epoch::{AppliedShares, WeightedShare},
    market::{Share, Supply},
};
use serde::{Deserialize, Serialize};
use units::limits::is_weight;

use crate::runtime_dir::{RuntimeDirError, io_error, read_state, sync_parent_directory, write_durably};

/// Reason why stored shares cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PersistedSharesError {
    /// The file cannot be read or written.
    #[error(transparent)]
    Dir(#[from] RuntimeDirError),
    /// The file has invalid contents.
    #[error("{} has invalid contents: remove it, so that shares are decided without previous shares", path.display())]
    Corrupt {
        /// Path of the file.
        path: PathBuf,
        /// Invalid contents.
        #[source]
        cause: serde_json::Error,
    },
}

/// Store of the shares in the runtime directory.
#[derive(Clone, Debug)]
pub struct PersistedShares {
    path: PathBuf,
    /// File that exists while an agent uses DAMON.
    monitoring_file: PathBuf,
}

/// File format of stored shares. Unknown keys are errors, because another version wrote them.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredShares {
    memory_pages: u64,
    bandwidth_kb_s: u64,
    tenants: BTreeMap<String, StoredTenant>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredTenant {
    weight: f64,
    memory_pages: u64,
    bandwidth_kb_s: u64,
}

impl PersistedShares {
    /// Returns the store in a runtime directory, without accessing it.
    pub fn at(runtime_dir: &Path) -> Self {
        Self {
            path: runtime_dir.join("shares.json"),
            monitoring_file: runtime_dir.join("symbiosis.watching"),
        }
    }

    /// Returns the stored shares, if any.
    ///
    /// # Errors
    /// [`PersistedSharesError::Corrupt`], or the file cannot be read.
    pub fn load(&self) -> Result<Option<AppliedShares>, PersistedSharesError> {
        let Some(bytes) = read_state(&self.path)? else { return Ok(None) };
        let corrupt = |cause| PersistedSharesError::Corrupt { path: self.path.clone(), cause };
        let StoredShares { memory_pages, bandwidth_kb_s, tenants } =
            serde_json::from_slice(&bytes).map_err(corrupt)?;
        let supply = Supply { memory_pages, bandwidth_kb_s };
        let tenant = |(name, stored): (String, StoredTenant)| {
            let is_valid = is_weight(stored.weight)
                && stored.memory_pages <= memory_pages
                && stored.bandwidth_kb_s <= bandwidth_kb_s;
            let share = Share { memory_pages: stored.memory_pages, bandwidth_kb_s: stored.bandwidth_kb_s };
            let error = || serde::de::Error::custom(format!("tenant {name}: weight or share out of range"));
            if is_valid {
                Ok((Arc::from(&*name), WeightedShare { weight: stored.weight, share }))
            } else {
                Err(error())
            }
        };
        let tenants = tenants.into_iter().map(tenant).collect::<Result<_, serde_json::Error>>();
        Ok(Some(AppliedShares { supply, tenants: tenants.map_err(corrupt)? }))
    }

    /// Writes shares durably.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, shares: &AppliedShares) -> Result<(), PersistedSharesError> {
        let tenant = |(name, share): (&Arc<str>, &WeightedShare)| {
            let WeightedShare { weight, share: Share { memory_pages, bandwidth_kb_s } } = *share;
            (name.to_string(), StoredTenant { weight, memory_pages, bandwidth_kb_s })
        };
        let Supply { memory_pages, bandwidth_kb_s } = shares.supply;
        let tenants = shares.tenants.iter().map(tenant).collect();
        let written = StoredShares { memory_pages, bandwidth_kb_s, tenants };
        let bytes = serde_json::to_vec_pretty(&written).expect("numbers and strings can be serialized");
        Ok(write_durably(&self.path, &bytes)?)
    }

    /// Removes the stored shares, if any.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(&self) -> Result<(), PersistedSharesError> {
        match fs::remove_file(&self.path) {
            Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(errno) => Err(io_error("remove", &self.path)(errno).into()),
            Ok(()) => Ok(sync_parent_directory(&self.path)?),
        }
    }

    /// Returns whether an earlier agent ended while it used DAMON, in this boot of the machine.
    pub fn was_monitoring(&self, boot_id: &str) -> bool {
        read_state(&self.monitoring_file).is_ok_and(|stored| stored.as_deref() == Some(boot_id.as_bytes()))
    }

    /// Stores whether this agent uses DAMON: the boot id while it does, `None` when it does not. An
    /// error is only logged; the next agent then does not stop DAMON.
    pub fn set_monitoring(&self, boot_id: Option<&str>) {
        let result = match boot_id {
            Some(boot_id) => write_durably(&self.monitoring_file, boot_id.as_bytes()),
            None => fs::remove_file(&self.monitoring_file).map_err(io_error("remove", &self.monitoring_file)),
        };
        if let Err(error) = result {
            tracing::warn!(error = units::chain(&error), "cannot store whether DAMON is in use");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_shares_are_loaded_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let persisted = PersistedShares::at(folder.path());
        assert_eq!(persisted.load().unwrap(), None);
        let share = Share { memory_pages: 3, bandwidth_kb_s: 4 };
        let shares = AppliedShares {
            supply: Supply { memory_pages: 10, bandwidth_kb_s: 20 },
            tenants: BTreeMap::from([("db".into(), WeightedShare { weight: 0.1, share })]),
        };
        persisted.save(&shares).unwrap();
        assert_eq!(persisted.load().unwrap(), Some(shares));
    }

    #[test]
    fn corrupt_shares_are_an_error_with_path() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("shares.json"), "{}").unwrap();
        let error = units::chain(&PersistedShares::at(folder.path()).load().unwrap_err());
        assert!(
            error.contains("shares.json has invalid contents") && error.contains("missing field"),
            "{error}"
        );
    }

    #[test]
    fn irregular_files_of_shares_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let persisted = PersistedShares::at(folder.path());
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        for name in ["shares.json", "symbiosis.watching"] {
            rustix::fs::mkfifoat(rustix::fs::CWD, folder.path().join(name), mode).unwrap();
        }
        let error = units::chain(&persisted.load().unwrap_err());
        assert!(error.ends_with("shares.json: must be a regular file"), "{error}");
        assert!(!persisted.was_monitoring("boot"));
        persisted.set_monitoring(Some("boot"));
        assert!(persisted.was_monitoring("boot"));
    }

    #[test]
    fn stored_shares_out_of_range_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let load = |weight: &str, memory: u64| {
            let text = format!(
                r#"{{"memory_pages":10,"bandwidth_kb_s":10,"tenants":{{"db":{{"weight":{weight},"memory_pages":{memory},"bandwidth_kb_s":1}}}}}}"#
            );
            fs::write(folder.path().join("shares.json"), text).unwrap();
            PersistedShares::at(folder.path()).load()
        };
        load("1.0", 10).unwrap();
        for error in [load("0.0", 10), load("1.0", 11), load("1e9", 1)] {
            assert!(units::chain(&error.unwrap_err()).contains("tenant db: weight or share out of range"));
        }
    }
}
