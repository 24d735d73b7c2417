//! Migration requests: the monitor of running VMs requests migrations of slowed-down VMs, and the
//! scheduler answers requests with accepted, declined or done. Some requests and answers are
//! repeated, and some are for VMs without a request or VMs that have ended.

use pool::{
    audit::Actor,
    manager::{Request, RequestReply},
    record::{Migration, MigrationAnswer, SlowdownEstimate},
    rejection::Rejection,
};
use rand::Rng as _;
use units::{MigrationId, Name, ReservationId};

use super::{
    World,
    check::{Justification, SLOWDOWNS_PER_HOUR},
    clients::{PendingMigrationAnswer, PendingRequest},
    has_ended,
};

impl World {
    /// Sends an answer to a migration request. In 15 % of cases, the VM may have no such request.
    pub(super) fn answer_some_migration(&mut self) {
        let requests: Vec<_> = self.truth.migrations().map(|(_, m)| (m.vm.clone(), m.id)).collect();
        let requested = if self.random_bool(0.85) { self.pick_random(&requests) } else { None };
        let other = |world: &mut Self| Some((world.pick_vm()?, MigrationId(world.rng.random_range(1..20))));
        let Some((vm, id)) = requested.or_else(|| other(self)) else { return };
        let id = self.random_bool(0.7).then_some(id);
        let answers = [MigrationAnswer::Accepted, MigrationAnswer::Declined, MigrationAnswer::Done];
        let answer = self.pick_random(&answers).expect("the list is not empty");
        let message = format!("answer {}", self.rng.random_range(0..u32::MAX));
        let request = self.truth.migration_of(&vm, id).map(|(id, request)| (id, request.clone()));
        let is_only_answer = !self.has_pending_answer(&vm);
        let pending = PendingMigrationAnswer {
            vm: vm.clone(),
            id,
            answer,
            message: message.clone(),
            request,
            is_only_answer,
        };
        let justification = Justification::MigrationAnswer(vm.clone(), answer);
        let resolve =
            Request::ResolveMigration { vm, id, answer, explanation: message, actor: Actor::Manager };
        self.send_justified_request(resolve, PendingRequest::MigrationAnswer(pending), Some(justification));
    }

    /// Requests the migration of a VM because of a slowdown, or withdraws such a request. The VM may
    /// have ended or have no pool memory.
    pub(super) fn report_some_slowdown(&mut self) {
        let active: Vec<ReservationId> = self.truth.reservations().map(|(id, _)| id).collect();
        let Some(reservation) = self.pick_random(&active) else { return };
        if self.random_bool(0.3) {
            let withdraw = Request::WithdrawSlowdownMigration(reservation);
            let justification = Justification::SlowdownEnd(reservation);
            return self.send_justified_request(withdraw, PendingRequest::Slowdown, Some(justification));
        }
        let severity = self.rng.random_range(1.0..4.0);
        let estimate = SlowdownEstimate { loss: Some(severity / 20.0), severity, samples: 3 };
        let request =
            Request::RequestSlowdownMigration { reservation, estimate, max_per_hour: SLOWDOWNS_PER_HOUR };
        let justification = Justification::Slowdown(reservation);
        self.send_justified_request(request, PendingRequest::Slowdown, Some(justification));
    }

    fn has_pending_answer(&self, vm: &Name) -> bool {
        self.clients
            .pending
            .values()
            .any(|request| matches!(request, PendingRequest::MigrationAnswer(pending) if pending.vm == *vm))
    }

    /// Checks the reply of the manager to an answer.
    pub(super) fn handle_migration_reply(
        &mut self,
        pending: &PendingMigrationAnswer,
        answer: &Result<RequestReply, Rejection>,
    ) {
        let is_only_answer = pending.is_only_answer && !self.has_pending_answer(&pending.vm);
        match answer {
            Ok(RequestReply::Migration(id, acknowledged)) => {
                self.count_answer(pending);
                self.check_acknowledged_answer(pending, *id, acknowledged, is_only_answer);
            }
            Err(Rejection::NoSuchMigration { .. }) => {
                self.run_log.counts.migration_answers_refused += 1;
                let current = self.truth.migration_of(&pending.vm, pending.id);
                let current = current.map(|(id, request)| (id, request.clone()));
                if is_only_answer && pending.request.is_some() && pending.request == current {
                    self.report_violation(
                        "a migration request accepts answers until it ends",
                        format!("{pending:?} is rejected"),
                    );
                }
            }
            Err(Rejection::AmbiguousMigration { .. }) if pending.id.is_none() => {
                self.run_log.counts.migration_answers_refused += 1;
            }
            Err(Rejection::StoreFailed | Rejection::Starting(_) | Rejection::NoSuchReservation(_)) => {}
            other => {
                self.report_violation(
                    "a migration request accepts answers until it ends",
                    format!("{pending:?} receives {other:?}"),
                );
            }
        }
    }

    fn check_acknowledged_answer(
        &mut self,
        pending: &PendingMigrationAnswer,
        id: ReservationId,
        acknowledged: &Migration,
        is_only_answer: bool,
    ) {
        let ended = self.truth.reservation(id).is_none_or(has_ended);
        if ended || self.truth.migration(acknowledged.kind().of(id)) != Some(acknowledged) {
            self.report_violation(
                "a change is durable before it is acknowledged",
                format!("reservation {id} is acknowledged with {acknowledged:?}, which is not on disk"),
            );
        }
        let is_applied =
            (acknowledged.answer, &acknowledged.explanation) == (pending.answer, &pending.message);
        // If the drain ended and began again before the answer was durable, the reply contains the new
        // request, which is open.
        let is_same_request = pending
            .request
            .as_ref()
            .is_some_and(|(answered, request)| *answered == id && request.id == acknowledged.id);
        if acknowledged.vm != pending.vm || (is_only_answer && is_same_request && !is_applied) {
            self.report_violation(
                "a reply matches its request",
                format!("{pending:?} receives {acknowledged:?}"),
            );
        }
    }

    fn count_answer(&mut self, pending: &PendingMigrationAnswer) {
        let counts = &mut self.run_log.counts;
        match pending.answer {
            MigrationAnswer::Open => {}
            MigrationAnswer::Accepted => counts.migrations_accepted += 1,
            MigrationAnswer::Declined => counts.migrations_declined += 1,
            MigrationAnswer::Done => counts.migrations_done += 1,
        }
        let repeated = pending.request.as_ref().is_some_and(|(_, request)| request.answer == pending.answer);
        counts.migration_answers_repeated += u64::from(repeated);
    }
}
