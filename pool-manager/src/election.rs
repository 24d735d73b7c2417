//! Election of the manager that serves requests, if the ledger is in etcd. The other managers wait as standbys.

use std::{path::PathBuf, sync::Arc, time::Duration};

use ::etcd::{
    Error,
    election::{Campaign, Candidate, Leadership, LeadershipEnd, Observation},
    messages::{RangeRequest, TxnRequest, is_created_in, prefix_end, put_with_lease},
};
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, task::JoinHandle};
use units::{FencingToken, Ns, limits::MANAGERS_MAX};

use crate::{
    device::DeviceLeader,
    store::{
        StoreError,
        etcd::{Cluster, EtcdStore},
    },
};

/// Delay before a leader that serves requests is announced again after a failure.
const ANNOUNCEMENT_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Manager as the other managers see it in etcd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManagerEntry {
    /// Name of the manager, unique in the rack.
    pub name: String,
    /// Address for clients and agents, as a URI.
    pub address: String,
    /// Version of the program.
    pub version: String,
    /// Start time of the process, in milliseconds since the Unix epoch.
    pub started_unix_ms: u64,
    /// Whether the manager serves requests as the leader; `None` from versions that do not announce it.
    #[serde(default)]
    pub is_serving: Option<bool>,
}

/// Manager that takes part in the election.
#[derive(Debug)]
pub struct Election {
    cluster: Cluster,
    candidate: Candidate,
    entry: ManagerEntry,
    leader: watch::Sender<Option<ManagerEntry>>,
}

/// This manager as the elected leader. The lease is renewed until this value is dropped.
#[derive(Debug)]
pub struct Leader {
    cluster: Cluster,
    entry: ManagerEntry,
    leadership: Arc<Leadership>,
    /// Task that renews the lease until this manager must stop.
    renewal: JoinHandle<LeadershipEnd>,
}

/// Reason for which a leader must stop.
#[derive(Debug)]
pub enum LeaderEnd {
    /// An operator has requested that another manager takes over. The lease is still renewed.
    HandOver,
    /// Another manager may have taken over.
    Lost(StoreError),
}

/// Result of an election, for the parts of the elected manager; cheap to clone.
#[derive(Clone, Debug)]
pub struct ElectedManager {
    cluster: Cluster,
    entry: ManagerEntry,
    leadership: Arc<Leadership>,
}

impl ElectedManager {
    /// Returns whether the lease has certainly not ended, so that there is no other leader.
    pub fn is_certain(&self) -> bool {
        self.leadership.lease_end().is_valid()
    }

    /// Returns the fencing token. `generation` is that of the ledger.
    pub fn token(&self, generation: u64) -> FencingToken {
        let election = u64::try_from(self.leadership.token()).expect("revisions of etcd are positive");
        FencingToken { generation, election }
    }

    /// Returns this manager as the controller of devices. `generation` is that of the ledger.
    pub fn for_devices(&self, generation: u64) -> DeviceLeader {
        DeviceLeader {
            token: self.token(generation),
            cluster: self.cluster.clone(),
            leadership: Arc::clone(&self.leadership),
        }
    }

    /// Opens the store of the ledger, or creates an empty store.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open_store(&self) -> Result<EtcdStore, StoreError> {
        EtcdStore::open(self.cluster.clone(), &self.leadership)
    }

    /// Deletes all entries of the store, see [`EtcdStore::replace`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn replace_store(&self) -> Result<EtcdStore, StoreError> {
        EtcdStore::replace(self.cluster.clone(), &self.leadership)
    }

    /// Returns all running managers, and whether each is the leader.
    ///
    /// # Errors
    /// [`StoreError::Etcd`].
    pub async fn list(&self) -> Result<Vec<(ManagerEntry, bool)>, StoreError> {
        list(&self.cluster).await
    }

    /// Informs the other managers that this one serves requests. Repeats failed calls while it is the leader.
    pub async fn announce_serving(self) {
        let value = ManagerEntry { is_serving: Some(true), ..self.entry.clone() }.encode();
        loop {
            let (leadership, value) = (Arc::clone(&self.leadership), value.clone());
            match self.cluster.spawn(async move { leadership.announce(value).await }).await {
                Ok(Ok(()) | Err(Error::Deposed)) | Err(_) => return,
                Ok(Err(error)) => {
                    tracing::warn!(error = units::chain(&error), "cannot announce the leader in etcd");
                }
            }
            tokio::time::sleep(ANNOUNCEMENT_RETRY_DELAY).await;
        }
    }

    /// Returns the location of the store, for messages.
    pub fn location(&self) -> PathBuf {
        self.cluster.location()
    }
}

