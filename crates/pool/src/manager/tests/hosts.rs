//! Hosts: silent hosts keep their slices, devices confirm fences, and reports are validated.
//! `rig.rs` documents the words of the scripts.

use units::limits::DELTA_CHANGES_PER_HOST_MAX;
use units::{ReservationId, SliceId};

use super::rig::{Rig, name};
use crate::{
    audit::Subject,
    manager::{SessionId, link::PendingChanges},
    protocol::ObservedState,
    record::Fence,
};

#[test]
fn changes_beyond_the_limit_are_replaced_by_a_complete_state() {
    let mut changes = PendingChanges::awaited();
    let max = DELTA_CHANGES_PER_HOST_MAX as u64;
    (1..=max).for_each(|id| changes.add(None, [ReservationId(id)]));
    assert!(!changes.is_complete() && changes.len() == DELTA_CHANGES_PER_HOST_MAX);
    changes.add(Some(SliceId(0)), []);
    assert!(changes.is_complete() && changes.len() == 0);
    assert!(changes.is_awaited(), "a caller still waits after the change to a complete state");
}

#[test]
fn desired_state_contains_all_slices_of_a_vm_or_none() {
    // Four slices of the VM are on e1, and one is on e2, which has failed.
    Rig::connected().check(
        "break:e2
         reserve:a@h1=5 stored device tick:10 | store reserve:a->ok(0,1,2,3,4) e1.grant(0.1>h1) e1.grant(1.1>h1) e1.grant(2.1>h1) e1.grant(3.1>h1) e2.grant(4.1>h1) store
         stored apply:h1 tick:10 | h1<nothing
         slices | 0.1:onlining@h1 1.1:onlining@h1 2.1:onlining@h1 3.1:onlining@h1 4.1:assigned@h1
         recover:e2 tick:1000 | e2.contents
         device tick:10 stored | e2.grant(4.1>h1) store h1<a=0.1+1.1+2.1+3.1+4.1
         apply:h1 tick:10 | store",
    );
}

#[test]
fn only_the_current_owner_releases_a_slice() {
    Rig::connected().check(
        "reserve:a@h1=1 go
         release:a stored tick:10 | store release:a->ok(0) h1<release=0.1
         report:h1:released=0.2 report:h2:released=0.1 report:h1 tick:10 |
         slices | 0.1:draining@h1
         report:h1:released=0.1 tick:10 | store
         stored | e1.revoke(0.1) h1<nothing",
    );
}

#[test]
fn slices_missing_from_a_report_are_kept() {
    Rig::connected().check(
        "reserve:a@h1=2 go
         report:h1 report:h1:online=0.1 tick:100 |
         slices | 0.1:online@h1 1.1:online@h1",
    );
}

#[test]
fn ended_vm_releases_its_slices() {
    Rig::connected().check(
        "reserve:a@h1=1 go
         report:h2:ended=1 tick:10 |
         report:h1:ended=1 tick:10 | store
         stored | h1<release=0.1
         go
         slices |",
    );
}

#[test]
fn silent_host_keeps_its_slices_and_gets_no_new_slices() {
    Rig::connected().check(
        "reserve:a@h1=2 go
         tick:2000 report:h2 report:h3
         tick:2000 | h1.close(LeaseExpired)
         state:h1 state:h2 alarms | Unknown Up HOST_UNKNOWN
         slices | 0.1:online@h1 1.1:online@h1
         reserve:b@h1=1 | reserve:b->HOST_NOT_SCHEDULABLE
         up:h1 state:h1 alarms | h1<a=0.1+1.1 Up
         reserve:b@h1=1 | store",
    );
}

#[test]
fn expected_host_is_fenced_only_when_powered_off() {
    Rig::connected().check(
        "restart device fence:h1 | e1.contents e2.contents fence:h1->HOST_EXPECTED
         poweroff:h1 | store
         stored | poweroff:h1->ok[0] e1.fence(h1!) e2.fence(h1!)
         reserve:b@h1=1 | reserve:b->HOST_NOT_SCHEDULABLE",
    );
}

#[test]
fn connected_host_is_not_fenced() {
    Rig::connected().check(
        "fence:h1 | fence:h1->HOST_CONNECTED
         poweroff:h1 | poweroff:h1->HOST_CONNECTED
         fence:h9 | fence:h9->HOST_NOT_FOUND
         down:h1 fence:h1 | store",
    );
}

