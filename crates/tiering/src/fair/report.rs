//! Reports of the policy: usage, protection and bound of each tenant, and the reasons of its orders.

use std::fmt;

use units::{Bytes, limits::TIERS_MAX};

use super::{FAST, Factor, PromotionBudget, TenantId, ThrashState, Urgency};

/// State of a tier after a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierReport {
    /// Memory of the tier.
    pub capacity: Bytes,
    /// Free memory of the tier.
    pub free: Bytes,
    /// Memory that tenants can use: the capacity without the high watermark, and without memory
    /// that belongs to no tenant.
    pub usable: Bytes,
    /// Sum of the protections of all tenants.
    pub protection: Bytes,
    /// Sum of the scaled protections, at most `usable`.
    pub scaled_protection: Bytes,
    /// Whether the tier is fully utilized: tenants above their protection are throttled.
    pub is_full: bool,
    /// Whether free memory fell below the low watermark and has not returned to the high one.
    pub is_below_watermark: bool,
    /// Memory that should be demoted but that no order covers: the tenants are within their
    /// protection, or the lower tiers are full.
    pub shortfall: Bytes,
}

impl TierReport {
    /// Returns whether the protections exceed the usable memory, so that they are scaled down.
    pub fn is_scaled(&self) -> bool {
        self.scaled_protection < self.protection
    }
}

/// Reason of a demotion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemotionReason {
    /// The usage is above the bound.
    AboveBound,
    /// The usage is within the margin below the bound.
    NearBound,
    /// Free memory is below the low watermark, and the usage is above the protection.
    LowFreeMemory,
    /// Other tenants claim the memory of their protection, and the usage is above the protection.
    ClaimedProtection,
}

/// Demotion that was ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demotion {
    /// Size of the pages.
    pub bytes: Bytes,
    /// Urgency of the order.
    pub urgency: Urgency,
    /// Reason. If there are several reasons, the first one of [`DemotionReason`].
    pub reason: DemotionReason,
}

/// State of a tenant in one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantTierReport {
    /// Memory of the tenant in this tier.
    pub usage: Bytes,
    /// Protection, as set by the caller.
    pub protection: Bytes,
    /// Protection in force. It is smaller than `protection` if the protections of all tenants exceed
    /// the usable memory of the tier.
    pub scaled_protection: Bytes,
    /// Bound, as set by the caller.
    pub bound: Option<Bytes>,
    /// Demotion from this tier.
    pub demotion: Option<Demotion>,
}

impl TenantTierReport {
    /// Returns the unused part of the protection, which other tenants may use.
    pub fn donated(&self) -> Bytes {
        self.scaled_protection.saturating_sub(self.usage)
    }

    /// Returns the usage above the protection.
    pub fn borrowed(&self) -> Bytes {
        self.usage.saturating_sub(self.scaled_protection)
    }

    fn is_empty(&self) -> bool {
        self.usage == Bytes::ZERO && self.protection == Bytes::ZERO && self.bound.is_none()
    }
}

/// Reason why Eq. 2 applies to the promotions of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThrottleReason {
    /// The usage of local memory is above the protection, and local memory is fully utilized.
    AboveProtection,
    /// The usage of local memory is above the bound or within the margin below it.
    NearBound,
}

/// State of a tenant after a step, and the reasons of its orders. `Display` explains it in one line
/// per tier and one line on promotions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantReport {
    /// Tenant.
    pub tenant: TenantId,
    /// State per tier.
    pub tiers: [TenantTierReport; TIERS_MAX],
    /// Reason why Eq. 2 applies. `None` if it does not apply.
    pub throttle: Option<ThrottleReason>,
    /// Factor of Eq. 2, 1 if it does not apply.
    pub factor: Factor,
    /// Thrash level k. The promotion rate is halved k times.
    pub thrash_level: u8,
    /// Result of the last period of the detection of thrashing.
    pub thrash: ThrashState,
    /// Promotion budget until the next step.
    pub budget: PromotionBudget,
}

impl TenantReport {
    /// Returns the state of the tenant in local memory.
    pub fn fast(&self) -> &TenantTierReport {
        &self.tiers[FAST]
    }
}

impl fmt::Display for TenantTierReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "usage {}, protection {}", Gib(self.usage), Gib(self.protection))?;
        if self.scaled_protection != self.protection {
            write!(f, " (scaled to {})", Gib(self.scaled_protection))?;
        }
        if let Some(bound) = self.bound {
            write!(f, ", bound {}", Gib(bound))?;
        }
        match (self.borrowed(), self.donated()) {
            (Bytes::ZERO, Bytes::ZERO) => Ok(()),
            (Bytes::ZERO, donated) => write!(f, ", donates {}", Gib(donated)),
            (borrowed, _) => write!(f, ", borrows {}", Gib(borrowed)),
        }?;
        self.demotion.map_or(Ok(()), |demotion| write!(f, "; {demotion}"))
    }
}

impl fmt::Display for Demotion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "demote {} ({}): {}", Gib(self.bytes), self.urgency, self.reason)
    }
}

impl fmt::Display for DemotionReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AboveBound => "usage is above the bound",
            Self::NearBound => "usage is near the bound",
            Self::LowFreeMemory => "free memory is low, and usage is above the protection",
            Self::ClaimedProtection => {
                "other tenants claim their protection, and usage is above the protection"
            }
        })
    }
}

impl fmt::Display for ThrottleReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AboveProtection => "above the protection while local memory is full",
            Self::NearBound => "near the bound",
        })
    }
}

impl fmt::Display for TenantReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, tier) in self.tiers.iter().enumerate().filter(|(_, tier)| !tier.is_empty()) {
            writeln!(f, "tenant {}, tier {index}: {tier}", self.tenant)?;
        }
        write!(f, "tenant {}, promotions: {}; factor {}", self.tenant, self.budget, self.factor)?;
        if let Some(throttle) = self.throttle {
            write!(f, " ({throttle})")?;
        }
        write!(f, "; thrash level {} ({})", self.thrash_level, self.thrash)
    }
}

/// Size in GiB with two decimal places, for explanations.
struct Gib(Bytes);

impl fmt::Display for Gib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.get();
        let hundredths = (u128::from(bytes) * 100) >> 30;
        write!(f, "{}.{:02} GiB", hundredths / 100, hundredths % 100)
    }
}
