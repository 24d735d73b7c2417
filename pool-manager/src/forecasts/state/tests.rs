//! Tests of VMs from plan to outcome, and of stored outcomes.

use prediction::{
    file::{Content, ModelFile, Provenance},
    frigid::{
        ModelSource,
        backtest::{self, VmSample},
    },
};
use proptest::prelude::*;
use units::limits::{OUTCOMES_RETAINED_MAX, PENDING_PLANS_MAX};

use super::*;
use crate::store::Table;

const ID: ReservationId = ReservationId(7);
const HOST: HostId = HostId(1);
const HOUR: u64 = 3_600_000;

fn state() -> State {
    State::new(OperatorLimits::default())
}

fn vm(name: &str) -> Name {
    Name::new(name).unwrap()
}

fn request(name: &str, gib: u64, begins: u64) -> VmRequest {
    let groups = Groups { vm: name.to_owned(), key: "customer".to_owned(), ..Groups::default() };
    VmRequest { groups, requested: Bytes::gib(gib), cores: Some(2.0), begins: UnixMs(begins) }
}

fn start(name: &str, gib: u64) -> VmStart {
    VmStart { request: request(name, gib, 0), counters: None, prediction: None, pool_only: false }
}

/// Returns a VM of 8 GiB that touched `touched_gib` GiB and ended at `at` milliseconds.
fn ended(number: u64, touched_gib: u64, at: u64) -> EndedVm {
    let mut start = start(&format!("vm{number}"), 8);
    start.request.begins = UnixMs(at.saturating_sub(1));
    new_ended_vm(start, Bytes::gib(touched_gib), UnixMs(at), VmUsage::default()).unwrap()
}

/// Returns a calibrated model that was trained on VMs of 8 GiB that touched at most 2 GiB.
fn model(vms: u64) -> ModelFile {
    let sample = |n| {
        let EndedVm { start, outcome } = ended(n, n % 3, n * HOUR);
        VmSample { request: start.request, outcome, is_trusted: true }
    };
    let samples: Vec<VmSample> = (1..=vms).map(sample).collect();
    let trained = backtest::train(&samples, &ModelSource::Trained, &[]).unwrap();
    ModelFile::frigid(Provenance::default(), trained.model, trained.calibration)
}

fn serve_model(state: &mut State, version: u32) {
    let file = model(600);
    let Content::Frigid { calibration, .. } = file.content.clone() else { unreachable!() };
    state.set_serving_model(
        version,
        file,
        calibration,
        OperatingPoint::without_pool(OperatorLimits::default()),
    );
    let inputs = state.operating_point_inputs(OperatorLimits::default());
    state.set_operating_point(inputs.serving, inputs.choose());
}

#[test]
fn outcome_has_the_highest_reported_peak() {
    let mut state = state();
    state.add_plan(&vm("a"), start("a", 8));
    let requested = Bytes::gib(8);
    assert!(state.record_start(ID, &vm("a"), requested, 2, UnixMs(5)).is_some());
    assert!(
        state.record_start(ID, &vm("a"), requested, 2, UnixMs(5)).is_none(),
        "a second start must not be written"
    );
    state.record_peak(HOST, ID, Bytes::gib(6), UnixMs(8));
    state.record_peak(HOST, ID, Bytes::gib(2), UnixMs(8));
    let (vm, writes) = state.record_end(ID, UnixMs(9), true);
    let vm = vm.unwrap();
    assert_eq!(vm.outcome.untouched.get(), 0.25, "must use the peak of 6 GiB, not the last report of 2 GiB");
    assert_eq!((vm.start.request.groups.key.as_str(), vm.start.request.begins), ("customer", UnixMs(5)));
    assert_eq!(writes.len(), 2, "must write the outcome and delete the running VM");
    assert_eq!(state.record_end(ID, UnixMs(10), true), (None, Vec::new()), "a second end must be ignored");
}

#[test]
fn vm_ending_after_its_agent_disconnected_has_no_outcome() {
    let mut state = state();
    state.record_start(ID, &vm("a"), Bytes::gib(8), 2, UnixMs(5));
    state.record_peak(HOST, ID, Bytes::gib(2), UnixMs(8));
    state.clear_memory_peaks(HostId(2));
    state.clear_memory_peaks(HOST);
    let (vm, writes) = state.record_end(ID, UnixMs(9), true);
    assert_eq!((vm, writes.len()), (None, 1));
}

#[test]
fn vm_with_stale_peak_or_forced_end_has_no_outcome() {
    for (ended_by_itself, ended, is_recorded) in
        [(true, 30_008, true), (true, 30_009, false), (false, 9, false)]
    {
        let mut state = state();
        state.record_start(ID, &vm("a"), Bytes::gib(8), 2, UnixMs(5));
        state.record_peak(HOST, ID, Bytes::gib(2), UnixMs(8));
        assert_eq!(state.record_end(ID, UnixMs(ended), ended_by_itself).0.is_some(), is_recorded, "{ended}");
    }
}

