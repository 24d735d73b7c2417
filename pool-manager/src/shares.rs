//! Stores the weights of tenants for Symbiosis, and sends them to the hosts' agents. Keeps the
//! latest reports of each host about its tenants and its soft memory in memory. The agents decide the
//! shares, the tiers of the tenants' memory, its early eviction, and the budgets of soft memory.
//!
//! ```text
//!   SetWeights ──▶ store ──▶ weights by host ──watcher──▶ each session of the host
//!   session ──report of an epoch──▶ reports ──▶ GetShares
//! ```

use std::{collections::BTreeSet, sync::Arc};

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
    convert::{
        InvalidField, evictions::EvictionsReport, shares::ShareReport, soft_memory::SoftMemoryReport,
        tenants::TenantsReport,
    },
    driver::{DriverError, Handle},
    host_reports::HostReports,
    records::share_rows::{self, Weights, WeightsByHost},
    store::{Scan, StoreError},
};

/// Error from [`Shares::set_weights`].
#[derive(Debug, thiserror::Error)]
pub enum SetWeightsError {
    /// The host would have more than [`TENANTS_PER_HOST_MAX`] weights.
    #[error(transparent)]
    Invalid(#[from] InvalidField),
    /// The host does not exist, the store failed, or the manager is stopping.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Weights that were read from the store at the start.
#[derive(Debug)]
pub struct StoredWeights(WeightsByHost);

/// Reads the weights from the store. Entries that cannot be decoded are logged and ignored, so that
/// the default weights apply.
///
/// # Errors
/// [`StoreError`] if the store cannot be read.
pub fn load(store: &mut dyn Scan) -> Result<StoredWeights, StoreError> {
    share_rows::load(store).map(StoredWeights)
}

/// Weights of tenants and reported shares of all hosts.
#[derive(Debug)]
pub struct Shares {
    /// Weights that are durable.
    weights_by_host: watch::Sender<WeightsByHost>,
    /// Serializes changes, because a host's new entry is computed from its previous entry.
    write_lock: tokio::sync::Mutex<()>,
    /// Latest shares of each host.
    pub reports: HostReports<ShareReport>,
    /// Latest step of fair tiering of each host.
    pub tenants: HostReports<TenantsReport>,
    /// Latest reported cycle of early eviction of each host.
    pub evictions: HostReports<EvictionsReport>,
    /// Latest state of soft memory of each host.
    pub soft_memory: HostReports<SoftMemoryReport>,
    driver: Handle,
}

impl Shares {
    /// Creates the service with stored weights and without reports.
    pub fn new(StoredWeights(weights_by_host): StoredWeights, driver: Handle) -> Self {
        Self {
            weights_by_host: watch::Sender::new(weights_by_host),
            write_lock: tokio::sync::Mutex::default(),
            reports: HostReports::default(),
            tenants: HostReports::default(),
            evictions: HostReports::default(),
            soft_memory: HostReports::default(),
            driver,
        }
    }

    /// Changes weights of a host's tenants. A weight of 0 removes the tenant's weight, and weights
    /// of other tenants are unchanged. Returns all weights of the host after they are durable, and
    /// notifies watchers. The future must not be dropped before it completes, otherwise the weights
    /// in memory can differ from the store.
    ///
    /// # Errors
    /// [`SetWeightsError`] if the host does not exist, the host would have more than
    /// [`TENANTS_PER_HOST_MAX`] weights, or the store fails.
    pub async fn set_weights(
        &self,
        host: &Name,
        changes: Weights,
        actor: Actor,
    ) -> Result<Arc<Weights>, SetWeightsError> {
        let _guard = self.write_lock.lock().await;
        let host_id = self.driver.read(|manager, _| manager.durable().find_host_by_name(host))?;
        host_id.ok_or_else(|| DriverError::Rejection(Rejection::NoSuchHost(host.clone())))?;
        let before = self.weights(host);
        let mut weights = Weights::clone(&before);
        weights.extend(changes);
        weights.retain(|_, weight| is_weight(*weight));
        if weights.len() > TENANTS_PER_HOST_MAX {
            let total = format!("{} weights for {host}:", weights.len());
            let rule = format!("must be at most {TENANTS_PER_HOST_MAX}; set a weight to 0 to remove it");
            return Err(InvalidField::new("weights", total, rule).into());
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

    /// Records the change of weights in the audit log.
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
            tracing::error!(error = units::chain(&error), "cannot record decision"); // the change stays in effect
        }
    }

    /// Returns all weights of a host's tenants.
    pub fn weights(&self, host: &Name) -> Arc<Weights> {
        weights_of(&self.weights_by_host.borrow(), host)
    }

    /// Returns a watcher of the weights of a host's tenants.
    pub fn watch(&self, host: Name) -> WeightsWatcher {
        WeightsWatcher { host, weights_by_host: self.weights_by_host.subscribe(), last_seen: None }
    }

    /// Deletes weights and reports of hosts that were removed from the rack, because a new host may
    /// get the same name.
    ///
    /// # Errors
    /// [`DriverError`] if the store failed or the manager is stopping. In this case, nothing is
    /// deleted.
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
        self.reports.retain_hosts(&hosts);
        self.tenants.retain_hosts(&hosts);
        self.evictions.retain_hosts(&hosts);
        self.soft_memory.retain_hosts(&hosts);
        Ok(())
    }
}

fn weights_of(weights_by_host: &WeightsByHost, host: &Name) -> Arc<Weights> {
    weights_by_host.get(host).cloned().unwrap_or_default()
}

/// Watcher of one host's weights. A slow watcher misses intermediate states but receives the
/// newest.
#[derive(Debug)]
pub struct WeightsWatcher {
    host: Name,
    weights_by_host: watch::Receiver<WeightsByHost>,
    /// Weights that [`WeightsWatcher::next`] returned last.
    last_seen: Option<Arc<Weights>>,
}

impl WeightsWatcher {
    /// Returns all weights of the host. The first call returns immediately, and later calls wait
    /// for a change. The future may be dropped and `next` called again.
    pub async fn next(&mut self) -> Arc<Weights> {
        loop {
            if self.last_seen.is_some() && self.weights_by_host.changed().await.is_err() {
                std::future::pending::<()>().await; // the sender was dropped: no change can follow
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
