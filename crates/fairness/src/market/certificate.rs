//! Certificate of an outcome: properties of the shares that tenants receive, for the caller to
//! check. Properties of the market's prices refer to the bundles that tenants bought, before these
//! were rounded to whole units.

use units::limits::ENVY_CHECK_TENANTS_MAX;

use super::{Market, Outcome, Status, goods::Bundle, utility::Utility};

/// Largest relative envy that counts as rounding error.
const ENVY_TOLERANCE: f64 = 1e-6;

/// Properties of the outcome of a market.
#[derive(Clone, Debug, PartialEq)]
pub struct Certificate {
    /// Method by which the allocation was computed.
    pub status: Status,
    /// Price of all memory, 0 to 1. The price of all bandwidth is `1 - memory_price`.
    pub memory_price: f64,
    /// Ratio of a tenant's budget to its weight, at least 1.
    pub dividend: f64,
    /// Number of prices that the search evaluated.
    pub rounds: u32,
    /// Number of trades made by [`Market::refine`]. After a trade, bundles no longer follow from
    /// prices and budgets.
    pub refinements: u32,
    /// Fraction of the supply of each good that tenants bought.
    pub sold: Bundle,
    /// Fraction of the supply of each good that was not bought and was distributed by weight.
    pub left_over: Bundle,
    /// Largest relative amount by which the cost of a bundle exceeds its tenant's budget, at least
    /// 0. Not meaningful after refinements, nor for [`Status::Searched`], which has no prices.
    pub overspent: f64,
    /// Smallest ratio, over all tenants, of throughput with the tenant's share to the throughput
    /// with an equal split. If it is at least 1, no tenant loses by sharing. It may be below 1 by
    /// the worth of one unit of each good, because an equal split may need fractions of units.
    pub sharing_incentive: f64,
    /// Index of the tenant with the ratio `sharing_incentive`.
    pub worst_off: usize,
    /// Largest relative gain of throughput, over all pairs of tenants, by which one tenant would
    /// prefer the other's share scaled by both weights. 0 means that no tenant envies another.
    /// `None` if there are more than [`ENVY_CHECK_TENANTS_MAX`] tenants. With [`Status::Exact`] or
    /// [`Status::Mixed`], envy is then bounded by `overspent` and by rounding to whole units,
    /// because every tenant can afford the bundle of every other tenant.
    pub envy: Option<f64>,
}

impl<U: Utility> Market<'_, U> {
    /// Computes the certificate of an outcome of this market.
    ///
    /// # Panics
    /// Panics if the outcome is of a market with a different number of tenants.
    pub fn certify(&self, outcome: &Outcome) -> Certificate {
        assert_eq!(
            outcome.shares.len(),
            self.tenants.len(),
            "the outcome must have as many tenants as the market"
        );
        let sold = self.fraction_of_supply(outcome.bought.iter().copied().sum());
        let shares: Vec<Bundle> = outcome.shares.iter().map(|share| (*share).into()).collect();
        let given = self.fraction_of_supply(shares.iter().copied().sum());
        let left = |given: f64, sold: f64| (given - sold).max(0.0);
        let gains = shares.iter().enumerate().map(|(tenant, share)| (tenant, self.gain(tenant, *share)));
        let (worst_off, sharing_incentive) = gains.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 1.0));
        Certificate {
            status: outcome.status,
            memory_price: outcome.memory_price,
            dividend: outcome.dividend,
            rounds: outcome.rounds,
            refinements: outcome.refinements,
            sold,
            left_over: Bundle {
                memory: left(given.memory, sold.memory),
                bandwidth: left(given.bandwidth, sold.bandwidth),
            },
            overspent: self.largest_overspending(outcome),
            sharing_incentive,
            worst_off,
            envy: (self.tenants.len() <= ENVY_CHECK_TENANTS_MAX).then(|| self.largest_envy(&shares)),
        }
    }

    fn largest_overspending(&self, outcome: &Outcome) -> f64 {
        let prices = self.prices(outcome.memory_price);
        let spent = |(tenant, bundle): (usize, &Bundle)| {
            prices.cost_of(*bundle) / (outcome.dividend * self.weight(tenant)) - 1.0
        };
        outcome.bought.iter().enumerate().map(spent).fold(0.0, f64::max)
    }

    fn largest_envy(&self, shares: &[Bundle]) -> f64 {
        let mut max: f64 = 0.0;
        for (tenant, own) in shares.iter().enumerate() {
            let value = |bundle| self.value(tenant, bundle);
            let own = value(*own);
            for (other, bundle) in shares.iter().enumerate() {
                let theirs = value(self.scale_to_weight(*bundle, other, tenant));
                if theirs > own {
                    max = max.max(theirs / own - 1.0);
                }
            }
        }
        max
    }

    /// Returns whether a tenant with the bundle `own` prefers the bundle of the tenant `other`, scaled
    /// by both weights.
    pub(super) fn envies(&self, (tenant, own): (usize, Bundle), (other, bundle): (usize, Bundle)) -> bool {
        let theirs = self.value(tenant, self.scale_to_weight(bundle, other, tenant));
        theirs > self.value(tenant, own) * (1.0 + ENVY_TOLERANCE)
    }

    /// Scales the bundle of the tenant `owner` by the ratio of the weights of `to` and `owner`
    /// (Spirit, section 7). The result is limited to the maximum share of `to`.
    pub(super) fn scale_to_weight(&self, bundle: Bundle, owner: usize, to: usize) -> Bundle {
        let (ratio, max) = (self.weight(to) / self.weight(owner), self.limits(to).max);
        Bundle {
            memory: (bundle.memory * ratio).min(max.memory),
            bandwidth: (bundle.bandwidth * ratio).min(max.bandwidth),
        }
    }
}