impl ManagerEntry {
    /// Returns the entry of this program.
    pub fn new(name: String, address: String, started_unix_ms: u64) -> Self {
        Self {
            name,
            address,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_unix_ms,
            is_serving: Some(false),
        }
    }

    fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("the entry has only strings and numbers")
    }

    /// Decodes the value of an entry. Returns `None` if another version wrote it in another format.
    pub fn decode(value: &[u8]) -> Option<Self> {
        serde_json::from_slice(value).ok()
    }
}

impl Election {
    /// Prepares the participation of a manager with this entry. `lease` is the time after which another manager takes
    /// over from a leader that does not respond.
    pub fn new(cluster: Cluster, entry: &ManagerEntry, lease: Ns) -> Self {
        let candidate = Candidate {
            client: cluster.client().clone(),
            leader_key: cluster.leader_key(),
            keys_prefix: cluster.managers_prefix(),
            hand_over_key: cluster.hand_over_key(),
            name: entry.name.clone().into_bytes(),
            value: entry.encode(),
            ttl: lease.as_duration(),
        };
        Self { cluster, candidate, entry: entry.clone(), leader: watch::channel(None).0 }
    }

    /// Returns the cluster in which the election takes place.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Returns a receiver of the current leader, which [`Self::win`] updates; `None` if there is no leader.
    pub fn leader(&self) -> watch::Receiver<Option<ManagerEntry>> {
        self.leader.subscribe()
    }

    /// Returns the participation of this manager for [`Self::win`].
    pub fn campaign(&self) -> Campaign {
        Campaign::new(self.candidate.clone())
    }

    /// Waits until this manager is elected.
    ///
    /// # Errors
    /// [`StoreError::Etcd`] if etcd denies access.
    pub async fn win(&self, campaign: &mut Campaign) -> Result<Leader, StoreError> {
        let mut logged = String::new();
        let elected = campaign.win(|observed| self.observe(observed, &mut logged)).await;
        let elected = elected.map_err(|cause| self.cluster.error("take part in the election of", cause))?;
        let leadership = Arc::new(elected);
        let renewed = Arc::clone(&leadership);
        let renewal = self.cluster.spawn(async move { renewed.hold().await });
        tracing::info!(token = leadership.token(), "elected as the leader");
        let (cluster, entry) = (self.cluster.clone(), self.entry.clone());
        Ok(Leader { cluster, entry, leadership, renewal })
    }

    /// Ends the participation of a manager that was not elected, so that others do not wait for its lease.
    pub async fn withdraw(&self, campaign: Campaign) {
        if let Ok(Err(error)) = self.cluster.spawn(campaign.withdraw()).await {
            tracing::warn!(error = units::chain(&error), "cannot delete the entry of this manager in etcd");
        }
    }

    /// Publishes the leader, and logs a changed observation once.
    fn observe(&self, observed: Observation<'_>, logged: &mut String) {
        let (leader, message) = match observed {
            Observation::Leader(value) => {
                let leader = ManagerEntry::decode(value);
                let message = match &leader {
                    Some(leader) => format!("standby: the leader is {} at {}", leader.name, leader.address),
                    None => "standby: the leader has another version".to_owned(),
                };
                (leader, message)
            }
            Observation::NameInUse(value) => {
                let other = ManagerEntry::decode(value);
                let other = other.map_or_else(|| "unknown address".to_owned(), |other| other.address);
                let name = String::from_utf8_lossy(&self.candidate.name).into_owned();
                let rule =
                    "etcd.name must be unique, or an earlier process of this manager ended a moment ago";
                (None, format!("another manager ({other}) has the name {name}: {rule}"))
            }
            Observation::Failed(error) => (None, units::chain(error)),
        };
        if *logged != message {
            match observed {
                Observation::Leader(_) => tracing::info!("{message}"),
                _ => tracing::warn!("cannot take part in the election: {message}"),
            }
            *logged = message;
        }
        self.leader.send_if_modified(|current| {
            let is_changed = *current != leader;
            *current = leader;
            is_changed
        });
    }
}

impl Leader {
    /// Returns the election's result, for conditions of transactions.
    pub fn elected(&self) -> ElectedManager {
        let (cluster, entry) = (self.cluster.clone(), self.entry.clone());
        ElectedManager { cluster, entry, leadership: Arc::clone(&self.leadership) }
    }