#[test]
fn silent_host_is_fenced_before_its_slices_are_revoked() {
    let mut rig = Rig::connected();
    rig.check(
        "reserve:a@h1=2 go
         tick:4000 | h1.close(LeaseExpired) h2.close(LeaseExpired) h3.close(LeaseExpired)
         tick:59000 up:h2 up:h3 go
         tick:990 |
         tick:10 tick:10 | store
         slices | 0.1:online@h1 1.1:online@h1
         stored | e1.fence(h1) e2.fence(h1)
         slices | 0.1:draining@h1 1.1:draining@h1
         device tick:10 | store
         slices | 0.1:draining@h1 1.1:draining@h1
         stored | e1.revoke(0.1) e1.revoke(1.1)
         device tick:10 | store
         go
         slices state:h1 alarms | Fenced HOST_FENCED",
    );
    assert!(rig.has_decision(&Subject::Host(name("h1")), "silent for"));
    assert!(rig.has_decision(&Subject::Vm(name("a")), "its host was fenced"));
}

/// The write of the fence fails. The silent host must still be fenced.
#[test]
fn silent_host_is_fenced_after_a_failed_write() {
    Rig::connected().check(
        "reserve:a@h1=1 go down:h2 down:h3 down:h1
         tick:4000 tick:60000 tick:10 lost | store reload
         reload device tick:60000 tick:10 go
         slices state:h1 | 0.1:scrubbing Fenced",
    );
}

/// Returns a rack in which h1 has all slices of e1, h2 waits for a slice of e2, and e2 has failed.
fn rig_with_failed_emc() -> Rig {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=4 go break:e2 reserve:b@h2=1 stored device tick:10");
    rig.check(
        "slices alarms | 0.1:online@h1 1.1:online@h1 2.1:online@h1 3.1:online@h1 4.1:assigned@h2 EMC_FAILED",
    );
    rig
}

#[test]
fn failed_emc_without_slices_of_a_host_does_not_delay_its_fence() {
    rig_with_failed_emc().check(
        "down:h1 fence:h1 stored | store fence:h1->ok[0] e1.fence(h1)
         state:h1 | Fencing
         device tick:10 stored | store e1.revoke(0.1) e1.revoke(1.1) e1.revoke(2.1) e1.revoke(3.1)
         state:h1 alarms | Fenced HOST_FENCED EMC_FAILED
         device go
         slices | 4.1:assigned@h2
         recover:e2 tick:1000 | e2.contents
         device | e2.grant(4.1>h2) e2.fence(h1)
         go
         slices state:h1 | 4.1:online@h2 Fenced",
    );
}

#[test]
fn restarted_host_returns_from_a_fence_despite_a_failed_emc() {
    let check_return = |meanwhile: &str| {
        rig_with_failed_emc().check(&format!(
            "down:h1 fence:h1 go {meanwhile}
             up:h1/b2 go
             state:h1 alarms | Up EMC_FAILED
             reserve:c@h1=4 go
             slices | 0.3:online@h1 1.3:online@h1 2.3:online@h1 3.3:online@h1 4.1:assigned@h2
             recover:e2 tick:1000 device | e2.contents e2.grant(4.1>h2) e2.fence(h1!)
             go reserve:d@h1=1 go
             slices | 0.3:online@h1 1.3:online@h1 2.3:online@h1 3.3:online@h1 4.1:online@h2 5.1:online@h1"
        ));
    };
    check_return("");
    check_return("restart go up:h2 up:h3 go");
}

#[test]
fn clean_host_returns_from_a_fence_despite_a_failed_emc() {
    rig_with_failed_emc().check(
        "down:h1 fence:h1 go
         up:h1 report:h1:early:clean tick:10 state:h1 | h1<fenced Fenced
         report:h1:clean go
         state:h1 | Up
         reserve:c@h1=1 go
         slices | 0.3:online@h1 4.1:assigned@h2",
    );
}

#[test]
fn slices_on_a_failed_emc_stay_with_their_host_until_fenced() {
    // Four slices of the VM are on e1, and one is on e2, which has failed.
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=5 go break:e2 reserve:b@h2=1 stored device");
    rig.check(
        "down:h1 fence:h1 stored | store fence:h1->ok[0] e1.fence(h1)
         device go tick:3600000
         state:h1 alarms | Fencing HOST_FENCING HOST_UNKNOWN HOST_UNKNOWN EMC_FAILED
         slices | 4.1:draining@h1 5.1:assigned@h2
         restart device go up:h2 up:h3 go
         state:h1 slices | Fencing 4.1:draining@h1 5.1:assigned@h2
         recover:e2 tick:1000 device | e2.contents e2.grant(5.1>h2) e2.fence(h1)
         go
         state:h1 slices | Fenced 5.1:online@h2",
    );
}

