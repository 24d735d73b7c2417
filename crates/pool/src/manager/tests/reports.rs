//! Reports that are outdated, sent too early, or contain slices of other owners. `rig.rs` documents
//! the words of the scripts.

use units::{UnixMs, limits::DESIRED_STATE_RESEND_AFTER};

use super::rig::{Rig, SHARED_RACK};

#[test]
fn late_claim_of_a_former_owner_is_ignored() {
    let mut rig = Rig::connected();
    rig.run(
        "reserve:a@h1=1 go release:a stored tick:10 apply:h1 tick:10 stored down:h1 device tick:10 stored",
    );
    rig.check(
        "slices | 0.2:scrubbing@h2
         up:h1 report:h1:online=0.1 | h1<nothing
         state:h1 | Up
         report:h1:online=0.2 | h1.close(FalseClaim:0.2)",
    );
}

#[test]
fn outdated_report_is_not_checked_for_false_claims() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go");
    rig.check(
        "report:h1:early:online=3.7 state:h1 | Up
         report:h1:online=3.7 | h1.close(FalseClaim:3.7)",
    );
}

#[test]
fn claim_of_a_slice_that_waits_for_a_scrub_is_ignored() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go release:a stored tick:10 apply:h1 tick:10 stored down:h2 down:h3 down:h1");
    rig.run("device tick:10 stored");
    rig.check("slices | 0.1:scrubbing");
    rig.run("cordon:h1 stored");
    let output = rig.run("up:h1 report:h1:online=0.1");
    assert!(!output.contains("close"), "{output}");
}

#[test]
fn late_claim_of_the_epoch_of_a_free_slice_is_ignored() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go release:a go");
    rig.check(
        "slices |
         report:h1:online=0.2 state:h1 | Up
         report:h1:online=0.3 | h1.close(FalseClaim:0.3)",
    );
}

#[test]
fn late_claim_of_a_dirty_slice_is_ignored() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 stored device tick:10 stored report:h1:dirty=0.1 go");
    rig.check(
        "slices | 0.1:quarantined
         report:h1:online=0.1 state:h1 | Up",
    );
}

#[test]
fn vm_reported_with_a_dirty_slice_is_not_adopted() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 stored device tick:10 stored report:h1:dirty=0.1 go");
    rig.check("report:h1:vm1a=0.1 alarms | SLICE_QUARANTINED RESERVATION_BROKEN");
}

#[test]
fn claim_of_a_former_but_not_of_a_foreign_slice_is_ignored() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go release:a go reserve:a@h1=1!2 go");
    rig.check(
        "slices | 0.3:online@h1
         report:h2:online=0.1 |
         report:h3:online=0.1 |
         report:h3:online=0.3 | h3.close(FalseClaim:0.3)",
    );
}

#[test]
fn claim_is_checked_only_after_its_device_is_compared() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go");
    rig.check(
        "restart up:h1 up:h2 | e1.contents e2.contents h1<nothing h2<nothing
         report:h1:online=0.5 report:h2:online=0.1 |
         device report:h2:online=0.1 | h2.close(FalseClaim:0.1)
         report:h1:online=0.5 | h1.close(FalseClaim:0.5)",
    );
}

#[test]
fn agent_reconnects_as_the_same_instance() {
    Rig::connected().check(
        "up:h1#5 down:h1 | h1<nothing
         up:h1#5 | h1<nothing
         state:h1 | Up",
    );
}

#[test]
fn restart_during_a_failed_write_is_durable_before_the_report() {
    Rig::connected().check(
        "down:h1 fence:h1 go
         reserve:a@h2=1 lost up:h1/b2 reload tick:10 stored
         state:h1 | Up",
    );
}

#[test]
fn time_of_the_last_message_is_recorded() {
    let mut rig = Rig::connected();
    let host = rig.host("h1");
    rig.run("tick:500 report:h1:early tick:300");
    let received = UnixMs(rig.now.as_ms() - 300);
    assert_eq!(rig.manager.agent_identity(host).1, Some(received));
    rig.run("up:h1");
    assert_eq!(rig.manager.agent_identity(host).1, Some(UnixMs(rig.now.as_ms())));
}

#[test]
fn state_after_an_answered_state_contains_only_changes() {
    let mut rig = Rig::connected();
    assert_eq!(rig.incremental_states, 0);
    rig.run("reserve:a@h1=1 go");
    assert_eq!(rig.incremental_states, 1);
    rig.run("release:a go");
    assert!(rig.incremental_states > 1);
}

