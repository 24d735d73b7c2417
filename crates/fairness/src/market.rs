//! The market of Spirit (section 3.2), in the variant "Symbiosis-R": tenants buy local memory and
//! link bandwidth with budgets proportional to their weights, and the market searches for prices at
//! which both goods are sold.
//!
//! The paper's Algorithm 1 does not terminate in floating point, leaves goods unsold when a tenant
//! is satiated, and divides by zero when a good has no value. This implementation differs in three
//! points and keeps sharing incentive (each tenant is at least as well off as with an equal split):
//!
//! - The price bracket is narrowed to a minimum width (`price`). Sums are never compared for
//!   equality.
//! - Unspent budget is paid to all other tenants as a *dividend*, proportional to their budgets
//!   (`round`). Budgets only grow, so that the fair share stays affordable, and no tenant can
//!   afford a bundle that another tenant of the same weight cannot.
//! - Where demand jumps at the clearing price, all tenants get the same mixture of their demands
//!   just below and just above the price. Tenants that would lose by a mixture get one of the two
//!   demands whole; one of them gets the remainder, or one gets its demand and the others are
//!   cleared as a market of their own (`clearing`). If that still violates sharing incentive, every
//!   tenant gets its fair share.
//!
//! The caller defines the tenants; a [`Utility`] values their bundles and computes their demand.

mod certificate;
mod clearing;
mod goods;
mod grid;
mod price;
mod refine;
mod round;
mod rounding;
mod slowdown;
mod split;
mod step_limit;
mod utility;

pub use certificate::Certificate;
pub use goods::{Bundle, Prices, Share, Supply};
pub use grid::Grid;
pub use refine::RefineOptions;
pub use slowdown::{Slowdown, SlowdownError};
pub use split::{Table, best_split};
pub use utility::{BudgetConstraint, Demand, Limits, Utility, WarmStart};

use thiserror::Error;
use units::limits::{SUPPLY_MAX, TENANTS_MAX, WEIGHT_FRACTION_MIN};

/// A participant of a market.
#[derive(Clone, Debug)]
pub struct Tenant<U> {
    /// Weight relative to the other tenants, more than 0.
    pub weight: f64,
    /// Minimum share of both goods, at most the fair share.
    pub min: Share,
    /// Maximum share of both goods, at least the fair share.
    pub max: Share,
    /// Value of a bundle to the tenant.
    pub utility: U,
}

impl<U> Tenant<U> {
    /// Returns a tenant without limits on its share.
    pub fn new(weight: f64, supply: Supply, utility: U) -> Self {
        Self { weight, min: Share::default(), max: supply.all(), utility }
    }
}

/// Tenants and the supply they share.
#[derive(Debug)]
pub struct Market<'a, U> {
    tenants: &'a [Tenant<U>],
    supply: Supply,
    /// Reciprocal of the sum of all weights.
    weight_scale: f64,
    /// Fraction of all weights, and so of the supply, that these tenants have: 1 for a whole
    /// market, less for a [`Market::subset`].
    weight_fraction: f64,
}

/// Error for input that does not define a market.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum MarketError {
    /// There is no tenant.
    #[error("a market needs at least one tenant")]
    NoTenants,
    /// There are more than [`TENANTS_MAX`] tenants.
    #[error("a market of {0} tenants exceeds the limit of {TENANTS_MAX}")]
    TooManyTenants(usize),
    /// The supply of a good, memory or bandwidth, is 0.
    #[error("supply of {0} must not be 0")]
    EmptySupply(&'static str),
    /// The supply of a good, in units, exceeds [`SUPPLY_MAX`].
    #[error("supply of {0} units exceeds the limit of {SUPPLY_MAX}")]
    SupplyTooLarge(u64),
    /// A weight is not positive, not finite, or less than [`WEIGHT_FRACTION_MIN`] of all weights.
    #[error(
        "tenant {tenant}: weight {value} must be positive and at least a billionth of the sum of all weights"
    )]
    InvalidWeight {
        /// Index of the tenant.
        tenant: usize,
        /// Rejected weight.
        value: f64,
    },
    /// The minimum share exceeds the fair share.
    #[error("tenant {tenant}: minimum {good} {min} must not exceed its fair share of {fair:.3}")]
    MinAboveFairShare {
        /// Index of the tenant.
        tenant: usize,
        /// `memory` or `bandwidth`.
        good: &'static str,
        /// Rejected minimum, in units.
        min: u64,
        /// Fair share, in units.
        fair: f64,
    },
    /// The maximum share is below the fair share or below the minimum share.
    #[error("tenant {tenant}: maximum {good} {max} must not be below its fair share of {fair:.3}")]
    MaxBelowFairShare {
        /// Index of the tenant.
        tenant: usize,
        /// `memory` or `bandwidth`.
        good: &'static str,
        /// Rejected maximum, in units.
        max: u64,
        /// Fair share, in units.
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

/// How an outcome was computed, from best to worst.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Status {
    /// Each tenant has its demand at one price.
    Exact,
    /// Each tenant has the same mixture of its demands just below and just above the price.
    Mixed,
    /// Tenants that would lose by a mixture have one of their two demands whole; the others have a
    /// mixture.
    Whole,
    /// One tenant has the remainder; the others have their demand.
    OneMarginal {
        /// Index of the tenant with the remainder.
        tenant: usize,
    },
    /// One tenant has its demand; the others bought the rest in a market of their own with its own
    /// prices.
    OneFixed {
        /// Index of the tenant with the fixed demand.
        tenant: usize,
    },
    /// No price satisfies sharing incentive: each tenant has its fair share.
    FallbackFair,
}

