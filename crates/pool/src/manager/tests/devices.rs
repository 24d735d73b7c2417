//! Devices: calls are repeated until the device confirms them, and differences from the ledger lead
//! to quarantine. `rig.rs` documents the words of the scripts.

use units::limits::{OWNER_EPOCH_MAX, SLICE_ALARMS_MAX};
use units::{Epoch, SliceId};

use super::rig::{Rig, SHARED_RACK};
use crate::{
    audit::Subject,
    protocol::{FailureReason, Handle, Holding, ObservedState, SliceFailure},
};

/// Returns a rack in which h1 has slice 0 online and drains slice 1. Slice 4 never had an owner.
fn rig_with_slices() -> Rig {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 cordon:e2 go reserve:b@h1=1 enable:e2 go release:b stored");
    rig.check("slices | 0.1:online@h1 1.1:draining@h1");
    rig
}

/// Changes the devices, restarts the manager, and checks the state of the slices.
fn check_comparison(change: impl Fn(&mut Rig), expected: &str) {
    let mut rig = rig_with_slices();
    change(&mut rig);
    rig.run("restart device tick:10");
    if rig.is_storing() {
        rig.run("stored");
    }
    assert_eq!(rig.run("slices"), expected);
}

#[test]
fn matching_device_changes_nothing() {
    check_comparison(|_| {}, "0.1:online@h1 1.1:draining@h1");
}

#[test]
fn grant_lost_by_the_device_is_quarantined() {
    check_comparison(|rig| rig.set_grant(0, None), "0.1:quarantined 1.1:draining@h1");
    check_comparison(|rig| rig.set_grant(1, None), "0.1:online@h1 1.1:quarantined");
}

#[test]
fn grant_missing_from_the_ledger_is_quarantined() {
    check_comparison(
        |rig| rig.set_grant(4, Some((1, "h2"))),
        "0.1:online@h1 1.1:draining@h1 4.1:quarantined@h2",
    );
    check_comparison(|rig| rig.set_grant(0, Some((1, "h2"))), "0.1:quarantined@h2 1.1:draining@h1");
    check_comparison(|rig| rig.set_grant(0, Some((3, "h1"))), "0.3:quarantined@h1 1.1:draining@h1");
}

/// Returns a rack in which VM a runs on slice 0 of e1. The record of e1 was emptied before a
/// restart of the manager.
fn rig_with_emptied_device() -> Rig {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go commit:a go report:h1:online=0.1:vm1a=0.1 go");
    rig.set_grant(0, None);
    rig.set_highest_epoch(0, 0);
    rig.run("restart device go up:h1 up:h2 up:h3 tick:10 report:h1:online=0.1:vm1a=0.1 go");
    rig
}

#[test]
fn device_without_the_epoch_of_a_vm_is_failed() {
    let mut rig = rig_with_emptied_device();
    rig.check("slices alarms state:h1 | 0.1:online@h1 EMC_FAILED Up");
    let message = &rig.manager.alarms()[0].message;
    assert!(message.contains("has no record of epoch 1 of slice 0"), "{message}");
    rig.set_grant(0, Some((1, "h1")));
    rig.check(
        "tick:1000 go
         slices alarms | 0.1:online@h1",
    );
}

/// Returns a rack in which VM a runs on slice 0 of e1. The record of e1 was damaged before a
/// restart of the manager, and contains a later epoch than the grant.
fn rig_with_damaged_epoch() -> Rig {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go commit:a go report:h1:online=0.1:vm1a=0.1 go");
    rig.set_highest_epoch(0, 9);
    rig.run("restart device go up:h1 up:h2 up:h3 tick:10 report:h1:online=0.1:vm1a=0.1 go");
    rig
}

