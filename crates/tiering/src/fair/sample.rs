//! Input of the policy: capacity of the tiers, and counters of the tenants.

use std::fmt;

use units::{Bytes, Ns, limits::TIERS_MAX};

/// Index of the fastest tier, which is local memory.
pub const FAST: usize = 0;

/// Identifier of a tenant. The caller chooses it, for example one per cgroup. An identifier that
/// disappears and returns is a new tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

impl fmt::Display for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Memory of one tier of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierSample {
    /// Memory of the tier. A tier without capacity does not exist. If tenants use more, because the
    /// capacity is a part of a larger memory, the excess is demoted.
    pub capacity: Bytes,
    /// Free memory of the tier.
    pub free: Bytes,
}

/// Memory of all tiers of a host at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostSample {
    /// Time of the sample on a monotonic clock. A sample that is earlier than the last one restarts
    /// all measurements of rates.
    pub at: Ns,
    /// Tiers, the fastest first. Demotion moves pages to the next tiers.
    pub tiers: [TierSample; TIERS_MAX],
}

impl HostSample {
    /// Creates a sample from the tiers of a host, the fastest first. Ignores tiers beyond
    /// [`TIERS_MAX`].
    pub fn new(at: Ns, tiers: &[TierSample]) -> Self {
        let mut sample = Self { at, ..Self::default() };
        sample.tiers.iter_mut().zip(tiers).for_each(|(to, from)| *to = *from);
        sample
    }
}

/// Usage and limits of a tenant in one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantTier {
    /// Memory of the tenant in this tier.
    pub usage: Bytes,
    /// Protection: memory that is exempt from demotion. 0 for no protection.
    pub protection: Bytes,
    /// Bound: the largest usage. `None` for no bound.
    pub bound: Option<Bytes>,
}

/// Counters of a tenant. Cumulative counters start at any value and increase. If a counter
/// decreases, the policy treats the tenant as a new one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Cumulative size of demoted pages.
    pub demoted: Bytes,
    /// Cumulative size of promoted pages.
    pub promoted: Bytes,
    /// Cumulative size of pages whose promotion was attempted, including failed attempts.
    pub attempted: Bytes,
    /// Cumulative number of sampled promotions; see [`ThrashCounts`](super::ThrashCounts).
    pub sampled_promotions: u64,
    /// Cumulative number of sampled promotions that were followed by an early demotion.
    pub sampled_thrashed: u64,
    /// Size of the pages on active LRU lists. `None` if unknown; the policy then uses the usage of
    /// all tiers instead.
    pub active: Option<Bytes>,
    /// Cumulative size of freed pages. `None` if unknown; the policy then adds up the decreases of
    /// the usage of all tiers.
    pub freed: Option<Bytes>,
}

/// Usage, limits and counters of a tenant at the time of a [`HostSample`]. Tenants whose pages must
/// not move, such as VMs with assigned devices, are not passed to the policy. Their memory counts
/// as unavailable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantSample {
    /// Identifier, unique within a step.
    pub id: TenantId,
    /// Usage and limits per tier.
    pub tiers: [TenantTier; TIERS_MAX],
    /// Counters.
    pub counters: Counters,
}

impl TenantSample {
    /// Creates the sample of a tenant without memory and limits.
    pub fn new(id: TenantId) -> Self {
        Self { id, ..Self::default() }
    }

    /// Returns the usage of all tiers.
    pub(super) fn total_usage(&self) -> Bytes {
        self.tiers.iter().map(|tier| tier.usage).sum()
    }
}
