//! Report of the soft memory daemon, for the manager and for metrics.

use soft::budget::{ClientReport, Counters};
use units::{Bytes, UnixMs, UserId};

/// State of soft memory on this host.
#[derive(Clone, Debug)]
pub struct Report {
    /// Time of the report.
    pub at: UnixMs,
    /// Largest permitted size of soft memory: the configured size and the slices that it may use.
    pub limit: Bytes,
    /// Size of soft memory by which the memory of the host suffices, at most `limit`.
    pub total: Bytes,
    /// Part of `total` that is in no budget.
    pub free: Bytes,
    /// Counters of all clients since the start of the agent, including those that have ended.
    pub counters: Counters,
    /// Number of clients.
    pub client_count: usize,
    /// Clients with the largest budgets, at most `units::limits::SOFT_REPORTED_CLIENTS_MAX`, by process ID.
    pub clients: Vec<Client>,
}

/// State of a client.
#[derive(Clone, Debug)]
pub struct Client {
    /// User that connected.
    pub user: UserId,
    /// Name of the program, as in `/proc/PID/comm`.
    pub program: String,
    /// Budget, memory and counters.
    pub state: ClientReport,
}
