//! Functions that the driver of the manager uses: pending work, full batches, published changes and
//! waiting callers.

use units::limits::{CHANGES_PER_BATCH_MAX, SLICE_WAITERS_MAX};
use units::{Bytes, SliceId, UnixMs};

use super::rig::{Rig, name};
use crate::{
    audit::{Actor, Decision, DecisionKind, Subject},
    ledger::Target,
    manager::{Event, HostState, Request, Token},
};

#[test]
fn state_changes_of_slices_are_published_when_durable() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1");
    assert_eq!(rig.transitions, []);
    rig.run("go");
    let slice = SliceId(0);
    let online =
        [(slice, "free", "assigned"), (slice, "assigned", "onlining"), (slice, "onlining", "online")];
    assert_eq!(rig.transitions, online);
    rig.run("commit:a go");
    assert_eq!(rig.transitions, online, "the slice has not changed");
}

#[test]
fn buffer_follows_demand_and_drain_time() {
    let mut rig = Rig::connected_with("e1=64 e2=64 h1:e1+e2 h2:e1+e2 h3:e2");
    rig.run("reserve:a@h1=20 go");
    assert_eq!(rig.manager.buffer_target(), 20);
    rig.run("release:a stored tick:3000");
    rig.run("up:h1 up:h2 go tick:10 go tick:10 go");
    assert!(rig.manager.drain_time().as_ms() >= 3000, "{}", rig.manager.drain_time());
}

#[test]
fn reservations_wait_while_a_batch_is_full() {
    let mut rig = Rig::connected_with("e1=16384 h1:e1 h2:e1 h3:e1");
    let half = CHANGES_PER_BATCH_MAX / 2;
    rig.run("reserve:z@h1=0");
    assert!(!rig.manager.is_full());
    rig.run(&format!("reserve:a@h1={}", half - 2));
    assert!(!rig.manager.is_full(), "the reservation and the decision count as changes");
    rig.run(&format!("reserve:b@h2={}", half - 2));
    assert!(rig.manager.is_full());
    rig.run("stored");
    assert!(!rig.manager.is_full());
}

#[test]
fn effects_and_changes_count_as_pending_work() {
    let mut rig = Rig::connected();
    rig.manager.take_change_flag();
    assert!(!rig.manager.has_pending_work());
    let target = Target::Vm(name("unknown"));
    rig.manager.handle(
        rig.current_time(),
        Event::Request(Token(0), Request::Commit { target, actor: Actor::Manager }),
    );
    assert!(rig.manager.has_pending_work(), "a reply is pending");
    while rig.manager.poll_effect().is_some() {}
    assert!(!rig.manager.has_pending_work());
}

#[test]
fn decision_of_another_module_is_stored() {
    let mut rig = Rig::connected();
    let what = DecisionKind::Cordoned { reason: "a model serves".to_owned() };
    let decision = Decision { at: UnixMs(1), actor: Actor::Manager, subject: Subject::Rack, what };
    rig.manager
        .handle(rig.current_time(), Event::Request(Token(u64::MAX), Request::RecordDecision(decision)));
    rig.manager.settle(rig.current_time());
    let is_stored = std::iter::from_fn(|| rig.manager.poll_effect())
        .any(|effect| format!("{effect:?}").contains("a model serves"));
    assert!(is_stored, "the decision is part of a batch");
}

#[test]
fn one_of_two_waiting_callers_may_disconnect() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1~ stored wait:a gone:a");
    let output = rig.run("go");
    assert!(output.contains("reserve:a->ok(0)") && !output.contains("wait:a"), "{output}");
}

#[test]
fn only_wait_requests_may_wait_for_slices() {
    let target = || Target::Vm(name("a"));
    let wait = Request::WaitReady { target: target(), within: units::Ns::secs(1) };
    let commit = Request::Commit { target: target(), actor: Actor::Manager };
    assert!(wait.waits_for_slices() && !commit.waits_for_slices());
}

#[test]
fn waiters_before_and_after_the_write_count_towards_limit() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 stored");
    (0..2).for_each(|_| drop(rig.run("wait:a")));
    rig.run("reserve:z@h1=0");
    // The first of these callers wait for the write in progress, the others for the next write.
    (2..10).for_each(|_| drop(rig.run("wait:a")));
    rig.run("reserve:y@h1=0");
    (10..SLICE_WAITERS_MAX).for_each(|_| drop(rig.run("wait:a")));
    let output = rig.run("wait:a stored stored");
    assert_eq!(output.matches("wait:a->LIMIT_EXCEEDED").count(), 1, "{}", output.len());
}

#[test]
fn silent_host_differs_from_a_host_never_connected() {
    let mut rig = Rig::connected();
    rig.run("down:h1");
    assert_eq!(rig.manager.host_state(rig.host("h1")), HostState::Silent);
    rig.run("restart");
    assert_eq!(rig.manager.host_state(rig.host("h1")), HostState::Expected);
}

#[test]
fn fence_obstacle_is_the_message_of_the_device() {
    let mut rig = Rig::connected_with(super::rig::SHARED_RACK);
    let host = rig.host("h1");
    rig.run("cordon:e1 reserve:a@h1=1 go down:h1 fence:h1");
    assert_eq!(rig.manager.fence_obstacle(host), None);
    rig.run("stored device tick:10");
    assert_eq!(rig.manager.fence_obstacle(host), Some("no command"));
    assert_eq!(rig.manager.durable().host(host).unwrap().local_free(), Bytes::gib(64));
}

#[test]
fn result_of_another_batch_makes_nothing_durable() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1");
    rig.handle_event(Event::Stored { batch: 0, ok: true });
    rig.check(
        "tick:0 slices |
         stored | reserve:a->ok(0) e1.grant(0.1>h1)",
    );
}

#[test]
fn nothing_is_sent_during_a_reload() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 stored device tick:10 stored");
    rig.check(
        "cordon:h2 lost tick:2000 | store cordon:h2->STORE_FAILED reload
         reload | e1.contents e2.contents h1<a=0.1 h2<nothing h3<nothing",
    );
}

#[test]
fn machine_is_stopped_only_for_a_shared_device() {
    let since = |rack: &str| {
        let mut rig = Rig::connected_with(rack);
        rig.run("cordon:e1 reserve:a@h1=1 go break:e2 down:h1 fence:h1");
        while rig.is_storing() {
            rig.complete_write(true, true);
        }
        (rig.manager.stop_start_time(rig.host("h1")), UnixMs(rig.now.as_ms()))
    };
    assert_eq!(since(super::rig::RACK).0, None, "the failed device can revoke access itself");
    let (stopping, now) = since(super::rig::SHARED_RACK);
    assert_eq!(stopping, Some(now));
}
