//! Operating point of both predictions: the points that put most memory on the pool within the
//! operator's limits (Pond, Eq. 1 as resolved in `prediction::combination`), chosen again when
//! models, outcomes or the mix of VMs change.

use prediction::{
    combination::{CombinedPoint, FrigidPoint, InsensitivityPoint, VmMix, solve},
    frigid::{Calibration, RiskLimit},
    sensitivity::Cutoff,
};
use units::Fraction;

/// Risk limits of the operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// X: fraction of VMs that may be slowed down beyond the PDM.
    pub exceed_max: Fraction,
    /// r: probability that a VM with overpredicted frigid memory exceeds the PDM.
    pub overpredicted_exceeds: Fraction,
}

impl Default for Rules {
    /// Values of the paper (Pond 6.4.3 and 6.5).
    fn default() -> Self {
        let share = |x| Fraction::new(x).expect("a share");
        Self { exceed_max: share(0.02), overpredicted_exceeds: share(0.25) }
    }
}

/// Operating point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Chosen point, with its expected result.
    pub choice: CombinedPoint,
    /// Risk of frigid predictions; none while there are too few outcomes.
    pub appetite: Option<RiskLimit>,
    /// Threshold of pool-only placements; none without a sensitivity model.
    pub cut: Option<Cutoff>,
    /// Fraction of recent VMs with known counters: by VMs or by memory, the larger one.
    pub history: Fraction,
    /// Limits under which it was chosen.
    pub rules: Rules,
}

/// Candidate rates of overpredictions.
const RATES: [f64; 14] =
    [0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2];

/// Point without risk.
const NOTHING: RiskLimit = RiskLimit { risk_multiplier: f64::MAX, risk_max: 0.0 };

impl Point {
    /// Point without pool memory.
    pub fn nothing(rules: Rules) -> Self {
        Self::choose(&Calibration::default(), &[], Fraction::default(), rules)
    }

    /// Chooses the best point from recent outcomes and thresholds.
    pub fn choose(calibration: &Calibration, cuts: &[Cutoff], history: Fraction, rules: Rules) -> Self {
        let share = |x: f64| Fraction::new(x).expect("a share");
        let rates = RATES.map(share).into_iter();
        let priced = rates.filter_map(|op| Some((op, calibration.risk_limit(op)?)));
        let frigid: Vec<(FrigidPoint, RiskLimit)> = priced
            .map(|(op, appetite)| {
                (FrigidPoint { op, share: share(calibration.slice_share(appetite)) }, appetite)
            })
            .collect();
        let placed = |cut: &Cutoff| InsensitivityPoint { fp: share(cut.fp), placed: share(cut.placed) };
        let insensitive: Vec<InsensitivityPoint> = cuts.iter().map(placed).collect();
        let mix = VmMix { history, exceeds: rules.overpredicted_exceeds };
        let points: Vec<FrigidPoint> = frigid.iter().map(|(point, _)| *point).collect();
        let choice = solve(&insensitive, &points, mix, rules.exceed_max);
        let chosen = frigid.iter().find(|(point, _)| *point == choice.frigid).map(|(_, appetite)| *appetite);
        // Where costs are known and no rate is worth its risk, nothing is taken: this is not a lack
        // of data.
        let appetite = chosen.or_else(|| frigid.first().map(|_| NOTHING));
        let is_chosen = |cut: &&Cutoff| placed(cut) == choice.insensitive;
        let cut = cuts.iter().find(is_chosen).copied();
        Self { choice, appetite, cut, history, rules }
    }
}

#[cfg(test)]
mod tests {
    use prediction::frigid::{CalibrationSample, Curve};
    use units::{Bytes, UnixMs};

    use super::*;

    fn share(x: f64) -> Fraction {
        Fraction::new(x).unwrap()
    }

    /// Returns VMs with a predicted fraction that grows with risk and lies between none and all.
    fn calibration(vms: u32) -> Calibration {
        let mut calibration = Calibration::default();
        for vm in 0..vms {
            let untouched = share(f64::from(vm * 37 % 100) / 100.0);
            let curve = Curve::new(prediction::frigid::QUANTILE_LEVELS);
            let requested = Bytes::gib(u64::from(1 + vm * 61 % 97).pow(2)); // risk pays for the largest VMs only
            let judged =
                CalibrationSample { begins: UnixMs(0), curve, owner_margin: 1.0, requested, untouched };
            calibration.add(None, judged);
        }
        calibration
    }

    const CUTS: [Cutoff; 2] =
        [Cutoff { at_most: 0.1, fp: 0.0, placed: 0.2 }, Cutoff { at_most: 0.4, fp: 0.02, placed: 0.5 }];

    #[test]
    fn without_models_nothing_is_taken() {
        let point = Point::nothing(Rules::default());
        assert_eq!((point.appetite, point.cut, point.choice.pool), (None, None, 0.0));
    }

    #[test]
    fn what_is_expected_to_go_wrong_stays_within_what_is_allowed() {
        for allowed in [0.0, 0.005, 0.02, 0.1] {
            for history in [0.0, 0.3, 1.0] {
                let rules = Rules { exceed_max: share(allowed), ..Rules::default() };
                let point = Point::choose(&calibration(2000), &CUTS, share(history), rules);
                assert!(point.choice.miss <= allowed + 1e-12, "{point:?}");
            }
        }
    }

    #[test]
    fn where_nothing_may_go_wrong_nothing_is_risked_and_that_is_known() {
        let rules = Rules { exceed_max: share(0.0), ..Rules::default() };
        let point = Point::choose(&calibration(2000), &[], share(0.0), rules);
        assert_eq!((point.appetite, point.choice.pool), (Some(NOTHING), 0.0));
    }

    #[test]
    fn vms_whose_counters_are_known_make_room_on_the_pool() {
        let of = |history| Point::choose(&calibration(2000), &CUTS, share(history), Rules::default());
        let (unknown, known) = (of(0.0), of(0.8));
        assert!(unknown.appetite.is_some() && unknown.choice.insensitive.placed == share(0.0), "{unknown:?}");
        assert!(known.cut.is_some() && known.choice.pool > unknown.choice.pool, "{known:?} {unknown:?}");
    }
}
