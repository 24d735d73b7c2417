//! Task that owns the agent's state machine. It passes events to it and performs its effects; it
//! decides nothing. Long work runs beside it and returns as an event.

mod calls;
#[cfg(test)]
mod tests;
mod worker_pool;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use pool::agent::{
    Agent, Caller, CommandRejected, Effect, Event, OtherRack, Process, Refusal, Ticket, VmRecord,
};
use tokio::{
    sync::{Notify, mpsc, oneshot, watch},
    task::JoinSet,
    time::Instant,
};
use units::limits::HOST_MEMORY_REQUESTS_QUEUED_MAX;
use units::{DesiredVersion, Name, Ns, ReservationId};

use self::worker_pool::{CallResult, WorkerPool};
use crate::{
    host::{Host, HostError, MemoryForm, MemoryRegion},
    metrics::Metrics,
    outbox::Outbox,
    records::Records,
    runtime_dir::RuntimeDir,
    session_channel::{Reports, SessionEvent},
    usage_table::UsageTable,
};

/// Events applied before effects are performed, so that many share one report.
const EVENTS_PER_BATCH_MAX: usize = 256;

/// Closure that reads the current state.
type InspectFn = Box<dyn FnOnce(&Agent) + Send>;

/// Request from another task to the driver.
enum Request {
    Attach {
        vm: Name,
        caller: Caller,
        form: MemoryForm,
        reply: oneshot::Sender<Result<VmMemory, DriverError>>,
    },
    InspectMemory {
        vm: Name,
        caller: Caller,
        reply: oneshot::Sender<Result<VmMemory, DriverError>>,
    },
    Inspect(InspectFn),
}

/// Memory of a VM.
#[derive(Clone, Debug)]
pub struct VmMemory {
    /// Local memory first, then slices in order.
    pub regions: Vec<MemoryRegion>,
    /// Pages must not be migrated.
    pub pinned: bool,
}

/// Error returned by the driver.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The VM's memory cannot be passed.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The machine failed.
    #[error("its memory is not available")]
    Host(#[source] HostError),
    /// The agent is stopping.
    #[error("the agent is stopping")]
    Stopping,
}

/// Handle of the driver; cheap to clone.
#[derive(Clone, Debug)]
pub struct Handle(mpsc::Sender<Request>);

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Request")
    }
}

impl Handle {
    /// Attaches a process to the memory of a VM.
    ///
    /// # Errors
    /// [`DriverError`].
    pub async fn attach(&self, vm: Name, caller: Caller, form: MemoryForm) -> Result<VmMemory, DriverError> {
        self.send_request(|reply| Request::Attach { vm, caller, form, reply }).await?
    }

    /// Returns the memory of a VM without attaching the process.
    ///
    /// # Errors
    /// [`DriverError`], whenever [`Handle::attach`] would fail.
    pub async fn inspect_memory(&self, vm: Name, caller: Caller) -> Result<VmMemory, DriverError> {
        self.send_request(|reply| Request::InspectMemory { vm, caller, reply }).await?
    }

    /// Reads the current state.
    ///
    /// # Errors
    /// The agent is stopping.
    pub async fn inspect<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Agent) -> T + Send + 'static,
    ) -> Result<T, DriverError> {
        self.send_request(|reply| {
            Request::Inspect(Box::new(move |agent| {
                let _ = reply.send(read(agent)); // the caller may have left
            }))
        })
        .await
    }

    /// Waits for the driver's end.
    pub async fn ended(&self) {
        self.0.closed().await;
    }

    async fn send_request<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Request,
    ) -> Result<T, DriverError> {
        let (reply, receiver) = oneshot::channel();
        self.0.send(request(reply)).await.map_err(|_| DriverError::Stopping)?;
        receiver.await.map_err(|_| DriverError::Stopping)
    }
}

/// Objects used by the driver.
#[derive(Debug)]
pub struct DriverInputs {
    /// State machine of the protocol, with the records found.
    pub agent: Agent,
    /// The machine.
    pub host: Arc<dyn Host>,
    /// Records of VMs.
    pub records: Records,
    /// Record of the rack.
    pub runtime_dir: RuntimeDir,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Messages for the session.
    pub session_events: mpsc::Receiver<SessionEvent>,
}

