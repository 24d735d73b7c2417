//! Result of an epoch for the manager, metrics and tests, with the weights set by the manager.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use fairness::market::{Certificate, Share, Supply};
use tokio::sync::Notify;
use units::{Name, UnixMs};

use super::meter::TenantMeasurement;
use crate::config::symbiosis::Enforce;

/// Result of an epoch.
#[derive(Clone, Debug)]
pub struct Report {
    /// Numbers the epochs of one start of the agent, from 1.
    pub epoch: u64,
    /// When it ended.
    pub at: UnixMs,
    /// Supply.
    pub supply: Supply,
    /// Effect.
    pub state: State,
    /// Why shares are as they were.
    pub reason: String,
    /// Participating and new tenants.
    pub tenants: Vec<TenantReport>,
    /// How shares came about, if they did.
    pub certificate: Option<ShareCertificate>,
}

/// How shares came about.
#[derive(Clone, Debug)]
pub struct ShareCertificate {
    /// Certificate.
    pub certificate: Certificate,
    /// The part of the way that was gone, 0 to 1.
    pub step_fraction: f64,
    /// Tenant with the smallest throughput relative to an equal split.
    pub worst_off: Name,
}

/// Effect of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Shares were set anew.
    Set,
    /// New ones would differ too little.
    Unchanged,
    /// Something was missing: shares are as they were.
    Blocked,
}

/// One tenant after an epoch.
#[derive(Clone, Debug)]
pub struct TenantReport {
    /// Its cgroup's name.
    pub name: Name,
    /// Weight.
    pub weight: f64,
    /// Enforcement.
    pub enforce: Enforce,
    /// Of an equal split.
    pub fair: Share,
    /// Share in force.
    pub share: Share,
    /// Work in the epoch.
    pub measured: Option<TenantMeasurement>,
    /// Bandwidth demand, in MB/s.
    pub demand_mb_s: f64,
    /// Throughput against that of an equal split, as estimated.
    pub gain: f64,
    /// How far that may be off, 0 to 1.
    pub error: f64,
    /// Reason why its share is not in force, if any.
    pub problem: String,
}

impl Report {
    /// Nothing can be decided, and why.
    pub(super) fn undecided(epoch: u64, supply: Supply, reason: String) -> Self {
        let (tenants, certificate) = (Vec::new(), None);
        Self { epoch, at: now(), supply, state: State::Blocked, reason, tenants, certificate }
    }
}

impl TenantReport {
    /// Creates the report of a tenant of which only a problem is known.
    pub(super) fn new(name: &Name, enforce: Enforce, problem: &str) -> Self {
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

pub(super) fn now() -> UnixMs {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UnixMs(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// The last report, and the weights that are set.
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
    /// A poisoned book is still right: no call leaves it half written.
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An epoch is over.
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
    pub(super) fn weights(&self) -> Option<BTreeMap<Name, f64>> {
        self.inner().weights.clone()
    }

    /// The last report.
    pub fn last_report(&self) -> Option<Report> {
        self.inner().report.clone()
    }
}
