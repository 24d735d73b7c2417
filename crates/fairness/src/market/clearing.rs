//! Clearing: computes allocations from the demand at both ends of the price bracket. `price`
//! searches for the bracket.

use units::limits::{FIXED_DEMAND_TENANTS_MAX, REMAINDER_RECIPIENTS_MAX};

use super::{
    Market, Status, Tenant,
    goods::{Bundle, Prices, Supply},
    price::{self, ClearingBracket},
    utility::{Utility, WarmStart},
};

/// A tenant's demand counts as continuous if a mixture of its demands at two nearly equal prices
/// loses at most this fraction of throughput.
const MIXTURE_LOSS_MAX: f64 = 1e-3;
/// Relative difference up to which two dividends count as equal.
const EQUAL_DIVIDEND_TOLERANCE: f64 = 1e-6;
/// Largest relative loss of throughput, compared with an equal split, that counts as rounding
/// error.
const SHARING_INCENTIVE_TOLERANCE: f64 = 1e-6;

/// Lower bound of a gain before its logarithm is taken.
const GAIN_FLOOR: f64 = 1e-9;

/// Largest difference between the supply of a good and its allocated amount, as a fraction of the
/// supply, that counts as rounding error.
const UNALLOCATED_TOLERANCE: f64 = 1e-9;

/// Allocation, and the method by which it was computed.
#[derive(Debug)]
pub(super) struct Clearing {
    pub status: Status,
    pub bundles: Vec<Bundle>,
}

/// Returns an allocation that fits the supply and satisfies sharing incentive. Returns fair shares
/// if no other allocation is found. `turn` is [`ClearingOptions::turn`](super::ClearingOptions).
pub(super) fn clear<U: Utility>(market: &Market<'_, U>, bracket: &ClearingBracket, turn: usize) -> Clearing {
    let bracket_demand = BracketDemand::new(market, bracket);
    let clearing = clear_at_bracket(market, bracket, bracket_demand.as_ref(), turn);
    let clearing = clearing.or_else(|| {
        bracket_demand.and_then(|bracket_demand| bracket_demand.clear_with_losses(bracket.price(), turn))
    });
    clearing.unwrap_or_else(|| {
        let bundles = (0..market.tenants.len()).map(|tenant| market.fair_share(tenant)).collect();
        Clearing { status: Status::FallbackFair, bundles }
    })
}

/// Returns an allocation in which all tenants except at most one get a demand or a nearly lossless
/// mixture of their demands. Returns `None` if no such allocation is found.
fn clear_at_bracket<U: Utility>(
    market: &Market<'_, U>,
    bracket: &ClearingBracket,
    bracket_demand: Option<&BracketDemand<'_, U>>,
    turn: usize,
) -> Option<Clearing> {
    let Some(bracket_demand) = bracket_demand else {
        return market.verify_mixtures(Status::Exact, bracket.above.bundles.clone());
    };
    let mixed = bracket_demand.mixtures();
    let discontinuous = bracket_demand.discontinuous_tenants(&mixed);
    if discontinuous.is_empty() {
        return market.verify_mixtures(Status::Mixed, mixed);
    }
    let whole = bracket_demand
        .assign_whole_demands(&discontinuous, None)
        .and_then(|(bundles, _)| market.verify_clearing(Status::Whole, bundles));
    whole.or_else(|| bracket_demand.clear_with_marginal_tenant(&discontinuous, turn))
}

