//! One round of the price search: demand of the active tenants at one price, and the dividend that
//! spends the budget of satiated tenants.

use units::limits::{DIVIDEND_ROUNDS_MAX, WEIGHT_FRACTION_MIN};

use super::{
    Market,
    goods::{Bundle, Prices},
    utility::{BudgetConstraint, Demand, Limits, Utility, WarmStart},
};

/// Fraction of a budget below which the rest counts as spent.
const UNSPENT_TOLERANCE: f64 = 1e-9;

/// Number of tenants that are prefetched together before their demand is evaluated.
const PREFETCH_BATCH: usize = 64;
/// Relative difference of memory up to which two demands with equal bandwidth count as the same
/// choice.
const SAME_CHOICE_TOLERANCE: f64 = 1e-3;

/// Demand at one price.
#[derive(Clone, Debug, Default)]
pub(super) struct Round {
    /// Price of all memory. The price of all bandwidth is 1 minus this.
    pub price: f64,
    /// Factor by which a tenant's budget exceeds its weight.
    pub dividend: f64,
    /// Total demand, as fractions of the supply.
    pub sum: Bundle,
    /// Demand of each active tenant.
    pub bundles: Vec<Bundle>,
}

/// Tenants that are evaluated in each round, and the aggregate demand of the others.
#[derive(Debug)]
pub(super) struct ActiveSet {
    /// Active tenants in ascending order.
    pub tenants: Vec<usize>,
    /// Smallest dividend to consider.
    dividend_min: f64,
    /// Inactive tenants that spend their whole budget and demand fixed amounts of memory at any
    /// price; the rest of their budget buys bandwidth.
    fixed_memory: FixedDemand,
    /// The same with fixed amounts of bandwidth.
    fixed_bandwidth: FixedDemand,
    /// Demand of inactive satiated tenants.
    satiated_demand: Bundle,
}

/// Total fixed demand for one good.
#[derive(Debug, Default)]
struct FixedDemand {
    amount: f64,
    /// Fraction of all weights.
    weight: f64,
}

impl FixedDemand {
    fn add(&mut self, amount: f64, weight: f64) {
        self.amount += amount;
        self.weight += weight;
    }

    /// Returns the amount of the other good that the rest of the budget buys.
    fn remaining_demand(&self, dividend: f64, price: f64, other_price: f64) -> f64 {
        if self.weight > 0.0 { (dividend * self.weight - price * self.amount) / other_price } else { 0.0 }
    }
}

impl ActiveSet {
    /// Creates a set in which all tenants are active.
    pub fn all(tenants: usize) -> Self {
        Self {
            tenants: (0..tenants).collect(),
            dividend_min: 1.0,
            fixed_memory: FixedDemand::default(),
            fixed_bandwidth: FixedDemand::default(),
            satiated_demand: Bundle::default(),
        }
    }

    /// Activates all tenants for an evaluation with a known dividend. Reuses the allocation of the
    /// list.
    pub fn reset(&mut self, tenants: usize, dividend: f64) {
        let mut all = std::mem::take(&mut self.tenants);
        all.clear();
        all.extend(0..tenants);
        *self = Self { tenants: all, dividend_min: dividend, ..Self::all(0) };
    }

    /// Removes tenants that make the same choice at both prices, from the set and from both rounds.
    pub fn shrink<U: Utility>(&mut self, market: &Market<'_, U>, low: &mut Round, high: &mut Round) {
        self.dividend_min = low.dividend.min(high.dividend);
        let (cheap, dear) = (market.prices(low.price), market.prices(high.price));
        let mut kept = 0;
        for at in 0..self.tenants.len() {
            let (tenant, one, other) = (self.tenants[at], low.bundles[at], high.bundles[at]);
            let weight = market.weight(tenant);
            let satiated = (low.is_satiated(one, cheap, weight), high.is_satiated(other, dear, weight));
            let is_fixed = market.tenants[tenant].utility.is_convex()
                && self.try_fix((one, satiated.0), (other, satiated.1), weight);
            if !is_fixed {
                (self.tenants[kept], low.bundles[kept], high.bundles[kept]) = (tenant, one, other);
                kept += 1;
            }
        }
        self.tenants.truncate(kept);
        low.bundles.truncate(kept);
        high.bundles.truncate(kept);
    }

