//! Moves of pool memory to local memory: requests, desired states and reports. `rig.rs` documents the
//! words of the scripts.

use units::ReservationId;

use super::rig::Rig;
use crate::record::{Record, Rehome, Reservation};

/// Returns a rack in which VM a runs on h1 with slice 0.
fn rig_with_running_vm() -> Rig {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go commit:a go report:h1:online=0.1:vm1a=0.1 go");
    rig
}

fn rehome(rig: &Rig) -> Rehome {
    rig.manager.durable().reservation(ReservationId(1)).unwrap().rehome.clone()
}

#[test]
fn desired_state_contains_the_attempt_until_its_end() {
    let mut rig = rig_with_running_vm();
    let attempt = |rig: &Rig| {
        let desired = rig.manager.desired_state(rig.host("h1")).unwrap();
        desired.vms[&ReservationId(1)].rehome.map(|rehome| (rehome.attempt, rehome.is_cancelled))
    };
    assert_eq!(attempt(&rig), None);
    rig.run("rehome:a go");
    assert_eq!((attempt(&rig), rehome(&rig)), (Some((1, false)), Rehome::Moving { attempt: 1 }));
    rig.run("cancel_rehome:a go");
    assert_eq!((attempt(&rig), rehome(&rig)), (Some((1, true)), Rehome::Cancelling { attempt: 1 }));
    rig.run("report:h1:part:vm1a!1=0.1 go");
    assert_eq!(attempt(&rig), None);
    rig.check("rehome:a | rehome:a->REHOME_NOT_POSSIBLE");
}

#[test]
fn unrequested_move_that_exceeds_the_local_memory_raises_an_alarm() {
    let mut rig = rig_with_running_vm();
    let id = ReservationId(1);
    let local = rig.manager.durable().host(rig.host("h1")).unwrap().host.local;
    let all = Reservation { local, ..rig.manager.durable().reservation(id).unwrap().clone() };
    rig.manager.head.install(Record::Reservation(id, all.clone()));
    rig.manager.durable.install(Record::Reservation(id, all));
    rig.check("alarms |");
    rig.run("report:h1:part:vm1a!done= go");
    assert!(matches!(rehome(&rig), Rehome::Done { .. }), "{:?}", rehome(&rig));
    rig.check("alarms | HOST_OVERBOOKED");
}

#[test]
fn slices_of_a_moved_vm_are_released_and_scrubbed() {
    let mut rig = rig_with_running_vm();
    rig.run("rehome:a go report:h1:part:vm1a!done= go");
    assert!(matches!(rehome(&rig), Rehome::Done { .. }), "{:?}", rehome(&rig));
    rig.run("apply:h1 go");
    rig.check("slices |");
}

#[test]
fn result_of_another_host_or_vm_is_ignored() {
    let mut rig = rig_with_running_vm();
    rig.run("rehome:a go report:h2:part:vm1a!done= report:h1:part:vm1b!done= report:h2:part:vm1a!1= go");
    assert_eq!(rehome(&rig), Rehome::Moving { attempt: 1 });
}

#[test]
fn move_requires_a_connected_agent() {
    let mut rig = rig_with_running_vm();
    rig.check("down:h1 rehome:a | rehome:a->REHOME_NOT_POSSIBLE");
    assert_eq!(rehome(&rig), Rehome::None);
}

#[test]
fn move_survives_a_restart_of_the_manager() {
    let mut rig = rig_with_running_vm();
    rig.run("rehome:a go restart go");
    assert_eq!(rehome(&rig), Rehome::Moving { attempt: 1 });
    rig.run("up:h1 report:h1:vm1a!done= go");
    assert!(matches!(rehome(&rig), Rehome::Done { .. }));
}
