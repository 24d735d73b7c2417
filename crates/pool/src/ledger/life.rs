//! The life of a reservation after it was made: commit, release, expiry, being broken, being forgotten.

use units::{Name, Ns, ReservationId};

use super::{Change, Ledger, When, decision};
use crate::{
    audit::{Actor, Subject, What},
    denied::Denied,
    record::{EndedBy, Key, Record, Reservation, Stage},
    slice::Event,
};

/// Names a reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// By its number.
    Reservation(ReservationId),
    /// By its VM, which has at most one; else the newest of its that ended, so that what is repeated finds it.
    Vm(Name),
}

impl Ledger {
    /// Which reservation is meant.
    ///
    /// # Errors
    /// Not known, or forgotten.
    pub fn find(&self, target: &Target) -> Result<ReservationId, Denied> {
        match target {
            Target::Reservation(id) if self.reservations.contains_key(id) => Ok(*id),
            Target::Reservation(id) => Err(Denied::NoSuchReservation(*id)),
            Target::Vm(vm) => {
                let found = self.reservation_of(vm).or_else(|| self.ended_of(vm));
                found.ok_or_else(|| Denied::NoSuchVm(vm.clone()))
            }
        }
    }

    /// The VM was started. Nothing to change if that was known.
    ///
    /// # Errors
    /// It ended or broke.
    pub fn decide_commit(&self, when: When, id: ReservationId, actor: Actor) -> Result<Change, Denied> {
        let reservation = self.reservations.get(&id).ok_or(Denied::NoSuchReservation(id))?;
        match &reservation.stage {
            Stage::Committed => Ok(Change::default()),
            Stage::Reserved { .. } => Ok(Change(vec![
                Record::Reservation(id, Reservation { stage: Stage::Committed, ..reservation.clone() }),
                decision(when, actor, Subject::Vm(reservation.vm.clone()), What::Committed),
            ])),
            Stage::Broken { why, .. } => {
                Err(Denied::WrongState { reservation: id, state: format!("broken ({why})"), what: "commit" })
            }
            Stage::Ended { why, .. } => {
                Err(Denied::WrongState { reservation: id, state: format!("ended ({why})"), what: "commit" })
            }
        }
    }

    /// The reservation ends; its slices drain. Nothing to change if it has, unless force is new.
    ///
    /// # Errors
    /// The reservation is not known.
    pub fn decide_end(
        &self,
        when: When,
        id: ReservationId,
        why: EndedBy,
        actor: Actor,
    ) -> Result<Change, Denied> {
        let reservation = self.reservations.get(&id).ok_or(Denied::NoSuchReservation(id))?;
        let force = matches!(why, EndedBy::Released { force: true, .. });
        let mut records = self.releasing(id, reservation, force);
        if reservation.is_active() {
            let what = What::Ended { why: why.to_string() };
            let stage = Stage::Ended { at: when.now, why };
            records.push(Record::Reservation(id, Reservation { stage, ..reservation.clone() }));
            records.extend(self.migrations.contains_key(&id).then_some(Record::Gone(Key::Migration(id))));
            records.push(decision(when, actor, Subject::Vm(reservation.vm.clone()), what));
        }
        Ok(Change(records))
    }

    /// Slices of this reservation that can start on their way back.
    fn releasing(&self, id: ReservationId, reservation: &Reservation, force: bool) -> Vec<Record> {
        let own = reservation.slices.iter().filter_map(|s| Some((*s, self.slot(*s)?)));
        let own = own.filter(|(_, slot)| slot.reservation() == Some(id));
        own.filter_map(|(s, slot)| Some(Record::Slice(s, slot.step(Event::Release { force }).ok()?)))
            .collect()
    }

    /// A reservation cannot become ready, or lost a slice. One that was not committed still ends at its deadline. Nothing to
    /// change if it ended or broke before.
    pub fn decide_break(&self, when: When, id: ReservationId, why: String) -> Change {
        let Some(reservation) = self.reservations.get(&id) else { return Change::default() };
        match reservation.stage {
            Stage::Ended { .. } | Stage::Broken { .. } => Change::default(),
            Stage::Reserved { .. } | Stage::Committed => {
                let what = What::Broken { why: why.clone() };
                let stage = Stage::Broken { why, deadline: reservation.stage.deadline(), at: when.wall };
                Change(vec![
                    Record::Reservation(id, Reservation { stage, ..reservation.clone() }),
                    decision(when, Actor::Manager, Subject::Vm(reservation.vm.clone()), what),
                ])
            }
        }
    }

    /// Broken reservations, in order.
    pub fn broken(&self) -> impl ExactSizeIterator<Item = (ReservationId, &Reservation)> {
        self.broken.iter().map(|id| (*id, &self.reservations[id]))
    }

    /// Reservations whose commit is overdue, in order, at most so many.
    pub fn overdue(&self, when: When, most: usize) -> Vec<ReservationId> {
        self.deadlines.iter().take_while(|(at, _)| *at <= when.now).take(most).map(|(_, id)| *id).collect()
    }

    /// Forgets ended reservations past their time, at most so many. One whose slices are still on their way back is kept.
    pub fn decide_forget(&self, when: When, most: usize) -> Change {
        let expired = self.ended.expired(when.now).take(most);
        Change(expired.map(|id| Record::Gone(Key::Reservation(id))).collect())
    }

    /// Forgets the ended reservation that is the first to go while too many are remembered; see [`super::ended`]. Those that
    /// ended at `durable_until` or later are kept.
    pub fn decide_evict(&self, when: When, durable_until: Ns) -> Option<Change> {
        let id = self.ended.excess(when.now, durable_until)?;
        Some(Change(vec![Record::Gone(Key::Reservation(id))]))
    }

    /// Whether more ended requests are remembered than allowed.
    pub fn has_excess_requests(&self) -> bool {
        self.ended.has_excess()
    }

    #[cfg(test)]
    pub(crate) fn bound_ended_requests(&mut self, bounds: super::ended::Bounds) {
        self.ended.bounds = bounds;
    }
}
