//! Moves of pool memory to local memory.

use units::limits::{REHOME_ATTEMPTS_MAX, REHOME_RETRY_AFTER};

use super::*;

/// Returns a rack with VM a on h1, which runs and has the slices 0 and 1 online. The host has 64 GiB
/// of local memory, of which VM a uses 1 GiB.
fn rack() -> (Rack, ReservationId) {
    let mut rack = Rack::new("e1=4 h1:e1");
    let id = rack.reserve(reserve_request("a", "h1", 2)).unwrap();
    [0, 1].into_iter().for_each(|slice| rack.bring_slice_online(slice));
    let commit = rack.ledger.decide_commit(at(1), id, tester()).unwrap();
    rack.apply(commit);
    let started = rack.ledger.decide_process_change(at(1), id, true, tester());
    rack.apply(started);
    (rack, id)
}

impl Rack {
    fn rehome(&mut self, seconds: u64, is_automatic: bool) -> Result<usize, Rejection> {
        let target = Target::Vm(name("a"));
        let (_, change) = self.ledger.decide_rehome(at(seconds), &target, tester(), is_automatic)?;
        let records = change.0.len();
        self.apply(change);
        Ok(records)
    }

    /// Cancels the move, and returns the number of changed records.
    fn cancel_rehome(&mut self) -> usize {
        let target = Target::Vm(name("a"));
        let (_, change) = self.ledger.decide_rehome_cancellation(at(3), &target, tester()).unwrap();
        let records = change.0.len();
        self.apply(change);
        records
    }

    fn complete_rehome(&mut self, id: ReservationId) {
        let change = self.ledger.decide_rehome_completion(at(9), id, tester());
        self.apply(change);
    }

    fn fail_rehome(&mut self, seconds: u64, id: ReservationId, attempt: u32) {
        let change = self.ledger.decide_rehome_failure(at(seconds), id, attempt, "busy", tester());
        self.apply(change);
    }

    fn reservation(&self, id: ReservationId) -> &Reservation {
        self.ledger.reservation(id).unwrap()
    }

    /// Returns the free local memory of the host in GiB.
    fn free_gib(&self) -> u64 {
        self.host("h1").local_free().get() >> 30
    }
}

#[test]
fn local_memory_is_booked_during_the_move_and_slices_drain_after_it() {
    let (mut rack, id) = rack();
    assert_eq!((rack.rehome(2, false), rack.free_gib()), (Ok(2), 61));
    assert_eq!((rack.rehome(3, false), rack.free_gib()), (Ok(0), 61), "the move is in progress");
    rack.complete_rehome(id);
    let reservation = rack.reservation(id);
    assert_eq!((reservation.slices.as_slice(), reservation.local), ([].as_slice(), Bytes::gib(3)));
    assert_eq!(reservation.rehome.former_slices(), [SliceId(0), SliceId(1)]);
    assert_eq!(rack.free_gib(), 61);
    let states = [0, 1].map(|slice| rack.slot(slice).state_name());
    assert_eq!(states, ["draining"; 2]);
    assert_eq!(rack.ledger.decide_rehome_completion(at(9), id, tester()), Change::default());
    rack.end_reservation(id, EndReason::ProcessGone);
    assert_eq!(rack.free_gib(), 64);
}

#[test]
fn failed_move_releases_the_booked_memory() {
    let (mut rack, id) = rack();
    rack.rehome(2, false).unwrap();
    rack.fail_rehome(3, id, 2);
    assert_eq!(rack.free_gib(), 61, "a report about another attempt is ignored");
    rack.fail_rehome(3, id, 1);
    assert_eq!(rack.free_gib(), 63);
    assert_eq!(rack.reservation(id).slices, [SliceId(0), SliceId(1)]);
    let why = rack.rehome(7, false).unwrap_err().to_string();
    assert!(why.ends_with("an attempt has failed or was cancelled recently"), "{why}");
    rack.rehome(8, false).unwrap();
    rack.fail_rehome(9, id, 1);
    assert_eq!(rack.reservation(id).rehome, Rehome::Moving { attempt: 2 }, "a late report is ignored");
}

