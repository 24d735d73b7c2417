//! Processes of VMs in reports, and cores that released VMs use while their processes run. `rig.rs`
//! documents the words of the scripts.

use units::ReservationId;

use super::rig::Rig;
use crate::protocol::ObservedState;

/// Returns a rack in which VM `a` was released while its process runs on `h1`.
fn rig_with_released_vm() -> Rig {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=2 go commit:a go report:h1:online=0.1+1.1:vm1a=0.1+1.1 go release:a go");
    rig
}

fn cores_in_use(rig: &Rig) -> u32 {
    let entry = rig.manager.durable().host(rig.host("h1")).unwrap();
    entry.host.cores - entry.cores_free()
}

fn has_process(rig: &Rig) -> bool {
    rig.manager.durable().reservation(ReservationId(1)).unwrap().has_process
}

#[test]
fn released_vm_uses_cores_until_host_reports_its_end() {
    let mut rig = rig_with_released_vm();
    assert_eq!((cores_in_use(&rig), has_process(&rig)), (1, true));
    rig.run("report:h1:part:released=0.1+1.1 go");
    assert_eq!(cores_in_use(&rig), 1, "released slices do not imply an ended process");
    rig.run("report:h1:part:ended=1 go");
    assert_eq!((cores_in_use(&rig), has_process(&rig)), (0, false));
}

#[test]
fn released_vm_uses_cores_until_complete_report_lacks_it() {
    let mut rig = rig_with_released_vm();
    rig.run("report:h1:part go");
    assert_eq!(cores_in_use(&rig), 1, "a report of changes omits VMs already reported");
    let h1 = rig.host("h1");
    rig.send_report(h1, ObservedState { whole: true, ..ObservedState::default() }, false);
    assert!(!rig.manager.head.reservation(ReservationId(1)).unwrap().has_process);
}

#[test]
fn released_vm_uses_cores_after_manager_restart() {
    let mut rig = rig_with_released_vm();
    rig.run("restart go");
    assert_eq!((cores_in_use(&rig), has_process(&rig)), (1, true));
}

#[test]
fn process_started_during_release_uses_cores() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=2 go release:a go");
    assert_eq!(cores_in_use(&rig), 0);
    rig.run("report:h1:part:vm1a=0.1+1.1 go");
    assert_eq!(cores_in_use(&rig), 1);
}

#[test]
fn process_of_other_vm_or_host_is_ignored() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=0 go report:h1:part:vm1b= report:h2:part:vm1a= go");
    assert!(!has_process(&rig));
}

#[test]
fn process_on_fenced_host_uses_no_cores() {
    let mut rig = rig_with_released_vm();
    rig.run("down:h1 fence:h1 go");
    assert_eq!((cores_in_use(&rig), has_process(&rig)), (0, false));
}
