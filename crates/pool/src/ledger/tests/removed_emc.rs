//! Removal of an EMC with a slice that belongs to a broken reservation. All slices of the EMC are
//! free, so the EMC can be removed.

use super::*;

/// Returns a rack with a broken reservation of VM a on h1. The slice of the reservation on e1 is
/// free again, and e1 is draining.
fn rack_with_broken_reservation() -> (Rack, ReservationId) {
    let mut rack = Rack::new("e1=1 e2=1 h1:e1+e2");
    let id = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    rack.set_scheduling(SchedulingTarget::Emc(name("e1")), Scheduling::Draining);
    rack.apply_slice_event(0, Event::Granted(Epoch(1)));
    let dirty = Event::FoundDirty(HostId(0), Epoch(1));
    let change = rack.ledger.decide_quarantine(at(2), SliceId(0), dirty, "byte 7").unwrap();
    rack.apply(change);
    let free = Slot { epoch: Epoch(1), state: State::Free, receipt: None };
    rack.apply(Change(vec![Record::Slice(SliceId(0), free)]));
    assert!(matches!(rack.ledger.reservation(id).unwrap().stage, Stage::Broken { .. }));
    assert_eq!(rack.ledger.migration(MigrationKind::Drain.of(id)).unwrap().why, "emc e1 is draining");
    (rack, id)
}

#[test]
fn removed_emc_withdraws_its_migration_requests() {
    let (mut rack, id) = rack_with_broken_reservation();
    rack.configure("e2=1 h1:e2").unwrap();
    assert_eq!(rack.ledger.migration(MigrationKind::Drain.of(id)), None);
}

#[test]
fn removed_emc_keeps_the_migration_request_of_a_draining_host() {
    let (mut rack, id) = rack_with_broken_reservation();
    rack.set_scheduling(SchedulingTarget::Host(name("h1")), Scheduling::Draining);
    rack.configure("e2=1 h1:e2").unwrap();
    assert_eq!(rack.ledger.migration(MigrationKind::Drain.of(id)).unwrap().why, "host h1 is draining");
}
