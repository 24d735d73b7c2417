//! Scenario tests of the ledger, one invariant each. The tests in [`properties`] use random
//! sequences of decisions.

mod boundaries;
mod ended;
mod numbers;
mod process;
mod properties;
mod rehome;
mod removed_emc;
mod slowdowns;

use units::limits::{
    MIGRATION_REQUEST_RETRY_AFTER, REQUEST_ID_RETENTION, RESERVATIONS_PER_HOST_MAX, SLICES_MAX,
};
use units::{Epoch, RequestId, UserId};

use super::*;
use crate::{
    audit::ExclusionReason,
    protocol::{Holding, ObservedVm, ScrubReport},
    record::{
        EndReason, Fence, MigrationAnswer, MigrationKind, Rehome, RequestKey, Scheduling, Slowdown,
        SlowdownEstimate,
    },
    rejection::Rejection,
    slice::{DrainStage, Event, Owner, Quarantine},
};

const COMMIT_TIMEOUT: Ns = Ns::secs(300);

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn at(seconds: u64) -> When {
    When { now: Ns::secs(seconds), wall: UnixMs(1_000_000 + seconds * 1000) }
}

fn tester() -> Actor {
    Actor::Client(name("tester"))
}

impl RackSpec {
    /// Parses a rack such as `e1=4 e2=8 h1:e1+e2`: EMCs with their number of slices, and hosts with
    /// their attached EMCs. Every host has 16 cores and 64 GiB of local memory.
    pub(crate) fn parse(text: &str) -> Self {
        let mut rack = Self::default();
        for word in text.split_whitespace() {
            if let Some((emc, slices)) = word.split_once('=') {
                let (driver, path) = ("emulated".to_owned(), format!("/{emc}"));
                // An EMC that cannot revoke access is written `e1=4!`.
                let (slices, serial) = match slices.strip_suffix('!') {
                    Some(slices) => (slices, Some(format!("0x{}", &emc[1..]))),
                    None => (slices, None),
                };
                let slices = slices.parse().unwrap();
                rack.emcs.push(EmcSpec { name: name(emc), slices, driver, path, serial });
            } else {
                let (host, emcs) = word.split_once(':').unwrap();
                let emcs = emcs.split('+').filter(|emc| !emc.is_empty()).map(name).collect();
                rack.hosts.push(HostSpec { name: name(host), cores: 16, local: Bytes::gib(64), emcs });
            }
        }
        rack
    }
}

fn reserve_request(vm: &str, host: &str, slices: u32) -> Reserve {
    Reserve {
        request: RequestKey { client: name("tester"), id: RequestId::new(vm).unwrap() },
        host: name(host),
        vm: name(vm),
        slices,
        local: Bytes::gib(1),
        cores: 1,
        pinned: false,
        commit_within: COMMIT_TIMEOUT,
        uid: None,
    }
}

fn user(uid: u32) -> Option<UserId> {
    Some(UserId::new(uid).unwrap())
}

/// Ledger under test, and the records that its store would contain.
struct Rack {
    ledger: Ledger,
    disk: BTreeMap<Key, Record>,
}

impl Rack {
    fn new(text: &str) -> Self {
        let mut rack = Self { ledger: Ledger::new(Meta::new("rack".to_owned())), disk: BTreeMap::new() };
        rack.configure(text).unwrap();
        rack
    }

    fn apply(&mut self, change: Change) {
        for record in self.ledger.apply(change) {
            match record {
                Record::Deleted(key) => drop(self.disk.remove(&key)),
                record => drop(self.disk.insert(record.key(), record)),
            }
        }
    }

    fn configure(&mut self, text: &str) -> Result<(), Rejection> {
        let change = self.ledger.decide_configuration(at(0), &RackSpec::parse(text))?;
        self.apply(change);
        Ok(())
    }

    fn reserve(&mut self, request: Reserve) -> Result<ReservationId, Rejection> {
        match self.ledger.decide_reserve(at(1), request)? {
            ReserveOutcome::Repeat(id) => Ok(id),
            ReserveOutcome::New(id, change) => {
                self.apply(change);
                Ok(id)
            }
        }
    }

    /// Reserves slices for a VM and returns their numbers.
    fn reserve_slices(&mut self, vm: &str, host: &str, slices: u32) -> Vec<u32> {
        let id = self.reserve(reserve_request(vm, host, slices)).unwrap();
        self.ledger.reservation(id).unwrap().slices.iter().map(|s| s.0).collect()
    }

    fn end_reservation(&mut self, id: ReservationId, why: EndReason) {
        let change = self.ledger.decide_reservation_end(at(2), id, why, tester()).unwrap();
        self.apply(change);
    }

    fn set_scheduling(&mut self, place: SchedulingTarget, to: Scheduling) {
        let change = self.ledger.decide_scheduling(at(2), &place, to, tester(), "why").unwrap();
        self.apply(change);
    }

    fn apply_slice_event(&mut self, slice: u32, event: Event) {
        let change =
            self.ledger.decide_slice_change(SliceId(slice), event).expect("the slice accepts the event");
        self.apply(change);
    }

