//! Certificate of an outcome: properties that a caller can check. It covers the bundles that
//! tenants bought. Shares in whole units differ from these by less than one unit of each good, and
//! by the distributed unsold supply.

use units::limits::ENVY_CHECK_TENANTS_MAX;

use super::{Market, Outcome, Status, goods::Bundle, utility::Utility};

/// Properties of an outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct Certificate {
    /// How the allocation was computed.
    pub status: Status,
    /// Price of all memory, 0 to 1. The price of all bandwidth is 1 minus this.
    pub memory_price: f64,
    /// Factor by which a tenant's budget exceeds its weight, at least 1.
    pub dividend: f64,
    /// Number of prices evaluated.
    pub rounds: u32,
    /// Number of trades made by [`Market::refine`]. If it is not 0, the bundles no longer follow
    /// from prices and budgets.
    pub refinements: u32,
    /// Fraction of the supply that was bought.
    pub sold: Bundle,
    /// Fraction of the supply that was not bought and was distributed by weight.
    pub left_over: Bundle,
    /// Largest relative amount by which a bundle exceeds its tenant's budget. Meaningless for
    /// [`Status::OneFixed`], where other tenants bought at other prices, and after refinements.
    pub overspent: f64,
    /// Smallest ratio, over all tenants, of throughput to the throughput of an equal split. At
    /// least 1 if every tenant gains by sharing.
    pub sharing_incentive: f64,
    /// Index of the tenant with that ratio.
    pub worst_off: usize,
    /// Largest relative amount of throughput that a tenant would gain with the bundle of another
    /// tenant, scaled by both weights; 0 without envy. `None` above [`ENVY_CHECK_TENANTS_MAX`]
    /// tenants. For [`Status::Exact`] and [`Status::Mixed`], `overspent` then bounds envy, because
    /// no tenant has a bundle that another could not afford.
    pub envy: Option<f64>,
}

impl<U: Utility> Market<'_, U> {
    /// Computes the certificate of an outcome of this market.
    ///
    /// # Panics
    /// Panics if the outcome belongs to a market with another number of tenants.
    pub fn certify(&self, outcome: &Outcome) -> Certificate {
        assert_eq!(
            outcome.bought.len(),
            self.tenants.len(),
            "the outcome must have as many tenants as the market"
        );
        let sold = self.fraction_of_supply(outcome.bought.iter().copied().sum());
        let given = self.fraction_of_supply(outcome.shares.iter().map(|share| Bundle::from(*share)).sum());
        let left = |given: f64, sold: f64| (given - sold).max(0.0);
        let gains =
            outcome.bought.iter().enumerate().map(|(tenant, bundle)| (tenant, self.gain(tenant, *bundle)));
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
            overspent: self.overspent(outcome),
            sharing_incentive,
            worst_off,
            envy: (self.tenants.len() <= ENVY_CHECK_TENANTS_MAX).then(|| self.envy(&outcome.bought)),
        }
    }

    fn overspent(&self, outcome: &Outcome) -> f64 {
        let prices = self.prices(outcome.memory_price);
        let spent = |(tenant, bundle): (usize, &Bundle)| {
            prices.cost_of(*bundle) / (outcome.dividend * self.weight(tenant)) - 1.0
        };
        outcome.bought.iter().enumerate().map(spent).fold(0.0, f64::max)
    }

    fn envy(&self, bought: &[Bundle]) -> f64 {
        let mut max: f64 = 0.0;
        for (tenant, own) in bought.iter().enumerate() {
            let value = |bundle| self.tenants[tenant].utility.value(bundle);
            let own = value(*own);
            for (other, bundle) in bought.iter().enumerate() {
                let theirs = value(self.scaled(*bundle, other, tenant));
                if theirs > own {
                    max = max.max(theirs / own - 1.0);
                }
            }
        }
        max
    }

    /// Scales the bundle of one tenant to another by the ratio of their weights, up to the other's
    /// maximum share (Spirit, section 7).
    pub(super) fn scaled(&self, bundle: Bundle, of: usize, to: usize) -> Bundle {
        let (ratio, max) = (self.weight(to) / self.weight(of), self.limits(to).max);
        Bundle {
            memory: (bundle.memory * ratio).min(max.memory),
            bandwidth: (bundle.bandwidth * ratio).min(max.bandwidth),
        }
    }
}
