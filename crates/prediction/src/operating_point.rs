//! Chooses the operating point of both predictions: the point that puts the most memory on the pool
//! within the operator's limits (Pond, Eq. 1, solved in [`combination`](crate::combination)). The point
//! is chosen again when models, outcomes or the mix of VMs change. Also computes the pool memory of a
//! VM from its predictions.

use units::{Bytes, Fraction};

use crate::{
    combination::{CombinedPoint, FrigidPoint, InsensitivityPoint, VmMix, choose_combination},
    frigid::{Calibration, QuantileCurve, RiskAllocation, RiskLimit, SIZE_CLASSES, SizeBounds},
    sensitivity::Cutoff,
};

/// Limits in section `[prediction]` of `rack.toml`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OperatorLimits {
    /// Largest fraction of VMs that may be slowed down beyond the PDM; X in the paper.
    pub exceed_max: Fraction,
    /// Probability, r, that a VM with overpredicted frigid memory is slowed down beyond the PDM.
    pub overpredicted_exceeds: Fraction,
}

impl Default for OperatorLimits {
    /// Returns the values of the paper (Pond, sections 6.4.3 and 6.5).
    fn default() -> Self {
        let share = |x| Fraction::new(x).expect("a fraction");
        Self { exceed_max: share(0.02), overpredicted_exceeds: share(0.25) }
    }
}

/// Risk limits and thresholds of the predictions, with the expected result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OperatingPoint {
    /// Combination of both predictions, with its expected result.
    pub choice: CombinedPoint,
    /// Risk limit for predictions of frigid memory; `None` while there are too few outcomes.
    pub risk_limit: Option<RiskLimit>,
    /// Threshold for placing a VM on pool memory only; `None` without a model of latency
    /// sensitivity.
    pub cutoff: Option<Cutoff>,
    /// Fraction of recent VMs with performance counters: the larger of the fractions by number and
    /// by memory.
    pub counters_fraction: Fraction,
    /// Limits that applied when the point was chosen.
    pub limits: OperatorLimits,
}

/// Candidate target rates of overpredictions, as fractions of VMs.
const CANDIDATE_RATES: [f64; 14] =
    [0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2];

/// Risk limit that allows no memory to be predicted as frigid.
const NO_RISK: RiskLimit = RiskLimit {
    size_bounds: SizeBounds([Bytes::ZERO; SIZE_CLASSES - 1]),
    risk_multipliers: [Some(f64::MAX); SIZE_CLASSES],
    risk_max: 0.0,
};

impl OperatingPoint {
    /// Returns the operating point without models. This point uses no pool memory.
    pub fn without_pool(limits: OperatorLimits) -> Self {
        Self::choose(&Calibration::default(), &[], Fraction::default(), limits)
    }

    /// Chooses the point with the most pool memory within the limits. `calibration` contains recent
    /// outcomes, and `cutoffs` are the thresholds of the model of latency sensitivity.
    pub fn choose(
        calibration: &Calibration,
        cutoffs: &[Cutoff],
        counters_fraction: Fraction,
        limits: OperatorLimits,
    ) -> Self {
        let share = |x: f64| Fraction::new(x).expect("a fraction");
        let rates = CANDIDATE_RATES.map(share).into_iter();
        let limited = rates.filter_map(|op| Some((op, calibration.risk_limit(op)?)));
        let frigid: Vec<(FrigidPoint, RiskLimit)> = limited
            .map(|(op, risk_limit)| {
                (FrigidPoint { op, share: share(calibration.slice_share(&risk_limit)) }, risk_limit)
            })
            .collect();
        let insensitive: Vec<InsensitivityPoint> = cutoffs.iter().map(Cutoff::operating_point).collect();
        let mix = VmMix { history: counters_fraction, exceeds: limits.overpredicted_exceeds };
        let points: Vec<FrigidPoint> = frigid.iter().map(|(point, _)| *point).collect();
        let choice = choose_combination(&insensitive, &points, mix, limits.exceed_max);
        let chosen =
            frigid.iter().find(|(point, _)| *point == choice.frigid).map(|(_, risk_limit)| *risk_limit);
        // If there are enough outcomes but no rate is within the limits, no risk is allowed. With
        // too few outcomes the risk is unknown, and there is no risk limit.
        let risk_limit = chosen.or_else(|| frigid.first().map(|_| NO_RISK));
        let is_chosen = |cutoff: &&Cutoff| cutoff.operating_point() == choice.insensitive;
        let cutoff = cutoffs.iter().find(is_chosen).copied();
        Self { choice, risk_limit, cutoff, counters_fraction, limits }
    }
}

