//! VMs from their plan to their outcome, and persistence of both.

use prediction::{
    file::{Content, ModelFile, Provenance},
    frigid::{
        ModelSource, RiskPrediction,
        backtest::{self, VmSample},
    },
};
use proptest::prelude::*;
use units::limits::{OUTCOMES_RETAINED_MAX, PENDING_PLANS_MAX};

use super::*;

const ID: ReservationId = ReservationId(7);
const HOST: HostId = HostId(1);
const HOUR: u64 = 3_600_000;

fn state() -> State {
    State::new(Rules::default())
}

fn vm(name: &str) -> Name {
    Name::new(name).unwrap()
}

fn ask(name: &str, gib: u64, begins: u64) -> VmRequest {
    let groups = Groups { vm: name.to_owned(), key: "customer".to_owned(), ..Groups::default() };
    VmRequest { groups, requested: Bytes::gib(gib), cores: Some(2.0), begins: UnixMs(begins) }
}

fn begun(name: &str, gib: u64) -> Begun {
    Begun { ask: ask(name, gib, 0), counters: None, remark: None, whole: false }
}

/// Returns a VM of 8 GiB that ended at a time, with a peak of touched memory.
fn ended(number: u64, touched_gib: u64, at: u64) -> Past {
    let mut begun = begun(&format!("vm{number}"), 8);
    begun.ask.begins = UnixMs(at.saturating_sub(1));
    past(begun, Bytes::gib(touched_gib), UnixMs(at), Usage::default()).unwrap()
}

/// Returns a model of VMs that left most of 8 GiB untouched, with its calibration.
fn model(vms: u64) -> ModelFile {
    let stay = |n| {
        let Past { begun, outcome } = ended(n, n % 3, n * HOUR);
        VmSample { request: begun.ask, outcome, is_trusted: true }
    };
    let stays: Vec<VmSample> = (1..=vms).map(stay).collect();
    let trained = backtest::train(&stays, &ModelSource::Trained, &[]).unwrap();
    ModelFile::frigid(Provenance::default(), trained.model, trained.calibration)
}

fn serve(state: &mut State, version: u32) {
    let file = model(600);
    let Content::Frigid { calibration, .. } = file.content.clone() else { unreachable!() };
    state.serve(version, file, calibration, Point::nothing(Rules::default()));
    let basis = state.basis(Rules::default());
    state.set_point(basis.serving, basis.choose());
}

#[test]
fn a_vm_becomes_an_outcome_by_what_its_agent_told_last() {
    let mut state = state();
    state.planned(&vm("a"), begun("a", 8));
    let requested = Bytes::gib(8);
    assert!(state.began(ID, &vm("a"), requested, 2, UnixMs(5)).is_some());
    assert!(state.began(ID, &vm("a"), requested, 2, UnixMs(5)).is_none(), "durable already");
    state.touched(HOST, ID, Bytes::gib(6), UnixMs(8));
    state.touched(HOST, ID, Bytes::gib(2), UnixMs(8));
    let (past, writes) = state.ended(ID, UnixMs(9), true);
    let past = past.unwrap();
    assert_eq!(past.outcome.untouched.get(), 0.25, "the most that it touched counts");
    assert_eq!((past.begun.ask.groups.key.as_str(), past.begun.ask.begins), ("customer", UnixMs(5)));
    assert_eq!(writes.len(), 2, "it is an outcome, and no VM that runs");
    assert_eq!(state.ended(ID, UnixMs(10), true), (None, Vec::new()), "it ends once");
}

#[test]
fn of_a_vm_whose_agent_was_away_to_the_end_nothing_is_learnt() {
    let mut state = state();
    state.began(ID, &vm("a"), Bytes::gib(8), 2, UnixMs(5));
    state.touched(HOST, ID, Bytes::gib(2), UnixMs(8));
    state.forget_peaks(HostId(2));
    state.forget_peaks(HOST);
    let (past, writes) = state.ended(ID, UnixMs(9), true);
    assert_eq!((past, writes.len()), (None, 1));
}

#[test]
fn of_a_vm_that_ran_on_unseen_or_was_cut_off_nothing_is_learnt() {
    for (of_itself, ended, is_learnt) in [(true, 30_008, true), (true, 30_009, false), (false, 9, false)] {
        let mut state = state();
        state.began(ID, &vm("a"), Bytes::gib(8), 2, UnixMs(5));
        state.touched(HOST, ID, Bytes::gib(2), UnixMs(8));
        assert_eq!(state.ended(ID, UnixMs(ended), of_itself).0.is_some(), is_learnt, "{ended}");
    }
}

