//! Result of a step of fair tiering, for the manager and for metrics.

use tiering::fair::{TenantReport as TenantDecision, ThrashCounts, TierReport};
use units::{Bytes, Name, UnixMs};

use crate::shares::now;

/// Result of a step.
#[derive(Clone, Debug)]
pub struct Report {
    /// Time of the step.
    pub at: UnixMs,
    /// Reason why nothing was decided; empty if it was.
    pub reason: String,
    /// Reasons why no pages are promoted, and settings of the kernel that interfere.
    pub problems: Vec<String>,
    /// Local memory and slower memory.
    pub tiers: [TierReport; 2],
    /// Tenants, in the order of their names.
    pub tenants: Vec<TenantReport>,
}

/// State of one tenant after a step.
#[derive(Clone, Debug)]
pub struct TenantReport {
    /// Name of the tenant's cgroup.
    pub name: Name,
    /// Decision of the policy.
    pub decided: TenantDecision,
    /// Moves by the agent since the tenant appeared.
    pub moves: Moves,
    /// Memory that was reclaimed and faulted back soon after.
    pub refaulted: Bytes,
    /// Sampled promotions.
    pub thrash: ThrashCounts,
    /// Reason why orders had no effect; empty if they had.
    pub problem: String,
}

/// Memory that the agent has moved or tried to move since the tenant appeared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// Memory that left local memory by orders of the agent.
    pub demoted: Bytes,
    /// Promoted memory.
    pub promoted: Bytes,
    /// Promoted memory, and memory that was not promoted because the node was full.
    pub attempted: Bytes,
}

impl Report {
    /// Creates the report of a step in which nothing was decided.
    pub fn blocked(reason: String) -> Self {
        let (tiers, tenants) = (<[TierReport; 2]>::default(), Vec::new());
        Self { at: now(), reason, problems: Vec::new(), tiers, tenants }
    }
}
