//! Guarantees for clients: durable replies, repeated requests, waiting and limits. `rig.rs`
//! documents the words of the scripts.

use units::Ns;
use units::limits::{RESERVATION_PRUNE_INTERVAL, SLICE_WAITERS_MAX};

use super::rig::Rig;
use crate::{ledger::ended::RequestLimits, record::Key};

const REQUEST_LIMITS: RequestLimits =
    RequestLimits { per_client: 5, total: 8, established_after: Ns::secs(600) };

impl Rig {
    fn with_ended_request_limits(bounds: RequestLimits) -> Self {
        let mut rig = Self::connected();
        rig.manager.head.set_ended_request_limits(bounds);
        rig
    }

    fn reservations_on_disk(&self) -> usize {
        self.disk.keys().filter(|key| matches!(key, Key::Reservation(_))).count()
    }
}

#[test]
fn ended_requests_beyond_the_limits_are_deleted() {
    for names in [1, 100] {
        let mut rig = Rig::with_ended_request_limits(REQUEST_LIMITS);
        for n in 0..100 {
            rig.run(&format!("tick:1 reserve:vm@h1=0!c{}/r{n} stored tick:1 release:vm", n % names));
            assert_eq!(rig.run("stored"), "release:vm->ok()");
        }
        rig.run("tick:1000 go");
        let expected = if names == 1 { REQUEST_LIMITS.per_client } else { REQUEST_LIMITS.total };
        assert_eq!(rig.reservations_on_disk(), expected);
        rig.run("restart go");
        assert_eq!(rig.manager.durable().reservations_after(units::ReservationId(0)).count(), expected);
    }
}

#[test]
fn releases_in_one_batch_are_answered_without_retention() {
    let mut rig = Rig::with_ended_request_limits(RequestLimits { total: 0, ..REQUEST_LIMITS });
    let vms: Vec<String> = (0..12).map(|n| format!("vm{n}@h1=0!c{n}/r")).collect();
    vms.iter().for_each(|vm| drop(rig.run(&format!("reserve:{vm} stored"))));
    rig.run("tick:1000");
    let releases: Vec<String> = (0..12).map(|n| format!("release:vm{n}")).collect();
    rig.send_requests_together(&releases.iter().map(String::as_str).collect::<Vec<_>>());
    let output = rig.run("stored");
    assert_eq!(output.matches("->ok()").count(), 12, "{output}");
    rig.run("tick:1 reserve:active@h1=0 stored tick:1000 go");
    assert_eq!(rig.reservations_on_disk(), 1, "only the active reservation remains");
}

#[test]
fn store_written_under_higher_limits_is_pruned_when_idle() {
    let mut rig =
        Rig::with_ended_request_limits(RequestLimits { per_client: 100, total: 100, ..REQUEST_LIMITS });
    (0..50).for_each(|n| drop(rig.run(&format!("tick:1 reserve:vm@h1=0!r{n} stored release:vm stored"))));
    let soon = rig.now.after(RESERVATION_PRUNE_INTERVAL);
    assert!(rig.manager.next_upkeep() > Some(soon), "no reservation is due for pruning");
    rig.manager.head.set_ended_request_limits(REQUEST_LIMITS);
    assert!(rig.manager.next_upkeep() <= Some(soon));
    for _ in 0..3 {
        rig.now = rig.now.max(rig.manager.next_wakeup().unwrap());
        rig.run("tick:0 go");
    }
    assert_eq!(rig.reservations_on_disk(), REQUEST_LIMITS.per_client);
}

/// A removed host has no name in the ledger. A repeated request must not be rejected because of the
/// host's name.
#[test]
fn repeated_request_is_answered_after_its_host_was_removed() {
    Rig::connected().check(
        "reserve:a@h3=1!5 go release:a go
         rack:e1=4&e2=4&h1:e1+e2&h2:e1+e2 go
         reserve:a@h3=1!5 | reserve:a->ok(4)",
    );
}

#[test]
fn effects_wait_until_their_batch_is_stored() {
    Rig::connected().check(
        "reserve:a@h1=2 | store
         tick:5 |
         stored | reserve:a->ok(0,1) e1.grant(0.1>h1) e1.grant(1.1>h1)
         device |
         tick:10 | store
         tick:5 apply:h1 tick:1 |
         stored | h1<a=0.1+1.1
         apply:h1 |
         slices | 0.1:onlining@h1 1.1:onlining@h1
         tick:10 | store
         stored slices | 0.1:online@h1 1.1:online@h1",
    );
}

#[test]
fn concurrent_requests_share_a_write_but_no_slice() {
    let mut rig = Rig::connected();
    assert_eq!(rig.send_requests_together(&["reserve:a@h1=2", "reserve:b@h2=2", "reserve:c@h1=1"]), "store");
    assert_eq!(
        rig.send_requests_together(&["reserve:d@h3=2", "reserve:e@h1=1"]),
        "",
        "a second write starts before the first has ended"
    );
    let output = rig.run("stored");
    assert!(output.starts_with("reserve:a->ok(0,1) reserve:b->ok(4,5) reserve:c->ok(2) "), "{output}");
    let output = rig.run("stored");
    assert!(output.starts_with("reserve:d->ok(6,7) reserve:e->ok(3) "), "{output}");
}

#[test]
fn failed_write_is_reported_and_the_request_repeatable() {
    Rig::connected().check(
        "reserve:a@h1=1 | store
         reserve:b@h1=1~ |
         lost | reserve:a->STORE_FAILED reserve:b->STORE_FAILED reload
         reserve:c@h1=1 | reserve:c->STARTING
         reload slices | e1.contents e2.contents
         device |
         reserve:a@h1=1 | store
         stored | reserve:a->ok(0) e1.grant(0.1>h1)",
    );
}