#[test]
fn cancelled_move_keeps_the_booked_memory_until_its_result() {
    for is_moved in [false, true] {
        let (mut rack, id) = rack();
        assert_eq!(rack.cancel_rehome(), 0, "no move is in progress");
        rack.rehome(2, false).unwrap();
        assert_eq!((rack.cancel_rehome(), rack.free_gib()), (2, 61));
        assert_eq!(rack.reservation(id).rehome, Rehome::Cancelling { attempt: 1 });
        assert_eq!(rack.cancel_rehome(), 0, "the move was cancelled already");
        let why = rack.rehome(3, false).unwrap_err().to_string();
        assert!(why.ends_with("its move is being cancelled"), "{why}");
        if is_moved {
            rack.complete_rehome(id);
            assert!(rack.reservation(id).slices.is_empty());
        } else {
            rack.fail_rehome(3, id, 1);
            assert_eq!(rack.free_gib(), 63);
        }
        assert_eq!(rack.cancel_rehome(), 0, "the move has ended");
    }
}

#[test]
fn ended_vm_releases_the_booked_memory_when_its_process_ends() {
    let (mut rack, id) = rack();
    rack.rehome(2, false).unwrap();
    rack.end_reservation(id, release_reason());
    assert_eq!(rack.free_gib(), 61, "the process still runs");
    let ended = rack.ledger.decide_process_change(at(3), id, false, tester());
    rack.apply(ended);
    assert_eq!(rack.free_gib(), 64);
}

#[test]
fn vm_that_cannot_be_moved_is_rejected_with_the_reason() {
    let why = |rack: &mut Rack| rack.rehome(2, false).unwrap_err().to_string();
    let (mut ended, id) = rack();
    ended.end_reservation(id, EndReason::ProcessGone);
    assert!(why(&mut ended).ends_with("cannot be moved to local memory: its reservation has ended"));
    let (mut broken, id) = rack();
    let change = broken.ledger.decide_reservation_break(at(1), id, "lost".into());
    broken.apply(change);
    assert!(why(&mut broken).ends_with("its reservation is broken"));
    let (mut stopped, id) = rack();
    let change = stopped.ledger.decide_process_change(at(1), id, false, tester());
    stopped.apply(change);
    assert!(why(&mut stopped).ends_with("it does not run"));
    let mut local_only = Rack::new("e1=4 h1:e1");
    local_only.reserve(reserve_request("a", "h1", 0)).unwrap();
    assert!(why(&mut local_only).ends_with("it has no pool memory"));
    let (mut moved, id) = rack();
    moved.complete_rehome(id);
    assert_eq!(moved.rehome(2, false).unwrap(), 0, "a repeated request has no effect");
    let mut pinned = Rack::new("e1=4 h1:e1");
    pinned.reserve(Reserve { pinned: true, ..reserve_request("a", "h1", 1) }).unwrap();
    assert!(why(&mut pinned).ends_with("it is pinned"));
    let (mut full, _) = rack();
    full.reserve(Reserve { local: Bytes::gib(62), ..reserve_request("b", "h1", 0) }).unwrap();
    assert_eq!(why(&mut full), "host h1 has 1GiB of local memory free, 2GiB needed");
    assert_eq!(
        Rack::new("e1=4 h1:e1").rehome(2, false),
        Err(Rejection::NoSuchVm(name("a"))),
        "a VM without reservation"
    );
}

#[test]
fn automatic_moves_are_limited_per_vm() {
    let (mut rack, id) = rack();
    let mut seconds = 10;
    for attempt in 1..=REHOME_ATTEMPTS_MAX {
        assert_eq!(rack.rehome(seconds, true), Ok(2));
        rack.fail_rehome(seconds, id, attempt);
        assert!(rack.rehome(seconds, true).is_err(), "the attempt has failed recently");
        seconds += REHOME_RETRY_AFTER.as_ms() / 1000;
    }
    let why = rack.rehome(seconds, true).unwrap_err().to_string();
    assert!(why.ends_with("three attempts have failed or were cancelled"), "{why}");
    assert_eq!(rack.rehome(seconds, false), Ok(2), "a client requests it");
}

