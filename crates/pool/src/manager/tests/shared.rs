//! Devices that cannot revoke access: a host keeps its slices until it has released them or is
//! proven to have stopped. `rig.rs` documents the words of the scripts.

use super::rig::{Rig, name};
use crate::{
    audit::Subject,
    manager::{DeviceCall, DeviceFailure, DeviceReply, Event},
};

/// Rack with e1, which cannot revoke access, and e2, which can. h1 and h2 are attached to both, h3
/// only to e2.
const RACK: &str = "e1=4! e2=4 h1:e1+e2 h2:e1+e2 h3:e2";

/// Returns a rack in which slice 0 of e1 is online on h1; e1 cannot revoke access.
fn rig_with_slice() -> Rig {
    let mut rig = Rig::connected_with(RACK);
    rig.run("reserve:a@h1=1 go");
    rig
}

#[test]
fn unstoppable_host_keeps_slices_and_others_get_memory() {
    rig_with_slice().check(
        "down:h1 fence:h1 stored | store fence:h1->ok[0] e2.fence(h1) e1.fence(h1)
         device go | store
         state:h1 alarms slices | Fencing HOST_NOT_FENCED 0.1:draining@h1
         cordon:e2 reserve:b@h2=1 go
         slices | 0.1:draining@h1 1.1:online@h2
         tick:3600000 device
         slices | 0.1:draining@h1 1.1:online@h2",
    );
}

#[test]
fn machine_is_not_stopped_for_a_device_without_its_slices() {
    let mut rig = Rig::connected_with(RACK);
    rig.run("cordon:e1 reserve:a@h1=1 go");
    rig.check(
        "slices | 4.1:online@h1
         down:h1 fence:h1 stored | store fence:h1->ok[0] e2.fence(h1)
         device go tick:60000
         state:h1 alarms slices | Fenced HOST_FENCED HOST_UNKNOWN HOST_UNKNOWN
         up:h1/b2 tick:10 stored | h1<fenced store e1.fence(h1!)
         state:h1 | Up",
    );
}

/// A device returns with a grant to a fenced host that the ledger does not contain. The machine
/// must be stopped to revoke the grant.
#[test]
fn machine_is_stopped_for_a_grant_found_when_the_device_returns() {
    let mut rig = Rig::connected_with(RACK);
    rig.run("reserve:b@h2=1 go cordon:e1 reserve:a@h1=1 go break:e1 reserve:c@h2=1 go release:b go");
    rig.set_grant(3, Some((1, "h1")));
    let output = rig.run("down:h1 fence:h1 go state:h1");
    assert!(output.ends_with("Fenced") && !output.contains("e1.fence"), "{output}");
    rig.check(
        "recover:e1 tick:1000 go
         state:h1 alarms | Fencing HOST_NOT_FENCED SLICE_QUARANTINED
         enable:3 go
         slices | 3.1:draining@h1 5.1:online@h2
         poweroff:h1 go
         slices state:h1 | 5.1:online@h2 Fenced",
    );
}

#[test]
fn machine_is_stopped_for_a_grant_reported_in_a_refusal() {
    let mut rig = Rig::connected_with(RACK);
    assert!(rig.run("down:h1 fence:h1 go state:h1").ends_with("Fenced"));
    rig.set_grant(0, Some((5, "h1")));
    rig.run("cordon:e2 reserve:b@h2=1 go");
    rig.check("state:h1 alarms | Fencing HOST_NOT_FENCED SLICE_QUARANTINED RESERVATION_BROKEN");
}

/// A working EMC that can revoke access will reply soon. The host must not be shown as fenced
/// before.
#[test]
fn host_without_slices_is_fenced_when_its_emc_has_replied() {
    let mut rig = Rig::connected();
    rig.check(
        "down:h1 fence:h1 stored | store fence:h1->ok[0] e1.fence(h1) e2.fence(h1)
         state:h1 | Fencing",
    );
    rig.run("device go");
    rig.check("state:h1 | Fenced");
}

