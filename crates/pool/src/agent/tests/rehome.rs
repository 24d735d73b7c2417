//! Tests of moves of pool memory to local memory.

use super::*;

/// VM a runs in process 100 with slice 1, and the desired state requires attempt 1 to move it.
fn script_after_start(more: &str) -> String {
    script_after_attach(&format!("desired:2:a!1=1.1 {more}"))
}

/// Returns a VM whose process was found running, with a control socket.
fn recovered(is_rehomed: bool) -> Vec<RecoveredVm> {
    let RecoveredVm { record, is_alive } = recovered_vm("a", "1.1", true);
    let control_socket = Some("/run/a.sock".to_owned());
    vec![RecoveredVm { record: VmRecord { control_socket, is_rehomed, ..record }, is_alive }]
}

#[test]
fn memory_is_moved_and_its_slices_are_released() {
    check(&script_after_start(""), "rehome:a report:2:online=1.1:vms=a");
    check(&script_after_start("desired:3:a!1=1.1"), "report:3:online=1.1:vms=a");
    check(&script_after_start("moved:a"), "record:a");
    check(&script_after_start("moved:a report"), "report:2:online=1.1:vms=a");
    check(&script_after_start("moved:a recorded:a"), "changes:2:vms=a(1088MiB)");
    check(&script_after_start("moved:a recorded:a report"), "report:2:online=1.1:vms=a(1088MiB)");
    let released = "moved:a recorded:a desired:3:a=:release=1.1";
    check(&script_after_start(released), "offline:1.1?");
    check(
        &script_after_start(&format!("{released} ok:1.1")),
        "record:a report:3:released=1.1:vms=a(1088MiB)",
    );
    check(
        &script_after_start(&format!("{released} ok:1.1 gone:a")),
        "free:a changes:3:released=1.1:ended=a:clean",
    );
}

#[test]
fn process_that_kept_a_moved_slice_keeps_it_open() {
    let released = script_after_start("moved:a recorded:a desired:3:a=:release=1.1");
    check(&format!("{released} fail:1.1 tick:1000"), "offline:1.1? changes:3");
}

#[test]
fn process_gets_only_its_local_memory_after_the_move() {
    check(&script_after_start("moved:a recorded:a attach:a@100"), "pass:2=");
}

#[test]
fn failed_attempt_is_reported_until_the_next_one() {
    check(&script_after_start("unmoved:a"), "changes:2:vms=a(busy1)");
    check(&script_after_start("unmoved:a desired:3:a!1=1.1"), "report:3:online=1.1:vms=a(busy1)");
    check(&script_after_start("unmoved:a desired:3:a!2=1.1"), "rehome:a report:3:online=1.1:vms=a");
    check(&script_after_start("unmoved:a desired:3:a=1.1"), "report:3:online=1.1:vms=a");
}

/// A restored ledger counts attempts from 1 again.
#[test]
fn number_of_a_recorded_failure_can_be_used_again() {
    let recorded = script_after_start("unmoved:a desired:3:base=2:a=1.1");
    check(&format!("{recorded} desired:4:base=3:a!1=1.1"), "rehome:a changes:4");
}

#[test]
fn move_that_is_no_longer_desired_is_cancelled_once() {
    check(&script_after_start("desired:3:a=1.1"), "cancel_rehome:a report:3:online=1.1:vms=a");
    check(&script_after_start("desired:3:a=1.1 desired:4:a=1.1"), "report:4:online=1.1:vms=a");
    check(&script_after_start("desired:3"), "report:3:online=1.1:vms=a");
    check(&script_after_start("desired:3 moved:a recorded:a"), "changes:3:vms=a(1088MiB)");
    let next = script_after_start("desired:3:a!2=1.1");
    check(&next, "cancel_rehome:a report:3:online=1.1:vms=a");
    check(&format!("{next} unmoved:a"), "rehome:a changes:3:vms=a");
    check(&format!("{next} moved:a"), "record:a");
}