#[test]
fn device_with_a_later_epoch_than_a_running_vm_is_failed() {
    let mut rig = rig_with_damaged_epoch();
    rig.check("slices alarms state:h1 | 0.1:online@h1 EMC_FAILED Up");
    let message = &rig.manager.alarms()[0].message;
    assert!(message.contains("slice 0 is granted with epoch 1, but its highest epoch is 9"), "{message}");
    rig.set_highest_epoch(0, 1);
    rig.check(
        "tick:1000 go
         slices alarms | 0.1:online@h1",
    );
}

#[test]
fn device_with_a_damaged_epoch_recovers_after_its_vms_end() {
    let mut rig = rig_with_damaged_epoch();
    rig.run("release:a go");
    rig.check(
        "slices alarms | 0.1:draining@h1 EMC_FAILED
         report:h1:ended=1 tick:1000 go
         slices alarms | 0.9:quarantined@h1 SLICE_QUARANTINED
         enable:0 go
         slices alarms |",
    );
}

#[test]
fn foreign_device_reserves_no_host_id_and_grants_nothing() {
    let mut rig = rig_with_emptied_device();
    rig.set_grant(1, Some((7, "h2")));
    rig.check(
        "tick:1000 device tick:10 | e1.contents
         slices alarms | 0.1:online@h1 EMC_FAILED
         reserve:b@h1=5 | reserve:b->OUT_OF_SLICES",
    );
}

#[test]
fn device_without_its_record_recovers_after_its_vms_end() {
    let mut rig = rig_with_emptied_device();
    rig.run("release:a go");
    rig.check(
        "slices alarms | 0.1:draining@h1 EMC_FAILED
         report:h1:ended=1 tick:1000 go
         slices alarms | 0.1:quarantined SLICE_QUARANTINED
         enable:0 go
         slices alarms |",
    );
}

#[test]
fn device_without_never_granted_epochs_is_used() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 stored restart device go up:h1 go");
    rig.check("slices alarms | 0.1:online@h1");
}

#[test]
fn free_slice_with_later_device_epoch_is_scrubbed() {
    // In a new store every slice is free, but the device has recorded owners.
    check_comparison(|rig| rig.set_highest_epoch(4, 7), "0.1:online@h1 1.1:draining@h1 4.7:scrubbing");
    let mut rig = rig_with_slices();
    rig.set_highest_epoch(4, 7);
    rig.check(
        "restart up:h1 up:h2 up:h3 go
         slices | 0.1:online@h1",
    );
}

#[test]
fn slice_with_an_unknown_grant_is_in_doubt_until_its_holder_has_reported() {
    let mut rig = rig_with_slices();
    rig.set_grant(0, Some((1, "h2")));
    rig.run("restart device tick:10 stored up:h1 report:h1 tick:10");
    rig.write_all();
    rig.check("enable:0 | enable:0->SLICE_IN_DOUBT");
    rig.run("up:h2 report:h2 tick:10");
    rig.write_all();
    let output = rig.run("enable:0");
    assert!(!output.contains("SLICE_IN_DOUBT"), "{output}");
}

#[test]
fn vm_with_a_lost_slice_is_broken_and_raises_an_alarm() {
    let mut rig = rig_with_slices();
    rig.set_grant(0, None);
    rig.check(
        "restart device tick:10 stored up:h1 | e1.contents e2.contents store h1<release=1.1
         alarms | SLICE_QUARANTINED RESERVATION_BROKEN
         wait:a | wait:a->RESERVATION_WRONG_STATE
         release:a go
         slices | 0.1:quarantined
         enable:0 | enable:0->SLICE_IN_DOUBT
         up:h2 go enable:0 go
         slices alarms |",
    );
}

/// The write after the comparison of a device fails, so the result of the comparison is lost. The
/// comparison must be repeated, and the lost grant quarantined.
#[test]
fn comparison_is_repeated_after_a_failed_write() {
    let mut rig = rig_with_slices();
    rig.set_grant(0, None);
    rig.run("restart device tick:10 lost reload device tick:10 stored");
    assert_eq!(rig.run("slices"), "0.1:quarantined 1.1:draining@h1");
}

