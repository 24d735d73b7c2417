//! Boundary cases of the ledger: exact capacities, empty sets and indexes.

use units::limits::SLICES_PER_HOST_MAX;

use super::*;
use crate::record::Migration;

#[test]
fn reservation_of_all_cores_and_local_memory_fits() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let all = Reserve { cores: 16, local: Bytes::gib(64), ..reserve_request("a", "h1", 4) };
    rack.reserve(all).unwrap();
    assert_eq!((rack.host("h1").cores_free(), rack.host("h1").local_free()), (0, Bytes::ZERO));
}

#[test]
fn host_holds_slices_up_to_the_limit() {
    let max = SLICES_PER_HOST_MAX;
    let mut rack = Rack::new(&format!("e1={} h1:e1", max + 1));
    rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    let too_many = Rejection::LimitExceeded { what: "slices on one host", max: u64::from(max) };
    assert_eq!(rack.reserve(reserve_request("b", "h1", max)), Err(too_many.clone()));
    rack.reserve(reserve_request("b", "h1", max - 1)).unwrap();
    assert_eq!(rack.reserve(reserve_request("c", "h1", 1)), Err(too_many));
}

#[test]
fn rejection_omits_cordoned_emc_without_free_slices() {
    let mut rack = Rack::new("e1=4 e2=4 h1:e1+e2");
    rack.reserve(reserve_request("a", "h1", 4)).unwrap();
    rack.set_scheduling(SchedulingTarget::Emc(name("e1")), Scheduling::Cordoned);
    rack.set_scheduling(SchedulingTarget::Emc(name("e2")), Scheduling::Cordoned);
    let closed = vec![(name("e2"), 4, ExclusionReason::Cordoned)];
    let denied = Rejection::OutOfSlices { host: name("h1"), requested: 1, free: 0, closed };
    assert_eq!(rack.reserve(reserve_request("b", "h1", 1)), Err(denied));
}

#[test]
fn reservation_is_found_by_its_id() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let id = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    assert_eq!(rack.ledger.find(&Target::Reservation(id)), Ok(id));
    let unknown = ReservationId(id.0 + 1);
    assert_eq!(rack.ledger.find(&Target::Reservation(unknown)), Err(Rejection::NoSuchReservation(unknown)));
}

#[test]
fn reservations_and_migrations_are_listed_after_an_id() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let ids: Vec<_> = ["a", "b", "c"].map(|vm| rack.reserve(reserve_request(vm, "h1", 1)).unwrap()).into();
    rack.set_scheduling(SchedulingTarget::Host(name("h1")), Scheduling::Draining);
    let after = |id| rack.ledger.reservations_after(id).map(|(id, _)| id).collect::<Vec<_>>();
    assert_eq!((after(ReservationId(0)), after(ids[1])), (ids.clone(), vec![ids[2]]));
    let migrations = |id| rack.ledger.migrations_after(id).map(|(id, _)| id).collect::<Vec<_>>();
    assert_eq!((migrations(ReservationId(0)), migrations(ids[1])), (ids.clone(), vec![ids[2]]));
}

#[test]
fn slices_are_listed_from_a_start_across_emcs() {
    let rack = Rack::new("e1=2 e2=2 h1:e1+e2");
    let from = |slice| rack.ledger.slots_from(SliceId(slice)).map(|(s, emc, _)| (s.0, emc.0)).collect();
    let (all, some): (Vec<_>, Vec<_>) = (from(0), from(1));
    assert_eq!(all, [(0, 0), (1, 0), (2, 1), (3, 1)]);
    assert_eq!(some, all[1..]);
}

#[test]
fn ended_reservation_is_due_for_pruning_after_its_retention() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let id = rack.reserve(reserve_request("a", "h1", 0)).unwrap();
    assert_eq!(rack.ledger.next_prune(), None);
    rack.end_reservation(id, release_reason());
    assert_eq!(rack.ledger.next_prune(), Some(at(2).now.after(REQUEST_ID_RETENTION)));
}