#[test]
fn host_with_slices_on_a_failed_emc_can_use_other_emcs_again() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=5 go break:e2 reserve:b@h2=1 stored device down:h1 fence:h1 go");
    rig.check(
        "up:h1/b2 go
         state:h1 slices alarms | Up 4.1:draining@h1 5.1:assigned@h2 EMC_FAILED
         reserve:c@h1=4 go
         slices | 0.3:online@h1 1.3:online@h1 2.3:online@h1 3.3:online@h1 4.1:draining@h1 5.1:assigned@h2
         recover:e2 tick:1000 device | e2.contents e2.revoke(4.1) e2.grant(5.1>h2) e2.fence(h1!)
         go
         slices | 0.3:online@h1 1.3:online@h1 2.3:online@h1 3.3:online@h1 5.1:online@h2",
    );
}

#[test]
fn returned_host_is_fenced_again_at_every_emc() {
    rig_with_failed_emc().check(
        "down:h1 fence:h1 go up:h1/b2 go reserve:c@h1=1 go
         down:h1 fence:h1 stored | store fence:h1->ok[0] e1.fence(h1)
         state:h1 | Fencing
         device go
         state:h1 slices | Fenced 4.1:assigned@h2
         recover:e2 tick:1000 device | e2.contents e2.grant(4.1>h2) e2.fence(h1)",
    );
}

/// The device has a grant to a fenced host that the ledger does not contain. The slice must be
/// quarantined, and the device must fence the host.
#[test]
fn slice_with_unknown_grant_to_a_fenced_host_is_quarantined() {
    let mut rig = rig_with_failed_emc();
    rig.set_grant(6, Some((1, "h1")));
    rig.check(
        "down:h1 fence:h1 go state:h1 | store fence:h1->ok[0] e1.fence(h1) store e1.revoke(0.1) e1.revoke(1.1) e1.revoke(2.1) e1.revoke(3.1) store e1.grant(0.2>h2) e1.grant(1.2>h2) e1.grant(2.2>h2) e1.grant(3.2>h2) store h2<scrub=0.2+1.2+2.2+3.2 store e1.revoke(0.2) e1.revoke(1.2) e1.revoke(2.2) e1.revoke(3.2) h2<nothing store Fenced
         recover:e2 tick:1000 device | e2.contents e2.grant(4.1>h2) e2.fence(h1)
         go
         slices alarms | 4.1:online@h2 6.1:quarantined@h1 HOST_FENCED SLICE_QUARANTINED
         enable:6 go
         slices | 4.1:online@h2",
    );
}

#[test]
fn host_without_emcs_is_fenced_at_once() {
    let mut rig = Rig::new("e1=4 h1: h2:e1");
    rig.run("up:h1 go down:h1 fence:h1 go");
    rig.check("state:h1 | Fenced");
}

#[test]
fn host_is_fenced_when_the_unconfirmed_emc_is_removed() {
    let mut rig = Rig::new("e1=4 e2=4 h1:e1+e2 h2:e1");
    rig.run("up:h1 up:h2 go break:e2 restart go up:h2 go up:h1 go down:h1 fence:h1 go");
    rig.check(
        "state:h1 | Fenced
         rack:e1=4&h1:e1&h2:e1 stored tick:10 | store rack:e1=4&h1:e1&h2:e1->ok",
    );
}

#[test]
fn operator_may_confirm_power_off_during_a_fence() {
    Rig::connected().check(
        "reserve:a@h1=1 go
         break:e1 down:h1 fence:h1 stored | store fence:h1->ok[0] e1.fence(h1) e2.fence(h1)
         device go | store
         poweroff:h1 | store
         stored recover:e1 tick:1000 device | poweroff:h1->ok[0] e1.contents e1.fence(h1!)
         go
         slices |",
    );
}

#[test]
fn fenced_host_returns_after_a_clean_report() {
    Rig::connected().check(
        "reserve:a@h1=1 go down:h1 fence:h1 go
         up:h1 | h1<fenced
         report:h1:early:clean tick:10 state:h1 | Fenced
         report:h1:clean tick:10 | store
         stored state:h1 | h1<nothing Up
         reserve:b@h1=1 | store",
    );
}

