//! Market of Spirit (section 3.2), in the variant "Symbiosis-R". Tenants buy local memory and link
//! bandwidth with budgets proportional to their weights. The market searches for prices at which
//! both goods are sold.
//!
//! The paper's Algorithm 1 does not terminate in floating point, leaves goods unsold when a tenant
//! is satiated, and divides by zero when a good has no value. This implementation keeps sharing
//! incentive (each tenant is at least as well off as with an equal split) and differs in three
//! points:
//!
//! - The price search ends when the bracket of prices has a minimum width (`price`). Sums are never
//!   compared for equality.
//! - Unspent budget is paid to all other tenants as a *dividend*, proportional to their budgets
//!   (`round`). Budgets only grow, so that each tenant can still afford its fair share. Tenants of
//!   equal weight can afford the same bundles.
//! - If demand jumps at the clearing price, all tenants get the same mixture of their demands just
//!   below and just above the price. Tenants that would lose by a mixture get one of the two
//!   demands whole, and one of these tenants gets the remainder (`clearing`). If sharing incentive
//!   is still violated, pairs of tenants divide their fair shares anew (`search`).
//!
//! All guarantees hold for the shares in whole units that tenants receive, not only for the bundles
//! before rounding (`rounding`).
//!
//! The caller defines the tenants. A [`Utility`] values the bundles of a tenant and computes its
//! demand.

mod allocation;
mod certificate;
mod clearing;
mod goods;
mod grid;
mod price;
mod refine;
mod round;
mod rounding;
mod search;
mod slowdown;
mod step_limit;
mod utility;

pub use certificate::Certificate;
pub use goods::{Bundle, Prices, Share, Supply};
pub use grid::Grid;
pub use slowdown::{Slowdown, SlowdownError};
pub use utility::{BudgetConstraint, Demand, DemandHint, Limits, Utility};

use allocation::Clearing;
use thiserror::Error;
use units::limits::{MARKET_SUPPLY_MAX, TENANTS_MAX, WEIGHT_FRACTION_MIN};

/// Participant of a market.
#[derive(Clone, Debug)]
pub struct Tenant<U> {
    /// Weight relative to the other tenants, more than 0.
    pub weight: f64,
    /// Minimum share of both goods, at most the fair share.
    pub min: Share,
    /// Maximum share of both goods, at least the fair share.
    pub max: Share,
    /// Utility of the tenant, which values bundles and computes demand.
    pub utility: U,
}

impl<U> Tenant<U> {
    /// Creates a tenant whose share is limited only by the supply.
    pub fn new(weight: f64, supply: Supply, utility: U) -> Self {
        Self { weight, min: Share::default(), max: supply.all(), utility }
    }
}

/// Market of tenants that share a supply.
#[derive(Debug)]
pub struct Market<'a, U> {
    tenants: &'a [Tenant<U>],
    supply: Supply,
    /// Claim of each tenant.
    claims: Vec<Claim>,
}

/// Claim of a tenant to the supply.
#[derive(Clone, Copy, Debug)]
struct Claim {
    /// Weight as a fraction of the sum of all weights.
    weight: f64,
    limits: Limits,
    /// Value of the fair share to the tenant.
    fair_value: f64,
}

/// Error for tenants or a supply from which no market can be created.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum MarketError {
    /// The list of tenants is empty.
    #[error("a market needs at least one tenant")]
    NoTenants,
    /// There are more than [`TENANTS_MAX`] tenants.
    #[error("a market of {0} tenants exceeds the limit of {TENANTS_MAX}")]
    TooManyTenants(usize),
    /// The supply of a good, memory or bandwidth, is 0.
    #[error("supply of {0} must not be 0")]
    EmptySupply(&'static str),
    /// The supply of a good, in units, exceeds [`MARKET_SUPPLY_MAX`].
    #[error("supply of {0} units exceeds the limit of {MARKET_SUPPLY_MAX}")]
    SupplyTooLarge(u64),
    /// A weight is not finite, not positive, or less than [`WEIGHT_FRACTION_MIN`] of the sum of all
    /// weights.
    #[error(
        "tenant {tenant}: weight {value} must be positive and at least a billionth of the sum of all weights"
    )]
    InvalidWeight {
        /// Index of the tenant with the invalid weight.
        tenant: usize,
        /// Rejected weight.
        value: f64,
    },
    /// The minimum share of a tenant exceeds its fair share.
    #[error("tenant {tenant}: minimum {good} {min} must not exceed its fair share of {fair:.3}")]
    MinAboveFairShare {
        /// Index of the tenant with the invalid limit.
        tenant: usize,
        /// Name of the good: `memory` or `bandwidth`.
        good: &'static str,
        /// Rejected minimum share of the good, in MiB or MB/s.
        min: f64,
        /// Fair share of the good, in MiB or MB/s.
        fair: f64,
    },
    /// The maximum share of a tenant is below its fair share or below its minimum share.
    #[error("tenant {tenant}: maximum {good} {max} must not be below its fair share of {fair:.3}")]
    MaxBelowFairShare {
        /// Index of the tenant with the invalid limit.
        tenant: usize,
        /// Name of the good: `memory` or `bandwidth`.
        good: &'static str,
        /// Rejected maximum share of the good, in MiB or MB/s.
        max: f64,
        /// Fair share of the good, in MiB or MB/s.
        fair: f64,
    },
}