/// The contents of the device arrive during a load of the store. They must be requested again.
#[test]
fn device_reply_during_a_reload_is_requested_again() {
    let mut rig = rig_with_slices();
    rig.run("restart cordon:h2 lost device reload go up:h1 go");
    assert_eq!(rig.run("slices"), "0.1:online@h1", "the draining slice is free");
}

#[test]
fn grant_is_requested_once_per_run_of_the_manager() {
    Rig::connected().check(
        "reserve:a@h1=1 stored | store reserve:a->ok(0) e1.grant(0.1>h1)
         tick:100 apply:h1 tick:100 wait:a tick:100 |
         restart device | e1.contents e2.contents e1.grant(0.1>h1)
         up:h1 go
         slices | 0.1:online@h1",
    );
}

#[test]
fn agent_connected_before_a_comparison_receives_its_state_later() {
    // The first desired state has no VM because the device is not compared. The second desired
    // state must have another version, so that a report on the first does not answer it.
    Rig::connected().check(
        "reserve:a@h1=1 go restart
         up:h1 apply:h1 tick:10 | h1<nothing
         device tick:10 | store
         stored | h1<a=0.1",
    );
}

#[test]
fn failed_device_rejects_reservations_and_recovers() {
    Rig::connected().check(
        "break:e1 reserve:a@h1=1 stored | store reserve:a->ok(0) e1.grant(0.1>h1)
         device alarms | EMC_FAILED
         reserve:b@h2=5 | reserve:b->OUT_OF_SLICES
         reserve:b@h2=1 | store
         stored | reserve:b->ok(4) e2.grant(4.1>h2)
         tick:999 |
         tick:1 device | e1.contents
         recover:e1 tick:999 | store
         tick:1 device alarms | e1.contents e1.grant(0.1>h1)
         go
         slices | 0.1:online@h1 4.1:online@h2",
    );
}

#[test]
fn release_overtakes_a_pending_grant() {
    Rig::connected().check(
        "reserve:a@h1=1 | store
         release:a |
         stored | reserve:a->ok(0) store
         stored | release:a->ok(0) e1.revoke(0.1)
         go
         slices |",
    );
}

#[test]
fn nonzero_slice_is_quarantined() {
    Rig::connected().check(
        "reserve:a@h1=2~ stored device stored stored
         tick:3 report:h1:dirty=0.1 | h1<a=0.1+1.1 store
         stored | e1.revoke(0.1) reserve:a->RESERVATION_WRONG_STATE
         alarms | SLICE_QUARANTINED RESERVATION_BROKEN
         release:a go
         slices | 0.1:quarantined
         enable:1 | enable:1->SLICE_WRONG_STATE
         enable:0 go
         slices alarms |",
    );
}

#[test]
fn slice_is_scrubbed_by_a_live_attached_host() {
    // h3 is not attached to e1, and h1 is not connected, so h2 must scrub the slice.
    let mut rig = Rig::connected();
    rig.check(
        "reserve:a@h1=1 go release:a stored tick:10 apply:h1 down:h1
         tick:10 stored | store e1.revoke(0.1)
         device tick:10 stored | store e1.grant(0.2>h2)
         down:h2 device tick:10 stored slices | store 0.2:scrubbing@h2",
    );
    // A disconnected scrubber keeps the slice until it is fenced.
    rig.check(
        "fence:h2 go slices | store fence:h2->ok[0] e1.fence(h2) e2.fence(h2) store e1.revoke(0.2) store 0.2:scrubbing
         up:h1 go
         slices |",
    );
}

/// Returns a rack in which h1 must scrub slice 0.
fn rig_with_scrub() -> Rig {
    let mut rig = Rig::connected();
    rig.check(
        "reserve:a@h1=1 go down:h2 down:h3 release:a stored tick:10 apply:h1 tick:10 stored
         device tick:10 stored device report:h1 tick:10 stored report:h1 tick:10
         slices | 0.2:scrubbing@h1",
    );
    rig
}

