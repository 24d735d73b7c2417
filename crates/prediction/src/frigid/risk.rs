//! Choice of the fraction of a VM's memory to allocate from the pool, given the risk of each
//! fraction.
//!
//! Pond uses the same quantile for every VM, and so accepts the same risk for 1 GiB as for 100 GiB.
//! The operator limits the number of overpredicted VMs (OP, and thereby X, of Eq. 1). The gained
//! memory is largest if the gain of each VM in GiB is weighed against its risk, with the same risk
//! multiplier for all VMs: a Lagrange multiplier, in GiB per overpredicted VM. Each size class has
//! its own risk multiplier, so that the risk is not concentrated on the large VMs.

use serde::{Deserialize, Serialize};
use units::{Bytes, Fraction};

use super::history::{OwnerHistory, to_gib};

/// Quantile levels for which a model predicts the untouched fraction, ascending.
pub const QUANTILE_LEVELS: [f64; 15] =
    [0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.14, 0.2, 0.3, 0.4, 0.5];
/// Largest risk of one VM, as a multiple of the target rate of all VMs. It prevents a
/// concentration of the risk on a few VMs.
const VM_RISK_MULTIPLE_MAX: f64 = 3.0;
/// Highest quantile level that is limited by the lowest untouched fraction of the owner's VMs.
/// Higher levels are limited by the 10th percentile.
const LOWEST_LEVEL_MAX: f64 = 0.1;
/// Predicted fractions are multiples of the reciprocal. Peaks of similar VMs differ by less than
/// this, so that a forecast that equals the lowest fraction so far would often be too high.
const SHARE_STEPS: f64 = 128.0;
/// Number of size classes, by requested memory. Each has its own risk multiplier.
pub const SIZE_CLASSES: usize = 3;

/// Predicted quantiles of the untouched fraction of a VM's memory, one for each of
/// [`QUANTILE_LEVELS`], ascending. The probability that a quantile exceeds the actual untouched
/// fraction (an overprediction) is its level.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "[f64; QUANTILE_LEVELS.len()]")]
pub struct QuantileCurve([f64; QUANTILE_LEVELS.len()]);

/// Division of VMs into [`SIZE_CLASSES`] by requested memory: lower bound of each class except the
/// first, ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeBounds(pub [Bytes; SIZE_CLASSES - 1]);

impl SizeBounds {
    /// Returns the bounds that divide VMs with these requested sizes into thirds. VMs of equal size
    /// are in the same class. Returns `None` if there is no VM.
    pub fn thirds(mut sizes: Vec<Bytes>) -> Option<Self> {
        sizes.sort_unstable();
        let bound = |class: usize| sizes[class * sizes.len() / SIZE_CLASSES];
        (!sizes.is_empty()).then(|| Self(std::array::from_fn(|at| bound(at + 1))))
    }

    /// Returns the index of the size class of a VM.
    pub fn class(&self, requested: Bytes) -> usize {
        self.0.partition_point(|bound| *bound <= requested)
    }
}

/// Limit on the risk of allocations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RiskLimit {
    /// Division of VMs into size classes.
    pub size_bounds: SizeBounds,
    /// Risk multiplier λ of each size class: GiB that must be gained for each additional
    /// overpredicted VM. `None` for a class with too few outcomes.
    pub risk_multipliers: [Option<f64>; SIZE_CLASSES],
    /// Largest risk of one VM, as a probability.
    pub risk_max: f64,
}

/// Fraction of a VM's memory that is allocated from the pool, and its risk. The default allocates
/// no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RiskAllocation {
    /// Allocated fraction of the VM's memory, 0 to 1.
    pub share: f64,
    /// Predicted probability of an overprediction.
    pub risk: f64,
}

impl RiskAllocation {
    /// Returns the allocated fraction of the VM's memory.
    pub fn to_fraction(&self) -> Fraction {
        Fraction::new(self.share).expect("an allocated share is a fraction")
    }
}

