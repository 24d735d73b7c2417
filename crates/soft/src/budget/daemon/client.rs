//! State of a client of the daemon.

use units::{Ns, UserId};

use crate::budget::{decision::Demand, sample::ClientSample};

/// Counters of a client or of the daemon, since the start of the connection or of the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Answered requests.
    pub requests: u64,
    /// Granted pages.
    pub granted: u64,
    /// Denied requests.
    pub denied: u64,
    /// Pages that were given up for a demand.
    pub reclaimed: u64,
    /// Demands that were not answered in time.
    pub unanswered: u64,
}

/// State of a client for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientReport {
    /// Budget and memory.
    pub sample: ClientSample,
    /// Counters.
    pub counters: Counters,
    /// Whether the client did not answer the last demand in time, or has lost its connection.
    pub is_silent: bool,
}

/// Demand that a client has not answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    pub number: u64,
    pub demand: Demand,
    pub returned: u64,
    pub deadline: Ns,
    /// Whether the deadline has passed.
    pub is_late: bool,
}

impl Pending {
    /// Returns the pages that the client has not given up yet, if it can still answer in time.
    pub fn missing_pages(&self) -> u64 {
        if self.is_late { 0 } else { self.demand.pages().saturating_sub(self.returned) }
    }

    /// Returns the pages in use among [`missing_pages`](Self::missing_pages). Unused budget is given up first.
    pub fn missing_used_pages(&self) -> u64 {
        self.missing_pages().min(self.demand.used_pages)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Client {
    /// User of the process.
    pub user: UserId,
    /// Pages of the request that waits for an answer, or 0.
    pub requested: u64,
    pub pending: Option<Pending>,
    /// Time and pages of the last denied request.
    pub denied: Option<(Ns, u64)>,
    /// Pages granted since the last measurement of the client's memory began.
    pub granted_since_measurement: u64,
    /// Soft memory in use according to the last measurement, without pages that were granted since it began.
    pub measured_used: u64,
    /// End of the time in which the client, which has lost its connection, can connect again.
    pub detached_until: Option<Ns>,
    pub counters: Counters,
}

impl Client {
    pub fn new(user: UserId, measured_used: u64) -> Self {
        Self {
            user,
            requested: 0,
            pending: None,
            denied: None,
            granted_since_measurement: 0,
            measured_used,
            detached_until: None,
            counters: Counters::default(),
        }
    }

    /// Returns whether the client can receive a demand.
    pub fn is_reachable(&self) -> bool {
        self.pending.is_none() && self.detached_until.is_none()
    }

    /// Returns whether the client can still answer a demand in time.
    pub fn is_awaited(&self) -> bool {
        self.pending.is_some_and(|pending| !pending.is_late)
    }
}