/// After a restart of the manager, the fence is not complete before every EMC is compared.
#[test]
fn fence_waits_for_emcs_that_are_not_compared_yet() {
    let mut rig = Rig::connected();
    rig.run("down:h1 fence:h1 stored restart");
    rig.check("state:h1 | Fencing");
    rig.run("device go");
    rig.check("state:h1 | Fenced");
}

#[test]
fn machine_is_not_stopped_for_an_emc_that_can_revoke() {
    for fails_before_fence in [false, true] {
        let mut rig = Rig::connected();
        rig.run("reserve:a@h1=1 go break:e1 break:e2");
        if fails_before_fence {
            rig.run("reserve:b@h2=1 stored device");
            rig.check("alarms | EMC_FAILED");
        }
        rig.run("down:h1 fence:h1 stored device tick:10 go");
        assert_eq!(rig.manager.stop_start_time(rig.host("h1")), None);
    }
}

/// The confirmation of e1 is received but not durable when another change of the host becomes
/// durable. e1 must not be called again.
#[test]
fn emc_that_has_fenced_a_host_is_not_called_again() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go down:h1 fence:h1 stored cordon:h1");
    let output = rig.run("device stored");
    assert!(!output.contains("fence(h1)"), "{output}");
}

#[test]
fn removing_another_host_does_not_repeat_a_fence() {
    let mut rig = Rig::connected();
    rig.run("down:h1 fence:h1 stored");
    let output = rig.run("rack:e1=4&e2=4&h1:e1+e2&h2:e1+e2 stored cordon:h1 stored");
    assert!(!output.contains("fence(h1)"), "{output}");
}

#[test]
fn removing_an_emc_does_not_repeat_a_fence_at_another() {
    let mut rig = Rig::connected_with("e1=4 e2=4 e3=4 h1:e1 h2:e1+e2 h3:e2");
    rig.run("down:h1 fence:h1 stored");
    let output = rig.run("rack:e1=4&e2=4&h1:e1&h2:e1+e2&h3:e2 stored cordon:h1 stored");
    assert!(output.contains("cordon:h1->ok") && !output.contains("fence(h1)"), "{output}");
}

#[test]
fn machine_stop_is_not_retried_while_its_agent_is_connected() {
    let mut rig = rig_with_slice();
    rig.check(
        "down:h2 down:h3 down:h1 fence:h1 stored device tick:10
         tick:59989 |
         tick:1 | e1.fence(h1)
         device up:h1 | h1<fenced",
    );
    for _ in 0..40 {
        assert!(!rig.run("tick:1900 report:h1").contains("fence"), "stopped while its agent is connected");
        while rig.is_storing() {
            rig.complete_write(true, true);
        }
    }
    rig.check("down:h1 tick:0 | e1.fence(h1)");
}

/// The host releases all slices before the next attempt to stop its machine. The machine must be
/// stopped only after the device reports another grant.
#[test]
fn machine_is_stopped_again_for_a_grant_found_later() {
    let mut rig = rig_with_slice();
    rig.run("down:h1 fence:h1 stored device up:h1 report:h1:released=0.1 tick:10 stored device tick:10 stored down:h1");
    let mut output = String::new();
    for _ in 0..60 {
        output += &rig.run("tick:1900 report:h2 report:h3 go");
    }
    assert!(!output.contains("e1.fence"), "the host has no slices on e1: {output}");
    rig.set_grant(3, Some((1, "h1")));
    let output = rig.run("break:e1 cordon:e2 reserve:b@h2=1 go recover:e1 tick:1000 go");
    assert!(output.contains("e1.fence(h1)"), "{output}");
}

