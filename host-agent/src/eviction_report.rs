//! Report of a cycle of early eviction, for the manager and for metrics.

use std::sync::Arc;

use tiering::evict::TenantReport as Decision;
use units::{Bytes, Name, Ns, UnixMs, limits::EVICTION_REPORT_INTERVAL};

use crate::{report_slot::ReportSlot, shares::now};

/// Result of a cycle.
#[derive(Clone, Debug)]
pub struct Report {
    /// Time of the decision.
    pub at: UnixMs,
    /// Reason why nothing was decided; empty if it was.
    pub reason: String,
    /// Tenants with a memory limit, in the order of their names.
    pub tenants: Vec<TenantReport>,
}

impl Report {
    /// Creates the report of a cycle in which the tenants were decided about.
    pub fn decided(tenants: Vec<TenantReport>) -> Self {
        Self { at: now(), reason: String::new(), tenants }
    }

    /// Creates the report of a cycle in which nothing was decided.
    pub fn blocked(reason: String) -> Self {
        Self { at: now(), reason, tenants: Vec::new() }
    }
}

/// State of one tenant at the end of a cycle.
#[derive(Clone, Debug)]
pub struct TenantReport {
    /// Name of the tenant's cgroup.
    pub name: Name,
    /// Decision of the policy.
    pub decided: Decision,
    /// Counters since the tenant appeared.
    pub counts: Counts,
    /// Reason why the last request to evict memory or to set the priority of I/O had no effect; empty if
    /// it had.
    pub problem: String,
}

/// Counters of a tenant since it appeared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Memory that the agent evicted.
    pub evicted: Bytes,
    /// Time in which the tenant could not run because it waited for evictions.
    pub blocked: Ns,
    /// Time in which the tenant could not run because it waited for memory that was evicted before.
    pub fetching: Ns,
}

/// Passes reports to the session with the manager, at most one per [`EVICTION_REPORT_INTERVAL`].
#[derive(Debug)]
pub struct ReportLimiter {
    reports: Arc<ReportSlot<Report>>,
    /// Time of the last report that was passed.
    last: Option<Ns>,
}

impl ReportLimiter {
    /// Creates a limiter that stores reports for the session.
    pub const fn new(reports: Arc<ReportSlot<Report>>) -> Self {
        Self { reports, last: None }
    }

    /// Stores the report of a cycle that ended at `now`, or drops it if the last one is too recent.
    pub fn store(&mut self, now: Ns, report: Report) {
        if self.last.is_none_or(|last| now.since(last) >= EVICTION_REPORT_INTERVAL) {
            self.last = Some(now);
            self.reports.store(report);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_cycles_are_not_all_reported() {
        let reports = Arc::new(ReportSlot::default());
        let mut limiter = ReportLimiter::new(Arc::clone(&reports));
        let stored = [0, 500, 1000, 1999, 2000, 2500, 9000, 10_999, 11_000].map(|ms| {
            limiter.store(Ns::ms(ms), Report::blocked(ms.to_string()));
            reports.last().map(|report| report.reason).unwrap_or_default()
        });
        assert_eq!(stored, ["0", "0", "0", "0", "2000", "2000", "9000", "9000", "11000"]);
    }
}
