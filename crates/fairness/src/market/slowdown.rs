//! Spirit's slowdown model (section 4.2), solved exactly.
//!
//! A tenant with `m` MiB of local memory and `b` MB/s of bandwidth is slowed down by the factor
//!
//! ```text
//! 1 + MR(m)·γ·max(1, wanted/b)
//! ```
//!
//! Erratum: as printed, the wanted bandwidth is the used bandwidth, or the bandwidth of the candidate
//! bundle if the tenant saturates its share. A tenant with a full link would then neither gain by
//! more bandwidth nor lose by less. Here `wanted` is one number for all bundles; see
//! [`crate::profile::wanted`].
//!
//! For a convex miss-ratio curve, the best memory size within a budget is the point where a line
//! through "whole budget spent on memory" is tangent to the curve. Finding it is a search among the
//! knots.

use std::hint::black_box;

use thiserror::Error;

use super::{
    goods::Bundle,
    utility::{BudgetConstraint, Demand, Limits, Utility, WarmStart},
};
use crate::curve::{Knot, MissCurve, partition_point_near};

/// Throughput by the slowdown model, relative to a tenant without slowdown: 0 to 1.
#[derive(Clone, Debug)]
pub struct Slowdown {
    curve: MissCurve,
    /// Last knot of the curve, copied because every round reads it for every tenant.
    last: Knot,
    gamma: f64,
    wanted: f64,
}

/// Error for parameters outside the slowdown model.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum SlowdownError {
    /// Ratio of miss time to hit time, out of range.
    #[error("gamma {0} must be between 0 and 1000000")]
    Gamma(f64),
    /// Wanted bandwidth in MB/s, out of range.
    #[error("wanted bandwidth {0} MB/s must be finite and not negative")]
    Wanted(f64),
}

impl Slowdown {
    /// Creates the model. A miss takes `gamma` times as long as a hit; `wanted` is the bandwidth
    /// the tenant could use, in MB/s.
    ///
    /// # Errors
    /// [`SlowdownError`] if `gamma` or `wanted` is out of range.
    pub fn new(curve: MissCurve, gamma: f64, wanted: f64) -> Result<Self, SlowdownError> {
        Self::check(gamma, wanted)?;
        let last = curve.knots()[curve.knots().len() - 1];
        Ok(Self { curve, last, gamma, wanted })
    }

    /// Checks the ranges of both parameters.
    pub(crate) fn check(gamma: f64, wanted: f64) -> Result<(), SlowdownError> {
        if !(0.0..=1e6).contains(&gamma) {
            return Err(SlowdownError::Gamma(gamma));
        }
        if !(wanted.is_finite() && wanted >= 0.0) {
            return Err(SlowdownError::Wanted(wanted));
        }
        Ok(())
    }

    /// Returns the slowdown factor, at least 1; infinite without bandwidth.
    pub fn slowdown(&self, bundle: Bundle) -> f64 {
        self.with_misses(self.curve.misses(bundle.memory), bundle.bandwidth)
    }

    /// Returns the slowdown factor for a given miss ratio.
    pub(crate) fn with_misses(&self, misses: f64, bandwidth: f64) -> f64 {
        if misses == 0.0 || self.gamma == 0.0 {
            return 1.0;
        }
        let shortage = if self.wanted > 0.0 { (self.wanted / bandwidth).max(1.0) } else { 1.0 };
        1.0 + misses * self.gamma * shortage
    }

    /// Returns the miss ratio with `memory` MiB, 0 to 1.
    pub(crate) fn misses(&self, memory: f64) -> f64 {
        self.curve.misses(memory)
    }

    /// Returns the smallest bundle that more of either good cannot improve. Memory comes first,
    /// because a tenant without misses needs no bandwidth.
    #[inline(always)]
    fn satiation(&self, within: &Limits) -> Bundle {
        let last = self.last;
        let useful = if self.gamma == 0.0 { 0.0 } else { last.memory };
        let memory = clamp(useful, within.min.memory, within.max.memory);
        let misses = self.gamma > 0.0 && (last.misses > 0.0 || memory < last.memory);
        let wanted = if misses { self.wanted } else { 0.0 };
        Bundle { memory, bandwidth: clamp(wanted, within.min.bandwidth, within.max.bandwidth) }
    }