#[test]
fn repeated_request_finds_a_failed_write_that_is_on_disk() {
    Rig::connected().check(
        "reserve:a@h1=1 | store
         torn | reserve:a->STORE_FAILED reload
         reload | e1.contents e2.contents
         reserve:a@h1=1 | reserve:a->ok(0)
         device | e1.grant(0.1>h1)
         reserve:b@h1=1 | store
         stored | reserve:b->ok(4) e2.grant(4.1>h1)",
    );
}

#[test]
fn rejection_waits_for_durable_state() {
    Rig::connected().check(
        "reserve:a@h1=1 | store
         reserve:a@h1=1!other |
         stored | reserve:a->ok(0) reserve:a->VM_ALREADY_RESERVED e1.grant(0.1>h1)
         reserve:b@h1=1 | store
         reserve:b@h1=1!other |
         lost | reserve:b->STORE_FAILED reserve:b->STORE_FAILED reload",
    );
}

#[test]
fn repeated_request_returns_same_reply_after_restart() {
    Rig::connected().check(
        "reserve:a@h1=2 go
         reserve:a@h1=2 | reserve:a->ok(0,1)
         restart | e1.contents e2.contents
         reserve:a@h1=2 | reserve:a->ok(0,1)
         reserve:a@h1=3 | reserve:a->REQUEST_ID_REUSED",
    );
}

#[test]
fn waiting_caller_is_answered_when_its_slices_are_online() {
    let mut rig = Rig::connected();
    let output = rig.run("reserve:a@h1=2~ go");
    assert_eq!(output.matches("reserve:a->").count(), 1, "{output}");
    assert!(output.contains("h1<a=0.1+1.1 store reserve:a->ok(0,1)"), "{output}");
    rig.check("wait:a | wait:a->ok(0,1)");
}

#[test]
fn waiting_caller_receives_a_timeout() {
    Rig::connected().check(
        "reserve:a@h1=2 stored
         wait:a |
         tick:999 |
         tick:1 | wait:a->NOT_READY_BEFORE_TIMEOUT",
    );
}

#[test]
fn disconnected_caller_is_not_answered() {
    Rig::connected().check(
        "reserve:a@h1=2 stored
         wait:a gone:a |
         tick:1000 |",
    );
}

#[test]
fn caller_gone_during_the_write_leaves_no_waiter() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=2~ gone:a reserve:b@h1=1~ gone:b stored stored");
    assert_eq!((rig.manager.waiting.len(), rig.manager.waiters.len()), (0, 0));
}

#[test]
fn waiter_beyond_the_limit_is_rejected_before_reserving() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=2 stored");
    for _ in 0..SLICE_WAITERS_MAX - 1 {
        rig.run("wait:a");
    }
    rig.check(
        "reserve:b@h1=1~ | store
         reserve:c@h1=1~ wait:a |
         stored | reserve:c->LIMIT_EXCEEDED wait:a->LIMIT_EXCEEDED e2.grant(4.1>h1)
         slices | 0.1:assigned@h1 1.1:assigned@h1 4.1:assigned@h1",
    );
}

#[test]
fn waiter_of_a_broken_or_ended_vm_receives_the_reason() {
    Rig::connected().check(
        "reserve:a@h1=1 go
         reserve:b@h1=1 stored device tick:10 apply:h1 stored tick:1
         wait:b |
         report:h1:online=0.1:broken=4.1 tick:10 | store
         stored | wait:b->RESERVATION_WRONG_STATE h1<a=0.1
         reserve:c@h1=1 stored
         wait:c release:c | store
         stored | release:c->ok(1) wait:c->RESERVATION_WRONG_STATE
         device | e1.revoke(1.1)",
    );
}

#[test]
fn low_store_space_allows_releases_but_no_reservations() {
    Rig::connected().check(
        "reserve:a@h1=1 go
         low alarms | STORE_LOW_SPACE
         reserve:b@h1=1 | reserve:b->STORE_LOW_SPACE
         reserve:a@h1=1 | reserve:a->ok(0)
         release:a | store
         stored tick:10 | release:a->ok(0) h1<release=0.1
         ample alarms |
         reserve:b@h1=1 | store",
    );
}

#[test]
fn validation_changes_nothing() {
    Rig::connected().check(
        "validate:a@h1=2 | validate:a->would(2)
         validate:a@h1=9 | validate:a->OUT_OF_SLICES
         validate:a@h9=1 | validate:a->HOST_NOT_FOUND
         slices |",
    );
}

#[test]
fn host_never_connected_accepts_no_reservation() {
    Rig::new(super::rig::RACK).check(
        "reserve:a@h1=1 | reserve:a->HOST_EXPECTED
         state:h1 | Expected
         up:h1 state:h1 | h1<nothing Up",
    );
}

#[test]
fn drain_lists_vms_and_cordon_stops_reservations() {
    Rig::connected().check(
        "reserve:a@h1=1 go
         drain:h1 | store
         stored | drain:h1->ok[1] h1<a=0.1
         reserve:b@h1=1 | reserve:b->HOST_NOT_SCHEDULABLE
         cordon:e1 cordon:e2 | store
         stored stored | cordon:e1->ok[0] store cordon:e2->ok[0]
         reserve:b@h2=1 | reserve:b->OUT_OF_SLICES
         enable:e2 stored reserve:b@h2=1 | store enable:e2->ok[0] store",
    );
}