impl Status {
    /// Returns the name that reports and the command line use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Mixed => "mixed",
            Self::Whole => "whole",
            Self::OneMarginal { .. } => "one marginal",
            Self::OneFixed { .. } => "one fixed",
            Self::FallbackFair => "fair shares",
        }
    }
}

/// Allocation computed by a market.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// How the allocation was computed.
    pub status: Status,
    /// Price of all memory, 0 to 1. The price of all bandwidth is 1 minus this.
    pub memory_price: f64,
    /// Factor by which a tenant's budget exceeds its weight, at least 1.
    pub dividend: f64,
    /// Number of prices evaluated.
    pub rounds: u32,
    /// Number of trades by which [`Market::refine`] changed the allocation.
    pub refinements: u32,
    /// Bundle of each tenant before it is rounded to units and before unsold supply is distributed.
    pub bought: Vec<Bundle>,
    /// Share of each tenant in whole units. The sum does not exceed the supply.
    pub shares: Vec<Share>,
    /// Starting point for the next market.
    pub warm_start: MarketWarmStart,
}

/// Starting point that one market leaves for the next. It shortens the search if prices have moved
/// little; a wrong one only costs time.
#[derive(Clone, Debug, Default)]
pub struct MarketWarmStart {
    memory_price: Option<f64>,
    positions: Vec<u32>,
}

/// Options of [`Market::clear`].
#[derive(Clone, Debug, Default)]
pub struct ClearingOptions {
    /// Starting point left by the last market; the default for the first.
    pub warm_start: MarketWarmStart,
    /// Rotates which tenant gets the remainder among candidates that are equally good. Callers
    /// increment it every epoch.
    pub turn: usize,
}

impl<'a, U: Utility> Market<'a, U> {
    /// Creates a market.
    ///
    /// # Errors
    /// A [`MarketError`] if there are no or too many tenants, the supply of a good is 0 or too
    /// large, or a weight or limit is out of range.
    pub fn new(supply: Supply, tenants: &'a [Tenant<U>]) -> Result<Self, MarketError> {
        match tenants.len() {
            0 => return Err(MarketError::NoTenants),
            n if n > TENANTS_MAX => return Err(MarketError::TooManyTenants(n)),
            _ => {}
        }
        if supply.memory_mib == 0 {
            return Err(MarketError::EmptySupply("memory"));
        }
        if supply.bandwidth_mb_s == 0 {
            return Err(MarketError::EmptySupply("bandwidth"));
        }
        if supply.memory_mib.max(supply.bandwidth_mb_s) > SUPPLY_MAX {
            return Err(MarketError::SupplyTooLarge(supply.memory_mib.max(supply.bandwidth_mb_s)));
        }
        let mut weights = 0.0;
        for (tenant, one) in tenants.iter().enumerate() {
            if !(one.weight.is_finite() && one.weight > 0.0) {
                return Err(MarketError::InvalidWeight { tenant, value: one.weight });
            }
            weights += one.weight;
        }
        let market = Self { tenants, supply, weight_scale: 1.0 / weights, weight_fraction: 1.0 };
        for (tenant, one) in tenants.iter().enumerate() {
            if !(weights.is_finite() && one.weight >= WEIGHT_FRACTION_MIN * weights) {
                return Err(MarketError::InvalidWeight { tenant, value: one.weight });
            }
            market.check_limits(tenant)?;
        }
        Ok(market)
    }

