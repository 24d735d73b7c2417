//! Choice of the operating points of both predictions (Pond, section 4.6, Eq. 1). A VM predicted to
//! be insensitive is placed on the pool entirely. For all other VMs, only the memory predicted to
//! be frigid is placed on the pool. Given the measured operating points of each prediction, this
//! module chooses the pair of points that places the most memory on the pool. `frigid::backtest`
//! and `sensitivity::backtest` measure the points.
//!
//! Erratum. Eq. 1 is printed as: maximize LI + FM subject to FP + OP <= X. This sum adds a fraction
//! of VMs to a fraction of memory. It counts the frigid memory of VMs that are already on the pool,
//! and counts every overprediction as a miss. The printed form would forbid the paper's own
//! operating point (40 % of memory at X = 2 %, section 6.4.3). This module solves the corrected
//! form, where h is the fraction of VMs with a history and r the probability that an overpredicted
//! VM is slowed down beyond the margin:
//!
//! - maximize `pool = h LI + (1 - h LI) FM`
//! - subject to `miss = h FP + (1 - h LI) OP r <= X`
//!
//! The corrected form makes two assumptions: VMs with a history are as large as other VMs, and VMs
//! that are not placed entirely on the pool are overpredicted as often as all VMs.

use serde::{Deserialize, Serialize};
use units::Fraction;

/// Operating point of the latency-sensitivity prediction. The default places no workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct InsensitivityPoint {
    /// FP: fraction of all workloads that are placed on the pool although they are sensitive (false
    /// positives); at most `placed`.
    pub fp: Fraction,
    /// LI: fraction of all workloads that are placed entirely on the pool.
    pub placed: Fraction,
}

/// Operating point of the frigid-memory prediction. The default places no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FrigidPoint {
    /// OP: fraction of the predicted VMs whose frigid memory is overpredicted.
    pub op: Fraction,
    /// FM: fraction of the memory of all predicted VMs that is placed on the pool.
    pub share: Fraction,
}

/// Properties of the whole set of VMs that determine the combined result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmMix {
    /// h: fraction of all VMs that have enough history to predict sensitivity. Other VMs are never
    /// placed entirely on the pool. Pond has 0.8 (section 6.1).
    pub history: Fraction,
    /// r: probability that an overpredicted VM is slowed down beyond the margin. Pond has about
    /// 0.25 for a margin of 5 % (section 6.5).
    pub exceeds: Fraction,
}

/// Pair of operating points, one for each prediction, and its expected result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CombinedPoint {
    /// Operating point of the sensitivity prediction.
    pub insensitive: InsensitivityPoint,
    /// Operating point of the frigid-memory prediction, for all VMs that are not placed entirely on
    /// the pool.
    pub frigid: FrigidPoint,
    /// Expected fraction of all memory that is on the pool, 0 to 1.
    pub pool: f64,
    /// Expected fraction of all VMs that are slowed down beyond the margin (scheduling
    /// mispredictions), 0 to 1.
    pub miss: f64,
}

impl CombinedPoint {
    /// Computes the expected result of a pair of operating points.
    pub fn new(insensitive: InsensitivityPoint, frigid: FrigidPoint, mix: VmMix) -> Self {
        let (history, exceeds) = (mix.history.get(), mix.exceeds.get());
        let placed_whole = history * insensitive.placed.get();
        Self {
            insensitive,
            frigid,
            pool: placed_whole + (1.0 - placed_whole) * frigid.share.get(),
            miss: history * insensitive.fp.get() + (1.0 - placed_whole) * frigid.op.get() * exceeds,
        }
    }

    /// Returns the sort key of pairs with equal `pool` and `miss`. It makes the result independent
    /// of the order of the points.
    fn tie_break_key(&self) -> [f64; 4] {
        let Self { insensitive, frigid, .. } = self;
        [insensitive.fp, insensitive.placed, frigid.op, frigid.share].map(Fraction::get)
    }
}

/// Chooses the pair that places the most memory on the pool, among all pairs with an expected
/// fraction of misses of at most `x`. A miss is a VM that is slowed down beyond the margin. Of
/// several pairs with equal memory, the pair with the fewest misses is chosen. Points are not
/// interpolated. The pair that places nothing is always allowed, so that a result always exists.
/// Points may be in any order and may repeat.
pub fn choose_combination(
    insensitive: &[InsensitivityPoint],
    frigid: &[FrigidPoint],
    mix: VmMix,
    x: Fraction,
) -> CombinedPoint {
    let mut points = frontier(insensitive, frigid, mix);
    let allowed = points.partition_point(|point| point.miss <= x.get());
    points.swap_remove(allowed.checked_sub(1).expect("the pair that places nothing has no misses"))
}

/// Returns the Pareto frontier: the results of [`choose_combination`] for every possible `x`, in ascending order
/// of misses and of memory on the pool. The first pair places nothing, unless some memory can be
/// placed without a miss. Evaluates every pair of points.
pub fn frontier(
    insensitive: &[InsensitivityPoint],
    frigid: &[FrigidPoint],
    mix: VmMix,
) -> Vec<CombinedPoint> {
    let insensitive_points = [InsensitivityPoint::default()].into_iter().chain(insensitive.iter().copied());
    let frigid_points = [FrigidPoint::default()].into_iter().chain(frigid.iter().copied());
    let pairs = insensitive_points.flat_map(|left| frigid_points.clone().map(move |right| (left, right)));
    let mut points: Vec<CombinedPoint> =
        pairs.map(|(left, right)| CombinedPoint::new(left, right, mix)).collect();
    points.sort_unstable_by(|left, right| {
        let by_tie_break_key =
            || left.tie_break_key().partial_cmp(&right.tie_break_key()).expect("fractions are never NaN");
        left.miss.total_cmp(&right.miss).then(right.pool.total_cmp(&left.pool)).then_with(by_tie_break_key)
    });
    let mut pool_max = f64::NEG_INFINITY;
    points.retain(|point| {
        let is_larger = point.pool > pool_max;
        pool_max = pool_max.max(point.pool);
        is_larger
    });
    points
}

#[cfg(test)]
mod tests;
