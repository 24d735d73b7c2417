//! Checks of migration requests. There must be one request for each VM on a draining host or EMC.
//! The request must contain the latest answer of the scheduler.

use pool::{
    audit::DecisionKind,
    record::{Key, Migration, MigrationAnswer, Record, Reservation, Scheduling},
};
use units::limits::MIGRATION_REQUEST_RETRY_AFTER;
use units::{Name, Ns, ReservationId, SliceId};

use super::{GroundTruth, Justification, counts::owner, has_ended};
use crate::world::World;

const MIGRATION_INVARIANT: &str = "a migration request has the scheduler's latest answer";

impl GroundTruth {
    /// Returns all migration requests on disk.
    pub(in crate::world) fn migrations(&self) -> impl Iterator<Item = (ReservationId, &Migration)> {
        let from = Key::Migration(ReservationId(0))..=Key::Migration(ReservationId(u64::MAX));
        self.records.range(from).filter_map(|(_, record)| match record {
            Record::Migration(id, migration) => Some((*id, migration)),
            _ => None,
        })
    }

    /// Returns the migration request on disk for a reservation.
    pub(in crate::world) fn migration(&self, id: ReservationId) -> Option<&Migration> {
        match self.records.get(&Key::Migration(id)) {
            Some(Record::Migration(_, migration)) => Some(migration),
            _ => None,
        }
    }

    /// Returns the migration request on disk for a VM with an active reservation.
    pub(in crate::world) fn migration_of(&self, vm: &Name) -> Option<(ReservationId, &Migration)> {
        let active = |id| self.reservation(id).is_some_and(|reservation| !has_ended(reservation));
        self.migrations().find(|(id, migration)| migration.vm == *vm && active(*id))
    }

    /// Returns the earliest time at which a declined request is sent again.
    pub(super) fn next_migration_retry(&self) -> Option<Ns> {
        self.migrations().filter_map(|(_, migration)| migration.retry_at).min()
    }

    fn must_migrate(&self, reservation: &Reservation, owns: impl Fn(SliceId) -> bool) -> bool {
        let host = self.host(reservation.host).is_some_and(|host| host.scheduling == Scheduling::Draining);
        let on_draining_emc = |slice: &SliceId| {
            let emc = self.emc_of(*slice).and_then(|emc| self.emc(emc));
            owns(*slice) && emc.is_some_and(|emc| emc.scheduling == Scheduling::Draining)
        };
        host || reservation.slices.iter().any(on_draining_emc)
    }

    /// Returns a description of the first error, if any: a migration request for a VM that has
    /// ended or need not move, or a VM that must move but has no request.
    pub(super) fn find_migration_error(&self) -> Option<String> {
        let unneeded = self.migrations().find(|(id, _)| {
            let active = self.reservation(*id).filter(|reservation| !has_ended(reservation));
            !active.is_some_and(|reservation| self.must_migrate(reservation, |_| true))
        });
        let owned = |id| move |slice| owner(&self.slot(slice)) == Some(id);
        let mut active = self.reservations().filter(|(_, reservation)| !has_ended(reservation));
        let missing =
            active.find(|(id, r)| self.migration(*id).is_none() && self.must_migrate(r, owned(*id)));
        unneeded
            .map(|(id, request)| {
                format!("reservation {id} has {request:?}, but its host and EMCs do not drain")
            })
            .or_else(|| {
                missing.map(|(id, r)| {
                    format!(
                        "reservation {id} is on a draining host or EMC but has no migration request: {r:?}"
                    )
                })
            })
    }
}

fn changes_scheduling(batch: &[Record]) -> bool {
    batch
        .iter()
        .any(|record| matches!(record, Record::Host(..) | Record::Emc(..) | Record::Deleted(Key::Emc(_))))
}

impl World {
    /// Checks a migration request before the store writes the request. A new answer must come from
    /// the scheduler. A declined request must contain the time of its retry.
    pub(super) fn check_migration(&mut self, id: ReservationId, new: &Migration, batch: &[Record]) {
        let now = self.current_time().now;
        let old = self.truth.migration(id).cloned();
        let ended =
            self.truth.reservations_after(batch).find(|(of, _)| *of == id).is_none_or(|(_, r)| has_ended(r));
        let content = |m: &Migration| (m.answer, m.explanation.clone());
        let changed = old.as_ref().map(content) != Some(content(new));
        let justified =
            self.truth.justifications.contains(&Justification::MigrationAnswer(new.vm.clone(), new.answer));
        let is_retried = old.as_ref().is_some_and(|old| old.retry_at.is_some_and(|at| now >= at));
        let allowed = match new.answer {
            MigrationAnswer::Open => {
                self.run_log.counts.migrations_retried += u64::from(changed && is_retried);
                new.retry_at.is_none()
                    && (old.is_none() || !changed || is_retried || changes_scheduling(batch))
            }
            MigrationAnswer::Accepted | MigrationAnswer::Done => {
                new.retry_at.is_none() && (!changed || justified)
            }
            MigrationAnswer::Declined if changed => {
                justified && new.retry_at.is_some_and(|at| self.is_valid_retry_time(at))
            }
            MigrationAnswer::Declined => new.retry_at == old.as_ref().and_then(|old| old.retry_at),
        };
        if ended || !allowed {
            self.report_violation(
                MIGRATION_INVARIANT,
                format!(
                    "the request of reservation {id} changes from {old:?} to {new:?}, \
                     reservation ended: {ended}"
                ),
            );
        }
    }

    /// Returns whether `at` is a valid retry time for a request that was declined since the
    /// previous batch.
    fn is_valid_retry_time(&self, at: Ns) -> bool {
        let (first, last) =
            (self.manager_process.earliest_decision_time().unwrap_or_default(), self.current_time().now);
        let due = first.after(MIGRATION_REQUEST_RETRY_AFTER)..=last.after(MIGRATION_REQUEST_RETRY_AFTER);
        due.contains(&at)
    }

    /// Checks that a request is deleted only if its reservation ends or its drain is cancelled.
    pub(super) fn check_migration_deleted(&mut self, id: ReservationId, batch: &[Record]) {
        let ended =
            self.truth.reservations_after(batch).find(|(of, _)| *of == id).is_none_or(|(_, r)| has_ended(r));
        if !ended && !changes_scheduling(batch) {
            self.report_violation(
                MIGRATION_INVARIANT,
                format!(
                    "reservation {id} has not ended, but its request is deleted: {:?}",
                    self.truth.migration(id)
                ),
            );
        }
    }

    /// Checks that the batch records each answer at most once.
    pub(super) fn check_answer_count(&mut self, batch: &[Record]) {
        let recorded = batch.iter().filter(|record| {
            matches!(record, Record::Decision(_, decision) if matches!(decision.what, DecisionKind::MigrationAnswered { .. }))
        });
        let (recorded, sent) = (recorded.count(), self.truth.justifications.count_migration_answers());
        if recorded > sent {
            self.report_violation(
                MIGRATION_INVARIANT,
                format!("{recorded} answers are recorded, but only {sent} were sent"),
            );
        }
    }
}
