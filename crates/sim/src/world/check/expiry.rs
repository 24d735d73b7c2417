//! Checks of the expiry of reservations. The manager keeps an ended reservation and its request id
//! for a day, or until the client exceeds its limit of ended reservations.

use pool::record::{Record, Reservation, Stage};
use std::collections::BTreeMap;
use units::limits::{ENDED_REQUESTS_PER_CLIENT_MAX, REQUEST_ID_RETENTION, RESERVATION_PRUNE_INTERVAL};
use units::{Name, Ns, ReservationId, SliceId};

use super::{GroundTruth, counts::owner, memory};
use crate::world::World;

/// Returns the rack time at which a reservation ended, or `None` if the reservation is active.
fn ended_at(reservation: &Reservation) -> Option<Ns> {
    match reservation.stage {
        Stage::Ended { at, .. } => Some(at),
        Stage::Reserved { .. } | Stage::Committed | Stage::Broken { .. } => None,
    }
}

impl GroundTruth {
    /// Returns all reservations after `batch` is applied.
    pub(super) fn reservations_after<'a>(
        &'a self,
        batch: &'a [Record],
    ) -> impl Iterator<Item = (ReservationId, &'a Reservation)> {
        let new = batch.iter().filter_map(|record| match record {
            Record::Reservation(id, reservation) => Some((*id, reservation)),
            _ => None,
        });
        let changed = |id: &ReservationId| {
            batch.iter().any(|record| matches!(record, Record::Reservation(changed, _) if changed == id))
        };
        self.reservations().filter(move |(id, _)| !changed(id)).chain(new)
    }

    /// Returns whether the reservations of the same client that ended later already reach the limit
    /// of this client.
    fn exceeds_client_limit(&self, id: ReservationId, deleted: &Reservation, batch: &[Record]) -> bool {
        let same = self.reservations_after(batch).filter(|(_, r)| r.request.client == deleted.request.client);
        let later = same.filter_map(|(other, r)| Some((ended_at(r)?, other)));
        later.filter(|other| Some(*other) > ended_at(deleted).map(|at| (at, id))).count()
            >= ENDED_REQUESTS_PER_CLIENT_MAX
    }

    fn is_owned_after(&self, slice: SliceId, id: ReservationId, batch: &[Record]) -> bool {
        let new = batch.iter().find_map(|record| match record {
            Record::Slice(changed, slot) if *changed == slice => Some(*slot),
            _ => None,
        });
        owner(&new.unwrap_or_else(|| self.slot(slice))) == Some(id)
    }
}

impl World {
    /// Checks that a deleted reservation had expired or exceeded the limit of its client, and that
    /// its slices were drained.
    pub(super) fn check_expiry(&mut self, id: ReservationId, batch: &[Record]) {
        let Some(deleted) = self.truth.reservation(id).cloned() else { return };
        let now = self.current_time().now;
        // If the reservation ended after the previous batch, no record contains its end time. The
        // start of the previous batch is then a lower bound.
        let ended = ended_at(&deleted).or_else(|| self.manager_process.earliest_decision_time());
        let has_expired = ended.is_some_and(|at| now >= at.after(REQUEST_ID_RETENTION));
        if !(has_expired
            || ended_at(&deleted).is_some() && self.truth.exceeds_client_limit(id, &deleted, batch))
        {
            self.report_violation(
                "a request id is kept for a day after its reservation ends",
                format!("reservation {id} is deleted before its request id expires: {deleted:?}"),
            );
        }
        if memory(&deleted).0.iter().any(|slice| self.truth.is_owned_after(*slice, id, batch)) {
            self.report_violation(
                "a request id is kept for a day after its reservation ends",
                format!("reservation {id} is deleted while its slices drain: {deleted:?}"),
            );
        }
        self.truth.acknowledged.retain(|_, acked| acked.id != id);
    }

    /// Returns a description of a reservation that should have been deleted, or of a client with
    /// too many ended reservations, if any.
    pub(in crate::world) fn find_undeleted_reservation(&mut self) -> Option<String> {
        let now = self.current_time().now;
        let mut by_client: BTreeMap<&Name, usize> = BTreeMap::new();
        for (id, reservation) in self.truth.reservations() {
            let Some(at) = ended_at(reservation).filter(|_| self.truth.is_released(id, reservation)) else {
                continue;
            };
            if now >= at.after(REQUEST_ID_RETENTION).after(RESERVATION_PRUNE_INTERVAL) {
                return Some(format!("reservation {id} ended at {at} but still exists at {now}"));
            }
            *by_client.entry(&reservation.request.client).or_default() += 1;
        }
        let exceeding = by_client.into_iter().find(|(_, count)| *count > ENDED_REQUESTS_PER_CLIENT_MAX);
        exceeding.map(|(client, count)| {
            format!(
                "client {client}: {count} ended reservations are kept, \
                 must be at most {ENDED_REQUESTS_PER_CLIENT_MAX}"
            )
        })
    }
}