#[test]
fn peak_of_an_unknown_vm_is_ignored() {
    let mut state = state();
    state.record_peak(HOST, ID, Bytes::gib(2), UnixMs(8));
    assert!(state.peaks.is_empty());
}

#[test]
fn outcome_removed_after_a_failed_write_can_be_added_again() {
    let mut state = state();
    let (number, _) = state.add_outcome(ended(1, 2, HOUR)).unwrap();
    state.remove_outcomes(&[number]);
    assert_eq!(state.outcome_count(), 0);
    assert!(state.add_outcome(ended(1, 2, HOUR)).is_some());
}

#[test]
fn operating_point_without_model_has_no_risk_limit() {
    let mut state = state();
    serve_model(&mut state, 3);
    assert!(state.operating_point().risk_limit.is_some());
    state.remove_serving_model(Kind::Frigid, OperatingPoint::without_pool(OperatorLimits::default()));
    assert!(state.operating_point_inputs(OperatorLimits::default()).choose().risk_limit.is_none());
}

#[test]
fn unplanned_vm_is_recorded_with_name_and_size() {
    let mut state = state();
    assert!(
        state.record_start(ID, &vm("a"), Bytes::gib(4), 2, UnixMs(5)).is_none(),
        "a VM without a plan needs no entry"
    );
    state.record_peak(HOST, ID, Bytes::gib(1), UnixMs(8));
    let vm = state.record_end(ID, UnixMs(9), true).0.unwrap();
    assert_eq!((vm.start.request.groups.vm.as_str(), vm.start.request.requested), ("a", Bytes::gib(4)));
}

#[test]
fn prediction_for_another_size_is_not_calibrated() {
    let mut state = state();
    serve_model(&mut state, 3);
    let predict = |state: &State| state.predict(request("a", 8, 1000 * HOUR), None);
    assert_eq!(predict(&state).start.prediction, None, "no VM of the customer has ended");
    state.add_outcome(ended(1, 2, HOUR));
    let forecast = predict(&state);
    assert_eq!(forecast.start.prediction.map(|prediction| prediction.version), Some(3));
    for (size, is_kept) in [(8, true), (9, false)] {
        state.add_plan(&vm("a"), forecast.start.clone());
        state.record_start(ID, &vm("a"), Bytes::gib(size), 2, UnixMs(1000 * HOUR));
        state.record_peak(HOST, ID, Bytes::gib(1), UnixMs(1001 * HOUR));
        let before = state.predictor.calibration().outcomes();
        let vm = state.record_end(ID, UnixMs(1001 * HOUR + size), true).0.unwrap();
        assert_eq!(vm.start.prediction.is_some(), is_kept);
        assert_eq!(state.predictor.calibration().outcomes() - before, usize::from(is_kept));
    }
}

#[test]
fn only_predictions_of_the_serving_model_are_calibrated() {
    let mut state = state();
    serve_model(&mut state, 3);
    let before = state.predictor.calibration().outcomes();
    let vm = |version| {
        let curve = prediction::frigid::QuantileCurve::new([0.1; 15]);
        let prediction = ModelPrediction { version, prediction: curve };
        let mut vm = ended(900 + u64::from(version), 1, 900 * HOUR);
        vm.start.prediction = Some(prediction);
        vm
    };
    for version in [2, 3, 4] {
        assert!(state.add_outcome(vm(version)).is_some());
    }
    assert_eq!(state.predictor.calibration().outcomes() - before, 1);
}

#[test]
fn duplicate_outcome_is_rejected_also_after_a_restart() {
    let mut first = state();
    assert!(first.add_outcome(ended(1, 2, HOUR)).is_some() && first.add_outcome(ended(1, 2, HOUR)).is_none());
    let mut second = state();
    second.load_outcome(1, &ended(1, 2, HOUR));
    assert!(second.add_outcome(ended(1, 2, HOUR)).is_none());
    let Some((2, Write::Put { key, .. })) = second.add_outcome(ended(2, 2, HOUR)) else {
        panic!("not added")
    };
    assert_eq!(key, 2_u64.to_be_bytes(), "the number of a loaded outcome must not be reused");
}

#[test]
fn outcomes_expire_by_age_and_by_number() {
    let mut state = state();
    for n in 0..OUTCOMES_RETAINED_MAX as u64 + 3 {
        state.add_outcome(ended(n, 2, n + 1));
    }
    assert_eq!(state.expire_outcomes(UnixMs(0)).len(), 3);
    assert_eq!((state.expire_outcomes(UnixMs(0)).len(), state.outcome_count()), (0, OUTCOMES_RETAINED_MAX));
    let expired = state.expire_outcomes(UnixMs(9));
    assert_eq!((expired.len(), state.outcome_count()), (5, OUTCOMES_RETAINED_MAX - 5));
    assert!(state.add_outcome(ended(0, 2, 1)).is_some(), "an expired outcome must be accepted again");
    assert_eq!(
        state.expire_outcomes(UnixMs(9)).len(),
        1,
        "must expire by the end of the VM, not by the order of addition"
    );
}

