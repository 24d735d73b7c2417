//! Spirit's slowdown model (4.2), solved exactly.
//!
//! A tenant that keeps `m` of its pages and moves `b` MB/s over the link is slowed down by `1 + MR(m)·γ·max(1, wanted/b)`. As printed, the bandwidth that
//! it wants is what it uses, and that which it would use with more where it uses all it has: then a tenant whose link is full gains nothing from more
//! bandwidth and loses nothing from less. Here one number, `wanted`, is told for all bundles alike: see `profile`.
//!
//! With a convex miss-ratio curve the best that a budget buys is where the straight line from the curve to the point "all money spent on memory" is a
//! tangent: a search among knots.

use std::hint::black_box;

use thiserror::Error;

use super::{
    goods::Bundle,
    utility::{Asked, Limits, Mark, Purse, Utility},
};
use crate::curve::{Knot, MissCurve, first_not};

/// Throughput by the slowdown model, of a tenant that is never slowed down: 1 at most.
#[derive(Clone, Debug)]
pub struct Slowdown {
    curve: MissCurve,
    /// Where the curve ends; told here once more, since each tenant is asked for it in each round.
    last: Knot,
    gamma: f64,
    wanted: f64,
}

/// Why numbers make no slowdown.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum SlowdownError {
    /// How much longer remote memory takes.
    #[error("gamma {0} must be a number from 0 to 1000000")]
    Gamma(f64),
    /// Bandwidth that it wants.
    #[error("wanted bandwidth {0} must be a number of MB/s, 0 or more")]
    Wanted(f64),
}

impl Slowdown {
    /// A tenant that misses like this; a miss takes `gamma` times as long as a hit, and `wanted` MB/s are what it could use of the link.
    ///
    /// # Errors
    /// A number is out of range.
    pub fn new(curve: MissCurve, gamma: f64, wanted: f64) -> Result<Self, SlowdownError> {
        Self::check(gamma, wanted)?;
        let last = curve.knots()[curve.knots().len() - 1];
        Ok(Self { curve, last, gamma, wanted })
    }

    /// Whether such numbers make one.
    pub(crate) fn check(gamma: f64, wanted: f64) -> Result<(), SlowdownError> {
        if !(0.0..=1e6).contains(&gamma) {
            return Err(SlowdownError::Gamma(gamma));
        }
        if !(wanted.is_finite() && wanted >= 0.0) {
            return Err(SlowdownError::Wanted(wanted));
        }
        Ok(())
    }

    /// How much longer everything takes than if no access missed; infinite without any bandwidth.
    pub fn slowdown(&self, bundle: Bundle) -> f64 {
        self.with_misses(self.curve.misses(bundle.memory), bundle.bandwidth)
    }

    /// The same with a miss ratio that is known otherwise.
    pub(crate) fn with_misses(&self, misses: f64, bandwidth: f64) -> f64 {
        if misses == 0.0 || self.gamma == 0.0 {
            return 1.0;
        }
        let lack = if self.wanted > 0.0 { (self.wanted / bandwidth).max(1.0) } else { 1.0 };
        1.0 + misses * self.gamma * lack
    }

    /// Accesses that miss so much memory, 0 to 1.
    pub(crate) fn misses(&self, memory: f64) -> f64 {
        self.curve.misses(memory)
    }

    /// Bandwidth and memory that are of any use to it, whatever they cost; memory first spares bandwidth where nothing is missed any more.
    #[inline(always)]
    fn fill(&self, within: &Limits) -> Bundle {
        let last = self.last;
        let useful = if self.gamma == 0.0 { 0.0 } else { last.memory };
        let memory = between(useful, within.least.memory, within.most.memory);
        let misses = self.gamma > 0.0 && (last.misses > 0.0 || memory < last.memory);
        let wanted = if misses { self.wanted } else { 0.0 };
        Bundle { memory, bandwidth: between(wanted, within.least.bandwidth, within.most.bandwidth) }
    }

