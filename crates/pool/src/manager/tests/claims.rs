//! Reports of slices that the ledger or EMC does not assign to the host. Causes are restores from
//! older backups, and EMCs with a lost record or the record of another rack. `rig.rs` documents the
//! words of the scripts.

use super::rig::Rig;

/// Script that starts VM a on slice 0 of h1.
const START_VM_A: &str = "reserve:a@h1=1 go commit:a go report:h1:online=0.1:vm1a=0.1 go";

/// Returns a rack in which VM a runs on slice 0 of h1.
fn rig_with_running_vm() -> Rig {
    let mut rig = Rig::connected();
    rig.run(START_VM_A);
    rig
}

/// The shared EMC has lost its grant of slice 4, and the backup does not contain h1's connection to
/// the EMC. The slice of the running VM must remain quarantined with h1.
#[test]
fn vm_on_newer_connection_of_a_shared_emc_keeps_its_slice() {
    let mut rig = Rig::new("e1=4 e2=4! h1:e1 h2:e1+e2");
    rig.run("up:h1 up:h2 go");
    let backup = rig.disk.clone();
    rig.run(
        "rack:e1=4&e2=4!&h1:e1+e2&h2:e1+e2 go cordon:e1 up:h1 go reserve:b@h1=1 go commit:b go
         report:h1:online=4.1:vm1b=4.1 go",
    );
    rig.set_grant(4, None);
    rig.disk = backup;
    rig.run("restore stored device tick:10");
    rig.write_all();
    // The first report of h1 arrives before any report of h2.
    let output = rig.run("up:h1 tick:10 report:h1:online=4.1:vm1b=4.1 go up:h2 tick:10 report:h2 go report:h1:online=4.1:vm1b=4.1 go");
    assert!(!output.contains("revoke(4.1)") && !output.contains("revoke(4."), "{output}");
    let slices = rig.run("slices");
    assert!(slices.contains("4.1:quarantined@h1"), "{slices}");
}

/// The backup contains h1's connection to the EMC, but not the reservation. The device must not
/// revoke the slice before h1 has released it.
#[test]
fn online_slice_is_released_by_its_host_before_reuse() {
    let mut rig = Rig::connected_with("e1=4 e2=4! h1:e1+e2 h2:e1+e2 h3:e2");
    rig.run("cordon:e1 go");
    let backup = rig.disk.clone();
    rig.run("reserve:b@h1=1 go");
    rig.check("slices | 4.1:online@h1");
    rig.set_grant(4, None);
    rig.disk = backup;
    rig.run("restore stored device tick:10");
    rig.write_all();
    let output = rig.run("up:h1 up:h2 up:h3 tick:10 report:h1:online=4.1 report:h2 report:h3 tick:10");
    let mut output = output;
    for _ in 0..6 {
        rig.write_all();
        output += &rig.run("device tick:20");
    }
    assert!(!output.contains("revoke(4."), "{output}");
}

/// Checks that a fenced host which connects briefly and reports VM a remains fenced and without
/// slices.
#[track_caller]
fn assert_fenced_host_adopts_nothing(mut rig: Rig) {
    rig.run("poweroff:h1 go");
    rig.check("state:h1 | Fenced");
    rig.run("up:h1 tick:10 report:h1:early:online=0.1:vm1a=0.1 go");
    rig.run("down:h1 up:h2 up:h3 tick:10 report:h2 report:h3 go tick:100000 go");
    rig.check("slices state:h1 | Fenced");
}

/// A host that was fenced reports its VM before it has received the fence. The VM must not be
/// adopted.
#[test]
fn vm_of_a_fenced_host_is_not_adopted() {
    assert_fenced_host_adopts_nothing(rig_with_running_vm().into_restored("", "", ""));
}

/// VM a was started after the backup, and its host is fenced. The VM must not be adopted.
#[test]
fn lost_vm_of_a_fenced_host_is_not_adopted() {
    assert_fenced_host_adopts_nothing(Rig::connected().into_restored("", START_VM_A, ""));
}

/// VM a was started after the backup, and its host is fenced. Its slice must become free again.
#[test]
fn slice_of_a_vm_on_a_fenced_host_becomes_free() {
    let mut rig = Rig::connected().into_restored("", START_VM_A, "");
    rig.run("poweroff:h1 go up:h1 tick:10 report:h1:early:online=0.1:vm1a=0.1 go");
    rig.run("down:h1 up:h2 up:h3 tick:10 report:h2 report:h3 go tick:100000 go up:h2 up:h3 go");
    rig.check(
        "force:a go fence:h1 go poweroff:h1 go tick:600000 go
         slices |",
    );
}