    /// Returns the memory size at which a line through `(reach, 0)` is tangent to the curve.
    #[inline(always)]
    fn tangent(&self, reach: f64, warm: &mut WarmStart) -> f64 {
        // As the bracket narrows, most tenants stay at one knot. The curve is not read then.
        if reach > warm.lower && reach <= warm.upper {
            return warm.answer;
        }
        self.tangent_of_curve(reach, warm)
    }

    fn tangent_of_curve(&self, reach: f64, warm: &mut WarmStart) -> f64 {
        let knots = self.curve.knots();
        // The next knot is better if the line through both meets the axis before `reach`. These
        // intercepts increase from knot to knot.
        let is_next_better = |at: usize| {
            let (Knot { memory, misses }, next) = (knots[at], knots[at + 1]);
            misses * (next.memory - memory) < (reach - memory) * (misses - next.misses)
        };
        let at = partition_point_near(knots.len() - 1, warm.position as usize, is_next_better);
        // Intercept of the axis and the line through a knot and the next.
        let axis_intercept = |at: usize| {
            let (knot, next) = (knots[at], knots[at + 1]);
            knot.memory + knot.misses * (next.memory - knot.memory) / (knot.misses - next.misses)
        };
        *warm = WarmStart {
            position: u32::try_from(at).unwrap_or(0),
            lower: if at == 0 { f64::NEG_INFINITY } else { axis_intercept(at - 1) },
            upper: if at + 1 == knots.len() { f64::INFINITY } else { axis_intercept(at) },
            answer: knots[at].memory,
        };
        warm.answer
    }
}

/// Like `f64::clamp`, without its check for `min <= max` and NaN. Callers guarantee both.
fn clamp(value: f64, min: f64, max: f64) -> f64 {
    let value = if value < max { value } else { max };
    if value > min { value } else { min }
}

impl Utility for Slowdown {
    fn value(&self, bundle: Bundle) -> f64 {
        self.slowdown(bundle).recip()
    }

    /// A bound on the slowdown requires memory above a size and bandwidth above a multiple of the
    /// curve. Both conditions describe convex sets, because the curve is convex.
    fn is_convex(&self) -> bool {
        true
    }

    #[inline(always)]
    fn demand(&self, constraint: &BudgetConstraint, within: &Limits, warm: &mut WarmStart) -> Demand {
        let BudgetConstraint { budget, prices } = *constraint;
        let satiation = self.satiation(within);
        if prices.cost_of(satiation) <= budget {
            return Demand { bundle: satiation, satiated: true };
        }
        let min = within.min;
        let useful = clamp(self.wanted, min.bandwidth, within.max.bandwidth);
        if prices.memory == 0.0 {
            return Demand {
                bundle: Bundle { bandwidth: budget / prices.bandwidth, ..satiation },
                satiated: false,
            };
        }
        if prices.bandwidth == 0.0 {
            let bundle = Bundle { memory: budget / prices.memory, bandwidth: useful };
            return Demand { bundle, satiated: false };
        }
        // These quotients are the same for all tenants. This function is inlined into the loop over
        // tenants, so that they are computed once per round.
        let (memory_per_money, bandwidth_per_money) = (1.0 / prices.memory, 1.0 / prices.bandwidth);
        let beside = |bandwidth: f64| (budget - prices.bandwidth * bandwidth) * memory_per_money;
        let max = clamp(beside(min.bandwidth), 0.0, satiation.memory);
        let beside_useful = beside(useful);
        let low = clamp(beside_useful, min.memory, max);
        let memory = clamp(self.tangent(budget * memory_per_money, warm), low, max);
        let left = (budget - prices.memory * memory) * bandwidth_per_money;
        // For a bandwidth price near 0, the difference of two amounts of money loses the precision
        // of `useful`.
        let bandwidth = if memory == beside_useful { useful } else { clamp(left, min.bandwidth, useful) };
        Demand { bundle: Bundle { memory, bandwidth }, satiated: false }
    }

    /// Reads the knots beside the last position. If prices have moved little, the answer depends on
    /// these only.
    #[inline(always)]
    fn prefetch(&self, warm: &WarmStart) {
        let (knots, at) = (self.curve.knots(), warm.position as usize);
        for beside in [at.saturating_sub(1), at + 1] {
            black_box(knots.get(beside).map(|knot| knot.misses));
        }
    }
}
