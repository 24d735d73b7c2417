//! Running VMs that cannot be adopted after a restore: their slices remain quarantined, and each VM
//! has an alarm with its start time. `rig.rs` documents the words of the scripts.

use units::{
    Bytes, ReservationId, UnixMs,
    limits::{RESERVATIONS_PER_HOST_MAX, RESERVATIONS_SINCE_BACKUP_MAX},
};

use super::rig::{Rig, name};
use crate::protocol::{ObservedState, ObservedVm};

/// Returns a rack restored from a backup in which VM a (reservation 1) runs on slice 0 of h1. After
/// the backup, h2 was granted slices 4 and 5. All hosts are connected, and only h2 has not
/// reported.
fn restored_rig() -> Rig {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go commit:a go");
    let backup = rig.disk.clone();
    rig.run("reserve:b@h2=2 go commit:b go");
    rig.disk = backup;
    rig.run("restore stored device tick:10");
    write_pending_records(&mut rig);
    rig.run("up:h1 up:h2 up:h3 report:h1:online=0.1:vm1a=0.1 report:h3");
    write_pending_records(&mut rig);
    rig
}

fn write_pending_records(rig: &mut Rig) {
    rig.run("tick:10");
    while rig.is_storing() {
        rig.complete_write(true, true);
    }
}

/// Returns each VM with an alarm that it is not adopted, and the start of the alarm.
fn unadopted_vms(rig: &Rig) -> Vec<(String, UnixMs)> {
    let alarms = rig.manager.alarms().into_iter().filter(|alarm| alarm.reason == "VM_NOT_ADOPTED");
    alarms.map(|alarm| (alarm.subject.to_string(), alarm.since)).collect()
}

#[track_caller]
fn assert_not_adopted(report: &str) {
    let mut rig = restored_rig();
    rig.run(report);
    write_pending_records(&mut rig);
    let slices = rig.run("slices");
    assert!(slices.starts_with("0.1:online@h1 ") && slices.contains(" 4.1:quarantined@h2 "), "{slices}");
    assert_eq!(unadopted_vms(&rig).len(), 1);
    rig.check("reserve:c@h2=0 | reserve:c->HOST_NOT_SCHEDULABLE");
}

#[test]
fn vm_with_id_of_another_reservation_is_not_adopted() {
    assert_not_adopted("report:h2:online=4.1+5.1:vm1b=4.1+5.1");
    assert_not_adopted("report:h2:online=4.1+5.1:vm1a=4.1+5.1");
}

#[test]
fn vm_with_unassigned_reservation_id_is_not_adopted() {
    let unassigned =
        restored_rig().manager.durable().meta().next_reservation.0 + RESERVATIONS_SINCE_BACKUP_MAX;
    assert_not_adopted(&format!("report:h2:online=4.1+5.1:vm{unassigned}b=4.1+5.1"));
}

#[test]
fn vm_alarm_keeps_its_time_while_the_report_is_unchanged() {
    let mut rig = restored_rig();
    rig.run("report:h2:vm1b=4.1");
    let first = unadopted_vms(&rig);
    assert_eq!(first, [("vm b".to_owned(), UnixMs(rig.now.as_ms()))]);
    rig.run("tick:1000 report:h2:vm1b=4.1");
    assert_eq!(unadopted_vms(&rig), first);
    rig.run("tick:1000 report:h2:vm1c=4.1");
    let other_vm = unadopted_vms(&rig);
    assert_eq!(other_vm, [("vm c".to_owned(), UnixMs(rig.now.as_ms()))]);
    rig.run("tick:1000 report:h2:vm1c=5.1");
    assert_eq!(
        unadopted_vms(&rig),
        [("vm c".to_owned(), UnixMs(rig.now.as_ms()))],
        "the alarm restarts when the slices change"
    );
}

#[test]
fn vm_alarm_lasts_until_its_host_is_fenced() {
    let mut rig = restored_rig();
    rig.run("report:h2:vm1b=4.1 cordon:h2 stored");
    assert_eq!(unadopted_vms(&rig).len(), 1, "the alarm remains after another change of the host");
    rig.run("down:h2 fence:h2 go");
    rig.check("state:h2 | Fenced");
    assert_eq!(unadopted_vms(&rig), []);
}

#[test]
fn vm_not_adopted_notifies_watchers_once() {
    let mut rig = restored_rig();
    rig.manager.take_change_flag();
    rig.run("report:h2:vm1b=4.1");
    assert!(rig.manager.take_change_flag());
    rig.run("report:h2:vm1b=4.1");
    assert!(!rig.manager.take_change_flag());
}

#[test]
fn pending_restore_alarm_names_the_missing_reports() {
    let message = |rig: &Rig| {
        let alarms = rig.manager.alarms();
        alarms.into_iter().find(|alarm| alarm.reason == "RESTORE_PENDING").unwrap().message
    };
    let mut rig = restored_rig();
    assert!(message(&rig).contains("has not sent a complete report"));
    rig.run("report:h2:vm1b=4.1");
    assert!(message(&rig).contains("1 of its VMs could not be adopted"));
    rig.run("restart");
    assert!(message(&rig).contains("EMC e1 has not been compared"), "{}", message(&rig));
}

#[test]
fn adopted_vms_per_host_are_limited_across_reports() {
    let mut rig = restored_rig();
    let h2 = rig.host("h2");
    let vm = |number: usize| {
        let vm = name(&format!("v{number}"));
        let vm = ObservedVm {
            vm,
            pid: 1,
            slices: Vec::new(),
            local: Bytes::ZERO,
            pinned: false,
            uid: None,
            rehome: crate::protocol::ObservedRehome::None,
        };
        (ReservationId(100 + number as u64), vm)
    };
    for first in (0..RESERVATIONS_PER_HOST_MAX + 100).step_by(600) {
        rig.send_report(
            h2,
            ObservedState { vms: (first..first + 600).map(vm).collect(), ..ObservedState::default() },
            true,
        );
        write_pending_records(&mut rig);
    }
    assert_eq!(rig.manager.durable().host(h2).unwrap().reservations().len(), RESERVATIONS_PER_HOST_MAX);
}

#[test]
fn vm_reported_with_unsorted_slices_becomes_ready() {
    let mut rig = Rig::connected().into_restored("", "reserve:b@h2=2 go commit:b go", "");
    rig.run("up:h1 up:h2 up:h3 tick:10 report:h1 report:h3 report:h2:online=0.1+1.1:vm1b=1.1+0.1 go");
    rig.check("wait:b | wait:b->ok(0,1)");
}
