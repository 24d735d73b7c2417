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
    time::{Duration, Instant},
};

use crate::{
    Client, Error,
    messages::{Compare, KeyValue, RangeRequest, TxnRequest, get, is_created_in, put_with_lease},
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
    /// Key of the entry of this process, which no other process uses.
    pub own_key: Vec<u8>,
    /// Key of the entry with the name of the process that must be elected next. It exists only during a hand-over.
    pub hand_over_key: Vec<u8>,
    /// Name of this process.
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
    /// Another process has the own key of this one; its entry has this value.
    KeyInUse(&'a [u8]),
    /// etcd cannot be reached, or rejected the last attempt.
    Failed(&'a Error),
}

/// Time at which a lease ends at the earliest, shared with the task that renews the lease. It is measured on the
/// monotonic clock of this machine, from before each renewal was sent.
#[derive(Clone, Debug)]
pub struct LeaseEnd {
    base: Instant,
    /// Nanoseconds since `base`.
    ends_after: Arc<AtomicU64>,
}

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
    name: Vec<u8>,
    /// Create revision of the entry.
    token: i64,
    lease: Lease,
    ttl: Duration,
}

impl LeaseEnd {
    fn new(ends_at: Instant) -> Self {
        let end = Self { base: Instant::now(), ends_after: Arc::default() };
        end.set(ends_at);
        end
    }

    fn set(&self, ends_at: Instant) {
        let nanoseconds = ends_at.saturating_duration_since(self.base).as_nanos();
        self.ends_after.store(u64::try_from(nanoseconds).unwrap_or(u64::MAX), Ordering::Release);
    }

    /// Returns the time until the lease ends, unless it is renewed; zero if it may have ended.
    pub fn remaining(&self) -> Duration {
        let ends_after = Duration::from_nanos(self.ends_after.load(Ordering::Acquire));
        ends_after.saturating_sub(self.base.elapsed())
    }

    /// Returns whether the lease has certainly not ended.
    pub fn is_valid(&self) -> bool {
        !self.remaining().is_zero()
    }
}

impl Lease {
    async fn grant(client: &Client, ttl: Duration) -> Result<Self, Error> {
        let sent = Instant::now();
        let (id, ttl) = client.grant_lease(ttl).await?;
        Ok(Self { id, end: LeaseEnd::new(sent + ttl) })
    }

    async fn renew(&self, client: &Client) -> Result<(), Error> {
        let sent = Instant::now();
        let ttl = client.keep_lease_alive(self.id).await?;
        self.end.set(sent + ttl);
        Ok(())
    }
}

impl Candidate {
    /// Waits until the process is elected. Calls `observe` with each result of an attempt that was not successful.
    ///
    /// # Errors
    /// [`Error::AccessDenied`] or [`Error::Rejected`]. After all other errors the attempt is repeated.
    pub async fn campaign(&self, mut observe: impl FnMut(Observation<'_>)) -> Result<Leadership, Error> {
        let mut lease = None;
        loop {
            match self.try_once(&mut lease, &mut observe).await {
                Ok(Some(leadership)) => return Ok(leadership),
                Ok(None) => {}
                Err(error @ (Error::AccessDenied(_) | Error::Rejected(_))) => return Err(error),
                Err(error) => {
                    if matches!(error, Error::LeaseNotFound) {
                        lease = None;
                    }
                    observe(Observation::Failed(&error));
                }
            }
            tokio::time::sleep(self.ttl / ATTEMPTS_PER_LEASE).await;
        }
    }

    /// Tries to create the entries. Returns `None` if another process is elected, or has the own key.
    async fn try_once(
        &self,
        lease: &mut Option<Lease>,
        observe: &mut impl FnMut(Observation<'_>),
    ) -> Result<Option<Leadership>, Error> {
        let current = match lease {
            Some(current) => {
                if current.end.remaining() < self.ttl / 2 {
                    current.renew(&self.client).await?;
                }
                current
            }
            None => lease.insert(Lease::grant(&self.client, self.ttl).await?),
        };
        let own = self.create_entry(&self.own_key, current.id, Vec::new()).await?;
        if let Some(other) = own.filter(|entry| entry.lease != current.id) {
            observe(Observation::KeyInUse(&other.value));
            return Ok(None);
        }
        let no_other_next = self.check_hand_over().await?;
        match self.create_entry(&self.leader_key, current.id, no_other_next).await? {
            Some(entry) if entry.lease == current.id => Ok(Some(Leadership {
                client: self.client.clone(),
                leader_key: self.leader_key.clone(),
                hand_over_key: self.hand_over_key.clone(),
                name: self.name.clone(),
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

    /// Returns the condition that no other process must be elected next.
    async fn check_hand_over(&self) -> Result<Vec<Compare>, Error> {
        let request = RangeRequest { key: self.hand_over_key.clone(), ..RangeRequest::default() };
        let entries = self.client.range(request).await?.kvs;
        let is_own = entries.first().is_some_and(|entry| entry.value == self.name);
        Ok(if is_own { Vec::new() } else { vec![is_created_in(self.hand_over_key.clone(), 0)] })
    }

    /// Creates an entry with a lease, unless it exists or one of the further conditions does not hold. Returns the
    /// entry of this or another process, if there is one.
    async fn create_entry(
        &self,
        key: &[u8],
        lease: i64,
        mut conditions: Vec<Compare>,
    ) -> Result<Option<KeyValue>, Error> {
        conditions.push(is_created_in(key.to_vec(), 0));
        let request = TxnRequest {
            compare: conditions,
            success: vec![put_with_lease(key.to_vec(), self.value.clone(), lease), get(key.to_vec())],
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
            let renewed = match self.lease.renew(&self.client).await {
                Ok(()) => self.must_hand_over().await,
                Err(error) => Err(error),
            };
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

    /// Returns whether another process must be elected. Checks that the entry of this process was not deleted, for
    /// example by an operator.
    async fn must_hand_over(&self) -> Result<bool, Error> {
        let request = TxnRequest {
            compare: vec![self.condition()],
            success: vec![get(self.hand_over_key.clone())],
            failure: Vec::new(),
        };
        let response = self.client.txn(request).await?;
        if !response.succeeded {
            return Err(Error::Deposed);
        }
        Ok(response.entries(0).first().is_some_and(|entry| entry.value != self.name))
    }

    /// Ends the lease, so that another process can be elected at once. Must not be called during [`Self::hold`].
    ///
    /// # Errors
    /// [`Error`]; the lease then ends after its time to live, or when it is no longer renewed.
    pub async fn resign(&self) -> Result<(), Error> {
        self.lease.end.set(self.lease.end.base); // from now on, the entry may belong to another process
        self.client.revoke_lease(self.lease.id).await
    }
}
