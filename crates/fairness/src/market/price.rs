//! Search for a bracket of memory prices that clears the market. `clearing` computes allocations
//! from the bracket.
//!
//! Demand for memory usually falls as the price of memory rises. There are exceptions: a tenant
//! with a fixed ratio of goods may demand more of a good that gets more expensive. The search only
//! requires that excess demand changes its sign. The search variable is the logarithm of the price
//! ratio, so that either price may approach 0.
//!
//! The bracket is narrowed by the Illinois method (regula falsi in which the value at an end of the
//! bracket is halved each time that only the other end moves) on the logarithm of relative demand,
//! and by bisection after [`SLOW_STEPS_MAX`] slow steps. For tenants that spend a constant fraction
//! of their budget on each good (Cobb-Douglas), this logarithm falls linearly with slope 1, so that
//! the first interpolation ends at the clearing price.

use units::limits::PRICE_ROUNDS_MAX;

use super::{
    Market,
    goods::Bundle,
    round::PriceRound,
    utility::{DemandHint, Utility},
};

/// Width of the bracket at which the search ends, in the logarithm of the price ratio. It is also
/// the relative error of the price ratio.
const BRACKET_WIDTH_MIN: f64 = 1e-10;
/// Width of the bracket at which the search ends if demand jumps within the bracket. A tenant then
/// overspends by at most this fraction of its budget.
const JUMP_WIDTH_MIN: f64 = 1e-6;
/// Ratio of the change of the logarithm of relative demand to the change of the logarithm of the
/// price ratio above which demand jumps.
const JUMP_SLOPE_MIN: f64 = 20.0;
/// Largest excess demand, as a fraction of the supply of a good, that counts as rounding error.
const CLEARING_TOLERANCE: f64 = 1e-10;
/// Unit of the steps of the search for the second end of the bracket, in the logarithm of the price
/// ratio. Steps are multiples of it, so that rounding errors of demand do not change the prices.
const STEP_UNIT: f64 = 0.5;
/// Smallest growth factor from step to step.
const STEP_GROWTH_MIN: f64 = 3.0;
/// Number of consecutive slow steps, after which the bracket is bisected.
const SLOW_STEPS_MAX: u32 = 2;
/// A step is slow if it leaves more than this fraction of the bracket. The fraction is more than one
/// half, because rounding errors would otherwise decide whether a bisection is slow.
const SLOW_STEP_FRACTION_MIN: f64 = 0.6;
/// First step of the search for a smaller dividend, in the logarithm of the price ratio.
const DIVIDEND_STEP_MIN: f64 = 1e-6;
/// Growth factor from step to step of the search for a smaller dividend.
const DIVIDEND_STEP_GROWTH: f64 = 8.0;
/// Lower bound of demand for a good before its logarithm is taken, as a fraction of the supply.
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

/// Searches for a bracket of prices that clears the market.
pub(super) fn bracket_price<U: Utility>(market: &Market<'_, U>) -> ClearingBracket {
    let mut search =
        PriceSearch { market, hints: vec![DemandHint::default(); market.tenants.len()], rounds: 0 };
    let mut last = search.evaluate(0.0);
    if last.excess_demand() == ExcessDemand::None {
        return search.minimize_dividend(last);
    }
    let mut step_min = STEP_UNIT;
    loop {
        let demand = last.log_relative_demand();
        let step = ((demand.abs() / STEP_UNIT).round() * STEP_UNIT).max(step_min);
        let next = search.evaluate(last.ratio + step.copysign(demand));
        match (last.excess_demand(), next.excess_demand()) {
            (_, ExcessDemand::None) => return search.minimize_dividend(next),
            (ExcessDemand::Memory, ExcessDemand::Bandwidth) => return search.narrow_bracket(last, next),
            (ExcessDemand::Bandwidth, ExcessDemand::Memory) => return search.narrow_bracket(next, last),
            // One good is free, and all budgets together buy exactly the supply of the other good.
            _ if next.ratio.abs() > LOG_RATIO_MAX => return search.single_price_bracket(next),
            _ => (last, step_min) = (next, step * STEP_GROWTH_MIN),
        }
    }
}

/// State of a search for the price bracket.
struct PriceSearch<'a, 'b, U> {
    market: &'a Market<'b, U>,
    /// Hint of each tenant's last demand; see [`Utility::demand`].
    hints: Vec<DemandHint>,
    /// Number of prices evaluated.
    rounds: u32,
}