#[test]
fn slice_is_held_and_online_under_its_current_epoch_only() {
    let mut rack = Rack::new("e1=4 h1:e1 h2:e1");
    rack.reserve(reserve_request("a", "h1", 2)).unwrap();
    rack.bring_slice_online(0);
    let held = |host, slice, epoch| rack.ledger.is_held(HostId(host), SliceId(slice), Epoch(epoch));
    let online = |slice, epoch| rack.ledger.is_online(SliceId(slice), Epoch(epoch));
    assert!(held(0, 0, 1) && held(0, 1, 1) && online(0, 1));
    assert!(!held(0, 0, 0) && !held(0, 0, 2) && !held(1, 0, 1) && !held(0, 2, 0));
    assert!(!online(0, 0) && !online(0, 2) && !online(1, 1) && !online(2, 0));
}

#[test]
fn scrub_is_counted_for_its_scrubber_until_it_ends() {
    let mut rack = Rack::new("e1=4 h1:e1 h2:e1");
    let counts =
        |rack: &Rack| (rack.emc("e1").to_scrub(), rack.host("h1").scrubbing(), rack.host("h2").scrubbing());
    let id = rack.reserve(reserve_request("a", "h1", 2)).unwrap();
    assert_eq!(counts(&rack), (0, 0, 0));
    rack.end_reservation(id, release_reason());
    (0..2).for_each(|slice| rack.apply_slice_event(slice, Event::Revoked(Epoch(1))));
    assert_eq!(counts(&rack), (2, 0, 0));
    (0..2).for_each(|slice| rack.apply_slice_event(slice, Event::ScrubBy(HostId(1))));
    assert_eq!(counts(&rack), (0, 0, 2), "after a scrubber is chosen");
    rack.apply_slice_event(0, Event::Granted(Epoch(2)));
    assert_eq!(counts(&rack), (0, 0, 2), "after the grant");
    let holding = Holding { slice: SliceId(0), epoch: Epoch(2) };
    let scrubbed = ScrubReport { holding, started: UnixMs(1), ended: UnixMs(2), verified: units::SLICE };
    rack.apply_slice_event(0, Event::Scrubbed(HostId(1), scrubbed));
    assert_eq!(counts(&rack), (0, 0, 1), "after the scrub");
}

#[test]
fn host_holds_slices_granted_before_it_joined_the_rack() {
    let mut rack = Rack::new("e1=4 h1:e1");
    rack.apply_slice_event(2, Event::Quarantine(Quarantine::UnknownGrant { host: HostId(1) }));
    rack.configure("e1=4 h1:e1 h2:e1").unwrap();
    assert_eq!(rack.host("h2").held().collect::<Vec<_>>(), [SliceId(2)]);
}

#[test]
fn host_is_resized_while_in_use() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let mut spec = RackSpec::parse("e1=4 h1:e1");
    (spec.hosts[0].cores, spec.hosts[0].local) = (32, Bytes::gib(128));
    let change = rack.ledger.decide_configuration(at(2), &spec).unwrap();
    rack.apply(change);
    assert_eq!((rack.host("h1").cores_free(), rack.host("h1").local_free()), (32, Bytes::gib(128)));
}

#[test]
fn host_with_a_reservation_or_slices_is_not_removed() {
    let remove_h1 = |rack: &mut Rack| rack.configure("e1=4 h2:e1").map_err(|denied| denied.reason());
    let mut rack = Rack::new("e1=4 h1:e1 h2:e1");
    let id = rack.reserve(reserve_request("a", "h1", 0)).unwrap();
    assert_eq!(remove_h1(&mut rack), Err("NOT_DRAINED"), "the host has a VM without slices");
    rack.end_reservation(id, release_reason());
    let id = rack.reserve(reserve_request("b", "h1", 1)).unwrap();
    rack.bring_slice_online(0);
    rack.end_reservation(id, release_reason());
    assert_eq!(remove_h1(&mut rack), Err("NOT_DRAINED"), "the host has a draining slice");
    rack.apply_slice_event(0, Event::Released(HostId(0), Epoch(1)));
    rack.apply_slice_event(0, Event::Revoked(Epoch(1)));
    assert_eq!(remove_h1(&mut rack), Ok(()));
}