/// `!1x` cancels attempt 1.
#[test]
fn cancelled_attempt_is_reported() {
    let cancelled = script_after_start("desired:3:a!1x=1.1");
    check(&cancelled, "cancel_rehome:a report:3:online=1.1:vms=a");
    check(&format!("{cancelled} desired:4:a!1x=1.1"), "report:4:online=1.1:vms=a");
    check(&format!("{cancelled} unmoved:a"), "changes:3:vms=a(busy1)");
    check(&format!("{cancelled} unmoved:a desired:4:a!1x=1.1"), "report:4:online=1.1:vms=a(busy1)");
    check(&format!("{cancelled} moved:a recorded:a"), "changes:3:vms=a(1088MiB)");
    let not_started = script_after_attach("desired:2:a!1x=1.1");
    check(&not_started, "report:2:online=1.1:vms=a(cancelled1)");
    check(&format!("{not_started} desired:3:a!2=1.1"), "rehome:a report:3:online=1.1:vms=a");
}

#[test]
fn restarted_agent_cancels_a_cancelled_attempt() {
    let check = |script: &str, expected: &str| check_recovered_vms(recovered(false), script, expected);
    check("up ok:1.1 desired:2:a!1x=1.1", "cancel_rehome:a? report:2:online=1.1:vms=a");
    check("up ok:1.1 desired:2:a!1x=1.1 unmoved:a", "changes:2:vms=a(busy1)");
    check("up ok:1.1 desired:2:a!1x=1.1 moved:a", "record:a");
    // The kernel has moved the memory, because the process has no control socket.
    let check = |script: &str, expected: &str| {
        check_recovered_vms(vec![recovered_vm("a", "1.1", true)], script, expected);
    };
    check("up desired:2:a!1x=1.1", "");
    check("up desired:2:a!1x=1.1 ok:1.1", "report:2:online=1.1:vms=a(cancelled1)");
}

#[test]
fn record_of_a_moved_vm_is_written_until_it_is_durable() {
    let failed = script_after_start("moved:a unrecorded:a");
    check(&failed, "");
    check(&format!("{failed} tick:499"), "");
    check(&format!("{failed} tick:500"), "record:a");
    check(&format!("{failed} tick:500 recorded:a"), "changes:2:vms=a(1088MiB)");
}

#[test]
fn restarted_agent_asks_the_process_for_the_result() {
    let check = |script: &str, expected: &str| check_recovered_vms(recovered(false), script, expected);
    check("up ok:1.1 desired:2:a=1.1", "cancel_rehome:a? report:2:online=1.1:vms=a");
    check("up ok:1.1 desired:2:a=1.1 moved:a", "record:a");
    check("up ok:1.1 desired:2:a=1.1 unmoved:a", "");
    check("up ok:1.1 desired:2:a=1.1 unmoved:a desired:3:a!1=1.1", "rehome:a report:3:online=1.1:vms=a");
    check("up ok:1.1 desired:2:a!1=1.1", "rehome:a? report:2:online=1.1:vms=a");
    check("up desired:2:a!1=1.1", "");
    check("up desired:2:a!1=1.1 ok:1.1", "rehome:a? report:2:online=1.1:vms=a");
}

/// Otherwise, the slices of a VM that was moved and then released would be drained until its end.
#[test]
fn restarted_agent_asks_the_process_of_a_released_vm() {
    let check = |script: &str, expected: &str| check_recovered_vms(recovered(false), script, expected);
    let released = "up ok:1.1 desired:2:release=1.1";
    check(released, "cancel_rehome:a? report:2:online=1.1:vms=a");
    check(&format!("{released} moved:a"), "record:a");
    check(&format!("{released} moved:a recorded:a"), "offline:1.1?");
    check(&format!("{released} unmoved:a"), "");
    check(&format!("{released} unmoved:a gone:a"), "free:a offline:1.1?");
    check("up ok:1.1 desired:2", "report:2:online=1.1:vms=a");
}

#[test]
fn restarted_agent_does_not_open_the_slices_of_a_moved_vm() {
    let check = |script: &str, expected: &str| check_recovered_vms(recovered(true), script, expected);
    check("tick:1", "watch:a@100");
    check("up report", "report:0:vms=a(64MiB)");
    check("up desired:2:a=1.1", "report:2:vms=a(64MiB)");
    check("up desired:2:a=:release=1.1", "offline:1.1?");
}

#[test]
fn end_of_the_process_ends_the_move() {
    check(&script_after_start("gone:a moved:a"), "");
    check(&script_after_start("moved:a gone:a recorded:a"), "");
}
