//! Election of one process among several by an entry with a lease. The entry's create revision is the *fencing
//! token* of the elected process: it increases with each election. A process that does not notice that its lease
//! has ended, for example because it was paused, cannot write if each of its transactions has the condition
//! [`Leadership::condition`].
//!
//! Each process that takes part in the election also has an entry of its own with the same lease, so that the elected
//! process knows the others. While a third entry contains the name of one process, only this process can be elected, and
//! the elected one ends its work.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

use crate::{
    Client, Error,
    messages::{
        Compare, KeyValue, RangeRequest, RequestOp, TxnRequest, TxnResponse, delete, get, is_created_in,
        put_with_lease,
    },
};

/// Number of renewals of the lease within its time to live.
const RENEWALS_PER_LEASE: u32 = 3;
/// Delay between two attempts to be elected, in parts of the time to live.
const ATTEMPTS_PER_LEASE: u32 = 20;

/// Process that wants to be elected.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Client of the cluster.
    pub client: Client,
    /// Key of the entry of the elected process.
    pub leader_key: Vec<u8>,
    /// Prefix of the keys of the entries of all processes. It is followed by the name of the process.
    pub keys_prefix: Vec<u8>,
    /// Key of the entry with the name of the process that must be elected next. It exists only during a hand-over.
    pub hand_over_key: Vec<u8>,
    /// Name of this process, which no other process has.
    pub name: Vec<u8>,
    /// Value of both entries, such as the address of the process.
    pub value: Vec<u8>,
    /// Time after which the entries of a process that ended or was paused are deleted; at least 2 s.
    pub ttl: Duration,
}

/// Change that a candidate observes while it waits.
#[derive(Clone, Copy, Debug)]
pub enum Observation<'a> {
    /// Another process is elected; its entry has this value.
    Leader(&'a [u8]),
    /// Another process has the name of this one; its entry has this value.
    NameInUse(&'a [u8]),
    /// etcd cannot be reached, or rejected the last attempt.
    Failed(&'a Error),
}

/// Time at which a lease ends at the earliest, shared with the task that renews the lease. It is measured from before
/// each renewal was sent, on a clock of this machine that also runs while the machine is suspended.
#[derive(Clone, Debug, Default)]
pub struct LeaseEnd(Arc<AtomicU64>);

/// Lease of a process.
#[derive(Clone, Debug)]
struct Lease {
    id: i64,
    end: LeaseEnd,
}

/// Reason for the end of a leadership.
#[derive(Debug)]
pub enum LeadershipEnd {
    /// Another process must be elected. This process must end its work, and then call [`Leadership::resign`].
    HandOver,
    /// The lease cannot be renewed, or the entry was deleted. Another process may be elected.
    Lost(Error),
}

/// Process that was elected.
#[derive(Debug)]
pub struct Leadership {
    client: Client,
    leader_key: Vec<u8>,
    hand_over_key: Vec<u8>,
    keys_prefix: Vec<u8>,
    name: Vec<u8>,
    /// Value of the entry of this process.
    value: Vec<u8>,
    /// Create revision of the entry.
    token: i64,
    lease: Lease,
    ttl: Duration,
}

/// Returns the time since the start of the machine.
fn now() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    let (seconds, nanoseconds) = (u64::try_from(now.tv_sec), u32::try_from(now.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanoseconds.unwrap_or(0))
}

impl LeaseEnd {
    fn set(&self, ends_at: Duration) {
        self.0.store(u64::try_from(ends_at.as_nanos()).unwrap_or(u64::MAX), Ordering::Release);
    }

    /// Returns the time until the lease ends, unless it is renewed; zero if it may have ended.
    pub fn remaining(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Acquire)).saturating_sub(now())
    }

    /// Returns whether the lease has certainly not ended.
    pub fn is_valid(&self) -> bool {
        !self.remaining().is_zero()
    }
}

impl Lease {
    async fn grant(client: &Client, ttl: Duration) -> Result<Self, Error> {
        let sent = now();
        let (id, ttl) = client.grant_lease(ttl).await?;
        let end = LeaseEnd::default();
        end.set(sent + ttl);
        Ok(Self { id, end })
    }

    /// Renews the lease, and returns its new end.
    async fn renew(&self, client: &Client) -> Result<Duration, Error> {
        let sent = now();
        Ok(sent + client.keep_lease_alive(self.id).await?)
    }
}

/// Participation of a process in the election.
#[derive(Debug)]
pub struct Campaign {
    candidate: Candidate,
    lease: Option<Lease>,
}

