//! Risk of each share of a VM's memory, and the choice of the share to take. Pond uses the same
//! quantile for every VM, which takes as much risk for 1 GiB as for 100 GiB. The operator limits
//! the number of overpredicted VMs (OP, and with it X, of Eq. 1). Memory is therefore maximised by
//! weighing the GiB gained against the VMs put at risk, with one risk multiplier (Lagrange
//! multiplier, in GiB per VM) for all VMs.

use serde::{Deserialize, Serialize};
use units::{Bytes, Fraction};

use super::history::as_gib;

/// Quantile levels of the model's outputs, ascending.
pub const QUANTILE_LEVELS: [f64; 15] =
    [0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.14, 0.2, 0.3, 0.4, 0.5];
/// Upper bound on the predicted risk of one VM, relative to the target rate of all VMs. It keeps
/// the risk from concentrating on a few VMs.
const RISK_TO_RATE_MAX: f64 = 5.0;

/// Quantiles of the untouched share of a VM's memory, one for each of the [`QUANTILE_LEVELS`],
/// ascending. Taking the share at a level is an overprediction with the probability of that level.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "[f64; QUANTILE_LEVELS.len()]")]
pub struct Curve([f64; QUANTILE_LEVELS.len()]);

/// Limit on the risk that allocations take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RiskLimit {
    /// Risk multiplier λ: GiB that must be gained for each additional overpredicted VM.
    pub risk_multiplier: f64,
    /// Upper bound on the risk of one VM, 0 to 1.
    pub risk_max: f64,
}

/// Share of a VM's memory that is taken, and its risk; both 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RiskAllocation {
    /// Share of the VM's memory.
    pub share: f64,
    /// Predicted probability of an overprediction, times the owner margin.
    pub risk: f64,
}

impl RiskLimit {
    /// Creates the limit for a risk multiplier and a target rate of overpredictions.
    pub fn new(risk_multiplier: f64, rate: Fraction) -> Self {
        Self { risk_multiplier, risk_max: rate.get() * RISK_TO_RATE_MAX }
    }
}

impl From<[f64; QUANTILE_LEVELS.len()]> for Curve {
    fn from(shares: [f64; QUANTILE_LEVELS.len()]) -> Self {
        Self::new(shares)
    }
}

impl Curve {
    /// Creates a curve from a model's outputs. Quantiles may cross and are sorted; NaN becomes 0.
    pub fn new(mut shares: [f64; QUANTILE_LEVELS.len()]) -> Self {
        let share = |value: f64| if value.is_nan() { 0.0 } else { value.clamp(0.0, 1.0) };
        shares.iter_mut().for_each(|value| *value = share(*value));
        shares.sort_unstable_by(f64::total_cmp);
        Self(shares)
    }

    /// Returns the share that maximises the GiB gained less the risk multiplier times the risk; the
    /// default (nothing) if no share is worth its risk. Risks are scaled by the owner margin.
    pub fn allocation(&self, requested: Bytes, risk_limit: RiskLimit, owner_margin: f64) -> RiskAllocation {
        let net_gain = |allocation: &RiskAllocation| {
            as_gib(requested) * allocation.share - risk_limit.risk_multiplier * allocation.risk
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

    /// Returns the share at the quantile level with this index.
    ///
    /// # Panics
    /// Panics if the index is out of range.
    pub fn at_level(&self, level: usize) -> f64 {
        self.0[level]
    }
}
