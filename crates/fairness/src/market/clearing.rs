//! Clearing: computes allocations from the demand at both ends of the price bracket. `price`
//! searches for the bracket. Every allocation is rounded to whole units before it is checked, so
//! that all guarantees hold for the shares that tenants receive.

use units::limits::REMAINDER_RECIPIENTS_MAX;

use super::{
    Market, Status,
    allocation::{Clearing, SHARING_INCENTIVE_TOLERANCE, UNALLOCATED_TOLERANCE},
    goods::Bundle,
    price::ClearingBracket,
    search,
    utility::Utility,
};

/// A tenant's demand counts as continuous if a mixture of its demands at two nearly equal prices
/// loses at most this fraction of throughput.
const MIXTURE_LOSS_MAX: f64 = 1e-3;
/// Relative difference up to which two dividends count as equal.
const EQUAL_DIVIDEND_TOLERANCE: f64 = 1e-6;

/// Returns an allocation that fits the supply and satisfies sharing incentive. Returns fair shares
/// if no other allocation is found. See [`Market::clear`] for `turn`.
pub(super) fn clear<U: Utility>(market: &Market<'_, U>, bracket: &ClearingBracket, turn: usize) -> Clearing {
    let Some(demand) = BracketDemand::new(market, bracket) else {
        let exact = market.round_and_check(Status::Exact, bracket.above.bundles.clone());
        return exact.unwrap_or_else(|| search::improve(market, None));
    };
    let mixtures = demand.mixtures();
    let discontinuous = demand.discontinuous_tenants(&mixtures);
    let mixed = market.round_and_check(Status::Mixed, mixtures);
    if discontinuous.is_empty() {
        return mixed.unwrap_or_else(|| search::improve(market, None));
    }
    let whole = demand.assign_whole_demands(&discontinuous, None);
    whole
        .and_then(|(bundles, _)| market.round_and_check(Status::Whole, bundles))
        .or_else(|| demand.clear_with_marginal_tenant(&discontinuous, turn))
        .unwrap_or_else(|| search::improve(market, mixed))
}

/// Demand of all tenants at both ends of a price bracket.
struct BracketDemand<'a, U> {
    market: &'a Market<'a, U>,
    /// Demand of each tenant at the lower memory price, usually with more memory.
    memory: &'a [Bundle],
    /// Demand of each tenant at the higher memory price, usually with more bandwidth.
    bandwidth: &'a [Bundle],
    /// Fraction of the demand at the lower price in each tenant's mixture, 0 to 1. It is the same
    /// for all tenants and is chosen so that the mixtures together buy exactly all memory.
    mix_fraction: f64,
    /// Whether both ends of the bracket have the same dividend. With different dividends, the value
    /// of a tenant's demand jumps between the ends.
    has_equal_dividends: bool,
}

impl<'a, U: Utility> BracketDemand<'a, U> {
    /// Returns the demand at both ends of a bracket, or `None` if a single price clears the market.
    fn new(market: &'a Market<'a, U>, bracket: &'a ClearingBracket) -> Option<Self> {
        let below = bracket.below.as_ref()?;
        let has_equal_dividends =
            (below.dividend / bracket.above.dividend - 1.0).abs() <= EQUAL_DIVIDEND_TOLERANCE;
        let (memory, bandwidth) = (&below.bundles[..], &bracket.above.bundles[..]);
        let mix_fraction = ((1.0 - bracket.above.sum.memory) / (below.sum.memory - bracket.above.sum.memory))
            .clamp(0.0, 1.0);
        Some(Self { market, memory, bandwidth, mix_fraction, has_equal_dividends })
    }

    /// Returns the mixtures of demands that together buy exactly all memory.
    fn mixtures(&self) -> Vec<Bundle> {
        (0..self.memory.len()).map(|tenant| self.mix(tenant, self.mix_fraction)).collect()
    }

    /// Returns the mixture of a tenant's demands with the fraction `part` (0 to 1) of the lower
    /// price's demand.
    fn mix(&self, tenant: usize, part: f64) -> Bundle {
        self.bandwidth[tenant].interpolate(self.memory[tenant], part)
    }

    /// Returns the tenants with discontinuous demand, which would lose throughput by a mixture. The
    /// order is by descending ratio of the value of the demand at the lower memory price to the
    /// value of the demand at the higher memory price.
    fn discontinuous_tenants(&self, mixed: &[Bundle]) -> Vec<usize> {
        let value = |tenant: usize, bundle| self.market.value(tenant, bundle);
        let loses = |tenant: &usize| {
            // With the same amount of memory, more bandwidth is worth no less.
            if self.memory[*tenant].memory == self.bandwidth[*tenant].memory {
                return false;
            }
            let (one_value, other_value) =
                (value(*tenant, self.memory[*tenant]), value(*tenant, self.bandwidth[*tenant]));
            let reference = if self.has_equal_dividends {
                one_value.max(other_value)
            } else {
                one_value.min(other_value)
            };
            let fair = (1.0 - SHARING_INCENTIVE_TOLERANCE) * self.market.fair_value(*tenant);
            value(*tenant, mixed[*tenant]) < ((1.0 - MIXTURE_LOSS_MAX) * reference).max(fair)
        };
        let mut discontinuous: Vec<usize> = (0..mixed.len()).filter(loses).collect();
        let memory_preference =
            |tenant: usize| value(tenant, self.memory[tenant]) / value(tenant, self.bandwidth[tenant]);
        discontinuous.sort_by(|one, other| memory_preference(*other).total_cmp(&memory_preference(*one)));
        discontinuous
    }

