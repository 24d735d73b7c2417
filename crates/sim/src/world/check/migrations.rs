//! Checks of migration requests. There must be one request for each VM on a draining host or EMC, and
//! requests because of slowdowns only for VMs that the monitor named, within the hourly budget. A
//! request must contain the latest answer of the scheduler.

use pool::{
    audit::DecisionKind,
    record::{
        Key, Migration, MigrationAnswer, MigrationKey, MigrationKind, Record, Rehome, Reservation, Scheduling,
    },
};
use units::limits::{MIGRATION_REQUEST_RETRY_AFTER, SLOWDOWN_REQUEST_REPEAT_AFTER, SLOWDOWN_REQUEST_TTL};
use units::{MigrationId, Name, Ns, ReservationId, SliceId};

use super::{GroundTruth, Justification, counts::owner, has_ended};
use crate::world::World;

/// Maximum number of migration requests per hour because of slowdowns.
pub(in crate::world) const SLOWDOWNS_PER_HOUR: u32 = 4;

const MIGRATION_INVARIANT: &str = "a migration request has the scheduler's latest answer";

impl GroundTruth {
    /// Returns all migration requests on disk.
    pub(in crate::world) fn migrations(&self) -> impl Iterator<Item = (ReservationId, &Migration)> {
        let from = Key::Migration(MigrationKind::Drain.of(ReservationId(0)))
            ..=Key::Migration(MigrationKind::Slowdown.of(ReservationId(u64::MAX)));
        self.records.range(from).filter_map(|(_, record)| match record {
            Record::Migration(id, migration) => Some((*id, migration)),
            _ => None,
        })
    }

    /// Returns the migration request on disk with this key.
    pub(in crate::world) fn migration(&self, key: MigrationKey) -> Option<&Migration> {
        match self.records.get(&Key::Migration(key)) {
            Some(Record::Migration(_, migration)) => Some(migration),
            _ => None,
        }
    }

    /// Returns the migration request on disk, with this ID if any is given, for a VM with an active
    /// reservation.
    pub(in crate::world) fn migration_of(
        &self,
        vm: &Name,
        id: Option<MigrationId>,
    ) -> Option<(ReservationId, &Migration)> {
        let active = |id| self.reservation(id).is_some_and(|reservation| !has_ended(reservation));
        let is_named = |migration: &Migration| id.is_none_or(|id| migration.id == id);
        self.migrations().find(|(of, m)| m.vm == *vm && is_named(m) && active(*of))
    }

    /// Returns the earliest time at which a request because of a slowdown expires.
    pub(super) fn next_slowdown_expiry(&self) -> Option<Ns> {
        self.migrations().filter_map(|(_, migration)| migration.slowdown.map(|s| s.expires_at)).min()
    }

    /// Returns the earliest time at which a declined request is sent again.
    pub(super) fn next_migration_retry(&self) -> Option<Ns> {
        self.migrations().filter_map(|(_, migration)| migration.retry_at).min()
    }

