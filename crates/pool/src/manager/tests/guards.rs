//! Conditions under which device calls, desired states and requalifications must wait. `rig.rs`
//! documents the words of the scripts.

use super::rig::Rig;

/// Returns a restored rack whose hosts are connected and have not reported. Every slice is
/// quarantined.
fn restored_rig(compared: bool) -> Rig {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go commit:a go restore stored");
    if compared {
        complete_writes_and_calls(&mut rig);
    }
    rig.run("up:h1 up:h2 up:h3");
    rig
}

/// Completes all writes and device calls, without reports of agents.
fn complete_writes_and_calls(rig: &mut Rig) {
    for _ in 0..4 {
        rig.run("device tick:20");
        while rig.is_storing() {
            rig.complete_write(true, true);
        }
    }
}

/// Checks the number of quarantined slices, and the reply to the validation of a reservation on
/// `host`.
#[track_caller]
fn assert_restored(rig: &mut Rig, quarantined: usize, host: &str, reply: &str) {
    complete_writes_and_calls(rig);
    let slices = rig.run("slices");
    assert_eq!(slices.matches(":quarantined").count(), quarantined, "{slices}");
    let mut output = rig.run(&format!("validate:{host}@{host}=1"));
    while rig.is_storing() {
        output += &rig.run("stored");
    }
    assert!(output.contains(&format!("validate:{host}->{reply}")), "{output}");
}

#[test]
fn partial_report_does_not_end_a_restore() {
    let mut rig = restored_rig(true);
    rig.run("report:h2 report:h3 report:h1:part");
    assert_restored(&mut rig, 8, "h1", "HOST_NOT_SCHEDULABLE");
    rig.run("report:h1 go");
    assert_restored(&mut rig, 0, "h1", "would(1)");
}

#[test]
fn unreported_host_keeps_reachable_slices_after_restore() {
    let mut rig = restored_rig(true);
    rig.run("report:h1 report:h2");
    assert_restored(&mut rig, 4, "h3", "HOST_NOT_SCHEDULABLE");
    rig.run("report:h3 go");
    assert_restored(&mut rig, 0, "h3", "would(1)");
}

#[test]
fn failed_device_keeps_slices_quarantined_after_last_report() {
    let mut rig = restored_rig(true);
    rig.run("report:h1 report:h2");
    assert_restored(&mut rig, 4, "h1", "OUT_OF_SLICES");
    rig.run("down:h2 fence:h2 stored break:e2");
    complete_writes_and_calls(&mut rig);
    rig.run("report:h3");
    complete_writes_and_calls(&mut rig);
    assert_eq!(rig.run("alarms slices").matches(":quarantined").count(), 4);
    rig.run("recover:e2 tick:1000 go");
    assert_restored(&mut rig, 0, "h3", "would(1)");
}

#[test]
fn report_before_the_comparison_does_not_end_a_restore() {
    let mut rig = restored_rig(false);
    rig.run("report:h1 report:h2 report:h3 tick:20 report:h1 report:h2 report:h3");
    assert_restored(&mut rig, 8, "h1", "HOST_NOT_SCHEDULABLE");
    rig.run("report:h1 report:h2 report:h3 go");
    assert_restored(&mut rig, 0, "h1", "would(1)");
}

#[test]
fn host_receives_nothing_until_its_fence_is_durable() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go down:h1");
    rig.check(
        "fence:h1 up:h1 tick:2000 | store
         stored | fence:h1->ok[0] e1.fence(h1) e2.fence(h1) h1<fenced",
    );
}

#[test]
fn host_whose_fence_was_not_written_receives_its_state() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go down:h1");
    rig.run("fence:h1 up:h1 lost reload device go");
    rig.check("slices state:h1 | 0.1:online@h1 Up");
}

#[test]
fn fence_result_lost_with_its_write_is_requested_again() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=5 go break:e2 down:h1 fence:h1 stored");
    rig.check(
        "device tick:10 lost reload | store reload e1.contents e2.contents h2<nothing h3<nothing
         device | e1.fence(h1)
         go
         slices state:h1 | 4.1:draining@h1 Fencing",
    );
}

#[test]
fn host_being_fenced_is_granted_no_slice_to_scrub() {
    let mut rig = Rig::connected();
    rig.run("cordon:e1 reserve:a@h2=1 go enable:e1 go release:a stored apply:h2 tick:10 stored");
    rig.check(
        "device tick:10 stored | store e2.grant(4.2>h1)
         break:e2 device down:h1 fence:h1 stored | store fence:h1->ok[0] e1.fence(h1)
         slices | 4.2:scrubbing@h1
         recover:e2 tick:1000 | e2.contents
         device | e2.fence(h1)
         up:h2 go
         slices |",
    );
}

/// A restarted manager finds that a device grants a slice under a later epoch than the ledger,
/// while an earlier batch is being written. The old owner must not receive the new handle.
#[test]
fn handle_of_another_epoch_is_not_sent_to_the_owner() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go");
    rig.set_grant(0, Some((3, "h2")));
    rig.check(
        "restart up:h1 | e1.contents e2.contents h1<nothing
         cordon:h2 device | store
         stored report:h1 tick:10 | cordon:h2->ok[0] h1<nothing store
         stored report:h1 tick:10
         slices | 0.3:quarantined@h2",
    );
}

#[test]
fn quarantined_slices_do_not_slow_down_scrubbing() {
    let mut rig = Rig::connected_with("e1=128 h1:e1 h2:e1 h3:e1");
    rig.run("reserve:a@h1=80 go reserve:b@h1=6 go reserve:c@h1=20 stored device tick:10 stored");
    let dirty: Vec<_> = (86..106).map(|slice| format!("{slice}.1")).collect();
    rig.run(&format!("report:h1:dirty={} go", dirty.join("+")));
    // 22 slices are free, which is less than the buffer target. Together with the 20 quarantined
    // slices, the target would be met.
    assert_eq!(rig.run("slices").matches(":quarantined").count(), 20);
    let output = rig.run("down:h2 down:h3 release:b go");
    let max_scrubs = output.split("store").map(|write| write.matches(".2>h1)").count()).max();
    assert_eq!(max_scrubs, Some(6), "{output}");
}

#[test]
fn host_being_fenced_receives_only_the_fence() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go break:e1 down:h1 fence:h1 stored device tick:10 stored");
    rig.check(
        "up:h1 report:h1 | h1<fenced
         force:a stored tick:10 | store force:a->ok(0) h1<fenced",
    );
}

#[test]
fn fence_in_progress_is_not_requested_again() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go down:h1 fence:h1");
    rig.check(
        "stored | fence:h1->ok[0] e1.fence(h1) e2.fence(h1)
         cordon:h1 stored | store cordon:h1->ok[0]
         poweroff:h1 stored | store poweroff:h1->ok[0] e1.fence(h1!) e2.fence(h1!)
         enable:h1 stored | store enable:h1->ok[0]",
    );
}
