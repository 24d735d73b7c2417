//! Migration requests. A drain creates a request for each VM, and the monitor of running VMs creates
//! requests for VMs that pool memory slows down. The scheduler answers a request and migrates the
//! VM. A declined request is repeated, and so is an answered request because of a slowdown that has not
//! ended. A request ends when its cause ends or the reservation ends. A
//! request because of a slowdown also expires if the slowdown is not observed again.

use std::ops::Bound;

use units::limits::{MIGRATION_REQUEST_RETRY_AFTER, SLOWDOWN_REQUEST_REPEAT_AFTER, SLOWDOWN_REQUEST_TTL};
use units::{MigrationId, Name, Ns, ReservationId};

use super::{Change, Ledger, When, decision, rack::SchedulingTarget};
use crate::{
    audit::{Actor, DecisionKind, Subject},
    record::{
        Key, Migration, MigrationAnswer, MigrationKey, MigrationKind, Record, Reservation, Scheduling,
        Slowdown, SlowdownEstimate,
    },
    rejection::Rejection,
};

impl Ledger {
    /// Returns all migration requests, in ascending order of reservation IDs.
    pub fn migrations(&self) -> impl Iterator<Item = (ReservationId, &Migration)> {
        self.migrations.iter().map(|(key, m)| (key.reservation, m))
    }

    /// Returns the migration requests of each reservation with an ID above `after`, in ascending
    /// order.
    pub fn migrations_after(
        &self,
        after: ReservationId,
    ) -> impl Iterator<Item = (ReservationId, Vec<&Migration>)> {
        let last = MigrationKind::Slowdown.of(after);
        let mut rest = self.migrations.range((Bound::Excluded(last), Bound::Unbounded)).peekable();
        std::iter::from_fn(move || {
            let (key, first) = rest.next()?;
            let mut requests = vec![first];
            while let Some((_, other)) = rest.next_if(|(next, _)| next.reservation == key.reservation) {
                requests.push(other);
            }
            Some((key.reservation, requests))
        })
    }

    /// Returns a migration request, if it exists.
    pub fn migration(&self, key: MigrationKey) -> Option<&Migration> {
        self.migrations.get(&key)
    }

    /// Returns the migration requests of a reservation.
    pub fn requests_of(&self, id: ReservationId) -> impl Iterator<Item = &Migration> {
        MigrationKind::ALL.into_iter().filter_map(move |kind| self.migration(kind.of(id)))
    }

    /// Finds the migration request of a VM with this ID, or the only request of the VM.
    fn find_migration(
        &self,
        vm: &Name,
        id: Option<MigrationId>,
    ) -> Result<(ReservationId, &Migration), Rejection> {
        let missing = || Rejection::NoSuchMigration { vm: vm.clone(), id };
        let reservation = self.reservation_of(vm).ok_or_else(missing)?;
        let is_named = |migration: &&Migration| id.is_none_or(|id| migration.id == id);
        let mut requests = self.requests_of(reservation).filter(is_named);
        let first = requests.next().ok_or_else(missing)?;
        match requests.next() {
            Some(second) => Err(Rejection::AmbiguousMigration { vm: vm.clone(), ids: [first.id, second.id] }),
            None => Ok((reservation, first)),
        }
    }

    /// Records the scheduler's answer to a migration request of a VM. Without `id`, the VM must have
    /// only one request.
    ///
    /// # Errors
    /// [`Rejection::NoSuchMigration`] if the VM has no such request, and
    /// [`Rejection::AmbiguousMigration`] if it has several and `id` is `None`.
    pub fn decide_migration(
        &self,
        when: When,
        (vm, id): (&Name, Option<MigrationId>),
        answer: MigrationAnswer,
        explanation: String,
        actor: Actor,
    ) -> Result<(MigrationKey, Change), Rejection> {
        let (id, migration) = self.find_migration(vm, id)?;
        if answer == migration.answer && explanation == migration.explanation {
            return Ok((migration.kind().of(id), Change::default())); // a repeated answer
        }
        let answer_name = match answer {
            MigrationAnswer::Open => "open",
            MigrationAnswer::Accepted => "accepted",
            MigrationAnswer::Declined => "declined",
            MigrationAnswer::Done => "done",
        };
        let what =
            DecisionKind::MigrationAnswered { answer: answer_name.into(), explanation: explanation.clone() };
        let delay = match (answer, migration.kind()) {
            (MigrationAnswer::Declined, _) => Some(MIGRATION_REQUEST_RETRY_AFTER),
            // The request ends when the slowdown ends. Until then, the VM needs help.
            (MigrationAnswer::Accepted | MigrationAnswer::Done, MigrationKind::Slowdown) => {
                Some(SLOWDOWN_REQUEST_REPEAT_AFTER)
            }
            _ => None,
        };
        let retry_at = delay.map(|delay| when.now.after(delay));
        let answered = Migration { answer, explanation, retry_at, ..migration.clone() };
        let change = Change(vec![Record::Migration(id, answered), vm_decision(when, actor, vm, what)]);
        Ok((migration.kind().of(id), change))
    }

