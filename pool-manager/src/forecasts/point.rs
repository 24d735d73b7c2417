//! Where both forecasts are operated: the two points that put most memory on the pool within what the operator allows (Pond, Eq. 1 as
//! resolved in `prediction::combination`), chosen anew whenever models, outcomes of late or the mix of VMs change.

use prediction::{
    combination::{CombinedPoint, FrigidPoint, InsensitivityPoint, VmMix, solve},
    frigid::{Calibration, RiskLimit},
    sensitivity::Cutoff,
};
use units::Fraction;

/// What the operator allows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// X: share of VMs that may be slowed down beyond the margin.
    pub exceed_max: Fraction,
    /// r: how likely a VM is slowed down beyond it if too much of its memory is on the pool.
    pub overpredicted_exceeds: Fraction,
}

impl Default for Rules {
    /// The paper's (Pond 6.4.3 and 6.5).
    fn default() -> Self {
        let share = |x| Fraction::new(x).expect("a share");
        Self { exceed_max: share(0.02), overpredicted_exceeds: share(0.25) }
    }
}

/// Where both forecasts are operated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// What was chosen, and what is expected of it.
    pub choice: CombinedPoint,
    /// How much risk is taken for frigid memory; none while too few outcomes tell what it costs.
    pub appetite: Option<RiskLimit>,
    /// Who is placed whole; nobody without a model of latency sensitivity.
    pub cut: Option<Cutoff>,
    /// Of VMs of late, those whose counters were known: by VMs or by memory, whichever is more.
    pub history: Fraction,
    /// What it was chosen under.
    pub rules: Rules,
}

/// Rates of overpredictions that are tried.
const RATES: [f64; 14] =
    [0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2];

/// No risk is taken.
const NOTHING: RiskLimit = RiskLimit { risk_multiplier: f64::MAX, risk_max: 0.0 };

impl Point {
    /// Nothing is taken.
    pub fn nothing(rules: Rules) -> Self {
        Self::choose(&Calibration::default(), &[], Fraction::default(), rules)
    }

    /// The best, by what outcomes of late say of each rate, and cuts of those they place.
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
        // Where prices are known and none is worth what is allowed, nothing is taken: that is no want of knowledge.
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

    /// VMs of which a share is forecast that grows with risk, and that leave between nothing and all.
    fn calibration(vms: u32) -> Calibration {
        let mut calibration = Calibration::default();
        for vm in 0..vms {
            let untouched = share(f64::from(vm * 37 % 100) / 100.0);
            let curve = Curve::new(prediction::frigid::QUANTILE_LEVELS);
            let requested = Bytes::gib(u64::from(1 + vm * 61 % 97).pow(2)); // risk is worth it for the largest
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
