//! The market (Spirit 3.2, variant "Symbiosis-R"): tenants buy local memory and link bandwidth with budgets in the ratio of their weights, and
//! prices move until both are sold.
//!
//! The paper's Algorithm 1 does not end in floating point, leaves goods unsold where a tenant wants no more, and divides by zero where one good
//! is worth nothing. What is different here, and why everybody still gets at least what an equal split would give:
//!
//! - A bracket of prices is narrowed until it is as narrow as it may be (`price`), never until two sums are equal.
//! - Money that tenants do not want to spend is given to all others as a *dividend*, in the ratio of their budgets (`round`). A budget only grows,
//!   so a fair share stays affordable, and nobody can afford what another with the same weight cannot.
//! - Where demand jumps at the clearing price, tenants get the same mix of what they ask for just below and just above it; those that lose by a mix
//!   get one or the other whole, and one of them what remains, or one gets what it asks for and the others a market of their own (`clearing`). If
//!   even that harms somebody, everybody gets the fair share.
//!
//! What tenants are is the caller's to know; what their shares are worth to them is a [`Utility`]'s.

mod certificate;
mod clearing;
mod goods;
mod grid;
mod pace;
mod price;
mod refine;
mod round;
mod slowdown;
mod split;
mod units_of;
mod utility;

pub use certificate::Certificate;
pub use goods::{Bundle, Prices, Share, Supply};
pub use grid::Grid;
pub use refine::Aim;
pub use slowdown::{Slowdown, SlowdownError};
pub use split::{Table, best_split};
pub use utility::{Asked, Limits, Mark, Purse, Utility};

use thiserror::Error;
use units::limits::{SUPPLY_MAX, TENANTS_MAX, WEIGHT_FRACTION_MIN};

/// One who shares.
#[derive(Clone, Debug)]
pub struct Tenant<U> {
    /// How much of everything it may have relative to others; more than 0.
    pub weight: f64,
    /// The least it must have of both; not more than its fair share.
    pub least: Share,
    /// The most it can have of both; not less than its fair share.
    pub most: Share,
    /// What a share is worth to it.
    pub utility: U,
}

impl<U> Tenant<U> {
    /// One that may have everything or nothing.
    pub fn new(weight: f64, supply: Supply, utility: U) -> Self {
        Self { weight, least: Share::default(), most: supply.all(), utility }
    }
}

/// Tenants, and what there is for them.
#[derive(Debug)]
pub struct Market<'a, U> {
    tenants: &'a [Tenant<U>],
    supply: Supply,
    /// What a weight of 1 is of all weights.
    per_weight: f64,
    /// What part of all weights, and so of the supply, these tenants have; 1 if they are all.
    part: f64,
}

/// Why there can be no market.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum MarketError {
    /// Nobody is there.
    #[error("a market has at least one tenant")]
    NoTenants,
    /// Too many are.
    #[error("{0} tenants: a market has at most {TENANTS_MAX}")]
    TooMany(usize),
    /// Nothing is there to share.
    #[error("supply of {0} must be more than 0")]
    NoSupply(&'static str),
    /// More than can be reckoned with.
    #[error("supply of {0} units: must be at most {SUPPLY_MAX}")]
    TooMuch(u64),
    /// A weight that is none, or next to nothing beside the others.
    #[error(
        "tenant {tenant}: weight {value} must be a number more than 0, and at least a billionth of all weights"
    )]
    Weight {
        /// Which, from 0.
        tenant: usize,
        /// What it was.
        value: f64,
    },
    /// It must have more than its share.
    #[error("tenant {tenant}: least {good} {least} must not be more than its fair share, {fair:.3}")]
    Least {
        /// Which, from 0.
        tenant: usize,
        /// Memory or bandwidth.
        good: &'static str,
        /// The least that was asked for.
        least: u64,
        /// Its fair share.
        fair: f64,
    },
    /// It cannot have its share.
    #[error("tenant {tenant}: most {good} {most} must not be less than its fair share, {fair:.3}")]
    Most {
        /// Which, from 0.
        tenant: usize,
        /// Memory or bandwidth.
        good: &'static str,
        /// The most that it can have.
        most: u64,
        /// Its fair share.
        fair: f64,
    },
}

