//! gRPC services. Handlers convert, call the driver, and convert; they decide nothing.

pub mod admin;
pub mod agent;
pub mod backup;
pub mod call_metrics;
pub mod connections;
pub mod identity;
mod model_messages;
pub mod models;
pub mod rejection_log;
pub mod scheduler;
pub mod status;
mod watch_stream;

use std::{path::Path, sync::Arc};

use pool::audit::Actor;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tonic::{Request, Status};
use units::{Fraction, Name, Ns, limits::WATCHERS_MAX};

use crate::role::Role;
use crate::{driver::Handle, forecasts::Forecasts, metrics::Metrics, shares::Shares};
use identity::Identity;
use status::exhausted;

/// State shared by all handlers.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Handle of the ledger.
    pub driver: Handle,
    /// Predictions.
    pub forecasts: Arc<Forecasts>,
    /// Weights of tenants, and reported shares.
    pub shares: Arc<Shares>,
    /// Authentication and authorization.
    pub identity: Arc<Identity>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Settings that a reload may change.
    pub policy: watch::Receiver<Policy>,
    /// True when the manager is stopping: streams end.
    pub stopping: watch::Receiver<bool>,
    /// Folder of the store.
    pub store: Arc<Path>,
    /// One permit: backups run one at a time.
    pub backups: Arc<Semaphore>,
    /// Start of this process, in Unix milliseconds.
    pub started_unix_ms: u64,
}

/// Settings that a reload may change.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Fraction of a VM's memory from the pool without a serving model.
    pub pool_share: Fraction,
    /// Default time until a reservation expires without a commit.
    pub commit_within: Ns,
    /// Longest time between two messages of an agent before its lease expires.
    pub lease_ttl: Ns,
}

impl Shared {
    /// Takes a permit for a watch stream.
    fn watch_permit(&self) -> Result<OwnedSemaphorePermit, Status> {
        let limit_error =
            || exhausted("TOO_MANY_WATCHERS", format!("{WATCHERS_MAX} watch streams are open already"));
        self.driver.try_watch_permit().ok_or_else(limit_error)
    }

    /// Checks that a caller has the role admin, and returns its name.
    ///
    /// # Errors
    /// PERMISSION_DENIED (ROLE_MISSING).
    pub fn admit_operator<T>(&self, request: &Request<T>) -> Result<Actor, Status> {
        let certified = self.identity.admit(request, Role::Admin)?;
        Ok(Actor::Client(certified.unwrap_or_else(|| Name::new("operator").expect("a name"))))
    }

    /// Waits until the manager is stopping.
    pub async fn stopped(&self) {
        let mut stopping = self.stopping.clone();
        let _ = stopping.wait_for(|stop| *stop).await; // a dropped sender is an end, too
    }
}

/// Runs a request to completion even if its caller leaves, so that durable and current state agree.
async fn run_to_completion<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, Status> {
    let result = tokio::spawn(work).await;
    result.map_err(|_| Status::internal("the request panicked: see the manager's log"))
}
