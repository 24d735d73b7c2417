//! Requests that take memory from a VM. An outstanding request justifies the manager's action. If
//! its reply is lost, the next load of the store shows the outcome.

use std::collections::BTreeMap;

use pool::{
    manager::{RequestReply, Token},
    record::{MigrationAnswer, Record},
    rejection::Rejection,
    slice::{Slot, State},
};
use units::{Name, SliceId};

use super::GroundTruth;
use crate::world::World;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::world) enum Justification {
    /// Forced release of a VM.
    Force(Name),
    /// Fence of a host.
    Fence(Name),
    /// Uncordon of a quarantined slice.
    Uncordon(SliceId),
    /// Answer to a migration request.
    MigrationAnswer(Name, MigrationAnswer),
}

#[derive(Debug, Default)]
pub(super) struct Justifications {
    unanswered: BTreeMap<Token, Justification>,
    /// Requests whose outcome the next load of the store shows.
    unknown: Vec<Justification>,
}

impl Justifications {
    pub(super) fn contains(&self, justification: &Justification) -> bool {
        self.open().any(|open| open == justification)
    }

    fn open(&self) -> impl Iterator<Item = &Justification> {
        self.unanswered.values().chain(&self.unknown)
    }

    /// Returns answers to migration requests that may not be durable yet.
    pub(super) fn migration_answers(&self) -> usize {
        self.open().filter(|open| matches!(open, Justification::MigrationAnswer(..))).count()
    }
}

fn is_quarantined(slot: Slot) -> bool {
    matches!(slot.state, State::Quarantined(_))
}

impl GroundTruth {
    pub(in crate::world) fn add_justification(&mut self, token: Token, justification: Justification) {
        self.justifications.unanswered.insert(token, justification);
    }

    pub(in crate::world) fn note_justification_reply(
        &mut self,
        token: Token,
        answer: &Result<RequestReply, Rejection>,
    ) {
        let justification = self.justifications.unanswered.remove(&token);
        let unknown = matches!(answer, Err(Rejection::StoreFailed));
        self.justifications.unknown.extend(justification.filter(|_| unknown));
    }

    /// Marks all requests as unanswered after a crash of the manager.
    pub(in crate::world) fn mark_justifications_unanswered(&mut self) {
        let unanswered = std::mem::take(&mut self.justifications.unanswered);
        self.justifications.unknown.extend(unanswered.into_values());
    }

    pub(super) fn drop_unknown_justifications(&mut self) {
        self.justifications.unknown.clear();
    }
}

impl World {
    /// Records slices that durable records return to circulation on request.
    pub(super) fn note_uncordoned(&mut self, records: &[Record]) {
        for record in records {
            let Record::Slice(slice, slot) = record else { continue };
            let returns = is_quarantined(self.truth.slot(*slice)) && !is_quarantined(*slot);
            if returns && self.truth.justifications.contains(&Justification::Uncordon(*slice)) {
                self.end_ownership(*slice);
            }
        }
    }
}
