//! Election of one process among several by an entry with a lease. The entry's create revision is the *fencing
//! token* of the elected process: it increases with each election. A process that does not notice that its lease
//! has ended, for example because it was paused, cannot write if each of its transactions has the condition
//! [`Leadership::condition`].

use std::time::{Duration, Instant};

use crate::{
    Client, Error,
    messages::{Compare, TxnRequest, get, is_created_in, put_with_lease},
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
    pub key: Vec<u8>,
    /// Value of the entry, such as the address of the process.
    pub value: Vec<u8>,
    /// Time after which the entry of a process that ended or was paused is deleted; at least 2 s.
    pub ttl: Duration,
}

/// Lease of a process.
#[derive(Clone, Copy, Debug)]
struct Lease {
    id: i64,
    /// Time at which the lease ends at the earliest, if it is not renewed.
    ends_at: Instant,
}

/// Process that was elected.
#[derive(Debug)]
pub struct Leadership {
    client: Client,
    key: Vec<u8>,
    /// Create revision of the entry.
    token: i64,
    lease: Lease,
    ttl: Duration,
}

impl Candidate {
    /// Waits until the process is elected.
    ///
    /// # Errors
    /// [`Error::AccessDenied`] or [`Error::Rejected`]. All other errors are logged, and the attempt is repeated.
    pub async fn campaign(&self) -> Result<Leadership, Error> {
        let mut lease = None;
        loop {
            match self.try_once(&mut lease).await {
                Ok(Some(leadership)) => return Ok(leadership),
                Ok(None) => {}
                Err(Error::LeaseNotFound) => lease = None,
                Err(error @ (Error::AccessDenied(_) | Error::Rejected(_))) => return Err(error),
                Err(error) => tracing::warn!(%error, "cannot take part in the election"),
            }
            tokio::time::sleep(self.ttl / ATTEMPTS_PER_LEASE).await;
        }
    }

    /// Tries to create the entry. Returns `None` if another process is elected.
    async fn try_once(&self, lease: &mut Option<Lease>) -> Result<Option<Leadership>, Error> {
        let sent = Instant::now();
        let current = match *lease {
            Some(current) if current.ends_at.saturating_duration_since(sent) > self.ttl / 2 => current,
            Some(current) => {
                let ttl = self.client.keep_lease_alive(current.id).await?;
                Lease { ends_at: sent + ttl, ..current }
            }
            None => {
                let (id, ttl) = self.client.grant_lease(self.ttl).await?;
                Lease { id, ends_at: sent + ttl }
            }
        };
        *lease = Some(current);
        let request = TxnRequest {
            compare: vec![is_created_in(self.key.clone(), 0)],
            success: vec![
                put_with_lease(self.key.clone(), self.value.clone(), current.id),
                get(self.key.clone()),
            ],
            failure: vec![get(self.key.clone())],
        };
        let response = self.client.txn(request).await?;
        let entry = response.entries(usize::from(response.succeeded)).first();
        // An earlier attempt whose answer was lost may have created the entry.
        let own = entry.filter(|entry| entry.lease == current.id);
        Ok(own.map(|entry| Leadership {
            client: self.client.clone(),
            key: self.key.clone(),
            token: entry.create_revision,
            lease: current,
            ttl: self.ttl,
        }))
    }
}

impl Leadership {
    /// Returns the fencing token. It is larger than those of all processes that were elected before.
    pub fn token(&self) -> i64 {
        self.token
    }

    /// Returns the condition of a transaction that this process is still the elected one.
    pub fn condition(&self) -> Compare {
        is_created_in(self.key.clone(), self.token)
    }

    /// Renews the lease until this is no longer possible, and returns the reason.
    pub async fn hold(&mut self) -> Error {
        let interval = self.ttl / RENEWALS_PER_LEASE;
        loop {
            let sent = Instant::now();
            let delay = match self.client.keep_lease_alive(self.lease.id).await {
                Ok(ttl) => {
                    self.lease.ends_at = sent + ttl;
                    interval
                }
                Err(error @ Error::LeaseNotFound) => return error,
                Err(error) if Instant::now() < self.lease.ends_at => {
                    tracing::warn!(%error, "cannot renew the lease of this process");
                    self.ttl / ATTEMPTS_PER_LEASE
                }
                Err(error) => return error,
            };
            tokio::time::sleep(delay).await;
        }
    }
}