/// The fence is sent again before the report of the agent arrives.
#[test]
fn clean_report_on_an_earlier_fence_message_ends_the_fence() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go down:h1 fence:h1 go up:h1");
    let h1 = rig.host("h1");
    let number = rig.manager.desired_state(h1).unwrap().number;
    rig.check("cordon:h1 stored report:h2 report:h3 tick:2000 | store cordon:h1->ok[0] h1<fenced");
    rig.send_report(h1, ObservedState { number, clean: true, ..ObservedState::default() }, true);
    rig.run("tick:10 stored");
    rig.check("state:h1 | Up");
}

#[test]
fn fenced_host_returns_after_a_restart() {
    Rig::connected().check(
        "reserve:a@h1=1 go down:h1 fence:h1 go
         up:h1/b1 state:h1 | h1<fenced Fenced
         up:h1/b2 tick:10 | h1<fenced store
         stored state:h1 | Up",
    );
}

/// A host restarts while its VM has data in slices. The VM must end, and the slices must be
/// released and scrubbed before the next use.
#[test]
fn restarted_host_ends_its_vms_and_releases_their_slices() {
    let mut rig = Rig::connected();
    rig.check(
        "reserve:a@h1=1 go down:h1 tick:5000
         up:h1/b1 tick:10 slices | h1<a=0.1 0.1:online@h1
         down:h1 up:h1/b2 | h1.close(OtherBootLeased)
         tick:4000 up:h1/b2 tick:10 | store
         stored slices | h1<release=0.1 0.1:draining@h1
         go
         slices state:h1 | Up",
    );
    assert!(rig.has_decision(&Subject::Vm(name("a")), "its host has restarted"));
}

/// A host restarts and is then removed, and neither decision is durable yet. The durable state may
/// still contain VMs from before the restart, so the manager must not send the host a desired
/// state.
#[test]
fn host_receives_nothing_while_its_restart_and_removal_are_written() {
    let mut rig = Rig::connected();
    let output =
        rig.run("down:h1 tick:10000 up:h1/b2 tick:10 rack:e1=4&e2=4&h2:e1+e2&h3:e2 up:h1/b2 tick:10");
    assert!(output.contains("store") && !output.contains("h1<"), "{output}");
    let output = rig.run("go");
    assert!(output.contains("close(HostRemoved)") && !output.contains("h1<"), "{output}");
}

#[test]
fn restart_during_a_failed_write_ends_the_fence() {
    // The agent of a fenced host connects after a restart of the host, while the store is loaded.
    // The restart must be applied to the loaded ledger and end the fence.
    Rig::connected().check(
        "down:h1 fence:h1 go
         reserve:a@h2=1 lost up:h1/b2 reload
         go
         state:h1 | Up",
    );
}

/// A report may contain a slice that the host had before its connection to the EMC was removed. The
/// host must remain connected.
#[test]
fn past_grant_report_after_connection_removal_is_ignored() {
    Rig::connected().check(
        "reserve:a@h1=1 go release:a go
         rack:e1=4&e2=4&h1:e2&h2:e1+e2&h3:e2 go
         report:h1:online=0.1 | ",
    );
    Rig::connected().check(
        "reserve:a@h3=1 go release:a go
         rack:e1=4&h1:e1&h2:e1&h3:e1 go
         report:h3:online=4.1 |
         report:h3:online=4.0 | h3.close(FalseClaim:4.0)",
    );
}

#[test]
fn host_claiming_a_slice_never_granted_is_disconnected() {
    let rig = || {
        let mut rig = Rig::connected();
        rig.run("reserve:a@h1=1 reserve:b@h2=1 go");
        rig
    };
    rig().check("report:h1:online=0.1 | ");
    rig().check("report:h1:online=4.1 | h1.close(FalseClaim:4.1)");
    rig().check("report:h1:online=0.2 | h1.close(FalseClaim:0.2)");
    rig().check("report:h1:online=0.0 | h1.close(FalseClaim:0.0)");
    rig().check("report:h1:online=99.1 | h1.close(FalseClaim:99.1)");
    rig().check("report:h3:online=2.1 | h3.close(FalseClaim:2.1)");
}

