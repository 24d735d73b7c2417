//! State that Symbiosis shares with the session: the result of the last epoch, and the weights set
//! by the manager.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use fairness::market::{Certificate, Share, Supply};
use units::{Bytes, Name, UnixMs};

use crate::{
    config::symbiosis::EnforcementMethod, host::access_profile::AccessSource, report_slot::ReportSlot,
};

/// Result of an epoch of Symbiosis.
#[derive(Clone, Debug)]
pub struct Report {
    /// Number of the epoch since the start of the agent, from 1.
    pub epoch: u64,
    /// Time at which the epoch ended.
    pub at: UnixMs,
    /// Resources that the tenants share.
    pub supply: Supply,
    /// Effect of the epoch on shares.
    pub state: State,
    /// Reason why shares could not be decided; empty unless `state` is [`State::Blocked`].
    pub reason: String,
    /// Tenants with a share, and new tenants.
    pub tenants: Vec<TenantReport>,
    /// Certificate of the shares, if they were decided.
    pub certificate: Option<ShareCertificate>,
}

/// Properties of the decided shares.
#[derive(Clone, Debug)]
pub struct ShareCertificate {
    /// Certificate of the market.
    pub certificate: Certificate,
    /// Fraction of the step from the previous to the optimal shares that was taken, 0 to 1.
    pub step_fraction: f64,
    /// Tenant with the smallest estimated throughput relative to an equal split.
    pub worst_off: Name,
}

/// Effect of an epoch on shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// New shares were set.
    Set,
    /// Shares are unchanged, because new shares would gain too little.
    Unchanged,
    /// Shares are unchanged, because an input was missing.
    Blocked,
}

/// State of one tenant after an epoch.
#[derive(Clone, Debug)]
pub struct TenantReport {
    /// Name of the tenant's cgroup.
    pub name: Name,
    /// Weight of the tenant in the market.
    pub weight: f64,
    /// Method of enforcing the share.
    pub enforce: EnforcementMethod,
    /// Share of the tenant in an equal split.
    pub fair: Share,
    /// Current share of the tenant.
    pub share: Share,
    /// Measurements in the epoch; `None` in the first epoch of a tenant.
    pub measured: Option<TenantMeasurement>,
    /// Bandwidth demand, in MB/s.
    pub demand_mb_s: f64,
    /// Estimated throughput relative to an equal split.
    pub gain: f64,
    /// Relative error of the estimated throughput, 0 to 1.
    pub error: f64,
    /// Reason why the share is not enforced; empty if it is.
    pub problem: String,
}

/// Measurements of a tenant in an epoch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TenantMeasurement {
    /// Memory usage at the end of the epoch.
    pub memory: Bytes,
    /// Used bandwidth of the link in the busier direction, in MB/s.
    pub used_mb_s: f64,
    /// Fraction of the epoch in which some task was stalled on memory or I/O, 0 to 1.
    pub stalled_fraction: f64,
    /// Number of pages that were reclaimed and faulted back, per second.
    pub refaults: f64,
    /// Mechanism that measured the page accesses, if any.
    pub source: Option<AccessSource>,
}

impl Report {
    /// Creates the report of an epoch in which no shares could be decided.
    pub(crate) fn undecided_report(epoch: u64, supply: Supply, reason: String) -> Self {
        let (tenants, certificate) = (Vec::new(), None);
        Self { epoch, at: now(), supply, state: State::Blocked, reason, tenants, certificate }
    }
}

impl TenantReport {
    /// Creates the report of a tenant without measurements.
    pub(crate) fn new(name: &Name, enforce: EnforcementMethod, problem: &str) -> Self {
        Self {
            name: name.clone(),
            weight: 1.0,
            enforce,
            fair: Share::default(),
            share: Share::default(),
            measured: None,
            demand_mb_s: 0.0,
            gain: 1.0,
            error: 1.0,
            problem: problem.to_owned(),
        }
    }
}

pub(crate) fn now() -> UnixMs {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UnixMs(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Last report of Symbiosis, and the weights set by the manager.
#[derive(Debug, Default)]
pub struct SharesState {
    /// Last report.
    pub reports: ReportSlot<Report>,
    /// `None` before the manager has sent weights.
    weights: Mutex<Option<BTreeMap<Name, f64>>>,
}

impl SharesState {
    /// Stores the weights sent by the manager.
    pub fn set_weights(&self, weights: BTreeMap<Name, f64>) {
        *self.weights.lock().unwrap_or_else(PoisonError::into_inner) = Some(weights);
    }

    /// Returns the weights sent by the manager; `None` if it has not sent any.
    pub(crate) fn weights(&self) -> Option<BTreeMap<Name, f64>> {
        self.weights.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
