//! Cgroups that are tenants of fair tiering or of early eviction.

use std::collections::{BTreeMap, BTreeSet};

use units::Name;

use crate::host::{cgroup::Cgroups, sysfs::SysfsError};

/// Names of cgroups that are no tenants, so that each is logged once.
#[derive(Debug, Default)]
pub(crate) struct IgnoredCgroups(BTreeSet<String>);

impl IgnoredCgroups {
    /// Reads the state of each named cgroup with `read`. Cgroups whose names are no tenant names, or whose
    /// counters cannot be read, are ignored. Cgroups that have ended are omitted.
    pub fn read_tenants<T>(
        &mut self,
        cgroups: &Cgroups,
        names: Vec<String>,
        mut read: impl FnMut(&Name) -> Result<T, SysfsError>,
    ) -> BTreeMap<Name, T> {
        self.0.retain(|name| names.contains(name));
        let mut tenants = BTreeMap::new();
        for cgroup in names {
            let Ok(name) = Name::new(&cgroup) else {
                if self.0.insert(cgroup.clone()) {
                    tracing::warn!(cgroup, "ignoring cgroup with an invalid tenant name");
                }
                continue;
            };
            match read(&name) {
                Ok(state) => {
                    self.0.remove(&cgroup);
                    tenants.insert(name, state);
                }
                Err(_) if !cgroups.exists(&cgroup) => {} // the tenant has ended meanwhile
                Err(error) => {
                    let error = units::chain(&error);
                    if self.0.insert(cgroup.clone()) {
                        tracing::warn!(cgroup, error, "ignoring a tenant whose counters cannot be read");
                    }
                }
            }
        }
        tenants
    }

    /// Returns the names of the ignored cgroups.
    pub fn names(&self) -> &BTreeSet<String> {
        &self.0
    }
}