impl Campaign {
    /// Prepares the participation. Calls no member of etcd.
    pub fn new(candidate: Candidate) -> Self {
        Self { candidate, lease: None }
    }

    /// Waits until the process is elected. Calls `observe` with each result of an attempt that was not successful.
    ///
    /// # Errors
    /// [`Error::AccessDenied`] or [`Error::Rejected`]. After all other errors the attempt is repeated.
    pub async fn win(&mut self, mut observe: impl FnMut(Observation<'_>)) -> Result<Leadership, Error> {
        loop {
            match self.candidate.try_once(&mut self.lease, &mut observe).await {
                Ok(Some(leadership)) => return Ok(leadership),
                Ok(None) => {}
                Err(error @ (Error::AccessDenied(_) | Error::Rejected(_))) => return Err(error),
                Err(error) => {
                    if matches!(error, Error::LeaseNotFound) {
                        self.lease = None;
                    }
                    observe(Observation::Failed(&error));
                }
            }
            tokio::time::sleep(self.candidate.ttl / ATTEMPTS_PER_LEASE).await;
        }
    }

    /// Ends the participation after [`Self::win`] was dropped: deletes the entries of the process at once.
    ///
    /// # Errors
    /// [`Error`]; the entries are then deleted after their time to live.
    pub async fn withdraw(self) -> Result<(), Error> {
        match self.lease {
            Some(lease) => self.candidate.client.revoke_lease(lease.id).await,
            None => Ok(()),
        }
    }
}

impl Candidate {
    /// Tries to create the entries. Returns `None` if another process is elected, or has the name of this one.
    async fn try_once(
        &self,
        lease: &mut Option<Lease>,
        observe: &mut impl FnMut(Observation<'_>),
    ) -> Result<Option<Leadership>, Error> {
        let current = match lease {
            Some(current) => {
                if current.end.remaining() < self.ttl / 2 {
                    current.end.set(current.renew(&self.client).await?);
                }
                current
            }
            None => lease.insert(Lease::grant(&self.client, self.ttl).await?),
        };
        let own_key = [&self.keys_prefix[..], &self.name].concat();
        let own = self.create_entry(&own_key, current.id, Vec::new(), Vec::new()).await?;
        if let Some(other) = own.filter(|entry| entry.lease != current.id) {
            observe(Observation::NameInUse(&other.value));
            return Ok(None);
        }
        let no_other_next = self.check_hand_over().await?;
        let end_hand_over = vec![delete(self.hand_over_key.clone())];
        match self.create_entry(&self.leader_key, current.id, no_other_next, end_hand_over).await? {
            Some(entry) if entry.lease == current.id => Ok(Some(Leadership {
                client: self.client.clone(),
                leader_key: self.leader_key.clone(),
                hand_over_key: self.hand_over_key.clone(),
                keys_prefix: self.keys_prefix.clone(),
                name: self.name.clone(),
                value: self.value.clone(),
                token: entry.create_revision,
                lease: current.clone(),
                ttl: self.ttl,
            })),
            Some(leader) => {
                observe(Observation::Leader(&leader.value));
                Ok(None)
            }
            None => Ok(None), // another process must be elected next
        }
    }

    /// Returns the condition that no other process must be elected next, or that this process has ended.
    async fn check_hand_over(&self) -> Result<Vec<Compare>, Error> {
        let request = RangeRequest { key: self.hand_over_key.clone(), ..RangeRequest::default() };
        let entries = self.client.range(request).await?.kvs;
        Ok(match entries.first() {
            Some(next) if next.value == self.name => Vec::new(),
            Some(next) => vec![is_created_in([&self.keys_prefix, &next.value[..]].concat(), 0)],
            None => vec![is_created_in(self.hand_over_key.clone(), 0)],
        })
    }

    /// Creates an entry with a lease and performs the further operations, unless the entry exists or one of the further
    /// conditions does not hold. Returns the entry of this or another process, if there is one.
    async fn create_entry(
        &self,
        key: &[u8],
        lease: i64,
        mut conditions: Vec<Compare>,
        operations: Vec<RequestOp>,
    ) -> Result<Option<KeyValue>, Error> {
        conditions.push(is_created_in(key.to_vec(), 0));
        let create = [put_with_lease(key.to_vec(), self.value.clone(), lease), get(key.to_vec())];
        let request = TxnRequest {
            compare: conditions,
            success: create.into_iter().chain(operations).collect(),
            failure: vec![get(key.to_vec())],
        };
        let response = self.client.txn(request).await?;
        // After an attempt whose answer was lost, the entry may exist with the lease of this process.
        Ok(response.entries(usize::from(response.succeeded)).first().cloned())
    }
}

impl Leadership {
    /// Returns the fencing token. It is larger than those of all processes that were elected before.
    pub fn token(&self) -> i64 {
        self.token
    }

