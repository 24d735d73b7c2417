//! Choice of the fraction of a VM's memory to allocate from the pool, given the risk of each
//! fraction.
//!
//! Pond uses the same quantile for every VM, and so accepts the same risk for 1 GiB as for 100 GiB.
//! The operator limits the number of overpredicted VMs (OP, and thereby X, of Eq. 1). The gained
//! memory is largest if the gain of each VM in GiB is weighed against its risk, with the same risk
//! multiplier for all VMs: a Lagrange multiplier, in GiB per overpredicted VM.

use serde::{Deserialize, Serialize};
use units::{Bytes, Fraction};

use super::history::to_gib;

/// Quantile levels for which a model predicts the untouched fraction, ascending.
pub const QUANTILE_LEVELS: [f64; 15] =
    [0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.14, 0.2, 0.3, 0.4, 0.5];
/// Largest risk of one VM, as a multiple of the target rate of all VMs. It prevents a
/// concentration of the risk on a few VMs.
const VM_RISK_MULTIPLE_MAX: f64 = 5.0;

/// Predicted quantiles of the untouched fraction of a VM's memory, one for each of
/// [`QUANTILE_LEVELS`], ascending. The probability that a quantile exceeds the actual untouched
/// fraction (an overprediction) is its level.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "[f64; QUANTILE_LEVELS.len()]")]
pub struct QuantileCurve([f64; QUANTILE_LEVELS.len()]);

/// Limit on the risk of allocations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RiskLimit {
    /// Risk multiplier λ: GiB that must be gained for each additional overpredicted VM.
    pub risk_multiplier: f64,
    /// Largest risk of one VM, as a probability.
    pub risk_max: f64,
}

/// Fraction of a VM's memory that is allocated from the pool, and its risk. The default allocates
/// no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RiskAllocation {
    /// Allocated fraction of the VM's memory, 0 to 1.
    pub share: f64,
    /// Predicted probability of an overprediction, multiplied by the owner margin.
    pub risk: f64,
}

impl RiskLimit {
    /// Creates a limit from a risk multiplier and a target rate of overpredictions.
    pub fn new(risk_multiplier: f64, rate: Fraction) -> Self {
        Self { risk_multiplier, risk_max: rate.get() * VM_RISK_MULTIPLE_MAX }
    }
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

    /// Returns the allocation that maximizes the gained GiB minus the product of risk and risk
    /// multiplier. Returns the default, which allocates no memory, if no allocation is worth its
    /// risk. Risks are multiplied by the owner margin.
    pub fn allocation(&self, requested: Bytes, risk_limit: RiskLimit, owner_margin: f64) -> RiskAllocation {
        let net_gain = |allocation: &RiskAllocation| {
            to_gib(requested) * allocation.share - risk_limit.risk_multiplier * allocation.risk
        };
        let allocations = self
            .0
            .iter()
            .zip(QUANTILE_LEVELS)
            .map(|(share, level)| RiskAllocation { share: *share, risk: level * owner_margin });
        let allowed = allocations.take_while(|allocation| allocation.risk <= risk_limit.risk_max);
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
