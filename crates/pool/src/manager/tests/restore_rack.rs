//! Restore from a backup that is older than a change of the rack. VMs on hosts, connections and
//! EMCs that the backup does not contain must keep their memory. `rig.rs` documents the words of
//! the scripts.

use units::{
    HostId, SliceId,
    limits::{
        EPOCHS_SINCE_BACKUP_MAX, HOSTS_ADDED_SINCE_BACKUP_MAX, SLICES_ADDED_SINCE_BACKUP_MAX,
        SUCCESSIVE_RESTORES_MAX,
    },
};

use super::rig::{Rig, SHARED_RACK, name};
use crate::audit::Subject;

/// Returns a restored rack without connected agents. The backup is taken after the script `before`;
/// the ledger loses the effects of the script `after`.
fn restored_rig(rack: &str, before: &str, after: &str, on_restore: &str) -> Rig {
    Rig::new(rack).into_restored(before, after, on_restore)
}

/// Returns a restored rack in which VM b runs on h1 and slice 4 of e2. The backup does not contain
/// h1's connection to e2, and e2 cannot revoke access.
fn rig_with_newer_connection(on_restore: &str) -> Rig {
    restored_rig(
        "e1=4 e2=4! h1:e1 h2:e1+e2",
        "up:h1 up:h2 go",
        "rack:e1=4&e2=4!&h1:e1+e2&h2:e1+e2 go cordon:e1 up:h1 go reserve:b@h1=1 go commit:b go
         report:h1:online=4.1:vm1b=4.1 go",
        on_restore,
    )
}

#[test]
fn vm_on_newer_connection_is_adopted_in_any_report_order() {
    let reports = ["up:h1 tick:10 report:h1:online=4.1:vm1b=4.1 go", "up:h2 tick:10 report:h2 go"];
    for order in [[0, 1], [1, 0]] {
        let mut rig = rig_with_newer_connection("");
        let output = order.map(|n| rig.run(reports[n])).join(" ");
        assert!(!output.contains("close") && !output.contains("revoke(4.1)"), "{output}");
        rig.check(
            "slices | 4.1:online@h1
             alarms |",
        );
    }
}

#[test]
fn vm_on_newer_connection_is_adopted_when_its_emc_returns_later() {
    let mut rig = rig_with_newer_connection("break:e2");
    let output = rig.run("up:h2 tick:10 report:h2 go up:h1 tick:10 report:h1:online=4.1:vm1b=4.1 go");
    assert!(!output.contains("close"), "{output}");
    rig.run("recover:e2 tick:1000 go report:h1:online=4.1:vm1b=4.1 report:h2 go");
    rig.check("slices | 4.1:online@h1");
}

/// A silent host is fenced before failed EMC e2 reports a grant to the host. The fence must wait
/// for e2.
#[test]
fn fence_waits_for_each_emc_not_compared_since_the_restore() {
    let mut rig = rig_with_newer_connection("break:e2");
    rig.run("up:h2 tick:10 report:h2 go");
    for _ in 0..40 {
        rig.run("tick:2000 report:h2 go");
    }
    rig.check("state:h1 | Fencing");
    let returned = rig.run("recover:e2 tick:2000 report:h2 go tick:2000 report:h2 go");
    assert!(!returned.contains("e2.revoke(4.") && !returned.contains("e2.grant(4."), "{returned}");
    rig.check(
        "slices state:h1 | 4.1:quarantined@h1 5.0:quarantined 6.0:quarantined 7.0:quarantined Fencing
         poweroff:h1 report:h2 go
         slices state:h1 | Fenced",
    );
}

/// The EMC cannot revoke access, and its record has no grant to h1. A grant may be lost, so the
/// fence must stop the machine.
#[test]
fn silent_host_without_grants_is_stopped_after_a_restore() {
    let mut rig = restored_rig("e1=4! h1:e1 h2:e1", "up:h1 up:h2 go", "", "stops:e1");
    rig.run("up:h2 tick:10 report:h2 go");
    rig.check("alarms | RESTORE_PENDING CAPACITY_ZERO");
    let mut output = String::new();
    for _ in 0..40 {
        output += &rig.run("tick:2000 report:h2 go");
    }
    assert!(output.contains("e1.fence(h1)"), "{output}");
    rig.check(
        "state:h1 | Fenced
         reserve:b@h2=1 | store",
    );
}

