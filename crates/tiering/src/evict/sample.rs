//! Input and output of the policy of early eviction.

use units::{Bytes, Ns};

use super::FlowClass;
use crate::fair::TenantId;

/// Cumulative counters of a tenant, with any start values. If one decreases, the measurements of the tenant
/// restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Memory that was allocated or fetched.
    pub grown: Bytes,
    /// Memory that was evicted.
    pub evicted: Bytes,
    /// Time in which evictions were in progress.
    pub evicting: Ns,
    /// Time in which the tenant could not run because it waited for an eviction.
    pub blocked: Ns,
    /// Time in which the tenant could not run because it waited for memory that was evicted before.
    pub fetching: Ns,
    /// Accesses to memory that was not local (N_miss).
    pub misses: u64,
    /// All accesses (N_access).
    pub accesses: u64,
}

impl Counters {
    /// Returns the increase of all counters since `earlier`, or `None` if a counter has decreased.
    pub(super) fn since(&self, earlier: &Self) -> Option<Self> {
        let time = |now: Ns, then: Ns| now.0.checked_sub(then.0).map(Ns);
        Some(Self {
            grown: self.grown.checked_sub(earlier.grown)?,
            evicted: self.evicted.checked_sub(earlier.evicted)?,
            evicting: time(self.evicting, earlier.evicting)?,
            blocked: time(self.blocked, earlier.blocked)?,
            fetching: time(self.fetching, earlier.fetching)?,
            misses: self.misses.checked_sub(earlier.misses)?,
            accesses: self.accesses.checked_sub(earlier.accesses)?,
        })
    }
}

/// Memory of a tenant at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantSample {
    /// Tenant.
    pub id: TenantId,
    /// Largest usage, at which the tenant waits for evictions.
    pub limit: Bytes,
    /// Local memory of the tenant.
    pub usage: Bytes,
    /// Whether the tenant waits for an eviction now.
    pub is_blocked: bool,
    /// Counters of the tenant.
    pub counters: Counters,
}

/// Change of a threshold at the end of the last cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThresholdChange {
    /// The threshold is at its maximum, or has only one possible value.
    Unchanged,
    /// The tenant grows faster than its memory is evicted (Eq. 2).
    Lowered,
    /// The threshold was lowered by less, because the cache miss rate has increased (Eq. 4).
    PulledBack,
    /// Memory is evicted as fast as it grows, and the threshold returns to its maximum.
    Reset,
    /// Early eviction has cost too much time, because the tenant needed the evicted memory again. The
    /// threshold is at its maximum until the loss is below [`Settings::loss_limit`](super::Settings).
    Costly,
    /// No eviction was completed. The threshold is at its maximum, because early eviction cannot help.
    Stalled,
}

/// Decision about a tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TenantReport {
    /// Tenant.
    pub id: TenantId,
    /// Local memory of the tenant.
    pub usage: Bytes,
    /// Largest usage, at which the tenant waits for evictions.
    pub limit: Bytes,
    /// Usage above which memory is evicted.
    pub threshold: Bytes,
    /// Smallest threshold of the tenant (T_lower).
    pub lower_threshold: Bytes,
    /// Largest threshold of the tenant (T_upper).
    pub upper_threshold: Bytes,
    /// Memory above the threshold.
    pub excess: Bytes,
    /// Growth of the memory while the tenant is not blocked (V_app), per second.
    pub growth_bytes_per_s: Bytes,
    /// Eviction rate while memory is evicted (V_evict), per second.
    pub eviction_bytes_per_s: Bytes,
    /// Change of the threshold at the end of the last cycle.
    pub change: ThresholdChange,
    /// Class of the eviction flows.
    pub class: FlowClass,
}
