//! Output of the policy: orders for the host, and reports that explain the orders.

use std::fmt;

use units::{Bytes, limits::TIERS_MAX};

use super::{TenantId, TenantReport, TierReport};

/// Time by which a demotion must be performed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// The host demotes in the background. The tenant continues to run (kswapd in the paper).
    Background,
    /// The host demotes before it performs any other order. The tenant is above its bound, or free
    /// memory is nearly exhausted (synchronous demotion in the paper).
    Immediate,
}

/// Pages that the host may promote. Each variant includes the pages of the following ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Candidates {
    /// All pages of the tenant, accessed or not. The tenant is below its protection.
    All,
    /// Pages that were accessed since the last scan.
    Accessed,
    /// Pages that are accessed most often. The promotions of the tenant are throttled, or each
    /// promotion needs a demotion because local memory is fully utilized.
    Hot,
}

/// Limit on the promotions of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromotionBudget {
    /// Largest size of promoted pages per second. `None` for no limit.
    pub bytes_per_s: Option<Bytes>,
    /// Pages that may be promoted.
    pub candidates: Candidates,
}

impl PromotionBudget {
    /// Budget of a tenant that is not throttled.
    pub const UNLIMITED: Self = Self { bytes_per_s: None, candidates: Candidates::Accessed };
}

/// Order for the host. An order replaces the orders of earlier steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Demotes the least recently used pages of a tenant.
    Demote {
        /// Tenant whose pages are demoted.
        tenant: TenantId,
        /// Tier from which pages are demoted to the following tiers.
        tier: usize,
        /// Size of the pages, more than 0. Not a multiple of the page size; the host rounds down.
        bytes: Bytes,
        /// Time by which the order must be performed.
        urgency: Urgency,
    },
    /// Sets the promotion budget of a tenant until the next step. Each step contains this order
    /// once for each tenant.
    LimitPromotion {
        /// Tenant whose promotions are limited.
        tenant: TenantId,
        /// Budget until the next step.
        budget: PromotionBudget,
    },
}

/// Result of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    pub(super) orders: Vec<Order>,
    pub(super) tenants: Vec<TenantReport>,
    pub(super) tiers: [TierReport; TIERS_MAX],
    pub(super) rejected_tenants: usize,
}

impl Decision {
    /// Returns the orders: urgent demotions, other demotions, and one promotion budget per tenant.
    pub fn orders(&self) -> &[Order] {
        &self.orders
    }

    /// Returns one report per tenant, in the order of the samples.
    pub fn tenants(&self) -> &[TenantReport] {
        &self.tenants
    }

    /// Returns one report per tier. The reports of tiers that do not exist are empty.
    pub fn tiers(&self) -> &[TierReport; TIERS_MAX] {
        &self.tiers
    }

    /// Returns the number of samples that were ignored: samples beyond
    /// [`TIERING_TENANTS_MAX`](units::limits::TIERING_TENANTS_MAX), and samples whose identifier
    /// occurred before in the same step.
    pub fn rejected_tenants(&self) -> usize {
        self.rejected_tenants
    }
}

impl fmt::Display for Urgency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Background => "background",
            Self::Immediate => "immediate",
        })
    }
}

impl fmt::Display for Candidates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "all pages",
            Self::Accessed => "accessed pages",
            Self::Hot => "hot pages",
        })
    }
}

impl fmt::Display for PromotionBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bytes_per_s {
            Some(bytes) => write!(f, "{} of {}/s", self.candidates, bytes),
            None => write!(f, "{} without limit", self.candidates),
        }
    }
}
