//! Demand of an arbitrary monotone utility by search on a grid.
//!
//! Spirit (section 4.1) evaluates every point of a 200 × 200 grid, or of a window around the last
//! share. Here the search is limited to about 200 points on the budget line. A point between two
//! others is worth at most the bundle with the larger memory and the larger bandwidth of the two.
//! Branch and bound with this upper bound skips most points.

use std::fmt;

use super::{
    goods::{Bundle, KB_PER_MB, PAGES_PER_MIB, Prices, Supply},
    utility::{BudgetConstraint, Demand, DemandHint, Limits, Utility},
};

/// Number of steps into which the affordable memory is divided. Spirit divides the whole memory
/// into 1/ε steps.
const GRID_STEPS: f64 = 200.0;
/// Size of a page, in MiB.
const PAGE_MIB: f64 = 1.0 / PAGES_PER_MIB as f64;
/// Size of the unit of bandwidth, 1 KB/s, in MB/s.
const KB_S: f64 = 1.0 / KB_PER_MB as f64;
/// Relative tolerance for rounding errors of prices.
const PRICE_ROUNDING_TOLERANCE: f64 = 1e-12;

/// Utility defined by any monotone function. Its demand is searched on a grid.
#[derive(Clone, Copy)]
pub struct Grid<F> {
    value: F,
    supply: Supply,
}

impl<F> fmt::Debug for Grid<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grid").field("supply", &self.supply).finish_non_exhaustive()
    }
}

impl<F: Fn(Bundle) -> f64> Grid<F> {
    /// Creates a utility on a grid. A step of memory is 1/200 of the affordable memory, rounded to
    /// whole pages. A step of bandwidth is 1 KB/s. `value` must be finite, at least 0 and monotone
    /// in both goods.
    pub const fn new(supply: Supply, value: F) -> Self {
        Self { value, supply }
    }
}

impl<F: Fn(Bundle) -> f64> Utility for Grid<F> {
    fn value(&self, bundle: Bundle) -> f64 {
        (self.value)(bundle)
    }

    fn demand(&self, constraint: &BudgetConstraint, within: &Limits, hint: &mut DemandHint) -> Demand {
        let line = BudgetLine::new(self, constraint, within);
        let best = line.best_point(hint.position);
        hint.position = best.at;
        let bundle = if line.has_slack(best) { line.minimize_cost(best) } else { best.bundle };
        let unspent = constraint.budget - constraint.prices.cost_of(bundle);
        // A tenant that cannot afford the next grid point with its unspent budget is not satiated.
        Demand {
            bundle,
            satiated: unspent > constraint.prices.memory * line.step + constraint.prices.bandwidth * KB_S,
        }
    }
}

/// Grid points on the budget line of one constraint. Each point is an amount of memory with the
/// largest bandwidth that is affordable in addition.
struct BudgetLine<'a, F> {
    grid: &'a Grid<F>,
    prices: Prices,
    budget: f64,
    within: &'a Limits,
    /// Largest affordable memory, in MiB.
    memory_max: f64,
    /// Grid index of `memory_max`.
    last: u32,
    /// Difference of memory between neighboring grid points, in MiB.
    step: f64,
}

/// Grid point on the budget line, and its value.
#[derive(Clone, Copy)]
struct GridPoint {
    /// Grid index of the memory.
    at: u32,
    bundle: Bundle,
    value: f64,
}

/// Grid point with the smallest bandwidth that reaches a target value. The bandwidth is infinite if
/// no bandwidth within the limits reaches the value.
#[derive(Clone, Copy)]
struct IsoValuePoint {
    /// Grid index of the memory.
    at: u32,
    bundle: Bundle,
}

impl<'a, F: Fn(Bundle) -> f64> BudgetLine<'a, F> {
    fn new(grid: &'a Grid<F>, constraint: &BudgetConstraint, within: &'a Limits) -> Self {
        let BudgetConstraint { budget, prices } = *constraint;
        let (min, max) = (within.min, within.max);
        let affordable = affordable_amount(budget - prices.bandwidth * min.bandwidth, prices.memory);
        let memory_max = whole_units(affordable, PAGE_MIB, min.memory, max.memory);
        let step = floor_to_unit((memory_max - min.memory) / GRID_STEPS, PAGE_MIB).max(PAGE_MIB);
        let last = grid_index((memory_max - min.memory) / step);
        Self { grid, prices, budget, within, memory_max, last, step }
    }