#[test]
fn only_complete_scrub_of_current_epoch_is_accepted() {
    rig_with_scrub().check(
        "report:h1:half=0.2 report:h1:scrubbed=0.1 report:h1:scrubbed=0.3 tick:10 |
         report:h1:scrubbed=0.2 tick:10 | store
         stored | e1.revoke(0.2) h1<nothing
         slices | 0.2:scrubbing@h1
         device tick:10 | store
         stored slices |",
    );
}

/// The agent restarts before the result of its scrub is durable. The new agent must not receive the
/// scrub: it could zero a slice of the next owner if the device cannot revoke access.
#[test]
fn reported_scrub_is_not_sent_to_the_next_agent() {
    rig_with_scrub().check(
        "report:h1:scrubbed=0.2 tick:10 | store
         down:h1 up:h1 tick:10 |
         stored | e1.revoke(0.2) h1<nothing",
    );
    // If the write of the result fails, the new agent must scrub the slice.
    rig_with_scrub().check(
        "report:h1:scrubbed=0.2 tick:10 down:h1 up:h1 lost | store reload
         reload | e1.contents e2.contents h1<scrub=0.2",
    );
}

#[test]
fn slice_that_cannot_be_scrubbed_is_quarantined() {
    rig_with_scrub().check(
        "report:h1:broken=0.2 tick:10 stored | store e1.revoke(0.2) h1<nothing
         device tick:10 stored
         slices alarms | 0.2:quarantined SLICE_QUARANTINED",
    );
}

#[test]
fn unrecorded_fence_is_not_treated_as_lost_grants() {
    // The device revoked the host's grants before the manager restarted, but the fence was not
    // recorded. The slices must not be quarantined as lost grants.
    let mut rig = rig_with_slices();
    rig.run("down:h1 fence:h1 stored");
    rig.set_grant(0, None);
    rig.set_grant(1, None);
    rig.check(
        "restart device | e1.contents e2.contents e1.fence(h1) e2.fence(h1)
         slices alarms | 0.1:draining@h1 1.1:draining@h1 HOST_FENCING
         up:h2 go
         slices |",
    );
}

/// Returns a rack in which e1 is being compared with the ledger, while a call to fence h1 is in
/// progress at e1. The contents of e1 include a grant of slice 3 to h1 that the ledger does not
/// contain.
fn rig_with_fence_during_comparison() -> Rig {
    let mut rig = Rig::new("e1=4 h1:e1 h2:e1");
    rig.run("up:h1 up:h2 go down:h1 fence:h1 stored cordon:h2 lost reload");
    rig.set_grant(3, Some((1, "h1")));
    rig.manager.set_chunk_size(1);
    rig.run("contents:e1");
    rig
}

/// The fence has revoked the grant after the device returned its contents. The slice must not wait
/// for an operator.
#[test]
fn comparison_is_repeated_after_a_fence() {
    let mut rig = rig_with_fence_during_comparison();
    rig.check("device | e1.contents");
    rig.run("go");
    rig.check("slices alarms state:h1 | HOST_FENCED Fenced");
}

#[test]
fn emc_that_fails_during_its_comparison_is_not_used() {
    let mut rig = rig_with_fence_during_comparison();
    rig.run("break:e1 device go");
    rig.check("alarms slices | HOST_FENCED EMC_FAILED CAPACITY_ZERO");
}

/// Returns a rack in which device calls for slice 1 of VM b fail. VM a has slice 0, and VM c has
/// slice 2.
fn rig_with_failing_slice() -> Rig {
    let mut rig = Rig::new("e1=4 h1:e1 h2:e1");
    rig.run("up:h1 up:h2 go fault:1 reserve:a@h1=1 reserve:b@h1=1 reserve:c@h1=1 go");
    rig
}