    /// Adds a tenant to the fixed demand and returns true if it makes the same choice at both ends.
    /// Each end is a demand and whether the tenant is satiated there.
    fn try_fix(&mut self, one: (Bundle, bool), other: (Bundle, bool), weight: f64) -> bool {
        // With a larger difference of memory, bandwidth often differs between the two prices.
        let is_near = || (one.0.memory - other.0.memory).abs() <= SAME_CHOICE_TOLERANCE * other.0.memory;
        match (one, other) {
            ((one, true), (other, true)) if one == other => self.satiated_demand.add(one),
            ((one, false), (other, false)) if one.memory == other.memory => {
                self.fixed_memory.add(one.memory, weight);
            }
            ((one, false), (other, false)) if one.bandwidth == other.bandwidth && is_near() => {
                self.fixed_bandwidth.add(one.bandwidth, weight);
            }
            _ => return false,
        }
        true
    }

    /// Returns the spending of inactive tenants.
    fn spending(&self, prices: Prices, dividend: f64) -> Spending {
        let Self { fixed_memory, fixed_bandwidth, satiated_demand, .. } = self;
        let mut sum = *satiated_demand;
        sum.add(Bundle {
            memory: fixed_memory.amount,
            bandwidth: fixed_memory.remaining_demand(dividend, prices.memory, prices.bandwidth),
        });
        sum.add(Bundle {
            memory: fixed_bandwidth.remaining_demand(dividend, prices.bandwidth, prices.memory),
            bandwidth: fixed_bandwidth.amount,
        });
        Spending {
            sum,
            satiated_spending: prices.cost_of(*satiated_demand),
            unsatiated_weight: fixed_memory.weight + fixed_bandwidth.weight,
        }
    }
}

/// Sums over tenants evaluated with one dividend.
#[derive(Clone, Copy, Debug, Default)]
struct Spending {
    sum: Bundle,
    /// Budget spent by satiated tenants.
    satiated_spending: f64,
    /// Total weight of unsatiated tenants.
    unsatiated_weight: f64,
}

impl Spending {
    /// Returns the dividend that spends the whole budget if no tenant changes its choice. It is 1
    /// if no tenant is satiated, regardless of rounding in the sum of weights.
    fn clearing_dividend(&self) -> f64 {
        if 1.0 - self.unsatiated_weight < WEIGHT_FRACTION_MIN / 2.0 {
            1.0
        } else {
            (1.0 - self.satiated_spending) / self.unsatiated_weight
        }
    }

    fn spent(&self, dividend: f64) -> f64 {
        self.satiated_spending + self.unsatiated_weight * dividend
    }
}

impl Round {
    /// Evaluates the demand of all active tenants and finds the dividend: the smallest with which
    /// the whole budget is spent or all tenants are satiated.
    ///
    /// Weights sum to 1, and so do budgets without a dividend. Unsatiated tenants spend their whole
    /// budget, so that the dividend that spends the rest follows directly. It may satiate more
    /// tenants; then the next dividend is computed.
    pub fn evaluate<U: Utility>(
        &mut self,
        market: &Market<'_, U>,
        active: &ActiveSet,
        price: f64,
        warm_starts: &mut [WarmStart],
    ) {
        self.price = price;
        self.dividend = active.dividend_min;
        let mut spending = self.evaluate_with_dividend(market, active, self.dividend, warm_starts);
        let (mut target, mut evaluated) = (spending.clearing_dividend(), self.dividend);
        if target < self.dividend * (1.0 - 1e-12) && self.dividend > 1.0 {
            // Spending exceeds the budget: the dividend is smaller.
            self.dividend = 1.0;
            (spending, evaluated) = (self.evaluate_with_dividend(market, active, 1.0, warm_starts), 1.0);
            target = spending.clearing_dividend();
        }
        for _ in 0..DIVIDEND_ROUNDS_MAX {
            if !target.is_finite() || target <= self.dividend * (1.0 + 1e-12) {
                break;
            }
            let next = self.evaluate_with_dividend(market, active, target, warm_starts);
            evaluated = target;
            if next.spent(target) <= 1.0 + 1e-12 {
                (spending, self.dividend) = (next, target);
                target = spending.clearing_dividend();
            } else {
                // A larger budget made a satiated tenant unsatiated. If a smaller dividend does not
                // fit either, its demand jumps at this dividend: below it part of the budget stays
                // unspent, above it spending exceeds the budget.
                target =
                    if next.clearing_dividend() < target { next.clearing_dividend() } else { self.dividend };
            }
        }
        if evaluated != self.dividend {
            self.evaluate_with_dividend(market, active, self.dividend, warm_starts);
        }
    }

