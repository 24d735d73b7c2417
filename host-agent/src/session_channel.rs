//! Both directions between the driver and the session: events for the driver, and reports for the
//! session.

use std::sync::Arc;

use pool::protocol::DesiredState;
use tokio::sync::{Notify, watch};
use units::Ns;

use crate::{outbox::Outbox, usage_table::UsageTable};

/// Event of the session.
#[derive(Clone, Debug)]
pub enum SessionEvent {
    /// The manager accepted the session.
    Connected {
        /// Rack of the manager.
        rack: String,
        /// Maximum interval between messages of the agent.
        lease_ttl: Ns,
    },
    /// Desired state, with its rack.
    DesiredState(String, DesiredState),
    /// The manager requests a complete report.
    ReportRequested,
    /// The connection has ended.
    Disconnected,
}

/// Messages for the session.
#[derive(Clone, Debug)]
pub struct Reports {
    /// Reports.
    pub outbox: Arc<Outbox>,
    /// Touched memory of each VM.
    pub usage: Arc<UsageTable>,
    /// Rack that this host serves.
    pub rack: watch::Receiver<Option<String>>,
    /// The manager is of another rack.
    pub disconnect: Arc<Notify>,
}