#[test]
fn machine_stop_is_retried_when_the_device_failed_to_record_it() {
    let mut rig = rig_with_slice();
    rig.run("down:h2 down:h3 stops:e1 break:e1 down:h1 fence:h1 stored device");
    let output = rig.run("recover:e1 tick:10000 device tick:60000");
    assert!(output.contains("e1.fence(h1)"), "{output}");
}

#[test]
fn stop_attempt_due_on_a_failed_device_runs_on_recovery() {
    let mut rig = rig_with_slice();
    rig.run("down:h2 down:h3 stops:e1 break:e1 down:h1 fence:h1 stored device");
    let failed = rig.run("tick:70000 device tick:1000 device");
    assert!(!failed.contains("e1.fence"), "{failed}");
    let works = rig.run("recover:e1 tick:1000 device tick:1000 device");
    assert!(works.contains("e1.fence(h1)"), "{works}");
}

#[test]
fn restarted_manager_waits_for_agents_before_stopping_a_machine() {
    let mut rig = rig_with_slice();
    rig.run("down:h2 down:h3 down:h1 fence:h1 stored");
    let soon = rig.run("restart device tick:10");
    assert!(!soon.contains("e1.fence(h1)"), "{soon}");
    let later = rig.run("tick:10000");
    assert!(later.contains("e1.fence(h1)"), "{later}");
}

#[test]
fn stopped_machine_frees_its_slices() {
    rig_with_slice().check(
        "stops:e1 down:h1 fence:h1 stored | store fence:h1->ok[0] e2.fence(h1) e1.fence(h1)
         device tick:10 | store
         go
         slices state:h1 alarms | Fenced HOST_FENCED
         up:h1/b2 go state:h1 | h1<fenced store h1<nothing Up",
    );
}

#[test]
fn power_off_confirmed_during_stop_command_completes_fence() {
    rig_with_slice().check(
        "down:h1 fence:h1 stored | store fence:h1->ok[0] e2.fence(h1) e1.fence(h1)
         poweroff:h1 stored | store poweroff:h1->ok[0] e1.fence(h1!) e2.fence(h1!)
         device go
         slices state:h1 | Fenced",
    );
}

#[test]
fn host_restarted_during_its_fence_has_released_its_slices() {
    let mut rig = rig_with_slice();
    rig.check(
        "down:h1 fence:h1 stored device
         up:h1/b2 tick:10 | h1<fenced store
         stored | e1.fence(h1!) e1.revoke(0.1)
         device go
         slices state:h1 | Up",
    );
    assert!(rig.has_decision(&Subject::Host(name("h1")), "the host restarted"));
}

#[test]
fn clean_report_during_a_fence_releases_all_slices() {
    let mut rig = rig_with_slice();
    rig.check(
        "down:h1 fence:h1 stored device go
         up:h1 report:h1:early:clean report:h1 tick:10 | h1<fenced
         slices state:h1 | 0.1:draining@h1 Fencing
         report:h1:clean tick:10 stored | store e1.fence(h1!) e1.revoke(0.1) h1<nothing
         slices state:h1 | 0.1:draining@h1 Up
         device go
         slices state:h1 | Up",
    );
    assert!(
        rig.has_decision(&Subject::Host(name("h1")), "its agent reports that no process or mapping remains")
    );
}

/// A fence command may take minutes. Its result must not count for a later fence of the host, so
/// each fence has its own start time.
#[test]
fn later_fence_of_a_host_has_a_new_start_time() {
    let mut rig = rig_with_slice();
    let h1 = rig.host("h1");
    assert_eq!(rig.manager.stop_start_time(h1), None);
    rig.run("down:h1 fence:h1 stored device tick:10");
    let first = rig.manager.stop_start_time(h1).expect("the machine must be stopped");
    rig.run("tick:70000 device");
    assert_eq!(rig.manager.stop_start_time(h1), Some(first), "a retry belongs to the same fence");
    rig.run(
        "up:h1 report:h1:early:clean report:h1 tick:10 report:h1:clean tick:10 stored device go report:h1:clean go",
    );
    assert_eq!(rig.run("state:h1"), "Up");
    assert_eq!(rig.manager.stop_start_time(h1), None);
    rig.run("reserve:b@h1=1 go down:h1 fence:h1 stored device tick:10");
    let second = rig.manager.stop_start_time(h1).expect("the machine must be stopped");
    assert!(second > first, "{second:?} after {first:?}");
}