#[test]
fn failing_slice_does_not_affect_others_of_its_device() {
    rig_with_failing_slice().check(
        "slices alarms | 0.1:online@h1 1.1:assigned@h1 2.1:online@h1 SLICE_FAILING
         reserve:d@h2=1 go
         slices | 0.1:online@h1 1.1:assigned@h1 2.1:online@h1 3.1:online@h2
         repair:1 tick:200 go
         slices alarms | 0.1:online@h1 1.1:online@h1 2.1:online@h1 3.1:online@h2",
    );
}

#[test]
fn failing_slice_is_retried_with_doubling_delays() {
    rig_with_failing_slice().check(
        "tick:179 |
         tick:1 device | e1.grant(1.1>h1)
         tick:399 |
         tick:1 device | e1.grant(1.1>h1)
         report:h1 report:h2 tick:799 |
         tick:1 device | e1.grant(1.1>h1)
         report:h1 report:h2 tick:1599 |
         tick:1 device | e1.grant(1.1>h1)
         report:h1 report:h2 tick:1999 |
         slices alarms | 0.1:online@h1 1.1:assigned@h1 2.1:online@h1 SLICE_FAILING",
    );
}

#[test]
fn watchers_are_notified_when_a_failing_slice_recovers() {
    let mut rig = rig_with_failing_slice();
    rig.run("repair:1 tick:200");
    rig.manager.take_change_flag();
    rig.run("device");
    rig.check("alarms |");
    assert!(rig.manager.take_change_flag());
}

#[test]
fn repeatedly_failing_grant_quarantines_slice() {
    let mut rig = rig_with_failing_slice();
    rig.run("tick:200 go tick:400 go tick:800 go report:h1 report:h2 tick:1600 go report:h1 report:h2 tick:2000 go report:h1 report:h2");
    rig.check(
        "slices alarms | 0.1:online@h1 1.1:quarantined@h1 2.1:online@h1 SLICE_QUARANTINED RESERVATION_BROKEN
         wait:b wait:c | wait:b->RESERVATION_WRONG_STATE wait:c->ok(2)
         tick:2000 go report:h1 report:h2 tick:2000 go
         slices | 0.1:online@h1 1.1:quarantined@h1 2.1:online@h1",
    );
    let message = &rig.manager.alarms()[0].message;
    assert!(message.contains("slice 1 of emc e1") && message.contains("(os error 21)"), "{message}");
    // A requalified slice is quarantined again while its calls fail, and becomes free after they
    // succeed.
    rig.check(
        "enable:1 go tick:200 go tick:400 go tick:800 go report:h1 report:h2 tick:1600 go report:h1 report:h2 tick:2000 go
         slices alarms | 0.1:online@h1 1.1:quarantined@h1 2.1:online@h1 SLICE_QUARANTINED RESERVATION_BROKEN
         report:h1 report:h2 repair:1 enable:1 go
         slices alarms | 0.1:online@h1 2.1:online@h1 RESERVATION_BROKEN",
    );
}

#[test]
fn unrevokable_slice_stays_with_its_host() {
    let mut rig = Rig::new("e1=4 h1:e1 h2:e1");
    rig.run("up:h1 up:h2 go reserve:a@h1=1 reserve:b@h1=1 go fault:0 release:a release:b go");
    rig.check("slices alarms | 0.1:draining@h1 SLICE_FAILING");
    rig.run("tick:200 go tick:400 go tick:800 go report:h1 report:h2 tick:1600 go report:h1 report:h2 tick:2000 go report:h1 report:h2");
    rig.check(
        "slices alarms | 0.1:quarantined@h1 SLICE_QUARANTINED
         reserve:c@h2=4 | reserve:c->OUT_OF_SLICES
         reserve:c@h2=3 go
         restart device go up:h1 up:h2 go
         slices alarms | 0.1:quarantined@h1 1.3:online@h2 2.1:online@h2 3.1:online@h2 SLICE_QUARANTINED
         repair:0 enable:0 go
         slices | 1.3:online@h2 2.1:online@h2 3.1:online@h2",
    );
}