/// A second agent of the same boot, such as one with a copied token, must not replace the connected
/// agent, whichever of the two started later.
#[test]
fn connected_agent_is_not_replaced_during_its_lease() {
    Rig::connected().check(
        "reserve:a@h1=1 go commit:a go
         copy:h1#5 alarms state:h1 | h1.close(Superseded) HOST_CONTESTED Up
         copy:h1#0 state:h1 | h1.close(Superseded) Up
         report:h1:online=0.1 slices | 0.1:online@h1",
    );
}

#[test]
fn session_ends_with_its_rejection_or_lease() {
    let mut rig = Rig::new("e1=4 h1:e1");
    let sessions = |rig: &Rig| [1, 2].map(|id| rig.manager.has_agent_session(SessionId(id)));
    rig.run("up:h1 go");
    assert_eq!(sessions(&rig), [true, false]);
    rig.check("copy:h1#5 | h1.close(Superseded)");
    assert_eq!(sessions(&rig), [true, false]);
    rig.check("tick:4000 | h1.close(LeaseExpired)");
    assert_eq!(sessions(&rig), [false, false]);
}

/// The lease of the connected agent expires, because its network failed silently.
#[test]
fn connected_agent_is_replaced_after_its_lease() {
    Rig::connected().check(
        "tick:2000 report:h2 report:h3 tick:1999 copy:h1#5 | h1.close(Superseded)
         tick:1 up:h1#5 state:h1 alarms | h1.close(LeaseExpired) h1<nothing Up",
    );
}

#[test]
fn restarted_agent_is_accepted_at_once() {
    Rig::connected().check(
        "reserve:a@h1=1 go commit:a go
         down:h1 up:h1#5 state:h1 alarms | h1<a=0.1 Up",
    );
}

/// A host's newer agent ends, and an older one connects, such as one that was paused. It must wait
/// until the lease of the newer agent expires.
#[test]
fn older_agent_waits_for_the_lease_of_the_newer_agent() {
    let mut rig = Rig::connected();
    rig.run("down:h1 up:h1#9 go down:h1");
    rig.check(
        "tick:2000 report:h2 report:h3 tick:1999 up:h1#1 state:h1 | h1.close(Superseded) Silent
         tick:1 state:h1 alarms | Unknown HOST_UNKNOWN HOST_CONTESTED
         up:h1#1 go state:h1 alarms | h1<nothing Up",
    );
}

/// The alarm remains while the rejected agent tries to connect, also if the host's agent reconnects
/// meanwhile.
#[test]
fn contested_alarm_remains_after_a_reconnection() {
    Rig::connected()
        .check("copy:h1#9 down:h1 up:h1#1 go alarms | h1.close(Superseded) h1<nothing HOST_CONTESTED");
}

/// An agent on another machine connects with the credentials of a host whose agent is connected. It
/// must be rejected, and the host's VMs must not end.
#[test]
fn agent_of_another_boot_does_not_replace_a_live_agent() {
    let mut rig = Rig::connected();
    rig.check(
        "reserve:a@h1=1 go commit:a go
         copy:h1#99/b2 alarms state:h1 slices | h1.close(Superseded) HOST_CONTESTED Up 0.1:online@h1",
    );
    assert!(!rig.has_decision(&Subject::Vm(name("a")), "its host has restarted"));
}

#[test]
fn agent_of_another_boot_is_accepted_after_the_lease() {
    let mut rig = Rig::connected();
    rig.check(
        "reserve:a@h1=1 go commit:a go
         tick:2000 report:h2 report:h3 tick:1999 copy:h1#1/b2 alarms state:h1 | h1.close(Superseded) HOST_CONTESTED Up",
    );
    rig.run("tick:1 copy:h1#1/b2 tick:10 stored go");
    assert!(rig.has_decision(&Subject::Vm(name("a")), "its host has restarted"));
    assert_eq!(rig.run("state:h1"), "Up");
}

/// An agent with a different boot ID connects while the host's agent restarts. If the host has VMs,
/// the new agent must wait until the host's lease expires.
#[test]
fn agent_of_another_boot_waits_for_the_lease_of_a_host_with_vms() {
    let mut rig = Rig::connected();
    rig.check(
        "reserve:a@h1=1 go commit:a go
         down:h1 copy:h1#99/b2 alarms | h1.close(OtherBootLeased)
         up:h1#3 slices state:h1 | h1<a=0.1 0.1:online@h1 Up
         down:h2 copy:h2#99/b2 tick:10 state:h2 | store Up",
    );
}

