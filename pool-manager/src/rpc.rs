//! The gRPC services. A handler translates, asks the driver, translates; nothing is decided here.

pub mod admin;
pub mod agent;
pub mod backup;
pub mod connections;
pub mod counted;
pub mod identity;
pub mod models;
pub mod refused;
pub mod rejections;
pub mod scheduler;
mod watched;

use std::{path::Path, sync::Arc};

use pool::audit::Actor;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tonic::{Request, Status};
use units::{Fraction, Name, Ns, limits::WATCHERS_MAX};

use crate::role::Role;
use crate::{driver::Handle, forecasts::Forecasts, metrics::Metrics, shares::Shares};
use identity::Identity;
use refused::exhausted;

/// What every handler may use.
#[derive(Clone, Debug)]
pub struct Shared {
    /// The way to the ledger.
    pub driver: Handle,
    /// What is foreseen of VMs.
    pub forecasts: Arc<Forecasts>,
    /// Weights of tenants, and what agents tell of shares.
    pub shares: Arc<Shares>,
    /// Who may call what.
    pub identity: Arc<Identity>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What an operator may change while the manager runs.
    pub policy: watch::Receiver<Policy>,
    /// True when the manager is ending: streams end.
    pub stopping: watch::Receiver<bool>,
    /// The folder of the store.
    pub store: Arc<Path>,
    /// One permit: backups are made one at a time.
    pub backups: Arc<Semaphore>,
    /// When this process started, in Unix milliseconds.
    pub started_unix_ms: u64,
}

/// What an operator may change while the manager runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// The part of a VM's memory that may come from the pool until a model is trained.
    pub pool_share: Fraction,
    /// Ends by itself unless committed within this time.
    pub commit_within: Ns,
    /// An agent must be heard at least this often.
    pub lease_ttl: Ns,
}

impl Shared {
    /// Takes a permit for one watch stream.
    fn watch_permit(&self) -> Result<OwnedSemaphorePermit, Status> {
        let refuse =
            || exhausted("TOO_MANY_WATCHERS", format!("{WATCHERS_MAX} watch streams are open already"));
        self.driver.try_watch_permit().ok_or_else(refuse)
    }

    /// Lets in whoever may use the services of operators, and says who it is.
    ///
    /// # Errors
    /// They may not.
    pub fn admit_operator<T>(&self, request: &Request<T>) -> Result<Actor, Status> {
        let certified = self.identity.admit(request, Role::Admin)?;
        Ok(Actor::Client(certified.unwrap_or_else(|| Name::new("operator").expect("a name"))))
    }

    /// Waits until the manager is ending.
    pub async fn stopped(&self) {
        let mut stopping = self.stopping.clone();
        let _ = stopping.wait_for(|stop| *stop).await; // a lost sender is an end, too
    }
}

/// What was begun is ended, also if the caller goes away meanwhile: what is durable is to be true of what is known.
async fn to_its_end<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Result<T, Status> {
    let ended = tokio::spawn(work).await;
    ended.map_err(|_| Status::internal("it ended before its end: see the manager's log"))
}