/// The machine cannot be stopped, and no grant to the host is recorded. The fence must remain
/// incomplete until an operator confirms the power-off.
#[test]
fn unstoppable_host_stays_fencing_after_a_restore() {
    let mut rig = restored_rig("e1=4! h1:e1 h2:e1", "up:h1 up:h2 go", "", "");
    rig.run("up:h2 tick:10 report:h2 go");
    for _ in 0..40 {
        rig.run("tick:2000 report:h2 go");
    }
    rig.check(
        "state:h1 alarms | Fencing HOST_NOT_FENCED RESTORE_PENDING CAPACITY_ZERO
         reserve:b@h2=1 | reserve:b->OUT_OF_SLICES",
    );
    rig.run("poweroff:h1 report:h2 go");
    rig.check("state:h1 | Fenced");
}

/// The first report of h1 contains slice 4 of failed EMC e2, but no VM. The report must not count
/// as complete, or a fence of h1 would not wait for e2.
#[test]
fn report_is_incomplete_until_its_emc_is_compared() {
    let mut rig = rig_with_newer_connection("break:e2");
    rig.run("up:h2 tick:10 report:h2 go up:h1 tick:10 report:h1:online=4.1 go");
    rig.check(
        "alarms | RESTORE_PENDING RESTORE_PENDING VM_NOT_ADOPTED EMC_FAILED CAPACITY_ZERO
         recover:e2 tick:1000 go report:h2 report:h1:online=4.1 go
         alarms |",
    );
}

#[test]
fn vm_on_newer_host_keeps_its_slice_until_an_operator_decides() {
    let mut rig = restored_rig(
        "e1=4 h1:e1 h2:e1",
        "up:h1 up:h2 go",
        "rack:e1=4&h1:e1&h2:e1&h3:e1 go up:h3 go reserve:c@h3=1 go commit:c go report:h3:online=0.1:vm1c=0.1 go",
        "",
    );
    let output = rig.run("up:h1 up:h2 tick:10 report:h1 report:h2 go tick:2000 report:h1 report:h2 go");
    assert!(!output.contains("revoke(0."), "{output}");
    rig.check(
        "slices | 0.1:quarantined@host#2
         alarms | SLICE_QUARANTINED
         reserve:d@h1=3 | store",
    );
}

/// Returns a restored rack in which VM b runs on h1 and slice 4 of e2. The backup does not contain
/// e2.
fn rig_with_newer_emc() -> Rig {
    restored_rig(
        "e1=4 h1:e1",
        "up:h1 go",
        "rack:e1=4&e2=4&h1:e1+e2 go cordon:e1 go reserve:b@h1=1 go commit:b go report:h1:online=4.1:vm1b=4.1 go",
        "",
    )
}

#[test]
fn vm_on_newer_emc_keeps_its_slice_and_id() {
    let mut rig = rig_with_newer_emc();
    let output = rig.run("up:h1 tick:10 report:h1:online=4.1:vm1b=4.1 go");
    assert!(!output.contains("close"), "{output}");
    rig.check(
        "alarms | RESTORE_PENDING VM_NOT_ADOPTED CAPACITY_ZERO
         rack:e1=4&e2=4&h1:e1+e2 go",
    );
    assert!(rig.manager.durable().slot(SliceId(4)).is_none());
    let output = rig.run("report:h1:online=4.1:vm1b=4.1 go");
    assert!(!output.contains("close"), "{output}");
    rig.check(
        "slices | 0.0:quarantined 1.0:quarantined 2.0:quarantined 3.0:quarantined 262148.1:quarantined@h1",
    );
    rig.run("report:h1:ended=1 go");
    rig.check(
        "alarms | SLICE_QUARANTINED
         reserve:c@h1=1 | store",
    );
}