    /// Moves a reserved slice to the online state.
    fn bring_slice_online(&mut self, slice: u32) {
        let slot = self.slot(slice);
        self.apply_slice_event(slice, Event::Granted(slot.epoch));
        self.apply_slice_event(slice, Event::Onlined(slot.holder().unwrap(), slot.epoch));
    }

    fn slot(&self, slice: u32) -> Slot {
        self.ledger.slot(SliceId(slice)).unwrap()
    }

    fn host(&self, host: &str) -> &HostEntry {
        &self.ledger.hosts[&self.ledger.find_host_by_name(&name(host)).unwrap()]
    }

    fn emc(&self, emc: &str) -> &EmcEntry {
        &self.ledger.emcs[&self.ledger.find_emc_by_name(&name(emc)).unwrap()]
    }

    /// Returns the latest decision.
    fn last_decision(&self) -> &DecisionKind {
        let last = self.disk.values().rev().find_map(|record| match record {
            Record::Decision(_, decision) => Some(&decision.what),
            _ => None,
        });
        last.expect("the ledger recorded a decision")
    }
}

fn release_reason() -> EndReason {
    EndReason::Released { force: false, reason: String::new() }
}

#[test]
fn repeated_request_returns_same_reservation() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let id = rack.reserve(reserve_request("a", "h1", 2)).unwrap();
    assert_eq!(rack.reserve(reserve_request("a", "h1", 2)), Ok(id));
    rack.end_reservation(id, release_reason());
    assert_eq!(
        rack.reserve(reserve_request("a", "h1", 2)),
        Ok(id),
        "the request is repeated after the reservation ended"
    );
    assert_eq!(rack.ledger.reservations.len(), 1);
}

#[test]
fn rejection_of_a_reused_request_id_names_the_changed_field() {
    let mut rack = Rack::new("e1=4 h1:e1 h2:e1");
    let first = reserve_request("a", "h1", 2);
    rack.reserve(first.clone()).unwrap();
    let others = [
        ("vm", Reserve { vm: name("b"), ..first.clone() }),
        ("host", Reserve { host: name("h2"), ..first.clone() }),
        ("pool_bytes", Reserve { slices: 3, ..first.clone() }),
        ("local_bytes", Reserve { local: Bytes::gib(2), ..first.clone() }),
        ("cores", Reserve { cores: 2, ..first.clone() }),
        ("pinned", Reserve { pinned: true, ..first.clone() }),
        ("commit_within_ms", Reserve { commit_within: Ns::secs(1), ..first.clone() }),
        ("uid", Reserve { uid: user(2001), ..first.clone() }),
    ];
    for (field, other) in others {
        let Err(Rejection::RequestReused { differs, .. }) = rack.reserve(other) else { panic!("{field}") };
        assert_eq!(differs, field);
    }
    let other_client = RequestKey { client: name("other"), id: first.request.id.clone() };
    rack.reserve(Reserve { vm: name("b"), request: other_client, ..first }).unwrap();
}

#[test]
fn vm_has_one_active_reservation() {
    let mut rack = Rack::new("e1=4 h1:e1 h2:e1");
    let id = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    let again = |request: &str| {
        let base = reserve_request("a", "h2", 1);
        Reserve { request: RequestKey { id: RequestId::new(request).unwrap(), ..base.request }, ..base }
    };
    let denied = Rejection::VmAlreadyReserved { vm: name("a"), reservation: id, host: name("h1") };
    assert_eq!(rack.reserve(again("two")), Err(denied));
    rack.end_reservation(id, release_reason());
    assert_eq!(rack.reserve(again("three")), Ok(ReservationId(id.0 + 1)));
}

#[test]
fn slices_come_from_the_emc_with_the_most_free_slices() {
    let mut rack = Rack::new("e1=4 e2=6 e3=2 h1:e1+e2+e3");
    assert_eq!(rack.reserve_slices("a", "h1", 3), [4, 5, 6]);
    assert_eq!(rack.reserve_slices("b", "h1", 2), [0, 1], "e1 now has the most free slices");
    let DecisionKind::Reserved { taken, others, .. } = rack.last_decision() else { panic!() };
    assert_eq!(taken, &[(name("e1"), 2, 4)]);
    assert_eq!(others, &[(name("e2"), 3, ExclusionReason::Fuller), (name("e3"), 2, ExclusionReason::Fuller)]);
}

#[test]
fn emc_with_as_many_free_slices_is_reported_as_tied() {
    let mut rack = Rack::new("e1=4 e2=4 e3=3 h1:e1+e2+e3");
    assert_eq!(rack.reserve_slices("a", "h1", 2), [0, 1]);
    let DecisionKind::Reserved { others, .. } = rack.last_decision() else { panic!() };
    assert_eq!(others, &[(name("e2"), 4, ExclusionReason::Tied), (name("e3"), 3, ExclusionReason::Fuller)]);
}

#[test]
fn slices_span_as_few_emcs_as_possible() {
    let mut rack = Rack::new("e1=4 e2=6 e3=2 h1:e1+e2+e3");
    assert_eq!(rack.reserve_slices("a", "h1", 7), [0, 4, 5, 6, 7, 8, 9]);
    let DecisionKind::Reserved { others, .. } = rack.last_decision() else { panic!() };
    assert_eq!(others, &[(name("e3"), 2, ExclusionReason::TooSmall)]);
}

