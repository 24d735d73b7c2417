//! The scheduler's answers to migration requests: accepted, declined and done, also repeated, and for
//! VMs without a request or after their end.

use pool::{
    audit::Actor,
    denied::Denied,
    manager::{Answer, Ask},
    record::{Migration, MigrationAnswer},
};
use rand::Rng as _;
use units::{Name, ReservationId};

use super::{World, check::Demand, has_ended, people::Asked};

/// Answer that the manager has not acknowledged yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AskedMove {
    vm: Name,
    answer: MigrationAnswer,
    words: String,
    /// Durable request at the time of the answer.
    request: Option<(ReservationId, Migration)>,
    /// No other answer for this VM was outstanding at that time.
    is_alone: bool,
}

impl World {
    /// Answers a migration request, or one that does not exist.
    pub(super) fn answer_move(&mut self) {
        let requested: Vec<Name> = self.truth.migrations().map(|(_, request)| request.vm.clone()).collect();
        let requested = if self.chance(0.85) { self.any(&requested) } else { None };
        let Some(vm) = requested.or_else(|| self.some_vm()) else { return };
        let answers = [MigrationAnswer::Accepted, MigrationAnswer::Declined, MigrationAnswer::Done];
        let answer = self.any(&answers).expect("there are three");
        let words = format!("answer {}", self.rng.random_range(0..u32::MAX));
        let request = self.truth.migration_of(&vm).map(|(id, request)| (id, request.clone()));
        let is_alone = !self.awaits_answer_about(&vm);
        let asked = AskedMove { vm: vm.clone(), answer, words: words.clone(), request, is_alone };
        let demand = Demand::Move(vm.clone(), answer);
        let ask = Ask::ResolveMigration { vm, answer, words, actor: Actor::Manager };
        self.demand(ask, Asked::Move(asked), Some(demand));
    }

    fn awaits_answer_about(&self, vm: &Name) -> bool {
        self.people.asked.values().any(|asked| matches!(asked, Asked::Move(asked) if asked.vm == *vm))
    }

    /// Checks the manager's acknowledgement of an answer.
    pub(super) fn move_answered(&mut self, asked: &AskedMove, answer: &Result<Answer, Denied>) {
        let is_alone = asked.is_alone && !self.awaits_answer_about(&asked.vm);
        match answer {
            Ok(Answer::Migration(id, shown)) => {
                self.count_answer(asked);
                self.check_acknowledged(asked, *id, shown, is_alone);
            }
            Err(Denied::NoSuchMigration(_)) => {
                self.story.counts.moves_unknown += 1;
                let now = self.truth.migration_of(&asked.vm).map(|(id, request)| (id, request.clone()));
                if is_alone && asked.request.is_some() && asked.request == now {
                    self.blame(
                        "a request to move takes answers until it ends",
                        format!("{asked:?} is refused"),
                    );
                }
            }
            Err(Denied::StoreFailed | Denied::Starting(_) | Denied::NoSuchReservation(_)) => {}
            other => {
                self.blame(
                    "a request to move takes answers until it ends",
                    format!("{asked:?} gets {other:?}"),
                );
            }
        }
    }

    fn check_acknowledged(
        &mut self,
        asked: &AskedMove,
        id: ReservationId,
        shown: &Migration,
        is_alone: bool,
    ) {
        let ended = self.truth.reservation(id).is_none_or(has_ended);
        if ended || self.truth.migration(id) != Some(shown) {
            self.blame(
                "durable before done",
                format!("{id} is said to have {shown:?}, which is not on disk"),
            );
        }
        let taken = (shown.answer, &shown.words) == (asked.answer, &asked.words);
        if shown.vm != asked.vm || (is_alone && !taken) {
            self.blame("a request gets what it asked", format!("{asked:?} gets {shown:?}"));
        }
    }

    fn count_answer(&mut self, asked: &AskedMove) {
        let counts = &mut self.story.counts;
        match asked.answer {
            MigrationAnswer::Open => {}
            MigrationAnswer::Accepted => counts.moves_accepted += 1,
            MigrationAnswer::Declined => counts.moves_declined += 1,
            MigrationAnswer::Done => counts.moves_done += 1,
        }
        let repeated = asked.request.as_ref().is_some_and(|(_, request)| request.answer == asked.answer);
        counts.moves_repeated += u64::from(repeated);
    }
}
