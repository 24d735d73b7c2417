//! Operating points of both predictions (Pond, section 4.6, Eq. 1). VMs predicted insensitive are
//! placed on the pool whole; of all other VMs, the memory predicted frigid is. Given the measured
//! operating points of each prediction, this module picks the pair that puts most memory on the
//! pool. `frigid::backtest` and `sensitivity::backtest` measure the points.
//!
//! Erratum. Eq. 1 is printed as: maximise LI + FM subject to FP + OP <= X. That adds a share of VMs
//! to a share of memory, counts frigid memory on VMs that are on the pool already, and counts every
//! overprediction as a miss. It would forbid the paper's own operating point (40 % of memory at X =
//! 2 %, section 6.4.3). This module solves the corrected form, with h the share of VMs with a
//! history and r the probability that an overpredicted VM is slowed down beyond the margin:
//!
//! - maximise `pool = h LI + (1 - h LI) FM`
//! - subject to `miss = h FP + (1 - h LI) OP r <= X`
//!
//! It assumes that VMs with a history are as large as others, and that the VMs not placed whole are
//! overpredicted as often as all VMs.

use serde::{Deserialize, Serialize};
use units::Fraction;

/// Operating point of the latency-sensitivity prediction. The default places no workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct InsensitivityPoint {
    /// FP: share of all workloads that are placed wrongly; at most `placed`.
    pub fp: Fraction,
    /// LI: share of all workloads that are placed on the pool whole.
    pub placed: Fraction,
}

/// Operating point of the frigid-memory prediction. The default places no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FrigidPoint {
    /// OP: share of the predicted VMs whose frigid memory is overpredicted.
    pub op: Fraction,
    /// FM: share of the memory of those VMs that is placed on the pool.
    pub share: Fraction,
}

/// Composition of the VM population.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmMix {
    /// h: share of all VMs that have enough history to predict sensitivity. The others are never
    /// placed whole. 0.8 in section 6.1.
    pub history: Fraction,
    /// r: probability that an overpredicted VM is slowed down beyond the margin. About 0.25 for a
    /// margin of 5 % in section 6.5.
    pub exceeds: Fraction,
}

/// Pair of operating points and its expected result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CombinedPoint {
    /// Operating point of the sensitivity prediction.
    pub insensitive: InsensitivityPoint,
    /// Operating point of the frigid-memory prediction, applied to all VMs that are not placed
    /// whole.
    pub frigid: FrigidPoint,
    /// Share of all memory that is on the pool, 0 to 1.
    pub pool: f64,
    /// Share of all VMs expected to be slowed down beyond the margin (scheduling mispredictions), 0
    /// to 1.
    pub miss: f64,
}

impl CombinedPoint {
    /// Computes the expected result of a pair of operating points.
    pub fn new(insensitive: InsensitivityPoint, frigid: FrigidPoint, mix: VmMix) -> Self {
        let (history, exceeds) = (mix.history.get(), mix.exceeds.get());
        let whole = history * insensitive.placed.get();
        Self {
            insensitive,
            frigid,
            pool: whole + (1.0 - whole) * frigid.share.get(),
            miss: history * insensitive.fp.get() + (1.0 - whole) * frigid.op.get() * exceeds,
        }
    }

    /// Returns the tie-breaking key between pairs with the same pool share and misses. It makes the
    /// result independent of the order of the points.
    fn settings(&self) -> [f64; 4] {
        let Self { insensitive, frigid, .. } = self;
        [insensitive.fp, insensitive.placed, frigid.op, frigid.share].map(Fraction::get)
    }
}

/// Returns the pair with the most memory on the pool for which at most `x` of all VMs are expected
/// to be slowed down beyond the margin. Among equals, the pair with the fewest misses is returned.
/// Only measured points are chosen, no interpolation between them. Placing nothing is always
/// allowed, so a result always exists. Points may be in any order and may repeat.
pub fn solve(
    insensitive: &[InsensitivityPoint],
    frigid: &[FrigidPoint],
    mix: VmMix,
    x: Fraction,
) -> CombinedPoint {
    let mut points = frontier(insensitive, frigid, mix);
    let affordable = points.partition_point(|point| point.miss <= x.get());
    points.swap_remove(affordable.checked_sub(1).expect("placing nothing has no misses"))
}

/// Returns the results of [`solve`] for every possible `x`, fewest misses first (the Pareto
/// frontier): each next pair places more and misses more. The first pair places nothing, unless
/// some memory can be placed without a miss. Evaluates every pair of points.
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
        let by_settings = || left.settings().partial_cmp(&right.settings()).expect("shares are numbers");
        left.miss.total_cmp(&right.miss).then(right.pool.total_cmp(&left.pool)).then_with(by_settings)
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
