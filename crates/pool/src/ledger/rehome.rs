//! Moves of a running VM's pool memory to local memory of its host (rehome). The decision books the
//! local memory. The host moves the memory and reports the result. A report of success releases the
//! slices, and a report of failure releases the booked local memory. Until then both are reserved.

use units::ReservationId;
use units::limits::{REHOME_ATTEMPTS_MAX, REHOME_CLIENT_RETRY_AFTER, REHOME_RETRY_AFTER};

use super::{Change, Ledger, When, decision, lifecycle::Target};
use crate::{
    audit::{Actor, DecisionKind, Subject},
    record::{MigrationKind, Record, Rehome, Reservation, Stage},
    rejection::Rejection,
};

impl Ledger {
    /// Books local memory on the VM's host for its pool memory, so that the host moves the pool memory
    /// there. The change is empty if a move is in progress or complete. After a failed attempt, the next attempt is
    /// possible after [`REHOME_CLIENT_RETRY_AFTER`]. With `is_automatic`, a VM has at most
    /// [`REHOME_ATTEMPTS_MAX`] attempts, with [`REHOME_RETRY_AFTER`] between them.
    ///
    /// # Errors
    /// [`Rejection::NoSuchReservation`] or [`Rejection::NoSuchVm`] if there is no such reservation.
    /// [`Rejection::CannotRehome`] if the VM does not run, has no pool memory, is pinned or broken, or
    /// has had too many attempts, if an attempt has failed recently, or if a move is being cancelled.
    /// [`Rejection::OutOfLocal`] if the host has too little free local memory.
    pub fn decide_rehome(
        &self,
        when: When,
        target: &Target,
        actor: Actor,
        is_automatic: bool,
    ) -> Result<(ReservationId, Change), Rejection> {
        let id = self.find(target)?;
        let reservation = &self.reservations[&id];
        if reservation.is_active()
            && matches!(reservation.rehome, Rehome::Moving { .. } | Rehome::Done { .. })
        {
            return Ok((id, Change::default()));
        }
        self.check_rehome(reservation)?;
        check_limits(when, reservation, is_automatic)?;
        let attempt = reservation.rehome.attempts().saturating_add(1);
        let moving = Reservation { rehome: Rehome::Moving { attempt }, ..reservation.clone() };
        let what = DecisionKind::RehomeStarted { attempt, local: reservation.pool() };
        let decision = decision(when, actor, Subject::Vm(reservation.vm.clone()), what);
        Ok((id, Change(vec![Record::Reservation(id, moving), decision])))
    }

    /// Cancels the move of a VM's pool memory. The local memory stays booked until the host reports the
    /// result. The change is empty if no move is in progress, or if the move was already cancelled.
    ///
    /// # Errors
    /// [`Rejection::NoSuchReservation`] or [`Rejection::NoSuchVm`] if there is no such reservation.
    pub fn decide_rehome_cancellation(
        &self,
        when: When,
        target: &Target,
        actor: Actor,
    ) -> Result<(ReservationId, Change), Rejection> {
        let id = self.find(target)?;
        let reservation = &self.reservations[&id];
        let Rehome::Moving { attempt } = reservation.rehome else { return Ok((id, Change::default())) };
        if !reservation.is_active() {
            return Ok((id, Change::default()));
        }
        let cancelling = Reservation { rehome: Rehome::Cancelling { attempt }, ..reservation.clone() };
        let what = DecisionKind::RehomeCancelled { attempt };
        let decision = decision(when, actor, Subject::Vm(reservation.vm.clone()), what);
        Ok((id, Change(vec![Record::Reservation(id, cancelling), decision])))
    }

    /// Checks whether the pool memory of a VM can be moved to local memory of its host now.
    ///
    /// # Errors
    /// [`Rejection::CannotRehome`] or [`Rejection::OutOfLocal`]; see [`Ledger::decide_rehome`].
    pub fn check_rehome(&self, reservation: &Reservation) -> Result<(), Rejection> {
        let host = self.hosts.get(&reservation.host);
        let obstacle = match &reservation.stage {
            Stage::Ended { .. } => Some("its reservation has ended"),
            Stage::Broken { .. } => Some("its reservation is broken"),
            _ if reservation.slices.is_empty() => Some("it has no pool memory"),
            _ if matches!(reservation.rehome, Rehome::Cancelling { .. }) => {
                Some("its move is being cancelled")
            }
            _ if reservation.rehome.attempt_in_progress().is_some() => Some("a move is in progress"),
            _ if reservation.pinned => Some("it is pinned"),
            _ if !reservation.has_process => Some("it does not run"),
            _ if host.is_none_or(|host| host.host.must_report) => {
                Some("its host has not reported since a restore of the ledger")
            }
            Stage::Reserved { .. } | Stage::Committed => None,
        };
        if let Some(why) = obstacle {
            return Err(Rejection::CannotRehome { vm: reservation.vm.clone(), why });
        }
        let requested = reservation.pool();
        match host {
            Some(host) if host.local_free() < requested => Err(Rejection::OutOfLocal {
                host: host.host.name.clone(),
                requested,
                free: host.local_free(),
            }),
            _ => Ok(()),
        }
    }