impl MarketError {
    /// Returns the index of the tenant whose weight or limits are invalid, or `None` if the error
    /// does not concern a single tenant.
    pub const fn tenant(&self) -> Option<usize> {
        match self {
            Self::InvalidWeight { tenant, .. }
            | Self::MinAboveFairShare { tenant, .. }
            | Self::MaxBelowFairShare { tenant, .. } => Some(*tenant),
            Self::NoTenants | Self::TooManyTenants(_) | Self::EmptySupply(_) | Self::SupplyTooLarge(_) => {
                None
            }
        }
    }
}

/// Method by which an outcome was computed, from best to worst.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Status {
    /// Each tenant gets its demand at one price.
    Exact,
    /// Each tenant gets a mixture, in the same ratio, of its demands just below and just above the
    /// clearing price.
    Mixed,
    /// Tenants that would lose by a mixture get one of their two demands whole. The other tenants
    /// get a mixture.
    Whole,
    /// One tenant gets the remainder of the supply. The other tenants get a demand or a mixture of
    /// their demands.
    OneMarginal {
        /// Index of the tenant that gets the remainder.
        tenant: usize,
    },
    /// Pairs of tenants divided their shares anew, starting from fair shares or from mixtures of
    /// demands. There are no prices.
    Searched,
    /// Each tenant gets its fair share, because no other method satisfies sharing incentive.
    FallbackFair,
}

impl Status {
    /// Returns the name of the status in reports and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Mixed => "mixed",
            Self::Whole => "whole",
            Self::OneMarginal { .. } => "one marginal",
            Self::Searched => "searched",
            Self::FallbackFair => "fair shares",
        }
    }
}

/// Allocation computed by a market.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Method by which the allocation was computed.
    pub status: Status,
    /// Price of all memory, 0 to 1. The price of all bandwidth is `1 - memory_price`.
    pub memory_price: f64,
    /// Ratio of a tenant's budget to its weight, at least 1.
    pub dividend: f64,
    /// Number of prices that the search evaluated.
    pub rounds: u32,
    /// Number of trades by which [`Market::refine`] changed the allocation.
    pub refinements: u32,
    /// Bundle that each tenant bought. Rounding to units and distribution of unsold supply are not
    /// included.
    pub bought: Vec<Bundle>,
    /// Share of each tenant in whole units. The sum does not exceed the supply.
    pub shares: Vec<Share>,
}

impl<'a, U: Utility> Market<'a, U> {
    /// Creates a market of these tenants, and checks their weights and limits.
    ///
    /// # Errors
    /// Returns a [`MarketError`] if there are no or too many tenants, the supply of a good is 0 or
    /// too large, or a weight or limit is out of range.
    pub fn new(supply: Supply, tenants: &'a [Tenant<U>]) -> Result<Self, MarketError> {
        match tenants.len() {
            0 => return Err(MarketError::NoTenants),
            n if n > TENANTS_MAX => return Err(MarketError::TooManyTenants(n)),
            _ => {}
        }
        if supply.memory_pages == 0 {
            return Err(MarketError::EmptySupply("memory"));
        }
        if supply.bandwidth_kb_s == 0 {
            return Err(MarketError::EmptySupply("bandwidth"));
        }
        if supply.memory_pages.max(supply.bandwidth_kb_s) > MARKET_SUPPLY_MAX {
            return Err(MarketError::SupplyTooLarge(supply.memory_pages.max(supply.bandwidth_kb_s)));
        }
        let mut weights = 0.0;
        for (tenant, Tenant { weight, .. }) in tenants.iter().enumerate() {
            if !(weight.is_finite() && *weight > 0.0) {
                return Err(MarketError::InvalidWeight { tenant, value: *weight });
            }
            weights += weight;
        }
        let mut market = Self { tenants, supply, claims: Vec::with_capacity(tenants.len()) };
        for (tenant, Tenant { weight, min, max, utility }) in tenants.iter().enumerate() {
            if !(weights.is_finite() && *weight >= WEIGHT_FRACTION_MIN * weights) {
                return Err(MarketError::InvalidWeight { tenant, value: *weight });
            }
            let weight = weight / weights;
            let fair = market.all().scale(Bundle { memory: weight, bandwidth: weight });
            let limits = Limits { min: (*min).into(), max: (*max).into() };
            check_limits(tenant, limits, fair)?;
            market.claims.push(Claim { weight, limits, fair_value: utility.value(fair) });
        }
        Ok(market)
    }

