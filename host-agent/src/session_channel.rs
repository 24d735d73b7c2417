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
    tiering_report,
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
    }
}
