//! Splits and their explanations.

use prediction::{
    frigid::{Curve, FEATURES, QUANTILE_LEVELS, RiskPrediction, VmAssessment, VmRequest},
    sensitivity::Cutoff,
};
use proptest::prelude::*;
use units::UnixMs;

use super::*;
use crate::forecasts::{Begun, Point, Rules, rows::Remark};

fn share(x: f64) -> Fraction {
    Fraction::new(x).unwrap()
}

fn asked(memory: Bytes) -> Plan {
    let vm = Name::new("a").unwrap();
    Plan { vm, cores: 2, memory, pinned: false, groups: Groups::default(), counters: None }
}

/// A VM without known properties, and no serving model.
fn unforeseen(memory: Bytes) -> Foreseen {
    let ask = VmRequest { groups: Groups::default(), requested: memory, cores: Some(2.0), begins: UnixMs(0) };
    Foreseen {
        begun: Begun { ask, counters: None, remark: None, whole: false },
        known: VmAssessment { features: [f64::NAN; FEATURES], prediction: None },
        point: Point::nothing(Rules::default()),
        sensitivity: None,
        serving: [None, None],
    }
}

/// A model that predicts half of the memory frigid at the lowest risk, at little cost.
fn frigid(memory: Bytes) -> Foreseen {
    let mut foreseen = unforeseen(memory);
    let said = RiskPrediction { curve: Curve::new([0.5; QUANTILE_LEVELS.len()]), owner_margin: 1.0 };
    foreseen.known.prediction = Some(said);
    foreseen.begun.remark = Some(Remark { version: 4, said });
    foreseen.point.appetite = Some(prediction::frigid::RiskLimit { risk_multiplier: 1.0, risk_max: 0.1 });
    foreseen
}

/// A model that predicts a slowdown with this probability, with a threshold of a tenth.
fn sensitive(memory: Bytes, probability: f64) -> Foreseen {
    let mut foreseen = frigid(memory);
    foreseen.sensitivity = Some(Told { version: 2, modelled: false, probability, pdm: share(0.05) });
    foreseen.serving = [Some(4), Some(2)];
    foreseen.point.cut = Some(Cutoff { at_most: 0.1, fp: 0.01, placed: 0.3 });
    foreseen
}

#[track_caller]
fn check(foreseen: &Foreseen, memory: Bytes, pool_gib: u64, model: &str, because: &str) {
    let decided = decide(&asked(memory), foreseen, share(0.25));
    assert_eq!((decided.split.pool, decided.model.as_str()), (Bytes::gib(pool_gib), model));
    let why = decided.facts.iter().find(|(name, _)| name == "because").map(|(_, why)| why.as_str()).unwrap();
    assert!(why.contains(because), "{why}");
}

#[test]
fn where_no_model_knows_a_fixed_share_goes_to_the_pool_in_whole_slices() {
    let of = |gib| unforeseen(Bytes::gib(gib));
    check(&of(32), Bytes::gib(32), 8, FIXED_SHARE, "no model of frigid memory serves");
    check(&of(7), Bytes::gib(7), 1, FIXED_SHARE, "no model");
    check(&of(3), Bytes::gib(3), 0, FIXED_SHARE, "no model");
    let mut unpriced = frigid(Bytes::gib(8));
    unpriced.point.appetite = None;
    check(&unpriced, Bytes::gib(8), 2, FIXED_SHARE, "too few outcomes");
}

#[test]
fn what_is_told_to_stay_untouched_goes_to_the_pool_down_to_whole_slices() {
    check(&frigid(Bytes::gib(7)), Bytes::gib(7), 3, "frigid/4", "stay untouched");
    check(&frigid(Bytes::mib(1536)), Bytes::mib(1536), 0, "frigid/4", "not a slice");
}

#[test]
fn who_does_not_mind_latency_goes_whole_but_for_what_guests_boot_from() {
    let of = |probability| sensitive(Bytes::gib(8), probability);
    check(&of(0.1), Bytes::gib(8), 7, "sensitivity/2", "not to mind");
    check(&of(0.11), Bytes::gib(8), 4, "frigid/4", "stay untouched");
    check(&sensitive(Bytes::gib(1), 0.0), Bytes::gib(1), 0, "sensitivity/2", "not to mind");
}

#[test]
fn facts_name_what_was_known_and_where_forecasts_are_operated() {
    let mut foreseen = sensitive(Bytes::gib(8), 0.3);
    foreseen.begun.ask.groups.key = "acme".to_owned();
    foreseen.known.features[0] = 8.0;
    let facts = decide(&asked(Bytes::gib(8)), &foreseen, share(0.25)).facts;
    let said = |name: &str| facts.iter().find(|(of, _)| of == name).map(|(_, said)| said.as_str());
    assert_eq!(said("told: key"), Some("acme"));
    assert_eq!(said("told: size"), Some("8GiB, 2 cores"));
    assert_eq!(said("known of key acme"), Some("no such VM has ended yet"));
    assert_eq!(said("numbers of itself"), Some("requested_gib 8"));
    assert_eq!(said("numbers of vm"), None, "what is not known is not shown");
    assert_eq!(said("model of sensitivity"), Some("sensitivity/2"));
    assert_eq!(
        said("forecast: taken as untouched"),
        Some("50.0 % of its memory before rounding to slices, too much with a chance of 0.3 %")
    );
    assert_eq!(
        said("forecast: slowed down by pool memory"),
        Some("by more than 5.0 % with a chance of 30.0 %")
    );
    assert!(facts.iter().all(|(name, said)| !name.is_empty() && !said.is_empty()));
}

#[test]
fn a_model_of_modelled_workloads_is_never_named_without_that_word() {
    let mut foreseen = sensitive(Bytes::gib(8), 0.0);
    foreseen.sensitivity = foreseen.sensitivity.map(|told| Told { modelled: true, ..told });
    let decided = decide(&asked(Bytes::gib(8)), &foreseen, share(0.25));
    assert_eq!(decided.model, "sensitivity/2 (made of MODELLED workloads)");
    let said = decided.facts.iter().find(|(name, _)| name == "model of sensitivity").unwrap();
    assert!(said.1.contains("MODELLED"));
}

proptest! {
    #[test]
    fn a_split_is_the_whole_vm_and_the_pools_part_whole_slices(
        mib in 1..64_u64 << 20, curve in prop::array::uniform15(0.0..=1.0_f64), fixed in 0.0..=1.0_f64,
        price in 0.0..1e3_f64, probability in 0.0..=1.0_f64, knows in any::<[bool; 3]>(),
    ) {
        let memory = Bytes::mib(mib);
        let mut foreseen = sensitive(memory, probability);
        let said = RiskPrediction { curve: Curve::new(curve), owner_margin: 1.0 };
        foreseen.known.prediction = knows[0].then_some(said);
        foreseen.begun.remark = knows[0].then_some(Remark { version: 1, said });
        foreseen.point.appetite = knows[1].then_some(prediction::frigid::RiskLimit { risk_multiplier: price, risk_max: 0.5 });
        foreseen.sensitivity = foreseen.sensitivity.filter(|_| knows[2]);
        let Split { local, pool } = decide(&asked(memory), &foreseen, share(fixed)).split;
        prop_assert_eq!(local.checked_add(pool), Some(memory));
        let slices = pool.as_slices();
        prop_assert!(slices.is_some_and(|slices| slices <= SLICES_PER_VM_MAX));
    }
}
