//! Result of an epoch of Symbiosis for the manager, metrics and tests, with the weights set by the
//! manager.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use fairness::market::{Certificate, Share, Supply};
use tokio::sync::Notify;
use units::{Bytes, Name, UnixMs};

use crate::{config::symbiosis::Enforce, host::access_profile::AccessSource};

/// Result of an epoch.
#[derive(Clone, Debug)]
pub struct Report {
    /// Numbers the epochs of one start of the agent, from 1.
    pub epoch: u64,
    /// Time of its end.
    pub at: UnixMs,
    /// Supply.
    pub supply: Supply,
    /// Effect.
    pub state: State,
    /// Reason why shares are unchanged.
    pub reason: String,
    /// Participating and new tenants.
    pub tenants: Vec<TenantReport>,
    /// Certificate of the shares, if they were decided.
    pub certificate: Option<ShareCertificate>,
}

/// Properties of the decided shares.
#[derive(Clone, Debug)]
pub struct ShareCertificate {
    /// Certificate.
    pub certificate: Certificate,
    /// Fraction of the step towards the new shares that was taken, 0 to 1.
    pub step_fraction: f64,
    /// Tenant with the smallest throughput relative to an equal split.
    pub worst_off: Name,
}

/// Effect of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// New shares were set.
    Set,
    /// New shares would differ too little.
    Unchanged,
    /// An input was missing: shares are unchanged.
    Blocked,
}

/// One tenant after an epoch.
#[derive(Clone, Debug)]
pub struct TenantReport {
    /// Name of its cgroup.
    pub name: Name,
    /// Weight.
    pub weight: f64,
    /// Enforcement.
    pub enforce: Enforce,
    /// Share in an equal split.
    pub fair: Share,
    /// Share in force.
    pub share: Share,
    /// Work in the epoch.
    pub measured: Option<TenantMeasurement>,
    /// Bandwidth demand, in MB/s.
    pub demand_mb_s: f64,
    /// Estimated throughput relative to an equal split.
    pub gain: f64,
    /// Relative error of the estimate, 0 to 1.
    pub error: f64,
    /// Reason why its share is not in force, if any.
    pub problem: String,
}

/// Work of a tenant in an epoch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TenantMeasurement {
    /// Memory usage.
    pub memory: Bytes,
    /// Bandwidth used of the link, in the busier direction, in MB/s.
    pub used_mb_s: f64,
    /// Fraction of time in which some task was stalled on memory or I/O, 0 to 1.
    pub stalled_fraction: f64,
    /// Pages reclaimed and faulted back, per second.
    pub refaults: f64,
    /// Source of its page accesses, if any.
    pub source: Option<AccessSource>,
}

impl Report {
    /// Creates the report of an epoch without a decision.
    pub(crate) fn undecided(epoch: u64, supply: Supply, reason: String) -> Self {
        let (tenants, certificate) = (Vec::new(), None);
        Self { epoch, at: now(), supply, state: State::Blocked, reason, tenants, certificate }
    }
}

impl TenantReport {
    /// Creates the report of a tenant without measurements.
    pub(crate) fn new(name: &Name, enforce: Enforce, problem: &str) -> Self {
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

/// Last report, and weights set by the manager.
#[derive(Debug, Default)]
pub struct SharesState {
    inner: Mutex<Inner>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    report: Option<Report>,
    is_sent: bool,
    /// `None` before the manager has sent weights.
    weights: Option<BTreeMap<Name, f64>>,
}

impl SharesState {
    /// Poisoned state is consistent: no call leaves it half written.
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the report of an epoch.
    pub fn store_report(&self, report: Report) {
        let mut inner = self.inner();
        inner.report = Some(report);
        inner.is_sent = false;
        self.changed.notify_one();
    }

    /// Returns the unsent report as soon as there is one. Cancel-safe.
    pub async fn next_report(&self) -> Report {
        loop {
            {
                let mut inner = self.inner();
                if !inner.is_sent
                    && let Some(report) = inner.report.clone()
                {
                    inner.is_sent = true;
                    return report;
                }
            }
            self.changed.notified().await;
        }
    }

    /// Starts another session: the last report is sent again.
    pub fn resend_report(&self) {
        self.inner().is_sent = false;
        self.changed.notify_one();
    }

    /// Stores the weights sent by the manager.
    pub fn set_weights(&self, weights: BTreeMap<Name, f64>) {
        self.inner().weights = Some(weights);
    }

    /// Returns the weights, if the manager has sent any.
    pub(crate) fn weights(&self) -> Option<BTreeMap<Name, f64>> {
        self.inner().weights.clone()
    }

    /// Returns the last report.
    pub fn last_report(&self) -> Option<Report> {
        self.inner().report.clone()
    }
}
