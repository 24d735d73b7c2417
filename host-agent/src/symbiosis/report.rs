//! Result of an epoch for the manager, metrics and tests, with the weights set by the manager.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use fairness::market::{Certificate, Share, Supply};
use tokio::sync::Notify;
use units::{Name, UnixMs};

use super::meter::Measured;
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
    pub why: String,
    /// Participating and new tenants.
    pub tenants: Vec<TenantReport>,
    /// How shares came about, if they did.
    pub certified: Option<Certified>,
}

/// How shares came about.
#[derive(Clone, Debug)]
pub struct Certified {
    /// Certificate.
    pub certificate: Certificate,
    /// The part of the way that was gone, 0 to 1.
    pub way: f64,
    /// Tenant with the smallest throughput relative to an equal split.
    pub worst_off: Name,
}

/// Effect of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Shares were set anew.
    Set,
    /// New ones would differ too little.
    Held,
    /// Something was missing: shares are as they were.
    Kept,
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
    pub measured: Option<Measured>,
    /// Bandwidth demand, in MB/s.
    pub wanted: f64,
    /// Throughput against that of an equal split, as estimated.
    pub gain: f64,
    /// How far that may be off, 0 to 1.
    pub error: f64,
    /// Reason why its share is not in force, if any.
    pub problem: String,
}

impl Report {
    /// Nothing can be decided, and why.
    pub(super) fn nothing(epoch: u64, supply: Supply, why: String) -> Self {
        let (tenants, certified) = (Vec::new(), None);
        Self { epoch, at: now(), supply, state: State::Kept, why, tenants, certified }
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
            wanted: 0.0,
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
pub struct Book {
    pages: Mutex<Pages>,
    written: Notify,
}

#[derive(Debug, Default)]
struct Pages {
    report: Option<Report>,
    is_told: bool,
    /// `None` before the manager has sent weights.
    weights: Option<BTreeMap<Name, f64>>,
}

impl Book {
    /// A poisoned book is still right: no call leaves it half written.
    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An epoch is over.
    pub fn put(&self, report: Report) {
        let mut pages = self.pages();
        pages.report = Some(report);
        pages.is_told = false;
        self.written.notify_one();
    }

    /// Returns the unsent report as soon as there is one. Cancel-safe.
    pub async fn news(&self) -> Report {
        loop {
            {
                let mut pages = self.pages();
                if !pages.is_told
                    && let Some(report) = pages.report.clone()
                {
                    pages.is_told = true;
                    return report;
                }
            }
            self.written.notified().await;
        }
    }

    /// Starts another session: the last report is sent again.
    pub fn tell_again(&self) {
        self.pages().is_told = false;
        self.written.notify_one();
    }

    /// Stores the weights sent by the manager.
    pub fn set_weights(&self, weights: BTreeMap<Name, f64>) {
        self.pages().weights = Some(weights);
    }

    /// Returns the weights, if the manager has sent any.
    pub(super) fn weights(&self) -> Option<BTreeMap<Name, f64>> {
        self.pages().weights.clone()
    }

    /// The last report.
    pub fn last(&self) -> Option<Report> {
        self.pages().report.clone()
    }
}