impl MarketError {
    /// Whose fault it is, if it is a tenant's; from 0.
    pub const fn tenant(&self) -> Option<usize> {
        match self {
            Self::Weight { tenant, .. } | Self::Least { tenant, .. } | Self::Most { tenant, .. } => {
                Some(*tenant)
            }
            Self::NoTenants | Self::TooMany(_) | Self::NoSupply(_) | Self::TooMuch(_) => None,
        }
    }
}

/// How shares came about.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Status {
    /// Everybody has what it asks for at one price.
    Exact,
    /// Everybody has a mix of what it asks for just below and just above the price.
    Mixed,
    /// Those that would lose by a mix have what they ask for on one side or the other, whole; the others a mix.
    Whole,
    /// One tenant has what remained; the others have what they ask for.
    OneMarginal {
        /// Which, from 0.
        tenant: usize,
    },
    /// One tenant has what it asked for, and the others bought what that left in a market of their own, at prices of its own.
    OneFixed {
        /// Which, from 0.
        tenant: usize,
    },
    /// There is no price at which nobody loses: everybody has its fair share.
    FallbackFair,
}

impl Status {
    /// In a word or two.
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

/// What everybody gets.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// How it came about.
    pub status: Status,
    /// The price of all memory, 0 to 1; that of all bandwidth is what it lacks to 1.
    pub memory_price: f64,
    /// Times its weight is a tenant's budget; 1 or more.
    pub dividend: f64,
    /// Prices that were tried.
    pub rounds: u32,
    /// Deals by which shares were refined since.
    pub refinements: u32,
    /// What each tenant bought, before it is rounded to units and before what was left over is handed out.
    pub bought: Vec<Bundle>,
    /// What each tenant gets: whole units, together no more than there is.
    pub shares: Vec<Share>,
    /// Where to begin next time.
    pub trail: Trail,
}

/// What a market remembers for the next: it is found sooner near the last. Never wrong, at worst useless.
#[derive(Clone, Debug, Default)]
pub struct Trail {
    memory_price: Option<f64>,
    places: Vec<u32>,
}

/// How a market is cleared.
#[derive(Clone, Debug, Default)]
pub struct How {
    /// What the last one left; nothing for the first.
    pub trail: Trail,
    /// Whose turn it is to have what remains, where that is as good for several: a number that changes from epoch to epoch.
    pub turn: usize,
}

impl<'a, U: Utility> Market<'a, U> {
    /// A market of these tenants.
    ///
    /// # Errors
    /// There are none or too many, there is nothing to share, or a weight or a limit is out of range.
    pub fn new(supply: Supply, tenants: &'a [Tenant<U>]) -> Result<Self, MarketError> {
        match tenants.len() {
            0 => return Err(MarketError::NoTenants),
            n if n > TENANTS_MAX => return Err(MarketError::TooMany(n)),
            _ => {}
        }
        if supply.memory_mib == 0 {
            return Err(MarketError::NoSupply("memory"));
        }
        if supply.bandwidth_mb_s == 0 {
            return Err(MarketError::NoSupply("bandwidth"));
        }
        if supply.memory_mib.max(supply.bandwidth_mb_s) > SUPPLY_MAX {
            return Err(MarketError::TooMuch(supply.memory_mib.max(supply.bandwidth_mb_s)));
        }
        let mut weights = 0.0;
        for (tenant, one) in tenants.iter().enumerate() {
            if !(one.weight.is_finite() && one.weight > 0.0) {
                return Err(MarketError::Weight { tenant, value: one.weight });
            }
            weights += one.weight;
        }
        let market = Self { tenants, supply, per_weight: 1.0 / weights, part: 1.0 };
        for (tenant, one) in tenants.iter().enumerate() {
            if !(weights.is_finite() && one.weight >= WEIGHT_FRACTION_MIN * weights) {
                return Err(MarketError::Weight { tenant, value: one.weight });
            }
            market.check_limits(tenant)?;
        }
        Ok(market)
    }