#[test]
fn repeated_request_finds_the_moved_vm() {
    let (mut rack, id) = rack();
    rack.complete_rehome(id);
    assert_eq!(rack.reserve(reserve_request("a", "h1", 2)), Ok(id));
    let other = rack.reserve(reserve_request("a", "h1", 0)).unwrap_err();
    assert!(other.to_string().ends_with("pool_bytes differs"), "{other}");
}

#[test]
fn forced_release_also_takes_slices_that_still_drain() {
    let (mut rack, id) = rack();
    rack.complete_rehome(id);
    rack.end_reservation(id, EndReason::Released { force: true, reason: "lost".into() });
    let owner = Owner { host: HostId(0), reservation: id };
    assert_eq!(rack.slot(0).state, State::Draining(owner, DrainStage::Host { force: true }));
}

#[test]
fn move_ends_the_requests_whose_cause_it_removes() {
    let (mut rack, id) = rack();
    let estimate = SlowdownEstimate { loss: None, severity: 2.0, samples: 3 };
    let slowdown = rack.ledger.decide_slowdown(at(2), id, estimate, 9).unwrap();
    rack.apply(slowdown);
    rack.set_scheduling(SchedulingTarget::Emc(name("e1")), Scheduling::Draining);
    assert_eq!(rack.ledger.requests_of(id).count(), 2);
    let backup = rack.ledger.clone();
    rack.complete_rehome(id);
    assert_eq!(rack.ledger.requests_of(id).count(), 0);
    rack.ledger = backup;
    rack.set_scheduling(SchedulingTarget::Host(name("h1")), Scheduling::Draining);
    rack.complete_rehome(id);
    let causes: Vec<_> = rack.ledger.requests_of(id).map(|request| request.why.clone()).collect();
    assert_eq!(causes, ["host h1 is draining"]);
}

#[test]
fn quarantine_of_a_former_slice_does_not_break_the_moved_vm() {
    let (mut rack, id) = rack();
    rack.complete_rehome(id);
    let lost = Event::Quarantine(Quarantine::LostGrant);
    let quarantined = rack.ledger.decide_quarantine(at(9), SliceId(0), lost, "").unwrap();
    rack.apply(quarantined);
    assert_eq!(rack.reservation(id).stage, Stage::Committed);
}

#[test]
fn drain_of_an_emc_requests_no_migration_of_a_moved_vm() {
    let (mut rack, id) = rack();
    rack.complete_rehome(id);
    rack.set_scheduling(SchedulingTarget::Emc(name("e1")), Scheduling::Draining);
    assert_eq!(rack.slot(0).reservation(), Some(id), "the slice drains");
    assert_eq!(rack.ledger.requests_of(id).count(), 0);
}

/// The move was requested and completed after the backup. The reservation is uncommitted in the
/// backup.
#[test]
fn restored_ledger_accepts_a_move_that_it_did_not_request() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let id = rack.reserve(reserve_request("a", "h1", 2)).unwrap();
    [0, 1].into_iter().for_each(|slice| rack.bring_slice_online(slice));
    let restored = rack.ledger.decide_restore();
    rack.apply(restored);
    rack.complete_rehome(id);
    let reported = rack.ledger.decide_host_report(at(9), HostId(0));
    rack.apply(reported);
    assert_eq!(rack.reservation(id).stage, Stage::Committed);
    assert_eq!(rack.free_gib(), 61);
    let unclaimed: Vec<SliceId> = rack.emc("e1").unclaimed().collect();
    assert!(unclaimed.contains(&SliceId(0)) && unclaimed.contains(&SliceId(1)), "{unclaimed:?}");
}
