//! Migration requests. A drain creates a request for each VM. The scheduler answers the request and
//! migrates the VM. A declined request is repeated. A request ends when the drain is cancelled or
//! the reservation ends.

use std::ops::Bound;

use units::limits::MIGRATION_REQUEST_RETRY_AFTER;
use units::{Name, ReservationId};

use super::{Change, Ledger, When, decision, rack::SchedulingTarget};
use crate::{
    audit::{Actor, DecisionKind, Subject},
    record::{Key, Migration, MigrationAnswer, Record, Reservation, Scheduling},
    rejection::Rejection,
};

impl Ledger {
    /// Returns all migration requests, in ascending order of reservation IDs.
    pub fn migrations(&self) -> impl Iterator<Item = (ReservationId, &Migration)> {
        self.migrations.iter().map(|(id, m)| (*id, m))
    }

    /// Returns the migration requests of reservations with IDs above `after`, in ascending order.
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

    /// Returns the records of migration requests for a change of scheduling. A drain requests the
    /// migration of every affected VM. The end of a drain withdraws the requests, except for VMs on
    /// another draining host or EMC.
    pub(super) fn migration_changes(
        &self,
        when: When,
        target: &SchedulingTarget,
        to: Scheduling,
        affected: &[ReservationId],
    ) -> Vec<Record> {
        let why = drain_reason(target);
        if to == Scheduling::Draining {
            let unrequested = affected.iter().filter(|id| !self.migrations.contains_key(id));
            return unrequested.flat_map(|id| self.migration_request(when, *id, &why)).collect();
        }
        self.withdraw_migrations(when, std::slice::from_ref(target))
    }

    /// Returns the records that withdraw the migration requests of hosts and EMCs that are no
    /// longer draining or were removed. A request remains if the VM is on another draining host or
    /// EMC.
    pub(super) fn withdraw_migrations(&self, when: When, targets: &[SchedulingTarget]) -> Vec<Record> {
        let reasons: Vec<String> = targets.iter().map(drain_reason).collect();
        let affected = self.migrations.iter().filter(|(_, migration)| reasons.contains(&migration.why));
        affected
            .flat_map(|(id, migration)| self.migration_withdrawal(when, *id, migration, targets))
            .collect()
    }

    /// Returns the records of a migration request for an adopted VM if its host or an EMC of its
    /// slices is draining.
    pub(super) fn migration_if_draining(
        &self,
        when: When,
        id: ReservationId,
        reservation: &Reservation,
    ) -> Option<[Record; 2]> {
        let target = self.draining_targets(reservation).next()?;
        let unrequested = !self.migrations.contains_key(&id);
        unrequested.then(|| migration_request(when, id, reservation, &drain_reason(&target)))
    }

    fn migration_request(&self, when: When, id: ReservationId, why: &str) -> [Record; 2] {
        migration_request(when, id, &self.reservations[&id], why)
    }

    fn migration_withdrawal(
        &self,
        when: When,
        id: ReservationId,
        m: &Migration,
        from: &[SchedulingTarget],
    ) -> Vec<Record> {
        match self.other_draining_target(id, from) {
            Some(other) => vec![Record::Migration(id, Migration { why: drain_reason(&other), ..m.clone() })],
            None => vec![
                Record::Deleted(Key::Migration(id)),
                vm_decision(when, Actor::Manager, &m.vm, DecisionKind::MigrationWithdrawn),
            ],
        }
    }

    /// Returns a draining host or EMC of the VM that is not in `excluded`.
    fn other_draining_target(
        &self,
        id: ReservationId,
        excluded: &[SchedulingTarget],
    ) -> Option<SchedulingTarget> {
        self.draining_targets(self.reservations.get(&id)?).find(|target| !excluded.contains(target))
    }

    /// Returns the host and the EMCs of a reservation that are draining.
    fn draining_targets(&self, reservation: &Reservation) -> impl Iterator<Item = SchedulingTarget> {
        let host = self.hosts.get(&reservation.host).map(|entry| &entry.host);
        let host = host.filter(|host| host.scheduling == Scheduling::Draining);
        let emcs = self.emcs.values().map(|entry| &entry.emc).filter(|emc| {
            emc.scheduling == Scheduling::Draining && reservation.slices.iter().any(|s| emc.contains(*s))
        });
        let targets = host.map(|host| SchedulingTarget::Host(host.name.clone())).into_iter();
        targets.chain(emcs.map(|emc| SchedulingTarget::Emc(emc.name.clone())))
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

fn drain_reason(target: &SchedulingTarget) -> String {
    match target {
        SchedulingTarget::Host(name) => format!("host {name} is draining"),
        SchedulingTarget::Emc(name) => format!("emc {name} is draining"),
        SchedulingTarget::Slice(slice) => format!("slice {slice} is draining"),
    }
}

fn vm_decision(when: When, actor: Actor, vm: &Name, what: DecisionKind) -> Record {
    decision(when, actor, Subject::Vm(vm.clone()), what)
}
