//! One round of the price search: computes the demand of the active tenants at one price, and the
//! dividend that pays the unspent budget of satiated tenants to the other tenants.

use units::limits::{DIVIDEND_ROUNDS_MAX, WEIGHT_FRACTION_MIN};

use super::{
    Market, Tenant,
    goods::{Bundle, Prices},
    utility::{BudgetConstraint, Demand, Limits, Utility, WarmStart},
};

/// Fraction of a budget up to which an unspent remainder counts as rounding error.
const UNSPENT_TOLERANCE: f64 = 1e-9;

/// Number of tenants whose data is prefetched together before their demand is evaluated.
const PREFETCH_BATCH_TENANTS: usize = 64;
/// Relative difference of memory up to which two demands with equal bandwidth count as the same
/// choice of a tenant.
const SAME_CHOICE_TOLERANCE: f64 = 1e-3;

/// Demand of tenants at one price.
#[derive(Clone, Debug, Default)]
pub(super) struct PriceRound {
    /// Price of all memory, 0 to 1. The price of all bandwidth is `1 - price`.
    pub price: f64,
    /// Ratio of a tenant's budget to its weight, at least 1.
    pub dividend: f64,
    /// Total demand of active and inactive tenants, as fractions of the supply.
    pub sum: Bundle,
    /// Demand of each active tenant, in the order of [`ActiveSet::tenants`].
    pub bundles: Vec<Bundle>,
}

/// Tenants whose demand is evaluated in each round (active tenants), and the aggregate demand of
/// all other tenants (inactive tenants).
#[derive(Debug)]
pub(super) struct ActiveSet {
    /// Indices of the active tenants in ascending order.
    pub tenants: Vec<usize>,
    /// Dividend at which each evaluation starts.
    first_dividend: f64,
    /// Inactive tenants that demand a fixed amount of memory at any price and spend their remaining
    /// budget on bandwidth.
    fixed_memory: FixedDemand,
    /// Inactive tenants that demand a fixed amount of bandwidth at any price and spend their
    /// remaining budget on memory.
    fixed_bandwidth: FixedDemand,
    /// Total demand of inactive satiated tenants.
    satiated_demand: Bundle,
}

/// Total of fixed demands of several tenants for one good.
#[derive(Debug, Default)]
struct FixedDemand {
    /// Sum of demands, in units of the good.
    amount: f64,
    /// Sum of the weights of these tenants, as a fraction of all weights.
    weight: f64,
}

impl FixedDemand {
    fn add(&mut self, amount: f64, weight: f64) {
        self.amount += amount;
        self.weight += weight;
    }

    /// Returns the amount of the other good that these tenants buy with their remaining budgets.
    fn remaining_demand(&self, dividend: f64, price: f64, other_price: f64) -> f64 {
        if self.weight > 0.0 { (dividend * self.weight - price * self.amount) / other_price } else { 0.0 }
    }
}

impl ActiveSet {
    /// Creates a set of `tenants` tenants, all of them active.
    pub fn new(tenants: usize) -> Self {
        Self {
            tenants: (0..tenants).collect(),
            first_dividend: 1.0,
            fixed_memory: FixedDemand::default(),
            fixed_bandwidth: FixedDemand::default(),
            satiated_demand: Bundle::default(),
        }
    }

    /// Activates all tenants. The next evaluation starts with `dividend`. Reuses the buffer of the
    /// list of tenants.
    pub fn reset(&mut self, tenants: usize, dividend: f64) {
        let mut all = std::mem::take(&mut self.tenants);
        all.clear();
        all.extend(0..tenants);
        *self = Self { tenants: all, first_dividend: dividend, ..Self::new(0) };
    }

    /// Removes tenants that make the same choice at both prices from the set and from both rounds.
    /// `low` is the round at the lower memory price.
    pub fn shrink<U: Utility>(
        &mut self,
        market: &Market<'_, U>,
        low: &mut PriceRound,
        high: &mut PriceRound,
    ) {
        self.first_dividend = low.dividend.min(high.dividend);
        let (low_prices, high_prices) = (market.prices(low.price), market.prices(high.price));
        let mut kept = 0;
        for at in 0..self.tenants.len() {
            let (tenant, one, other) = (self.tenants[at], low.bundles[at], high.bundles[at]);
            let weight = market.weight(tenant);
            let satiated =
                (low.is_satiated(one, low_prices, weight), high.is_satiated(other, high_prices, weight));
            let is_fixed = market.tenants[tenant].utility.is_convex()
                && self.try_deactivate_tenant((one, satiated.0), (other, satiated.1), weight);
            if !is_fixed {
                (self.tenants[kept], low.bundles[kept], high.bundles[kept]) = (tenant, one, other);
                kept += 1;
            }
        }
        self.tenants.truncate(kept);
        low.bundles.truncate(kept);
        high.bundles.truncate(kept);
    }

