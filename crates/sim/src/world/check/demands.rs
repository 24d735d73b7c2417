//! Requests that take memory from a VM. An outstanding request justifies the manager's action. If its
//! reply is lost, the next load of the store shows the outcome.

use std::collections::BTreeMap;

use pool::{
    denied::Denied,
    manager::{Answer, Token},
    record::{MigrationAnswer, Record},
    slice::{Slot, State},
};
use units::{Name, SliceId};

use super::Truth;
use crate::world::World;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::world) enum Demand {
    /// Forced release of a VM.
    Force(Name),
    /// Fence of a host.
    Fence(Name),
    /// Uncordon of a quarantined slice.
    LetBack(SliceId),
    /// Answer to a migration request.
    Move(Name, MigrationAnswer),
}

#[derive(Debug, Default)]
pub(super) struct Demands {
    unanswered: BTreeMap<Token, Demand>,
    /// Requests whose outcome the next load of the store shows.
    unknown: Vec<Demand>,
}

impl Demands {
    pub(super) fn justify(&self, demand: &Demand) -> bool {
        self.open().any(|open| open == demand)
    }

    fn open(&self) -> impl Iterator<Item = &Demand> {
        self.unanswered.values().chain(&self.unknown)
    }

    /// Returns answers to migration requests that may not be durable yet.
    pub(super) fn moves(&self) -> usize {
        self.open().filter(|open| matches!(open, Demand::Move(..))).count()
    }
}

fn is_quarantined(slot: Slot) -> bool {
    matches!(slot.state, State::Quarantined(_))
}

impl Truth {
    pub(in crate::world) fn demand(&mut self, token: Token, demand: Demand) {
        self.demands.unanswered.insert(token, demand);
    }

    pub(in crate::world) fn demand_answered(&mut self, token: Token, answer: &Result<Answer, Denied>) {
        let demand = self.demands.unanswered.remove(&token);
        let unknown = matches!(answer, Err(Denied::StoreFailed));
        self.demands.unknown.extend(demand.filter(|_| unknown));
    }

    /// Marks all requests as unanswered after a crash of the manager.
    pub(in crate::world) fn demands_cut_off(&mut self) {
        let unanswered = std::mem::take(&mut self.demands.unanswered);
        self.demands.unknown.extend(unanswered.into_values());
    }

    pub(super) fn forget_unknown_demands(&mut self) {
        self.demands.unknown.clear();
    }
}

impl World {
    /// Records slices that durable records return to circulation on request.
    pub(super) fn note_let_back(&mut self, records: &[Record]) {
        for record in records {
            let Record::Slice(slice, slot) = record else { continue };
            let returns = is_quarantined(self.truth.slot(*slice)) && !is_quarantined(*slot);
            if returns && self.truth.demands.justify(&Demand::LetBack(*slice)) {
                self.freed_by_hand(*slice);
            }
        }
    }
}
