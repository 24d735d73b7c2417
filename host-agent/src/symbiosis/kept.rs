//! What was dealt, on disk: `symbiosis.json` in the agent's directory. It is there before any limit is set by it.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use fairness::{
    epoch::{Dealt, Weighed},
    market::{Share, Supply},
};
use serde::{Deserialize, Serialize};

use crate::runtime_dir::{RuntimeDirError, io_error, write_durably};

/// Why it cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeptError {
    /// The operating system refused.
    #[error(transparent)]
    Dir(#[from] RuntimeDirError),
    /// It is not what was written.
    #[error("{} is not what was written; without it shares begin anew", path.display())]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
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

    /// What was dealt last, if anything was.
    ///
    /// # Errors
    /// It is not what was written, or cannot be read.
    pub fn load(&self) -> Result<Option<Dealt>, KeptError> {
        let bytes = match fs::read(&self.path) {
            Err(errno) if errno.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(io_error("read", &self.path))?,
        };
        let corrupt = |cause| KeptError::Corrupt { path: self.path.clone(), cause };
        let Written { memory_mib, bandwidth_mb_s, tenants } =
            serde_json::from_slice(&bytes).map_err(corrupt)?;
        let weighed = |(name, one): (String, WrittenOne)| {
            let share = Share { memory_mib: one.memory_mib, bandwidth_mb_s: one.bandwidth_mb_s };
            (Arc::from(name), Weighed { weight: one.weight, share })
        };
        let supply = Supply { memory_mib, bandwidth_mb_s };
        Ok(Some(Dealt { supply, tenants: tenants.into_iter().map(weighed).collect() }))
    }

    /// Writes it; it is on disk when this returns.
    ///
    /// # Errors
    /// The operating system refused.
    pub fn save(&self, dealt: &Dealt) -> Result<(), KeptError> {
        let one = |(name, one): (&Arc<str>, &Weighed)| {
            let Weighed { weight, share: Share { memory_mib, bandwidth_mb_s } } = *one;
            (name.to_string(), WrittenOne { weight, memory_mib, bandwidth_mb_s })
        };
        let Supply { memory_mib, bandwidth_mb_s } = dealt.supply;
        let written =
            Written { memory_mib, bandwidth_mb_s, tenants: dealt.tenants.iter().map(one).collect() };
        let bytes = serde_json::to_vec_pretty(&written).expect("numbers and texts are JSON");
        Ok(write_durably(&self.path, &bytes)?)
    }

    /// Whether an agent before was watching when it ended.
    pub fn was_watching(&self) -> bool {
        self.watching.exists()
    }

    /// Pages are watched from now on, or no more. If it cannot be noted, the next agent leaves DAMON alone.
    pub fn note_watching(&self, is_so: bool) {
        let noted = if is_so { fs::write(&self.watching, "") } else { fs::remove_file(&self.watching) };
        if let Err(error) = noted {
            tracing::warn!(path = %self.watching.display(), %error, "not noted");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_dealt_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let kept = Kept::at(folder.path());
        assert_eq!(kept.load().unwrap(), None);
        let share = Share { memory_mib: 3, bandwidth_mb_s: 4 };
        let dealt = Dealt {
            supply: Supply { memory_mib: 10, bandwidth_mb_s: 20 },
            tenants: BTreeMap::from([("db".into(), Weighed { weight: 0.1, share })]),
        };
        kept.save(&dealt).unwrap();
        assert_eq!(kept.load().unwrap(), Some(dealt));
    }

    #[test]
    fn what_is_something_else_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("symbiosis.json"), "{}").unwrap();
        let error = units::chain(&Kept::at(folder.path()).load().unwrap_err());
        assert!(
            error.contains("symbiosis.json is not what was written") && error.contains("missing field"),
            "{error}"
        );
    }
}
