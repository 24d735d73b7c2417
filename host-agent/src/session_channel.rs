//! Channels between the driver and the session with the manager: events for the driver, and reports
//! for the session.

use std::sync::Arc;

use pool::protocol::DesiredState;
use tokio::sync::{Notify, watch};
use units::Ns;

use crate::{
    eviction_report,
    outbox::{ReportOutbox, SampleOutbox},
    report_slot::ReportSlot,
    soft_memory_report, tiering_report,
    usage_table::UsageTable,
};

/// Event of the session with the manager, for the driver.
#[derive(Clone, Debug)]
pub enum SessionEvent {
    /// The manager accepted the session.
    Connected {
        /// UUID of the manager's rack.
        rack: String,
        /// Time after which the host's lease expires if the agent sends no message.
        lease_ttl: Ns,
    },
    /// The manager sent a desired state: the UUID of its rack, and the state.
    DesiredState(String, DesiredState),
    /// The manager requested a complete report.
    ReportRequested,
    /// The connection ended.
    Disconnected,
}

/// Driver state that the session reports to the manager.
#[derive(Clone, Debug)]
pub struct ReportStream {
    /// Pending report of the observed state.
    pub outbox: Arc<ReportOutbox>,
    /// Touched memory of each VM.
    pub usage: Arc<UsageTable>,
    /// Samples of running VMs.
    pub samples: Arc<SampleOutbox>,
    /// Last step of fair tiering.
    pub tiering: Arc<ReportSlot<tiering_report::Report>>,
    /// Last cycle of early eviction that is reported.
    pub evictions: Arc<ReportSlot<eviction_report::Report>>,
    /// Last state of soft memory.
    pub soft_memory: Arc<ReportSlot<soft_memory_report::Report>>,
    /// UUID of the rack to which this host belongs.
    pub rack: watch::Receiver<Option<String>>,
    /// Notification that the manager belongs to another rack, so that the session must end.
    pub disconnect: Arc<Notify>,
}

impl ReportStream {
    /// Drops reports of an earlier session, and lets the complete reports be sent again.
    pub fn restart(&self) {
        self.outbox.clear();
        self.usage.mark_unreported();
        self.samples.clear();
        self.tiering.resend();
        self.evictions.resend();
        self.soft_memory.resend();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
    };

    use soft::budget::Counters;
    use units::{Bytes, UnixMs};

    use super::*;

    fn reports() -> ReportStream {
        ReportStream {
            outbox: Arc::default(),
            usage: Arc::default(),
            samples: Arc::default(),
            tiering: Arc::default(),
            evictions: Arc::default(),
            soft_memory: Arc::default(),
            rack: watch::channel(None).1,
            disconnect: Arc::default(),
        }
    }

    /// Returns the time of the report of soft memory that the session sends next, if there is one.
    fn next_report(reports: &ReportStream) -> Option<u64> {
        match pin!(reports.soft_memory.next()).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(report) => Some(report.at.0),
            Poll::Pending => None,
        }
    }

    #[test]
    fn last_report_of_soft_memory_is_sent_once_per_session() {
        let reports = reports();
        for at in [1, 2] {
            reports.soft_memory.store(soft_memory_report::Report {
                at: UnixMs(at),
                limit: Bytes::ZERO,
                total: Bytes::ZERO,
                free: Bytes::ZERO,
                counters: Counters::default(),
                client_count: 0,
                clients: Vec::new(),
            });
        }
        let first = [next_report(&reports), next_report(&reports)];
        reports.restart();
        let second = [next_report(&reports), next_report(&reports)];
        assert_eq!([first, second], [[Some(2), None]; 2]);
    }
}
