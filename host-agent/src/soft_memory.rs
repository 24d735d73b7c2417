//! Soft memory daemon of this host (Soft Memory, section 3.3): the socket of its clients, and its measurements. The
//! decisions are in [`soft::budget`].
//!
//! One task owns the daemon. It receives the events of all connections, and never waits for a client. The memory of
//! the host and of the clients is measured by threads for blocking calls. No state is stored: clients connect again
//! after a restart of the agent, and state their budgets.

mod connection;
mod footprint;
pub(crate) mod pressure;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use rustix::fd::AsFd as _;
use service_files::{
    log_limit::{LogLimit, RejectionLog},
    sockets::{SocketError, SocketPath},
};
use soft::{
    budget::{ClientReport, Daemon, HostMemory, Pid},
    protocol::{ClientMessage, DaemonMessage, Refusal},
};
use tokio::{sync::mpsc, time::MissedTickBehavior};
use units::{
    Bytes, Ns, UserId,
    limits::{
        SOFT_ADAPT_INTERVAL, SOFT_CONNECTIONS_PER_UID_MAX, SOFT_MEASURE_INTERVAL, SOFT_MESSAGES_QUEUED_MAX,
        SOFT_REPORT_INTERVAL, SOFT_REPORTED_CLIENTS_MAX, SOFT_TICK_INTERVAL,
        SOFT_UNAUTHORIZED_CONNECTIONS_MAX,
    },
};

use self::{
    connection::{ConnectionNumber, Event, Peer, Shared},
    pressure::{PAGE_BYTES, Rules, Sample, parse_meminfo},
};
use crate::{
    config::soft_memory::SoftMemory as Config,
    host::{cgroup::find_unified_hierarchy, sysfs::Sysfs},
    local_socket::{ConnectionPermits, LocalListener},
    metrics::Metrics,
    report_slot::ReportSlot,
    shares::now as unix_now,
    soft_memory_report::{Client, Report},
};

/// Number of slices before the manager has sent the desired state.
pub const SLICES_UNKNOWN: u64 = u64::MAX;
/// Initial size of soft memory if slices add to it.
const MAX_PAGES: u64 = 1 << 40;

/// Returns the path of the socket with its field in host.toml.
pub fn socket_path(path: &Path) -> SocketPath<'_> {
    SocketPath { field: "soft_memory.socket", path }
}

/// Inputs of the daemon.
#[derive(Debug)]
pub struct Inputs {
    /// Settings.
    pub config: Config,
    /// Users whose processes may use soft memory.
    pub allowed_uids: BTreeSet<UserId>,
    /// Number of slices of the reservation that this host may use, or [`SLICES_UNKNOWN`] until the manager has sent the
    /// desired state; `None` without a reservation.
    pub slices: Option<Arc<AtomicU64>>,
    /// Root of procfs: `/proc`.
    pub proc: Sysfs,
    /// Receives the reports for the manager.
    pub reports: Arc<ReportSlot<Report>>,
    /// Metrics of the agent.
    pub metrics: Arc<Metrics>,
}

impl Inputs {
    /// Warns if the reserve leaves no memory for soft memory.
    fn warn_of_reserve(&self) {
        let meminfo = self.proc.text("meminfo").unwrap_or_default();
        let reserve = self.config.reserve;
        if let Some(memory) = parse_meminfo(&meminfo, "MemTotal").filter(|memory| reserve >= *memory) {
            tracing::warn!(%reserve, %memory, "soft_memory.reserve_mib is all memory of this host: no soft memory");
        }
    }
}

/// Listening socket of the daemon.
#[derive(Debug)]
pub struct SoftMemoryServer {
    listener: LocalListener,
    inputs: Inputs,
}

impl SoftMemoryServer {
    /// Listens on a socket. Replaces a socket that no process serves.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn listen(path: &Path, inputs: Inputs) -> Result<Self, SocketError> {
        Ok(Self { listener: LocalListener::listen(socket_path(path))?, inputs })
    }

    /// Serves clients until the task is aborted.
    pub async fn serve(self) {
        let Self { listener, inputs } = self;
        inputs.warn_of_reserve();
        let (sender, events) = mpsc::channel(SOFT_MESSAGES_QUEUED_MAX);
        let permits = ConnectionPermits::new(
            inputs.allowed_uids.clone(),
            SOFT_CONNECTIONS_PER_UID_MAX,
            SOFT_UNAUTHORIZED_CONNECTIONS_MAX,
        );
        let log = Arc::new(RejectionLog::default());
        let shared = Shared { permits, events: sender, log: Arc::clone(&log) };
        let mut number = 0;
        let start = |socket| {
            number += 1;
            connection::start(socket, number, &shared)
        };
        tokio::join!(listener.accept_all("soft memory", start), State::new(inputs, log).run(events));
    }
}

