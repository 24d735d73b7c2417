//! Progress of a host's reports: which reports are complete, and the state of a report between
//! parts.

use std::collections::BTreeSet;

use units::{Name, Ns, ReservationId, SliceId, UnixMs};

use crate::protocol::ObservedState;

/// Reports of one session of an agent.
#[derive(Clone, Debug, Default)]
pub(super) struct ReportLog {
    /// All reports up to this number were applied, or replaced by a complete report.
    complete: u64,
    /// Highest number of a received report.
    latest: u64,
    /// Value of [`super::Manager::adoption_events`] when the latest complete report began; `None`
    /// before the first complete report.
    pub(super) complete_since: Option<u64>,
    /// Rack time of the latest request for a complete report.
    pub(super) requested: Option<Ns>,
    pub(super) partial: Option<PartialReport>,
}

/// State of a report between two of its parts.
#[derive(Clone, Debug, Default)]
pub(super) struct PartialReport {
    sequence: u64,
    /// Number of received parts; `None` if a part is missing.
    pub(super) parts: Option<usize>,
    /// Value of [`super::Manager::loads`] at the first part.
    pub(super) loads: u64,
    /// Value of [`super::Manager::adoption_events`] at the first part.
    pub(super) adoption_events: u64,
    pub(super) unadopted: Vec<UnadoptedVm>,
    /// VMs in all parts received so far.
    pub(super) vms: BTreeSet<ReservationId>,
    /// Whether the report contains a slice of an EMC that was not compared with the ledger.
    pub(super) is_uncompared: bool,
}

impl ReportLog {
    /// Returns whether a complete report of this session was applied.
    pub(super) fn has_reported(&self) -> bool {
        self.complete_since.is_some()
    }

    /// Records the arrival of a report or of its next part, and returns the state of the report.
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

/// Running VM that a report contains and that could not be adopted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnadoptedVm {
    pub(super) vm: Name,
    pub(super) slices: BTreeSet<SliceId>,
    pub(super) since: UnixMs,
}
