//! Search for a bracket of memory prices that clears the market. `clearing` computes allocations
//! from the bracket.
//!
//! Demand for memory usually falls as the price of memory rises. There are exceptions: a tenant
//! with a fixed ratio of goods may demand more of a good that gets more expensive. The search only
//! requires that excess demand changes its sign. The search variable is the logarithm of the price
//! ratio, so that either price may approach 0.
//!
//! Total demand between two prices is nearly linear in the logarithm of the price ratio, except for
//! jumps. With a piecewise linear curve, a tenant's demand jumps from knot to knot, and the
//! clearing price is usually at such a jump. Interpolation alone would then converge as slowly as
//! bisection. Therefore `interpolate` evaluates the few tenants with the largest jumps separately
//! to locate the jump, and few rounds with all tenants remain. Interpolation is used only while
//! enough rounds remain for bisection.
//!
//! Tenants that demand the same amount of a good at both ends of the bracket are removed from the
//! active set until the search ends (`shrink_active_set`).

use units::limits::PRICE_ROUNDS_MAX;

use super::{
    Market,
    goods::Bundle,
    round::{ActiveSet, PriceRound},
    utility::{Utility, WarmStart},
};

/// Width of the bracket at which the search ends, in the logarithm of the price ratio. It is also
/// the relative error of the price ratio.
const BRACKET_WIDTH_MIN: f64 = 1e-10;
/// Largest excess demand, as a fraction of the supply of a good, that counts as rounding error.
const CLEARING_TOLERANCE: f64 = 1e-10;
/// Smallest first step of the search, in the logarithm of the price ratio.
const PRICE_STEP_MIN: f64 = 1e-6;
/// Largest first step of the search, in the logarithm of the price ratio.
const PRICE_STEP_MAX: f64 = 0.5;
/// Growth factor from step to step, for steps below `PRICE_STEP_MAX`.
const STEP_GROWTH: f64 = 8.0;
/// Growth factor from step to step, for steps from `PRICE_STEP_MAX` to `LONG_STEP_MIN`. It is small because
/// most clearing prices are in this range.
const MEDIUM_STEP_GROWTH: f64 = 2.0;
/// Step from which the growth factor is `LONG_STEP_GROWTH`, in the logarithm of the price ratio.
const LONG_STEP_MIN: f64 = 2.0;
/// Growth factor for steps of at least `LONG_STEP_MIN`. It is so large that the next step exceeds
/// `LOG_RATIO_MAX`.
const LONG_STEP_GROWTH: f64 = 16.0;
/// Widest bracket in which interpolation is used, in the logarithm of the price ratio.
const INTERPOLATION_WIDTH_MAX: f64 = 3.0;
/// Smallest change of one tenant's demand within the bracket that counts as a jump, as a fraction
/// of the change of total demand.
const JUMP_FRACTION: f64 = 0.25;
/// Largest number of tenants with a jump whose demand is evaluated separately.
const JUMPING_TENANTS_MAX: usize = 4;
/// Precision with which a jump is located, as a fraction of the bracket's width, if the demand of
/// the other tenants changes by at least as much as the jump. Higher precision would not help in
/// this case.
const JUMP_LOCATION_FRACTION: f64 = 1.0 / 64.0;
/// The starting price is estimated from a sample of the tenants. The size of the sample is the
/// number of tenants divided by this number.
const ESTIMATE_SAMPLE_DIVISOR: usize = 16;
/// Smallest sample, in tenants, from which the starting price is estimated.
const ESTIMATE_SAMPLE_MIN: usize = 32;
/// Lower bound of demand for memory before its logarithm is taken, as a fraction of the supply.
const DEMAND_FLOOR: f64 = 1e-3;
/// Largest logarithm of the price ratio. For a larger ratio, the cheaper good is free.
const LOG_RATIO_MAX: f64 = 27.0;

/// Result of the search: demand at both ends of the price bracket.
#[derive(Clone, Debug)]
pub(super) struct ClearingBracket {
    /// Demand just below the clearing price, where memory is in excess demand. `None` if a single
    /// price clears the market.
    pub below: Option<PriceRound>,
    /// Demand at or just above the clearing price, where memory is not in excess demand.
    pub above: PriceRound,
    /// Number of prices evaluated.
    pub rounds: u32,
}

