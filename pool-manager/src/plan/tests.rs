//! Tests of memory splits and their explanations.

use prediction::{
    frigid::{
        FEATURE_COUNT, Groups, QUANTILE_LEVELS, QuantileCurve, RiskLimit, SIZE_CLASSES, SizeBounds,
        VmAssessment, VmRequest,
    },
    operating_point::{OperatingPoint, OperatorLimits},
    sensitivity::Cutoff,
};
use proptest::prelude::*;
use units::UnixMs;

use super::*;
use crate::records::forecast_rows::{ModelPrediction, VmStart};

fn new_fraction(x: f64) -> Fraction {
    Fraction::new(x).unwrap()
}

fn plan_request(memory: Bytes) -> Plan {
    let vm = Name::new("a").unwrap();
    Plan { vm, cores: 2, memory, pinned: false, groups: Groups::default(), counters: None }
}

/// Returns the forecast for a VM without groups and counters while no model is serving.
fn without_models(memory: Bytes) -> VmForecast {
    let request =
        VmRequest { groups: Groups::default(), requested: memory, cores: Some(2.0), begins: UnixMs(0) };
    VmForecast {
        start: VmStart { request, counters: None, prediction: None, pool_only: false },
        assessment: VmAssessment { features: [f64::NAN; FEATURE_COUNT], prediction: None },
        point: OperatingPoint::without_pool(OperatorLimits::default()),
        sensitivity: None,
        serving: [None, None],
    }
}

fn risk_limit(risk_multiplier: Option<f64>, risk_max: f64) -> RiskLimit {
    let size_bounds = SizeBounds([Bytes::gib(4), Bytes::gib(64)]);
    RiskLimit { size_bounds, risk_multipliers: [risk_multiplier; SIZE_CLASSES], risk_max }
}

/// Returns a forecast in which half of the memory is frigid at every risk level.
fn frigid(memory: Bytes) -> VmForecast {
    let mut forecast = without_models(memory);
    let prediction = QuantileCurve::new([0.5; QUANTILE_LEVELS.len()]);
    forecast.assessment.prediction = Some(prediction);
    forecast.start.prediction = Some(ModelPrediction { version: 4, prediction });
    forecast.point.risk_limit = Some(risk_limit(Some(1.0), 0.1));
    forecast.serving = [Some(4), None];
    forecast
}

/// Returns a forecast with this probability of a slowdown. The threshold for insensitive VMs is
/// 0.1.
fn sensitive(memory: Bytes, probability: f64) -> VmForecast {
    let mut forecast = frigid(memory);
    forecast.sensitivity =
        Some(SensitivityPrediction { version: 2, modelled: false, probability, pdm: new_fraction(0.05) });
    forecast.serving = [Some(4), Some(2)];
    forecast.point.cutoff = Some(Cutoff { at_most: 0.1, fp: 0.01, placed: 0.3 });
    forecast
}

#[track_caller]
fn check(forecast: &VmForecast, memory: Bytes, pool_gib: u64, model: &str, because: &str) {
    let decision = decide_split(&plan_request(memory), forecast, new_fraction(0.25));
    assert_eq!((decision.split.pool, decision.model.as_str()), (Bytes::gib(pool_gib), model));
    let why = decision.facts.iter().find(|(name, _)| name == "because").map(|(_, why)| why.as_str()).unwrap();
    assert!(why.contains(because), "{why}");
}

#[test]
fn plan_without_models_uses_the_fixed_share() {
    let of = |gib| without_models(Bytes::gib(gib));
    check(&of(32), Bytes::gib(32), 8, FIXED_SHARE_POLICY, "no model of frigid memory is in use");
    check(&of(7), Bytes::gib(7), 1, FIXED_SHARE_POLICY, "no model");
    check(&of(3), Bytes::gib(3), 0, FIXED_SHARE_POLICY, "no model");
    let mut uncalibrated = frigid(Bytes::gib(8));
    uncalibrated.point.risk_limit = None;
    check(&uncalibrated, Bytes::gib(8), 2, FIXED_SHARE_POLICY, "too few outcomes");
}

#[test]
fn predicted_frigid_memory_is_rounded_down_to_slices() {
    check(&frigid(Bytes::gib(7)), Bytes::gib(7), 3, "frigid/4", "stay untouched");
    check(&frigid(Bytes::mib(1536)), Bytes::mib(1536), 0, "frigid/4", "no slice");
}