/// The driver before it runs.
#[derive(Debug)]
pub struct Driver {
    agent: Agent,
    host: Arc<dyn Host>,
    records: Records,
    runtime_dir: RuntimeDir,
    metrics: Arc<Metrics>,
    began: Instant,
    session_events: mpsc::Receiver<SessionEvent>,
    requests: mpsc::Receiver<Request>,
    outbox: Arc<Outbox>,
    rack: watch::Sender<Option<String>>,
    disconnect: Arc<Notify>,
    /// Performs host calls and returns their results.
    workers: WorkerPool,
    call_results: mpsc::UnboundedReceiver<CallResult>,
    /// Records being written and processes being watched: each ends with an event. At most two per
    /// VM.
    tasks: JoinSet<Event>,
    tickets: u64,
    waiting: BTreeMap<Ticket, (MemoryForm, oneshot::Sender<Result<VmMemory, DriverError>>)>,
    watched_processes: BTreeMap<ReservationId, Process>,
    usage: Arc<UsageTable>,
}

impl Driver {
    /// Creates a driver with its handle and its reports.
    ///
    /// # Errors
    /// The operating system cannot create a thread.
    pub fn new(inputs: DriverInputs) -> std::io::Result<(Self, Handle, Reports)> {
        let (sender, requests) = mpsc::channel(HOST_MEMORY_REQUESTS_QUEUED_MAX);
        let outbox = Arc::new(Outbox::default());
        let (workers, call_results) = WorkerPool::start()?;
        let (rack, rack_receiver) = watch::channel(inputs.agent.rack().map(str::to_owned));
        let disconnect = Arc::new(Notify::new());
        let usage = Arc::new(UsageTable::default());
        let reports = Reports {
            outbox: Arc::clone(&outbox),
            usage: Arc::clone(&usage),
            rack: rack_receiver,
            disconnect: Arc::clone(&disconnect),
        };
        let driver = Self {
            agent: inputs.agent,
            host: inputs.host,
            records: inputs.records,
            runtime_dir: inputs.runtime_dir,
            metrics: inputs.metrics,
            began: Instant::now(),
            session_events: inputs.session_events,
            requests,
            outbox,
            rack,
            disconnect,
            workers,
            call_results,
            tasks: JoinSet::new(),
            tickets: 0,
            waiting: BTreeMap::new(),
            watched_processes: BTreeMap::new(),
            usage,
        };
        Ok((driver, Handle(sender), reports))
    }

    /// Runs until all handles are dropped, or until it is dropped. Nothing is released at the end:
    /// guests keep running.
    pub async fn run(mut self) {
        self.perform_all();
        loop {
            let tick = self.agent.next_wakeup().map(|at| self.began + at.as_duration());
            tokio::select! {
                event = self.session_events.recv() => match event {
                    Some(event) => self.handle_session_event(event),
                    None => return,
                },
                request = self.requests.recv() => match request {
                    Some(request) => self.handle_request(request),
                    None => return,
                },
                Some(result) = self.call_results.recv() => self.handle_call_result(result),
                Some(result) = self.tasks.join_next() => self.handle_task_result(result),
                () = sleep_until(tick) => self.handle(Event::Tick),
            }
            self.drain_ready_events();
            self.perform_all();
        }
    }

    fn drain_ready_events(&mut self) {
        for _ in 0..EVENTS_PER_BATCH_MAX {
            if let Ok(result) = self.call_results.try_recv() {
                self.handle_call_result(result);
            } else if let Some(result) = self.tasks.try_join_next() {
                self.handle_task_result(result);
            } else if let Ok(request) = self.requests.try_recv() {
                self.handle_request(request);
            } else {
                return;
            }
        }
    }

    fn handle(&mut self, event: Event) {
        let now = Ns::from(self.began.elapsed());
        self.agent.handle(now, event);
    }

    fn handle_session_event(&mut self, event: SessionEvent) {
        self.handle(match event {
            SessionEvent::Connected { rack, lease_ttl } => {
                tracing::info!(rack, lease_ttl = %lease_ttl, "welcomed by the manager");
                Event::SessionUp { rack, lease_ttl }
            }
            SessionEvent::DesiredState(rack, want) => Event::DesiredState { rack, desired: want },
            SessionEvent::ReportRequested => Event::ReportRequested,
            SessionEvent::Disconnected => Event::SessionDown,
        });
        self.metrics.connected.set(i64::from(self.agent.is_connected()));
    }