#[test]
fn host_receives_slices_only_from_attached_emcs() {
    let mut rack = Rack::new("e1=4 e2=8 h1:e1 h2:e2");
    assert_eq!(rack.reserve_slices("a", "h1", 4), [0, 1, 2, 3]);
    let denied = Rejection::OutOfSlices { host: name("h1"), requested: 1, free: 0, closed: Vec::new() };
    assert_eq!(rack.reserve(reserve_request("b", "h1", 1)), Err(denied));
    assert_eq!(rack.reserve_slices("c", "h2", 1), [4]);
}

#[test]
fn cordoned_draining_or_failed_emc_is_excluded() {
    for stop in [ExclusionReason::Cordoned, ExclusionReason::Draining, ExclusionReason::Failed] {
        let mut rack = Rack::new("e1=8 e2=4 h1:e1+e2");
        match stop {
            ExclusionReason::Cordoned => {
                rack.set_scheduling(SchedulingTarget::Emc(name("e1")), Scheduling::Cordoned)
            }
            ExclusionReason::Draining => {
                rack.set_scheduling(SchedulingTarget::Emc(name("e1")), Scheduling::Draining)
            }
            _ => rack.ledger.set_emc_up(rack.ledger.find_emc_by_name(&name("e1")).unwrap(), false),
        }
        assert_eq!(rack.reserve_slices("a", "h1", 1), [8], "{stop}");
        let denied = rack.reserve(reserve_request("b", "h1", 5)).unwrap_err().to_string();
        let expected = format!("host h1 can reach 3 free slices, 5 needed; not counted: 8 on e1 ({stop})");
        assert_eq!(denied, expected);
    }
}

#[test]
fn cordoned_draining_or_fenced_host_rejects_reservations() {
    let mut rack = Rack::new("e1=8 h1:e1");
    for (to, why) in [(Scheduling::Cordoned, "cordoned"), (Scheduling::Draining, "draining")] {
        rack.set_scheduling(SchedulingTarget::Host(name("h1")), to);
        let denied = Rejection::HostNotSchedulable { host: name("h1"), why };
        assert_eq!(rack.reserve(reserve_request("a", "h1", 0)), Err(denied));
    }
    rack.set_scheduling(SchedulingTarget::Host(name("h1")), Scheduling::Enabled);
    let fence = rack.ledger.decide_fence(at(1), HostId(0), false, tester(), "why");
    rack.apply(fence);
    let denied = Rejection::HostNotSchedulable { host: name("h1"), why: "being fenced" };
    assert_eq!(rack.reserve(reserve_request("a", "h1", 0)), Err(denied));
}

#[test]
fn exhausted_resource_is_rejected_with_its_numbers() {
    let mut rack = Rack::new("e1=4 h1:e1");
    rack.reserve(Reserve { cores: 10, local: Bytes::gib(60), ..reserve_request("a", "h1", 1) }).unwrap();
    let cores = rack.reserve(Reserve { cores: 7, ..reserve_request("b", "h1", 0) });
    assert_eq!(cores, Err(Rejection::OutOfCores { host: name("h1"), requested: 7, free: 6 }));
    let local = rack.reserve(Reserve { local: Bytes::gib(5), ..reserve_request("b", "h1", 0) });
    let free = Bytes::gib(4);
    assert_eq!(local, Err(Rejection::OutOfLocal { host: name("h1"), requested: Bytes::gib(5), free }));
    let slices = rack.reserve(reserve_request("b", "h1", 4));
    assert_eq!(
        slices,
        Err(Rejection::OutOfSlices { host: name("h1"), requested: 4, free: 3, closed: Vec::new() })
    );
    assert_eq!(rack.reserve(reserve_request("b", "h9", 1)), Err(Rejection::NoSuchHost(name("h9"))));
}

#[test]
fn reservations_per_host_are_limited_regardless_of_size() {
    let mut rack = Rack::new("e1=4 h1:e1 h2:e1");
    let small = |n: usize, host| Reserve {
        cores: 0,
        local: Bytes::ZERO,
        ..reserve_request(&format!("v{n}"), host, 0)
    };
    for n in 0..RESERVATIONS_PER_HOST_MAX {
        rack.reserve(small(n, "h1")).unwrap();
    }
    let denied =
        Rejection::LimitExceeded { what: "reservations on one host", max: RESERVATIONS_PER_HOST_MAX as u64 };
    assert_eq!(rack.reserve(small(RESERVATIONS_PER_HOST_MAX, "h1")), Err(denied));
    rack.reserve(small(RESERVATIONS_PER_HOST_MAX, "h2")).unwrap();
    rack.end_reservation(ReservationId(1), release_reason());
    rack.reserve(small(RESERVATIONS_PER_HOST_MAX + 1, "h1")).unwrap();
}

