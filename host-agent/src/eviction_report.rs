//! Report of a cycle of early eviction, for metrics.

use tiering::evict::TenantReport as Decision;
use units::{Bytes, Name, Ns};

/// Result of a cycle.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Reason why nothing was decided; empty if it was.
    pub reason: String,
    /// Tenants with a memory limit, in the order of their names.
    pub tenants: Vec<TenantReport>,
}

/// State of one tenant at the end of a cycle.
#[derive(Clone, Debug)]
pub struct TenantReport {
    /// Name of the tenant's cgroup.
    pub name: Name,
    /// Decision of the policy.
    pub decided: Decision,
    /// Counters since the tenant appeared.
    pub counts: Counts,
    /// Reason why the last request to evict memory or to set the priority of I/O had no effect; empty if
    /// it had.
    pub problem: String,
}

/// Counters of a tenant since it appeared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Memory that the agent evicted.
    pub evicted: Bytes,
    /// Time in which the tenant could not run because it waited for evictions.
    pub blocked: Ns,
    /// Time in which the tenant could not run because it waited for memory that was evicted before.
    pub fetching: Ns,
}
