//! Symbiosis in the manager: weights set by a scheduler are durable and sent to the host's agent;
//! the latest report of each host is held in memory. Shares are decided on the host.
//!
//! ```text
//!   SetWeights ──▶ store ──▶ weights by host ──watcher──▶ each session of the host
//!   session ──report of an epoch──▶ reports ──▶ GetShares
//! ```

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use pool::{
    audit::{Actor, Decision, DecisionKind, Subject},
    manager::Request,
    rejection::Rejection,
};
use tokio::sync::watch;
use units::{
    Name,
    limits::{TENANTS_PER_HOST_MAX, is_weight},
};

use crate::{
    convert::{Invalid, shares::ShareReport},
    driver::{DriverError, Handle},
    records::share_rows::{self, Weights, WeightsByHost},
    store::{Scan, StoreError},
};

/// Error of [`Shares::set_weights`].
#[derive(Debug, thiserror::Error)]
pub enum SetWeightsError {
    /// The host would have too many weights.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The host is not in the rack, the store failed, or the manager is stopping.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Weights in the store, read before writers start.
#[derive(Debug)]
pub struct StoredWeights(WeightsByHost);

/// Reads the stored weights. Unreadable rows are skipped and logged: the default weights apply, and
/// the rack keeps running.
///
/// # Errors
/// The store cannot be read.
pub fn load(store: &mut dyn Scan) -> Result<StoredWeights, StoreError> {
    share_rows::load(store).map(StoredWeights)
}

/// Weights and shares of a rack's hosts.
#[derive(Debug)]
pub struct Shares {
    /// Durable weights.
    weights_by_host: watch::Sender<WeightsByHost>,
    /// Held by the writer: a host's weights are one entry, derived from the previous one.
    write_lock: tokio::sync::Mutex<()>,
    /// Latest report of each host since the manager started.
    reports: Mutex<HashMap<Name, ShareReport>>,
    driver: Handle,
}

impl Shares {
    /// Creates it with stored weights, without reports.
    pub fn new(StoredWeights(weights_by_host): StoredWeights, driver: Handle) -> Self {
        Self {
            weights_by_host: watch::Sender::new(weights_by_host),
            write_lock: tokio::sync::Mutex::default(),
            reports: Mutex::default(),
            driver,
        }
    }

    /// Sets weights of a host's tenants, and removes those that are 0; others are unchanged.
    /// Returns all weights of the host, durably; watchers of the host are notified. Must be awaited
    /// to its end, so that durable and current weights agree.
    ///
    /// # Errors
    /// The host is not in the rack, it would have more than [`TENANTS_PER_HOST_MAX`] weights, or
    /// they could not be made durable.
    pub async fn set_weights(
        &self,
        host: &Name,
        changes: Weights,
        actor: Actor,
    ) -> Result<Arc<Weights>, SetWeightsError> {
        let _guard = self.write_lock.lock().await;
        let host_id = self.driver.read(|manager, _| manager.durable().host_named(host))?;
        host_id.ok_or_else(|| DriverError::Rejection(Rejection::NoSuchHost(host.clone())))?;
        let before = self.weights(host);
        let mut weights = Weights::clone(&before);
        weights.extend(changes);
        weights.retain(|_, weight| is_weight(*weight));
        if weights.len() > TENANTS_PER_HOST_MAX {
            let total = format!("{} would be set on {host}:", weights.len());
            let rule = format!("must be at most {TENANTS_PER_HOST_MAX}; 0 removes one");
            return Err(Invalid::new("weights", total, rule).into());
        }
        if weights == *before {
            return Ok(before);
        }
        self.driver.write_entries(vec![share_rows::write(host, &weights)]).await?;
        let weights = Arc::new(weights);
        self.weights_by_host.send_modify(|weights_by_host| match weights.is_empty() {
            true => drop(weights_by_host.remove(host)),
            false => drop(weights_by_host.insert(host.clone(), Arc::clone(&weights))),
        });
        self.record_decision(host, &weights, actor).await;
        Ok(weights)
    }

