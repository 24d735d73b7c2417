//! Requests that justify actions of the manager, such as taking memory from a VM. A request
//! justifies an action until its reply arrives. If the reply is lost, the request remains valid
//! until the next load of the store shows its outcome.

use std::collections::BTreeMap;

use pool::{
    manager::{RequestReply, Token},
    record::{MigrationAnswer, Record},
    rejection::Rejection,
    slice::{Slot, State},
};
use units::{Name, ReservationId, SliceId};

use super::GroundTruth;
use crate::world::World;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::world) enum Justification {
    /// Request to release the memory of this VM by force.
    Force(Name),
    /// Request to fence this host.
    Fence(Name),
    /// Request to uncordon this quarantined slice.
    Uncordon(SliceId),
    /// Answer of the scheduler to the migration request of a VM.
    MigrationAnswer(Name, MigrationAnswer),
    /// Request to migrate the VM of this reservation because of a slowdown.
    Slowdown(ReservationId),
    /// Withdrawal of the request to migrate the VM of this reservation.
    SlowdownEnd(ReservationId),
    /// Request to move the memory of this reservation to local memory.
    Rehome(ReservationId),
    /// Request to cancel the move of this reservation's memory.
    CancelRehome(ReservationId),
}

#[derive(Debug, Default)]
pub(super) struct Justifications {
    unanswered: BTreeMap<Token, Justification>,
    /// Requests without a reply. The next load of the store shows their outcome.
    unknown: Vec<Justification>,
}

impl Justifications {
    pub(super) fn contains(&self, justification: &Justification) -> bool {
        self.open_justifications().any(|open_justifications| open_justifications == justification)
    }

    fn open_justifications(&self) -> impl Iterator<Item = &Justification> {
        self.unanswered.values().chain(&self.unknown)
    }

    /// Returns the number of answers to migration requests that may not be durable yet.
    pub(super) fn count_migration_answers(&self) -> usize {
        self.open_justifications()
            .filter(|open_justifications| matches!(open_justifications, Justification::MigrationAnswer(..)))
            .count()
    }
}

fn is_quarantined(slot: Slot) -> bool {
    matches!(slot.state, State::Quarantined(_))
}

impl GroundTruth {
    pub(in crate::world) fn add_justification(&mut self, token: Token, justification: Justification) {
        self.justifications.unanswered.insert(token, justification);
    }

    pub(in crate::world) fn record_justification_reply(
        &mut self,
        token: Token,
        answer: &Result<RequestReply, Rejection>,
    ) {
        let justification = self.justifications.unanswered.remove(&token);
        let unknown = matches!(answer, Err(Rejection::StoreFailed));
        self.justifications.unknown.extend(justification.filter(|_| unknown));
    }

    /// Marks the outcome of all outstanding requests as unknown after a crash of the manager.
    pub(in crate::world) fn mark_outcomes_unknown(&mut self) {
        let unanswered = std::mem::take(&mut self.justifications.unanswered);
        self.justifications.unknown.extend(unanswered.into_values());
    }

    pub(super) fn drop_unknown_justifications(&mut self) {
        self.justifications.unknown.clear();
    }
}

impl World {
    /// Ends the ownership of slices that durable records release from quarantine on request.
    pub(super) fn end_uncordoned_ownership(&mut self, records: &[Record]) {
        for record in records {
            let Record::Slice(slice, slot) = record else { continue };
            let returns = is_quarantined(self.truth.slot(*slice)) && !is_quarantined(*slot);
            if returns && self.truth.justifications.contains(&Justification::Uncordon(*slice)) {
                self.end_ownership(*slice);
            }
        }
    }
}