#[test]
fn ended_vm_is_found_by_name_until_pruned_or_reused() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let target = Target::Vm(name("a"));
    assert_eq!(rack.ledger.find(&target), Err(Rejection::NoSuchVm(name("a"))));
    let first = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    rack.end_reservation(first, release_reason());
    assert_eq!(rack.ledger.find(&target), Ok(first), "a repeated release finds its reservation");
    let request =
        RequestKey { id: RequestId::new("another").unwrap(), ..reserve_request("a", "h1", 1).request };
    let second = rack.reserve(Reserve { request, ..reserve_request("a", "h1", 1) }).unwrap();
    assert_eq!(rack.ledger.find(&target), Ok(second));
    rack.end_reservation(second, release_reason());
    assert_eq!(rack.ledger.find(&target), Ok(second), "the newer of two ended reservations is found");
    for id in [second, first] {
        rack.apply(Change(vec![Record::Deleted(Key::Reservation(id))]));
    }
    assert_eq!(rack.ledger.find(&target), Err(Rejection::NoSuchVm(name("a"))));
}

#[test]
fn repeated_commit_and_release_change_nothing() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let id = rack.reserve(reserve_request("a", "h1", 2)).unwrap();
    let commit = rack.ledger.decide_commit(at(2), id, tester()).unwrap();
    rack.apply(commit);
    assert_eq!(rack.ledger.next_expiry(), None, "a committed reservation has no deadline");
    assert_eq!(rack.ledger.decide_commit(at(3), id, tester()), Ok(Change::default()));
    rack.bring_slice_online(0);
    rack.end_reservation(id, release_reason());
    assert_eq!(
        rack.ledger.decide_reservation_end(at(3), id, release_reason(), tester()),
        Ok(Change::default())
    );
    let Err(Rejection::WrongState { .. }) = rack.ledger.decide_commit(at(3), id, tester()) else { panic!() };
    assert!(matches!(rack.slot(0).state, State::Draining(_, DrainStage::Host { force: false })));
    rack.end_reservation(id, EndReason::Released { force: true, reason: String::new() });
    assert!(
        matches!(rack.slot(0).state, State::Draining(_, DrainStage::Host { force: true })),
        "a forced release changes the drain"
    );
    let unknown = ReservationId(99);
    assert_eq!(
        rack.ledger.decide_reservation_end(at(3), unknown, release_reason(), tester()),
        Err(Rejection::NoSuchReservation(unknown))
    );
}

#[test]
fn uncommitted_reservation_is_overdue_at_its_deadline() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let id = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    let deadline = at(1).now.after(COMMIT_TIMEOUT);
    assert_eq!(rack.ledger.next_expiry(), Some(deadline));
    let before = When { now: Ns(deadline.0 - 1), ..at(1) };
    assert_eq!(rack.ledger.overdue_reservations(before, 9), []);
    assert_eq!(rack.ledger.overdue_reservations(When { now: deadline, ..at(1) }, 9), [id]);
    rack.end_reservation(id, EndReason::Deadline);
    assert_eq!(rack.ledger.overdue_reservations(When { now: deadline, ..at(1) }, 9), []);
}

#[test]
fn ended_request_is_kept_for_retention_and_while_slices_drain() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let (a, b) = (
        rack.reserve(reserve_request("a", "h1", 1)).unwrap(),
        rack.reserve(reserve_request("b", "h1", 0)).unwrap(),
    );
    rack.bring_slice_online(0);
    rack.end_reservation(a, release_reason());
    rack.end_reservation(b, release_reason());
    let later = |more| When { now: at(2).now.after(REQUEST_ID_RETENTION).after(Ns(more)), ..at(2) };
    let gone =
        |ids: &[ReservationId]| Change(ids.iter().map(|id| Record::Deleted(Key::Reservation(*id))).collect());
    assert_eq!(rack.ledger.decide_pruning(When { now: Ns(later(0).now.0 - 1), ..at(2) }, 9), gone(&[]));
    assert_eq!(rack.ledger.decide_pruning(later(0), 9), gone(&[b]), "reservation a has a draining slice");
    rack.apply_slice_event(0, Event::Released(HostId(0), Epoch(1)));
    rack.apply_slice_event(0, Event::Revoked(Epoch(1)));
    assert_eq!(rack.ledger.decide_pruning(later(0), 9), gone(&[a, b]));
    assert_eq!(rack.ledger.decide_pruning(later(0), 1), gone(&[a]), "the limit is one reservation");
    let change = rack.ledger.decide_pruning(later(0), 9);
    rack.apply(change);
    assert_ne!(
        rack.reserve(reserve_request("a", "h1", 1)),
        Ok(a),
        "a deleted request id creates a new reservation"
    );
}

#[test]
fn rack_grows_while_in_use() {
    let mut rack = Rack::new("e1=4 h1:e1");
    rack.reserve(reserve_request("a", "h1", 4)).unwrap();
    rack.configure("e1=4 e2=4 h1:e1+e2 h2:e2").unwrap();
    assert_eq!(rack.reserve_slices("b", "h1", 1), [4]);
    assert_eq!(rack.reserve_slices("c", "h2", 3), [5, 6, 7]);
    assert_eq!(
        rack.ledger.decide_configuration(at(3), &RackSpec::parse("e1=4 e2=4 h1:e1+e2 h2:e2")),
        Ok(Change::default())
    );
}

