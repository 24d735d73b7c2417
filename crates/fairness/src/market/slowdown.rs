//! Spirit's slowdown model (section 4.2), solved exactly.
//!
//! A tenant with `m` MiB of local memory and `b` MB/s of bandwidth is slowed down by the factor
//!
//! ```text
//! 1 + MR(m)·γ·max(1, wanted/b)
//! ```
//!
//! where `MR(m)` is the miss ratio, `γ` the ratio of miss time to hit time, and `wanted` the
//! bandwidth that the tenant could use.
//!
//! Erratum: as printed, the wanted bandwidth is the used bandwidth, or the bandwidth of the
//! candidate bundle if the tenant saturates its share. A tenant that saturates its share would then
//! neither gain by more bandwidth nor lose by less. Here `wanted` is one number for all bundles;
//! see [`crate::profile::wanted`].
//!
//! A tenant that spends its whole budget on memory can buy `reach` MiB. For a convex miss-ratio
//! curve, the best memory size is the point at which a line through `(reach, 0)` is tangent to the
//! curve. This point is a knot, which is found by a search among the knots.

use thiserror::Error;

use super::{
    goods::Bundle,
    utility::{BudgetConstraint, Demand, DemandHint, Limits, Utility},
};
use crate::curve::{Knot, MissCurve, partition_point_near};

/// Utility according to the slowdown model. The value of a bundle is the throughput relative to a
/// tenant without slowdown, 0 to 1.
#[derive(Clone, Debug)]
pub struct Slowdown {
    curve: MissCurve,
    /// Copy of the last knot of the curve, so that most evaluations do not read the curve.
    last: Knot,
    /// Ratio of miss time to hit time.
    gamma: f64,
    /// Bandwidth that the tenant could use, in MB/s.
    wanted: f64,
}

/// Error for parameters of the slowdown model that are out of range.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum SlowdownError {
    /// The ratio of miss time to hit time is out of range.
    #[error("gamma: {0} is out of range, must be 0 to 1,000,000")]
    Gamma(f64),
    /// The wanted bandwidth, in MB/s, is negative or not finite.
    #[error("wanted bandwidth in MB/s: {0} is out of range, must be a finite number of at least 0")]
    Wanted(f64),
}

impl Slowdown {
    /// Creates the model. `gamma` is the ratio of miss time to hit time. `wanted` is the bandwidth
    /// that the tenant could use, in MB/s.
    ///
    /// # Errors
    /// Returns [`SlowdownError`] if `gamma` or `wanted` is out of range.
    pub fn new(curve: MissCurve, gamma: f64, wanted: f64) -> Result<Self, SlowdownError> {
        Self::check(gamma, wanted)?;
        let last = curve.knots()[curve.knots().len() - 1];
        Ok(Self { curve, last, gamma, wanted })
    }

    /// Checks that `gamma` and `wanted` are in range.
    pub(crate) fn check(gamma: f64, wanted: f64) -> Result<(), SlowdownError> {
        if !(0.0..=1e6).contains(&gamma) {
            return Err(SlowdownError::Gamma(gamma));
        }
        if !(wanted.is_finite() && wanted >= 0.0) {
            return Err(SlowdownError::Wanted(wanted));
        }
        Ok(())
    }

    /// Returns the slowdown factor with a bundle, at least 1. The factor is infinite if the tenant
    /// needs bandwidth and the bundle has none.
    pub fn slowdown(&self, bundle: Bundle) -> f64 {
        self.slowdown_with_miss_ratio(self.curve.misses(bundle.memory), bundle.bandwidth)
    }

    /// Returns the slowdown factor for a miss ratio (0 to 1) and a bandwidth in MB/s.
    pub fn slowdown_with_miss_ratio(&self, misses: f64, bandwidth: f64) -> f64 {
        if misses == 0.0 || self.gamma == 0.0 {
            return 1.0;
        }
        let shortage = if self.wanted > 0.0 { (self.wanted / bandwidth).max(1.0) } else { 1.0 };
        1.0 + misses * self.gamma * shortage
    }