#[test]
fn removed_host_leaves_the_indexes_of_its_emcs() {
    let mut rack = Rack::new("e1=4 h1:e1 h2:e1");
    rack.ledger.set_host_live(HostId(0), true);
    rack.ledger.set_host_live(HostId(1), true);
    properties::check_indexes(&rack.ledger);
    rack.configure("e1=4 h2:e1").unwrap();
    properties::check_indexes(&rack.ledger);
}

/// A quarantined slice of a reservation must no longer count as online.
#[test]
fn progress_decreases_when_slices_leave_online_state() {
    let mut rack = Rack::new("e1=4 h1:e1");
    rack.reserve(reserve_request("a", "h1", 2)).unwrap();
    (0..2).for_each(|slice| rack.bring_slice_online(slice));
    properties::check_indexes(&rack.ledger);
    rack.apply_slice_event(0, Event::Quarantine(Quarantine::LostGrant));
    properties::check_indexes(&rack.ledger);
}

#[test]
fn fence_ends_when_the_last_unconfirmed_emc_is_removed() {
    let mut rack = Rack::new("e1=4 e2=4 h1:e1+e2");
    let fence = rack.ledger.decide_fence(at(2), HostId(0), false, tester(), "silent");
    rack.apply(fence);
    let confirmed = rack.ledger.decide_fence_confirmation(at(3), HostId(0), EmcId(0));
    rack.apply(confirmed);
    rack.configure("e1=4 h1:e1").unwrap();
    assert_eq!(rack.host("h1").host.fence, Fence::Fenced);
    let loaded = Ledger::load(rack.ledger.meta().clone(), rack.disk.values().cloned());
    assert_eq!(loaded.host(HostId(0)).unwrap().host.unconfirmed_fences, BTreeSet::new());
}

/// One batch may release slices and remove their EMC, and the ledger may apply only the removal.
/// The host must then hold no slices of the EMC.
#[test]
fn host_holds_no_slices_of_a_removed_emc() {
    let mut rack = Rack::new("e1=4 e2=4 h1:e1+e2");
    let id = rack.reserve(reserve_request("a", "h1", 8)).unwrap();
    (4..8).for_each(|slice| rack.bring_slice_online(slice));
    rack.end_reservation(id, release_reason());
    rack.apply(Change(vec![Record::Deleted(Key::Emc(EmcId(1)))]));
    assert!(rack.host("h1").held().all(|slice| slice < SliceId(4)));
    assert_eq!(rack.host("h1").scrubs().len(), 0);
}

#[test]
fn slice_cannot_be_cordoned_or_drained() {
    let rack = Rack::new("e1=4 h1:e1");
    for to in [Scheduling::Cordoned, Scheduling::Draining] {
        let place = SchedulingTarget::Slice(SliceId(0));
        let refused = rack.ledger.decide_scheduling(at(2), &place, to, tester(), "why").unwrap_err();
        assert!(refused.to_string().contains("can only be uncordoned"), "{refused}");
    }
}

#[test]
fn migration_answer_keeps_message_and_time() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let id = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    rack.set_scheduling(SchedulingTarget::Host(name("h1")), Scheduling::Draining);
    let declined = MigrationAnswer::Declined;
    let answer = rack.ledger.decide_migration(at(3), (&name("a"), None), declined, "busy".into(), tester());
    rack.apply(answer.unwrap().1);
    let Migration { explanation: words, requested_at: asked, .. } =
        &rack.ledger.migrations[&MigrationKind::Drain.of(id)];
    assert_eq!((words.as_str(), *asked), ("busy", at(2).wall));
    let later = When { now: at(3).now.after(MIGRATION_REQUEST_RETRY_AFTER), wall: UnixMs(9_000_000) };
    let again = rack.ledger.decide_migration_retry(later, 9);
    rack.apply(again);
    assert_eq!(rack.ledger.migrations[&MigrationKind::Drain.of(id)].requested_at, later.wall);
}

