//! Stored shares: `symbiosis.json` in the agent's directory. It is written before any limit is set.

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

use crate::runtime_dir::{RuntimeDirError, io_error, sync_parent, write_durably};

/// Why it cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeptError {
    /// The operating system refused.
    #[error(transparent)]
    Dir(#[from] RuntimeDirError),
    /// The file has invalid contents.
    #[error("{} is not what was written; without it shares begin anew", path.display())]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// Error.
        #[source]
        cause: serde_json::Error,
    },
}

/// Where it is.
#[derive(Clone, Debug)]
pub struct Kept {
    path: PathBuf,
    /// There while pages are watched: then DAMON is ours.
    watching: PathBuf,
}

/// As it is written. An unknown key is another version's, so it is an error.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    memory_mib: u64,
    bandwidth_mb_s: u64,
    tenants: BTreeMap<String, WrittenOne>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenOne {
    weight: f64,
    memory_mib: u64,
    bandwidth_mb_s: u64,
}

impl Kept {
    /// That of an agent's directory.
    pub fn at(runtime_dir: &Path) -> Self {
        Self { path: runtime_dir.join("symbiosis.json"), watching: runtime_dir.join("symbiosis.watching") }
    }

    /// Returns the last shares, if any.
    ///
    /// # Errors
    /// The file has invalid contents, or cannot be read.
    pub fn load(&self) -> Result<Option<AppliedShares>, KeptError> {
        let bytes = match fs::read(&self.path) {
            Err(errno) if errno.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(io_error("read", &self.path))?,
        };
        let corrupt = |cause| KeptError::Corrupt { path: self.path.clone(), cause };
        let Written { memory_mib, bandwidth_mb_s, tenants } =
            serde_json::from_slice(&bytes).map_err(corrupt)?;
        let supply = Supply { memory_mib, bandwidth_mb_s };
        let weighed = |(name, one): (String, WrittenOne)| {
            let is_sound =
                is_weight(one.weight) && one.memory_mib <= memory_mib && one.bandwidth_mb_s <= bandwidth_mb_s;
            let share = Share { memory_mib: one.memory_mib, bandwidth_mb_s: one.bandwidth_mb_s };
            let wrong = || serde::de::Error::custom(format!("{name} has a weight or a share out of range"));
            if is_sound {
                Ok((Arc::from(&*name), WeightedShare { weight: one.weight, share }))
            } else {
                Err(wrong())
            }
        };
        let tenants = tenants.into_iter().map(weighed).collect::<Result<_, serde_json::Error>>();
        Ok(Some(AppliedShares { supply, tenants: tenants.map_err(corrupt)? }))
    }

    /// Writes it; it is on disk when this returns.
    ///
    /// # Errors
    /// The operating system refused.
    pub fn save(&self, dealt: &AppliedShares) -> Result<(), KeptError> {
        let one = |(name, one): (&Arc<str>, &WeightedShare)| {
            let WeightedShare { weight, share: Share { memory_mib, bandwidth_mb_s } } = *one;
            (name.to_string(), WrittenOne { weight, memory_mib, bandwidth_mb_s })
        };
        let Supply { memory_mib, bandwidth_mb_s } = dealt.supply;
        let written =
            Written { memory_mib, bandwidth_mb_s, tenants: dealt.tenants.iter().map(one).collect() };
        let bytes = serde_json::to_vec_pretty(&written).expect("numbers and texts are JSON");
        Ok(write_durably(&self.path, &bytes)?)
    }

    /// Nothing was dealt.
    ///
    /// # Errors
    /// The operating system refused.
    pub fn forget(&self) -> Result<(), KeptError> {
        match fs::remove_file(&self.path) {
            Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(errno) => Err(io_error("remove", &self.path)(errno).into()),
            Ok(()) => Ok(sync_parent(&self.path)?),
        }
    }

    /// Whether an agent before was watching when it ended, since the machine started.
    pub fn was_watching(&self, boot_id: &str) -> bool {
        fs::read_to_string(&self.watching).is_ok_and(|noted| noted == boot_id)
    }

    /// Pages are watched from now on, since this start of the machine; or no more. If it cannot be noted, the next agent leaves DAMON alone.
    pub fn note_watching(&self, boot_id: Option<&str>) {
        let noted = match boot_id {
            Some(boot_id) => fs::write(&self.watching, boot_id),
            None => fs::remove_file(&self.watching),
        };
        if let Err(error) = noted {
            tracing::warn!(path = %self.watching.display(), %error, "not noted");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_shares_are_loaded_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let kept = Kept::at(folder.path());
        assert_eq!(kept.load().unwrap(), None);
        let share = Share { memory_mib: 3, bandwidth_mb_s: 4 };
        let dealt = AppliedShares {
            supply: Supply { memory_mib: 10, bandwidth_mb_s: 20 },
            tenants: BTreeMap::from([("db".into(), WeightedShare { weight: 0.1, share })]),
        };
        kept.save(&dealt).unwrap();
        assert_eq!(kept.load().unwrap(), Some(dealt));
    }

    #[test]
    fn corrupt_shares_are_an_error_with_path() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("symbiosis.json"), "{}").unwrap();
        let error = units::chain(&Kept::at(folder.path()).load().unwrap_err());
        assert!(
            error.contains("symbiosis.json is not what was written") && error.contains("missing field"),
            "{error}"
        );
    }

    #[test]
    fn stored_shares_out_of_range_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let one = |weight: &str, memory: u64| {
            let text = format!(
                r#"{{"memory_mib":10,"bandwidth_mb_s":10,"tenants":{{"db":{{"weight":{weight},"memory_mib":{memory},"bandwidth_mb_s":1}}}}}}"#
            );
            fs::write(folder.path().join("symbiosis.json"), text).unwrap();
            Kept::at(folder.path()).load()
        };
        one("1.0", 10).unwrap();
        for wrong in [one("0.0", 10), one("1.0", 11), one("1e9", 1)] {
            assert!(units::chain(&wrong.unwrap_err()).contains("db has a weight or a share out of range"));
        }
    }
}