/// Returns a restored rack in which h1 holds slice 4 of e2 with epoch 1. e2 cannot revoke access. All
/// hosts are connected and have not reported.
fn rig_with_shared_emc() -> Rig {
    let mut rig = restored_rig(SHARED_RACK, "up:h1 up:h2 up:h3 cordon:e1 reserve:a@h1=1 go", "", "");
    rig.run("up:h1 up:h2 up:h3 tick:10");
    assert!(rig.run("slices").contains("4.1:quarantined@h1"));
    rig
}

/// Returns the slices after a report, without a chance for the agents to act.
fn slices_after(rig: &mut Rig, report: &str) -> String {
    rig.run(&format!("{report} tick:10"));
    rig.write_all();
    rig.run("slices")
}

#[test]
fn claim_of_an_epoch_that_another_host_holds_or_that_has_ended_changes_nothing() {
    for claim in ["report:h2:online=4.1", "report:h1:online=4.0"] {
        let mut rig = rig_with_shared_emc();
        let slices = slices_after(&mut rig, claim);
        assert!(slices.contains("4.1:quarantined@h1"), "{claim}: {slices}");
    }
}

#[test]
fn claimed_epoch_is_bounded_after_a_restore() {
    let last = 1 + EPOCHS_SINCE_BACKUP_MAX;
    let slices = |epoch| slices_after(&mut rig_with_shared_emc(), &format!("report:h2:online=4.{epoch}"));
    assert!(slices(last).contains(&format!("4.{last}:quarantined@h2")), "{}", slices(last));
    assert!(slices(last + 1).contains("4.1:quarantined@h1"), "{}", slices(last + 1));
}

#[test]
fn out_of_range_slice_ids_are_false_claims_after_a_restore() {
    let mut rig = rig_with_newer_emc();
    let output = rig.run("up:h1 tick:10 report:h1:online=4000000000.1");
    assert!(output.contains("h1.close(FalseClaim:4000000000.1)"), "{output}");
}

/// After two restores, e2 is added, and then the first backup is restored again. A report of a slice
/// of e2 must not close the connection.
#[test]
fn slice_added_after_restores_of_later_backups_is_not_a_false_claim() {
    let mut rig = Rig::new("e1=4 h1:e1");
    rig.run("up:h1 go");
    let backup = rig.disk.clone();
    for _ in 0..2 {
        rig.run("restore go up:h1 tick:10 report:h1 go");
    }
    rig.run("rack:e1=4&e2=4&h1:e1+e2 go");
    let added = rig.manager.durable().meta().next_slice.0 - 4;
    rig.disk = backup;
    let output = rig.run(&format!("restore go up:h1 tick:10 report:h1:online={added}.1 go"));
    assert!(!output.contains("close"), "{output}");
    assert_eq!(rig.manager.durable().meta().next_slice, SliceId(added + 1));
}

#[test]
fn reserved_slice_ids_are_bounded_across_reports() {
    let mut rig = rig_with_newer_emc();
    let end =
        rig.manager.durable().meta().next_slice.0 + SUCCESSIVE_RESTORES_MAX * SLICES_ADDED_SINCE_BACKUP_MAX;
    let last = format!("report:h1:online={}.1 go", end - 1);
    let output = rig.run(&format!("up:h1 tick:10 {last} {last}"));
    assert!(!output.contains("close"), "{output}");
    let output = rig.run(&format!("report:h1:online={end}.1"));
    assert!(output.contains(&format!("h1.close(FalseClaim:{end}.1)")), "{output}");
    assert_eq!(rig.manager.durable().meta().next_slice, SliceId(end));
}