    /// Adds tenants outside the active set with their demand at a nearby price, where it is the
    /// same.
    pub fn extend_from<U: Utility>(&mut self, market: &Market<'_, U>, tenants: &[usize], near: &Self) {
        let bundles = self.bundles.clone();
        self.bundles.clone_from(&near.bundles);
        self.sum = near.sum;
        for (tenant, bundle) in tenants.iter().copied().zip(bundles) {
            self.sum.add(market.fraction_of_supply(bundle.minus(near.bundles[tenant])));
            self.bundles[tenant] = bundle;
        }
    }

    /// Returns whether a tenant with this demand keeps part of its budget.
    fn is_satiated(&self, bundle: Bundle, prices: Prices, weight: f64) -> bool {
        let budget = self.dividend * weight;
        prices.cost_of(bundle) < (1.0 - UNSPENT_TOLERANCE) * budget
    }

    fn evaluate_with_dividend<U: Utility>(
        &mut self,
        market: &Market<'_, U>,
        active: &ActiveSet,
        dividend: f64,
        warm_starts: &mut [WarmStart],
    ) -> Spending {
        let prices = market.prices(self.price);
        let mut spending = active.spending(prices, dividend);
        self.bundles.clear();
        self.bundles.reserve_exact(active.tenants.len());
        for tenants in active.tenants.chunks(PREFETCH_BATCH) {
            if warm_starts[tenants[0]].is_new() {
                tenants
                    .iter()
                    .for_each(|tenant| market.tenants[*tenant].utility.prefetch(&warm_starts[*tenant]));
            }
            for tenant in tenants.iter().copied() {
                let Demand { bundle, satiated } =
                    market.demand_of(tenant, prices, dividend, &mut warm_starts[tenant]);
                if satiated {
                    spending.satiated_spending += prices.cost_of(bundle);
                } else {
                    spending.unsatiated_weight += market.weight(tenant);
                }
                spending.sum.add(bundle);
                self.bundles.push(bundle);
            }
        }
        self.sum = market.fraction_of_supply(spending.sum);
        spending.satiated_spending /= market.weight_fraction;
        spending.unsatiated_weight /= market.weight_fraction;
        spending
    }
}

impl<U: Utility> Market<'_, U> {
    /// Returns the demand of one tenant.
    // Inlined into the loop over tenants, so that terms that depend on prices only are computed
    // once.
    #[inline(always)]
    pub(super) fn demand_of(
        &self,
        tenant: usize,
        prices: Prices,
        dividend: f64,
        warm: &mut WarmStart,
    ) -> Demand {
        let constraint = BudgetConstraint { budget: dividend * self.weight(tenant), prices };
        self.tenants[tenant].utility.demand(&constraint, &self.limits(tenant), warm)
    }
}

impl<U> Market<'_, U> {
    /// Returns unit prices for a price of all memory.
    pub(super) fn prices(&self, memory: f64) -> Prices {
        let all = Bundle::from(self.supply.all());
        Prices { memory: memory / all.memory, bandwidth: (1.0 - memory) / all.bandwidth }
    }

    pub(super) fn limits(&self, tenant: usize) -> Limits {
        let one = &self.tenants[tenant];
        Limits { min: one.min.into(), max: one.max.into() }
    }

    /// Returns a bundle as fractions of the supply of these tenants.
    pub(super) fn fraction_of_supply(&self, of: Bundle) -> Bundle {
        let all = Bundle::from(self.supply.all());
        Bundle {
            memory: of.memory / (all.memory * self.weight_fraction),
            bandwidth: of.bandwidth / (all.bandwidth * self.weight_fraction),
        }
    }
}