/// A host on which a VM runs may be missing from a restored ledger. A slice held by such a host
/// must wait for an operator.
#[test]
fn slice_of_a_host_outside_the_rack_waits_for_an_operator() {
    for rack_text in ["e1=4! h1:e1", "e1=4 h1:e1"] {
        let mut rack = Rack::new(rack_text);
        let change = rack.ledger.decide_restore();
        rack.apply(change);
        for (slice, host) in [(0, 0), (1, 7)] {
            rack.apply_slice_event(
                slice,
                Event::Quarantine(Quarantine::Restored { host: Some(HostId(host)) }),
            );
        }
        assert_eq!(rack.emc("e1").unclaimed().collect::<Vec<_>>(), [0, 2, 3].map(SliceId), "{rack_text}");
        assert_eq!(
            rack.ledger.quarantined().map(|(slice, _)| slice.0).collect::<Vec<_>>(),
            [1],
            "{rack_text}"
        );
        let change = rack.ledger.decide_unclaimed_requalification(&[0, 1, 2].map(SliceId));
        let changed = change.0.iter().filter(|record| matches!(record, Record::Slice(..)));
        assert_eq!(changed.count(), 2, "{rack_text}");
    }
}

/// A process that outlives its VM may still map an unclaimed slice, so the slice's host must
/// release it first.
#[test]
fn unclaimed_slice_is_released_by_its_host_first() {
    for rack_text in ["e1=4! h1:e1", "e1=4 h1:e1"] {
        let mut rack = Rack::new(rack_text);
        let change = rack.ledger.decide_restore();
        rack.apply(change);
        let host = HostId(0);
        rack.apply_slice_event(0, Event::Quarantine(Quarantine::Restored { host: Some(host) }));
        let change = rack.ledger.decide_unclaimed_requalification(&[0, 1].map(SliceId));
        rack.apply(change);
        assert_eq!(rack.slot(0).state, State::Scrubbing(Scrub::Leaving(host)), "{rack_text}");
        let revoking = Scrub::Revoking { host: None, verified: false };
        assert_eq!(rack.slot(1).state, State::Scrubbing(revoking), "{rack_text}");
    }
}

#[test]
fn vm_without_its_slices_is_replaced_by_its_later_instance() {
    let mut rack = Rack::new("e1=4 h1:e1 h2:e1");
    let id = rack.reserve(reserve_request("a", "h1", 1)).unwrap();
    rack.apply_slice_event(0, Event::Quarantine(Quarantine::LostGrant));
    rack.apply_slice_event(1, Event::Quarantine(Quarantine::UnknownGrant { host: HostId(1) }));
    let later = ReservationId(id.0 + 100);
    let adopted = rack.ledger.decide_adoption(at(3), HostId(1), later, &running_vm("a", [(1, 0)]));
    rack.apply(adopted.expect("the earlier instance has no slices"));
    assert_eq!(rack.ledger.reservation_of(&name("a")), Some(later));
}

#[test]
fn vm_with_some_of_its_slices_adopts_the_others() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let id = rack.reserve(reserve_request("a", "h1", 2)).unwrap();
    rack.bring_slice_online(0);
    rack.bring_slice_online(1);
    rack.apply_slice_event(1, Event::Quarantine(Quarantine::Restored { host: Some(HostId(0)) }));
    let adopt =
        |epoch| rack.ledger.decide_adoption(at(3), HostId(0), id, &running_vm("a", [(0, epoch), (1, 1)]));
    assert_eq!(adopt(0), None, "the epoch is not the device's epoch");
    let change = adopt(1).expect("the device granted this epoch");
    rack.apply(change);
    assert_eq!(rack.slot(1).state, State::Online(Owner { host: HostId(0), reservation: id }));
}

