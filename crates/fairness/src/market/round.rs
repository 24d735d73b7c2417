//! One round of the price search: computes the demand of all tenants at one price, and the dividend
//! that pays the unspent budget of satiated tenants to the other tenants.

use units::limits::{DIVIDEND_ROUNDS_MAX, WEIGHT_FRACTION_MIN};

use super::{
    Market,
    goods::{Bundle, Prices},
    utility::{BudgetConstraint, Demand, DemandHint, Limits, Utility},
};

/// Relative tolerance for rounding errors of budgets and dividends.
const BUDGET_ROUNDING_TOLERANCE: f64 = 1e-12;

/// Demand of all tenants at one price.
#[derive(Clone, Debug)]
pub(super) struct PriceRound {
    /// Price of all memory, 0 to 1. The price of all bandwidth is `1 - price`.
    pub price: f64,
    /// Ratio of a tenant's budget to its weight, at least 1.
    pub dividend: f64,
    /// Total demand, as fractions of the supply.
    pub sum: Bundle,
    /// Demand of each tenant.
    pub bundles: Vec<Bundle>,
}

/// Demand of all tenants at one price and one dividend.
struct TotalDemand {
    bundles: Vec<Bundle>,
    /// Total demand, in MiB and MB/s.
    sum: Bundle,
    /// Total spending of satiated tenants, as a fraction of all budgets without a dividend.
    satiated_spending: f64,
    /// Total weight of unsatiated tenants, as a fraction of all weights.
    unsatiated_weight: f64,
}

impl TotalDemand {
    /// Returns the dividend at which the whole budget is spent if no tenant changes its choice.
    /// Returns exactly 1 if no tenant is satiated, despite rounding in the sum of weights. The
    /// result is infinite if all tenants are satiated.
    fn clearing_dividend(&self) -> f64 {
        if 1.0 - self.unsatiated_weight < WEIGHT_FRACTION_MIN / 2.0 {
            1.0
        } else {
            (1.0 - self.satiated_spending) / self.unsatiated_weight
        }
    }

    /// Returns the total spending with `dividend`, as a fraction of all budgets without a dividend.
    fn total_spending(&self, dividend: f64) -> f64 {
        self.satiated_spending + self.unsatiated_weight * dividend
    }
}

impl PriceRound {
    /// Computes the demand of all tenants at `price`. Finds the smallest dividend at which the
    /// whole budget is spent or all tenants are satiated. `hints` are the tenants' hints for
    /// [`Utility::demand`].
    ///
    /// Weights sum to 1, and so do budgets without a dividend. Unsatiated tenants spend their whole
    /// budget, so that a dividend that spends the unspent budget of satiated tenants can be
    /// computed directly. If this dividend satiates more tenants, the computation is repeated.
    pub fn new<U: Utility>(market: &Market<'_, U>, price: f64, hints: &mut [DemandHint]) -> Self {
        let mut dividend = 1.0;
        let mut demand = market.total_demand(price, dividend, hints);
        let mut target = demand.clearing_dividend();
        for _ in 0..DIVIDEND_ROUNDS_MAX {
            if !target.is_finite() || target <= dividend * (1.0 + BUDGET_ROUNDING_TOLERANCE) {
                break;
            }
            let next = market.total_demand(price, target, hints);
            let next_target = next.clearing_dividend();
            if next.total_spending(target) <= 1.0 + BUDGET_ROUNDING_TOLERANCE {
                (demand, dividend) = (next, target);
                target = next_target;
            } else {
                // With the larger budget, a satiated tenant has become unsatiated, and spending
                // exceeds the budget. Try the smaller dividend that spends the budget exactly. If
                // no dividend does, keep the last dividend that leaves part of the budget unspent.
                target = if next_target < target { next_target } else { dividend };
            }
        }
        Self { price, dividend, sum: market.fraction_of_supply(demand.sum), bundles: demand.bundles }
    }
}

impl<U: Utility> Market<'_, U> {
    /// Computes the demand of all tenants at one price with a given dividend.
    fn total_demand(&self, price: f64, dividend: f64, hints: &mut [DemandHint]) -> TotalDemand {
        let prices = self.prices(price);
        let mut total = TotalDemand {
            bundles: Vec::with_capacity(self.tenants.len()),
            sum: Bundle::default(),
            satiated_spending: 0.0,
            unsatiated_weight: 0.0,
        };
        for ((tenant, claim), hint) in self.tenants.iter().zip(&self.claims).zip(hints) {
            let constraint = BudgetConstraint { budget: dividend * claim.weight, prices };
            let Demand { bundle, satiated } = tenant.utility.demand(&constraint, &claim.limits, hint);
            if satiated {
                total.satiated_spending += prices.cost_of(bundle);
            } else {
                total.unsatiated_weight += claim.weight;
            }
            total.sum.add(bundle);
            total.bundles.push(bundle);
        }
        total
    }
}

impl<U: Utility> Market<'_, U> {
    /// Returns prices per unit if all memory costs `memory_price`, 0 to 1.
    pub(super) fn prices(&self, memory_price: f64) -> Prices {
        let all = self.all();
        Prices { memory: memory_price / all.memory, bandwidth: (1.0 - memory_price) / all.bandwidth }
    }

    pub(super) fn limits(&self, tenant: usize) -> &Limits {
        &self.claims[tenant].limits
    }

    /// Returns a bundle as fractions of the supply.
    pub(super) fn fraction_of_supply(&self, bundle: Bundle) -> Bundle {
        let all = self.all();
        Bundle { memory: bundle.memory / all.memory, bandwidth: bundle.bandwidth / all.bandwidth }
    }
}