    /// Gives one tenant with discontinuous demand the remainder, and the other tenants with
    /// discontinuous demand one of their demands whole. The remainder goes to the tenant that gains
    /// most. `turn` rotates the choice between equal gains.
    fn clear_with_marginal_tenant(&self, discontinuous: &[usize], turn: usize) -> Option<Clearing> {
        let first = turn % discontinuous.len();
        let candidates =
            discontinuous[first..].iter().chain(&discontinuous[..first]).take(REMAINDER_RECIPIENTS_MAX);
        let packings = candidates
            .filter_map(|tenant| Some((*tenant, self.assign_whole_demands(discontinuous, Some(*tenant))?)));
        let best = packings.reduce(|best, next| {
            if next.1.1 > best.1.1 * (1.0 + SHARING_INCENTIVE_TOLERANCE) { next } else { best }
        });
        let (tenant, (bundles, _)) = best?;
        self.market.round_and_check(Status::OneMarginal { tenant }, bundles)
    }

    /// Gives tenants with discontinuous demand their demand at the lower memory price if enough
    /// memory is left, or else their demand at the higher memory price. Gives the other tenants
    /// mixtures, and the marginal tenant, if any, the remainder. Returns the bundles and the gain
    /// of the marginal tenant, or `None` if the bundles do not fit the supply.
    fn assign_whole_demands(
        &self,
        discontinuous: &[usize],
        marginal: Option<usize>,
    ) -> Option<(Vec<Bundle>, f64)> {
        let mut is_discontinuous = vec![false; self.memory.len()];
        discontinuous.iter().for_each(|tenant| is_discontinuous[*tenant] = true);
        let mut bundles = self.bandwidth.to_vec();
        let mut left = self.unallocated_supply(&bundles).memory;
        for tenant in discontinuous.iter().copied().filter(|tenant| Some(*tenant) != marginal) {
            let more = self.memory[tenant].memory - self.bandwidth[tenant].memory;
            if more <= left {
                left -= more;
                bundles[tenant] = self.memory[tenant];
            }
        }
        let flexible: Vec<usize> = (0..bundles.len()).filter(|tenant| !is_discontinuous[*tenant]).collect();
        let mixable: f64 =
            flexible.iter().map(|tenant| self.memory[*tenant].memory - self.bandwidth[*tenant].memory).sum();
        let mixes = |part: f64| {
            let mut mixed = bundles.clone();
            flexible.iter().for_each(|tenant| mixed[*tenant] = self.mix(*tenant, part));
            mixed
        };
        let part = if mixable > 0.0 { (left / mixable).clamp(0.0, 1.0) } else { 0.0 };
        let Some(marginal) = marginal else {
            let mixed = mixes(part);
            let left = self.market.fraction_of_supply(self.unallocated_supply(&mixed));
            let fits =
                left.memory.abs() <= UNALLOCATED_TOLERANCE && left.bandwidth.abs() <= UNALLOCATED_TOLERANCE;
            return fits.then_some((mixed, 1.0));
        };
        let candidates =
            [part, 0.0, 1.0].into_iter().filter_map(|part| self.assign_remainder(mixes(part), marginal));
        candidates.reduce(|best, next| if next.1 > best.1 { next } else { best })
    }

    /// Gives the remainder of the supply to the marginal tenant. Returns all bundles and the gain
    /// of this tenant, or `None` if the remainder is less than its minimum share.
    fn assign_remainder(&self, mut bundles: Vec<Bundle>, marginal: usize) -> Option<(Vec<Bundle>, f64)> {
        bundles[marginal] = Bundle::default();
        let all = self.market.all();
        let rest = self.unallocated_supply(&bundles);
        // Treat a remainder within rounding error, which may be negative, as 0.
        let snap_to_zero =
            |rest: f64, all: f64| if rest.abs() <= UNALLOCATED_TOLERANCE * all { 0.0 } else { rest };
        let rest = Bundle {
            memory: snap_to_zero(rest.memory, all.memory),
            bandwidth: snap_to_zero(rest.bandwidth, all.bandwidth),
        };
        let limits = self.market.limits(marginal);
        if rest.memory < limits.min.memory || rest.bandwidth < limits.min.bandwidth {
            return None;
        }
        bundles[marginal] = Bundle {
            memory: rest.memory.min(limits.max.memory),
            bandwidth: rest.bandwidth.min(limits.max.bandwidth),
        };
        let gain = self.market.gain(marginal, bundles[marginal]);
        Some((bundles, gain))
    }

    /// Returns the supply that `bundles` leave unallocated; negative if they exceed the supply.
    fn unallocated_supply(&self, bundles: &[Bundle]) -> Bundle {
        self.market.all().minus(bundles.iter().copied().sum())
    }
}