/// Demand of all tenants at both ends of a price bracket.
struct BracketDemand<'a, U> {
    market: &'a Market<'a, U>,
    /// Demand of each tenant at the lower memory price, usually with more memory.
    memory: &'a [Bundle],
    /// Demand of each tenant at the higher memory price, usually with more bandwidth.
    bandwidth: &'a [Bundle],
    /// Prices per unit at the lower and at the higher memory price.
    prices: (Prices, Prices),
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
        let prices = (market.prices(below.price), market.prices(bracket.above.price));
        Some(Self { market, memory, bandwidth, prices, mix_fraction, has_equal_dividends })
    }

    /// Clears a market with discontinuous demand if `clear_at_bracket` finds no allocation. First
    /// tries to give one tenant its demand and to clear the other tenants as a separate market.
    /// Then tries mixtures for all tenants. Some tenants may then lose compared with their demand,
    /// but no tenant may lose compared with an equal split.
    fn clear_with_losses(&self, price: f64, turn: usize) -> Option<Clearing> {
        let mixed = self.mixtures();
        let fixed = self.clear_with_fixed_tenant(&self.discontinuous_tenants(&mixed), price, turn);
        fixed.or_else(|| self.market.verify_clearing(Status::Mixed, mixed))
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
        let value = |tenant: usize, bundle| self.market.tenants[tenant].utility.value(bundle);
        let loses = |tenant: &usize| {
            if self.is_mixture_lossless(*tenant) {
                return false;
            }
            let (one_value, other_value) =
                (value(*tenant, self.memory[*tenant]), value(*tenant, self.bandwidth[*tenant]));
            let reference = if self.has_equal_dividends {
                one_value.max(other_value)
            } else {
                one_value.min(other_value)
            };
            let fair = value(*tenant, self.market.fair_share(*tenant));
            value(*tenant, mixed[*tenant])
                < ((1.0 - MIXTURE_LOSS_MAX) * reference).max((1.0 - SHARING_INCENTIVE_TOLERANCE) * fair)
        };
        let mut discontinuous: Vec<usize> = (0..mixed.len()).filter(loses).collect();
        let memory_preference =
            |tenant: usize| value(tenant, self.memory[tenant]) / value(tenant, self.bandwidth[tenant]);
        discontinuous.sort_by(|one, other| memory_preference(*other).total_cmp(&memory_preference(*one)));
        discontinuous
    }

    /// Returns whether a mixture of a tenant's demands is nearly lossless for certain, without an
    /// evaluation of its utility. This is the case if both demands are equal, or if the utility is
    /// convex and each demand is nearly as good as the other. A mixture is then worth no less than
    /// the worse demand.
    fn is_mixture_lossless(&self, tenant: usize) -> bool {
        let (one, other) = (self.memory[tenant], self.bandwidth[tenant]);
        one == other
            || self.market.tenants[tenant].utility.is_convex()
                && self.is_nearly_as_good(tenant, one, self.prices.0, other)
                && self.is_nearly_as_good(tenant, other, self.prices.1, one)
    }

    /// Returns whether the demand of a tenant with a convex utility is nearly as good as the bundle
    /// `other`. This is the case if the tenant could also have afforded `other` with slightly less
    /// bandwidth.
    fn is_nearly_as_good(&self, tenant: usize, demand: Bundle, prices: Prices, other: Bundle) -> bool {
        let spare = other.bandwidth - self.market.limits(tenant).min.bandwidth;
        prices.cost_of(other) - prices.cost_of(demand)
            <= prices.bandwidth * spare.min(MIXTURE_LOSS_MAX * other.bandwidth)
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
        self.market.verify_clearing(Status::OneMarginal { tenant }, bundles)
    }

    /// Gives one tenant with discontinuous demand one of its demands whole, and clears the other
    /// tenants as a separate market. Returns the allocation with the largest mean gain.
    fn clear_with_fixed_tenant(&self, discontinuous: &[usize], price: f64, turn: usize) -> Option<Clearing> {
        let demands = |tenant: &usize| [(*tenant, self.memory[*tenant]), (*tenant, self.bandwidth[*tenant])];
        let fixed = discontinuous.iter().take(FIXED_DEMAND_TENANTS_MAX).flat_map(demands);
        let clearing = fixed.filter_map(|(tenant, bundle)| {
            let bundles = self.clear_other_tenants(tenant, bundle, price, turn)?;
            let clearing = self.market.verify_clearing(Status::OneFixed { tenant }, bundles)?;
            Some((self.market.log_mean_gain(&clearing.bundles), clearing))
        });
        clearing.reduce(|best, next| if next.0 > best.0 { next } else { best }).map(|(_, clearing)| clearing)
    }

    /// Gives `bundle` to the tenant `fixed`, and clears the other tenants as a separate market with
    /// the remaining supply. Returns the bundles of all tenants, or `None` if that is impossible.
    fn clear_other_tenants(
        &self,
        fixed: usize,
        bundle: Bundle,
        price: f64,
        turn: usize,
    ) -> Option<Vec<Bundle>> {
        let others = (0..self.memory.len()).filter(|tenant| *tenant != fixed);
        let tenants: Vec<Tenant<&dyn Utility>> =
            others.map(|tenant| self.market.tenants[tenant].with_borrowed_utility()).collect();
        let left = self.unallocated_supply(&[bundle]);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of the supply")]
        let supply = Supply { memory_mib: left.memory as u64, bandwidth_mb_s: left.bandwidth as u64 };
        let weights: f64 = tenants.iter().map(|tenant| tenant.weight).sum();
        if tenants.is_empty() || supply.memory_mib == 0 || supply.bandwidth_mb_s == 0 {
            return None;
        }
        let market = Market { tenants: &tenants, supply, weight_scale: 1.0 / weights, weight_fraction: 1.0 };
        if (0..tenants.len()).any(|tenant| market.check_limits(tenant).is_err()) {
            return None;
        }
        let bracket =
            price::bracket_price(&market, Some(price), &mut vec![WarmStart::default(); tenants.len()]);
        let mut bundles =
            clear_at_bracket(&market, &bracket, BracketDemand::new(&market, &bracket).as_ref(), turn)?
                .bundles;
        bundles.insert(fixed, bundle);
        Some(bundles)
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
        let all = Bundle::from(self.market.supply.all());
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

impl<U: Utility> Market<'_, U> {
    /// Returns the value of a bundle to a tenant relative to the value of its fair share. Returns 1
    /// if both values are 0.
    pub(crate) fn gain(&self, tenant: usize, bundle: Bundle) -> f64 {
        let value = |bundle| self.tenants[tenant].utility.value(bundle);
        let (value, fair_value) = (value(bundle), value(self.fair_share(tenant)));
        if value == fair_value { 1.0 } else { value / fair_value }
    }

    /// Returns the allocation, or `None` if it exceeds the supply or violates sharing incentive.
    fn verify_clearing(&self, status: Status, bundles: Vec<Bundle>) -> Option<Clearing> {
        self.verify_clearing_for(status, bundles, |_| true)
    }

    /// Returns an allocation of demands and mixtures of demands, or `None` if it exceeds the supply
    /// or violates sharing incentive. Sharing incentive is checked only for utilities that are not
    /// convex. A tenant with a convex utility cannot lose, because it could afford its fair share
    /// when it chose each demand.
    fn verify_mixtures(&self, status: Status, bundles: Vec<Bundle>) -> Option<Clearing> {
        self.verify_clearing_for(status, bundles, |tenant| !self.tenants[tenant].utility.is_convex())
    }

    /// Returns the allocation, or `None` if it exceeds the supply or violates sharing incentive.
    /// Sharing incentive is checked only for the tenants that `needs_check` selects.
    fn verify_clearing_for(
        &self,
        status: Status,
        bundles: Vec<Bundle>,
        needs_check: impl Fn(usize) -> bool,
    ) -> Option<Clearing> {
        let sum = self.fraction_of_supply(bundles.iter().copied().sum());
        let fits = sum.memory <= 1.0 + UNALLOCATED_TOLERANCE && sum.bandwidth <= 1.0 + UNALLOCATED_TOLERANCE;
        let is_fair = |(tenant, bundle): (usize, &Bundle)| {
            !needs_check(tenant) || self.gain(tenant, *bundle) >= 1.0 - SHARING_INCENTIVE_TOLERANCE
        };
        (fits && bundles.iter().enumerate().all(is_fair)).then_some(Clearing { status, bundles })
    }

    /// Returns the logarithm of the geometric mean of all gains, weighted by the tenants' weights.
    pub(crate) fn log_mean_gain(&self, bundles: &[Bundle]) -> f64 {
        let gain = |(tenant, bundle): (usize, &Bundle)| {
            self.weight(tenant) * self.gain(tenant, *bundle).max(GAIN_FLOOR).ln()
        };
        bundles.iter().enumerate().map(gain).sum()
    }
}

impl<U: Utility> Tenant<U> {
    /// Returns the same tenant with a borrowed utility.
    fn with_borrowed_utility(&self) -> Tenant<&dyn Utility> {
        Tenant { weight: self.weight, min: self.min, max: self.max, utility: &self.utility }
    }
}