    /// Requests the migration of a VM that pool memory slows down, or records that the slowdown of a
    /// VM with a request was observed again. At most `max_per_hour` new requests are made per hour.
    /// The change is empty if the existing request is recent.
    ///
    /// # Errors
    /// [`Rejection::NoSuchReservation`] or [`Rejection::WrongState`] if the VM has no pool memory or
    /// its reservation has ended. [`Rejection::SlowdownBudgetExhausted`] if too many requests were
    /// made.
    pub fn decide_slowdown(
        &self,
        when: When,
        id: ReservationId,
        estimate: SlowdownEstimate,
        max_per_hour: u32,
    ) -> Result<Change, Rejection> {
        let reservation = self.reservations.get(&id).ok_or(Rejection::NoSuchReservation(id))?;
        if !reservation.is_active() || reservation.slices.is_empty() {
            let state = if reservation.is_active() { "without pool memory" } else { "ended" };
            let what = "request a migration because of a slowdown";
            return Err(Rejection::WrongState { reservation: id, state: state.into(), what });
        }
        let slowdown = Slowdown { estimate, expires_at: when.now.after(SLOWDOWN_REQUEST_TTL) };
        if let Some((old, migration)) =
            self.migration(MigrationKind::Slowdown.of(id)).and_then(|m| Some((m.slowdown?, m)))
        {
            // Extending the request only when half of its time has passed limits the writes.
            let is_recent = old.expires_at.since(when.now) > Ns(SLOWDOWN_REQUEST_TTL.0 / 2);
            // A VM that is recovering keeps the evidence of its slowdown.
            let estimate = if estimate.severity > 1.0 { estimate } else { old.estimate };
            let renewed =
                Migration { slowdown: Some(Slowdown { estimate, ..slowdown }), ..migration.clone() };
            return Ok(Change(if is_recent { vec![] } else { vec![Record::Migration(id, renewed)] }));
        }
        let mut meta = self.meta.clone();
        let recent = meta.slowdown_requests.recent(when.now);
        if recent >= max_per_hour {
            return Err(Rejection::SlowdownBudgetExhausted { recent, max: max_per_hour });
        }
        meta.slowdown_requests.record(when.now);
        let request = migration_request(when, id, reservation, (&estimate.to_string(), Some(slowdown)));
        Ok(Change([vec![Record::Meta(meta)], request.into()].concat()))
    }

    /// Returns the number of VMs with an active reservation.
    pub fn active_vm_count(&self) -> usize {
        self.by_vm.len()
    }

    /// Withdraws the migration request of a VM that is no longer slowed down. The change is empty if
    /// the VM has no such request.
    pub fn decide_slowdown_end(&self, when: When, id: ReservationId) -> Change {
        Change(self.slowdown_end(when, id, "the VM is no longer slowed down"))
    }

    /// Ends at most `limit` migration requests because of slowdowns that were not observed again.
    pub fn decide_slowdown_expiry(&self, when: When, limit: usize) -> Change {
        let expired = self.expiring.iter().take_while(|(at, _)| *at <= when.now).take(limit);
        let why = "the slowdown was not observed again in time";
        Change(expired.flat_map(|(_, key)| self.slowdown_end(when, key.reservation, why)).collect())
    }