    /// Returns the smallest bundle within the limits whose value does not rise with more of either
    /// good. Memory is determined first, because a tenant without misses needs no bandwidth.
    #[inline(always)]
    fn satiation_bundle(&self, within: &Limits) -> Bundle {
        let last = self.last;
        let useful = if self.gamma == 0.0 { 0.0 } else { last.memory };
        let memory = clamp(useful, within.min.memory, within.max.memory);
        let misses = self.gamma > 0.0 && (last.misses > 0.0 || memory < last.memory);
        let wanted = if misses { self.wanted } else { 0.0 };
        Bundle { memory, bandwidth: clamp(wanted, within.min.bandwidth, within.max.bandwidth) }
    }

    /// Returns the memory size, in MiB, at which a line through `(reach, 0)` is tangent to the
    /// curve.
    #[inline(always)]
    fn tangent_memory(&self, reach: f64, hint: &mut DemandHint) -> f64 {
        // When the price bracket is narrow, most tenants stay at the same knot. The last answer is
        // then still valid, and the curve is not read.
        if reach > hint.lower && reach <= hint.upper {
            return hint.answer;
        }
        self.compute_tangent_memory(reach, hint)
    }

    /// Computes [`Self::tangent_memory`] from the curve and updates `hint`.
    fn compute_tangent_memory(&self, reach: f64, hint: &mut DemandHint) -> f64 {
        let knots = self.curve.knots();
        // The next knot is better if the line through this knot and the next meets the memory axis
        // before `reach`. The intercepts of these lines increase from knot to knot.
        let is_next_better = |at: usize| {
            let (Knot { memory, misses }, next) = (knots[at], knots[at + 1]);
            misses * (next.memory - memory) < (reach - memory) * (misses - next.misses)
        };
        let at = partition_point_near(knots.len() - 1, hint.position as usize, is_next_better);
        // Memory at which the line through a knot and the next meets the memory axis.
        let axis_intercept = |at: usize| {
            let (knot, next) = (knots[at], knots[at + 1]);
            knot.memory + knot.misses * (next.memory - knot.memory) / (knot.misses - next.misses)
        };
        *hint = DemandHint {
            position: u32::try_from(at).unwrap_or(0),
            lower: if at == 0 { f64::NEG_INFINITY } else { axis_intercept(at - 1) },
            upper: if at + 1 == knots.len() { f64::INFINITY } else { axis_intercept(at) },
            answer: knots[at].memory,
        };
        hint.answer
    }
}

/// Clamps a value like `f64::clamp`, but without a check of the bounds. Callers guarantee that
/// `min <= max` and that no argument is NaN.
fn clamp(value: f64, min: f64, max: f64) -> f64 {
    let value = if value < max { value } else { max };
    if value > min { value } else { min }
}

impl Utility for Slowdown {
    fn value(&self, bundle: Bundle) -> f64 {
        self.slowdown(bundle).recip()
    }

    #[inline(always)]
    fn demand(&self, constraint: &BudgetConstraint, within: &Limits, hint: &mut DemandHint) -> Demand {
        let BudgetConstraint { budget, prices } = *constraint;
        let satiation = self.satiation_bundle(within);
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
        // Both quotients are the same for all tenants. The compiler computes them once per round,
        // because this function is inlined into the loop over tenants.
        let (memory_per_cost, bandwidth_per_cost) = (1.0 / prices.memory, 1.0 / prices.bandwidth);
        let affordable_memory = |bandwidth: f64| (budget - prices.bandwidth * bandwidth) * memory_per_cost;
        let max = clamp(affordable_memory(min.bandwidth), 0.0, satiation.memory);
        let memory_with_useful = affordable_memory(useful);
        let low = clamp(memory_with_useful, min.memory, max);
        let memory = clamp(self.tangent_memory(budget * memory_per_cost, hint), low, max);
        let affordable_bandwidth = (budget - prices.memory * memory) * bandwidth_per_cost;
        // If the bandwidth price is near 0, `affordable_bandwidth` is the quotient of two small
        // numbers and less precise than `useful`.
        let bandwidth = if memory == memory_with_useful {
            useful
        } else {
            clamp(affordable_bandwidth, min.bandwidth, useful)
        };
        Demand { bundle: Bundle { memory, bandwidth }, satiated: false }
    }
}
