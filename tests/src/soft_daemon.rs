//! Soft memory daemon of the agent in this process, with its socket, for tests and benchmarks.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
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

/// Interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time after which a condition must hold. It is high because test machines are shared.
const WAIT_TIMEOUT: Duration = Duration::from_secs(180);

/// Running daemon. Dropping it ends all connections.
#[derive(Debug)]
pub struct SoftDaemon {
    dir: TempDir,
    size: Bytes,
    settings: Settings,
    /// `None` while the daemon is stopped.
    runtime: Option<Runtime>,
    reports: Arc<ReportSlot<Report>>,
}

impl SoftDaemon {
    /// Starts a daemon with soft memory of this size, which the memory of the host does not limit.
    pub fn start(size: Bytes, settings: Settings) -> Self {
        let dir = tempfile::Builder::new().prefix("tarn-soft-").tempdir().expect("a folder is created");
        // Other users connect, too.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("the folder is writable");
        let mut daemon = Self { dir, size, settings, runtime: None, reports: Arc::default() };
        daemon.restart(size);
        daemon
    }

    /// Ends the daemon with all connections.
    pub fn stop(&mut self) {
        drop(self.runtime.take());
    }

    /// Ends the daemon with all connections, and starts another one with soft memory of this size.
    pub fn restart(&mut self, size: Bytes) {
        self.stop();
        self.size = size;
        self.reports = Arc::default();
        let config = SoftMemory {
            socket: None,
            allowed_uids: None,
            size,
            reserve: Bytes::mib(1),
            stalled_percent: 100,
            reservation: None,
            settings: self.settings,
        };
        let user = UserId::new(rustix::process::geteuid().as_raw()).expect("the user is valid");
        let inputs = Inputs {
            config,
            allowed_uids: BTreeSet::from([user]),
            slices: None,
            proc: Sysfs::at("/proc"),
            reports: Arc::clone(&self.reports),
            metrics: Arc::new(Metrics::new(&Name::new("h0").expect("the name is valid"), "emulated")),
        };
        let runtime = Runtime::new().expect("a runtime is created");
        let socket = self.socket();
        let server = runtime.block_on(async { SoftMemoryServer::listen(&socket, inputs) });
        runtime.spawn(server.expect("the socket is free").serve());
        self.runtime = Some(runtime);
    }

    /// Returns the path of the socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("soft.sock")
    }

    /// Returns the next report, which contains everything that happened before the call.
    pub fn next_report(&self) -> Report {
        self.wait_for_report(|_| true)
    }

    /// Waits until a report from after the call fulfils a condition, and returns it.
    #[track_caller]
    pub fn wait_for_report(&self, condition: impl Fn(&Report) -> bool) -> Report {
        let before = self.reports.last().map(|report| report.at);
        wait_for(|| self.reports.last().filter(|report| Some(report.at) > before && condition(report)))
    }

    /// Waits until a report has this number of clients, and the whole size in the free part and the budgets of the
    /// clients. Returns the report.
    #[track_caller]
    pub fn check_books(&self, clients: usize) -> Report {
        self.wait_for_report(|report| {
            let budgets: u64 = report.clients.iter().map(|client| client.state.sample.budget).sum();
            report.client_count == clients
                && report.total == self.size
                && report.free.get() + Bytes::pages(budgets).get() == self.size.get()
        })
    }
}

/// Waits until `condition` returns a value, and returns it.
#[track_caller]
pub fn wait_for<T>(mut condition: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(result) = condition() {
            return result;
        }
        assert!(started.elapsed() < WAIT_TIMEOUT, "the condition does not hold");
        thread::sleep(POLL_INTERVAL);
    }
}
