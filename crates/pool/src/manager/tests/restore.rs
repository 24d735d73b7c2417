//! Restore of the ledger from a backup. A running VM must keep its memory, even if the backup does
//! not contain the VM and an EMC has failed. `rig.rs` documents the words of the scripts.

use super::rig::{Rig, name};
use crate::audit::Subject;

/// Returns a restored rack without connected agents. The backup is taken after the script `before`;
/// the ledger loses the effects of the script `after`.
fn restored_rig(before: &str, after: &str, on_restore: &str) -> Rig {
    Rig::connected().into_restored(before, after, on_restore)
}

/// Returns a restored rack with a failed EMC e2. VM a on h1 and e1 is in the backup; VM b on h2 and
/// e2 was started after the backup.
fn rig_with_newer_vm() -> Rig {
    restored_rig("reserve:a@h1=1 go commit:a go", "reserve:b@h2=1 go commit:b go", "break:e2")
}

/// Until the failed EMC is compared, its hosts must repeat their reports.
#[test]
fn host_that_reaches_a_failed_emc_repeats_its_report() {
    let mut rig = rig_with_newer_vm();
    rig.run("up:h1 up:h2 up:h3 tick:10 report:h1:online=0.1:vm1a=0.1 report:h3:after=0>1 go tick:2000");
    let output = rig.run("report:h3:part:after=1>2");
    assert!(output.contains("h3<report"), "{output}");
}

#[test]
fn newer_vm_on_failed_emc_keeps_its_slice_on_recovery() {
    let mut rig = rig_with_newer_vm();
    rig.run(
        "up:h1 up:h2 up:h3 tick:10 report:h1:online=0.1:vm1a=0.1 report:h2:online=4.1:vm2b=4.1 report:h3 go",
    );
    let returned = rig.run("recover:e2 tick:1000 go");
    assert!(!returned.contains("e2.revoke(4.1)") && !returned.contains("e2.grant(4"), "{returned}");
    rig.check(
        "report:h1:online=0.1:vm1a=0.1 report:h2:online=4.1:vm2b=4.1 report:h3 go
         slices | 0.1:online@h1 4.1:online@h2
         alarms |
         reserve:c@h1=1 | store",
    );
    assert!(rig.has_decision(&Subject::Vm(name("b")), "found running (1 slice)"));
}

#[test]
fn vm_partly_on_failed_emc_keeps_its_other_slices() {
    let mut rig = restored_rig("", "reserve:a@h1=5 go commit:a go", "break:e2");
    rig.run("up:h1 up:h2 up:h3 tick:10");
    let report = "report:h1:online=0.1+1.1+2.1+3.1+4.1:vm1a=0.1+1.1+2.1+3.1+4.1 report:h2 report:h3 go";
    let reported = rig.run(report);
    assert!(!reported.contains("revoke"), "{reported}");
    rig.check(
        "slices | 0.1:quarantined@h1 1.1:quarantined@h1 2.1:quarantined@h1 3.1:quarantined@h1 4.1:quarantined 5.0:quarantined 6.0:quarantined 7.0:quarantined
         reserve:b@h1=1 | reserve:b->HOST_NOT_SCHEDULABLE",
    );
    rig.run("recover:e2 tick:1000 go");
    rig.run(report);
    rig.check("slices | 0.1:online@h1 1.1:online@h1 2.1:online@h1 3.1:online@h1 4.1:online@h1");
}

#[test]
fn host_of_failed_emc_has_not_reported_before_the_comparison() {
    let mut rig = rig_with_newer_vm();
    rig.run(
        "up:h1 up:h2 up:h3 tick:10 report:h1:online=0.1:vm1a=0.1 report:h2:online=4.1:vm2b=4.1 report:h3 go",
    );
    rig.check(
        "reserve:c@h1=1 reserve:c@h3=1 | reserve:c->HOST_NOT_SCHEDULABLE reserve:c->HOST_NOT_SCHEDULABLE
         alarms | RESTORE_PENDING RESTORE_PENDING RESTORE_PENDING VM_NOT_ADOPTED EMC_FAILED",
    );
}