    pub(super) fn slowdown_end(&self, when: When, id: ReservationId, why: &str) -> Vec<Record> {
        let key = MigrationKind::Slowdown.of(id);
        let Some(migration) = self.migration(key) else { return Vec::new() };
        let what = DecisionKind::SlowdownEnded { why: why.to_owned() };
        vec![Record::Deleted(Key::Migration(key)), vm_decision(when, Actor::Manager, &migration.vm, what)]
    }

    /// Returns the reservations with a request because of a slowdown.
    pub fn slowdown_requests(&self) -> impl Iterator<Item = ReservationId> {
        self.expiring.iter().map(|(_, key)| key.reservation)
    }

    /// Returns the rack time at which the next request because of a slowdown expires.
    pub fn next_slowdown_expiry(&self) -> Option<Ns> {
        self.expiring.first().map(|(at, _)| *at)
    }

    /// Repeats at most `limit` answered migration requests whose retry time has come.
    pub fn decide_migration_retry(&self, when: When, limit: usize) -> Change {
        let due = self.answered.iter().take_while(|(at, _)| *at <= when.now).take(limit);
        let records = due.filter_map(|(_, key)| {
            let answered = self.migration(*key)?;
            let open = Migration {
                answer: MigrationAnswer::Open,
                explanation: String::new(),
                retry_at: None,
                requested_at: when.wall,
                ..answered.clone()
            };
            let what = DecisionKind::MigrationRequested { why: format!("again: {}", open.why) };
            let decision = vm_decision(when, Actor::Manager, &open.vm, what);
            Some([Record::Migration(key.reservation, open), decision])
        });
        Change(records.flatten().collect())
    }

    /// Returns the rack time at which the next answered request is repeated.
    pub fn next_migration_retry(&self) -> Option<Ns> {
        self.answered.first().map(|(at, _)| *at)
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
            let unrequested = affected.iter().filter(|id| !self.has_drain_request(**id));
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
            .flat_map(|(key, migration)| {
                let other = self.other_draining_target(key.reservation, targets);
                self.drain_request_change(when, key.reservation, migration, other)
            })
            .collect()
    }

    fn has_drain_request(&self, id: ReservationId) -> bool {
        self.migrations.contains_key(&MigrationKind::Drain.of(id))
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
        let unrequested = !self.has_drain_request(id);
        unrequested.then(|| migration_request(when, id, reservation, (&drain_reason(&target), None)))
    }

    fn migration_request(&self, when: When, id: ReservationId, why: &str) -> [Record; 2] {
        migration_request(when, id, &self.reservations[&id], (why, None))
    }

    /// Returns the records that adapt a request because of a drain: its cause becomes this draining
    /// host or EMC, or the request is withdrawn if there is none.
    pub(super) fn drain_request_change(
        &self,
        when: When,
        id: ReservationId,
        m: &Migration,
        target: Option<SchedulingTarget>,
    ) -> Vec<Record> {
        match target {
            Some(target) => {
                vec![Record::Migration(id, Migration { why: drain_reason(&target), ..m.clone() })]
            }
            None => vec![
                Record::Deleted(Key::Migration(m.kind().of(id))),
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
    pub(super) fn draining_targets(
        &self,
        reservation: &Reservation,
    ) -> impl Iterator<Item = SchedulingTarget> {
        let host = self.hosts.get(&reservation.host).map(|entry| &entry.host);
        let host = host.filter(|host| host.scheduling == Scheduling::Draining);
        let emcs = self.emcs.values().map(|entry| &entry.emc).filter(|emc| {
            emc.scheduling == Scheduling::Draining && reservation.slices.iter().any(|s| emc.contains(*s))
        });
        let targets = host.map(|host| SchedulingTarget::Host(host.name.clone())).into_iter();
        targets.chain(emcs.map(|emc| SchedulingTarget::Emc(emc.name.clone())))
    }
}

/// Returns the records of a new migration request. Applying them assigns the ID of the request.
fn migration_request(
    when: When,
    id: ReservationId,
    reservation: &Reservation,
    (why, slowdown): (&str, Option<Slowdown>),
) -> [Record; 2] {
    let migration = Migration {
        vm: reservation.vm.clone(),
        host: reservation.host,
        why: why.to_owned(),
        requested_at: when.wall,
        answer: MigrationAnswer::Open,
        explanation: String::new(),
        retry_at: None,
        id: MigrationId::default(),
        slowdown,
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