/// Evaluated point of the search.
struct PricePoint {
    /// Logarithm of the price ratio.
    ratio: f64,
    /// Demand at this price.
    round: PriceRound,
}

/// Good that is in excess demand at a price.
#[derive(Clone, Copy, PartialEq)]
enum ExcessDemand {
    /// No good is in excess demand: the price clears the market.
    None,
    /// Memory is in excess demand: the memory price is too low.
    Memory,
    /// Bandwidth is in excess demand: the memory price is too high.
    Bandwidth,
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

    /// Returns the logarithm of the ratio of total demand for memory to total demand for bandwidth,
    /// both as fractions of the supply. It is positive at the lower end of the bracket and negative
    /// at the upper end.
    fn log_relative_demand(&self) -> f64 {
        let Bundle { memory, bandwidth } = self.round.sum;
        (memory.max(DEMAND_FLOOR) / bandwidth.max(DEMAND_FLOOR)).ln()
    }
}

impl<U: Utility> PriceSearch<'_, '_, U> {
    /// Evaluates the demand of all tenants for a logarithm of the price ratio.
    fn evaluate(&mut self, ratio: f64) -> PricePoint {
        self.rounds += 1;
        PricePoint { ratio, round: PriceRound::new(self.market, memory_price(ratio), &mut self.hints) }
    }

    /// Returns a bracket of a single price.
    fn single_price_bracket(self, at: PricePoint) -> ClearingBracket {
        ClearingBracket { below: None, above: at.round, rounds: self.rounds }
    }

    /// Searches for the smallest dividend among all prices that clear the market, from the clearing
    /// price of `best`.
    fn minimize_dividend(mut self, mut best: PricePoint) -> ClearingBracket {
        for direction in [-1.0, 1.0] {
            let (mut step, mut is_growing) = (direction * DIVIDEND_STEP_MIN, true);
            let mut found: Option<PricePoint> = None;
            while best.round.dividend > 1.0
                && step.abs() > BRACKET_WIDTH_MIN
                && self.rounds < PRICE_ROUNDS_MAX
            {
                let from = found.as_ref().unwrap_or(&best);
                let (ratio, dividend) = (from.ratio + step, from.round.dividend);
                let next = self.evaluate(ratio);
                if next.excess_demand() == ExcessDemand::None && next.round.dividend <= dividend {
                    found = Some(next);
                } else {
                    is_growing = false;
                }
                step *= if is_growing { DIVIDEND_STEP_GROWTH } else { 0.5 };
            }
            if let Some(found) = found.filter(|found| found.round.dividend < best.round.dividend) {
                best = found;
            }
        }
        self.single_price_bracket(best)
    }

    /// Narrows the bracket to its minimum width. Memory is in excess demand at `low`, and bandwidth
    /// at `high`.
    fn narrow_bracket(mut self, mut low: PricePoint, mut high: PricePoint) -> ClearingBracket {
        // Values of both ends, and the end that moved last.
        let (mut over, mut under, mut last) =
            (low.log_relative_demand(), -high.log_relative_demand(), ExcessDemand::None);
        let mut slow_steps = 0;
        while !has_converged(&low, &high) && self.rounds < PRICE_ROUNDS_MAX {
            let width = high.ratio - low.ratio;
            let part = if slow_steps < SLOW_STEPS_MAX { over / (over + under) } else { 0.5 };
            let next = self.evaluate(low.ratio + width * part);
            let excess = next.excess_demand();
            let other_end_factor = if excess == last { 0.5 } else { 1.0 };
            match excess {
                ExcessDemand::None => return self.single_price_bracket(next),
                ExcessDemand::Memory => {
                    (over, under) = (next.log_relative_demand(), under * other_end_factor);
                    low = next;
                }
                ExcessDemand::Bandwidth => {
                    (over, under) = (over * other_end_factor, -next.log_relative_demand());
                    high = next;
                }
            }
            last = excess;
            let is_slow = high.ratio - low.ratio > SLOW_STEP_FRACTION_MIN * width;
            slow_steps = if is_slow { slow_steps + 1 } else { 0 };
        }
        ClearingBracket { below: Some(low.round), above: high.round, rounds: self.rounds }
    }
}

/// Returns whether the search may end with this bracket.
fn has_converged(low: &PricePoint, high: &PricePoint) -> bool {
    let width = high.ratio - low.ratio;
    let is_jump = || low.log_relative_demand() - high.log_relative_demand() > JUMP_SLOPE_MIN * width;
    width <= BRACKET_WIDTH_MIN || width <= JUMP_WIDTH_MIN && is_jump()
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