#[test]
fn resent_desired_state_is_complete() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 stored device tick:10 stored");
    let before = rig.incremental_states;
    for _ in 0..DESIRED_STATE_RESEND_AFTER.as_ms() / 500 {
        rig.run("tick:500 report:h1:early");
    }
    rig.check("slices | 0.1:onlining@h1");
    assert_eq!(rig.incremental_states, before, "the desired state may have been lost, too");
    rig.check("apply:h1 tick:10 stored slices | store 0.1:online@h1");
}

/// While h1 is disconnected, the device grants its slice to h2 under a later epoch. An adopted VM
/// of h2 must receive the handle of this epoch.
#[test]
fn adopted_vm_receives_the_handle_of_its_own_epoch() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go down:h1");
    rig.set_grant(0, Some((3, "h2")));
    rig.run("reserve:x@h2=1 lost reload device tick:10 stored");
    rig.check("slices | 0.3:quarantined@h2");
    let output = rig.run("report:h2:online=0.3:vm9b=0.3 go");
    assert!(output.contains("h2<b=0.3"), "{output}");
    rig.check("slices | 0.3:online@h2");
}

/// The record of an EMC that cannot revoke access has lost a grant before a restore. The slice must
/// remain with its host.
#[test]
fn restored_slice_stays_with_the_host_that_may_reach_it() {
    let mut rig = Rig::connected_with(SHARED_RACK);
    rig.run("cordon:e1 reserve:a@h1=1 go");
    rig.set_grant(4, None);
    rig.run("restore stored device tick:10 stored");
    let slices = rig.run("slices");
    assert!(slices.contains("4.1:quarantined@h1"), "{slices}");
}

#[test]
fn missing_report_causes_request_for_complete_report() {
    let mut rig = Rig::connected();
    rig.check(
        "report:h1:part:after=0>1 |
         report:h1:part:after=2>3 | h1<report
         report:h1:part:after=3>4 |
         report:h2 report:h3 tick:2000 report:h1:part:after=4>5 | h1<report
         report:h1:after=5>6 |
         report:h2 report:h3 tick:2000 report:h1:part:after=6>7 |",
    );
}

#[test]
fn complete_report_older_than_the_gap_does_not_close_it() {
    let mut rig = Rig::connected();
    rig.check(
        "report:h1:part:after=3>4 | h1<report
         report:h1:after=1>2 |
         report:h2 report:h3 tick:2000 report:h1:part:after=4>5 | h1<report",
    );
}

#[test]
fn first_report_of_a_session_must_be_complete() {
    let mut rig = Rig::connected();
    rig.run("up:h1");
    rig.check("report:h1:part:after=1>2 | h1<report");
}

/// The first part of a report is lost with a failed write. The report must not count as complete.
#[test]
fn report_with_a_reload_between_its_parts_is_not_complete() {
    for is_reloaded in [false, true] {
        let mut rig = Rig::connected();
        rig.run("reserve:a@h1=1 go commit:a go down:h1 up:h1");
        rig.run("report:h1:more:after=0>1:vm1a=0.1");
        if is_reloaded {
            rig.run("reserve:b@h2=1 lost reload device");
            rig.write_all();
        }
        rig.run("report:h1:nth=1:after=0>1");
        let is_requested = rig.run("report:h1:part:after=1>2").contains("h1<report");
        assert_eq!(is_requested, is_reloaded);
    }
}

#[test]
fn report_without_its_first_part_is_not_complete() {
    let mut rig = Rig::connected();
    rig.run("up:h1");
    rig.check(
        "report:h1:nth=1:after=0>1 |
         report:h1:part:after=1>2 | h1<report",
    );
}

/// After the comparison of an EMC, hosts must send complete reports, so that VMs can be adopted
/// without a reconnection of the agent.
#[test]
fn compared_emc_requests_reports_from_its_hosts() {
    let mut rig = Rig::connected();
    rig.run("report:h1:after=0>1 report:h1:part:after=1>2 break:e1 reserve:a@h1=1 stored device");
    rig.run("recover:e1 tick:1000 device tick:10 stored");
    let output = rig.run("report:h1:part:after=2>3");
    assert!(output.contains("h1<report"), "{output}");
    rig.run("report:h1:after=3>4 report:h2 report:h3 tick:2000");
    rig.check("report:h1:part:after=4>5 |");
}

#[test]
fn quarantined_slice_requests_reports_from_hosts() {
    let mut rig = Rig::connected();
    rig.run("report:h1:after=0>1");
    rig.set_grant(0, Some((7, "h2")));
    rig.check(
        "report:h1:part:after=1>2 |
         reserve:a@h1=1 stored device tick:10 stored slices | store reserve:a->ok(0) e1.grant(0.1>h1) store h1<nothing 0.7:quarantined@h2
         report:h1:part:after=2>3 | h1<report",
    );
}