    /// A call that panicked leaves a slice in an unknown state: restart from the records.
    fn handle_call_result(&mut self, result: CallResult) {
        match result {
            Ok(event) => self.handle(event),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    fn handle_task_result(&mut self, result: Result<Event, tokio::task::JoinError>) {
        match result {
            Ok(event) => {
                if let Event::ProcessGone { reservation } = event {
                    self.measure_ended_vm(reservation);
                }
                self.handle(event);
            }
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => {} // the runtime is ending
        }
    }

    /// Measures a VM whose process has just ended: its files still contain everything that its
    /// guest touched.
    fn measure_ended_vm(&self, reservation: ReservationId) {
        if let Some(vm) = self.agent.live_vm(reservation) {
            self.usage.record(reservation, self.host.usage(reservation, &vm));
        }
    }

    fn handle_request(&mut self, request: Request) {
        match request {
            Request::Attach { vm, caller, form, reply } => {
                self.tickets += 1;
                let ticket = Ticket(self.tickets);
                self.waiting.insert(ticket, (form, reply));
                self.handle(Event::Attach { ticket, vm, caller });
            }
            Request::InspectMemory { vm, caller, reply } => {
                let (pid, uid) = (caller.process.pid, caller.uid);
                let record = self.agent.preview(&vm, caller).map_err(DriverError::from);
                match &record {
                    Ok(_) => tracing::info!(vm = %vm, pid, %uid, "memory inspected"),
                    Err(why) => tracing::info!(pid, %uid, %why, "inspection rejected"),
                }
                let _ = reply.send(record.and_then(|record| self.memory(&record, MemoryForm::SlicePaths))); // as above
            }
            Request::Inspect(inspect) => inspect(&self.agent),
        }
    }

    fn perform_all(&mut self) {
        while let Some(effect) = self.agent.poll_effect() {
            self.perform(effect);
        }
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Online { holding, handle, check_zero } => self.online(holding, handle, check_zero),
            Effect::Offline { holding, handle, verify } => self.offline(holding, handle, verify),
            Effect::Scrub { holding, handle } => self.scrub(holding, handle),
            Effect::CloseOrphan { place } => self.close_orphan(place),
            Effect::Record(record) => self.record(record),
            Effect::DeleteRecord(reservation) => self.delete_record(reservation),
            Effect::PassMemory { ticket, record } => self.pass_memory(ticket, &record),
            Effect::Refuse { ticket, why } => self.refuse(ticket, why),
            Effect::Watch { reservation, process } => self.watch(reservation, process),
            Effect::Kill(reservation) => self.kill(reservation),
            Effect::FreeLocal(reservation) => self.free_local(reservation),
            Effect::SendReport(report) => self.outbox.put(report),
            Effect::RecordRack { rack } => self.store_rack(rack),
            Effect::Disconnect(other) => self.disconnect(&other),
            Effect::CommandRejected(number, why) => self.on_command_rejected(number, &why),
        }
    }

    fn pass_memory(&mut self, ticket: Ticket, record: &VmRecord) {
        let Some((form, reply)) = self.waiting.remove(&ticket) else { return };
        let memory = self.memory(record, form);
        let (vm, pid, slices) = (record.vm.as_str(), record.process.pid, record.slices.len());
        match &memory {
            Ok(_) => tracing::info!(vm, pid, slices, "memory passed"),
            Err(error) => tracing::error!(vm, pid, error = units::chain(error), "memory not passed"),
        }
        let _ = reply.send(memory); // the process may have ended, which is detected separately
    }

    fn memory(&self, record: &VmRecord, form: MemoryForm) -> Result<VmMemory, DriverError> {
        let regions = self.host.memory(record, form).map_err(DriverError::Host)?;
        Ok(VmMemory { regions, pinned: record.pinned })
    }

    fn refuse(&mut self, ticket: Ticket, why: Refusal) {
        if let Some((_, reply)) = self.waiting.remove(&ticket) {
            tracing::info!(why = %why, "attach refused");
            let _ = reply.send(Err(why.into())); // the caller may have left
        }
    }

    fn store_rack(&mut self, rack: String) {
        if let Err(error) = self.runtime_dir.store_rack(&rack) {
            tracing::error!(rack, error = units::chain(&error), "rack not stored");
        }
        self.rack.send_replace(Some(rack));
    }

    fn disconnect(&self, other: &OtherRack) {
        tracing::error!(error = %other, "manager belongs to another rack");
        self.disconnect.notify_one();
    }

    fn on_command_rejected(&self, number: DesiredVersion, why: &CommandRejected) {
        self.metrics.commands_rejected.inc();
        tracing::info!(desired_version = %number, why = %why, "desired state rejected");
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Delay between attempts to watch a process.
pub(crate) const PROCESS_WATCH_RETRY: Duration = units::limits::HOST_RETRY.as_duration();