impl ClearingBracket {
    pub fn price(&self) -> f64 {
        self.above.price
    }

    /// Returns the larger dividend of both ends of the bracket.
    pub fn dividend(&self) -> f64 {
        self.below.as_ref().map_or(1.0, |below| below.dividend).max(self.above.dividend)
    }
}

/// Searches for a bracket of prices that clears the market. `last` is the clearing price of the
/// last market, near which the search starts.
pub(super) fn bracket_price<U: Utility>(
    market: &Market<'_, U>,
    last: Option<f64>,
    warm_starts: &mut [WarmStart],
) -> ClearingBracket {
    let is_within = |price: &f64| *price > 0.0 && *price < 1.0;
    let last = last.filter(is_within).or_else(|| estimate_price(market, warm_starts).filter(is_within));
    let active = ActiveSet::new(market.tenants.len());
    PriceSearch {
        market,
        warm_starts,
        active,
        rounds: 0,
        rounds_max: PRICE_ROUNDS_MAX,
        scratch: PriceRound::default(),
        may_shrink_active_set: true,
    }
    .run(log_ratio(last.unwrap_or(0.5)), last.is_some())
}

/// Estimates the clearing price from a sample, the first tenants of the market. Returns `None` if
/// there are too few tenants for a sample.
fn estimate_price<U: Utility>(market: &Market<'_, U>, warm_starts: &mut [WarmStart]) -> Option<f64> {
    let sample = market.tenants.len() / ESTIMATE_SAMPLE_DIVISOR;
    (sample >= ESTIMATE_SAMPLE_MIN)
        .then(|| bracket_price(&market.subset(sample), None, &mut warm_starts[..sample]).price())
}

/// State of a search for the price bracket.
struct PriceSearch<'a, 'b, U> {
    market: &'a Market<'b, U>,
    /// State of each tenant's last evaluation.
    warm_starts: &'a mut [WarmStart],
    active: ActiveSet,
    /// Number of prices evaluated.
    rounds: u32,
    /// Largest number of prices that may be evaluated.
    rounds_max: u32,
    /// Outdated round whose buffers the next evaluation reuses.
    scratch: PriceRound,
    /// Whether tenants may be removed from the active set.
    may_shrink_active_set: bool,
}

/// Evaluated point of the search.
struct PricePoint {
    /// Logarithm of the price ratio.
    ratio: f64,
    /// Demand at this price.
    round: PriceRound,
}

/// Good that is in excess demand at a price.
enum ExcessDemand {
    /// No good is in excess demand: the price clears the market.
    None,
    /// Memory is in excess demand: the memory price is too low.
    Memory,
    /// Bandwidth is in excess demand: the memory price is too high.
    Bandwidth,
}

/// Number of consecutive rounds in which the same end of the bracket has moved. One of the two
/// counts is 0.
#[derive(Clone, Copy, Default)]
struct ConsecutiveMoves {
    low: u32,
    high: u32,
}

impl ConsecutiveMoves {
    /// Returns the factor by which the interpolated step is multiplied after the same end of the
    /// bracket has moved `moves` times in a row.
    fn overshoot_factor(moves: u32) -> f64 {
        f64::from(moves.saturating_sub(1)).exp2()
    }
}

impl PricePoint {
    fn excess_demand(&self) -> ExcessDemand {
        let Bundle { memory, bandwidth } = self.round.sum;
        if memory > 1.0 + CLEARING_TOLERANCE {
            ExcessDemand::Memory
        } else if bandwidth > 1.0 + CLEARING_TOLERANCE {
            ExcessDemand::Bandwidth
        } else {
            ExcessDemand::None
        }
    }
}

impl<U: Utility> PriceSearch<'_, '_, U> {
    /// Evaluates the demand of the active set for a logarithm of the price ratio.
    fn evaluate(&mut self, ratio: f64) -> PricePoint {
        self.rounds += 1;
        let round = std::mem::take(&mut self.scratch);
        self.evaluate_point(PricePoint { ratio, round })
    }