/// A host that is fenced after its lease expired, without an operator, must not have its VM
/// adopted.
#[test]
fn host_fenced_by_silence_adopts_nothing() {
    let mut rig = Rig::connected().into_restored("", START_VM_A, "");
    rig.run("up:h2 up:h3 tick:10");
    for _ in 0..40 {
        rig.run("report:h2:part report:h3:part device tick:1900");
        rig.write_all();
    }
    rig.check("state:h1 state:h2 | Fenced Up");
    let output = rig.run("up:h1 tick:10 report:h1:online=0.1:vm1a=0.1 go slices");
    assert!(!output.contains("0.1:online@h1"), "{output}");
}

/// The EMC's directory was empty when the manager started. The slice of the running VM must not be
/// requalified.
#[test]
fn slice_of_a_running_vm_is_in_doubt_after_a_lost_grant() {
    let mut rig = rig_with_running_vm();
    rig.set_grant(0, None);
    rig.run("restart device go up:h1 up:h2 up:h3 tick:10 report:h1:online=0.1:vm1a=0.1 go");
    rig.check("slices | 0.1:quarantined");
    let output = rig.run("enable:0 go");
    assert!(output.contains("SLICE_IN_DOUBT"), "{output}");
}

/// The EMC's directory is mounted again before an operator uncordons the slice. The grant of the
/// running VM must not be revoked.
#[test]
fn vm_survives_a_temporarily_empty_device_directory() {
    let mut rig = rig_with_running_vm();
    rig.set_grant(0, None);
    rig.run("restart device go up:h1 up:h2 up:h3 tick:10 report:h1:online=0.1:vm1a=0.1 go");
    // The directory is mounted again.
    rig.set_grant(0, Some((1, "h1")));
    let output = rig.run("enable:0 go");
    assert!(!output.contains("revoke(0.1)"), "{output}");
}

/// Returns a rack in which h1 reports VM b on slice 1. The EMC grants the slice, but the ledger has
/// no reservation for it. The reservation ID of b is too high to have been assigned.
fn rig_with_unknown_grant() -> Rig {
    let mut rig = rig_with_running_vm();
    rig.set_grant(1, Some((1, "h1")));
    let unassigned = u64::MAX / 2;
    let report = format!("report:h1:online=0.1+1.1:vm1a=0.1:vm{unassigned}b=1.1");
    rig.run(&format!("restart device go up:h1 up:h2 up:h3 tick:10 {report} tick:10"));
    rig.write_all();
    rig
}

/// After a restart, the manager has no report of the VM on the slice yet. The slice must not be
/// requalified.
#[test]
fn unknown_grant_is_in_doubt_until_its_host_has_reported() {
    let mut rig = rig_with_unknown_grant();
    let output = rig.run("slices alarms enable:1");
    assert!(output.contains("SLICE_IN_DOUBT"), "{output}");
    rig.run("restart device tick:10");
    rig.write_all();
    rig.check("enable:1 | enable:1->SLICE_IN_DOUBT");
}

#[test]
fn fence_permits_uncordon_of_slice_of_unadopted_vm() {
    let mut rig = rig_with_unknown_grant();
    rig.run("down:h1 poweroff:h1 go");
    rig.check("state:h1 | Fenced");
    let output = rig.run("alarms enable:1 go");
    assert!(!output.contains("SLICE_IN_DOUBT") && !output.contains("VM_NOT_ADOPTED"), "{output}");
}

/// The directory of e1 belongs to another rack and grants slice 0 to another host under the same
/// epoch. The host that reports the slice must remain connected.
#[test]
fn foreign_emc_does_not_make_a_report_a_false_claim() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go commit:a go cordon:e1 go reserve:b@h1=1 go commit:b go");
    rig.run("report:h1:online=0.1+4.1:vm1a=0.1:vm2b=4.1 go");
    rig.set_grant(0, Some((1, "h2")));
    let report = "report:h1:online=0.1+4.1:vm1a=0.1:vm2b=4.1";
    let output = rig.run(&format!("restart device go up:h1 up:h2 up:h3 tick:10 {report} go"));
    assert!(!output.contains("close"), "{output}");
    rig.check("state:h1 | Up");
}

