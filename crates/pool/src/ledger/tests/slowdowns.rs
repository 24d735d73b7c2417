//! Migration requests because of slowdowns.

use units::limits::{SLOWDOWN_REQUEST_REPEAT_AFTER, SLOWDOWN_REQUEST_TTL};

use super::*;

const ESTIMATE: SlowdownEstimate = SlowdownEstimate { loss: Some(0.12), severity: 2.4, samples: 3 };

/// Returns a rack with VM a on h1, which has pool memory, and VM b, which has only local memory.
fn rack() -> (Rack, [ReservationId; 2]) {
    let mut rack = Rack::new("e1=4 h1:e1");
    let ids = [("a", 1), ("b", 0)];
    let ids = ids.map(|(vm, slices)| {
        rack.reserve(Reserve { local: Bytes::mib(1), ..reserve_request(vm, "h1", slices) }).unwrap()
    });
    (rack, ids)
}

fn secs(seconds: u64) -> When {
    When { now: Ns::secs(seconds), wall: UnixMs(1000 * seconds) }
}

fn request(rack: &mut Rack, seconds: u64, id: ReservationId) -> Result<usize, Rejection> {
    let change = rack.ledger.decide_slowdown(secs(seconds), id, ESTIMATE, 2)?;
    let records = change.0.len();
    rack.apply(change);
    Ok(records)
}

fn slowdown(rack: &Rack, id: ReservationId) -> Option<Slowdown> {
    rack.ledger.migration(MigrationKind::Slowdown.of(id)).and_then(|migration| migration.slowdown)
}

#[test]
fn slowdown_is_requested_once_and_confirmed_after_half_its_time() {
    let (mut rack, [a, _]) = rack();
    let half = SLOWDOWN_REQUEST_TTL.as_ms() / 2000;
    assert_eq!(request(&mut rack, 10, a), Ok(3));
    assert_eq!(slowdown(&rack, a).unwrap().expires_at, Ns::secs(10).after(SLOWDOWN_REQUEST_TTL));
    assert_eq!(request(&mut rack, 9 + half, a), Ok(0), "the request is recent");
    assert_eq!(request(&mut rack, 10 + half, a), Ok(1));
    let expected = Ns::secs(10 + half).after(SLOWDOWN_REQUEST_TTL);
    assert_eq!(slowdown(&rack, a).unwrap().expires_at, expected);
    assert_eq!(rack.ledger.next_slowdown_expiry(), Some(expected));
    let migration = rack.ledger.migration(MigrationKind::Slowdown.of(a)).unwrap();
    let why = "pool memory slows the VM down by an estimated 12.0 % (severity 2.40, 3 samples)";
    assert_eq!((migration.why.as_str(), migration.requested_at), (why, secs(10).wall));
}

#[test]
fn confirmation_of_a_recovering_vm_keeps_the_evidence() {
    let (mut rack, [a, _]) = rack();
    request(&mut rack, 10, a).unwrap();
    let later = secs(10 + SLOWDOWN_REQUEST_TTL.as_ms() / 1500);
    let idle = SlowdownEstimate { loss: None, severity: 0.0, samples: 0 };
    let renewed = rack.ledger.decide_slowdown(later, a, idle, 2).unwrap();
    rack.apply(renewed);
    let expires_at = later.now.after(SLOWDOWN_REQUEST_TTL);
    assert_eq!(slowdown(&rack, a), Some(Slowdown { estimate: ESTIMATE, expires_at }));
    assert_eq!(rack.ledger.slowdown_requests().collect::<Vec<_>>(), [a]);
}

#[test]
fn migration_ids_are_not_reused_after_a_restore() {
    let (mut rack, [a, _]) = rack();
    let backup = rack.ledger.clone();
    request(&mut rack, 10, a).unwrap();
    let lost = rack.ledger.migration(MigrationKind::Slowdown.of(a)).unwrap().id;
    rack.ledger = backup;
    let restored = rack.ledger.decide_restore();
    rack.apply(restored);
    request(&mut rack, 20, a).unwrap();
    assert_ne!(rack.ledger.migration(MigrationKind::Slowdown.of(a)).unwrap().id, lost);
}

#[test]
fn unconfirmed_slowdown_expires() {
    let (mut rack, [a, _]) = rack();
    request(&mut rack, 10, a).unwrap();
    let end = Ns::secs(10).after(SLOWDOWN_REQUEST_TTL);
    let early = When { now: Ns(end.0 - 1), ..secs(0) };
    assert_eq!(rack.ledger.decide_slowdown_expiry(early, 9), Change::default());
    let due = When { now: end, ..secs(0) };
    assert_eq!(rack.ledger.decide_slowdown_expiry(due, 0), Change::default());
    let expired = rack.ledger.decide_slowdown_expiry(due, 9);
    rack.apply(expired);
    assert_eq!((slowdown(&rack, a), rack.ledger.next_slowdown_expiry()), (None, None));
}

#[test]
fn ended_slowdown_is_withdrawn_with_its_reason() {
    let (mut rack, [a, b]) = rack();
    request(&mut rack, 10, a).unwrap();
    assert_eq!(rack.ledger.decide_slowdown_end(secs(20), b), Change::default());
    let Change(records) = rack.ledger.decide_slowdown_end(secs(20), a);
    let Record::Decision(_, decision) = &records[1] else { panic!("not a decision: {records:?}") };
    assert_eq!(decision.what.describe().why, "the VM is no longer slowed down");
    rack.apply(Change(records));
    assert_eq!(slowdown(&rack, a), None);
}

