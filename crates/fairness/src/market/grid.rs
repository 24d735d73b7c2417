//! Any utility whatever, so long as more is never worth less: sought on a grid.
//!
//! Spirit (4.1) looks at every point of a grid of 200 by 200, or near the last share only. Along the budget line it is 200 points; and between two of them
//! nothing is worth more than the memory of one with the bandwidth of the other, so that most of them need not be looked at.

use super::{
    goods::{Bundle, Prices, Supply},
    utility::{Asked, Limits, Mark, Purse, Utility},
};

/// Steps into which the memory that a tenant can pay is divided: Spirit's 1/ε, there of all memory.
const STEPS: f64 = 200.0;
/// What prices may be off by the last bits of their reckoning, relative.
const ROUNDING: f64 = 1e-12;

/// A tenant whose throughput is any function that does not fall.
#[derive(Clone, Copy, Debug)]
pub struct Grid<F> {
    value: F,
    supply: Supply,
}

impl<F: Fn(Bundle) -> f64> Grid<F> {
    /// On whole MiB, 1/200 apart of what can be paid, and whole MB/s. The function is 0 or more, finite, and never falls as memory or bandwidth rises.
    pub const fn new(supply: Supply, value: F) -> Self {
        Self { value, supply }
    }
}

impl<F: Fn(Bundle) -> f64> Utility for Grid<F> {
    fn value(&self, bundle: Bundle) -> f64 {
        (self.value)(bundle)
    }

    fn asks(&self, purse: &Purse, within: &Limits, mark: &mut Mark) -> Asked {
        let line = Line::new(self, purse, within);
        let best = line.best(mark.at);
        mark.at = best.at;
        let bundle = if line.is_wasteful(best) { line.cheapest(best) } else { best.bundle };
        let kept = purse.budget - purse.prices.of(bundle);
        // What does not pay for the next point of the grid is kept by everybody.
        Asked { bundle, content: kept > purse.prices.memory * line.step + purse.prices.bandwidth }
    }
}

/// What one purse can buy: some memory, and all the bandwidth that the rest pays.
struct Line<'a, F> {
    grid: &'a Grid<F>,
    prices: Prices,
    budget: f64,
    within: &'a Limits,
    /// All the memory that can be paid, and which point of the grid that is.
    most_memory: f64,
    last: u32,
    step: f64,
}

/// A point that was looked at.
#[derive(Clone, Copy)]
struct Point {
    at: u32,
    bundle: Bundle,
    value: f64,
}

/// So much memory, and the least bandwidth that is worth enough beside it; infinite where none is.
#[derive(Clone, Copy)]
struct Need {
    at: u32,
    bundle: Bundle,
}

impl<'a, F: Fn(Bundle) -> f64> Line<'a, F> {
    fn new(grid: &'a Grid<F>, purse: &Purse, within: &'a Limits) -> Self {
        let Purse { budget, prices } = *purse;
        let (least, most) = (within.least, within.most);
        let can_pay = paid(budget - prices.bandwidth * least.bandwidth, prices.memory);
        let most_memory = whole(can_pay, least.memory, most.memory);
        let step = ((most_memory - least.memory) / STEPS).floor().max(1.0);
        let last = number((most_memory - least.memory) / step);
        Self { grid, prices, budget, within, most_memory, last, step }
    }

    fn memory(&self, at: u32) -> f64 {
        (self.within.least.memory + f64::from(at) * self.step).min(self.most_memory)
    }

    /// All the bandwidth that can be paid beside so much memory.
    fn beside(&self, memory: f64) -> f64 {
        let can_pay = paid(self.budget - self.prices.memory * memory, self.prices.bandwidth);
        whole(can_pay, self.within.least.bandwidth, self.within.most.bandwidth)
    }

    fn valued(&self, at: u32, bundle: Bundle) -> Point {
        Point { at, bundle, value: self.grid.value(bundle) }
    }

    fn point(&self, at: u32) -> Point {
        let memory = self.memory(at);
        self.valued(at, Bundle { memory, bandwidth: self.beside(memory) })
    }

    /// The same part of both goods. All prices together are 1, so it can be paid; but for a tenant of a market that sells less than the grid knows of.
    fn diagonal(&self) -> Point {
        let Limits { least, most } = *self.within;
        let all = Bundle::from(self.grid.supply.all());
        let costs = self.prices.of(all);
        let part = if costs > 1.0 + ROUNDING { self.budget / costs } else { self.budget };
        let memory = (part * all.memory).min(most.memory).max(least.memory);
        let left = paid(self.budget - self.prices.memory * memory, self.prices.bandwidth);
        let bandwidth = (part * all.bandwidth).min(left * (1.0 + ROUNDING));
        let at = number((memory - least.memory) / self.step);
        self.valued(at, Bundle { memory, bandwidth: bandwidth.min(most.bandwidth).max(least.bandwidth) })
    }