    /// Records that a VM uses only local memory, as its host reports, and starts to drain its slices.
    /// Also applies if the ledger did not request the move: a restored ledger may be older than the
    /// request. The change is empty if the reservation has no slices, or has ended and its VM does not run.
    pub fn decide_rehome_completion(&self, when: When, id: ReservationId, actor: Actor) -> Change {
        let is_running = |old: &&Reservation| old.is_active() || old.has_process;
        let old = self.reservations.get(&id).filter(is_running);
        let Some(old) = old.filter(|old| !old.slices.is_empty()) else { return Change::default() };
        let mut records = self.release_slices(id, old, false);
        let local = [old.local, old.pool()].into_iter().sum();
        let rehome = Rehome::Done { slices: old.slices.clone() };
        // A VM that is uncommitted in a backup may have been committed later.
        let is_restored = self.hosts.get(&old.host).is_some_and(|host| host.host.must_report);
        let stage = match &old.stage {
            Stage::Reserved { .. } if is_restored => Stage::Committed,
            stage => stage.clone(),
        };
        let new = Reservation { slices: Vec::new(), local, rehome, stage, ..old.clone() };
        if new.is_active() {
            records.extend(self.requests_ended_by_rehome(when, id, &new));
        }
        let what = DecisionKind::Rehomed { slices: old.slices.clone() };
        records.push(decision(when, actor, Subject::Vm(new.vm.clone()), what));
        records.push(Record::Reservation(id, new));
        Change(records)
    }

    /// Returns the records that end the migration requests whose cause does not apply without pool
    /// memory.
    fn requests_ended_by_rehome(&self, when: When, id: ReservationId, new: &Reservation) -> Vec<Record> {
        let mut records = self.slowdown_end(when, id, "the VM uses only local memory");
        if let Some(drain) = self.migration(MigrationKind::Drain.of(id)) {
            records.extend(self.drain_request_change(when, id, drain, self.draining_targets(new).next()));
        }
        records
    }

    /// Records that an attempt to move a VM's pool memory failed, and releases the booked local
    /// memory. The change is empty if this attempt is not in progress.
    pub fn decide_rehome_failure(
        &self,
        when: When,
        id: ReservationId,
        attempt: u32,
        why: &str,
        actor: Actor,
    ) -> Change {
        let Some(old) = self.reservations.get(&id) else { return Change::default() };
        if old.rehome.attempt_in_progress() != Some(attempt) {
            return Change::default();
        }
        let rehome = Rehome::Failed { attempt, why: why.to_owned(), at: when.now };
        let what = DecisionKind::RehomeFailed { attempt, why: why.to_owned() };
        let decision = decision(when, actor, Subject::Vm(old.vm.clone()), what);
        Change(vec![Record::Reservation(id, Reservation { rehome, ..old.clone() }), decision])
    }
}

const _: () = assert!(REHOME_ATTEMPTS_MAX == 3, "the message of the rejection states the number");

/// Checks the limits of repeated moves. They are stricter for moves that no client requested.
fn check_limits(when: When, reservation: &Reservation, is_automatic: bool) -> Result<(), Rejection> {
    let retry_after = if is_automatic { REHOME_RETRY_AFTER } else { REHOME_CLIENT_RETRY_AFTER };
    let limit = match &reservation.rehome {
        rehome if is_automatic && rehome.attempts() >= REHOME_ATTEMPTS_MAX => {
            "three attempts have failed or were cancelled"
        }
        Rehome::Failed { at, .. } if when.now < at.after(retry_after) => {
            "an attempt has failed or was cancelled recently"
        }
        _ => return Ok(()),
    };
    Err(Rejection::CannotRehome { vm: reservation.vm.clone(), why: limit })
}