#[test]
fn what_is_told_of_a_vm_that_has_no_memory_is_not_remembered() {
    let mut state = state();
    state.touched(HOST, ID, Bytes::gib(2), UnixMs(8));
    assert!(state.peaks.is_empty());
}

#[test]
fn outcomes_that_were_not_kept_may_be_told_again() {
    let mut state = state();
    let (number, _) = state.add(ended(1, 2, HOUR)).unwrap();
    state.take_back(&[number]);
    assert_eq!(state.outcomes(), 0);
    assert!(state.add(ended(1, 2, HOUR)).is_some());
}

#[test]
fn a_model_that_serves_no_more_leaves_no_price_of_risk() {
    let mut state = state();
    serve(&mut state, 3);
    assert!(state.point().appetite.is_some());
    state.serve_none(Kind::Frigid, Point::nothing(Rules::default()));
    assert!(state.basis(Rules::default()).choose().appetite.is_none());
}

#[test]
fn a_vm_that_was_never_planned_is_known_by_its_name_and_size() {
    let mut state = state();
    assert!(state.began(ID, &vm("a"), Bytes::gib(4), 2, UnixMs(5)).is_none(), "the ledger has all of it");
    state.touched(HOST, ID, Bytes::gib(1), UnixMs(8));
    let past = state.ended(ID, UnixMs(9), true).0.unwrap();
    assert_eq!((past.begun.ask.groups.vm.as_str(), past.begun.ask.requested), ("a", Bytes::gib(4)));
}

#[test]
fn what_was_said_of_another_size_is_not_held_against_the_vm() {
    let mut state = state();
    serve(&mut state, 3);
    let foreseen = state.foresee(ask("a", 8, 1000 * HOUR), None);
    assert_eq!(foreseen.begun.remark.map(|remark| remark.version), Some(3));
    for (size, is_held) in [(8, true), (9, false)] {
        state.planned(&vm("a"), foreseen.begun.clone());
        state.began(ID, &vm("a"), Bytes::gib(size), 2, UnixMs(1000 * HOUR));
        state.touched(HOST, ID, Bytes::gib(1), UnixMs(1001 * HOUR));
        let before = state.live.calibration().outcomes();
        let past = state.ended(ID, UnixMs(1001 * HOUR + size), true).0.unwrap();
        assert_eq!(past.begun.remark.is_some(), is_held);
        assert_eq!(state.live.calibration().outcomes() - before, usize::from(is_held));
    }
}

#[test]
fn only_what_the_serving_model_said_shows_how_far_it_can_be_trusted() {
    let mut state = state();
    serve(&mut state, 3);
    let before = state.live.calibration().outcomes();
    let said = |version| {
        let curve = prediction::frigid::Curve::new([0.1; 15]);
        let remark = Remark { version, said: RiskPrediction { curve, owner_margin: 1.0 } };
        let mut past = ended(900 + u64::from(version), 1, 900 * HOUR);
        past.begun.remark = Some(remark);
        past
    };
    for version in [2, 3, 4] {
        assert!(state.add(said(version)).is_some());
    }
    assert_eq!(state.live.calibration().outcomes() - before, 1);
}

#[test]
fn the_same_outcome_is_known_once_also_after_a_restart() {
    let mut first = state();
    assert!(first.add(ended(1, 2, HOUR)).is_some() && first.add(ended(1, 2, HOUR)).is_none());
    let mut second = state();
    second.load(1, &ended(1, 2, HOUR));
    assert!(second.add(ended(1, 2, HOUR)).is_none());
    let Some((2, Write::Put { key, .. })) = second.add(ended(2, 2, HOUR)) else { panic!("it is new") };
    assert_eq!(key, 2_u64.to_be_bytes(), "no number is given twice");
}

#[test]
fn outcomes_are_forgotten_when_they_are_too_old_or_too_many() {
    let mut state = state();
    for n in 0..OUTCOMES_RETAINED_MAX as u64 + 3 {
        state.add(ended(n, 2, n + 1));
    }
    assert_eq!(state.forget(UnixMs(0)).len(), 3);
    assert_eq!((state.forget(UnixMs(0)).len(), state.outcomes()), (0, OUTCOMES_RETAINED_MAX));
    let of_five = state.forget(UnixMs(9));
    assert_eq!((of_five.len(), state.outcomes()), (5, OUTCOMES_RETAINED_MAX - 5));
    assert!(state.add(ended(0, 2, 1)).is_some(), "what was forgotten may be told anew");
    assert_eq!(state.forget(UnixMs(9)).len(), 1, "an old one is forgotten though it came last");
}

