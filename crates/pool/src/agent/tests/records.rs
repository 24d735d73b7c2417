//! A process never receives a slice that is recorded for another VM.

use super::*;

#[test]
fn recorded_slice_of_a_running_vm_is_not_passed_to_another() {
    check(
        &script_after_attach("desired:2:b=1.1 attach:b@200"),
        "refuse:2:VM a is attached to process 100, which still runs",
    );
    check(
        &script_after_attach("desired:2:b=1.1+2.1 ok:2.1 attach:b@200"),
        "refuse:2:VM a is attached to process 100, which still runs",
    );
}

#[test]
fn slice_of_a_vm_being_recorded_is_not_passed_to_another() {
    let recording = "up desired:1:a=1.1 ok:1.1 attach:a@100 desired:2:b=1.1 attach:b@200";
    check(recording, "refuse:2:VM a is attached to process 100, which still runs");
}

#[test]
fn recorded_slice_of_an_ended_vm_is_not_passed_to_another() {
    check(
        &script_after_attach("gone:a desired:2:b=1.1 attach:b@200"),
        "refuse:2:VM a was attached to process 100, which has ended: create a new reservation",
    );
    let dead = vec![recovered_vm("a", "1.1", false)];
    check_recovered_vms(dead, "up desired:1:b=1.1", "online:1.1");
    let dead = vec![recovered_vm("a", "1.1", false)];
    check_recovered_vms(
        dead,
        "up desired:1:b=1.1 ok:1.1 attach:b@200",
        "refuse:1:VM a was attached to process 100, which has ended: create a new reservation",
    );
}
