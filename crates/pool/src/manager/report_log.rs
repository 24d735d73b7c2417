//! Progress of a host's reports: which are complete, and the state of one between two parts.

use std::collections::BTreeSet;

use units::{Name, Ns, ReservationId, SliceId, UnixMs};

use crate::protocol::ObservedState;

/// Reports of one session.
#[derive(Clone, Debug, Default)]
pub(super) struct ReportLog {
    /// All reports up to this number were applied, or replaced by a complete one.
    complete: u64,
    /// Highest number received.
    latest: u64,
    /// [`super::Manager::adoption_events`] when the latest complete report began; `None` before the first.
    pub(super) complete_since: Option<u64>,
    /// Time of the latest request for a complete report.
    pub(super) requested: Option<Ns>,
    pub(super) partial: Option<PartialReport>,
}

/// State of a report between two parts.
#[derive(Clone, Debug, Default)]
pub(super) struct PartialReport {
    sequence: u64,
    /// Number of parts so far; `None` if one is missing.
    pub(super) parts: Option<usize>,
    /// [`super::Manager::loads`] and [`super::Manager::adoption_events`] at its first part.
    pub(super) loads: u64,
    pub(super) adoption_events: u64,
    pub(super) unadopted: Vec<UnadoptedVm>,
    /// VMs of all parts so far.
    pub(super) vms: BTreeSet<ReservationId>,
    /// It contains a slice of an EMC that was not compared with the ledger.
    pub(super) is_uncompared: bool,
}

impl ReportLog {
    /// Returns whether a complete report of this session was applied.
    pub(super) fn has_reported(&self) -> bool {
        self.complete_since.is_some()
    }

    /// Returns the state of this report.
    pub(super) fn begin(
        &mut self,
        report: &ObservedState,
        loads: u64,
        adoption_events: u64,
    ) -> PartialReport {
        self.latest = self.latest.max(report.sequence);
        let before = self.partial.take();
        if report.part == 0 {
            let sequence = report.sequence;
            return PartialReport {
                sequence,
                parts: Some(1),
                loads,
                adoption_events,
                ..PartialReport::default()
            };
        }
        let is_next = |partial: &PartialReport| {
            partial.sequence == report.sequence && partial.parts == Some(report.part)
        };
        let partial = before.filter(is_next).unwrap_or_default();
        PartialReport { sequence: report.sequence, parts: partial.parts.map(|parts| parts + 1), ..partial }
    }

    /// Records that all parts of a report were applied.
    pub(super) fn complete(&mut self, report: &ObservedState) {
        if report.whole || report.after <= self.complete {
            self.complete = self.complete.max(report.sequence);
        }
    }

    pub(super) fn has_gap(&self) -> bool {
        self.complete < self.latest
    }
}

/// Running VM whose slices the ledger cannot assign to it yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnadoptedVm {
    pub(super) vm: Name,
    pub(super) slices: BTreeSet<SliceId>,
    pub(super) since: UnixMs,
}
