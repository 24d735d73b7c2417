//! Migration requests. A drain creates a request, and the scheduler answers it and migrates the VM.
//! A declined request is repeated. A request ends when its drain is cancelled or its reservation
//! ends.

use std::ops::Bound;

use units::limits::MIGRATION_REQUEST_RETRY_AFTER;
use units::{Name, ReservationId};

use super::{Change, Ledger, When, decision, rack::Place};
use crate::{
    audit::{Actor, DecisionKind, Subject},
    record::{Key, Migration, MigrationAnswer, Record, Reservation, Scheduling},
    rejection::Rejection,
};

impl Ledger {
    /// Returns all migration requests, in ascending order of their reservations.
    pub fn migrations(&self) -> impl Iterator<Item = (ReservationId, &Migration)> {
        self.migrations.iter().map(|(id, m)| (*id, m))
    }

    /// Returns the migration requests of reservations with numbers above `after`, in ascending
    /// order.
    pub fn migrations_after(
        &self,
        after: ReservationId,
    ) -> impl Iterator<Item = (ReservationId, &Migration)> {
        self.migrations.range((Bound::Excluded(after), Bound::Unbounded)).map(|(id, m)| (*id, m))
    }

    /// Returns the migration request of a reservation, if any.
    pub fn migration(&self, id: ReservationId) -> Option<&Migration> {
        self.migrations.get(&id)
    }

    /// Records the scheduler's answer to a migration request.
    ///
    /// # Errors
    /// Returns an error if the VM has no migration request.
    pub fn decide_migration(
        &self,
        when: When,
        vm: &Name,
        answer: MigrationAnswer,
        explanation: String,
        actor: Actor,
    ) -> Result<(ReservationId, Change), Rejection> {
        let open = self.reservation_of(vm).and_then(|id| Some((id, self.migration(id)?)));
        let (id, migration) = open.ok_or_else(|| Rejection::NoSuchMigration(vm.clone()))?;
        let answer_name = match answer {
            MigrationAnswer::Open => "open",
            MigrationAnswer::Accepted => "accepted",
            MigrationAnswer::Declined => "declined",
            MigrationAnswer::Done => "done",
        };
        let what =
            DecisionKind::MigrationAnswered { answer: answer_name.into(), explanation: explanation.clone() };
        let retry_at =
            (answer == MigrationAnswer::Declined).then(|| when.now.after(MIGRATION_REQUEST_RETRY_AFTER));
        let answered = Migration { answer, explanation, retry_at, ..migration.clone() };
        Ok((id, Change(vec![Record::Migration(id, answered), vm_decision(when, actor, vm, what)])))
    }

    /// Repeats at most `limit` declined migration requests whose retry time has come.
    pub fn decide_migration_retry(&self, when: When, limit: usize) -> Change {
        let due = self.declined.iter().take_while(|(at, _)| *at <= when.now).take(limit);
        let records = due.filter_map(|(_, id)| {
            let declined = self.migration(*id)?;
            let open = Migration {
                answer: MigrationAnswer::Open,
                explanation: String::new(),
                retry_at: None,
                requested_at: when.wall,
                ..declined.clone()
            };
            let what = DecisionKind::MigrationRequested { why: format!("again: {}", open.why) };
            let decision = vm_decision(when, Actor::Manager, &open.vm, what);
            Some([Record::Migration(*id, open), decision])
        });
        Change(records.flatten().collect())
    }

    /// Returns the rack time at which the next declined request is repeated.
    pub fn next_migration_retry(&self) -> Option<units::Ns> {
        self.declined.first().map(|(at, _)| *at)
    }

    /// Returns the changes of migration requests after a new scheduling of a host or EMC. A drain
    /// requests the migration of every affected VM. The end of a drain withdraws the requests,
    /// except for VMs on another draining host or EMC.
    pub(super) fn migrations_for(
        &self,
        when: When,
        place: &Place,
        to: Scheduling,
        affected: &[ReservationId],
    ) -> Vec<Record> {
        let why = drain_reason(place);
        if to == Scheduling::Draining {
            let unrequested = affected.iter().filter(|id| !self.migrations.contains_key(id));
            return unrequested.flat_map(|id| self.migration_request(when, *id, &why)).collect();
        }
        self.withdraw_migrations(when, std::slice::from_ref(place))
    }