    /// Returns the memory of the grid point `at`, in MiB.
    fn memory(&self, at: u32) -> f64 {
        (self.within.min.memory + f64::from(at) * self.step).min(self.memory_max)
    }

    /// Returns the bandwidth affordable in addition to `memory` MiB, in whole KB/s within the
    /// limits.
    fn affordable_bandwidth(&self, memory: f64) -> f64 {
        let affordable = affordable_amount(self.budget - self.prices.memory * memory, self.prices.bandwidth);
        whole_units(affordable, KB_S, self.within.min.bandwidth, self.within.max.bandwidth)
    }

    fn evaluate(&self, at: u32, bundle: Bundle) -> GridPoint {
        GridPoint { at, bundle, value: self.grid.value(bundle) }
    }

    fn point(&self, at: u32) -> GridPoint {
        let memory = self.memory(at);
        self.evaluate(at, Bundle { memory, bandwidth: self.affordable_bandwidth(memory) })
    }

    /// Returns the point at which both goods are the same fraction of the supply. The fraction
    /// equals the budget, because the whole supply costs 1.
    fn diagonal_point(&self) -> GridPoint {
        let Limits { min, max } = *self.within;
        let all = Bundle::from(self.grid.supply.all());
        let memory = (self.budget * all.memory).min(max.memory).max(min.memory);
        let left = affordable_amount(self.budget - self.prices.memory * memory, self.prices.bandwidth);
        let bandwidth = (self.budget * all.bandwidth).min(left * (1.0 + PRICE_ROUNDING_TOLERANCE));
        let at = grid_index((memory - min.memory) / self.step);
        self.evaluate(at, Bundle { memory, bandwidth: bandwidth.min(max.bandwidth).max(min.bandwidth) })
    }

    /// Returns the point of the highest value. `hint` is the grid index of the last answer.
    fn best_point(&self, hint: u32) -> GridPoint {
        let (first, last) = (self.point(0), self.point(self.last));
        let candidates = [self.point(hint.min(self.last)), first, last];
        let mut best = candidates.into_iter().fold(self.diagonal_point(), higher_value_point);
        self.search_between(first, last, &mut best);
        best
    }

    /// Updates `best` with the best point between two points, by branch and bound.
    fn search_between(&self, from: GridPoint, to: GridPoint, best: &mut GridPoint) {
        let bound = Bundle { memory: to.bundle.memory, bandwidth: from.bundle.bandwidth };
        if to.at - from.at < 2 || self.grid.value(bound) <= best.value {
            return;
        }
        let middle = self.point(from.at.midpoint(to.at));
        *best = higher_value_point(*best, middle);
        self.search_between(from, middle, best);
        self.search_between(middle, to, best);
    }

    /// Returns whether the bundle of a point keeps its value with one unit less of a good.
    fn has_slack(&self, GridPoint { bundle, value: target, .. }: GridPoint) -> bool {
        let less = Bundle { memory: bundle.memory - PAGE_MIB, bandwidth: bundle.bandwidth - KB_S };
        let min = self.within.min;
        let is_enough = |bundle| self.grid.value(bundle) >= target;
        less.bandwidth >= min.bandwidth && is_enough(Bundle { bandwidth: less.bandwidth, ..bundle })
            || less.memory >= min.memory && is_enough(Bundle { memory: less.memory, ..bundle })
    }

    /// Returns the cheapest bundle whose value is at least that of a point.
    fn minimize_cost(&self, GridPoint { bundle: start, value: target, .. }: GridPoint) -> Bundle {
        let (first, last) = (self.iso_value_point(0, target), self.iso_value_point(self.last, target));
        let bandwidth = self.min_bandwidth(start.memory, target).unwrap_or(f64::INFINITY);
        let start = Bundle { bandwidth: start.bandwidth.min(bandwidth), ..start };
        let mut best =
            [first.bundle, last.bundle].into_iter().fold(start, |best, next| self.cheaper_bundle(best, next));
        self.minimize_cost_between(first, last, target, &mut best);
        Bundle { memory: self.min_memory(best, target), ..best }
    }