    /// Returns the condition of a transaction that this process is still the elected one.
    pub fn condition(&self) -> Compare {
        is_created_in(self.leader_key.clone(), self.token)
    }

    /// Returns the end of the lease, which [`Self::hold`] renews.
    pub fn lease_end(&self) -> LeaseEnd {
        self.lease.end.clone()
    }

    /// Renews the lease until this process must end its work, and returns the reason.
    pub async fn hold(&self) -> LeadershipEnd {
        loop {
            let renewed = async {
                let ends_at = self.lease.renew(&self.client).await?;
                let must_hand_over = self.must_hand_over().await?; // also checks that this process is still elected
                self.lease.end.set(ends_at);
                Ok(must_hand_over)
            };
            let renewed = renewed.await;
            let delay = match renewed {
                Ok(true) => return LeadershipEnd::HandOver,
                Ok(false) => self.ttl / RENEWALS_PER_LEASE,
                Err(error @ (Error::LeaseNotFound | Error::Deposed)) => return LeadershipEnd::Lost(error),
                Err(error) if self.lease.end.is_valid() => {
                    tracing::warn!(%error, "cannot renew the lease of this process");
                    self.ttl / ATTEMPTS_PER_LEASE
                }
                Err(error) => return LeadershipEnd::Lost(error),
            };
            tokio::time::sleep(delay).await;
        }
    }

    /// Renews the lease until this is no longer possible, also while another process must be elected.
    pub async fn keep(&self) -> Error {
        loop {
            match self.hold().await {
                LeadershipEnd::Lost(error) => return error,
                LeadershipEnd::HandOver => tokio::time::sleep(self.ttl / RENEWALS_PER_LEASE).await,
            }
        }
    }

    /// Changes the value of the entry of the elected process, which has the value of the candidate until then.
    ///
    /// # Errors
    /// [`Error::Deposed`] if the entry was deleted or replaced, or another [`Error`].
    pub async fn announce(&self, value: Vec<u8>) -> Result<(), Error> {
        let operations = vec![put_with_lease(self.leader_key.clone(), value, self.lease.id)];
        self.transact(operations).await.map(drop)
    }

    /// Performs operations if this process is still the elected one.
    async fn transact(&self, success: Vec<RequestOp>) -> Result<TxnResponse, Error> {
        let request = TxnRequest { compare: vec![self.condition()], success, failure: Vec::new() };
        let response = self.client.txn(request).await?;
        if response.succeeded { Ok(response) } else { Err(Error::Deposed) }
    }

    /// Returns whether another process must be elected, and runs. Checks that the entry of the elected process was not
    /// deleted, for example by an operator, and creates a deleted entry of this process again.
    async fn must_hand_over(&self) -> Result<bool, Error> {
        let own_key = [&self.keys_prefix[..], &self.name].concat();
        let operations = vec![get(self.hand_over_key.clone()), get(own_key.clone())];
        let response = self.transact(operations).await?;
        if response.entries(1).is_empty() {
            let request = TxnRequest {
                compare: vec![self.condition(), is_created_in(own_key.clone(), 0)],
                success: vec![put_with_lease(own_key, self.value.clone(), self.lease.id)],
                failure: Vec::new(),
            };
            if let Err(error) = self.client.txn(request).await {
                tracing::warn!(%error, "cannot create the deleted entry of this process again");
            }
        }
        let Some(next) = response.entries(0).first().filter(|entry| entry.value != self.name) else {
            return Ok(false);
        };
        let key = [&self.keys_prefix[..], &next.value].concat();
        let request = RangeRequest { key, ..RangeRequest::default() };
        Ok(!self.client.range(request).await?.kvs.is_empty())
    }

    /// Ends the lease, so that another process can be elected at once. Must not be called during [`Self::hold`].
    ///
    /// # Errors
    /// [`Error`]; the lease then ends after its time to live, or when it is no longer renewed.
    pub async fn resign(&self) -> Result<(), Error> {
        self.lease.end.set(Duration::ZERO); // from now on, the entry may belong to another process
        self.client.revoke_lease(self.lease.id).await
    }
}