#[test]
fn vm_without_forecast_gets_no_pool_memory() {
    let mut of_new_owner = frigid(Bytes::gib(8));
    (of_new_owner.assessment.prediction, of_new_owner.start.prediction) = (None, None);
    check(&of_new_owner, Bytes::gib(8), 0, "frigid/4", "too few VMs of the same owner have ended");
    let mut of_rare_size = frigid(Bytes::gib(8));
    of_rare_size.point.risk_limit = Some(risk_limit(None, 0.1));
    check(&of_rare_size, Bytes::gib(8), 0, "frigid/4", "too few outcomes of VMs of this size");
}

#[test]
fn insensitive_vm_has_only_boot_memory_locally() {
    let of = |probability| sensitive(Bytes::gib(8), probability);
    check(&of(0.1), Bytes::gib(8), 7, "sensitivity/2", "insensitive");
    check(&of(0.11), Bytes::gib(8), 4, "frigid/4", "stay untouched");
    check(&sensitive(Bytes::gib(1), 0.0), Bytes::gib(1), 0, "sensitivity/2", "insensitive");
}

#[test]
fn explanation_contains_request_and_prediction() {
    let mut forecast = sensitive(Bytes::gib(8), 0.3);
    forecast.start.request.groups.key = "acme".to_owned();
    forecast.assessment.features[0] = 8.0;
    let facts = decide_split(&plan_request(Bytes::gib(8)), &forecast, new_fraction(0.25)).facts;
    let value = |name: &str| facts.iter().find(|(fact, _)| fact == name).map(|(_, value)| value.as_str());
    assert_eq!(value("request: key"), Some("acme"));
    assert_eq!(value("request: size"), Some("8GiB, 2 cores"));
    assert_eq!(value("history: key acme"), Some("no VM of this group has ended"));
    assert_eq!(value("features: this VM"), Some("requested_gib 8"));
    assert_eq!(value("features: vm"), None, "unknown features must be omitted");
    assert_eq!(value("model: latency sensitivity"), Some("sensitivity/2"));
    assert_eq!(
        value("prediction: frigid memory taken"),
        Some("50.0 % of the VM's memory before rounding to slices, overpredicted with probability 0.3 %")
    );
    assert_eq!(value("prediction: slowdown on pool memory"), Some("more than 5.0 % with probability 30.0 %"));
    assert!(facts.iter().all(|(name, value)| !name.is_empty() && !value.is_empty()));
}

#[test]
fn explanation_marks_a_model_trained_on_modelled_workloads() {
    let mut forecast = sensitive(Bytes::gib(8), 0.0);
    forecast.sensitivity =
        forecast.sensitivity.map(|prediction| SensitivityPrediction { modelled: true, ..prediction });
    let decision = decide_split(&plan_request(Bytes::gib(8)), &forecast, new_fraction(0.25));
    assert_eq!(decision.model, "sensitivity/2 (trained on MODELLED workloads)");
    let value = decision.facts.iter().find(|(name, _)| name == "model: latency sensitivity").unwrap();
    assert!(value.1.contains("MODELLED"));
}

proptest! {
    #[test]
    fn split_sums_to_the_memory_of_the_vm_with_whole_pool_slices(
        mib in 1..64_u64 << 20, curve in prop::array::uniform15(0.0..=1.0_f64), fixed in 0.0..=1.0_f64,
        multiplier in 0.0..1e3_f64, probability in 0.0..=1.0_f64, has in any::<[bool; 4]>(),
    ) {
        let memory = Bytes::mib(mib);
        let mut forecast = sensitive(memory, probability);
        let prediction = QuantileCurve::new(curve);
        forecast.assessment.prediction = has[0].then_some(prediction);
        forecast.start.prediction = has[0].then_some(ModelPrediction { version: 1, prediction });
        forecast.point.risk_limit = has[1].then_some(risk_limit(has[3].then_some(multiplier), 0.5));
        forecast.sensitivity = forecast.sensitivity.filter(|_| has[2]);
        let Split { local, pool } = decide_split(&plan_request(memory), &forecast, new_fraction(fixed)).split;
        prop_assert_eq!(local.checked_add(pool), Some(memory));
        let slices = pool.as_slices();
        prop_assert!(slices.is_some_and(|slices| slices <= SLICES_PER_VM_MAX));
    }
}
