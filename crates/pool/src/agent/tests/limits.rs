//! Limits of the agent: concurrent scrubs, wakeups, and reported VMs.

use units::limits::{ENDED_VMS_REPORTED_MAX, OBSERVED_STATE_BATCH_DELAY, SCRUBS_PER_HOST_MAX};

use super::*;

/// Returns the time from the start of the agent to its next wakeup after a script.
fn next_wakeup(script: &str) -> Option<Ns> {
    let (agent, _) = run(Vec::new(), "", script);
    agent.next_wakeup().map(|at| Ns(at.0 - Ns::secs(1).0))
}

#[test]
fn scrubs_beyond_the_limit_wait_for_another_to_end() {
    let all: Vec<_> = (0..SCRUBS_PER_HOST_MAX + 2).map(|slice| format!("{slice}.1")).collect();
    let scrubs = format!("up desired:1:scrub={}", all.join("+"));
    let (_, started) = run(Vec::new(), "", &scrubs);
    assert_eq!(started.matches("scrub:").count(), SCRUBS_PER_HOST_MAX);
    let (first, second) = (SCRUBS_PER_HOST_MAX, SCRUBS_PER_HOST_MAX + 1);
    let next = |script: &str| run(Vec::new(), "", &format!("{scrubs} {script}")).1;
    assert!(next("ok:0.1").starts_with(&format!("scrub:{first}.1 ")));
    assert!(
        next("fail:0.1").starts_with(&format!("scrub:{first}.1 ")),
        "a failed scrub must let another scrub start"
    );
    assert!(next("ok:0.1 ok:1.1").starts_with(&format!("scrub:{second}.1 ")));
    assert!(!next("ok:0.1 ok:1.1 ok:2.1").contains("scrub:"), "no scrub is waiting");
}

#[test]
fn report_waiting_for_calls_is_sent_after_its_delay() {
    let started = "up desired:1:a=1.1+2.1 ok:1.1";
    assert_eq!(next_wakeup(started), Some(OBSERVED_STATE_BATCH_DELAY));
    check(&format!("{started} tick:{}", OBSERVED_STATE_BATCH_DELAY.as_ms()), "report:1:online=1.1");
    assert_eq!(next_wakeup("up desired:1:a=1.1 ok:1.1"), Some(Ns::secs(1)), "the next heartbeat");
}

#[test]
fn failed_call_wakes_the_agent_for_its_retry() {
    let retry = Some(HOST_CALL_RETRY_DELAY);
    assert_eq!(next_wakeup("up desired:1:a=1.1 fail:1.1 closed:1.1"), retry);
    let (agent, _) = run(Vec::new(), "1.1", "up desired:1 down unclosed:1.1");
    assert_eq!(
        agent.next_wakeup(),
        Some(Ns::secs(1).after(HOST_CALL_RETRY_DELAY)),
        "the agent must wake up to retry closing the orphaned slice"
    );
}

#[test]
fn ended_vm_wakes_the_agent_when_its_retention_expires() {
    let ended = "up desired:1:a= attach:a@100 recorded:a desired:2 gone:a down";
    assert_eq!(next_wakeup(ended), Some(ENDED_VM_REPORT_DURATION));
    let later = ENDED_VM_REPORT_DURATION.as_ms();
    check(&format!("{ended} tick:{later}"), "delete:a");
}

#[test]
fn longest_absent_ended_vms_over_the_limit_are_dropped() {
    let recovered = (0..=ENDED_VMS_REPORTED_MAX as u64).map(|n| {
        let mut vm = recovered_vm("a", "", false);
        vm.record.reservation = ReservationId(n + 1);
        vm
    });
    let mut agent = Agent::new(Ns::ZERO, INSTANCE, None, recovered.collect(), orphan_locations(""));
    for (second, word) in ["up", "desired:1", "desired:2"].into_iter().enumerate() {
        let event = parse_event(&agent, &mut 0, word);
        agent.handle(Ns::secs(second as u64), event);
    }
    let reported = agent.ended_vms();
    assert_eq!((reported.len(), reported[0]), (ENDED_VMS_REPORTED_MAX, ReservationId(2)));
}

#[test]
fn ended_vm_in_the_desired_state_is_reported_without_time_limit() {
    let later = ENDED_VM_REPORT_DURATION.as_ms();
    let ended = "up desired:1:a= attach:a@100 recorded:a gone:a";
    check(&format!("{ended} tick:{later} tick:{later}"), "changes:1:ended=a:clean");
}

#[test]
fn agent_returns_its_rack_and_connection_state() {
    let state = |script: &str| {
        let (agent, _) = run(Vec::new(), "", script);
        (agent.rack().map(str::to_owned), agent.is_connected())
    };
    assert_eq!(state("tick:1"), (None, false));
    assert_eq!(state("up"), (Some("R".to_owned()), true));
    assert_eq!(state("up down"), (Some("R".to_owned()), false));
    assert_eq!(state("up down up:Q"), (Some("R".to_owned()), false));
}

#[test]
fn agent_reports_to_its_rack_again_after_a_lost_connection() {
    check("up desired:1:a=1.1 ok:1.1 down up", "report:1:online=1.1");
}

#[test]
fn fence_in_a_change_applies_to_every_slice() {
    check("up desired:1:a=1.1 ok:1.1 desired:2 desired:3:base=2:fenced", "offline:1.1");
}

#[test]
fn record_is_rewritten_once_after_all_slices_are_removed() {
    let forced =
        "up desired:1:a=1.1+2.1 ok:1.1 ok:2.1 attach:a@100 recorded:a desired:2:force=1.1+2.1 ok:1.1";
    check(forced, "");
    check(&format!("{forced} ok:2.1"), "record:a report:2:released=1.1+2.1:vms=a");
}

#[test]
fn failed_record_does_not_affect_other_vms() {
    let failed = script_after_attach("desired:2:a=1.1:b=2.1 ok:2.1 attach:b@200 unrecorded:b");
    check(&format!("{failed} desired:3:release=1.1+2.1"), "offline:2.1");
    check(&format!("{failed} attach:b@200"), "record:b");
}

#[test]
fn undesired_vm_is_attached_only_by_its_own_process() {
    check(&script_after_attach("desired:2 attach:a@200"), "refuse:2:no VM a on this host");
    check(&script_after_attach("desired:2 attach:b@100"), "refuse:2:no VM b on this host");
    check(&script_after_attach("desired:2 gone:a attach:a@100"), "refuse:2:no VM a on this host");
    check(&script_after_attach("desired:2 attach:a@100"), "pass:2=1.1");
}