    /// Returns the fair share of a tenant: the fraction of both goods that corresponds to its
    /// weight.
    pub fn fair_share(&self, tenant: usize) -> Bundle {
        let weight = self.weight(tenant);
        let all = Bundle::from(self.supply.all());
        Bundle { memory: all.memory * weight, bandwidth: all.bandwidth * weight }
    }

    /// Returns the value of a bundle to a tenant.
    pub(crate) fn value(&self, tenant: usize, bundle: Bundle) -> f64 {
        self.tenants[tenant].utility.value(bundle)
    }

    /// Returns the value of a tenant's fair share to the tenant.
    fn fair_value(&self, tenant: usize) -> f64 {
        self.claims[tenant].fair_value
    }

    /// Returns the whole supply as a bundle.
    pub(crate) fn all(&self) -> Bundle {
        self.supply.all().into()
    }

    /// Clamps a bundle to the minimum and maximum share of a tenant.
    pub(crate) fn clamp_to_limits(&self, tenant: usize, bundle: Bundle) -> Bundle {
        let Limits { min, max } = *self.limits(tenant);
        Bundle {
            memory: bundle.memory.clamp(min.memory, max.memory),
            bandwidth: bundle.bandwidth.clamp(min.bandwidth, max.bandwidth),
        }
    }

    /// Reduces bundles until their sum does not exceed the supply. Each bundle is reduced in
    /// proportion to the amount by which it exceeds the minimum share of its tenant.
    pub(crate) fn reduce_to_supply(&self, bundles: &mut [Bundle]) {
        let over = bundles.iter().copied().sum::<Bundle>().minus(self.all());
        if over.memory <= 0.0 && over.bandwidth <= 0.0 {
            return;
        }
        let above = |tenant: usize, bundle: Bundle| bundle.minus(self.limits(tenant).min);
        let spare = bundles.iter().enumerate().map(|(tenant, bundle)| above(tenant, *bundle)).sum::<Bundle>();
        let fraction = |over: f64, spare: f64| if over > 0.0 { (over / spare).min(1.0) } else { 0.0 };
        let cut = Bundle {
            memory: fraction(over.memory, spare.memory),
            bandwidth: fraction(over.bandwidth, spare.bandwidth),
        };
        for (tenant, bundle) in bundles.iter_mut().enumerate() {
            *bundle = self.clamp_to_limits(tenant, bundle.minus(above(tenant, *bundle).scale(cut)));
        }
    }

    /// Returns whether two bundles of a tenant differ in each good by at most the fraction
    /// `tolerance` of its fair share.
    pub(crate) fn is_bundle_near(&self, tenant: usize, one: Bundle, other: Bundle, tolerance: f64) -> bool {
        let fair = self.fair_share(tenant);
        (one.memory - other.memory).abs() <= tolerance * fair.memory
            && (one.bandwidth - other.bandwidth).abs() <= tolerance * fair.bandwidth
    }

    /// Returns the weight of a tenant as a fraction of the sum of all weights.
    fn weight(&self, tenant: usize) -> f64 {
        self.claims[tenant].weight
    }

    /// Clears the market: computes prices, the bundle of each tenant, and its share in whole units.
    /// `turn` rotates which of several equally good candidates gets the remainder. Callers
    /// increment it every epoch.
    pub fn clear(&self, turn: usize) -> Outcome {
        let bracket = price::bracket_price(self);
        let Clearing { status, bundles, shares } = clearing::clear(self, &bracket, turn);
        Outcome {
            status,
            memory_price: bracket.price(),
            dividend: bracket.dividend(),
            rounds: bracket.rounds,
            refinements: 0,
            bought: bundles,
            shares,
        }
    }
}

/// Checks that the limits of a tenant include its fair share.
fn check_limits(tenant: usize, limits: Limits, fair: Bundle) -> Result<(), MarketError> {
    let Limits { min, max } = limits;
    let goods = [
        ("memory", min.memory, max.memory, fair.memory),
        ("bandwidth", min.bandwidth, max.bandwidth, fair.bandwidth),
    ];
    for (good, min, max, fair) in goods {
        // The tolerance accepts a limit that equals the fair share despite rounding error, such
        // as 100 units for a third of 300.
        let rounding = 1e-12 * fair;
        if min > fair + rounding {
            return Err(MarketError::MinAboveFairShare { tenant, good, min, fair });
        }
        if max < fair - rounding || max < min {
            return Err(MarketError::MaxBelowFairShare { tenant, good, max, fair });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