#[test]
fn configuration_cannot_remove_parts_in_use() {
    let mut rack = Rack::new("e1=4 e2=4 h1:e1+e2 h2:e2");
    let id = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    let refused = |rack: &mut Rack, text: &str| match rack.configure(text) {
        Err(Rejection::NotDrained { what, .. } | Rejection::ImmutableField { what, .. }) => what,
        other => panic!("{text}: {other:?}"),
    };
    assert_eq!(refused(&mut rack, "e2=4 h1:e2 h2:e2"), "emc e1");
    assert_eq!(refused(&mut rack, "e1=4 e2=4 h2:e2"), "host h1");
    assert_eq!(refused(&mut rack, "e1=4 e2=4 h1:e2 h2:e2"), "an attachment of host h1");
    assert_eq!(refused(&mut rack, "e1=5 e2=4 h1:e1+e2 h2:e2"), "slices of emc e1");
    rack.configure("e1=4 h1:e1").expect("the second host and EMC are not in use");
    rack.end_reservation(id, release_reason());
    rack.apply_slice_event(0, Event::Revoked(Epoch(1)));
    assert_eq!(refused(&mut rack, "e2=4 h1:e2"), "emc e1", "a slice of e1 waits for a scrub");
    rack.configure("e1=4 e3=4 h2:e1+e3").expect("the host has no slices");
    assert_eq!(rack.reserve_slices("b", "h2", 4), [8, 9, 10, 11], "slice numbers are not reused");
}

#[test]
fn configuration_beyond_the_limits_is_rejected() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let slices = u64::from(SLICES_MAX);
    let too_many = rack.configure(&format!("e1=4 e2={SLICES_MAX} h1:e1"));
    assert_eq!(too_many, Err(Rejection::LimitExceeded { what: "slices", max: slices }));
    assert_eq!(rack.configure("e1=4 h1:e2"), Err(Rejection::NoSuchEmc(name("e2"))));
}

#[test]
fn drain_requests_migrations_and_enable_withdraws_them() {
    let mut rack = Rack::new("e1=4 e2=4 h1:e1+e2 h2:e2");
    let a = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    let b = rack.reserve(reserve_request("b", "h2", 1)).unwrap();
    let migrating = |rack: &Rack| rack.ledger.migrations().map(|(id, _)| id).collect::<Vec<_>>();
    rack.set_scheduling(SchedulingTarget::Emc(name("e1")), Scheduling::Draining);
    assert_eq!(migrating(&rack), [a]);
    rack.set_scheduling(SchedulingTarget::Host(name("h2")), Scheduling::Draining);
    assert_eq!(migrating(&rack), [a, b]);
    let answer = |vm: &str| {
        rack.ledger.decide_migration(
            at(3),
            (&name(vm), None),
            MigrationAnswer::Accepted,
            "soon".into(),
            tester(),
        )
    };
    assert_eq!(answer("c"), Err(Rejection::NoSuchMigration { vm: name("c"), id: None }));
    let (id, change) = answer("a").unwrap();
    assert_eq!(id, MigrationKind::Drain.of(a));
    rack.apply(change);
    assert_eq!(rack.ledger.migrations[&MigrationKind::Drain.of(a)].answer, MigrationAnswer::Accepted);
    rack.set_scheduling(SchedulingTarget::Host(name("h2")), Scheduling::Enabled);
    assert_eq!(migrating(&rack), [a]);
    rack.end_reservation(a, release_reason());
    assert_eq!(migrating(&rack), [], "an ended VM has no migration");
}

#[test]
fn vm_under_two_drains_has_one_migration_until_both_end() {
    let mut rack = Rack::new("e1=4 e2=4 h1:e1+e2");
    let a = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    rack.set_scheduling(SchedulingTarget::Host(name("h1")), Scheduling::Draining);
    let (_, accepted) = rack
        .ledger
        .decide_migration(at(3), (&name("a"), None), MigrationAnswer::Accepted, "soon".into(), tester())
        .unwrap();
    rack.apply(accepted);
    rack.set_scheduling(SchedulingTarget::Emc(name("e1")), Scheduling::Draining);
    assert_eq!(
        rack.ledger.migrations[&MigrationKind::Drain.of(a)].answer,
        MigrationAnswer::Accepted,
        "the answer remains accepted under the second drain"
    );
    rack.set_scheduling(SchedulingTarget::Host(name("h1")), Scheduling::Enabled);
    let asked = &rack.ledger.migrations[&MigrationKind::Drain.of(a)];
    assert_eq!((asked.why.as_str(), asked.answer), ("emc e1 is draining", MigrationAnswer::Accepted));
    rack.set_scheduling(SchedulingTarget::Emc(name("e1")), Scheduling::Cordoned);
    assert_eq!(rack.ledger.migrations().count(), 0, "a cordon requests no migration");
}

#[test]
fn repeated_answer_changes_nothing() {
    let mut rack = Rack::new("e1=4 h1:e1");
    rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    rack.set_scheduling(SchedulingTarget::Host(name("h1")), Scheduling::Draining);
    let answer = |rack: &Rack, explanation: &str| {
        let answer = MigrationAnswer::Accepted;
        rack.ledger
            .decide_migration(at(3), (&name("a"), None), answer, explanation.into(), tester())
            .unwrap()
            .1
    };
    let accepted = answer(&rack, "soon");
    assert_ne!(accepted, Change::default());
    rack.apply(accepted);
    assert_eq!(answer(&rack, "soon"), Change::default());
    assert_ne!(answer(&rack, "later"), Change::default());
}