    /// Memory at which a tangent through `(reach, 0)` touches the curve.
    #[inline(always)]
    fn tangent(&self, reach: f64, mark: &mut Mark) -> f64 {
        // While prices are found more and more exactly, most tenants stay at one knot: then the curve is not looked at.
        if reach > mark.above && reach <= mark.upto {
            return mark.answer;
        }
        self.tangent_of_curve(reach, mark)
    }

    fn tangent_of_curve(&self, reach: f64, mark: &mut Mark) -> f64 {
        let knots = self.curve.knots();
        // Whether the line through a knot and the next meets the axis before `reach`: then the next is better. They meet it ever later.
        let is_next_better = |at: usize| {
            let (Knot { memory, misses }, next) = (knots[at], knots[at + 1]);
            misses * (next.memory - memory) < (reach - memory) * (misses - next.misses)
        };
        let at = first_not(knots.len() - 1, mark.at as usize, is_next_better);
        // Where the line through a knot and the next meets the axis.
        let meets = |at: usize| {
            let (knot, next) = (knots[at], knots[at + 1]);
            knot.memory + knot.misses * (next.memory - knot.memory) / (knot.misses - next.misses)
        };
        *mark = Mark {
            at: u32::try_from(at).unwrap_or(0),
            above: if at == 0 { f64::NEG_INFINITY } else { meets(at - 1) },
            upto: if at + 1 == knots.len() { f64::INFINITY } else { meets(at) },
            answer: knots[at].memory,
        };
        mark.answer
    }
}

/// As `clamp`, which looks each time whether there is anything between, and whether all are numbers; here both are known.
fn between(value: f64, least: f64, most: f64) -> f64 {
    let value = if value < most { value } else { most };
    if value > least { value } else { least }
}

impl Utility for Slowdown {
    fn value(&self, bundle: Bundle) -> f64 {
        self.slowdown(bundle).recip()
    }

    /// Bundles with which it is slowed down no more than so are those where the curve is low enough, with no less bandwidth than some times the curve's height;
    /// both are convex, since the curve is.
    fn is_convex(&self) -> bool {
        true
    }

    #[inline(always)]
    fn asks(&self, purse: &Purse, within: &Limits, mark: &mut Mark) -> Asked {
        let Purse { budget, prices } = *purse;
        let fill = self.fill(within);
        if prices.of(fill) <= budget {
            return Asked { bundle: fill, content: true };
        }
        let least = within.least;
        let useful = between(self.wanted, least.bandwidth, within.most.bandwidth);
        if prices.memory == 0.0 {
            return Asked { bundle: Bundle { bandwidth: budget / prices.bandwidth, ..fill }, content: false };
        }
        if prices.bandwidth == 0.0 {
            let bundle = Bundle { memory: budget / prices.memory, bandwidth: useful };
            return Asked { bundle, content: false };
        }
        // The same for all tenants of a round, and divided once for all of them: this is inlined into the loop over them.
        let (per_memory, per_bandwidth) = (1.0 / prices.memory, 1.0 / prices.bandwidth);
        let beside = |bandwidth: f64| (budget - prices.bandwidth * bandwidth) * per_memory;
        let most = between(beside(least.bandwidth), 0.0, fill.memory);
        let beside_all = beside(useful);
        let low = between(beside_all, least.memory, most);
        let memory = between(self.tangent(budget * per_memory, mark), low, most);
        let left = (budget - prices.memory * memory) * per_bandwidth;
        // Where bandwidth is next to free, a difference of money leaves nothing of what all the useful of it is.
        let bandwidth = if memory == beside_all { useful } else { between(left, least.bandwidth, useful) };
        Asked { bundle: Bundle { memory, bandwidth }, content: false }
    }

    /// The knots beside that at the mark: where it lies, and it has hardly moved, the answer is found with no others.
    #[inline(always)]
    fn look_ahead(&self, mark: &Mark) {
        let (knots, at) = (self.curve.knots(), mark.at as usize);
        for beside in [at.saturating_sub(1), at + 1] {
            black_box(knots.get(beside).map(|knot| knot.misses));
        }
    }
}
