//! Symbiosis in the manager: weights set by a scheduler are durable and sent to the host's agent;
//! the report of a host's last epoch is kept. Shares are decided on the host.
//!
//! ```text
//!   SetWeights ──▶ store ──▶ weights as they are known ──watched──▶ each session of the host
//!   session ──what came of an epoch──▶ told ──▶ GetShares
//! ```

mod rows;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use pool::{
    audit::{Actor, Decision, Subject, What},
    denied::Denied,
    manager::Ask,
};
use tokio::sync::watch;
use units::{
    Name,
    limits::{TENANTS_PER_HOST_MAX, is_weight},
};

pub use rows::judge;

use crate::{
    convert::{Invalid, shares::Told},
    driver::{Asked, Handle},
    store::{Scan, StoreError},
};

/// Weights of one host's tenants, by name; each satisfies [`is_weight`].
pub type Weights = BTreeMap<Name, f64>;

/// Weights by host, for hosts with any.
type Weighed = BTreeMap<Name, Arc<Weights>>;

/// Reason why weights were not set.
#[derive(Debug, thiserror::Error)]
pub enum NotSet {
    /// There would be too many.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The host is not in the rack, the store failed, or the manager is stopping.
    #[error(transparent)]
    Asked(#[from] Asked),
}

/// Weights in the store, read before writers start.
#[derive(Debug)]
pub struct Loaded(Weighed);

/// Reads them. Unreadable rows are skipped and logged: the default weights apply, and the rack
/// keeps running.
///
/// # Errors
/// The store cannot be read.
pub fn load(store: &mut dyn Scan) -> Result<Loaded, StoreError> {
    rows::load(store).map(Loaded)
}

/// Weights and shares of a rack's hosts.
#[derive(Debug)]
pub struct Shares {
    /// Durable weights.
    weighed: watch::Sender<Weighed>,
    /// Held by the writer: a host's weights are one entry, derived from the previous one.
    pen: tokio::sync::Mutex<()>,
    /// Latest report of each host since the manager started.
    told: Mutex<HashMap<Name, Told>>,
    driver: Handle,
}

impl Shares {
    /// Creates it with stored weights, without reports.
    pub fn new(Loaded(weighed): Loaded, driver: Handle) -> Self {
        Self {
            weighed: watch::Sender::new(weighed),
            pen: tokio::sync::Mutex::default(),
            told: Mutex::default(),
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
    ) -> Result<Arc<Weights>, NotSet> {
        let _pen = self.pen.lock().await;
        let known = self.driver.look(|manager, _| manager.durable().host_named(host))?;
        known.ok_or_else(|| Asked::Denied(Denied::NoSuchHost(host.clone())))?;
        let before = self.weights(host);
        let mut weights = Weights::clone(&before);
        weights.extend(changes);
        weights.retain(|_, weight| is_weight(*weight));
        if weights.len() > TENANTS_PER_HOST_MAX {
            let set = format!("{} would be set on {host}:", weights.len());
            let rule = format!("must be at most {TENANTS_PER_HOST_MAX}; 0 takes one back");
            return Err(Invalid::new("weights", set, rule).into());
        }
        if weights == *before {
            return Ok(before);
        }
        self.driver.keep(vec![rows::write(host, &weights)]).await?;
        let weights = Arc::new(weights);
        self.weighed.send_modify(|weighed| match weights.is_empty() {
            true => drop(weighed.remove(host)),
            false => drop(weighed.insert(host.clone(), Arc::clone(&weights))),
        });
        self.note(host, &weights, actor).await;
        Ok(weights)
    }

    /// Records the decision.
    async fn note(&self, host: &Name, weights: &Weights, actor: Actor) {
        let weights = weights.iter().map(|(tenant, weight)| (tenant.clone(), *weight)).collect();
        let Ok(at) = self.driver.look(|_, when| when.wall) else { return }; // the manager is stopping
        let decision =
            Decision { at, actor, subject: Subject::Host(host.clone()), what: What::Weighed { weights } };
        if let Err(error) = self.driver.ask(Ask::Note(decision)).await {
            tracing::error!(error = units::chain(&error), "not on record"); // it is in effect nevertheless
        }
    }

    /// Returns all weights of a host.
    pub fn weights(&self, host: &Name) -> Arc<Weights> {
        weights_of(&self.weighed.borrow(), host)
    }

    /// Watches all weights of a host.
    pub fn watch(&self, host: Name) -> Watched {
        Watched { host, weighed: self.weighed.subscribe(), told: None }
    }

    /// Stores the report of a host's epoch.
    pub fn tell(&self, host: Name, told: Told) {
        self.all_told().insert(host, told);
    }

    /// Returns the latest report of a host since the manager started.
    pub fn told(&self, host: &Name) -> Option<Told> {
        self.all_told().get(host).cloned()
    }

    /// Each entry is always complete.
    fn all_told(&self) -> MutexGuard<'_, HashMap<Name, Told>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Deletes weights and reports of hosts outside the rack, because another host may get the
    /// name.
    ///
    /// # Errors
    /// The store failed, or the manager is stopping: nothing is deleted.
    pub async fn forget_strangers(&self) -> Result<(), Asked> {
        let _pen = self.pen.lock().await;
        let hosts: BTreeSet<Name> = self.driver.look(|manager, _| {
            manager.durable().hosts().map(|(_, entry)| entry.host.name.clone()).collect()
        })?;
        let strangers: Vec<Name> =
            self.weighed.borrow().keys().filter(|host| !hosts.contains(*host)).cloned().collect();
        if !strangers.is_empty() {
            let nothing = Weights::new();
            self.driver.keep(strangers.iter().map(|host| rows::write(host, &nothing)).collect()).await?;
            self.weighed.send_modify(|weighed| weighed.retain(|host, _| hosts.contains(host)));
        }
        self.all_told().retain(|host, _| hosts.contains(host));
        Ok(())
    }
}

fn weights_of(weighed: &Weighed, host: &Name) -> Arc<Weights> {
    weighed.get(host).cloned().unwrap_or_default()
}

/// Watcher of one host's weights. A slow one sees the newest, not every intermediate state.
#[derive(Debug)]
pub struct Watched {
    host: Name,
    weighed: watch::Receiver<Weighed>,
    /// Last state seen.
    told: Option<Arc<Weights>>,
}

impl Watched {
    /// Returns all weights of the host: at first at once, then after each change. May be cancelled
    /// and called again.
    pub async fn next(&mut self) -> Arc<Weights> {
        loop {
            if self.told.is_some() && self.weighed.changed().await.is_err() {
                std::future::pending::<()>().await; // no further weights are set
            }
            let now = weights_of(&self.weighed.borrow_and_update(), &self.host);
            if self.told.as_ref() != Some(&now) {
                self.told = Some(Arc::clone(&now));
                return now;
            }
        }
    }
}

#[cfg(test)]
mod tests;