/// The manager has just started, and no agent has connected. If the host has VMs, an agent with a
/// different boot ID must wait until the host's lease expires.
#[test]
fn agent_of_the_recorded_boot_has_priority_after_a_restart() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go commit:a go restart go");
    rig.check(
        "copy:h1#99/b2 | h1.close(OtherBootLeased)
         copy:h2#99/b2 | ",
    );
    rig.run("go up:h1#3 go");
    assert_eq!(rig.run("slices state:h1"), "0.1:online@h1 Up");
    rig.run("restart go tick:4000 copy:h1#99/b2 tick:10 stored go");
    assert!(rig.has_decision(&Subject::Vm(name("a")), "its host has restarted"));
}

#[test]
fn contested_alarm_ends_two_leases_after_last_attempt() {
    let mut rig = Rig::connected();
    rig.manager.take_change_flag();
    rig.run("copy:h1#9");
    assert!(rig.manager.take_change_flag(), "watchers are notified of the alarm");
    for _ in 0..7 {
        assert_eq!(rig.run("tick:1000 alarms"), "HOST_CONTESTED");
        rig.run("report:h1 report:h2 report:h3 go");
    }
    assert_eq!(rig.run("tick:999 alarms"), "HOST_CONTESTED");
    assert_eq!(rig.run("tick:1 alarms"), "");
}

#[test]
fn unanswered_desired_state_is_resent_after_the_delay() {
    Rig::connected().check(
        "reserve:a@h1=1 stored device tick:10 stored | store reserve:a->ok(0) e1.grant(0.1>h1) store h1<a=0.1
         tick:1000 report:h1:early report:h2 report:h3 tick:999 |
         tick:1 | h1<a=0.1
         tick:1999 report:h1:early report:h2 report:h3 |
         tick:1 | h1<a=0.1
         apply:h1 tick:10 | store",
    );
}

#[test]
fn host_removed_from_the_rack_is_disconnected() {
    Rig::connected().check(
        "reserve:a@h1=1 go
         rack:e1=4&e2=4&h2:e1+e2&h3:e2 | rack:e1=4&e2=4&h2:e1+e2&h3:e2->NOT_DRAINED
         release:a go
         rack:e1=4&e2=4&h2:e1+e2&h3:e2 stored | store rack:e1=4&e2=4&h2:e1+e2&h3:e2->ok host#0.close(HostRemoved)",
    );
}

#[test]
fn host_receives_no_slices_of_a_partly_visible_device() {
    let mut rig = Rig::new("e1=4! h1:e1 h2:e1");
    rig.run("sees:h1=0 up:h1 sees:h2=3 up:h2 go");
    rig.check("alarms | DEVICE_NOT_FOUND DEVICE_NOT_FOUND");
    assert!(rig.run("reserve:a@h1=1 go").ends_with("reserve:a->OUT_OF_SLICES"));
    assert!(rig.run("reserve:a@h2=1 go").ends_with("reserve:a->OUT_OF_SLICES"));
    rig.run("sees:h1=4 down:h1 up:h1 go");
    rig.check("alarms | DEVICE_NOT_FOUND");
    rig.run("reserve:b@h1=1 go");
    rig.check("slices | 0.1:online@h1");
    rig.run("reserve:z@h1=1 lost reload go");
    assert!(
        rig.run("reserve:c@h2=1 go").ends_with("reserve:c->OUT_OF_SLICES"),
        "the reported devices remain after a reload"
    );
}

#[test]
fn slice_is_scrubbed_by_host_that_reports_its_device() {
    let mut rig = Rig::new("e1=4! h1:e1 h2:e1");
    rig.run("up:h1 sees:h2=0 up:h2 go reserve:a@h1=1 go down:h1 release:a go");
    rig.check("slices | 0.1:draining@h1");
    rig.run("up:h1 go");
    assert!(rig.run("slices").is_empty(), "h1 released and scrubbed the slice");
}

#[test]
fn fence_of_an_unattached_host_completes_after_a_restart() {
    let mut rig = Rig::new("e1=4 h1:e1 h2:");
    rig.run("up:h1 up:h2 go down:h2 fence:h2 stored");
    rig.run("restart go");
    let h2 = rig.host("h2");
    assert_eq!(rig.manager.durable().host(h2).unwrap().host.fence, Fence::Fenced);
}
