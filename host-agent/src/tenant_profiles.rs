//! Access profiles of tenants that fair tiering measures by DAMON. Symbiosis uses them, because DAMON
//! has only one user at a time.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use units::Name;

use crate::host::access_profile::AccessProfile;

/// Last profile of each tenant, with its time.
#[derive(Debug, Default)]
pub struct TenantProfiles {
    profiles: Mutex<BTreeMap<Name, (Instant, AccessProfile)>>,
}

impl TenantProfiles {
    /// Stores profiles, and removes those of other tenants than `tenants`.
    pub fn store(&self, profiles: BTreeMap<Name, AccessProfile>, tenants: impl Fn(&Name) -> bool) {
        let mut stored = self.lock();
        stored.retain(|name, _| tenants(name));
        let now = Instant::now();
        stored.extend(profiles.into_iter().map(|(name, profile)| (name, (now, profile))));
    }

    /// Returns the profiles that were measured within this time.
    pub fn recent(&self, within: Duration) -> BTreeMap<Name, AccessProfile> {
        let stored = self.lock();
        let recent = stored.iter().filter(|(_, (at, _))| at.elapsed() <= within);
        recent.map(|(name, (_, profile))| (name.clone(), profile.clone())).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Name, (Instant, AccessProfile)>> {
        self.profiles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