/// A reported failure is not a release, because the agent may retry or a message may be in transit.
/// The slice must be reused only after its host has released it.
#[test]
fn nonzero_slice_is_reused_only_after_its_host_released_it() {
    Rig::connected_with(RACK).check(
        "reserve:a@h1=1 stored device tick:10 stored
         report:h1:dirty=0.1 tick:10 | store
         stored slices | h1<nothing 0.1:quarantined@h1
         release:a go report:h1 tick:10 enable:0 | store release:a->ok(0) h1<nothing store
         stored slices | enable:0->ok[0] h1<release=0.1 0.1:draining@h1
         report:h1 report:h1:released=0.2 tick:10 |
         report:h1:released=0.1 tick:10 stored | store e1.revoke(0.1) h1<nothing
         go
         slices |",
    );
}

#[test]
fn unscrubbed_slice_is_reused_only_after_its_scrubber_is_off() {
    let mut rig = rig_with_slice();
    rig.check(
        "down:h2 down:h3 release:a stored tick:10 apply:h1 tick:10 stored device tick:10 stored device tick:10 stored
         report:h1 tick:10 report:h1:broken=0.2 tick:10 stored | h1<scrub=0.2 store h1<nothing
         slices | 0.2:quarantined@h1
         down:h1 enable:0 go
         slices | 0.2:draining@h1
         poweroff:h1 up:h2 go
         slices |",
    );
}

#[test]
fn powered_off_host_need_not_release_quarantined_slices() {
    Rig::connected_with(RACK).check(
        "reserve:a@h1=1 stored device tick:10 stored report:h1:dirty=0.1 go
         down:h1 poweroff:h1 go
         slices | 0.1:quarantined@h1
         enable:0 go
         slices |",
    );
}

#[test]
fn unknown_grant_is_released_by_its_host_before_reuse() {
    let mut rig = rig_with_slice();
    rig.set_grant(1, Some((1, "h2")));
    rig.check(
        "restart device up:h1 up:h2 up:h3 go
         slices | 0.1:online@h1 1.1:quarantined@h2
         enable:1 stored tick:10 | store enable:1->ok[0] h2<release=1.1
         go
         slices | 0.1:online@h1",
    );
}

/// The device has granted the slice to another host than the ledger, under the same epoch, and the
/// ledger's grant is not confirmed. The host in the record may reach the slice.
#[test]
fn slice_granted_to_another_host_under_the_same_epoch_stays_with_it() {
    let mut rig = Rig::connected_with(RACK);
    rig.run("reserve:a@h1=1 stored");
    rig.set_grant(0, Some((1, "h2")));
    rig.run("restart device tick:10 stored");
    rig.check("slices | 0.1:quarantined@h2");
}

/// The device has lost the record of a grant. This device cannot revoke access, so the host may
/// still have access and must remain the holder.
#[test]
fn slice_with_a_lost_grant_stays_with_its_host() {
    let mut rig = rig_with_slice();
    rig.set_grant(0, None);
    rig.check(
        "restart device up:h2 up:h3 go
         slices alarms | 0.1:quarantined@h1 SLICE_QUARANTINED RESERVATION_BROKEN
         enable:0 release:a go
         slices | 0.1:draining@h1
         up:h1 go
         slices |",
    );
}