    fn evaluate_point(&mut self, mut at: PricePoint) -> PricePoint {
        at.round.evaluate(self.market, &self.active, memory_price(at.ratio), self.warm_starts);
        at
    }

    /// Returns a bracket of a single price.
    fn single_price_bracket(self, at: PricePoint) -> ClearingBracket {
        ClearingBracket { below: None, above: at.round, rounds: self.rounds }
    }

    /// Searches from `first`, a logarithm of the price ratio. `is_near` is set if the clearing
    /// price is expected near `first`.
    fn run(mut self, first: f64, is_near: bool) -> ClearingBracket {
        let first = self.evaluate(first);
        // Demand usually falls faster than the square root of the price ratio rises. With this
        // step, the next price is then on the other side of the clearing price and close to it.
        let near = 2.0 * first.round.sum.memory.ln().abs();
        let step = if is_near { near.clamp(PRICE_STEP_MIN, PRICE_STEP_MAX) } else { PRICE_STEP_MAX };
        match first.excess_demand() {
            ExcessDemand::None => self.minimize_dividend(first),
            ExcessDemand::Memory => self.expand_bracket_up(first, step),
            ExcessDemand::Bandwidth => self.expand_bracket_down(first, step),
        }
    }

    /// Raises the memory price until bandwidth is in excess demand or free.
    fn expand_bracket_up(mut self, mut low: PricePoint, mut step: f64) -> ClearingBracket {
        loop {
            let next = self.evaluate(low.ratio + step);
            match next.excess_demand() {
                ExcessDemand::None => return self.minimize_dividend(next),
                ExcessDemand::Bandwidth => return self.narrow_bracket(low, next),
                // At a memory price of 1, all budgets together buy exactly the supply of memory.
                ExcessDemand::Memory if next.round.price == 1.0 => return self.single_price_bracket(next),
                ExcessDemand::Memory => self.scratch = std::mem::replace(&mut low, next).round,
            }
            step = next_step(step);
        }
    }

    /// Lowers the memory price until memory is in excess demand or free.
    fn expand_bracket_down(mut self, mut high: PricePoint, mut step: f64) -> ClearingBracket {
        loop {
            let next = self.evaluate(high.ratio - step);
            match next.excess_demand() {
                ExcessDemand::None => return self.minimize_dividend(next),
                ExcessDemand::Memory => return self.narrow_bracket(next, high),
                ExcessDemand::Bandwidth if next.round.price == 0.0 => return self.single_price_bracket(next),
                ExcessDemand::Bandwidth => self.scratch = std::mem::replace(&mut high, next).round,
            }
            step = next_step(step);
        }
    }

    /// Narrows the bracket to its minimum width. Memory is in excess demand at `low`, and bandwidth
    /// at `high`.
    fn narrow_bracket(mut self, mut low: PricePoint, mut high: PricePoint) -> ClearingBracket {
        let mut streak = ConsecutiveMoves::default();
        self.shrink_active_set(&mut low, &mut high);
        while self.rounds < self.rounds_max && high.ratio - low.ratio > BRACKET_WIDTH_MIN {
            let ratio = self.next_ratio(&low, &high, streak);
            if ratio <= low.ratio || ratio >= high.ratio {
                break;
            }
            let next = self.evaluate(ratio);
            match next.excess_demand() {
                ExcessDemand::None => return self.finish_at_exact_price(next),
                ExcessDemand::Memory => {
                    streak = ConsecutiveMoves { low: streak.low + 1, high: 0 };
                    self.scratch = std::mem::replace(&mut low, next).round;
                }
                ExcessDemand::Bandwidth => {
                    streak = ConsecutiveMoves { low: 0, high: streak.high + 1 };
                    self.scratch = std::mem::replace(&mut high, next).round;
                }
            }
            self.shrink_active_set(&mut low, &mut high);
        }
        self.finish_bracket(low, high)
    }

    /// Removes tenants from the active set that demand the same amount of a good at both ends of
    /// the bracket.
    fn shrink_active_set(&mut self, low: &mut PricePoint, high: &mut PricePoint) {
        let is_priced = low.ratio >= -LOG_RATIO_MAX && high.ratio <= LOG_RATIO_MAX;
        if self.may_shrink_active_set && is_priced {
            self.active.shrink(self.market, &mut low.round, &mut high.round);
        }
    }

