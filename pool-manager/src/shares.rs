//! Shares of hosts among their tenants, as far as the manager has a part in them: weights that a scheduler sets are durable here, and known to
//! whoever speaks to a host's agent; what came of a host's last epoch is remembered. Who gets how much is decided on the host.
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

/// How much tenants of one host may have relative to each other, by their names: each as [`is_weight`] says.
pub type Weights = BTreeMap<Name, f64>;

/// Weights of all hosts that have some, by their names.
type Weighed = BTreeMap<Name, Arc<Weights>>;

/// Why weights were not set.
#[derive(Debug, thiserror::Error)]
pub enum NotSet {
    /// There would be too many.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The host is not in the rack, or the store or the manager does not do it.
    #[error(transparent)]
    Asked(#[from] Asked),
}

/// Weights that a store has, read before anybody may write.
#[derive(Debug)]
pub struct Loaded(Weighed);

/// Reads them. Rows that cannot be read are left out, and said so: tenants are weighed as if nothing had been set, and the rack goes on.
///
/// # Errors
/// The store cannot be read.
pub fn load(store: &mut dyn Scan) -> Result<Loaded, StoreError> {
    rows::load(store).map(Loaded)
}

/// Shares of one rack's hosts.
#[derive(Debug)]
pub struct Shares {
    /// What is durable of weights.
    weighed: watch::Sender<Weighed>,
    /// Held by whoever writes: a host's weights are one entry, made of what it was.
    pen: tokio::sync::Mutex<()>,
    /// By host, the last of each since the manager started.
    told: Mutex<HashMap<Name, Told>>,
    driver: Handle,
}

impl Shares {
    /// Weights as they were left; no host has told anything.
    pub fn new(Loaded(weighed): Loaded, driver: Handle) -> Self {
        Self {
            weighed: watch::Sender::new(weighed),
            pen: tokio::sync::Mutex::default(),
            told: Mutex::default(),
            driver,
        }
    }

    /// Sets weights of tenants of a host, and takes back those that are 0 here; others stay. All that are set there then, durable when it
    /// answers; who watches the host is told. To be waited for to its end: else what is durable may not be what is known.
    ///
    /// # Errors
    /// The host is not in the rack, it would have more than [`TENANTS_PER_HOST_MAX`] weights, or they could not be made durable.
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

    /// Puts on record what is set now.
    async fn note(&self, host: &Name, weights: &Weights, actor: Actor) {
        let weights = weights.iter().map(|(tenant, weight)| (tenant.clone(), *weight)).collect();
        let Ok(at) = self.driver.look(|_, when| when.wall) else { return }; // the manager ends
        let decision =
            Decision { at, actor, subject: Subject::Host(host.clone()), what: What::Weighed { weights } };
        if let Err(error) = self.driver.ask(Ask::Note(decision)).await {
            tracing::error!(error = units::chain(&error), "not on record"); // it is set all the same
        }
    }

    /// All weights that are set on a host.
    pub fn weights(&self, host: &Name) -> Arc<Weights> {
        weights_of(&self.weighed.borrow(), host)
    }

    /// All weights that are set on a host, now and whenever they change.
    pub fn watch(&self, host: Name) -> Watched {
        Watched { host, weighed: self.weighed.subscribe(), told: None }
    }

    /// What came of a host's last epoch, by its agent's word.
    pub fn tell(&self, host: Name, told: Told) {
        self.all_told().insert(host, told);
    }

    /// What a host told last since the manager started.
    pub fn told(&self, host: &Name) -> Option<Told> {
        self.all_told().get(host).cloned()
    }

    /// Each entry is whole at any time.
    fn all_told(&self) -> MutexGuard<'_, HashMap<Name, Told>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets weights and words of hosts that are not in the rack any more: another host may be called so one day.
    ///
    /// # Errors
    /// The store failed, or the manager stops: nothing is forgotten.
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

/// Somebody who watches one host's weights. Who is slow sees the newest, not every one in between.
#[derive(Debug)]
pub struct Watched {
    host: Name,
    weighed: watch::Receiver<Weighed>,
    /// What was seen last.
    told: Option<Arc<Weights>>,
}

impl Watched {
    /// All weights that are set on the host: at first at once, then when they are others than before. May be given up and called again.
    pub async fn next(&mut self) -> Arc<Weights> {
        loop {
            if self.told.is_some() && self.weighed.changed().await.is_err() {
                std::future::pending::<()>().await; // nobody sets weights any more
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
