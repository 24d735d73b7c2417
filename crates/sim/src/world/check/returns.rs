//! Time of slices from their last owner to free, measured from durable writes and compared with the time
//! that the manager uses to size its buffer of free slices.

use std::collections::BTreeMap;

use pool::{
    record::Record,
    slice::{Scrub, State},
};
use units::{Ns, SliceId};

use super::Truth;
use crate::world::World;

/// Length and number of the manager's measuring windows, including the current one.
const WINDOW: Ns = Ns::secs(10);
const WINDOWS: u64 = 6;

/// Returns of slices observed by the running manager.
#[derive(Debug, Default)]
pub(super) struct Returns {
    /// Start of each return in progress.
    since: BTreeMap<SliceId, Ns>,
    /// Times at which slices became free, with the duration of the return.
    done: Vec<(Ns, Ns)>,
    /// The latest durable write changed the stage of a slice.
    moved: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Free,
    Assigned,
    Onlining,
    Online,
    Draining,
    Scrubbing,
    Quarantined,
}

fn phase(state: State) -> Phase {
    match state {
        State::Free => Phase::Free,
        State::Assigned(_) => Phase::Assigned,
        State::Onlining(_) => Phase::Onlining,
        State::Online(_) => Phase::Online,
        State::Draining(..) | State::Scrubbing(Scrub::Leaving(_)) => Phase::Draining,
        State::Scrubbing(_) => Phase::Scrubbing,
        State::Quarantined(_) => Phase::Quarantined,
    }
}

impl Returns {
    fn moved(&mut self, now: Ns, slice: SliceId, to: Phase) {
        self.moved = true;
        match to {
            Phase::Draining | Phase::Scrubbing => drop(self.since.entry(slice).or_insert(now)),
            Phase::Free => {
                let took = self.since.remove(&slice).map(|since| now.since(since));
                self.done.extend(took.map(|took| (now, took)));
            }
            Phase::Assigned | Phase::Onlining | Phase::Online | Phase::Quarantined => {
                self.since.remove(&slice);
            }
        }
    }

    fn longest(&self, now: Ns) -> Ns {
        let oldest = (now.0 / WINDOW.0).saturating_sub(WINDOWS - 1);
        let latest = self.done.iter().filter(|(at, _)| at.0 / WINDOW.0 >= oldest);
        latest.map(|(_, took)| *took).max().unwrap_or_default()
    }
}

impl Truth {
    /// Processes records that are about to become durable.
    fn note_moves(&mut self, now: Ns, records: &[Record]) {
        self.returns.moved = false;
        for record in records {
            if let Record::Slice(slice, slot) = record {
                let (from, to) = (self.slot(*slice).state, slot.state);
                let (from, to) = (phase(from), phase(to));
                if from != to {
                    self.returns.moved(now, *slice, to);
                }
            }
        }
    }
}

impl World {
    /// Records a durable batch of the running manager.
    pub(in crate::world) fn note_durable(&mut self, records: &[Record]) {
        let now = self.when().now;
        self.truth.note_moves(now, records);
        self.note_let_back(records);
        self.truth_committed(records);
        self.follow_rack_of(records);
    }

    /// Compares after a write that changed a slice's stage, when the manager has dropped expired windows.
    pub(in crate::world) fn check_returns(&mut self) {
        let now = self.when().now;
        let Some(running) = self.program.running.as_ref().filter(|_| self.truth.returns.moved) else {
            return;
        };
        let (shown, longest) = (running.manager.drain_time(), self.truth.returns.longest(now));
        if shown != longest {
            let what = format!("slices took up to {longest} to return, the manager shows {shown}");
            self.blame("the manager shows what is on disk", what);
        }
    }
}
