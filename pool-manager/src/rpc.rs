//! gRPC services of the manager. Handlers convert requests, call the driver and convert the
//! results. All decisions are made elsewhere.

pub mod admin;
pub mod agent;
pub mod backup;
pub mod call_metrics;
pub mod connections;
pub mod identity;
mod model_messages;
pub mod models;
pub mod scheduler;
pub mod status;
mod watch_stream;

use std::{path::Path, sync::Arc};

use pool::audit::Actor;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tonic::{Request, Status};
use units::{Fraction, Name, Ns, limits::WATCH_STREAMS_MAX};

use crate::{
    config::RehomePolicy,
    driver::{Handle, WatchService},
    forecasts::Forecasts,
    managers::Managers,
    metrics::Metrics,
    monitor::Monitor,
    role::Role,
    shares::Shares,
};
use identity::Identity;
use status::resource_exhausted;

/// State shared by all handlers.
#[derive(Clone, Debug)]
pub struct ServiceContext {
    /// Handle for requests to the ledger.
    pub driver: Handle,
    /// Prediction service for new VMs.
    pub forecasts: Arc<Forecasts>,
    /// Weights of tenants, and shares reported by agents.
    pub shares: Arc<Shares>,
    /// Monitor of running VMs.
    pub monitor: Arc<Monitor>,
    /// Authentication and authorization of clients and agents.
    pub identity: Arc<Identity>,
    /// Metrics for Prometheus.
    pub metrics: Arc<Metrics>,
    /// Current settings, which a reload can change.
    pub policy: watch::Receiver<Policy>,
    /// When pool memory of running VMs is moved to local memory; a reload can change it.
    pub rehome: watch::Receiver<RehomePolicy>,
    /// Becomes `true` when the manager is stopping, so that streams end.
    pub stopping: watch::Receiver<bool>,
    /// Managers of the rack.
    pub managers: Managers,
    /// Folder for temporary files.
    pub folder: Arc<Path>,
    /// Limits backups to one at a time.
    pub backups: Arc<Semaphore>,
    /// Start time of this process, in milliseconds since the Unix epoch.
    pub started_unix_ms: u64,
}

/// Settings of the gRPC services that a reload can change.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Fraction of a VM's memory that comes from the pool while no model is serving.
    pub pool_share: Fraction,
    /// Default time in which a reservation must be committed before it expires.
    pub commit_within: Ns,
    /// Time without a message of a host's agent after which the host's lease expires.
    pub lease_ttl: Ns,
}

impl ServiceContext {
    /// Reserves a watch stream of a service, or returns RESOURCE_EXHAUSTED if too many streams are open.
    fn acquire_watch_permit(&self, service: WatchService) -> Result<OwnedSemaphorePermit, Status> {
        let limit_error = || {
            resource_exhausted(
                "TOO_MANY_WATCHERS",
                format!("{WATCH_STREAMS_MAX} watch streams are open: try again later"),
            )
        };
        self.driver.try_watch_permit(service).ok_or_else(limit_error)
    }

    /// Checks that a caller has the role admin, and returns the caller's name for the audit log.
    ///
    /// # Errors
    /// PERMISSION_DENIED (ROLE_MISSING) if the caller does not have the role.
    pub fn admit_operator<T>(&self, request: &Request<T>) -> Result<Actor, Status> {
        let certified = self.identity.admit(request, Role::Admin)?;
        Ok(Actor::Client(certified.unwrap_or_else(|| Name::new("operator").expect("a name"))))
    }

    /// Waits until the manager is stopping.
    pub async fn wait_until_stopping(&self) {
        let mut stopping = self.stopping.clone();
        let _ = stopping.wait_for(|stop| *stop).await; // a dropped sender also means that the manager stops
    }
}

/// Runs a request to completion even if its caller disconnects. Otherwise the state in memory could
/// differ from the store.
async fn run_to_completion<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, Status> {
    let result = tokio::spawn(work).await;
    result.map_err(|_| Status::internal("internal error: the request panicked, see the manager's log"))
}
