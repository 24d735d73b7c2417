//! Long work that the manager splits into bounded steps, with other events between the steps.
//! `rig.rs` documents the words of the scripts.

use super::rig::Rig;

/// The rig compares every sent desired state with the durable ledger.
#[test]
fn state_built_in_several_steps_includes_concurrent_changes() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=3 reserve:b@h1=2 go");
    rig.manager.set_chunk_size(1);
    let output = rig.run("up:h1");
    assert!(!output.contains("h1<"), "{output}");
    let output = rig.run("reserve:c@h1=1 stored device release:a tick:10 stored");
    assert!(!output.contains("h1<"), "{output}");
    rig.run("go");
    rig.check("slices | 4.1:online@h1 5.1:online@h1 6.1:online@h1");
}

#[test]
fn vms_without_slices_are_sent_in_several_steps() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=0 reserve:b@h1=0 go");
    rig.manager.set_chunk_size(1);
    rig.check(
        "up:h1 |
         tick:0 tick:0 | h1<a=;b=",
    );
}

#[test]
fn unfinished_desired_state_of_a_fenced_host_is_dropped() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=3 go");
    rig.manager.set_chunk_size(1);
    rig.run("up:h1 down:h1 fence:h1 go");
    rig.check("state:h1 | Fenced");
}

#[test]
fn emc_is_up_only_after_all_its_slices_are_compared() {
    let mut rig = Rig::new("e1=4 h1:e1");
    rig.set_grant(3, Some((1, "h1")));
    rig.run("restart");
    rig.manager.set_chunk_size(1);
    rig.run("device tick:0");
    let is_up = |rig: &Rig| rig.manager.durable().emcs().all(|(_, emc)| emc.up);
    assert!(!is_up(&rig));
    rig.run("tick:0 tick:0 tick:0 tick:0 tick:0 tick:0 tick:0 tick:0 tick:10");
    rig.write_all();
    assert!(is_up(&rig));
    rig.check("alarms | SLICE_QUARANTINED");
}