    /// Adds the demand of a tenant to the demand of inactive tenants if the tenant makes the same
    /// choice at two prices. Returns whether the demand was added. `one` and `other` are the demand
    /// at each price and whether the tenant is satiated at that price.
    fn try_deactivate_tenant(&mut self, one: (Bundle, bool), other: (Bundle, bool), weight: f64) -> bool {
        // If memory differs by more than the tolerance, bandwidth often differs at prices between.
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

    /// Returns the demand and the spending of all inactive tenants.
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

/// Demand and spending summed over tenants, for one dividend.
#[derive(Clone, Copy, Debug, Default)]
struct Spending {
    /// Total demand of these tenants, in MiB and MB/s.
    sum: Bundle,
    /// Total spending of satiated tenants, as a fraction of all budgets without a dividend.
    satiated_spending: f64,
    /// Total weight of unsatiated tenants, as a fraction of all weights.
    unsatiated_weight: f64,
}

impl Spending {
    /// Returns the dividend at which the whole budget is spent if no tenant changes its choice.
    /// Returns exactly 1 if no tenant is satiated, despite rounding in the sum of weights.
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
    /// Evaluates the demand of all active tenants at `price`. Finds the smallest dividend at which
    /// the whole budget is spent or all tenants are satiated.
    ///
    /// Weights sum to 1, and so do budgets without a dividend. Unsatiated tenants spend their whole
    /// budget, so that a dividend that spends the unspent budget of satiated tenants can be
    /// computed directly. If this dividend satiates more tenants, the computation is repeated.
    pub fn evaluate<U: Utility>(
        &mut self,
        market: &Market<'_, U>,
        active: &ActiveSet,
        price: f64,
        warm_starts: &mut [WarmStart],
    ) {
        self.price = price;
        self.dividend = active.first_dividend;
        let mut spending = self.evaluate_with_dividend(market, active, self.dividend, warm_starts);
        let (mut target, mut evaluated) = (spending.clearing_dividend(), self.dividend);
        if target < self.dividend * (1.0 - 1e-12) && self.dividend > 1.0 {
            // Spending exceeds the budget: the dividend must be smaller. Start again from 1.
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
            if next.total_spending(target) <= 1.0 + 1e-12 {
                (spending, self.dividend) = (next, target);
                target = spending.clearing_dividend();
            } else {
                // With the larger budget, a satiated tenant has become unsatiated, and spending
                // exceeds the budget. Try the smaller dividend that spends the budget exactly. If
                // no dividend does, keep the last dividend that leaves part of the budget unspent.
                target =
                    if next.clearing_dividend() < target { next.clearing_dividend() } else { self.dividend };
            }
        }
        if evaluated != self.dividend {
            self.evaluate_with_dividend(market, active, self.dividend, warm_starts);
        }
    }

    /// Extends this round from the active tenants, `tenants`, to all tenants. Copies the demand of
    /// inactive tenants from the round `near` at a nearby price, where it is the same.
    pub fn extend_from<U: Utility>(&mut self, market: &Market<'_, U>, tenants: &[usize], near: &Self) {
        let bundles = self.bundles.clone();
        self.bundles.clone_from(&near.bundles);
        self.sum = near.sum;
        for (tenant, bundle) in tenants.iter().copied().zip(bundles) {
            self.sum.add(market.fraction_of_supply(bundle.minus(near.bundles[tenant])));
            self.bundles[tenant] = bundle;
        }
    }

    /// Returns whether a tenant with this demand and weight leaves part of its budget unspent.
    fn is_satiated(&self, bundle: Bundle, prices: Prices, weight: f64) -> bool {
        let budget = self.dividend * weight;
        prices.cost_of(bundle) < (1.0 - UNSPENT_TOLERANCE) * budget
    }

    /// Evaluates the demand of all active tenants with a given dividend. Updates `sum` and
    /// `bundles`, but not `dividend`.
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
        for tenants in active.tenants.chunks(PREFETCH_BATCH_TENANTS) {
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
    // The compiler computes terms that depend on prices only once if this function is inlined into
    // the loop over tenants.
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
    /// Returns prices per unit if all memory costs `memory_price`, 0 to 1.
    pub(super) fn prices(&self, memory_price: f64) -> Prices {
        let all = Bundle::from(self.supply.all());
        Prices { memory: memory_price / all.memory, bandwidth: (1.0 - memory_price) / all.bandwidth }
    }

    pub(super) fn limits(&self, tenant: usize) -> Limits {
        let Tenant { min, max, .. } = &self.tenants[tenant];
        Limits { min: (*min).into(), max: (*max).into() }
    }

    /// Returns a bundle as fractions of the supply that the tenants of this market buy.
    pub(super) fn fraction_of_supply(&self, bundle: Bundle) -> Bundle {
        let all = Bundle::from(self.supply.all());
        Bundle {
            memory: bundle.memory / (all.memory * self.weight_fraction),
            bandwidth: bundle.bandwidth / (all.bandwidth * self.weight_fraction),
        }
    }
}