    fn check_limits(&self, tenant: usize) -> Result<(), MarketError> {
        let Tenant { least, most, .. } = &self.tenants[tenant];
        let fair = self.fair(tenant);
        let goods = [
            ("memory", least.memory_mib, most.memory_mib, fair.memory),
            ("bandwidth", least.bandwidth_mb_s, most.bandwidth_mb_s, fair.bandwidth),
        ];
        for (good, least, most, fair) in goods {
            // A share of a third of 300 is 100, whatever a division leaves behind its point.
            let rounding = 1e-12 * fair;
            if least as f64 > fair + rounding {
                return Err(MarketError::Least { tenant, good, least, fair });
            }
            if (most as f64) < fair - rounding || most < least {
                return Err(MarketError::Most { tenant, good, most, fair });
            }
        }
        Ok(())
    }

    /// What a tenant would have of an equal split: both in the ratio of the weights.
    pub fn fair(&self, tenant: usize) -> Bundle {
        let weight = self.weight(tenant);
        let all = Bundle::from(self.supply.all());
        Bundle { memory: all.memory * weight, bandwidth: all.bandwidth * weight }
    }

    /// All there is.
    pub(crate) fn all(&self) -> Bundle {
        self.supply.all().into()
    }

    /// What a tenant may have that comes nearest to this.
    pub(crate) fn within_limits(&self, tenant: usize, bundle: Bundle) -> Bundle {
        let Limits { least, most } = self.limits(tenant);
        Bundle {
            memory: bundle.memory.clamp(least.memory, most.memory),
            bandwidth: bundle.bandwidth.clamp(least.bandwidth, most.bandwidth),
        }
    }

    /// Takes what is more than all there is from those that have more than the least they must have, in the ratio of that.
    pub(crate) fn cut_to_supply(&self, bundles: &mut [Bundle]) {
        let over = bundles.iter().copied().sum::<Bundle>().minus(self.all());
        if over.memory <= 0.0 && over.bandwidth <= 0.0 {
            return;
        }
        let above = |tenant: usize, bundle: Bundle| bundle.minus(self.limits(tenant).least);
        let spare = bundles.iter().enumerate().map(|(tenant, bundle)| above(tenant, *bundle)).sum::<Bundle>();
        let part = |over: f64, spare: f64| if over > 0.0 { (over / spare).min(1.0) } else { 0.0 };
        let cut = Bundle {
            memory: part(over.memory, spare.memory),
            bandwidth: part(over.bandwidth, spare.bandwidth),
        };
        for (tenant, bundle) in bundles.iter_mut().enumerate() {
            *bundle = self.within_limits(tenant, bundle.minus(above(tenant, *bundle).times(cut)));
        }
    }

    /// Whether two shares of a tenant differ by no more than such a part of its fair share.
    pub(crate) fn is_near(&self, tenant: usize, one: Bundle, other: Bundle, part: f64) -> bool {
        let fair = self.fair(tenant);
        (one.memory - other.memory).abs() <= part * fair.memory
            && (one.bandwidth - other.bandwidth).abs() <= part * fair.bandwidth
    }

    /// A tenant's part of all weights.
    fn weight(&self, tenant: usize) -> f64 {
        self.tenants[tenant].weight * self.per_weight
    }

    /// The first tenants alone, with as much of everything as their weights are of all.
    fn of_first(&self, tenants: usize) -> Self {
        let tenants = &self.tenants[..tenants];
        Self {
            tenants,
            part: tenants.iter().map(|tenant| tenant.weight).sum::<f64>() * self.per_weight,
            ..*self
        }
    }

    /// What everybody gets.
    pub fn clear(&self, how: How) -> Outcome {
        let How { trail: Trail { memory_price, places }, turn } = how;
        let mut marks = vec![Mark::default(); self.tenants.len()];
        if places.len() == marks.len() {
            marks.iter_mut().zip(places).for_each(|(mark, at)| mark.at = at);
        }
        let found = price::find(self, memory_price, &mut marks);
        let cleared = clearing::clear(self, &found, turn);
        let shares = units_of::shares(self, &cleared.bundles);
        Outcome {
            status: cleared.status,
            memory_price: found.price(),
            dividend: found.dividend(),
            rounds: found.rounds,
            refinements: 0,
            bought: cleared.bundles,
            shares,
            trail: Trail {
                memory_price: Some(found.price()),
                places: marks.iter().map(|mark| mark.at).collect(),
            },
        }
    }
}

#[cfg(test)]
mod tests;