impl RiskLimit {
    /// Returns the risk multiplier of a VM's size class, or `None` if the class has too few
    /// outcomes.
    pub fn risk_multiplier(&self, requested: Bytes) -> Option<f64> {
        self.risk_multipliers[self.size_bounds.class(requested)]
    }
}

/// Returns whether a predicted fraction of a VM's memory is more than the VM left untouched, in whole
/// bytes.
pub(super) fn is_overprediction(predicted: Fraction, requested: Bytes, untouched: Fraction) -> bool {
    predicted.of(requested) > untouched.of(requested)
}

/// Returns the largest risk of one VM for a target rate of overpredictions.
pub(super) fn vm_risk_max(rate: Fraction) -> f64 {
    rate.get() * VM_RISK_MULTIPLE_MAX
}

impl From<[f64; QUANTILE_LEVELS.len()]> for QuantileCurve {
    fn from(shares: [f64; QUANTILE_LEVELS.len()]) -> Self {
        Self::new(shares)
    }
}

impl QuantileCurve {
    /// Creates a curve from the outputs of a model. The outputs are clamped to 0 to 1 and sorted,
    /// because predicted quantiles may cross. NaN becomes 0.
    pub fn new(mut shares: [f64; QUANTILE_LEVELS.len()]) -> Self {
        let share = |value: f64| if value.is_nan() { 0.0 } else { value.clamp(0.0, 1.0) };
        shares.iter_mut().for_each(|value| *value = share(*value));
        shares.sort_unstable_by(f64::total_cmp);
        Self(shares)
    }

    /// Limits the curve by the owner's history. Levels of at most 10 % are at most the lowest
    /// untouched fraction of the owner's ended VMs, and higher levels are at most the 10th
    /// percentile of the latest of these VMs. A model trained on other owners can be wrong for all
    /// VMs of a new owner. The limits apply as soon as one of these VMs has ended. Rounds the curve
    /// down to multiples of 1 / [`SHARE_STEPS`].
    pub(super) fn limited_by(mut self, owner: OwnerHistory) -> Self {
        for (share, level) in self.0.iter_mut().zip(QUANTILE_LEVELS) {
            let limited = share.min(if level <= LOWEST_LEVEL_MAX { owner.lowest } else { owner.tenth });
            *share = (limited * SHARE_STEPS).floor() / SHARE_STEPS;
        }
        self
    }

    /// Returns the allocation under a risk limit, or `None` if the VM's size class has too few
    /// outcomes.
    pub fn allocation(&self, requested: Bytes, risk_limit: &RiskLimit) -> Option<RiskAllocation> {
        let risk_multiplier = risk_limit.risk_multiplier(requested)?;
        Some(self.maximize_net_gain(requested, risk_multiplier, risk_limit.risk_max))
    }

    /// Returns the allocation that maximizes the gained GiB minus the product of risk and risk
    /// multiplier. Returns the default, which allocates no memory, if no allocation is worth its
    /// risk.
    pub(super) fn maximize_net_gain(
        &self,
        requested: Bytes,
        risk_multiplier: f64,
        risk_max: f64,
    ) -> RiskAllocation {
        let net_gain = |allocation: &RiskAllocation| {
            to_gib(requested) * allocation.share - risk_multiplier * allocation.risk
        };
        let allocations = self
            .0
            .iter()
            .zip(QUANTILE_LEVELS)
            .map(|(share, level)| RiskAllocation { share: *share, risk: level });
        let allowed = allocations.take_while(|allocation| allocation.risk <= risk_max);
        allowed.fold(RiskAllocation::default(), |best, allocation| {
            if net_gain(&allocation) > net_gain(&best) { allocation } else { best }
        })
    }

    /// Returns the untouched fraction at the quantile level with this index in [`QUANTILE_LEVELS`].
    ///
    /// # Panics
    /// Panics if the index is out of range.
    pub fn untouched_at_level(&self, level: usize) -> f64 {
        self.0[level]
    }
}