    /// Ends the search with a bracket of two prices and evaluates all tenants at both ends. If the
    /// dividends are equal, inactive tenants are evaluated at one end only, because their demand is
    /// the same at the other end.
    fn finish_bracket(mut self, mut low: PricePoint, mut high: PricePoint) -> ClearingBracket {
        if self.active.tenants.len() < self.warm_starts.len() {
            let tenants = self.active.tenants.clone();
            let has_equal_dividends = low.round.dividend == high.round.dividend;
            high = self.evaluate_all_tenants(high);
            if has_equal_dividends && low.round.dividend == high.round.dividend {
                low.round.extend_from(self.market, &tenants, &high.round);
            } else {
                low = self.evaluate_all_tenants(low);
            }
            if !matches!(
                (low.excess_demand(), high.excess_demand()),
                (ExcessDemand::Memory, ExcessDemand::Bandwidth)
            ) {
                return self.restart_with_all_tenants(high.ratio);
            }
        }
        ClearingBracket { below: Some(low.round), above: high.round, rounds: self.rounds }
    }

    /// Ends the search with a single price and evaluates all tenants at this price.
    fn finish_at_exact_price(mut self, mut at: PricePoint) -> ClearingBracket {
        if self.active.tenants.len() < self.warm_starts.len() {
            at = self.evaluate_all_tenants(at);
            if !matches!(at.excess_demand(), ExcessDemand::None) {
                return self.restart_with_all_tenants(at.ratio);
            }
        }
        self.single_price_bracket(at)
    }

    /// Activates all tenants and evaluates their demand at the price of `at`.
    fn evaluate_all_tenants(&mut self, at: PricePoint) -> PricePoint {
        self.active.reset(self.warm_starts.len(), at.round.dividend);
        self.evaluate_point(at)
    }

    /// Restarts the search near `near` with all tenants active, after the demand of an inactive
    /// tenant has changed.
    fn restart_with_all_tenants(mut self, near: f64) -> ClearingBracket {
        (self.may_shrink_active_set, self.rounds_max) = (false, self.rounds + PRICE_ROUNDS_MAX);
        self.active = ActiveSet::new(self.warm_starts.len());
        self.run(near, true)
    }

    /// Returns the next logarithm of the price ratio to evaluate, by interpolation. The
    /// interpolated step is doubled each time the same end of the bracket moves, so that the other
    /// end moves soon, too (compare the Illinois method). Bisects if the bracket is wide, or if
    /// only enough rounds for bisection remain.
    fn next_ratio(&mut self, low: &PricePoint, high: &PricePoint, streak: ConsecutiveMoves) -> f64 {
        let (from, to) = (low.ratio, high.ratio);
        let (middle, halvings) = (f64::midpoint(from, to), self.rounds_max - self.rounds);
        if to - from > INTERPOLATION_WIDTH_MAX
            || to - from > BRACKET_WIDTH_MIN / 2.0 * f64::from(halvings).exp2()
        {
            return middle;
        }
        let estimate = self.interpolate(low, high);
        let ratio = if estimate < middle {
            (from + (estimate - from) * ConsecutiveMoves::overshoot_factor(streak.low)).min(middle)
        } else {
            (to - (to - estimate) * ConsecutiveMoves::overshoot_factor(streak.high)).max(middle)
        };
        if ratio > from && ratio < to { ratio } else { middle }
    }