    fn check_limits(&self, tenant: usize) -> Result<(), MarketError> {
        let Tenant { min, max, .. } = &self.tenants[tenant];
        let fair = self.fair_share(tenant);
        let goods = [
            ("memory", min.memory_mib, max.memory_mib, fair.memory),
            ("bandwidth", min.bandwidth_mb_s, max.bandwidth_mb_s, fair.bandwidth),
        ];
        for (good, min, max, fair) in goods {
            // A third of 300 units must pass as 100 despite rounding in the division.
            let rounding = 1e-12 * fair;
            if min as f64 > fair + rounding {
                return Err(MarketError::MinAboveFairShare { tenant, good, min, fair });
            }
            if (max as f64) < fair - rounding || max < min {
                return Err(MarketError::MaxBelowFairShare { tenant, good, max, fair });
            }
        }
        Ok(())
    }

    /// Returns the fair share of a tenant: the part of both goods that corresponds to its weight.
    pub fn fair_share(&self, tenant: usize) -> Bundle {
        let weight = self.weight(tenant);
        let all = Bundle::from(self.supply.all());
        Bundle { memory: all.memory * weight, bandwidth: all.bandwidth * weight }
    }

    /// Returns the whole supply as a bundle.
    pub(crate) fn all(&self) -> Bundle {
        self.supply.all().into()
    }

    /// Returns the bundle clamped to the limits of a tenant.
    pub(crate) fn within_limits(&self, tenant: usize, bundle: Bundle) -> Bundle {
        let Limits { min, max } = self.limits(tenant);
        Bundle {
            memory: bundle.memory.clamp(min.memory, max.memory),
            bandwidth: bundle.bandwidth.clamp(min.bandwidth, max.bandwidth),
        }
    }

    /// Reduces bundles that exceed the supply. Each tenant gives in proportion to the amount by
    /// which it exceeds its minimum share.
    pub(crate) fn cut_to_supply(&self, bundles: &mut [Bundle]) {
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
            *bundle = self.within_limits(tenant, bundle.minus(above(tenant, *bundle).scale(cut)));
        }
    }

    /// Returns whether two bundles of a tenant differ by at most the fraction `part` of its fair
    /// share in either good.
    pub(crate) fn is_near(&self, tenant: usize, one: Bundle, other: Bundle, part: f64) -> bool {
        let fair = self.fair_share(tenant);
        (one.memory - other.memory).abs() <= part * fair.memory
            && (one.bandwidth - other.bandwidth).abs() <= part * fair.bandwidth
    }

    /// Returns the weight of a tenant as a fraction of all weights.
    fn weight(&self, tenant: usize) -> f64 {
        self.tenants[tenant].weight * self.weight_scale
    }

    /// Returns a market of the first `tenants` tenants. Its supply is the fraction that corresponds
    /// to their weights.
    fn subset(&self, tenants: usize) -> Self {
        let tenants = &self.tenants[..tenants];
        Self {
            tenants,
            weight_fraction: tenants.iter().map(|tenant| tenant.weight).sum::<f64>() * self.weight_scale,
            ..*self
        }
    }

    /// Computes prices and the share of each tenant.
    pub fn clear(&self, options: ClearingOptions) -> Outcome {
        let ClearingOptions { warm_start: MarketWarmStart { memory_price, positions }, turn } = options;
        let mut warm_starts = vec![WarmStart::default(); self.tenants.len()];
        if positions.len() == warm_starts.len() {
            warm_starts.iter_mut().zip(positions).for_each(|(warm, at)| warm.position = at);
        }
        let bracket = price::bracket_price(self, memory_price, &mut warm_starts);
        let clearing = clearing::clear(self, &bracket, turn);
        let shares = rounding::round_to_units(self, &clearing.bundles);
        Outcome {
            status: clearing.status,
            memory_price: bracket.price(),
            dividend: bracket.dividend(),
            rounds: bracket.rounds,
            refinements: 0,
            bought: clearing.bundles,
            shares,
            warm_start: MarketWarmStart {
                memory_price: Some(bracket.price()),
                positions: warm_starts.iter().map(|warm| warm.position).collect(),
            },
        }
    }
}

#[cfg(test)]
mod tests;