#[test]
fn host_with_an_unrevokable_slice_is_fenced() {
    let mut rig = Rig::new("e1=4 h1:e1 h2:e1");
    rig.run("up:h1 up:h2 go reserve:a@h1=1 reserve:b@h1=1 go fault:0 down:h1 fence:h1 go");
    rig.check(
        "state:h1 slices alarms | Fenced 0.1:draining@h1 HOST_FENCED SLICE_FAILING
         up:h1/b2 go
         state:h1 | Up
         reserve:c@h1=3 go
         slices | 0.1:draining@h1 1.3:online@h1 2.1:online@h1 3.1:online@h1
         repair:0 tick:200 go
         slices | 1.3:online@h1 2.1:online@h1 3.1:online@h1",
    );
}

#[test]
fn release_of_a_failing_slice_waits_for_its_retry() {
    rig_with_failing_slice().check(
        "release:b go
         slices | 0.1:online@h1 1.1:draining@h1 2.1:online@h1
         repair:1 tick:200 go
         slices | 0.1:online@h1 2.1:online@h1",
    );
}

#[test]
fn slice_that_its_host_cannot_release_raises_an_alarm_until_it_is_released() {
    let mut rig = rig_with_slices();
    rig.run("report:h1:online=0.1+1.1:broken=1.1");
    rig.check("slices alarms | 0.1:online@h1 1.1:draining@h1 SLICE_FAILING");
    let alarm = &rig.manager.alarms()[0];
    assert!(alarm.message.ends_with(": its host cannot release it: EIO"), "{}", alarm.message);
    let since = alarm.since;
    rig.run("tick:1000 report:h1:online=0.1+1.1:broken=1.1");
    rig.check("alarms | SLICE_FAILING");
    assert_eq!(rig.manager.alarms()[0].since, since);
    rig.manager.take_change_flag();
    let holding = Holding { slice: SliceId(1), epoch: Epoch(1) };
    let report = |message: &str| {
        let failure = SliceFailure { holding, reason: FailureReason::Host, message: message.to_owned() };
        ObservedState { failed: vec![failure], ..ObservedState::default() }
    };
    rig.send_report(rig.host("h1"), report("EIO"), false);
    assert!(!rig.manager.take_change_flag(), "the alarm is unchanged");
    rig.send_report(rig.host("h1"), report("EBUSY"), false);
    let alarm = &rig.manager.alarms()[0];
    assert!(alarm.message.ends_with(": EBUSY") && alarm.since == since, "{alarm:?}");
    rig.run("report:h1:online=0.1:released=1.1 go");
    rig.check("slices alarms | 0.1:online@h1");
}

/// The device already grants the slice to another host. The slice must be quarantined with this
/// host.
#[test]
fn grant_refused_for_another_holder_is_quarantined() {
    let mut rig = Rig::new("e1=4 h1:e1 h2:e1");
    rig.run("up:h1 up:h2 go");
    rig.set_grant(0, Some((7, "h2")));
    rig.run("reserve:a@h1=1 go");
    rig.check("slices alarms wait:a | 0.7:quarantined@h2 SLICE_QUARANTINED RESERVATION_BROKEN wait:a->RESERVATION_WRONG_STATE");
}

/// A newer grant may arrive before a pending handle is published. The handle of the newer grant
/// must remain.
#[test]
fn pending_handle_does_not_replace_a_later_handle() {
    let mut rig = rig_with_slices();
    let handle = |epoch| (Epoch(epoch), Handle::new("emc", format!("/0.{epoch}")));
    let slice = SliceId(0);
    for (current, pending, published) in [(2, 1, 2), (1, 2, 2), (1, 1, 1)] {
        rig.manager.handles.insert(slice, handle(current));
        rig.manager.pending_handles.insert(slice, handle(pending));
        rig.manager.publish_pending_handles();
        assert_eq!(
            rig.manager.handles[&slice],
            handle(published),
            "epoch {pending} pending, {current} current"
        );
    }
}