#[test]
fn older_vm_drains_when_later_vm_runs_elsewhere() {
    let older = "report:h1:online=0.1:vm1a=0.1";
    let later = "report:h2:online=4.1:vm2a=4.1";
    let before = format!("reserve:a@h1=1 go commit:a go {older} go");
    let after = format!("release:a go reserve:a@h2=1!2 go commit:a go {later} go");
    for reports in [[older, later], [later, older]] {
        let mut rig = restored_rig(&before, &after, "");
        rig.run("up:h1 up:h2 up:h3 tick:10");
        let output = rig.run(&format!("{} {} report:h3 go", reports[0], reports[1]));
        assert!(!output.contains("revoke(0.1)") && !output.contains("revoke(4.1)"), "{output}");
        rig.check(
            "slices | 0.1:draining@h1 4.1:online@h2
             reserve:b@h1=1 | store",
        );
    }
}

#[test]
fn older_vm_drains_when_neither_vm_is_in_the_backup() {
    let older = "report:h1:online=0.1:vm1a=0.1";
    let later = "report:h2:online=4.1:vm2a=4.1";
    let after = format!("reserve:a@h1=1 go {older} release:a go reserve:a@h2=1!2 go {later} go");
    for reports in [[older, later], [later, older]] {
        let mut rig = restored_rig("", &after, "");
        rig.run(&format!("up:h1 up:h2 up:h3 tick:10 {} {} report:h3 go", reports[0], reports[1]));
        rig.check("slices | 0.1:draining@h1 4.1:online@h2");
    }
}

#[test]
fn partial_or_early_report_does_not_count_as_complete() {
    let mut rig = restored_rig("reserve:a@h1=1 go commit:a go", "", "");
    rig.run("up:h1 up:h2 up:h3 tick:10");
    rig.run("report:h1:part report:h2:early report:h3 tick:10");
    rig.write_all();
    rig.check(
        "reserve:b@h1=1 reserve:b@h2=1 | reserve:b->HOST_NOT_SCHEDULABLE reserve:b->HOST_NOT_SCHEDULABLE",
    );
    rig.run("report:h1 report:h2 go");
    rig.check("reserve:b@h1=1 reserve:c@h2=1 | store");
}

#[test]
fn report_is_complete_only_with_all_its_parts() {
    let mut rig = restored_rig("reserve:a@h1=1 go commit:a go", "", "");
    rig.run("up:h1 up:h2 up:h3 tick:10 report:h2 report:h3 tick:10");
    for incomplete in ["report:h1:more", "report:h1:nth=2"] {
        rig.run(&format!("{incomplete} tick:10"));
        rig.write_all();
        rig.check("reserve:b@h1=1 | reserve:b->HOST_NOT_SCHEDULABLE");
    }
    rig.run("report:h1:more report:h1:more:nth=1 report:h1:nth=2 go");
    rig.check("reserve:b@h1=1 | store");
}

#[test]
fn report_with_parts_from_before_a_reload_is_not_complete() {
    let mut rig = restored_rig("reserve:a@h1=1 go commit:a go", "", "");
    rig.run("up:h1 up:h2 up:h3 tick:10 report:h2 report:h3 tick:10");
    rig.write_all();
    rig.run("report:h1:more cordon:e1 lost reload device report:h1:nth=1 tick:10");
    rig.write_all();
    rig.check("reserve:b@h1=1 | reserve:b->HOST_NOT_SCHEDULABLE");
    rig.run("report:h1 go");
    rig.check("reserve:b@h1=1 | store");
}

/// The host is fenced in the backup, but has returned and runs a VM. The fence must not be
/// repeated.
#[test]
fn fence_in_the_backup_is_not_repeated_after_a_restore() {
    let mut rig = restored_rig(
        "reserve:a@h1=1 go down:h1 fence:h1 go",
        "up:h1/b2 go cordon:e1 go reserve:b@h1=1 go commit:b go report:h1:online=4.1:vm2b=4.1 go",
        "",
    );
    let output = rig.run("up:h1/b2 up:h2 up:h3 go");
    assert!(!output.contains("fence") && !output.contains("revoke(4.1)"), "{output}");
    rig.check("slices state:h1 | 4.1:online@h1 Up");
}

/// The VM was committed after the backup. The commit deadline in the backup must not end its
/// reservation.
#[test]
fn deadline_in_the_backup_waits_for_the_report_of_the_host() {
    let mut rig = restored_rig("reserve:a@h1=1 go", "commit:a go report:h1:online=0.1:vm1a=0.1 go", "");
    rig.run("up:h2 up:h3 go tick:301000 go");
    rig.run("up:h1 up:h2 up:h3 go");
    rig.check("slices commit:a | 0.1:online@h1 commit:a->ok(0)");
}