    /// Waits until this manager must stop, and returns the reason.
    pub async fn wait_for_end(&mut self) -> LeaderEnd {
        match (&mut self.renewal).await {
            Ok(LeadershipEnd::Lost(cause)) => {
                LeaderEnd::Lost(self.cluster.error("renew the lease of", cause))
            }
            Ok(LeadershipEnd::HandOver) => {
                self.ignore_hand_over();
                LeaderEnd::HandOver
            }
            Err(_) => LeaderEnd::Lost(StoreError::NotLeader { path: self.cluster.location() }),
        }
    }

    /// Ignores requests for a hand-over from now on.
    pub fn ignore_hand_over(&mut self) {
        self.renewal.abort();
        let leadership = Arc::clone(&self.leadership);
        self.renewal = self.cluster.spawn(async move { LeadershipEnd::Lost(leadership.keep().await) });
    }

    /// Ends the lease, so that another manager can take over at once. The manager must have closed the store before.
    pub async fn resign(self) {
        self.renewal.abort();
        let leadership = Arc::clone(&self.leadership);
        let resigned = self.cluster.spawn(async move { leadership.resign().await }).await;
        if let Ok(Err(error)) = resigned {
            tracing::warn!(
                error = units::chain(&error),
                "cannot end the lease: another manager takes over later"
            );
        }
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.renewal.abort();
    }
}

/// Request that a certain manager takes over. It ends after its time limit, so that a forgotten request does not
/// prevent elections.
#[derive(Debug)]
pub struct HandOver {
    cluster: Cluster,
    lease: i64,
}

impl HandOver {
    /// Requests that the manager `next` takes over.
    ///
    /// # Errors
    /// [`StoreError::Etcd`], or [`StoreError::TransferInProgress`] if another request has not ended.
    pub async fn request(cluster: &Cluster, next: &str, timeout: Duration) -> Result<Self, StoreError> {
        let failed = |cause| cluster.error("request the transfer of", cause);
        let (lease, _) = cluster.client().grant_lease(timeout).await.map_err(failed)?;
        let key = cluster.hand_over_key();
        let request = TxnRequest {
            compare: vec![is_created_in(key.clone(), 0)],
            success: vec![put_with_lease(key, next.as_bytes().to_vec(), lease)],
            failure: Vec::new(),
        };
        let hand_over = Self { cluster: cluster.clone(), lease };
        if cluster.client().txn(request).await.map_err(failed)?.succeeded {
            return Ok(hand_over);
        }
        hand_over.withdraw().await;
        Err(StoreError::TransferInProgress { path: cluster.location() })
    }

    /// Ends the request.
    pub async fn withdraw(self) {
        if let Err(error) = self.cluster.client().revoke_lease(self.lease).await {
            tracing::warn!(
                error = units::chain(&error),
                "cannot end the request for a transfer: it ends later"
            );
        }
    }
}

/// Returns the leader of a cluster and its fencing token, if there is one.
///
/// # Errors
/// [`StoreError::Etcd`].
pub async fn find_leader(cluster: &Cluster) -> Result<Option<(ManagerEntry, i64)>, StoreError> {
    let request = RangeRequest { key: cluster.leader_key(), ..RangeRequest::default() };
    let client = cluster.client().clone();
    let read = cluster.spawn(async move { client.range(request).await }).await;
    let read = read.expect("a call to etcd does not panic").map_err(|cause| cluster.error("read", cause))?;
    let leader = read.kvs.first();
    Ok(leader.and_then(|leader| Some((ManagerEntry::decode(&leader.value)?, leader.create_revision))))
}

/// Returns all running managers of a cluster, sorted by name, and whether each is the leader.
///
/// # Errors
/// [`StoreError::Etcd`].
pub async fn list(cluster: &Cluster) -> Result<Vec<(ManagerEntry, bool)>, StoreError> {
    let prefix = cluster.managers_prefix();
    let all = RangeRequest {
        range_end: prefix_end(&prefix),
        key: prefix,
        limit: i64::try_from(MANAGERS_MAX).unwrap_or(i64::MAX),
        ..RangeRequest::default()
    };
    let leader = RangeRequest { key: cluster.leader_key(), ..RangeRequest::default() };
    let client = cluster.client().clone();
    let read = async move { Ok::<_, Error>((client.range(leader).await?, client.range(all).await?)) };
    let read = cluster.spawn(read).await.expect("a call to etcd does not panic");
    let (leader, all) = read.map_err(|cause| cluster.error("list the managers of", cause))?;
    let lease = leader.kvs.first().map(|entry| entry.lease);
    let managers = all.kvs.iter();
    Ok(managers
        .filter_map(|entry| Some((ManagerEntry::decode(&entry.value)?, Some(entry.lease) == lease)))
        .collect())
}