#[test]
fn unclaimed_slices_are_released_first_after_a_restore() {
    let mut rig = rig_with_slice();
    let backup = rig.disk.clone();
    rig.run("force:a go cordon:e2 reserve:b@h2=2 go");
    rig.check("slices | 0.3:online@h2 1.1:online@h2");
    rig.disk = backup;
    rig.check(
        "restore go up:h1 report:h1 up:h3 report:h3 go
         up:h2 report:h2:online=1.1:vm9b=1.1 tick:10 stored
         slices | 0.3:draining@h2 1.1:online@h2 2.0:scrubbing 3.0:scrubbing 4.0:scrubbing 5.0:scrubbing 6.0:scrubbing 7.0:scrubbing
         go
         slices | 1.1:online@h2",
    );
}

/// An operator confirms the power-off of a host, and its machine connects before the decision is
/// durable. The host must receive nothing but the fence.
#[test]
fn host_receives_nothing_before_its_fence_is_durable() {
    rig_with_slice().check(
        "down:h1 poweroff:h1 up:h1/b2 tick:10 | store
         stored | poweroff:h1->ok[0] e1.fence(h1!) e2.fence(h1!) h1<fenced store",
    );
}

#[test]
fn stop_result_received_during_a_reload_is_retried() {
    let mut rig = rig_with_slice();
    rig.run("down:h2 down:h3 down:h1 fence:h1 stored cordon:h2 lost device reload device");
    rig.write_all();
    let mut output = String::new();
    for _ in 0..20 {
        output += &rig.run("tick:10000 device");
        rig.write_all();
    }
    assert!(output.contains("e1.fence(h1)"), "{output}");
}

/// The write of a host's return reports an error but is on disk. The pending stop of the machine
/// must be dropped.
#[test]
fn reload_drops_the_power_off_of_a_returned_host() {
    let mut rig = rig_with_slice();
    rig.run("down:h1 fence:h1 stored device up:h1/b2 tick:10 torn reload");
    rig.check("state:h1 | Up");
    assert_eq!(rig.manager.stop_start_time(rig.host("h1")), None);
}

/// A fence command started before the operator confirmed the power-off. Its failure must not cause
/// another attempt.
#[test]
fn late_stop_failure_of_powered_off_machine_is_not_retried() {
    let mut rig = rig_with_slice();
    rig.run("down:h1 fence:h1 stored poweroff:h1 stored");
    let (h1, e1) = (rig.host("h1"), rig.manager.durable().find_emc_by_name(&name("e1")).unwrap());
    let call = DeviceCall::Fence { host: h1, powered_off: false };
    let failure = DeviceFailure::NotFenced("no command".into());
    rig.handle_event(Event::Device(e1, DeviceReply::Failed { call, failure }));
    assert_eq!(rig.manager.stop_start_time(h1), None);
}

/// Returns whether an EMC has fenced h1, according to the ledger.
fn has_fenced_h1(rig: &Rig, emc: &str) -> bool {
    let emc = rig.manager.durable().find_emc_by_name(&name(emc)).unwrap();
    rig.manager.durable().host(rig.host("h1")).unwrap().host.is_fenced_at(emc)
}

#[test]
fn emc_that_need_not_confirm_a_fence_has_not_fenced_the_host() {
    let mut rig = Rig::connected_with("e1=4 e2=4! h1:e1 h2:e1+e2 h3:e2");
    rig.run("down:h1 fence:h1 go");
    assert!(has_fenced_h1(&rig, "e1") && !has_fenced_h1(&rig, "e2"));
}

#[test]
fn emc_attached_during_a_fence_must_confirm_the_fence() {
    let mut rig = Rig::connected_with("e1=4 e2=4! h1:e1 h2:e1+e2 h3:e2");
    rig.run("down:h1 fence:h1 go");
    rig.check("state:h1 | Fenced");
    rig.run("rack:e1=4&e2=4!&h1:e1+e2&h2:e1+e2&h3:e2 go");
    assert!(has_fenced_h1(&rig, "e1") && !has_fenced_h1(&rig, "e2"), "e2 did not have to confirm the fence");
}