#[test]
fn slice_in_doubt_cannot_be_requalified() {
    let mut rig = rig_with_newer_vm();
    rig.run("up:h1 up:h2 up:h3 tick:10 report:h2:online=4.1:vm2b=4.1 tick:10");
    rig.write_all();
    rig.check("enable:4 enable:0 | enable:4->SLICE_IN_DOUBT enable:0->SLICE_IN_DOUBT");
}

#[test]
fn unreported_host_and_its_connections_are_not_removed() {
    let mut rig = restored_rig("", "reserve:a@h3=1 go commit:a go report:h3:online=4.1:vm1a=4.1", "");
    rig.check(
        "rack:e1=4&e2=4&h1:e1+e2&h2:e1+e2 | rack:e1=4&e2=4&h1:e1+e2&h2:e1+e2->NOT_DRAINED
         rack:e1=4&e2=4&h1:e1&h2:e1+e2&h3:e2 | rack:e1=4&e2=4&h1:e1&h2:e1+e2&h3:e2->NOT_DRAINED",
    );
}

/// Reservations made after two restores of one backup must have different IDs.
#[test]
fn reservation_ids_differ_between_restores_of_one_backup() {
    let mut rig = Rig::connected();
    let backup = rig.disk.clone();
    let mut ids = Vec::new();
    for _ in 0..2 {
        rig.disk = backup.clone();
        rig.run("restore go up:h1 up:h2 up:h3 go reserve:a@h1=1 go");
        ids.push(rig.manager.durable().reservation_of(&name("a")).unwrap());
    }
    assert_ne!(ids[0], ids[1]);
}

/// A VM that was started after the backup runs on a slice that the backup assigns to another host.
/// The other host must not receive the slice.
#[test]
fn slice_of_an_adopted_vm_is_not_sent_to_its_former_host() {
    let mut rig = restored_rig(
        "cordon:e2 reserve:a@h1=1 go",
        "release:a go reserve:b@h2=1 go commit:b go report:h2:online=0.3:vm2b=0.3 go",
        "",
    );
    let output = rig.run("up:h2 tick:10 report:h2:online=0.3:vm2b=0.3 go up:h1 tick:10");
    assert!(!output.contains("h1<a=0.3"), "{output}");
    rig.run("up:h3 go");
    rig.check("slices wait:a wait:b | 0.3:online@h2 wait:a->RESERVATION_WRONG_STATE wait:b->ok(0)");
}

/// Devices and agents respond before the first write after the restore is durable. No fence and no
/// old desired state must be sent.
#[test]
fn restored_ledger_sends_nothing_before_its_first_write() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go commit:a go report:h1:online=0.1:vm1a=0.1 go down:h1 fence:h1 stored");
    let backup = rig.disk.clone();
    rig.run("up:h1/b2 go cordon:e1 go reserve:b@h1=1 go commit:b go report:h1:online=4.1:vm2b=4.1 go");
    rig.disk = backup;
    let output = rig.run("restore device up:h1/b2 device tick:10");
    assert!(!output.contains("fence") && !output.contains("h1<a"), "{output}");
    rig.run("stored go up:h2 up:h3 go");
    rig.check("slices state:h1 | 4.1:online@h1 Up");
}

/// The host restarted after the backup and then started a VM. The new boot id does not prove that
/// the VM has ended, so it must not end a fence.
#[test]
fn boot_id_newer_than_the_backup_does_not_end_a_fence() {
    let mut rig = restored_rig(
        "down:h1",
        "up:h1/b2 go cordon:e1 go reserve:b@h1=1 go commit:b go report:h1:online=4.1:vm2b=4.1 go",
        "",
    );
    rig.run("poweroff:h1 lost reload go up:h1/b2 tick:10 report:h1:online=4.1:vm2b=4.1 go");
    rig.run("up:h2 up:h3 go");
    rig.check("slices | 4.1:online@h1");
    let mut rig = restored_rig("", "up:h1/b2 go", "break:e1 break:e2");
    rig.run("tick:5000 tick:60000 go up:h1/b2 tick:10");
    rig.check("state:h1 | Fencing");
    let fence = rig.manager.durable().host(rig.host("h1")).unwrap().host.fence;
    assert_eq!(fence, crate::record::Fence::Fencing { powered_off: false });
}