/// Local memory of a VM that is placed on pool memory only. The guest needs it to boot, and a NUMA
/// node with CPUs must have memory.
pub const POOL_ONLY_LOCAL_MEMORY: Bytes = Bytes::mib(512);

/// Returns the pool memory of a VM that is placed on pool memory only.
pub const fn pool_only_memory(memory: Bytes) -> Bytes {
    memory.saturating_sub(POOL_ONLY_LOCAL_MEMORY)
}

impl OperatingPoint {
    /// Returns whether a VM with this predicted probability of being slowed down beyond the margin is
    /// placed on pool memory only.
    pub fn is_pool_only(&self, probability: f64) -> bool {
        self.cutoff.is_some_and(|cutoff| probability <= cutoff.at_most)
    }

    /// Returns the frigid memory of a VM that is allocated from the pool, given its predicted quantiles.
    /// Returns `None` without a prediction, or if there were too few outcomes for the VM's size.
    pub fn frigid_allocation(&self, memory: Bytes, curve: Option<QuantileCurve>) -> Option<RiskAllocation> {
        self.risk_limit.zip(curve).and_then(|(risk_limit, curve)| curve.allocation(memory, &risk_limit))
    }
}

#[cfg(test)]
mod tests {
    use units::UnixMs;

    use super::*;
    use crate::frigid::{CalibrationSample, QUANTILE_LEVELS, QuantileCurve};

    fn share(x: f64) -> Fraction {
        Fraction::new(x).unwrap()
    }

    /// Returns the calibration of VMs with untouched fractions spread evenly from 0 to 1.
    fn calibration(vms: u32) -> Calibration {
        let mut calibration = Calibration::default();
        for vm in 0..vms {
            let untouched = share(f64::from(vm * 37 % 100) / 100.0);
            let curve = QuantileCurve::new(QUANTILE_LEVELS);
            let requested = Bytes::gib(u64::from(1 + vm * 61 % 97).pow(2)); // only the largest VMs gain enough memory for their risk
            let owner = format!("owner {vm}");
            calibration.add(CalibrationSample { begins: UnixMs(0), owner, curve, requested, untouched });
        }
        calibration
    }

    const CUTOFFS: [Cutoff; 2] =
        [Cutoff { at_most: 0.1, fp: 0.0, placed: 0.2 }, Cutoff { at_most: 0.4, fp: 0.02, placed: 0.5 }];

    #[test]
    fn point_without_models_uses_no_pool() {
        let point = OperatingPoint::without_pool(OperatorLimits::default());
        assert_eq!((point.risk_limit, point.cutoff, point.choice.pool), (None, None, 0.0));
    }

    #[test]
    fn expected_slowdowns_are_within_the_limit() {
        for allowed in [0.0, 0.005, 0.02, 0.1] {
            for counters_fraction in [0.0, 0.3, 1.0] {
                let limits = OperatorLimits { exceed_max: share(allowed), ..OperatorLimits::default() };
                let point =
                    OperatingPoint::choose(&calibration(2000), &CUTOFFS, share(counters_fraction), limits);
                assert!(point.choice.miss <= allowed + 1e-12, "{point:?}");
            }
        }
    }

    #[test]
    fn limit_of_zero_allows_no_risk() {
        let limits = OperatorLimits { exceed_max: share(0.0), ..OperatorLimits::default() };
        let point = OperatingPoint::choose(&calibration(2000), &[], share(0.0), limits);
        assert_eq!((point.risk_limit, point.choice.pool), (Some(NO_RISK), 0.0));
    }

    #[test]
    fn vms_with_counters_increase_the_pool_fraction() {
        let of = |counters_fraction| {
            OperatingPoint::choose(
                &calibration(2000),
                &CUTOFFS,
                share(counters_fraction),
                OperatorLimits::default(),
            )
        };
        let (without_counters, with_counters) = (of(0.0), of(0.8));
        assert!(
            without_counters.risk_limit.is_some() && without_counters.choice.insensitive.placed == share(0.0),
            "{without_counters:?}"
        );
        assert!(
            with_counters.cutoff.is_some() && with_counters.choice.pool > without_counters.choice.pool,
            "{with_counters:?} {without_counters:?}"
        );
    }
}