    /// Records the decision.
    async fn record_decision(&self, host: &Name, weights: &Weights, actor: Actor) {
        let weights = weights.iter().map(|(tenant, weight)| (tenant.clone(), *weight)).collect();
        let Ok(at) = self.driver.read(|_, when| when.wall) else { return }; // the manager is stopping
        let decision = Decision {
            at,
            actor,
            subject: Subject::Host(host.clone()),
            what: DecisionKind::WeightsChanged { weights },
        };
        if let Err(error) = self.driver.request(Request::RecordDecision(decision)).await {
            tracing::error!(error = units::chain(&error), "cannot record decision"); // the change is in effect nevertheless
        }
    }

    /// Returns all weights of a host.
    pub fn weights(&self, host: &Name) -> Arc<Weights> {
        weights_of(&self.weights_by_host.borrow(), host)
    }

    /// Returns a watcher of all weights of a host.
    pub fn watch(&self, host: Name) -> WeightsWatcher {
        WeightsWatcher { host, weights_by_host: self.weights_by_host.subscribe(), last_seen: None }
    }

    /// Stores the report of a host's epoch.
    pub fn record_report(&self, host: Name, report: ShareReport) {
        self.lock_reports().insert(host, report);
    }

    /// Returns the latest report of a host since the manager started.
    pub fn report(&self, host: &Name) -> Option<ShareReport> {
        self.lock_reports().get(host).cloned()
    }

    /// Uses a poisoned lock as well: each entry is always complete.
    fn lock_reports(&self) -> MutexGuard<'_, HashMap<Name, ShareReport>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Deletes weights and reports of hosts outside the rack, because another host may get the
    /// name.
    ///
    /// # Errors
    /// The store failed, or the manager is stopping: nothing is deleted.
    pub async fn remove_departed_hosts(&self) -> Result<(), DriverError> {
        let _guard = self.write_lock.lock().await;
        let hosts: BTreeSet<Name> = self.driver.read(|manager, _| {
            manager.durable().hosts().map(|(_, entry)| entry.host.name.clone()).collect()
        })?;
        let departed: Vec<Name> =
            self.weights_by_host.borrow().keys().filter(|host| !hosts.contains(*host)).cloned().collect();
        if !departed.is_empty() {
            let no_weights = Weights::new();
            self.driver
                .write_entries(departed.iter().map(|host| share_rows::write(host, &no_weights)).collect())
                .await?;
            self.weights_by_host
                .send_modify(|weights_by_host| weights_by_host.retain(|host, _| hosts.contains(host)));
        }
        self.lock_reports().retain(|host, _| hosts.contains(host));
        Ok(())
    }
}

fn weights_of(weights_by_host: &WeightsByHost, host: &Name) -> Arc<Weights> {
    weights_by_host.get(host).cloned().unwrap_or_default()
}

/// Watcher of one host's weights. A slow one sees the newest, not every intermediate state.
#[derive(Debug)]
pub struct WeightsWatcher {
    host: Name,
    weights_by_host: watch::Receiver<WeightsByHost>,
    /// Last state returned.
    last_seen: Option<Arc<Weights>>,
}

impl WeightsWatcher {
    /// Returns all weights of the host: at first at once, then after each change. May be cancelled
    /// and called again.
    pub async fn next(&mut self) -> Arc<Weights> {
        loop {
            if self.last_seen.is_some() && self.weights_by_host.changed().await.is_err() {
                std::future::pending::<()>().await; // no further weights are set
            }
            let now = weights_of(&self.weights_by_host.borrow_and_update(), &self.host);
            if self.last_seen.as_ref() != Some(&now) {
                self.last_seen = Some(Arc::clone(&now));
                return now;
            }
        }
    }
}

#[cfg(test)]
mod tests;