#[test]
fn restores_of_one_backup_use_distinct_reservation_ids() {
    let numbers = |generation| {
        let mut rack = Rack::new("e1=4 h1:e1");
        rack.reserve(reserve_request("a", "h1", 1)).unwrap();
        rack.ledger.meta_mut().generation = generation;
        let change = rack.ledger.decide_restore();
        rack.apply(change);
        rack.ledger.meta().next_reservation.0
    };
    let first = numbers(1);
    assert!(first > units::limits::RESERVATIONS_SINCE_BACKUP_MAX);
    assert!(
        numbers(2) >= first + units::limits::RESERVATIONS_SINCE_BACKUP_MAX / 2,
        "the ids of the first restore remain reserved"
    );
    assert!(numbers(u64::MAX) > numbers(3), "ids do not overflow after many restores");
}

#[test]
fn restore_at_the_end_of_the_id_spaces_rejects_additions() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let (next_host, next_slice) = (HostId(u32::MAX - 9), SliceId(u32::MAX - 9));
    *rack.ledger.meta_mut() = Meta { next_host, next_slice, ..rack.ledger.meta().clone() };
    let change = rack.ledger.decide_restore();
    rack.apply(change);
    let change = rack.ledger.decide_host_report(at(2), HostId(0));
    rack.apply(change);
    for addition in ["e1=4 e2=4 h1:e1", "e1=4 h1:e1 h2:e1"] {
        assert_eq!(
            rack.configure(addition).map_err(|denied| denied.reason()),
            Err("LIMIT_EXCEEDED"),
            "{addition}"
        );
    }
}

#[test]
fn restored_rack_rejects_additions_until_hosts_have_reported() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let change = rack.ledger.decide_restore();
    rack.apply(change);
    for addition in ["e1=4 e2=4 h1:e1", "e1=4 h1:e1 h2:e1"] {
        assert_eq!(
            rack.configure(addition).map_err(|denied| denied.reason()),
            Err("RESTORE_PENDING"),
            "{addition}"
        );
    }
    let change = rack.ledger.decide_host_report(at(2), HostId(0));
    rack.apply(change);
    assert_eq!(rack.configure("e1=4 e2=4 h1:e1 h2:e1+e2"), Ok(()));
}

#[test]
fn host_id_named_by_a_device_is_not_reassigned() {
    let mut rack = Rack::new("e1=4 h1:e1");
    for (reported, next) in [(0, 1), (3, 4), (2, 4), (u32::MAX, 4)] {
        let change = rack.ledger.decide_reserve_host_ids([HostId(reported)]);
        rack.apply(change);
        assert_eq!(rack.ledger.meta().next_host, HostId(next));
    }
    let change = rack.ledger.decide_reserve_host_ids([HostId(5), HostId(u32::MAX)]);
    rack.apply(change);
    assert_eq!(rack.ledger.meta().next_host, HostId(6), "an out-of-range id does not affect later ids");
    rack.configure("e1=4 h1:e1 h2:e1").unwrap();
    assert_eq!(rack.ledger.find_host_by_name(&name("h2")), Some(HostId(6)));
}

#[test]
fn unreported_host_may_be_resized_and_attached_to_more_emcs() {
    let mut rack = Rack::new("e1=4 e2=4 h1:e1");
    let change = rack.ledger.decide_restore();
    rack.apply(change);
    let mut spec = RackSpec::parse("e1=4 e2=4 h1:e1+e2");
    spec.hosts[0].cores = 32;
    let change = rack.ledger.decide_configuration(at(2), &spec).unwrap();
    rack.apply(change);
    assert_eq!((rack.host("h1").host.cores, rack.host("h1").host.emcs.len()), (32, 2));
}
