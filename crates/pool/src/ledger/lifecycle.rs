//! Lifecycle of a reservation after its creation: commit, release, expiry, failure, deletion.

use units::{Name, Ns, ReservationId};

use super::{Change, Ledger, When, decision};
use crate::{
    audit::{Actor, DecisionKind, Subject},
    record::{EndReason, Key, Record, Reservation, Stage},
    rejection::Rejection,
    slice::Event,
};

/// Note appended to the cause of a reservation's end while its VM's process still runs.
const PROCESS_STILL_RUNS_NOTE: &str =
    "; its process still runs, and its cores and local memory stay in use until it ends";

/// Reference to a reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Reference by the reservation's ID.
    Reservation(ReservationId),
    /// Reference by VM name: the active reservation, or else the newest ended reservation. A
    /// repeated release therefore finds the reservation that it released.
    Vm(Name),
}

impl Ledger {
    /// Returns the ID of the referenced reservation.
    ///
    /// # Errors
    /// Returns [`Rejection::NoSuchReservation`] or [`Rejection::NoSuchVm`] if the reservation does
    /// not exist or was deleted.
    pub fn find(&self, target: &Target) -> Result<ReservationId, Rejection> {
        match target {
            Target::Reservation(id) if self.reservations.contains_key(id) => Ok(*id),
            Target::Reservation(id) => Err(Rejection::NoSuchReservation(*id)),
            Target::Vm(vm) => {
                let found = self.reservation_of(vm).or_else(|| self.newest_ended_reservation_of(vm));
                found.ok_or_else(|| Rejection::NoSuchVm(vm.clone()))
            }
        }
    }

    /// Commits a reservation. The change is empty if the reservation is already committed.
    ///
    /// # Errors
    /// Returns an error if the reservation does not exist, has ended or is broken.
    pub fn decide_commit(&self, when: When, id: ReservationId, actor: Actor) -> Result<Change, Rejection> {
        let reservation = self.reservations.get(&id).ok_or(Rejection::NoSuchReservation(id))?;
        match &reservation.stage {
            Stage::Committed => Ok(Change::default()),
            Stage::Reserved { .. } => Ok(Change(vec![
                Record::Reservation(id, Reservation { stage: Stage::Committed, ..reservation.clone() }),
                decision(when, actor, Subject::Vm(reservation.vm.clone()), DecisionKind::Committed),
            ])),
            Stage::Broken { why, .. } => Err(Rejection::WrongState {
                reservation: id,
                state: format!("broken ({why})"),
                what: "commit it",
            }),
            Stage::Ended { why, .. } => Err(Rejection::WrongState {
                reservation: id,
                state: format!("ended ({why})"),
                what: "commit it",
            }),
        }
    }

    /// Ends a reservation and starts to drain its slices. The change is empty if the reservation
    /// has already ended, unless the end is now forced.
    ///
    /// # Errors
    /// Returns an error if the reservation does not exist.
    pub fn decide_reservation_end(
        &self,
        when: When,
        id: ReservationId,
        why: EndReason,
        actor: Actor,
    ) -> Result<Change, Rejection> {
        let reservation = self.reservations.get(&id).ok_or(Rejection::NoSuchReservation(id))?;
        let force = matches!(why, EndReason::Released { force: true, .. });
        let mut records = self.release_slices(id, reservation, force);
        if reservation.is_active() {
            let has_process = reservation.has_process && why.may_leave_process();
            let note = if has_process { PROCESS_STILL_RUNS_NOTE } else { "" };
            let what = DecisionKind::Ended { why: format!("{why}{note}") };
            let stage = Stage::Ended { at: when.now, why };
            records.push(Record::Reservation(id, Reservation { stage, has_process, ..reservation.clone() }));
            let requests = self.requests_of(id).map(|migration| migration.kind().of(id));
            records.extend(requests.map(|key| Record::Deleted(Key::Migration(key))));
            records.push(decision(when, actor, Subject::Vm(reservation.vm.clone()), what));
        }
        Ok(Change(records))
    }