#[test]
fn declined_migration_is_requested_again_after_the_delay() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let a = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    rack.set_scheduling(SchedulingTarget::Host(name("h1")), Scheduling::Draining);
    let (_, declined) = rack
        .ledger
        .decide_migration(at(3), (&name("a"), None), MigrationAnswer::Declined, "busy".into(), tester())
        .unwrap();
    rack.apply(declined);
    let due = at(3).now.after(MIGRATION_REQUEST_RETRY_AFTER);
    assert_eq!(rack.ledger.next_migration_retry(), Some(due));
    let early = When { now: Ns(due.0 - 1), ..at(4) };
    assert_eq!(rack.ledger.decide_migration_retry(early, 9), Change::default());
    let again = rack.ledger.decide_migration_retry(When { now: due, ..at(4) }, 9);
    rack.apply(again);
    let asked = &rack.ledger.migrations[&MigrationKind::Drain.of(a)];
    assert_eq!((asked.answer, asked.explanation.as_str()), (MigrationAnswer::Open, ""));
    assert_eq!(rack.ledger.next_migration_retry(), None);
}

#[test]
fn fence_ends_reservations_and_slices_wait_for_the_device() {
    let mut rack = Rack::new("e1=4 e2=4 h1:e1+e2 h2:e1");
    let id = rack.reserve(reserve_request("a", "h1", 5)).unwrap();
    (0..5).for_each(|slice| rack.bring_slice_online(slice));
    let fence = rack.ledger.decide_fence(at(3), HostId(0), false, tester(), "why");
    rack.apply(fence);
    assert!(!rack.ledger.reservation(id).unwrap().is_active());
    assert!(
        matches!(rack.slot(0).state, State::Draining(_, DrainStage::Host { .. })),
        "slices change only after an EMC confirmed the fence"
    );
    let again = rack.ledger.decide_fence(at(4), HostId(0), false, tester(), "why");
    assert_eq!(again, Change::default());
    let confirmed = rack.ledger.decide_fence_confirmation(at(3), HostId(0), EmcId(0));
    rack.apply(confirmed);
    assert!(matches!(rack.slot(0).state, State::Draining(_, DrainStage::Revoking)));
    assert!(
        matches!(rack.slot(4).state, State::Draining(_, DrainStage::Host { .. })),
        "slices of the other EMC are unchanged"
    );
    assert!(rack.host("h1").host.unwired_fences.is_empty(), "both EMCs are attached to the host");
}

#[test]
fn fenced_host_returns_after_a_restart_or_a_clean_report() {
    for is_confirmed in [true, false] {
        let mut rack = Rack::new("e1=4 h1:e1");
        let report = |rack: &mut Rack, boot: &str, clean| {
            let change = rack.ledger.decide_agent_identity(at(3), HostId(0), boot, clean);
            rack.apply(change);
            rack.host("h1").host.fence
        };
        let fence = |rack: &mut Rack| {
            let fence = rack.ledger.decide_fence(at(3), HostId(0), false, tester(), "why");
            rack.apply(fence);
            if is_confirmed {
                let confirmed = rack.ledger.decide_fence_confirmation(at(3), HostId(0), EmcId(0));
                rack.apply(confirmed);
            }
            rack.host("h1").host.fence
        };
        report(&mut rack, "b1", false);
        let fenced = fence(&mut rack);
        assert_eq!(fenced, if is_confirmed { Fence::Fenced } else { Fence::Fencing { powered_off: false } });
        assert_eq!(report(&mut rack, "b1", false), fenced);
        assert_eq!(report(&mut rack, "b1", true), Fence::None);
        fence(&mut rack);
        assert_eq!(report(&mut rack, "b2", false), Fence::None);
        let unconfirmed_fences = &rack.host("h1").host.unconfirmed_fences;
        assert_eq!(
            unconfirmed_fences.contains(&EmcId(0)),
            !is_confirmed,
            "an unconfirmed EMC remains listed"
        );
    }
}

/// A restored ledger may lack the connection between the host and the EMC.
#[test]
fn grant_found_after_a_fence_must_be_fenced_by_its_emc() {
    let mut rack = Rack::new("e1=2 e2=2 h1:e1");
    let find_grant = |rack: &mut Rack, slice| {
        let why = Event::Quarantine(Quarantine::UnknownGrant { host: HostId(0) });
        let change = rack.ledger.decide_quarantine(at(3), SliceId(slice), why, "").unwrap();
        rack.apply(change);
        let host = &rack.host("h1").host;
        (host.fence, host.unconfirmed_fences.iter().copied().collect::<Vec<_>>())
    };
    assert_eq!(find_grant(&mut rack, 1), (Fence::None, vec![]));
    let fence = rack.ledger.decide_fence(at(3), HostId(0), false, tester(), "why");
    rack.apply(fence);
    let confirmed = rack.ledger.decide_fence_confirmation(at(3), HostId(0), EmcId(0));
    rack.apply(confirmed);
    assert_eq!(find_grant(&mut rack, 0), (Fence::Fenced, vec![]), "e1 has fenced the host");
    assert_eq!(find_grant(&mut rack, 2), (Fence::Fencing { powered_off: false }, vec![EmcId(1)]));
}