/// After the restore, h2, h3 and e2 are added again in another order, while a VM of h3 runs on e2.
/// The new hosts and EMC must receive unused IDs.
#[test]
fn hosts_and_emcs_added_after_a_restore_get_unused_ids() {
    let mut rig = restored_rig(
        "e1=4 h1:e1",
        "up:h1 go",
        "rack:e1=4&e2=4&h1:e1&h2:e2&h3:e2 go up:h2 up:h3 go reserve:c@h3=1 go commit:c go
         report:h3:online=4.1:vm1c=4.1 go",
        "",
    );
    rig.run("up:h1 tick:10 report:h1 go rack:e1=4&h1:e1&e2=4&h3:e2&h2:e2 go");
    let first = 1 + HOSTS_ADDED_SINCE_BACKUP_MAX;
    assert_eq!([rig.host("h3"), rig.host("h2")], [HostId(first), HostId(first + 1)]);
    let output = rig.run("up:h2/b9 go up:h3 tick:10 report:h3:online=4.1:vm1c=4.1 go");
    assert!(!output.contains("close"), "{output}");
    let output = rig.run("down:h2 poweroff:h2 go");
    assert!(!output.contains("revoke"), "{output}");
    rig.check("slices | 262148.1:quarantined@host#2");
}

/// e2 was added after the first restore, and the second restore of the same backup does not contain
/// e2. A report of its slice must not close the connection.
#[test]
fn report_of_an_emc_lost_by_two_restores_is_not_a_false_claim() {
    let mut rig = Rig::new("e1=4 h1:e1");
    rig.run("up:h1 go");
    let backup = rig.disk.clone();
    for _ in 0..2 {
        rig.disk = backup.clone();
        rig.run("restore stored device tick:10");
        rig.write_all();
        let output = rig.run("up:h1 tick:10 report:h1:online=262148.1:vm1b=262148.1 go");
        assert!(!output.contains("close"), "{output}");
    }
    assert_eq!(rig.manager.durable().meta().next_slice, SliceId(262_149));
}

/// A host is fenced before it reports a slice of an EMC that the backup does not contain. The
/// report must not close the connection.
#[test]
fn fenced_host_may_claim_slices_missing_from_the_backup() {
    let mut rig = rig_with_newer_emc();
    for _ in 0..40 {
        rig.run("tick:2000 go");
    }
    rig.check("state:h1 | Fenced");
    let output = rig.run("up:h1 report:h1:online=4.1:vm1b=4.1 go");
    assert!(!output.contains("close"), "{output}");
}

/// A VM without slices was committed after the backup. A report of the running VM must commit the
/// reservation, although its deadline in the backup has passed.
#[test]
fn running_vm_without_slices_is_committed_by_a_report() {
    let mut rig =
        restored_rig("e1=4 h1:e1", "up:h1 go reserve:a@h1=0 go", "commit:a go report:h1:vm1a= go", "");
    rig.run("up:h1 tick:10 report:h1:vm1a= go tick:301000 report:h1:vm1a= go");
    rig.check("commit:a | commit:a->ok()");
    assert!(rig.has_decision(&Subject::Vm(name("a")), "found running"));
}

#[test]
fn committed_vm_without_slices_is_not_adopted_again() {
    let mut rig =
        restored_rig("e1=4 h1:e1", "up:h1 go reserve:a@h1=0 go commit:a go report:h1:vm1a= go", "", "");
    rig.run("up:h1 tick:10 report:h1:vm1a= go");
    rig.check("commit:a alarms | commit:a->ok()");
    assert!(!rig.has_decision(&Subject::Vm(name("a")), "found running"));
}

#[test]
fn vm_adopted_on_a_draining_host_gets_a_migration_request() {
    let mut rig = restored_rig(
        "e1=4 h1:e1 h2:e1",
        "up:h1 up:h2 go drain:h1 go",
        "enable:h1 reserve:b@h1=1 go commit:b go report:h1:online=0.1:vm1b=0.1 go",
        "",
    );
    rig.run("up:h2 up:h1 tick:10 report:h2 report:h1:online=0.1:vm1b=0.1 go");
    let migrating: Vec<_> = rig.manager.durable().migrations().map(|(_, m)| m.vm.to_string()).collect();
    assert_eq!(migrating, ["b"]);
}
