//! Driver of the agent: the task that owns the state machine of `pool::agent`, passes events to it
//! and performs its effects. Long work runs in other threads and tasks, and its result arrives as
//! an event.

mod calls;
mod rehome;
#[cfg(test)]
mod tests;
mod worker_pool;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use pool::agent::{
    Agent, Caller, CommandRejection, Effect, Event, OtherRack, Process, Refusal, Ticket, VmRecord,
};
use service_files::log_limit::{LogLimit, RejectionLog};
use tokio::{
    sync::{Notify, mpsc, oneshot, watch},
    task::JoinSet,
    time::Instant,
};
use units::limits::HOST_MEMORY_REQUESTS_QUEUED_MAX;
use units::{DesiredVersion, Name, Ns, ReservationId};

use self::worker_pool::{CallResult, WorkerPool};
use crate::{
    host::{Host, HostError, MemoryForm, MemoryRegion, Usage},
    metrics::Metrics,
    outbox::ReportOutbox,
    records::Records,
    runtime_dir::RuntimeDir,
    session_channel::{ReportStream, SessionEvent},
    usage_table::UsageTable,
};

/// Maximum number of events applied before effects are performed, so that many events result in one
/// report.
const EVENTS_PER_BATCH_MAX: usize = 256;

/// Closure that reads the current state of the agent.
type InspectFn = Box<dyn FnOnce(&Agent) + Send>;

/// Request from another task to the driver.
enum Request {
    Attach { vm: Name, caller: Caller, form: MemoryForm, reply: MemoryReply },
    InspectMemory { vm: Name, caller: Caller, reply: MemoryReply },
    Inspect(InspectFn),
}

/// Memory of a VM for its VMM.
#[derive(Clone, Debug)]
pub struct VmMemory {
    /// Regions of the memory: local memory first, then slices in ascending order.
    pub regions: Vec<MemoryRegion>,
    /// Whether the VM is pinned, so that its pages must not be migrated.
    pub pinned: bool,
}

/// Error returned by the driver.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The agent refuses to pass the VM's memory to the caller.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The host failed to provide the memory.
    #[error("the VM's memory is not available")]
    Host(#[source] HostError),
    /// The agent is stopping.
    #[error("the agent is stopping")]
    Stopping,
}

/// Handle by which other tasks send requests to the driver.
#[derive(Clone, Debug)]
pub struct Handle(mpsc::Sender<Request>);

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Request")
    }
}

impl Handle {
    /// Attaches the caller's process to a VM, and returns the VM's memory.
    ///
    /// # Errors
    /// [`DriverError::Refused`], [`DriverError::Host`] or [`DriverError::Stopping`].
    pub async fn attach(&self, vm: Name, caller: Caller, form: MemoryForm) -> Result<VmMemory, DriverError> {
        self.send_request(|reply| Request::Attach { vm, caller, form, reply }).await?
    }

    /// Returns the memory of a VM without attaching the caller's process.
    ///
    /// # Errors
    /// The errors of [`Handle::attach`].
    pub async fn inspect_memory(&self, vm: Name, caller: Caller) -> Result<VmMemory, DriverError> {
        self.send_request(|reply| Request::InspectMemory { vm, caller, reply }).await?
    }