    /// Updates `best` with the cheapest bundle between two points, by branch and bound.
    fn minimize_cost_between(&self, from: IsoValuePoint, to: IsoValuePoint, target: f64, best: &mut Bundle) {
        let bound = Bundle { memory: from.bundle.memory, bandwidth: to.bundle.bandwidth };
        if to.at - from.at < 2 || self.prices.cost_of(bound) >= self.prices.cost_of(*best) {
            return;
        }
        let middle = self.iso_value_point(from.at.midpoint(to.at), target);
        *best = self.cheaper_bundle(*best, middle.bundle);
        self.minimize_cost_between(from, middle, target, best);
        self.minimize_cost_between(middle, to, target, best);
    }

    fn cheaper_bundle(&self, one: Bundle, other: Bundle) -> Bundle {
        if self.prices.cost_of(other) < self.prices.cost_of(one) { other } else { one }
    }

    fn iso_value_point(&self, at: u32, target: f64) -> IsoValuePoint {
        let memory = self.memory(at);
        let bandwidth = self.min_bandwidth(memory, target).unwrap_or(f64::INFINITY);
        IsoValuePoint { at, bundle: Bundle { memory, bandwidth } }
    }

    /// Returns the smallest bandwidth within the limits, in whole KB/s, that gives a bundle with
    /// `memory` MiB at least the value `target`. Returns `None` if the largest bandwidth is not
    /// enough.
    fn min_bandwidth(&self, memory: f64, target: f64) -> Option<f64> {
        let is_enough = |bandwidth| self.grid.value(Bundle { memory, bandwidth }) >= target;
        let Limits { min, max } = *self.within;
        is_enough(max.bandwidth).then(|| bisect_min(min.bandwidth, max.bandwidth, KB_S, is_enough))
    }

    /// Returns the smallest memory, in MiB, that has at least the value `target` with the bandwidth
    /// of `bundle`. The memory of `bundle` must be enough.
    fn min_memory(&self, bundle: Bundle, target: f64) -> f64 {
        let is_enough = |memory| self.grid.value(Bundle { memory, ..bundle }) >= target;
        bisect_min(self.within.min.memory, bundle.memory, PAGE_MIB, is_enough)
    }
}

/// Returns the smallest amount from `from` to `to` that is enough, by bisection. Only multiples of
/// `unit` and the two bounds are tried. `to` must be enough.
fn bisect_min(from: f64, to: f64, unit: f64, is_enough: impl Fn(f64) -> bool) -> f64 {
    if is_enough(from) {
        return from;
    }
    let (mut low, mut high) = (from, to);
    while high - low > unit {
        let middle = floor_to_unit(f64::midpoint(low, high), unit);
        if middle <= low {
            break;
        }
        if is_enough(middle) { high = middle } else { low = middle }
    }
    high
}

/// Returns the point of the higher value, or `one` if both values are equal.
fn higher_value_point(one: GridPoint, other: GridPoint) -> GridPoint {
    if other.value > one.value { other } else { one }
}

/// Rounds a position on the grid, in steps, up to a grid index.
fn grid_index(position: f64) -> u32 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most twice GRID_STEPS")]
    let grid_index = position.ceil() as u32;
    grid_index
}

/// Returns the amount of a good that `budget` buys at `price`; infinite for a price of 0.
fn affordable_amount(budget: f64, price: f64) -> f64 {
    if price == 0.0 { f64::INFINITY } else { budget / price }
}

/// Rounds an affordable amount down to a multiple of `unit` and clamps it to the limits.
fn whole_units(affordable: f64, unit: f64, min: f64, max: f64) -> f64 {
    floor_to_unit(affordable.min(max), unit).clamp(min, max)
}

/// Rounds an amount down to a multiple of `unit`.
fn floor_to_unit(amount: f64, unit: f64) -> f64 {
    (amount / unit * (1.0 + 2.0 * f64::EPSILON)).floor() * unit
}