    fn has_drain_request(&self, id: ReservationId) -> bool {
        self.migration(MigrationKind::Drain.of(id)).is_some()
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
        let unneeded = self.migrations().find(|(id, migration)| {
            let active = self.reservation(*id).filter(|reservation| !has_ended(reservation));
            !active.is_some_and(|reservation| match migration.kind() {
                MigrationKind::Drain => self.must_migrate(reservation, |_| true),
                MigrationKind::Slowdown => !reservation.slices.is_empty(),
            })
        });
        let owned = |id| move |slice| owner(&self.slot(slice)) == Some(id);
        let mut active = self.reservations().filter(|(_, reservation)| !has_ended(reservation));
        let missing = active.find(|(id, r)| !self.has_drain_request(*id) && self.must_migrate(r, owned(*id)));
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
    /// the scheduler. A declined request, and each answered request because of a slowdown, must
    /// contain the time at which it is repeated.
    pub(super) fn check_migration(&mut self, id: ReservationId, new: &Migration, batch: &[Record]) {
        let now = self.current_time().now;
        let old = self.truth.migration(new.kind().of(id)).cloned();
        self.check_slowdown_request(id, old.as_ref(), new);
        let ended =
            self.truth.reservations_after(batch).find(|(of, _)| *of == id).is_none_or(|(_, r)| has_ended(r));
        let content = |m: &Migration| (m.answer, m.explanation.clone());
        let changed = old.as_ref().map(content) != Some(content(new));
        let justified =
            self.truth.justifications.contains(&Justification::MigrationAnswer(new.vm.clone(), new.answer));
        let is_withdrawn = self.truth.justifications.contains(&Justification::SlowdownEnd(id));
        // One batch may delete a withdrawn request and add another one.
        let is_slowdown = new.kind() == MigrationKind::Slowdown;
        let is_other = is_withdrawn && is_slowdown && old.as_ref().is_some_and(|old| old.id != new.id);
        let is_retried = old.as_ref().is_some_and(|old| old.retry_at.is_some_and(|at| now >= at));
        let allowed = match new.answer {
            MigrationAnswer::Open => {
                self.run_log.counts.migrations_retried += u64::from(changed && is_retried);
                new.retry_at.is_none()
                    && (old.is_none() || !changed || is_retried || is_other || changes_scheduling(batch))
            }
            MigrationAnswer::Accepted | MigrationAnswer::Done if new.kind() == MigrationKind::Drain => {
                new.retry_at.is_none() && (!changed || justified)
            }
            _ if !changed => new.retry_at == old.as_ref().and_then(|old| old.retry_at),
            answer => {
                let delay = if answer == MigrationAnswer::Declined {
                    MIGRATION_REQUEST_RETRY_AFTER
                } else {
                    SLOWDOWN_REQUEST_REPEAT_AFTER
                };
                justified && new.retry_at.is_some_and(|at| self.is_valid_retry_time(at, delay))
            }
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

    /// Checks that the monitor requested a migration because of a slowdown, and that the request
    /// expires.
    fn check_slowdown_request(&mut self, id: ReservationId, old: Option<&Migration>, new: &Migration) {
        let expires_at = |migration: &Migration| migration.slowdown.map(|slowdown| slowdown.expires_at);
        let (Some(expiry), before) = (expires_at(new), old.and_then(expires_at)) else { return };
        let is_justified = self.truth.justifications.contains(&Justification::Slowdown(id));
        let latest = self.current_time().now.after(SLOWDOWN_REQUEST_TTL);
        let is_renewed = before != Some(expiry);
        if is_renewed && (!is_justified || expiry > latest || before.is_some_and(|before| expiry < before)) {
            self.report_violation(
                "a VM is reported as slowed down only by the monitor",
                format!("the request of reservation {id} changes from {old:?} to {new:?}"),
            );
        }
    }

    /// Checks that new requests because of slowdowns stay within the hourly budget. A restore from a
    /// backup may lose requests that were made after the backup.
    pub(super) fn check_slowdown_budget(&mut self, batch: &[Record]) {
        let now = self.current_time().now;
        let new = self.count_new_slowdowns(batch);
        let recent =
            self.truth.slowdown_requests.iter().filter(|at| now.since(**at) < Ns::secs(3600)).count();
        if new > 0 && recent + new > SLOWDOWNS_PER_HOUR as usize {
            self.report_violation(
                "migration requests because of slowdowns stay within the hourly budget",
                format!("{new} requests after {recent} in the last hour, at {now}"),
            );
        }
    }

    /// Records the times of requests because of slowdowns that become durable.
    pub(super) fn record_slowdown_requests(&mut self, batch: &[Record]) {
        let new = self.count_new_slowdowns(batch);
        let now = self.current_time().now;
        self.truth.slowdown_requests.extend(std::iter::repeat_n(now, new));
        self.run_log.counts.slowdowns_requested += new as u64;
    }

    /// Returns the number of requests because of slowdowns that a batch adds.
    fn count_new_slowdowns(&self, batch: &[Record]) -> usize {
        let is_new = |record: &&Record| match record {
            Record::Migration(id, migration) => {
                let key = migration.kind().of(*id);
                let old = self.truth.migration(key);
                key.kind == MigrationKind::Slowdown && old.is_none_or(|old| old.id != migration.id)
            }
            _ => false,
        };
        batch.iter().filter(is_new).count()
    }

    /// Returns whether `at` is `delay` after a time since the previous batch, in which a request was
    /// answered.
    fn is_valid_retry_time(&self, at: Ns, delay: Ns) -> bool {
        let (first, last) =
            (self.manager_process.earliest_decision_time().unwrap_or_default(), self.current_time().now);
        (first.after(delay)..=last.after(delay)).contains(&at)
    }

    /// Checks that a request is deleted only if its reservation or its cause ends, or if it expires.
    pub(super) fn check_migration_deleted(&mut self, key: MigrationKey, batch: &[Record]) {
        let MigrationKey { reservation: id, kind } = key;
        let now = self.current_time().now;
        let old = self.truth.migration(key).and_then(|migration| migration.slowdown);
        let is_rehomed = batch.iter().any(|record| match record {
            Record::Reservation(of, new) => *of == id && matches!(new.rehome, Rehome::Done { .. }),
            _ => false,
        });
        let cause_ended = is_rehomed
            || match kind {
                MigrationKind::Drain => changes_scheduling(batch),
                MigrationKind::Slowdown => {
                    let is_withdrawn = self.truth.justifications.contains(&Justification::SlowdownEnd(id));
                    // A request that was made and withdrawn in one batch is not on disk.
                    is_withdrawn || old.is_none_or(|slowdown| slowdown.expires_at <= now)
                }
            };
        let ended =
            self.truth.reservations_after(batch).find(|(of, _)| *of == id).is_none_or(|(_, r)| has_ended(r));
        if !ended && !cause_ended {
            self.report_violation(
                MIGRATION_INVARIANT,
                format!(
                    "reservation {id} has not ended, but its request is deleted: {:?}",
                    self.truth.migration(key)
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
