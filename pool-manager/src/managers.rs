//! Managers of the rack, as the leader sees them: lists them, and raises alarms if no other manager can take over, or if
//! etcd is slow.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use proto::v1 as wire;

use crate::{
    driver::Handle,
    election::{ElectedManager, ManagerEntry},
    metrics::Metrics,
    store::StoreError,
};

/// Number of observations without another manager after which an alarm is raised, so that a restart raises none.
const OBSERVATIONS_WITHOUT_STANDBY: u32 = 3;
/// A call to etcd is slow if it takes this part of the lease. The leader renews its lease three times in this time.
const SLOW_PARTS_OF_LEASE: u32 = 4;

/// Managers of a rack.
#[derive(Clone, Debug)]
pub enum Managers {
    /// No other manager can take over.
    Only(ManagerEntry),
    /// This manager was elected.
    Elected(ElectedManager),
}

impl Managers {
    /// Returns all running managers, sorted by name.
    ///
    /// # Errors
    /// [`StoreError::Etcd`].
    pub async fn list(&self) -> Result<Vec<wire::Manager>, StoreError> {
        let entries = match self {
            Self::Only(entry) => vec![(entry.clone(), true)],
            Self::Elected(elected) => elected.list().await?,
        };
        let message = |(entry, is_leader): (ManagerEntry, bool)| wire::Manager {
            name: entry.name,
            address: entry.address,
            version: entry.version,
            started_unix_ms: entry.started_unix_ms,
            is_leader,
        };
        Ok(entries.into_iter().map(message).collect())
    }
}

/// Observes the other managers and etcd in intervals of `lease`, until the future is dropped.
pub async fn observe(elected: ElectedManager, handle: Handle, metrics: Arc<Metrics>, lease: Duration) {
    let (mut tick, mut without_standby) = (tokio::time::interval(lease), 0);
    loop {
        tick.tick().await;
        let started = Instant::now();
        let listed = elected.list().await;
        let elapsed = started.elapsed();
        metrics.etcd_call_seconds.observe(elapsed.as_secs_f64());
        let limit = lease / SLOW_PARTS_OF_LEASE;
        let slow = (elapsed > limit || listed.is_err()).then(|| {
            let ms = elapsed.as_millis();
            format!("a call to etcd took {ms} ms: must take less than {} ms; check the disks and the network of its members", limit.as_millis())
        });
        let _ = handle.set_alarm("ETCD_SLOW", slow); // fails only if the manager is stopping
        let Ok(managers) = listed else { continue };
        let standbys = managers.len().saturating_sub(1);
        metrics.standbys.set(i64::try_from(standbys).unwrap_or(i64::MAX));
        without_standby = if standbys == 0 { without_standby + 1 } else { 0 };
        let alone = (without_standby >= OBSERVATIONS_WITHOUT_STANDBY)
            .then(|| "no other manager can take over: start another pool-manager of this rack".to_owned());
        let _ = handle.set_alarm("NO_STANDBY", alone); // fails only if the manager is stopping
    }
}