/// Quarantined slices above the limit must share one alarm, so that the list of alarms fits into a
/// message.
#[test]
fn quarantined_slices_beyond_the_limit_share_one_alarm() {
    let mut rig = Rig::new("e1=300 h1:e1");
    (0..300).for_each(|slice| rig.set_grant(slice, Some((1, "h1"))));
    rig.run("restart device tick:10");
    rig.write_all();
    let mut alarms = rig.manager.alarms();
    alarms.retain(|alarm| alarm.reason == "SLICE_QUARANTINED");
    assert_eq!(alarms.len(), SLICE_ALARMS_MAX + 1);
    let last = alarms.last().unwrap();
    assert_eq!(last.subject, Subject::Rack);
    assert!(last.message.starts_with("44 more slices are quarantined"), "{}", last.message);
}

/// Checks that every slice up to the limit has a SLICE_FAILING alarm, and that `more` slices share
/// one alarm.
#[track_caller]
fn assert_slice_failing_alarms(rig: &Rig, more: usize) {
    let (rest, listed): (Vec<_>, Vec<_>) =
        rig.manager.alarms().into_iter().partition(|alarm| alarm.subject == Subject::Rack);
    assert_eq!(listed.iter().filter(|alarm| alarm.reason == "SLICE_FAILING").count(), SLICE_ALARMS_MAX);
    assert_eq!(rest.len(), usize::from(more > 0), "{rest:?}");
    assert!(rest.iter().all(|alarm| alarm.message.starts_with(&format!("{more} more slices"))), "{rest:?}");
}

#[test]
fn failing_releases_beyond_the_limit_share_one_alarm() {
    for more in [0, 2] {
        let slices = SLICE_ALARMS_MAX + more;
        let mut rig = Rig::new("e1=300 h1:e1");
        rig.run(&format!("up:h1 go reserve:a@h1={slices} go release:a stored"));
        let failed: Vec<String> = (0..slices).map(|slice| format!("{slice}.1")).collect();
        rig.run(&format!("report:h1:broken={}", failed.join("+")));
        assert_slice_failing_alarms(&rig, more);
    }
}

#[test]
fn failing_device_calls_beyond_the_limit_share_one_alarm() {
    for more in [0, 2] {
        let slices = SLICE_ALARMS_MAX + more;
        let mut rig = Rig::new("e1=300 h1:e1");
        (0..slices).for_each(|slice| drop(rig.run(&format!("fault:{slice}"))));
        rig.run(&format!("up:h1 go reserve:a@h1={slices} go"));
        assert_slice_failing_alarms(&rig, more);
    }
}

/// An epoch of the device is so high that later epochs would overflow. The EMC must count as
/// failed.
#[test]
fn emc_with_an_out_of_range_epoch_is_failed() {
    for epoch in [OWNER_EPOCH_MAX + 1, u64::MAX] {
        let mut rig = Rig::connected();
        rig.set_highest_epoch(0, epoch);
        rig.run("restart device up:h1 up:h2 up:h3 go");
        rig.check("alarms slices | EMC_FAILED");
        rig.set_highest_epoch(0, OWNER_EPOCH_MAX);
        rig.run("tick:1000 go");
        rig.check("alarms slices |");
    }
}

#[test]
fn removed_emc_leaves_no_handles() {
    let mut rig = Rig::connected_with(SHARED_RACK);
    rig.run("cordon:e1 reserve:a@h1=1 go release:a go");
    assert!(!rig.manager.places.is_empty());
    rig.run("rack:e1=4&h1:e1&h2:e1&h3: go");
    assert!(rig.manager.places.is_empty() && rig.manager.handles.is_empty());
}