    /// Calls `read` with the current state of the agent, and returns the result.
    ///
    /// # Errors
    /// [`DriverError::Stopping`].
    pub async fn inspect<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Agent) -> T + Send + 'static,
    ) -> Result<T, DriverError> {
        self.send_request(|reply| {
            Request::Inspect(Box::new(move |agent| {
                let _ = reply.send(read(agent)); // the caller may no longer wait
            }))
        })
        .await
    }

    /// Waits until the driver has ended.
    pub async fn wait_for_driver_end(&self) {
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

/// Objects that the driver needs.
#[derive(Debug)]
pub struct DriverInputs {
    /// State machine of the agent, with the recovered VMs.
    pub agent: Agent,
    /// Operations on the memory of this machine.
    pub host: Arc<dyn Host>,
    /// Store of the VM records.
    pub records: Records,
    /// Directory in which the rack is stored.
    pub runtime_dir: RuntimeDir,
    /// Metrics that the driver updates.
    pub metrics: Arc<Metrics>,
    /// Events from the session with the manager.
    pub session_events: mpsc::Receiver<SessionEvent>,
}

/// Sender of the reply to a request for a VM's memory.
type MemoryReply = oneshot::Sender<Result<VmMemory, DriverError>>;

/// Attach request that waits for a decision of the state machine.
#[derive(Debug)]
struct WaitingAttach {
    caller: Caller,
    reservation: ReservationId,
    /// Memory that the process receives if the state machine accepts the request.
    memory: VmMemory,
    reply: MemoryReply,
}

/// Operation that waits until the current write of a VM's record ends. A later operation replaces a
/// waiting one.
#[derive(Debug)]
enum RecordOperation {
    /// Write this record.
    Write(VmRecord),
    /// Delete the record.
    Delete,
}

/// Driver of the agent; [`Driver::run`] runs it.
#[derive(Debug)]
pub struct Driver {
    agent: Agent,
    host: Arc<dyn Host>,
    records: Records,
    runtime_dir: RuntimeDir,
    metrics: Arc<Metrics>,
    started: Instant,
    session_events: mpsc::Receiver<SessionEvent>,
    requests: mpsc::Receiver<Request>,
    outbox: Arc<ReportOutbox>,
    rack: watch::Sender<Option<String>>,
    disconnect: Arc<Notify>,
    /// Threads that perform host calls.
    workers: WorkerPool,
    call_results: mpsc::UnboundedReceiver<CallResult>,
    /// Tasks that write a record, watch a process or move pool memory, at most three per VM. Each ends
    /// with an event.
    tasks: JoinSet<Event>,
    /// Number of the last ticket.
    last_ticket: u64,
    /// Attach requests that wait for a decision of the state machine.
    waiting: BTreeMap<Ticket, WaitingAttach>,
    /// Processes of VMs that are watched until their end.
    watched_processes: BTreeMap<ReservationId, Process>,
    /// Records that are being written, each with the operation that waits for the end of the write,
    /// if any.
    record_writes: BTreeMap<ReservationId, Option<RecordOperation>>,
    /// Moves of pool memory in progress, each with the switch that cancels it.
    rehomes: BTreeMap<ReservationId, watch::Sender<bool>>,
    usage: Arc<UsageTable>,
    rejections: RejectionLog,
    /// Limit on log lines about requests that VMs may repeat.
    request_lines: LogLimit,
    /// Limit on log lines about failed host calls, which are retried.
    failure_lines: Arc<LogLimit>,
}

impl Driver {
    /// Creates a driver, a handle for requests, and the reports for the session.
    ///
    /// # Errors
    /// A thread cannot be created.
    pub fn new(inputs: DriverInputs) -> std::io::Result<(Self, Handle, ReportStream)> {
        let (sender, requests) = mpsc::channel(HOST_MEMORY_REQUESTS_QUEUED_MAX);
        let outbox = Arc::new(ReportOutbox::default());
        let (workers, call_results) = WorkerPool::start()?;
        let (rack, rack_receiver) = watch::channel(inputs.agent.rack().map(str::to_owned));
        let disconnect = Arc::new(Notify::new());
        let usage = Arc::new(UsageTable::default());
        let reports = ReportStream {
            outbox: Arc::clone(&outbox),
            usage: Arc::clone(&usage),
            samples: Arc::default(),
            tiering: Arc::default(),
            evictions: Arc::default(),
            soft_memory: Arc::default(),
            rack: rack_receiver,
            disconnect: Arc::clone(&disconnect),
        };
        let driver = Self {
            agent: inputs.agent,
            host: inputs.host,
            records: inputs.records,
            runtime_dir: inputs.runtime_dir,
            metrics: inputs.metrics,
            started: Instant::now(),
            session_events: inputs.session_events,
            requests,
            outbox,
            rack,
            disconnect,
            workers,
            call_results,
            tasks: JoinSet::new(),
            last_ticket: 0,
            waiting: BTreeMap::new(),
            watched_processes: BTreeMap::new(),
            record_writes: BTreeMap::new(),
            rehomes: BTreeMap::new(),
            usage,
            rejections: RejectionLog::default(),
            request_lines: LogLimit::default(),
            failure_lines: Arc::default(),
        };
        Ok((driver, Handle(sender), reports))
    }

    /// Runs the driver until all handles or the session's sender are dropped. At the end no memory
    /// is released, and guests keep running.
    pub async fn run(mut self) {
        self.perform_effects();
        loop {
            let tick = self.agent.next_wakeup().map(|at| self.started + at.as_duration());
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
            self.perform_effects();
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
        let now = Ns::from(self.started.elapsed());
        self.agent.handle(now, event);
    }

    fn handle_session_event(&mut self, event: SessionEvent) {
        self.handle(match event {
            SessionEvent::Connected { rack, lease_ttl } => {
                tracing::info!(rack, lease_ttl = %lease_ttl, "connected to the manager");
                Event::SessionUp { rack, lease_ttl }
            }
            SessionEvent::DesiredState(rack, desired) => Event::DesiredState { rack, desired },
            SessionEvent::ReportRequested => Event::ReportRequested,
            SessionEvent::Disconnected => Event::SessionDown,
        });
        self.metrics.connected.set(i64::from(self.agent.is_connected()));
    }

    /// Passes the result of a host call to the state machine. A panic in a call ends the agent,
    /// because the slice is in an unknown state; the next agent recovers from the records.
    fn handle_call_result(&mut self, result: CallResult) {
        match result {
            Ok(event) => self.handle(event),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    fn handle_task_result(&mut self, result: Result<Event, tokio::task::JoinError>) {
        match result {
            Ok(event) => {
                match event {
                    Event::ProcessGone { reservation } => self.measure_ended_vm(reservation),
                    Event::Recorded { reservation, .. } if self.continue_after_write(reservation) => return,
                    Event::RehomeEnded { reservation, .. } => drop(self.rehomes.remove(&reservation)),
                    _ => {}
                }
                self.handle(event);
            }
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => {} // cancelled, because the runtime ends
        }
    }

    /// Measures the memory of a VM whose process has just ended. The memory files still contain all
    /// memory that the guest touched. Memory that the VMM allocated itself keeps its last measurement.
    /// During a move, the files contain pages and their copies, so the last measurement remains.
    fn measure_ended_vm(&self, reservation: ReservationId) {
        if self.agent.is_rehoming(reservation) {
            return self.usage.record_end(reservation, Usage::default());
        }
        if let Some(vm) = self.agent.live_vm(reservation) {
            self.usage.record_end(reservation, self.host.usage(reservation, &vm));
        }
    }

    fn handle_request(&mut self, request: Request) {
        match request {
            Request::Attach { vm, caller, form, reply } => self.attach(vm, caller, form, reply),
            Request::InspectMemory { vm, caller, reply } => {
                let record = match self.agent.preview(&vm, caller.clone()) {
                    Ok(record) => record,
                    Err(why) => return self.refuse(&caller, reply, why),
                };
                let (pid, uid) = (caller.process.pid, caller.uid);
                if let Some(suppressed) = self.request_lines.count_line() {
                    tracing::info!(vm = %vm, pid, %uid, suppressed, "memory of VM inspected");
                }
                let _ = reply.send(self.memory(&record, MemoryForm::SlicePaths)); // the caller may no longer wait
            }
            Request::Inspect(inspect) => inspect(&self.agent),
        }
    }

    fn perform_effects(&mut self) {
        while let Some(effect) = self.agent.poll_effect() {
            self.perform(effect);
        }
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Online { holding, handle, check_zero } => self.online(holding, handle, check_zero),
            Effect::Offline { holding, handle, verify } => self.offline(holding, handle, verify),
            Effect::Scrub { holding, handle } => self.scrub(holding, handle),
            Effect::CloseOrphan { place } => self.close_orphaned_slice(place),
            Effect::Record(record) => self.record(record),
            Effect::DeleteRecord(reservation) => self.delete_record(reservation),
            Effect::PassMemory { ticket, record } => self.pass_memory(ticket, &record),
            Effect::Refuse { ticket, why } => self.refuse_request(ticket, why),
            Effect::Watch { reservation, process } => self.watch(reservation, process),
            Effect::Rehome { reservation, is_resumed } => self.start_rehome(reservation, is_resumed),
            Effect::CancelRehome { reservation, is_resumed } => self.cancel_rehome(reservation, is_resumed),
            Effect::Kill(reservation) => self.kill(reservation),
            Effect::FreeLocal(reservation) => self.free_local_memory(reservation),
            Effect::SendReport(report) => self.outbox.put(report),
            Effect::RecordRack { rack } => self.store_rack(rack),
            Effect::Disconnect(other) => self.disconnect(&other),
            Effect::CommandRejection(number, why) => self.on_command_rejected(number, &why),
        }
    }

    /// Prepares the memory of a VM, and then requests the decision of the state machine. A process
    /// for which no memory can be prepared is not recorded: otherwise its end would end the VM.
    fn attach(&mut self, vm: Name, caller: Caller, form: MemoryForm, reply: MemoryReply) {
        let (reservation, memory) = match self.agent.preview(&vm, caller.clone()) {
            Ok(record) => (record.reservation, self.memory(&record, form)),
            Err(why) => return self.refuse(&caller, reply, why),
        };
        match memory {
            Ok(memory) => {
                self.last_ticket += 1;
                let ticket = Ticket(self.last_ticket);
                self.waiting
                    .insert(ticket, WaitingAttach { caller: caller.clone(), reservation, memory, reply });
                self.handle(Event::Attach { ticket, vm, caller });
            }
            Err(error) => {
                let (vm, pid) = (vm.as_str(), caller.process.pid);
                tracing::error!(vm, pid, error = units::chain(&error), "cannot pass memory to VM");
                self.free_unused_memory(reservation);
                let _ = reply.send(Err(error)); // the process may have ended
            }
        }
    }

    /// Releases the local memory that was prepared for a VM, unless a process has it or will get it.
    fn free_unused_memory(&mut self, reservation: ReservationId) {
        let is_awaited = self.waiting.values().any(|waiting| waiting.reservation == reservation);
        if !is_awaited && self.agent.live_vm(reservation).is_none() {
            self.free_local_memory(reservation);
        }
    }

    fn pass_memory(&mut self, ticket: Ticket, record: &VmRecord) {
        let Some(WaitingAttach { memory, reply, .. }) = self.waiting.remove(&ticket) else { return };
        let (vm, pid, slices) = (record.vm.as_str(), record.process.pid, record.slices.len());
        if let Some(suppressed) = self.request_lines.count_line() {
            tracing::info!(vm, pid, slices, suppressed, "memory passed to VM");
        }
        let _ = reply.send(Ok(memory)); // the process may have ended; its task reports this
    }

    fn memory(&self, record: &VmRecord, form: MemoryForm) -> Result<VmMemory, DriverError> {
        let regions = self.host.memory(record, form).map_err(DriverError::Host)?;
        Ok(VmMemory { regions, pinned: record.pinned })
    }

    fn refuse_request(&mut self, ticket: Ticket, why: Refusal) {
        if let Some(WaitingAttach { caller, reservation, reply, .. }) = self.waiting.remove(&ticket) {
            self.free_unused_memory(reservation);
            self.refuse(&caller, reply, why);
        }
    }

    fn refuse(&self, caller: &Caller, reply: MemoryReply, why: Refusal) {
        let (pid, uid) = (caller.process.pid, caller.uid);
        self.rejections.log(&format_args!("process {pid} of user {uid}"), &why);
        let _ = reply.send(Err(why.into())); // the caller may no longer wait
    }

    fn store_rack(&mut self, rack: String) {
        if let Err(error) = self.runtime_dir.store_rack(&rack) {
            tracing::error!(rack, error = units::chain(&error), "cannot store the rack of this host");
        }
        self.rack.send_replace(Some(rack));
    }

    fn disconnect(&self, other: &OtherRack) {
        tracing::error!(error = %other, "disconnecting: the manager belongs to another rack");
        self.disconnect.notify_one();
    }

    fn on_command_rejected(&self, number: DesiredVersion, why: &CommandRejection) {
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

/// Delay before a failed attempt to watch a process is repeated.
pub(crate) const PROCESS_WATCH_RETRY_DELAY: Duration = units::limits::HOST_CALL_RETRY_DELAY.as_duration();
