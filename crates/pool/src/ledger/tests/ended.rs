//! Expiry of the request ids of ended reservations.

use units::limits::{ENDED_REQUESTS_MAX, ENDED_REQUESTS_PER_CLIENT_MAX};

use super::*;
use crate::ledger::ended::RequestLimits;

const REQUEST_LIMITS: RequestLimits =
    RequestLimits { per_client: 50, total: 100, established_after: Ns::secs(600) };

fn rack_with_limits(bounds: RequestLimits) -> Rack {
    let mut rack = Rack::new("e1=4 h1:e1");
    rack.ledger.ended.bounds = bounds;
    rack
}

fn request_key(client: &str, id: &str) -> RequestKey {
    RequestKey { client: name(client), id: RequestId::new(id).unwrap() }
}

impl Rack {
    /// Reserves no slices, ends the reservation, and deletes ended requests that exceed the limits.
    fn end_request(&mut self, client: &str, id: &str, seconds: u64) -> ReservationId {
        let request = Reserve { request: request_key(client, id), ..reserve_request("brief", "h1", 0) };
        let reservation = self.reserve(request).unwrap();
        let change =
            self.ledger.decide_reservation_end(at(seconds), reservation, release_reason(), tester()).unwrap();
        self.apply(change);
        self.evict_requests(seconds);
        reservation
    }

    fn end_requests(&mut self, client: &str, prefix: &str, requests: u32, seconds: u64) {
        for n in 0..requests {
            self.end_request(client, &format!("{prefix}{n}"), seconds);
        }
    }

    fn evict_requests(&mut self, seconds: u64) {
        while let Some(change) = self.ledger.decide_eviction(at(seconds), Ns::NEVER) {
            self.apply(change);
        }
    }

    fn stored_requests(&self, client: &str) -> usize {
        self.ledger.by_request.keys().filter(|request| request.client == name(client)).count()
    }
}

#[test]
fn client_over_its_limit_loses_oldest_request_ids() {
    let mut rack = rack_with_limits(REQUEST_LIMITS);
    let ids: Vec<_> = (0..53).map(|n| rack.end_request("c", &format!("r{n}"), 2)).collect();
    assert_eq!(rack.ledger.reservations.keys().copied().collect::<Vec<_>>(), ids[3..]);
    assert!(rack.disk.keys().filter(|key| matches!(key, Key::Reservation(_))).count() == 50);
}

#[test]
fn client_without_requests_has_no_entry() {
    let mut rack = rack_with_limits(REQUEST_LIMITS);
    rack.end_request("c", "r", 2);
    let later = When { now: at(2).now.after(REQUEST_ID_RETENTION), ..at(2) };
    let change = rack.ledger.decide_pruning(later, 9);
    rack.apply(change);
    assert!(rack.ledger.ended.check_indexes().is_empty());
}

#[test]
fn flood_under_new_names_spares_established_clients() {
    for requests_per_name in [1, 2, 7, 49_u32] {
        let mut rack = rack_with_limits(REQUEST_LIMITS);
        rack.end_requests("honest", "r", 40, 10);
        for n in 0..1000 {
            let client = format!("flood{}", n / requests_per_name);
            rack.end_request(&client, &format!("r{n}"), 610 + u64::from(n / 100));
            assert!(rack.ledger.ended.len() <= REQUEST_LIMITS.total);
        }
        assert_eq!(rack.stored_requests("honest"), 40);
        assert_eq!(
            rack.ledger.ended.len(),
            REQUEST_LIMITS.total,
            "IDs of new clients use the remaining limit"
        );
    }
}

#[test]
fn slow_flood_does_not_displace_established_clients() {
    let mut rack = rack_with_limits(REQUEST_LIMITS);
    rack.end_requests("honest", "r", 40, 10);
    for n in 0..600 {
        // The flood sends 120 requests in ten minutes, for 50 minutes.
        rack.end_request(&format!("flood{n}"), "r", 610 + 5 * n);
    }
    assert_eq!(rack.stored_requests("honest"), 40);
}