#[test]
fn vm_without_pool_memory_or_reservation_gets_no_request() {
    let (mut rack, [a, b]) = rack();
    let state = |result: Result<usize, Rejection>| result.unwrap_err().to_string();
    assert!(state(request(&mut rack, 10, b)).contains("is without pool memory"));
    assert_eq!(
        request(&mut rack, 10, ReservationId(99)),
        Err(Rejection::NoSuchReservation(ReservationId(99)))
    );
    rack.end_reservation(a, release_reason());
    assert!(state(request(&mut rack, 10, a)).contains("is ended"));
}

#[test]
fn requests_of_one_hour_are_limited_also_after_their_vms_ended() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let [a, b, c] = ["a", "b", "c"].map(|vm| rack.reserve(reserve_request(vm, "h1", 1)).unwrap());
    request(&mut rack, 10, a).unwrap();
    rack.end_reservation(a, release_reason());
    request(&mut rack, 20, b).unwrap();
    let exhausted = Rejection::SlowdownBudgetExhausted { recent: 2, max: 2 };
    assert_eq!(request(&mut rack, 30, c), Err(exhausted.clone()));
    assert_eq!(request(&mut rack, 3610, c), Err(exhausted));
    // The budget survives a restart, because it is part of the metadata.
    let meta = rack.ledger.meta().clone();
    assert_eq!(meta.slowdown_requests.recent(Ns::secs(30)), 2);
    assert_eq!(request(&mut rack, 10 + 3900, c), Ok(3));
}

#[test]
fn answer_without_id_requires_a_single_request() {
    let (mut rack, [a, _]) = rack();
    request(&mut rack, 10, a).unwrap();
    rack.set_scheduling(SchedulingTarget::Host(name("h1")), Scheduling::Draining);
    let [drain, slowdown] = MigrationKind::ALL.map(|kind| rack.ledger.migration(kind.of(a)).unwrap().id);
    let answer = |rack: &Rack, id| {
        let done = MigrationAnswer::Done;
        rack.ledger.decide_migration(at(30), (&name("a"), id), done, String::new(), tester())
    };
    let ids = [drain, slowdown];
    assert_eq!(answer(&rack, None), Err(Rejection::AmbiguousMigration { vm: name("a"), ids }));
    for (kind, id) in MigrationKind::ALL.into_iter().zip(ids) {
        let (key, change) = answer(&rack, Some(id)).unwrap();
        assert_eq!(key, kind.of(a));
        rack.apply(change);
        assert_eq!(rack.ledger.migration(key).unwrap().answer, MigrationAnswer::Done);
    }
    let unknown = Some(MigrationId(77));
    assert_eq!(answer(&rack, unknown), Err(Rejection::NoSuchMigration { vm: name("a"), id: unknown }));
    rack.set_scheduling(SchedulingTarget::Host(name("h1")), Scheduling::Enabled);
    assert_eq!(rack.ledger.requests_of(a).map(|m| m.id).collect::<Vec<_>>(), [slowdown]);
    assert_eq!(answer(&rack, None).unwrap().0, MigrationKind::Slowdown.of(a));
}

#[test]
fn declined_slowdown_is_requested_again_with_the_same_id() {
    let (mut rack, [a, _]) = rack();
    request(&mut rack, 10, a).unwrap();
    let declined = MigrationAnswer::Declined;
    let (key, change) = rack
        .ledger
        .decide_migration(secs(20), (&name("a"), None), declined, "busy".into(), tester())
        .unwrap();
    rack.apply(change);
    let id = rack.ledger.migration(key).unwrap().id;
    let again = rack.ledger.decide_migration_retry(secs(20 + 600), 9);
    rack.apply(again);
    let migration = rack.ledger.migration(key).unwrap();
    assert_eq!((migration.answer, migration.id), (MigrationAnswer::Open, id));
}

#[test]
fn requests_of_one_vm_are_listed_together() {
    let (mut rack, [a, _]) = rack();
    request(&mut rack, 10, a).unwrap();
    rack.set_scheduling(SchedulingTarget::Host(name("h1")), Scheduling::Draining);
    let listed = |after| {
        let requests = rack.ledger.migrations_after(ReservationId(after));
        requests.map(|(id, requests)| (id.0, requests.len())).collect::<Vec<_>>()
    };
    assert_eq!((listed(0), listed(1), listed(2)), (vec![(1, 2), (2, 1)], vec![(2, 1)], vec![]));
}

/// The scheduler may have ended after it has accepted the request.
#[test]
fn answered_request_that_has_not_ended_is_repeated() {
    for answer in [MigrationAnswer::Accepted, MigrationAnswer::Done] {
        let (mut rack, [a, _]) = rack();
        request(&mut rack, 10, a).unwrap();
        let (key, answered) = rack
            .ledger
            .decide_migration(secs(20), (&name("a"), None), answer, "soon".into(), tester())
            .unwrap();
        rack.apply(answered);
        let due = Ns::secs(20).after(SLOWDOWN_REQUEST_REPEAT_AFTER);
        assert_eq!(rack.ledger.next_migration_retry(), Some(due), "{answer:?}");
        request(&mut rack, 3000, a).unwrap();
        assert_eq!(rack.ledger.migration(key).map(|request| request.answer), Some(answer));
        let again = rack.ledger.decide_migration_retry(When { now: due, ..secs(0) }, 9);
        rack.apply(again);
        assert_eq!(rack.ledger.migration(key).map(|request| request.answer), Some(MigrationAnswer::Open));
        assert_eq!(rack.ledger.next_migration_retry(), None);
    }
}
