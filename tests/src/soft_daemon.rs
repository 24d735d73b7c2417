//! Soft memory daemon of the agent in this process, with its socket, for tests and benchmarks.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use host_agent::{
    config::soft_memory::SoftMemory,
    host::sysfs::Sysfs,
    metrics::Metrics,
    report_slot::ReportSlot,
    soft_memory::{Inputs, SoftMemoryServer},
    soft_memory_report::Report,
};
use soft::budget::Settings;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use units::{Bytes, Name, UserId};

/// Interval between two checks for a new report.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Running daemon. Dropping it ends all connections.
#[derive(Debug)]
pub struct SoftDaemon {
    dir: TempDir,
    _runtime: Runtime,
    reports: Arc<ReportSlot<Report>>,
}

impl SoftDaemon {
    /// Starts a daemon with soft memory of this size, which the memory of the host does not limit.
    pub fn start(size: Bytes, settings: Settings) -> Self {
        let dir = tempfile::Builder::new().prefix("tarn-soft-").tempdir().expect("a folder is created");
        let config = SoftMemory {
            socket: None,
            allowed_uids: None,
            size,
            reserve: Bytes::mib(1),
            stalled_percent: 100,
            reservation: None,
            settings,
        };
        let reports = Arc::default();
        let user = UserId::new(rustix::process::geteuid().as_raw()).expect("the user is valid");
        let inputs = Inputs {
            config,
            allowed_uids: BTreeSet::from([user]),
            slices: None,
            proc: Sysfs::at("/proc"),
            reports: Arc::clone(&reports),
            metrics: Arc::new(Metrics::new(&Name::new("h0").expect("the name is valid"), "emulated")),
        };
        let runtime = Runtime::new().expect("a runtime is created");
        let socket = socket_in(dir.path());
        let server = runtime.block_on(async { SoftMemoryServer::listen(&socket, inputs) });
        runtime.spawn(server.expect("the socket is free").serve());
        Self { dir, _runtime: runtime, reports }
    }

    /// Returns the path of the socket.
    pub fn socket(&self) -> PathBuf {
        socket_in(self.dir.path())
    }

    /// Returns the next report, which contains everything that happened before the call.
    pub fn next_report(&self) -> Report {
        let at = self.reports.last().map(|report| report.at);
        loop {
            thread::sleep(POLL_INTERVAL);
            if let Some(report) = self.reports.last().filter(|report| Some(report.at) > at) {
                return report;
            }
        }
    }
}

fn socket_in(dir: &Path) -> PathBuf {
    dir.join("soft.sock")
}
