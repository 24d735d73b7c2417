//! Latest report of each host about its tenants, since the start of the manager.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use units::Name;

/// Latest report of each host. The number of hosts of a rack limits the number of reports.
#[derive(Debug)]
pub struct HostReports<R> {
    reports: Mutex<HashMap<Name, R>>,
}

impl<R> Default for HostReports<R> {
    fn default() -> Self {
        Self { reports: Mutex::default() }
    }
}

impl<R: Clone> HostReports<R> {
    /// Stores the latest report of a host in memory.
    pub fn record(&self, host: Name, report: R) {
        self.lock().insert(host, report);
    }

    /// Returns the latest report of a host.
    pub fn get(&self, host: &Name) -> Option<R> {
        self.lock().get(host).cloned()
    }

    /// Deletes the report of a host, which may report less from now on.
    pub fn remove(&self, host: &Name) {
        self.lock().remove(host);
    }

    /// Deletes the reports of other hosts than these.
    pub fn retain_hosts(&self, hosts: &BTreeSet<Name>) {
        self.lock().retain(|host, _| hosts.contains(host));
    }

    /// Locks the reports. Ignores that another thread panicked while it held the lock, because each
    /// entry is always complete.
    fn lock(&self) -> MutexGuard<'_, HashMap<Name, R>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