/// Daemon and its connections.
struct State {
    inputs: Inputs,
    started: Instant,
    daemon: Daemon,
    /// Clients by process ID. A client without a connection may have a budget.
    peers: BTreeMap<Pid, Peer>,
    last_sample: Option<(Ns, Sample)>,
    has_warned: bool,
    /// Rate-limited log of refused clients.
    log: Arc<RejectionLog>,
    /// Silent clients that are in the log, and the limit on their log lines.
    logged_silent: BTreeSet<Pid>,
    silent_log: LogLimit,
}

impl State {
    fn new(inputs: Inputs, log: Arc<RejectionLog>) -> Self {
        // With slices, clients of an earlier daemon may have larger budgets. The first adaptation reduces the size.
        let pages = if inputs.slices.is_some() { MAX_PAGES } else { inputs.config.size.get() / PAGE_BYTES };
        Self {
            daemon: Daemon::new(inputs.config.settings, pages, Ns::ZERO),
            inputs,
            started: Instant::now(),
            peers: BTreeMap::new(),
            last_sample: None,
            has_warned: false,
            log,
            logged_silent: BTreeSet::new(),
            silent_log: LogLimit::default(),
        }
    }

    fn now(&self) -> Ns {
        Ns::from(self.started.elapsed())
    }

    async fn run(mut self, mut events: mpsc::Receiver<Event>) {
        let mut tick = interval(SOFT_TICK_INTERVAL);
        let mut adapt = interval(SOFT_ADAPT_INTERVAL);
        let mut measure = interval(SOFT_MEASURE_INTERVAL);
        let mut report = interval(SOFT_REPORT_INTERVAL);
        let (sender, mut footprints) = mpsc::channel(1);
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.handle(event),
                    None => return,
                },
                Some(measured) = footprints.recv() => self.record_footprints(measured),
                _ = tick.tick() => {
                    let now = self.now();
                    self.daemon.tick(now);
                }
                _ = adapt.tick() => self.adapt(),
                _ = measure.tick() => self.start_measurement(&sender),
                _ = report.tick() => {
                    self.log_silent_clients();
                    self.report();
                }
            }
            self.send_outgoing();
        }
    }

    fn handle(&mut self, event: Event) {
        let now = self.now();
        match event {
            Event::Connected(peer, hello, footprint) => self.connect(peer, hello, footprint),
            Event::Invalid(pid, number) if self.is_current(pid, number) => {
                self.refuse(pid, Refusal::InvalidMessage);
            }
            Event::Message(pid, number, message) if self.is_current(pid, number) => {
                if let Err(reason) = self.daemon.receive(Pid(pid), message, now) {
                    self.refuse(pid, reason);
                }
            }
            Event::Lost(pid, number) if self.is_current(pid, number) => {
                self.daemon.connection_lost(Pid(pid), now);
                // An empty message also counts as the end of the connection.
                if let Some(peer) = self.peers.get(&Pid(pid)) {
                    close(peer);
                }
            }
            Event::Ended(pid, number) if self.is_current(pid, number) => {
                self.daemon.disconnect(Pid(pid), now);
                self.peers.remove(&Pid(pid));
            }
            Event::Message(..) | Event::Invalid(..) | Event::Lost(..) | Event::Ended(..) => {}
        }
    }

    /// Returns whether a connection is the last one of its process.
    fn is_current(&self, pid: u32, number: ConnectionNumber) -> bool {
        self.peers.get(&Pid(pid)).is_some_and(|peer| peer.number == number)
    }

    fn connect(&mut self, peer: Peer, hello: ClientMessage, footprint: u64) {
        // The end of the earlier connection of a process may be received after its next first message.
        if self.peers.get(&Pid(peer.pid)).is_some_and(Peer::is_closed) {
            let now = self.now();
            self.daemon.connection_lost(Pid(peer.pid), now);
        }
        match self.daemon.connect(Pid(peer.pid), peer.user, hello, footprint) {
            Ok(()) => {
                tracing::debug!(pid = peer.pid, program = peer.program, uid = %peer.user, "client of soft memory");
                self.peers.insert(Pid(peer.pid), peer);
            }
            Err(reason) => {
                self.log_refusal(peer.pid, reason);
                peer.send(DaemonMessage::Refused(reason));
                close(&peer);
            }
        }
    }

    /// Closes the connection of a client that sent an invalid message.
    fn refuse(&mut self, pid: u32, reason: Refusal) {
        self.log_refusal(pid, reason);
        let now = self.now();
        self.daemon.connection_lost(Pid(pid), now);
        if let Some(peer) = self.peers.get(&Pid(pid)) {
            peer.send(DaemonMessage::Refused(reason));
            close(peer);
        }
    }

    fn log_refusal(&self, pid: u32, reason: Refusal) {
        self.log.log(&format_args!("client of soft memory with process ID {pid}"), &reason);
    }

    fn send_outgoing(&mut self) {
        loop {
            let outgoing = self.daemon.take_outgoing();
            if outgoing.is_empty() {
                return;
            }
            for outgoing in outgoing {
                let Some(peer) = self.peers.get(&outgoing.pid) else { continue };
                if !peer.send(outgoing.message) {
                    close(peer);
                    let now = self.now();
                    self.daemon.connection_lost(outgoing.pid, now);
                }
            }
        }
    }

    /// Returns the largest size of soft memory: the configured size and the slices of the reservation; `None` until
    /// their number is known.
    fn limit(&self) -> Option<Bytes> {
        let slices = self.inputs.slices.as_ref().map_or(0, |slices| slices.load(Ordering::Relaxed));
        let size = self.inputs.config.size.get();
        (slices != SLICES_UNKNOWN).then(|| Bytes::new(size.saturating_add(Bytes::gib(slices).get())))
    }

    /// Adapts the size of soft memory to the memory of the host. Without a measurement, it stays as it is.
    fn adapt(&mut self) {
        let now = self.now();
        let sample = match Sample::read(&self.inputs.proc) {
            Ok(sample) => sample,
            Err(error) => {
                if !std::mem::replace(&mut self.has_warned, true) {
                    let error = units::chain(&error);
                    tracing::error!(%error, "cannot measure the available memory: soft memory keeps its size");
                }
                return;
            }
        };
        self.has_warned = false;
        let Config { reserve, stalled_percent, .. } = self.inputs.config;
        let last = self.last_sample.replace((now, sample));
        let interval_us = last.map_or(0, |(at, _)| now.since(at).0 / 1000);
        let rules = Rules { reserve, stalled_percent };
        let headroom = sample.headroom(
            last.as_ref().map(|(_, last)| last),
            interval_us,
            rules,
            self.daemon.ledger().used(),
        );
        // The clients may use slices that are not known yet.
        let limit = self.limit().map_or(u64::MAX, |limit| limit.get() / PAGE_BYTES);
        self.daemon.adapt_to_host(HostMemory { limit, headroom }, now);
    }

    /// Measures the memory of all clients, unless a measurement still runs.
    fn start_measurement(&mut self, sender: &mpsc::Sender<Vec<(u32, u64)>>) {
        let Ok(permit) = sender.clone().try_reserve_owned() else { return };
        self.daemon.begin_measurement();
        let (pids, proc) = (self.peers.keys().map(|pid| pid.0).collect::<Vec<_>>(), self.inputs.proc.clone());
        tokio::task::spawn_blocking(move || {
            permit.send(footprint::measure(&proc, find_unified_hierarchy().as_ref(), &pids));
        });
    }

    fn record_footprints(&mut self, measured: Vec<(u32, u64)>) {
        measured.into_iter().for_each(|(pid, pages)| self.daemon.report_footprint(Pid(pid), pages));
        // Clients without a connection that did not connect again have no budget any more.
        let ledger = self.daemon.ledger();
        self.peers.retain(|pid, _| ledger.contains(*pid));
        self.adapt();
    }

    /// Logs the clients that have begun to be silent. Those above the limit on log lines are logged with a later
    /// report.
    fn log_silent_clients(&mut self) {
        let silent = self.daemon.clients().filter(|client| client.is_silent);
        let silent: BTreeSet<Pid> = silent.map(|client| client.sample.pid).collect();
        self.logged_silent.retain(|pid| silent.contains(pid));
        for pid in silent {
            if self.logged_silent.contains(&pid) {
                continue;
            }
            if self.silent_log.count_line().is_none() {
                return;
            }
            let program = self.peers.get(&pid).map_or("", |peer| peer.program.as_str());
            tracing::warn!(
                pid = pid.0,
                program,
                "client of soft memory does not answer, or has lost its connection"
            );
            self.logged_silent.insert(pid);
        }
    }

    fn report(&self) {
        let limit = self.limit().unwrap_or(self.inputs.config.size);
        let ledger = self.daemon.ledger();
        let mut states: Vec<ClientReport> = self.daemon.clients().collect();
        let client_count = states.len();
        states.sort_by_key(|state| std::cmp::Reverse(state.sample.budget));
        states.truncate(SOFT_REPORTED_CLIENTS_MAX);
        states.sort_by_key(|state| state.sample.pid);
        let clients = states.into_iter().filter_map(|state| {
            let peer = self.peers.get(&state.sample.pid)?;
            Some(Client { user: peer.user, program: peer.program.clone(), state })
        });
        let report = Report {
            at: unix_now(),
            limit,
            total: Bytes::pages(ledger.total()).min(limit),
            free: Bytes::pages(ledger.free()).min(limit),
            counters: self.daemon.counters(),
            client_count,
            clients: clients.collect(),
        };
        self.inputs.metrics.set_soft_memory(&report);
        self.inputs.reports.store(report);
    }
}

impl Drop for State {
    /// Ends all connections, so that clients do not wait for answers.
    fn drop(&mut self) {
        self.peers.values().for_each(close);
    }
}

/// Ends a connection. Its task notices it.
fn close(peer: &Peer) {
    rustix::net::shutdown(peer.socket.as_fd(), rustix::net::Shutdown::Both).ok();
}

fn interval(every: Ns) -> tokio::time::Interval {
    let mut interval = tokio::time::interval(every.as_duration());
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

#[cfg(test)]
mod tests;
