//! The cores and local memory of a released VM remain in use while its process runs.

use super::*;

/// Returns a rack with a committed VM `a` whose process runs and uses all of host `h1`.
fn rack_with_running_vm() -> (Rack, ReservationId) {
    let mut rack = Rack::new("e1=4 h1:e1");
    let request = Reserve { cores: 16, local: Bytes::gib(64), ..reserve_request("a", "h1", 0) };
    let id = rack.reserve(request).unwrap();
    let change = rack.ledger.decide_commit(at(1), id, tester()).unwrap();
    rack.apply(change);
    rack.set_process(id, true);
    (rack, id)
}

fn release_reason() -> EndReason {
    EndReason::Released { force: false, reason: String::new() }
}

impl Rack {
    fn set_process(&mut self, id: ReservationId, has_process: bool) {
        let change = self.ledger.decide_process_change(at(2), id, has_process, tester());
        self.apply(change);
    }

    fn free_resources(&self) -> (u32, Bytes) {
        (self.host("h1").cores_free(), self.host("h1").local_free())
    }
}

const NO_FREE_RESOURCES: (u32, Bytes) = (0, Bytes::ZERO);
const ALL_RESOURCES_FREE: (u32, Bytes) = (16, Bytes::gib(64));

#[test]
fn released_vm_uses_host_until_process_ends() {
    let (mut rack, id) = rack_with_running_vm();
    rack.end_reservation(id, release_reason());
    assert_eq!(rack.free_resources(), NO_FREE_RESOURCES);
    assert!(rack.ledger.reservation(id).unwrap().has_process);
    let rejection = rack.reserve(reserve_request("b", "h1", 0)).unwrap_err();
    assert!(matches!(rejection, Rejection::OutOfCores { .. }), "{rejection}");
    rack.set_process(id, false);
    assert_eq!(rack.free_resources(), ALL_RESOURCES_FREE);
    rack.reserve(reserve_request("b", "h1", 0)).unwrap();
}

#[test]
fn audit_of_release_contains_running_process() {
    let (rack, id) = rack_with_running_vm();
    let change = rack.ledger.decide_reservation_end(at(2), id, release_reason(), tester()).unwrap();
    let why = change.0.iter().find_map(|record| match record {
        Record::Decision(_, Decision { what: DecisionKind::Ended { why }, .. }) => Some(why.as_str()),
        _ => None,
    });
    let expected =
        "released; its process still runs, and its cores and local memory stay in use until it ends";
    assert_eq!(why, Some(expected));
}

#[test]
fn audit_contains_process_changes_of_ended_reservations_only() {
    let (mut rack, id) = rack_with_running_vm();
    let decisions = |rack: &Rack, has_process| {
        let change = rack.ledger.decide_process_change(at(2), id, has_process, tester());
        change.0.iter().filter(|record| matches!(record, Record::Decision(..))).count()
    };
    assert_eq!(decisions(&rack, false), 0);
    rack.end_reservation(id, release_reason());
    assert_eq!(decisions(&rack, false), 1);
}

#[test]
fn released_vm_without_process_frees_host() {
    let (mut rack, id) = rack_with_running_vm();
    rack.set_process(id, false);
    rack.end_reservation(id, release_reason());
    assert_eq!(rack.free_resources(), ALL_RESOURCES_FREE);
}

#[test]
fn vm_with_ended_process_frees_host() {
    for why in [EndReason::ProcessGone, EndReason::HostFenced, EndReason::HostRestarted] {
        let (mut rack, id) = rack_with_running_vm();
        rack.end_reservation(id, why.clone());
        assert_eq!(rack.free_resources(), ALL_RESOURCES_FREE, "{why}");
    }
}

#[test]
fn process_reported_after_release_uses_host() {
    let (mut rack, id) = rack_with_running_vm();
    rack.set_process(id, false);
    rack.end_reservation(id, release_reason());
    rack.set_process(id, true);
    assert_eq!(rack.free_resources(), NO_FREE_RESOURCES);
}

#[test]
fn fence_and_restart_end_processes_of_released_vms() {
    let h1 = HostId(0);
    for restarts in [false, true] {
        let (mut rack, id) = rack_with_running_vm();
        let change = rack.ledger.decide_agent_identity(at(2), h1, "b1", false);
        rack.apply(change);
        rack.end_reservation(id, release_reason());
        let change = match restarts {
            false => rack.ledger.decide_fence(at(3), h1, false, tester(), "why"),
            true => rack.ledger.decide_agent_identity(at(3), h1, "b2", false),
        };
        rack.apply(change);
        assert_eq!(rack.free_resources(), ALL_RESOURCES_FREE, "restarts: {restarts}");
    }
}

#[test]
fn host_with_process_of_released_vm_is_not_removed() {
    let (mut rack, id) = rack_with_running_vm();
    rack.end_reservation(id, release_reason());
    assert!(matches!(rack.configure("e1=4"), Err(Rejection::NotDrained { .. })));
    rack.set_process(id, false);
    rack.configure("e1=4").unwrap();
}

#[test]
fn expired_reservation_with_process_is_kept() {
    let (mut rack, id) = rack_with_running_vm();
    rack.end_reservation(id, release_reason());
    let late = When { now: at(2).now.after(REQUEST_ID_RETENTION), ..at(2) };
    assert_eq!(rack.ledger.decide_pruning(late, 10), Change::default());
    rack.set_process(id, false);
    assert_eq!(rack.ledger.decide_pruning(late, 10), Change(vec![Record::Deleted(Key::Reservation(id))]));
}

#[test]
fn released_vms_with_process_count_for_host_limit() {
    let mut rack = Rack::new("e1=4 h1:e1");
    for vm in 0..RESERVATIONS_PER_HOST_MAX {
        let request = reserve_request(&format!("v{vm}"), "h1", 0);
        let id = rack.reserve(Reserve { cores: 0, local: Bytes::ZERO, ..request }).unwrap();
        rack.set_process(id, true);
        rack.end_reservation(id, release_reason());
    }
    let rejection = rack.reserve(reserve_request("b", "h1", 0)).unwrap_err();
    assert!(matches!(rejection, Rejection::LimitExceeded { .. }), "{rejection}");
}