    /// Records whether the process of a reservation's VM runs. The change is empty if this is
    /// already recorded.
    pub fn decide_process_change(
        &self,
        when: When,
        id: ReservationId,
        has_process: bool,
        actor: Actor,
    ) -> Change {
        let Some(old) = self.reservations.get(&id).filter(|old| old.has_process != has_process) else {
            return Change::default();
        };
        let mut records = vec![Record::Reservation(id, Reservation { has_process, ..old.clone() })];
        if !old.is_active() {
            let why = if has_process {
                format!("ended{PROCESS_STILL_RUNS_NOTE}")
            } else {
                EndReason::ProcessGone.to_string()
            };
            records.push(decision(when, actor, Subject::Vm(old.vm.clone()), DecisionKind::Ended { why }));
        }
        Change(records)
    }

    /// Returns the records with which the hosts begin to release the reservation's slices, including
    /// slices that the VM had before a move to local memory and that are still draining.
    pub(super) fn release_slices(
        &self,
        id: ReservationId,
        reservation: &Reservation,
        force: bool,
    ) -> Vec<Record> {
        let slices = reservation.slices.iter().chain(reservation.rehome.former_slices());
        let own = slices.filter_map(|s| Some((*s, self.slot(*s)?)));
        let own = own.filter(|(_, slot)| slot.reservation() == Some(id));
        own.filter_map(|(s, slot)| Some(Record::Slice(s, slot.step(Event::Release { force }).ok()?)))
            .collect()
    }

    /// Breaks a reservation that cannot become ready or has lost a slice. A broken reservation that
    /// was not committed still expires. The change is empty if the reservation has ended or is
    /// already broken.
    pub fn decide_reservation_break(&self, when: When, id: ReservationId, why: String) -> Change {
        let Some(reservation) = self.reservations.get(&id) else { return Change::default() };
        match reservation.stage {
            Stage::Ended { .. } | Stage::Broken { .. } => Change::default(),
            Stage::Reserved { .. } | Stage::Committed => {
                let what = DecisionKind::Broken { why: why.clone() };
                let stage = Stage::Broken { why, deadline: reservation.stage.deadline(), at: when.wall };
                Change(vec![
                    Record::Reservation(id, Reservation { stage, ..reservation.clone() }),
                    decision(when, Actor::Manager, Subject::Vm(reservation.vm.clone()), what),
                ])
            }
        }
    }

    /// Returns the broken reservations, in ascending order.
    pub fn broken_reservations(&self) -> impl ExactSizeIterator<Item = (ReservationId, &Reservation)> {
        self.broken.iter().map(|id| (*id, &self.reservations[id]))
    }

    /// Returns at most `limit` reservations with an expired deadline, earliest deadline first.
    pub fn overdue_reservations(&self, when: When, limit: usize) -> Vec<ReservationId> {
        self.deadlines.iter().take_while(|(at, _)| *at <= when.now).take(limit).map(|(_, id)| *id).collect()
    }

    /// Deletes at most `limit` ended reservations whose retention time has passed. Keeps
    /// reservations with draining slices or a running process.
    pub fn decide_pruning(&self, when: When, limit: usize) -> Change {
        let expired = self.ended.expired(when.now).take(limit);
        Change(expired.map(|id| Record::Deleted(Key::Reservation(id))).collect())
    }

    /// Deletes the next ended reservation that exceeds the limits; see [`super::ended`]. Keeps
    /// reservations that ended at `durable_until` or later.
    pub fn decide_eviction(&self, when: When, durable_until: Ns) -> Option<Change> {
        let id = self.ended.next_excess_request(when.now, durable_until)?;
        Some(Change(vec![Record::Deleted(Key::Reservation(id))]))
    }

    /// Returns whether the number of recorded ended requests exceeds a limit.
    pub fn has_excess_requests(&self) -> bool {
        self.ended.exceeds_request_limits()
    }

    #[cfg(test)]
    pub(crate) fn set_ended_request_limits(&mut self, bounds: super::ended::RequestLimits) {
        self.ended.bounds = bounds;
    }
}