    /// Returns the records that withdraw the migration requests of hosts and EMCs that no longer
    /// drain or were removed. A request remains if the VM is on another draining host or EMC.
    pub(super) fn withdraw_migrations(&self, when: When, places: &[Place]) -> Vec<Record> {
        let reasons: Vec<String> = places.iter().map(drain_reason).collect();
        let affected = self.migrations.iter().filter(|(_, migration)| reasons.contains(&migration.why));
        affected.flat_map(|(id, migration)| self.migration_withdrawal(when, *id, migration, places)).collect()
    }

    /// Returns a migration request for an adopted VM if its host or an EMC of its slices is
    /// draining.
    pub(super) fn migration_if_draining(
        &self,
        when: When,
        id: ReservationId,
        reservation: &Reservation,
    ) -> Option<[Record; 2]> {
        let place = self.draining_places(reservation).next()?;
        let unrequested = !self.migrations.contains_key(&id);
        unrequested.then(|| migration_request(when, id, reservation, &drain_reason(&place)))
    }

    fn migration_request(&self, when: When, id: ReservationId, why: &str) -> [Record; 2] {
        migration_request(when, id, &self.reservations[&id], why)
    }

    fn migration_withdrawal(
        &self,
        when: When,
        id: ReservationId,
        m: &Migration,
        from: &[Place],
    ) -> Vec<Record> {
        match self.other_drain_of(id, from) {
            Some(other) => vec![Record::Migration(id, Migration { why: drain_reason(&other), ..m.clone() })],
            None => vec![
                Record::Deleted(Key::Migration(id)),
                vm_decision(when, Actor::Manager, &m.vm, DecisionKind::MigrationWithdrawn),
            ],
        }
    }

    /// Returns a draining host or EMC of the VM that is not in `than`.
    fn other_drain_of(&self, id: ReservationId, than: &[Place]) -> Option<Place> {
        self.draining_places(self.reservations.get(&id)?).find(|place| !than.contains(place))
    }

    /// Returns the draining host and EMCs of a reservation.
    fn draining_places(&self, reservation: &Reservation) -> impl Iterator<Item = Place> {
        let host = self.hosts.get(&reservation.host).map(|entry| &entry.host);
        let host = host.filter(|host| host.scheduling == Scheduling::Draining);
        let emcs = self.emcs.values().map(|entry| &entry.emc).filter(|emc| {
            emc.scheduling == Scheduling::Draining && reservation.slices.iter().any(|s| emc.contains(*s))
        });
        let places = host.map(|host| Place::Host(host.name.clone())).into_iter();
        places.chain(emcs.map(|emc| Place::Emc(emc.name.clone())))
    }
}

fn migration_request(when: When, id: ReservationId, reservation: &Reservation, why: &str) -> [Record; 2] {
    let migration = Migration {
        vm: reservation.vm.clone(),
        host: reservation.host,
        why: why.to_owned(),
        requested_at: when.wall,
        answer: MigrationAnswer::Open,
        explanation: String::new(),
        retry_at: None,
    };
    let what = DecisionKind::MigrationRequested { why: why.to_owned() };
    let decision = vm_decision(when, Actor::Manager, &migration.vm, what);
    [Record::Migration(id, migration), decision]
}

fn drain_reason(place: &Place) -> String {
    match place {
        Place::Host(name) => format!("host {name} is draining"),
        Place::Emc(name) => format!("emc {name} is draining"),
        Place::Slice(slice) => format!("slice {slice} is draining"),
    }
}

fn vm_decision(when: When, actor: Actor, vm: &Name, what: DecisionKind) -> Record {
    decision(when, actor, Subject::Vm(vm.clone()), what)
}