#[test]
fn vm_on_a_healthy_emc_survives_a_foreign_emc() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go commit:a go cordon:e1 go reserve:b@h1=1 go commit:b go");
    rig.run("report:h1:online=0.1+4.1:vm1a=0.1:vm2b=4.1 go");
    rig.set_grant(0, Some((1, "h2")));
    let report = "report:h1:online=0.1+4.1:vm1a=0.1:vm2b=4.1";
    rig.run(&format!("restart device go up:h2 up:h3 up:h1 tick:10 {report} go"));
    let mut output = String::new();
    for _ in 0..60 {
        output += &rig.run("tick:1900 report:h2 report:h3");
        let h1 = rig.host("h1");
        if !rig.is_connected(h1) {
            output += &rig.run("up:h1");
        }
        output += &rig.run(report);
        rig.write_all();
    }
    output += &rig.run("go");
    assert!(!output.contains("fence(h1)") && !output.contains("revoke(4.1)"), "{output}");
}

/// The EMC lost its directory with all epochs, and the restored store does not contain the slice's
/// owner. The epoch that h1 reports must not be reused.
#[test]
fn epoch_still_held_by_a_host_is_not_reused() {
    let mut rig = Rig::connected();
    rig.run("cordon:e2 go");
    let backup = rig.disk.clone();
    rig.run("reserve:b@h1=1 go");
    rig.set_grant(0, None);
    rig.set_highest_epoch(0, 0);
    rig.disk = backup;
    rig.run("restore stored device tick:10");
    rig.write_all();
    let mut output = rig.run("up:h1 up:h2 up:h3 tick:10 report:h1:online=0.1 report:h2 report:h3 tick:10");
    for _ in 0..8 {
        rig.write_all();
        output += " ";
        output += &rig.run("device tick:20");
    }
    output += &rig.run("slices report:h1:online=0.1");
    assert!(!output.contains("0.1:scrubbing") && !output.contains("FalseClaim"), "{output}");
}

/// Returns a rack whose ledger and e2 were both restored from a state in which h2 has slice 4.
/// Since then, h1 has become the owner of the slice. e2 cannot revoke access.
fn rig_with_later_holder() -> Rig {
    let mut rig = Rig::connected_with("e1=4 e2=4! h1:e1+e2 h2:e1+e2 h3:e2");
    rig.run("cordon:e1 reserve:a@h2=1 go");
    rig.check("slices | 4.1:online@h2");
    let backup = rig.disk.clone();
    rig.run("release:a go reserve:b@h1=1 go");
    rig.check("slices | 4.3:online@h1");
    rig.disk = backup;
    rig.set_grant(4, Some((1, "h2")));
    rig.set_highest_epoch(4, 1);
    rig
}

#[track_caller]
fn assert_slice(rig: &mut Rig, expected: &str) {
    let slices = rig.run("slices");
    assert!(slices.contains(expected), "{expected}: {slices}");
}

#[test]
fn holder_of_a_later_epoch_survives_an_older_emc_record() {
    let mut rig = rig_with_later_holder();
    rig.run("break:e2 restore stored device up:h1 up:h2 up:h3 tick:10");
    rig.write_all();
    rig.run("report:h1:online=4.3 report:h2 report:h3 tick:10");
    rig.write_all();
    assert_slice(&mut rig, "4.3:quarantined@h1");
    rig.run("recover:e2 tick:1000 device tick:10");
    rig.write_all();
    assert_slice(&mut rig, "4.3:quarantined@h1");
}

#[test]
fn holder_reporting_after_the_comparison_is_recorded() {
    let mut rig = rig_with_later_holder();
    rig.run("restore stored device up:h1 up:h2 up:h3 tick:10");
    rig.write_all();
    rig.run("report:h1:online=4.3 report:h2 report:h3 tick:10");
    rig.write_all();
    assert_slice(&mut rig, "4.3:draining@h1");
}

/// The record of e2 was replaced by an older record while h1 released the slice. Without a restore
/// of the ledger, h1 must remain the slice's holder.
#[test]
fn holder_of_a_later_epoch_is_kept_without_a_restore() {
    let mut rig = Rig::connected_with("e1=4 e2=4! h1:e1+e2 h2:e1+e2 h3:e2");
    rig.run("cordon:e1 reserve:a@h2=1 go release:a go reserve:b@h1=1 go commit:b go");
    rig.check("slices | 4.3:online@h1");
    rig.run("down:h1 release:b stored");
    rig.set_grant(4, Some((1, "h2")));
    rig.run("restart device tick:10");
    rig.write_all();
    rig.check("slices | 4.3:quarantined@h1");
}