    /// Estimates the logarithm of the price ratio at which memory is sold exactly. The demand of
    /// tenants with a jump is evaluated; the demand of all other tenants is interpolated.
    fn interpolate(&mut self, low: &PricePoint, high: &PricePoint) -> f64 {
        let market = self.market;
        let memory =
            |point: &PricePoint, at: usize| market.fraction_of_supply(point.round.bundles[at]).memory;
        let jump = JUMP_FRACTION * (low.round.sum.memory - high.round.sum.memory);
        let has_jump = |at: &usize| memory(low, *at) - memory(high, *at) > jump;
        let jumping: Vec<_> =
            (0..self.active.tenants.len()).filter(has_jump).take(JUMPING_TENANTS_MAX).collect();
        if jumping.is_empty() {
            return secant_estimate(low, high);
        }
        let others = |point: &PricePoint| {
            point.round.sum.memory - jumping.iter().map(|at| memory(point, *at)).sum::<f64>()
        };
        let (others_low, others_high) = (others(low), others(high));
        let (mut from, mut to) = (low.ratio, high.ratio);
        let width_min = if others_low - others_high < jump {
            BRACKET_WIDTH_MIN
        } else {
            BRACKET_WIDTH_MIN.max(JUMP_LOCATION_FRACTION * (to - from))
        };
        while to - from > width_min {
            let middle = f64::midpoint(from, to);
            let part = (middle - low.ratio) / (high.ratio - low.ratio);
            let between = |low: f64, high: f64| low + part * (high - low);
            let (prices, dividend) =
                (market.prices(memory_price(middle)), between(low.round.dividend, high.round.dividend));
            let mut sum = between(others_low, others_high);
            for at in &jumping {
                let tenant = self.active.tenants[*at];
                let demand = market.demand_of(tenant, prices, dividend, &mut self.warm_starts[tenant]);
                sum += market.fraction_of_supply(demand.bundle).memory;
            }
            if sum > 1.0 + CLEARING_TOLERANCE { from = middle } else { to = middle }
        }
        if from > low.ratio { from } else { to }
    }

    /// Searches for the smallest dividend among all prices that clear the market, from the clearing
    /// price `at`.
    fn minimize_dividend(mut self, at: PricePoint) -> ClearingBracket {
        if at.round.dividend <= 1.0 {
            return self.single_price_bracket(at);
        }
        for offset in [-PRICE_STEP_MIN, PRICE_STEP_MIN] {
            let near = self.evaluate(at.ratio + offset);
            if matches!(near.excess_demand(), ExcessDemand::None) && near.round.dividend < at.round.dividend {
                return self.minimize_dividend_from(near, offset);
            }
            self.scratch = near.round;
        }
        self.single_price_bracket(at)
    }

    /// Moves the price from `best` in the direction of `offset` while it clears the market and the
    /// dividend does not increase.
    fn minimize_dividend_from(mut self, mut best: PricePoint, mut offset: f64) -> ClearingBracket {
        let mut is_growing = true;
        while self.rounds < self.rounds_max && offset.abs() > BRACKET_WIDTH_MIN {
            if is_growing {
                offset *= STEP_GROWTH
            } else {
                offset /= 2.0
            }
            let next = self.evaluate(best.ratio + offset);
            if matches!(next.excess_demand(), ExcessDemand::None)
                && next.round.dividend <= best.round.dividend
            {
                self.scratch = std::mem::replace(&mut best, next).round;
            } else {
                is_growing = false;
                self.scratch = next.round;
            }
        }
        self.single_price_bracket(best)
    }
}

/// Returns the price of all memory, 0 to 1, for a logarithm of the price ratio. For a logarithm
/// beyond [`LOG_RATIO_MAX`], the price is exactly 0 or 1.
fn memory_price(ratio: f64) -> f64 {
    if ratio.abs() > LOG_RATIO_MAX {
        if ratio > 0.0 { 1.0 } else { 0.0 }
    } else {
        1.0 / (1.0 + (-ratio).exp())
    }
}

/// Returns the step that follows `step` while the search expands the bracket.
fn next_step(step: f64) -> f64 {
    step * match step {
        near if near < PRICE_STEP_MAX => STEP_GROWTH,
        far if far < LONG_STEP_MIN => MEDIUM_STEP_GROWTH,
        _ => LONG_STEP_GROWTH,
    }
}

/// Returns the logarithm of the price ratio for a price of all memory.
fn log_ratio(price: f64) -> f64 {
    (price / (1.0 - price)).ln()
}

/// Estimates the logarithm of the price ratio at which memory is sold exactly. The logarithm of
/// demand is interpolated linearly between both ends of the bracket (secant method).
fn secant_estimate(low: &PricePoint, high: &PricePoint) -> f64 {
    let (over, under) = (low.round.sum.memory.ln(), -high.round.sum.memory.max(DEMAND_FLOOR).ln());
    low.ratio + (high.ratio - low.ratio) * over / (over + under)
}