#[test]
fn oldest_unused_plans_are_dropped() {
    let mut plans = Plans::default();
    for n in 0..PENDING_PLANS_MAX + 10 {
        plans.add(&vm(&format!("v{n}")), start("x", 1));
    }
    assert_eq!((plans.by_vm.len(), plans.in_order.len()), (PENDING_PLANS_MAX, PENDING_PLANS_MAX));
    let mut is_planned = |name: &str| plans.remove_plan(&vm(name), Bytes::gib(1)).is_some();
    assert!(!is_planned("v9") && is_planned("v10"));
}

#[test]
fn counters_fraction_counts_recently_started_vms() {
    let mut plans = Plans::default();
    let with_counters = |name, gib| VmStart { counters: Some([0.5; 17]), ..start(name, gib) };
    let admit = |plans: &mut Plans, name: &str, start: VmStart| {
        let requested = start.request.requested;
        plans.add(&vm(name), start);
        plans.remove_plan(&vm(name), requested).unwrap();
    };
    assert_eq!(plans.counters_fraction().get(), 1.0, "must be 1 before the first VM");
    admit(&mut plans, "a", start("a", 24));
    admit(&mut plans, "b", with_counters("b", 8));
    let two_vms = plans.counters_fraction().get();
    assert_eq!(two_vms, 2.0 / 3.0, "the fraction by number is larger than by memory");
    (0..3).for_each(|n| plans.add(&vm(&format!("huge{n}")), with_counters("huge", 2048)));
    assert_eq!(plans.counters_fraction().get(), two_vms, "unused plans must not count");
    (0..2000).for_each(|n| admit(&mut plans, &format!("c{n}"), start("c", 1)));
    assert_eq!(plans.counters_fraction().get(), 1.0 / 1001.0, "VMs before the window must not count");
}

#[test]
fn outdated_history_is_discarded() {
    let mut state = state();
    state.add_outcome(ended(1, 2, HOUR));
    let has_history =
        |state: &State| !state.predict(request("vm1", 8, 2 * HOUR), None).assessment.features[3].is_nan();
    state.set_history(OutcomeHistory::default(), 1);
    assert!(has_history(&state), "the history is outdated: an outcome was added since");
    state.set_history(OutcomeHistory::default(), state.next_outcome_number());
    assert!(!has_history(&state));
}

#[test]
fn outcome_row_encoding_is_stable() {
    let golden =
        "0102613108637573746f6d65720000808080802001000000000000004000000000d00f000000000000e83f000000";
    let mut row = start("a1", 8);
    row.request.begins = UnixMs(0);
    let vm = new_ended_vm(row, Bytes::gib(2), UnixMs(2000), VmUsage::default()).unwrap();
    let Write::Put { value, .. } = forecast_rows::put_outcome(1, &vm) else { panic!("not a Put") };
    let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, golden);
    // Without a prediction, a row of format version 1 differs only in the version.
    let version_1 = [&[0], &value[1..]].concat();
    assert!(forecast_rows::check_row(Table::Outcomes, &[0; 8], &version_1).is_ok());
}

proptest! {
    #[test]
    fn outcome_count_equals_ended_vms_for_any_order_of_events(
        events in prop::collection::vec((0..6_u8, 0..8_u64, 0..16_u64), 0..200),
    ) {
        let mut state = state();
        let mut outcomes = 0;
        for (at, (event, id, gib)) in events.into_iter().enumerate() {
            let (name, now) = (vm(&format!("v{id}")), UnixMs(at as u64));
            let id = ReservationId(id);
            match event {
                0 => state.add_plan(&name, start(name.as_str(), gib.max(1))),
                1 => drop(state.record_start(id, &name, Bytes::gib(gib), 1, now)),
                2 => state.record_peak(HostId((id.0 % 2).try_into().unwrap()), id, Bytes::gib(gib), now),
                3 => state.clear_memory_peaks(HOST),
                4 => {
                    let (vm, writes) = state.record_end(id, now, gib % 2 == 0);
                    outcomes += usize::from(vm.is_some());
                    prop_assert!(writes.len() <= 2);
                    if let Some(vm) = vm {
                        prop_assert!(vm.outcome.ended >= vm.start.request.begins);
                    }
                }
                _ => drop(state.expire_outcomes(UnixMs(0))),
            }
        }
        prop_assert_eq!(state.outcome_count(), outcomes);
    }
}
