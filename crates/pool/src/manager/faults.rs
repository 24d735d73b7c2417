//! Slices whose device calls fail while the device itself works. The call of each slice is retried
//! separately, after a delay that doubles with every failure. After [`SLICE_ATTEMPTS_MAX`] failures
//! the slice is quarantined. Calls for other slices continue. Failure counts are not durable: after
//! a restart they begin at 0.
//!
//! Hosts report slices that they cannot release, for example because a process holds a leaked file
//! descriptor. Hosts retry these releases themselves, and the manager raises an alarm.

use std::collections::{BTreeMap, BTreeSet};

use units::limits::{SLICE_ATTEMPTS_MAX, SLICE_RETRY_DELAY_MAX, SLICE_RETRY_DELAY_MIN};
use units::{Ns, SliceId, UnixMs};

use super::{Manager, devices::SliceError};
use crate::{
    ledger::When,
    slice::{Event, Quarantine},
};

/// Failures of a slice's device calls since the last successful call.
#[derive(Clone, Debug)]
pub(super) struct SliceFault {
    pub(super) error: SliceError,
    pub(super) failures: u32,
    pub(super) since: UnixMs,
    /// Rack time of the next attempt; `None` once the delay is over.
    retry_at: Option<Ns>,
}

/// Slices whose latest device call failed.
#[derive(Debug, Default)]
pub(super) struct SliceFaults {
    faults: BTreeMap<SliceId, SliceFault>,
    retries: BTreeSet<(Ns, SliceId)>,
}

impl SliceFaults {
    /// Records a failure and schedules the next attempt. Returns `false` if no attempt remains.
    fn record_failure(&mut self, when: When, slice: SliceId, error: SliceError) -> bool {
        let before = self.remove(slice);
        let since = before.as_ref().map_or(when.wall, |before| before.since);
        let failures = before.map_or(0, |before| before.failures) + 1;
        if failures >= SLICE_ATTEMPTS_MAX {
            return false;
        }
        let retry_at = when.now.after(retry_delay(failures));
        self.retries.insert((retry_at, slice));
        self.faults.insert(slice, SliceFault { error, failures, since, retry_at: Some(retry_at) });
        true
    }

    /// Removes the recorded failures of a slice, because a call succeeded or no call is needed.
    pub(super) fn remove(&mut self, slice: SliceId) -> Option<SliceFault> {
        let fault = self.faults.remove(&slice)?;
        if let Some(at) = fault.retry_at {
            self.retries.remove(&(at, slice));
        }
        Some(fault)
    }

    pub(super) fn is_waiting_for_retry(&self, slice: SliceId) -> bool {
        self.faults.get(&slice).is_some_and(|fault| fault.retry_at.is_some())
    }

    pub(super) fn next_retry(&self) -> Option<Ns> {
        self.retries.first().map(|(at, _)| *at)
    }

    /// Removes and returns a scheduled slice whose delay is over, if any.
    fn pop_due_retry(&mut self, now: Ns) -> Option<SliceId> {
        let (at, slice) = self.retries.first().copied().filter(|(at, _)| *at <= now)?;
        self.retries.remove(&(at, slice));
        if let Some(fault) = self.faults.get_mut(&slice) {
            fault.retry_at = None;
        }
        Some(slice)
    }

    pub(super) fn len(&self) -> usize {
        self.faults.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SliceId, &SliceFault)> {
        self.faults.iter().map(|(slice, fault)| (*slice, fault))
    }
}

fn retry_delay(failures: u32) -> Ns {
    let doubled = SLICE_RETRY_DELAY_MIN.0.saturating_mul(1 << (failures - 1).min(32));
    Ns(doubled).min(SLICE_RETRY_DELAY_MAX)
}

/// Failure of a host to release a draining slice.
#[derive(Clone, Debug)]
pub(super) struct ReleaseFailure {
    pub(super) message: String,
    pub(super) since: UnixMs,
}

impl Manager {
    /// Handles the report of a host that it cannot release a slice.
    pub(super) fn on_release_failed(&mut self, when: When, slice: SliceId, message: &str) {
        let before = self.release_failures.get(&slice);
        if before.is_some_and(|before| before.message == message) {
            return;
        }
        let since = before.map_or(when.wall, |before| before.since);
        self.release_failures.insert(slice, ReleaseFailure { message: message.to_owned(), since });
        self.changed = true;
    }

    /// Handles the failure of a device call that concerns only this slice.
    pub(super) fn on_slice_failed(&mut self, when: When, slice: SliceId, error: SliceError) {
        self.changed = true;
        let can_revoke = self.head.can_revoke(slice);
        let slot = self.head.slot(slice).filter(|slot| slot.device_call(can_revoke).is_some());
        let Some(slot) = slot else { return drop(self.faults.remove(slice)) };
        if self.faults.record_failure(when, slice, error.clone()) {
            return;
        }
        // The failed call may have had a partial effect, so the host of the grant may be able to
        // reach the slice.
        let why = Quarantine::DeviceFailed { host: slot.holder(), errno: error.errno };
        self.quarantine_slice(when, slice, Event::Quarantine(why), &error.message);
    }

    /// Repeats the device calls of slices whose delay is over.
    pub(super) fn retry_slices(&mut self, when: When) {
        while let Some(slice) = self.faults.pop_due_retry(when.now) {
            self.advance_slice(slice);
        }
    }
}
