//! Migration requests: created by a drain, answered by the scheduler, repeated after it declined,
//! withdrawn when the drain is cancelled. The scheduler migrates; a request ends with its
//! reservation.

use std::ops::Bound;

use units::limits::MIGRATION_REQUEST_RETRY_AFTER;
use units::{Name, ReservationId};

use super::{Change, Ledger, When, decision, rack::Place};
use crate::{
    audit::{Actor, Subject, What},
    denied::Denied,
    record::{Key, Migration, MigrationAnswer, Record, Reservation, Scheduling},
};

impl Ledger {
    /// Returns all migration requests.
    pub fn migrations(&self) -> impl Iterator<Item = (ReservationId, &Migration)> {
        self.migrations.iter().map(|(id, m)| (*id, m))
    }

    /// Returns the requests above a reservation's number, in ascending order.
    pub fn migrations_after(
        &self,
        after: ReservationId,
    ) -> impl Iterator<Item = (ReservationId, &Migration)> {
        self.migrations.range((Bound::Excluded(after), Bound::Unbounded)).map(|(id, m)| (*id, m))
    }

    /// Returns the migration request of a reservation.
    pub fn migration(&self, id: ReservationId) -> Option<&Migration> {
        self.migrations.get(&id)
    }

    /// Records the scheduler's answer to a migration request.
    ///
    /// # Errors
    /// There is no such request.
    pub fn decide_migration(
        &self,
        when: When,
        vm: &Name,
        answer: MigrationAnswer,
        words: String,
        actor: Actor,
    ) -> Result<(ReservationId, Change), Denied> {
        let asked = self.reservation_of(vm).and_then(|id| Some((id, self.migration(id)?)));
        let (id, migration) = asked.ok_or_else(|| Denied::NoSuchMigration(vm.clone()))?;
        let said = match answer {
            MigrationAnswer::Open => "open",
            MigrationAnswer::Accepted => "accepted",
            MigrationAnswer::Declined => "declined",
            MigrationAnswer::Done => "done",
        };
        let what = What::MigrationAnswered { answer: said.into(), words: words.clone() };
        let again =
            (answer == MigrationAnswer::Declined).then(|| when.now.after(MIGRATION_REQUEST_RETRY_AFTER));
        let answered = Migration { answer, words, again, ..migration.clone() };
        Ok((id, Change(vec![Record::Migration(id, answered), about(when, actor, vm, what)])))
    }

    /// Repeats migration requests that were declined long enough ago, up to a limit.
    pub fn decide_ask_again(&self, when: When, most: usize) -> Change {
        let due = self.declined.iter().take_while(|(at, _)| *at <= when.now).take(most);
        let again = due.filter_map(|(_, id)| {
            let declined = self.migration(*id)?;
            let open = Migration {
                answer: MigrationAnswer::Open,
                words: String::new(),
                again: None,
                asked: when.wall,
                ..declined.clone()
            };
            let what = What::MigrationAsked { why: format!("again: {}", open.why) };
            let said = about(when, Actor::Manager, &open.vm, what);
            Some([Record::Migration(*id, open), said])
        });
        Change(again.flatten().collect())
    }

    /// Returns the time of the next repetition.
    pub fn next_asking_again(&self) -> Option<units::Ns> {
        self.declined.first().map(|(at, _)| *at)
    }

    /// What a new scheduling of a place means for the VMs there: a drain asks for each of them to move, and taking it
    /// back withdraws that, unless something else under the VM drains too.
    pub(super) fn migrations_for(
        &self,
        when: When,
        place: &Place,
        to: Scheduling,
        there: &[ReservationId],
    ) -> Vec<Record> {
        let why = drains(place);
        if to == Scheduling::Draining {
            let unasked = there.iter().filter(|id| !self.migrations.contains_key(id));
            return unasked.flat_map(|id| self.asking(when, *id, &why)).collect();
        }
        self.withdraw_migrations(when, std::slice::from_ref(place))
    }

    /// Returns the records that withdraw the requests of places which no longer drain or are removed. A
    /// request whose VM has another draining place is kept for that.
    pub(super) fn withdraw_migrations(&self, when: When, places: &[Place]) -> Vec<Record> {
        let reasons: Vec<String> = places.iter().map(drains).collect();
        let affected = self.migrations.iter().filter(|(_, migration)| reasons.contains(&migration.why));
        affected.flat_map(|(id, migration)| self.withdrawing(when, *id, migration, places)).collect()
    }

    /// Asks for the move of a VM that was adopted on a host or an EMC that drains.
    pub(super) fn asking_if_draining(
        &self,
        when: When,
        id: ReservationId,
        reservation: &Reservation,
    ) -> Option<[Record; 2]> {
        let place = self.draining_under(reservation).next()?;
        let unasked = !self.migrations.contains_key(&id);
        unasked.then(|| asking(when, id, reservation, &drains(&place)))
    }

    fn asking(&self, when: When, id: ReservationId, why: &str) -> [Record; 2] {
        asking(when, id, &self.reservations[&id], why)
    }

    fn withdrawing(&self, when: When, id: ReservationId, m: &Migration, from: &[Place]) -> Vec<Record> {
        match self.other_drain(id, from) {
            Some(other) => vec![Record::Migration(id, Migration { why: drains(&other), ..m.clone() })],
            None => vec![
                Record::Gone(Key::Migration(id)),
                about(when, Actor::Manager, &m.vm, What::MigrationWithdrawn),
            ],
        }
    }

    /// Returns another draining place of a VM.
    fn other_drain(&self, id: ReservationId, than: &[Place]) -> Option<Place> {
        self.draining_under(self.reservations.get(&id)?).find(|place| !than.contains(place))
    }

    /// The draining places of a VM: its host, and EMCs of its slices.
    fn draining_under(&self, reservation: &Reservation) -> impl Iterator<Item = Place> {
        let host = self.hosts.get(&reservation.host).map(|entry| &entry.host);
        let host = host.filter(|host| host.scheduling == Scheduling::Draining);
        let emcs = self.emcs.values().map(|entry| &entry.emc).filter(|emc| {
            emc.scheduling == Scheduling::Draining && reservation.slices.iter().any(|s| emc.contains(*s))
        });
        let places = host.map(|host| Place::Host(host.name.clone())).into_iter();
        places.chain(emcs.map(|emc| Place::Emc(emc.name.clone())))
    }
}

fn asking(when: When, id: ReservationId, reservation: &Reservation, why: &str) -> [Record; 2] {
    let migration = Migration {
        vm: reservation.vm.clone(),
        host: reservation.host,
        why: why.to_owned(),
        asked: when.wall,
        answer: MigrationAnswer::Open,
        words: String::new(),
        again: None,
    };
    let what = What::MigrationAsked { why: why.to_owned() };
    let said = about(when, Actor::Manager, &migration.vm, what);
    [Record::Migration(id, migration), said]
}

fn drains(place: &Place) -> String {
    match place {
        Place::Host(name) => format!("host {name} is draining"),
        Place::Emc(name) => format!("emc {name} is draining"),
        Place::Slice(slice) => format!("slice {slice} is draining"),
    }
}

fn about(when: When, actor: Actor, vm: &Name, what: What) -> Record {
    decision(when, actor, Subject::Vm(vm.clone()), what)
}
