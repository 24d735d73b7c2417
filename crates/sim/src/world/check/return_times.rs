//! Checks the return time of slices: the time from the end of use until the slice is free. The time
//! is measured from durable writes and compared with the time that the manager reports. The manager
//! uses this time to size its buffer of free slices.

use std::collections::BTreeMap;

use pool::{
    record::Record,
    slice::{Scrub, State},
};
use units::{Ns, SliceId};

use super::GroundTruth;
use crate::world::World;

/// Length of one measuring window of the manager.
const WINDOW_DURATION: Ns = Ns::secs(10);
/// Number of measuring windows of the manager, including the current window.
const WINDOW_COUNT: u64 = 6;

/// Return times of slices during the current run of the manager.
#[derive(Debug, Default)]
pub(super) struct SliceReturns {
    /// Start times of the returns in progress, by slice.
    since: BTreeMap<SliceId, Ns>,
    /// Completed returns: the time at which a slice became free, and the duration of its return.
    done: Vec<(Ns, Ns)>,
    /// Whether the latest durable write changed the stage of a slice.
    changed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReturnStage {
    Free,
    Assigned,
    Onlining,
    Online,
    Draining,
    Scrubbing,
    Quarantined,
}

fn stage_of(state: State) -> ReturnStage {
    match state {
        State::Free => ReturnStage::Free,
        State::Assigned(_) => ReturnStage::Assigned,
        State::Onlining(_) => ReturnStage::Onlining,
        State::Online(_) => ReturnStage::Online,
        State::Draining(..) | State::Scrubbing(Scrub::Leaving(_)) => ReturnStage::Draining,
        State::Scrubbing(_) => ReturnStage::Scrubbing,
        State::Quarantined(_) => ReturnStage::Quarantined,
    }
}

impl SliceReturns {
    fn record_stage(&mut self, now: Ns, slice: SliceId, to: ReturnStage) {
        self.changed = true;
        match to {
            ReturnStage::Draining | ReturnStage::Scrubbing => drop(self.since.entry(slice).or_insert(now)),
            ReturnStage::Free => {
                let duration = self.since.remove(&slice).map(|since| now.since(since));
                self.done.extend(duration.map(|duration| (now, duration)));
            }
            ReturnStage::Assigned
            | ReturnStage::Onlining
            | ReturnStage::Online
            | ReturnStage::Quarantined => {
                self.since.remove(&slice);
            }
        }
    }

    fn longest_return_time(&self, now: Ns) -> Ns {
        let oldest = (now.0 / WINDOW_DURATION.0).saturating_sub(WINDOW_COUNT - 1);
        let latest = self.done.iter().filter(|(at, _)| at.0 / WINDOW_DURATION.0 >= oldest);
        latest.map(|(_, duration)| *duration).max().unwrap_or_default()
    }
}

impl GroundTruth {
    /// Records the stage changes in a batch that has just become durable, before the batch is
    /// applied.
    fn record_stages(&mut self, now: Ns, records: &[Record]) {
        self.returns.changed = false;
        for record in records {
            if let Record::Slice(slice, slot) = record {
                let (from, to) = (self.slot(*slice).state, slot.state);
                let (from, to) = (stage_of(from), stage_of(to));
                if from != to {
                    self.returns.record_stage(now, *slice, to);
                }
            }
        }
    }
}

impl World {
    /// Applies a durable batch of the running manager to the recorded state.
    pub(in crate::world) fn apply_durable_batch(&mut self, records: &[Record]) {
        self.record_slowdown_requests(records);
        let now = self.current_time().now;
        self.truth.record_stages(now, records);
        self.end_uncordoned_ownership(records);
        self.apply_records(records);
        self.apply_rack_changes(records);
    }

    /// Compares the longest return time with the value that the manager reports. Only a write that
    /// changed the stage of a slice is followed by a comparison, because the manager drops expired
    /// windows at such a write.
    pub(in crate::world) fn check_return_times(&mut self) {
        let now = self.current_time().now;
        let Some(running) = self.manager_process.running.as_ref().filter(|_| self.truth.returns.changed)
        else {
            return;
        };
        let (reported, longest) = (running.manager.drain_time(), self.truth.returns.longest_return_time(now));
        if reported != longest {
            let description =
                format!("slices took up to {longest} to return, but the manager reports {reported}");
            self.report_violation("the state of the manager equals the records on disk", description);
        }
    }
}