#[test]
fn returned_host_receives_nothing_from_an_unconfirmed_emc() {
    let mut rack = Rack::new("e1=2 e2=2 h1:e1+e2");
    let report = rack.ledger.decide_agent_identity(at(3), HostId(0), "b1", false);
    rack.apply(report);
    let fence = rack.ledger.decide_fence(at(3), HostId(0), false, tester(), "why");
    rack.apply(fence);
    let confirmed = rack.ledger.decide_fence_confirmation(at(3), HostId(0), EmcId(0));
    rack.apply(confirmed);
    let report = rack.ledger.decide_agent_identity(at(4), HostId(0), "b2", false);
    rack.apply(report);
    let Rejection::OutOfSlices { free: 2, closed, .. } =
        rack.reserve(reserve_request("a", "h1", 3)).unwrap_err()
    else {
        panic!("e2 has not confirmed the fence")
    };
    assert_eq!(closed, [(name("e2"), 2, ExclusionReason::FenceUnconfirmed)]);
    let confirmed = rack.ledger.decide_fence_confirmation(at(5), HostId(0), EmcId(1));
    rack.apply(confirmed);
    rack.reserve(reserve_request("a", "h1", 3)).unwrap();
}

/// Records of earlier versions do not list the EMCs that must confirm a fence. The loaded fence
/// must therefore wait for every EMC.
#[test]
fn fence_stored_by_an_earlier_version_waits_for_every_emc() {
    let mut rack = Rack::new("e1=4 e2=4 h1:e1+e2");
    let fence = rack.ledger.decide_fence(at(3), HostId(0), false, tester(), "why");
    rack.apply(fence);
    let mut host = rack.host("h1").host.clone();
    host.unconfirmed_fences.clear();
    let emcs = rack.ledger.emcs().map(|(id, entry)| Record::Emc(id, entry.emc.clone()));
    let records: Vec<_> = emcs.chain([Record::Host(HostId(0), host)]).collect();
    let loaded = Ledger::load(rack.ledger.meta().clone(), records);
    assert_eq!(loaded.host(HostId(0)).unwrap().host, rack.host("h1").host);
}

#[test]
fn power_off_is_confirmed_for_host_being_fenced() {
    let mut rack = Rack::new("e1=4 h1:e1");
    for powered_off in [false, true] {
        let fence = rack.ledger.decide_fence(at(3), HostId(0), powered_off, tester(), "why");
        rack.apply(fence);
        assert_eq!(rack.host("h1").host.fence, Fence::Fencing { powered_off });
    }
}

#[test]
fn uncommitted_broken_reservation_still_ends_at_its_deadline() {
    for (commits, overdue) in [(false, 1), (true, 0)] {
        let mut rack = Rack::new("e1=4 h1:e1");
        let id = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
        let deadline = rack.ledger.reservation(id).unwrap().stage.deadline().unwrap();
        if commits {
            let change = rack.ledger.decide_commit(at(1), id, tester()).unwrap();
            rack.apply(change);
        }
        let change = rack.ledger.decide_reservation_break(at(1), id, "a slice did not come online".into());
        rack.apply(change);
        for ledger in [&rack.ledger, &Ledger::load(rack.ledger.meta().clone(), rack.disk.values().cloned())] {
            assert_eq!(ledger.overdue_reservations(When { now: deadline, ..at(1) }, 9).len(), overdue);
        }
        rack.end_reservation(id, EndReason::Deadline);
        assert_eq!(rack.ledger.overdue_reservations(When { now: deadline, ..at(1) }, 9), []);
    }
}

#[test]
fn quarantined_slice_breaks_its_reservation_until_requalified() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let id = rack.reserve(reserve_request("a", "h1", 2)).unwrap();
    rack.apply_slice_event(0, Event::Granted(Epoch(1)));
    let dirty = Event::FoundDirty(HostId(0), Epoch(1));
    let change = rack.ledger.decide_quarantine(at(2), SliceId(0), dirty, "byte 7").unwrap();
    rack.apply(change);
    let Stage::Broken { why, .. } = &rack.ledger.reservation(id).unwrap().stage else { panic!() };
    assert_eq!(why, "slice 0 is quarantined: it was not zeroed when its host received it: byte 7");
    assert_eq!((rack.emc("e1").free(), rack.emc("e1").quarantined()), (2, 1));
    let refused = rack.ledger.decide_requalification(at(3), SliceId(2), tester(), "why");
    assert!(matches!(refused, Err(Rejection::SliceWrongState { state: "free", .. })));
    rack.set_scheduling(SchedulingTarget::Slice(SliceId(0)), Scheduling::Enabled);
    assert_eq!((rack.emc("e1").draining(), rack.emc("e1").quarantined()), (1, 0));
}