#[test]
fn plans_that_nobody_follows_are_forgotten_at_last() {
    let mut plans = Plans::default();
    for n in 0..PENDING_PLANS_MAX + 10 {
        plans.add(&vm(&format!("v{n}")), begun("x", 1));
    }
    assert_eq!((plans.by_vm.len(), plans.in_order.len()), (PENDING_PLANS_MAX, PENDING_PLANS_MAX));
    let mut is_planned = |name: &str| plans.take(&vm(name), Bytes::gib(1)).is_some();
    assert!(!is_planned("v9") && is_planned("v10"));
}

#[test]
fn the_share_of_memory_with_counters_is_that_of_the_latest_vms_that_began() {
    let mut plans = Plans::default();
    let with_counters = |name, gib| Begun { counters: Some([0.5; 17]), ..begun(name, gib) };
    let begin = |plans: &mut Plans, name: &str, begun: Begun| {
        let requested = begun.ask.requested;
        plans.add(&vm(name), begun);
        plans.take(&vm(name), requested).unwrap();
    };
    assert_eq!(plans.history().get(), 1.0, "nothing is known yet: the next may have counters");
    begin(&mut plans, "a", begun("a", 24));
    begin(&mut plans, "b", with_counters("b", 8));
    let twos = plans.history().get();
    assert_eq!(twos, 2.0 / 3.0, "one VM of two and the next, though a quarter of the memory");
    (0..3).for_each(|n| plans.add(&vm(&format!("huge{n}")), with_counters("huge", 2048)));
    assert_eq!(plans.history().get(), twos, "a plan that nobody followed changes nothing");
    (0..2000).for_each(|n| begin(&mut plans, &format!("c{n}"), begun("c", 1)));
    assert_eq!(plans.history().get(), 1.0 / 1001.0, "those of long ago do not count");
}

#[test]
fn a_history_that_was_made_of_too_little_is_not_taken() {
    let mut state = state();
    state.add(ended(1, 2, HOUR));
    let is_known = |state: &State| !state.foresee(ask("vm1", 8, 2 * HOUR), None).known.features[3].is_nan();
    state.set_history(History::default(), 1);
    assert!(is_known(&state), "an outcome came after it was made");
    state.set_history(History::default(), state.next_outcome());
    assert!(!is_known(&state));
}

#[test]
fn rows_of_this_version_are_read_by_every_later_one() {
    let golden =
        "0002613108637573746f6d65720000808080802001000000000000004000000000d00f000000000000e83f000000";
    let mut row = begun("a1", 8);
    row.ask.begins = UnixMs(0);
    let past = past(row, Bytes::gib(2), UnixMs(2000), Usage::default()).unwrap();
    let Write::Put { value, .. } = rows::past(1, &past) else { panic!("it is put") };
    let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, golden);
}

proptest! {
    #[test]
    fn any_order_of_events_leaves_a_sound_state(
        events in prop::collection::vec((0..6_u8, 0..8_u64, 0..16_u64), 0..200),
    ) {
        let mut state = state();
        let mut outcomes = 0;
        for (at, (what, id, gib)) in events.into_iter().enumerate() {
            let (name, now) = (vm(&format!("v{id}")), UnixMs(at as u64));
            let id = ReservationId(id);
            match what {
                0 => state.planned(&name, begun(name.as_str(), gib.max(1))),
                1 => drop(state.began(id, &name, Bytes::gib(gib), 1, now)),
                2 => state.touched(HostId((id.0 % 2).try_into().unwrap()), id, Bytes::gib(gib), now),
                3 => state.forget_peaks(HOST),
                4 => {
                    let (past, writes) = state.ended(id, now, gib % 2 == 0);
                    outcomes += usize::from(past.is_some());
                    prop_assert!(writes.len() <= 2);
                    if let Some(past) = past {
                        prop_assert!(past.outcome.ended >= past.begun.ask.begins);
                    }
                }
                _ => drop(state.forget(UnixMs(0))),
            }
        }
        prop_assert_eq!(state.outcomes(), outcomes);
    }
}
