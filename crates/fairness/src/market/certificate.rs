//! What a caller can check of an outcome: of what tenants bought, and what that is worth to them. Shares in whole units differ from it by less than a unit of
//! each good, and by what was left over.

use units::limits::ENVY_CHECK_TENANTS_MAX;

use super::{Market, Outcome, Status, goods::Bundle, utility::Utility};

/// What holds of an outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct Certificate {
    /// How it came about.
    pub status: Status,
    /// The price of all memory, 0 to 1; that of all bandwidth is what it lacks to 1.
    pub memory_price: f64,
    /// Times its weight is a tenant's budget; 1 or more.
    pub dividend: f64,
    /// Prices that were tried.
    pub rounds: u32,
    /// Deals by which shares were refined since: after these, prices and budgets are no longer what shares were bought with.
    pub refinements: u32,
    /// What all tenants bought together, as parts of what there is.
    pub sold: Bundle,
    /// What tenants got beyond what they bought since nobody wanted it, as parts of what there is; 0 where all was sold.
    pub left_over: Bundle,
    /// How much the dearest purchase exceeds its budget, relative. Of no meaning where one was set aside and the others bought at other prices, nor
    /// after refinements.
    pub overspent: f64,
    /// What the worst-off tenant has of its throughput with an equal split: 1 or more, if it gains by sharing.
    pub sharing_incentive: f64,
    /// Which that is, from 0.
    pub worst_off: usize,
    /// How much more throughput, relative, somebody would have with another's bundle, scaled by both weights: 0 if nobody envies. None where there are too
    /// many tenants to compare each with each; of an outcome that is exact or mixed, `overspent` shows then that nobody has what another could not have
    /// bought.
    pub envy: Option<f64>,
}

impl<U: Utility> Market<'_, U> {
    /// What holds of an outcome of this market.
    ///
    /// # Panics
    /// It is of a market with other tenants.
    pub fn certify(&self, outcome: &Outcome) -> Certificate {
        assert_eq!(outcome.bought.len(), self.tenants.len(), "an outcome of this market");
        let sold = self.part(outcome.bought.iter().copied().sum());
        let given = self.part(outcome.shares.iter().map(|share| Bundle::from(*share)).sum());
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
            prices.of(*bundle) / (outcome.dividend * self.weight(tenant)) - 1.0
        };
        outcome.bought.iter().enumerate().map(spent).fold(0.0, f64::max)
    }

    fn envy(&self, bought: &[Bundle]) -> f64 {
        let mut most: f64 = 0.0;
        for (tenant, own) in bought.iter().enumerate() {
            let value = |bundle| self.tenants[tenant].utility.value(bundle);
            let own = value(*own);
            for (other, bundle) in bought.iter().enumerate() {
                let theirs = value(self.scaled(*bundle, other, tenant));
                if theirs > own {
                    most = most.max(theirs / own - 1.0);
                }
            }
        }
        most
    }

    /// What one tenant's bundle would be for another: in the ratio of their weights, and as much of it as it may have (Spirit 7).
    pub(super) fn scaled(&self, bundle: Bundle, of: usize, to: usize) -> Bundle {
        let (ratio, most) = (self.weight(to) / self.weight(of), self.limits(to).most);
        Bundle {
            memory: (bundle.memory * ratio).min(most.memory),
            bandwidth: (bundle.bandwidth * ratio).min(most.bandwidth),
        }
    }
}
