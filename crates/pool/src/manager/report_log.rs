//! Progress of a host's reports: which reports were applied completely, and the state of a partly
//! received report.

use std::collections::BTreeSet;

use units::{Name, Ns, ReservationId, SliceId, UnixMs};

use crate::protocol::ObservedState;

/// Reports of one session of an agent.
#[derive(Clone, Debug, Default)]
pub(super) struct ReportLog {
    /// All reports up to this sequence number were applied, or replaced by a complete report.
    complete_until: u64,
    /// Highest sequence number of a received report.
    latest_sequence: u64,
    /// Value of [`super::Manager::adoption_events`] at the start of the latest complete report;
    /// `None` before the first complete report.
    pub(super) complete_since: Option<u64>,
    /// Rack time of the latest request for a complete report.
    pub(super) requested_at: Option<Ns>,
    pub(super) partial: Option<PartialReport>,
}

/// State of a partly received report.
#[derive(Clone, Debug, Default)]
pub(super) struct PartialReport {
    sequence: u64,
    /// Number of received parts; `None` if a part was lost.
    pub(super) received_parts: Option<usize>,
    /// Value of [`super::Manager::loads`] at the first part.
    pub(super) loads: u64,
    /// Value of [`super::Manager::adoption_events`] at the first part.
    pub(super) adoption_events: u64,
    pub(super) unadopted: Vec<UnadoptedVm>,
    /// VMs in all parts received so far.
    pub(super) vms: BTreeSet<ReservationId>,
    /// Whether the report contains a slice of an EMC that was not compared with the ledger.
    pub(super) has_uncompared_slice: bool,
}

impl ReportLog {
    /// Returns whether a complete report of this session was applied.
    pub(super) fn has_reported(&self) -> bool {
        self.complete_since.is_some()
    }

    /// Records that a report or its next part arrived, and returns the state of the report.
    pub(super) fn begin_report(
        &mut self,
        report: &ObservedState,
        loads: u64,
        adoption_events: u64,
    ) -> PartialReport {
        self.latest_sequence = self.latest_sequence.max(report.sequence);
        let before = self.partial.take();
        if report.part == 0 {
            let sequence = report.sequence;
            return PartialReport {
                sequence,
                received_parts: Some(1),
                loads,
                adoption_events,
                ..PartialReport::default()
            };
        }
        let is_next = |partial: &PartialReport| {
            partial.sequence == report.sequence && partial.received_parts == Some(report.part)
        };
        let partial = before.filter(is_next).unwrap_or_default();
        PartialReport { received_parts: partial.received_parts.map(|parts| parts + 1), ..partial }
    }

    /// Records that all parts of a report were applied.
    pub(super) fn record_completion(&mut self, report: &ObservedState) {
        if report.whole || report.after <= self.complete_until {
            self.complete_until = self.complete_until.max(report.sequence);
        }
    }

    pub(super) fn has_missing_report(&self) -> bool {
        self.complete_until < self.latest_sequence
    }
}

/// Reported running VM that could not be adopted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnadoptedVm {
    pub(super) vm: Name,
    pub(super) slices: BTreeSet<SliceId>,
    pub(super) since: UnixMs,
}