#[test]
fn flood_spares_an_established_client_that_is_at_its_limit() {
    let mut rack = rack_with_limits(REQUEST_LIMITS);
    for n in 0..REQUEST_LIMITS.per_client {
        rack.end_request("honest", &format!("r{n}"), 10);
    }
    for n in 0..60 {
        rack.end_request(&format!("flood{n}"), "r", 700);
    }
    assert_eq!(rack.stored_requests("honest"), REQUEST_LIMITS.per_client);
}

#[test]
fn established_client_with_most_requests_loses_its_oldest() {
    let mut rack = rack_with_limits(REQUEST_LIMITS);
    for (client, requests) in [("a", 30), ("b", 20), ("c", 50)] {
        rack.end_requests(client, "r", requests, 10);
    }
    rack.end_requests("a", "late", 20, 700);
    assert_eq!(["a", "b", "c"].map(|client| rack.stored_requests(client)), [40, 20, 40]);
}

#[test]
fn request_ended_after_the_durable_batch_is_not_evicted() {
    let mut rack = rack_with_limits(RequestLimits { total: 1, ..REQUEST_LIMITS });
    for n in 0..3 {
        let request =
            Reserve { request: request_key("c", &format!("r{n}")), ..reserve_request("brief", "h1", 0) };
        let id = rack.reserve(request).unwrap();
        let change = rack.ledger.decide_reservation_end(at(10 + n), id, release_reason(), tester()).unwrap();
        rack.apply(change);
    }
    let durable_until = at(11).now;
    let oldest = Change(vec![Record::Deleted(Key::Reservation(ReservationId(1)))]);
    assert_eq!(rack.ledger.decide_eviction(at(12), durable_until), Some(oldest.clone()));
    rack.apply(oldest);
    assert_eq!(
        rack.ledger.decide_eviction(at(12), durable_until),
        None,
        "the reply to the release may not be durable"
    );
}

#[test]
fn evicted_request_does_not_reserve_an_active_vm_again() {
    let mut rack = rack_with_limits(RequestLimits { total: 0, ..REQUEST_LIMITS });
    let first = Reserve { request: request_key("c", "first"), ..reserve_request("a", "h1", 0) };
    let ended = rack.reserve(first.clone()).unwrap();
    rack.end_reservation(ended, release_reason());
    let second = Reserve { request: request_key("c", "second"), ..first.clone() };
    let active = rack.reserve(second.clone()).unwrap();
    assert_eq!(rack.reserve(first.clone()), Ok(ended), "the repeated request returns the ended reservation");
    rack.evict_requests(9);
    let taken = Rejection::VmAlreadyReserved { vm: name("a"), reservation: active, host: name("h1") };
    assert_eq!(rack.reserve(first), Err(taken));
    assert_eq!(rack.reserve(second), Ok(active), "the repeated request returns the active reservation");
    assert_eq!(rack.ledger.reservations.len(), 1);
}

#[test]
fn request_is_evicted_only_after_its_slices_are_released() {
    let mut rack = rack_with_limits(RequestLimits { total: 0, ..REQUEST_LIMITS });
    let id = rack.reserve(reserve_request("a", "h1", 2)).unwrap();
    (0..2).for_each(|slice| rack.bring_slice_online(slice));
    rack.end_reservation(id, release_reason());
    for slice in 0..2 {
        assert_eq!(rack.ledger.decide_eviction(at(9), Ns::NEVER), None);
        rack.apply_slice_event(slice, Event::Released(HostId(0), Epoch(1)));
        rack.apply_slice_event(slice, Event::Revoked(Epoch(1)));
    }
    rack.evict_requests(9);
    assert_eq!(rack.ledger.reservations.len(), 0);
    assert!(rack.ledger.outstanding_slices.is_empty());
}

#[test]
fn default_limits_are_the_service_limits() {
    let RequestLimits { per_client, total, .. } = RequestLimits::default();
    assert_eq!((per_client, total), (ENDED_REQUESTS_PER_CLIENT_MAX, ENDED_REQUESTS_MAX));
}