/// Returns a rack restored from a backup in which VM a has slice 0 on h1. The devices also have a
/// grant of slice 1 to h2.
fn restored_rack() -> (Rack, ReservationId) {
    let mut rack = Rack::new("e1=4 h1:e1 h2:e1");
    let id = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    rack.bring_slice_online(0);
    let change = rack.ledger.decide_restore();
    rack.apply(change);
    assert_eq!(rack.emc("e1").quarantined(), 4, "every slice is quarantined");
    rack.apply_slice_event(1, Event::Raise(Epoch(5)));
    rack.apply_slice_event(1, Event::Quarantine(Quarantine::Restored { host: Some(HostId(1)) }));
    (rack, id)
}

/// Returns a reported VM of user 2001 with 3 GiB of pinned local memory and these slices, each with
/// its epoch.
fn running_vm<const N: usize>(vm: &str, slices: [(u32, u64); N]) -> ObservedVm {
    let holding = |(slice, epoch)| Holding { slice: SliceId(slice), epoch: Epoch(epoch) };
    let slices = slices.map(holding).to_vec();
    ObservedVm {
        vm: name(vm),
        pid: 7,
        slices,
        local: Bytes::gib(3),
        pinned: true,
        uid: user(2001),
        rehome: crate::protocol::ObservedRehome::None,
    }
}

#[test]
fn running_vms_keep_their_slices_after_a_restore() {
    let (mut rack, id) = restored_rack();
    let adopt = |rack: &Rack, host, id, vm: &str, slice, epoch| {
        rack.ledger.decide_adoption(at(3), host, id, &running_vm(vm, [(slice, epoch)]))
    };
    let change = adopt(&rack, HostId(0), id, "a", 0, 1).expect("the ledger has this epoch");
    rack.apply(change);
    assert_eq!(rack.slot(0).state, State::Online(Owner { host: HostId(0), reservation: id }));
    let lost = ReservationId(id.0 + 7);
    assert_eq!(adopt(&rack, HostId(1), lost, "b", 1, 4), None, "the device has another epoch");
    assert_eq!(adopt(&rack, HostId(0), lost, "b", 1, 5), None, "the device grants the slice to another host");
    let change = adopt(&rack, HostId(1), lost, "b", 1, 5).expect("the device confirms the slice");
    rack.apply(change);
    assert_eq!(rack.ledger.reservation_of(&name("b")), Some(lost));
    let adopted = rack.ledger.reservation(lost).unwrap();
    let reported = (adopted.local, adopted.pinned, adopted.uid);
    assert_eq!(reported, (Bytes::gib(3), true, user(2001)), "the memory and user are from the report");
    let next = rack.reserve(reserve_request("c", "h1", 0));
    assert!(matches!(next, Err(Rejection::HostNotSchedulable { .. })), "the host has not reported");
    let reported = rack.ledger.decide_host_report(at(3), HostId(0));
    rack.apply(reported);
    assert!(
        rack.reserve(reserve_request("c", "h1", 0)).unwrap() > lost,
        "ids assigned after the backup are not reused"
    );
}

#[test]
fn vm_on_another_host_replaces_the_reservation_of_the_backup() {
    let (mut rack, old) = restored_rack();
    let new = ReservationId(old.0 + 7);
    let change = rack.ledger.decide_adoption(at(3), HostId(1), new, &running_vm("a", [(1, 5)]));
    rack.apply(change.unwrap());
    assert_eq!(rack.ledger.reservation_of(&name("a")), Some(new));
    assert!(!rack.ledger.reservation(old).unwrap().is_active());
}

#[test]
fn ended_vm_keeps_its_slices_after_a_restore_until_it_stops() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let id = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    rack.bring_slice_online(0);
    rack.end_reservation(id, release_reason());
    let change = rack.ledger.decide_restore();
    rack.apply(change);
    let change = rack.ledger.decide_adoption(at(3), HostId(0), id, &running_vm("a", [(0, 1)]));
    rack.apply(change.unwrap());
    assert!(matches!(rack.slot(0).state, State::Draining(_, DrainStage::Host { force: false })));
    assert_eq!(rack.ledger.reservation_of(&name("a")), None);
}

#[test]
fn healthy_vm_is_not_replaced_by_a_claim_of_another_host() {
    let mut rack = Rack::new("e1=4 h1:e1 h2:e1");
    let id = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    rack.bring_slice_online(0);
    rack.apply_slice_event(1, Event::Quarantine(Quarantine::UnknownGrant { host: HostId(1) }));
    let claim = running_vm("a", [(1, 0)]);
    assert_eq!(rack.ledger.decide_adoption(at(3), HostId(1), ReservationId(id.0 + 1), &claim), None);
}

#[test]
fn unclaimed_slices_are_scrubbed_and_break_their_reservation() {
    let (mut rack, id) = restored_rack();
    let all: Vec<SliceId> = rack.emc("e1").quarantined_slices().collect();
    for host in [HostId(0), HostId(1)] {
        let change = rack.ledger.decide_host_report(at(3), host);
        rack.apply(change);
    }
    let change = rack.ledger.decide_unclaimed_requalification(&all);
    rack.apply(change);
    assert_eq!((rack.emc("e1").free(), rack.emc("e1").draining()), (0, 4));
    let Stage::Broken { why, .. } = &rack.ledger.reservation(id).unwrap().stage else { panic!() };
    assert!(why.contains("slice 0 was not in use"), "{why}");
}