    /// The point that is worth most; near `mark`, perhaps.
    fn best(&self, mark: u32) -> Point {
        let (first, last) = (self.point(0), self.point(self.last));
        let others = [self.point(mark.min(self.last)), first, last];
        let mut best = others.into_iter().fold(self.diagonal(), better);
        self.look_between(first, last, &mut best);
        best
    }

    fn look_between(&self, from: Point, to: Point, best: &mut Point) {
        let bound = Bundle { memory: to.bundle.memory, bandwidth: from.bundle.bandwidth };
        if to.at - from.at < 2 || self.grid.value(bound) <= best.value {
            return;
        }
        let middle = self.point(from.at.midpoint(to.at));
        *best = better(*best, middle);
        self.look_between(from, middle, best);
        self.look_between(middle, to, best);
    }

    /// Whether a little less of one of both would be worth as much.
    fn is_wasteful(&self, Point { bundle: of, value: enough, .. }: Point) -> bool {
        let less = Bundle { memory: of.memory - 1.0, bandwidth: of.bandwidth - 1.0 };
        let least = self.within.least;
        let is_enough = |bundle| self.grid.value(bundle) >= enough;
        less.bandwidth >= least.bandwidth && is_enough(Bundle { bandwidth: less.bandwidth, ..of })
            || less.memory >= least.memory && is_enough(Bundle { memory: less.memory, ..of })
    }

    /// The cheapest that is worth as much.
    fn cheapest(&self, Point { bundle: known, value: enough, .. }: Point) -> Bundle {
        let (first, last) = (self.need(0, enough), self.need(self.last, enough));
        let beside = self.least_beside(known.memory, enough).unwrap_or(f64::INFINITY);
        let known = Bundle { bandwidth: known.bandwidth.min(beside), ..known };
        let mut best =
            [first.bundle, last.bundle].into_iter().fold(known, |best, next| self.cheaper(best, next));
        self.haggle_between(first, last, enough, &mut best);
        Bundle { memory: self.least_memory(best, enough), ..best }
    }

    fn haggle_between(&self, from: Need, to: Need, enough: f64, best: &mut Bundle) {
        let bound = Bundle { memory: from.bundle.memory, bandwidth: to.bundle.bandwidth };
        if to.at - from.at < 2 || self.prices.of(bound) >= self.prices.of(*best) {
            return;
        }
        let middle = self.need(from.at.midpoint(to.at), enough);
        *best = self.cheaper(*best, middle.bundle);
        self.haggle_between(from, middle, enough, best);
        self.haggle_between(middle, to, enough, best);
    }

    fn cheaper(&self, one: Bundle, other: Bundle) -> Bundle {
        if self.prices.of(other) < self.prices.of(one) { other } else { one }
    }

    fn need(&self, at: u32, enough: f64) -> Need {
        let memory = self.memory(at);
        let bandwidth = self.least_beside(memory, enough).unwrap_or(f64::INFINITY);
        Need { at, bundle: Bundle { memory, bandwidth } }
    }

    /// The least bandwidth, in whole MB/s above the least there must be, that is worth enough beside so much memory.
    fn least_beside(&self, memory: f64, enough: f64) -> Option<f64> {
        let is_enough = |bandwidth| self.grid.value(Bundle { memory, bandwidth }) >= enough;
        let Limits { least, most } = *self.within;
        is_enough(most.bandwidth).then(|| least_that(least.bandwidth, most.bandwidth, is_enough))
    }

    /// The least memory that is worth enough beside so much bandwidth, no more than is there.
    fn least_memory(&self, of: Bundle, enough: f64) -> f64 {
        let is_enough = |memory| self.grid.value(Bundle { memory, ..of }) >= enough;
        least_that(self.within.least.memory, of.memory, is_enough)
    }
}

/// The least of what is so, in whole steps from what may not be so to what is.
fn least_that(from: f64, to: f64, is_so: impl Fn(f64) -> bool) -> f64 {
    if is_so(from) {
        return from;
    }
    let (mut too_little, mut plenty) = (from, to);
    while plenty - too_little > 1.0 {
        let middle = f64::midpoint(too_little, plenty).floor();
        if middle <= too_little {
            break;
        }
        if is_so(middle) { plenty = middle } else { too_little = middle }
    }
    plenty
}

fn better(one: Point, other: Point) -> Point {
    if other.value > one.value { other } else { one }
}

/// The number of a point of the grid at or after a place on it.
fn number(place: f64) -> u32 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to twice the steps")]
    let number = place.ceil() as u32;
    number
}

/// What so much money pays; of something without a price, anything.
fn paid(money: f64, price: f64) -> f64 {
    if price == 0.0 { f64::INFINITY } else { money / price }
}

/// Whole units of what can be paid, between the least and the most.
fn whole(can_pay: f64, least: f64, most: f64) -> f64 {
    (can_pay * (1.0 + f64::EPSILON)).min(most).floor().max(least)
}
