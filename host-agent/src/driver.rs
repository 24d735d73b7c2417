//! Task that owns the agent's state machine. It passes events to it and performs its effects; it
//! decides nothing. Long work runs beside it and returns as an event.

mod calls;
mod crew;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use pool::agent::{Agent, Bounce, Caller, Effect, Event, OtherRack, Process, Refusal, Ticket, VmRecord};
use tokio::{
    sync::{Notify, mpsc, oneshot, watch},
    task::JoinSet,
    time::Instant,
};
use units::limits::HOST_MEMORY_REQUESTS_QUEUED_MAX;
use units::{DesiredVersion, Name, Ns, ReservationId};

use self::crew::{Crew, Made};
use crate::{
    host::{Form, Host, HostError, Part},
    metrics::Metrics,
    outbox::Outbox,
    records::Records,
    runtime_dir::RuntimeDir,
    session::Heard,
    usage::UsageBook,
};

/// Events applied before effects are performed, so that many share one report.
const EVENTS_AT_ONCE_MAX: usize = 256;

/// Question about the current state.
type InspectFn = Box<dyn FnOnce(&Agent) + Send>;

/// Request of other tasks to the driver.
enum Request {
    Attach { vm: Name, caller: Caller, form: Form, reply: oneshot::Sender<Result<Handed, Asked>> },
    Show { vm: Name, caller: Caller, reply: oneshot::Sender<Result<Handed, Asked>> },
    Inspect(InspectFn),
}

/// Memory of a VM.
#[derive(Clone, Debug)]
pub struct Handed {
    /// Local memory first, then slices in order.
    pub parts: Vec<Part>,
    /// Pages must not be migrated.
    pub pinned: bool,
}

/// Error returned by the driver.
#[derive(Debug, thiserror::Error)]
pub enum Asked {
    /// The VM's memory cannot be passed.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The machine failed.
    #[error("its memory cannot be had")]
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
    /// [`Asked`].
    pub async fn attach(&self, vm: Name, caller: Caller, form: Form) -> Result<Handed, Asked> {
        self.ask(|reply| Request::Attach { vm, caller, form, reply }).await?
    }

    /// Returns the memory of a VM without attaching the process.
    ///
    /// # Errors
    /// [`Asked`], whenever [`Handle::attach`] would fail.
    pub async fn show(&self, vm: Name, caller: Caller) -> Result<Handed, Asked> {
        self.ask(|reply| Request::Show { vm, caller, reply }).await?
    }

    /// Reads the current state.
    ///
    /// # Errors
    /// The agent is stopping.
    pub async fn look<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Agent) -> T + Send + 'static,
    ) -> Result<T, Asked> {
        self.ask(|reply| {
            Request::Inspect(Box::new(move |agent| {
                let _ = reply.send(question(agent)); // the caller may have left
            }))
        })
        .await
    }

    /// Waits for the driver's end.
    pub async fn ended(&self) {
        self.0.closed().await;
    }

    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> Result<T, Asked> {
        let (reply, answer) = oneshot::channel();
        self.0.send(request(reply)).await.map_err(|_| Asked::Stopping)?;
        answer.await.map_err(|_| Asked::Stopping)
    }
}

/// Objects used by the driver.
#[derive(Debug)]
pub struct Start {
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
    pub heard: mpsc::Receiver<Heard>,
}

/// Messages of the session.
#[derive(Clone, Debug)]
pub struct Reports {
    /// Reports.
    pub have: Arc<Outbox>,
    /// Touched memory of each VM.
    pub usage: Arc<UsageBook>,
    /// Rack that this host serves.
    pub rack: watch::Receiver<Option<String>>,
    /// The manager is of another rack.
    pub hang_up: Arc<Notify>,
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
    heard: mpsc::Receiver<Heard>,
    requests: mpsc::Receiver<Request>,
    have: Arc<Outbox>,
    rack: watch::Sender<Option<String>>,
    hang_up: Arc<Notify>,
    /// Performs host calls and returns their results.
    crew: Crew,
    made: mpsc::UnboundedReceiver<Made>,
    /// Records being written and processes being watched: each ends with an event. At most two per
    /// VM.
    tasks: JoinSet<Event>,
    tickets: u64,
    waiting: BTreeMap<Ticket, (Form, oneshot::Sender<Result<Handed, Asked>>)>,
    watched: BTreeMap<ReservationId, Process>,
    usage: Arc<UsageBook>,
}

impl Driver {
    /// Creates a driver with its handle and its reports.
    ///
    /// # Errors
    /// The operating system cannot create a thread.
    pub fn new(start: Start) -> std::io::Result<(Self, Handle, Reports)> {
        let (sender, requests) = mpsc::channel(HOST_MEMORY_REQUESTS_QUEUED_MAX);
        let have = Arc::new(Outbox::default());
        let (crew, made) = Crew::start()?;
        let (rack, rack_seen) = watch::channel(start.agent.rack().map(str::to_owned));
        let hang_up = Arc::new(Notify::new());
        let usage = Arc::new(UsageBook::default());
        let reports = Reports {
            have: Arc::clone(&have),
            usage: Arc::clone(&usage),
            rack: rack_seen,
            hang_up: Arc::clone(&hang_up),
        };
        let driver = Self {
            agent: start.agent,
            host: start.host,
            records: start.records,
            runtime_dir: start.runtime_dir,
            metrics: start.metrics,
            began: Instant::now(),
            heard: start.heard,
            requests,
            have,
            rack,
            hang_up,
            crew,
            made,
            tasks: JoinSet::new(),
            tickets: 0,
            waiting: BTreeMap::new(),
            watched: BTreeMap::new(),
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
                heard = self.heard.recv() => match heard {
                    Some(heard) => self.hear(heard),
                    None => return,
                },
                request = self.requests.recv() => match request {
                    Some(request) => self.answer(request),
                    None => return,
                },
                Some(made) = self.made.recv() => self.take_made(made),
                Some(done) = self.tasks.join_next() => self.finish(done),
                () = sleep_until(tick) => self.handle(Event::Tick),
            }
            self.take_what_is_there();
            self.perform_all();
        }
    }

    fn take_what_is_there(&mut self) {
        for _ in 0..EVENTS_AT_ONCE_MAX {
            if let Ok(made) = self.made.try_recv() {
                self.take_made(made);
            } else if let Some(done) = self.tasks.try_join_next() {
                self.finish(done);
            } else if let Ok(request) = self.requests.try_recv() {
                self.answer(request);
            } else {
                return;
            }
        }
    }

    fn handle(&mut self, event: Event) {
        let now = Ns::from(self.began.elapsed());
        self.agent.handle(now, event);
    }

    fn hear(&mut self, heard: Heard) {
        self.handle(match heard {
            Heard::Up { rack, lease_ttl } => {
                tracing::info!(rack, lease_ttl = %lease_ttl, "welcomed by the manager");
                Event::SessionUp { rack, lease_ttl }
            }
            Heard::Want(rack, want) => Event::Want { rack, want },
            Heard::ReportRequested => Event::ReportRequested,
            Heard::Down => Event::SessionDown,
        });
        self.metrics.connected.set(i64::from(self.agent.is_heard()));
    }

    /// A call that panicked leaves a slice in an unknown state: restart from the records.
    fn take_made(&mut self, made: Made) {
        match made {
            Ok(event) => self.handle(event),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    fn finish(&mut self, done: Result<Event, tokio::task::JoinError>) {
        match done {
            Ok(event) => {
                if let Event::ProcessGone { reservation } = event {
                    self.measure(reservation);
                }
                self.handle(event);
            }
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => {} // the runtime is ending
        }
    }

    /// Measures a VM whose process has just ended: its files still contain everything that its
    /// guest touched.
    fn measure(&self, reservation: ReservationId) {
        if let Some(vm) = self.agent.live_vm(reservation) {
            self.usage.note(reservation, self.host.usage(reservation, &vm));
        }
    }

    fn answer(&mut self, request: Request) {
        match request {
            Request::Attach { vm, caller, form, reply } => {
                self.tickets += 1;
                let ticket = Ticket(self.tickets);
                self.waiting.insert(ticket, (form, reply));
                self.handle(Event::Attach { ticket, vm, caller });
            }
            Request::Show { vm, caller, reply } => {
                let (pid, uid) = (caller.process.pid, caller.uid);
                let shown = self.agent.look(&vm, caller).map_err(Asked::from);
                match &shown {
                    Ok(_) => tracing::info!(vm = %vm, pid, %uid, "memory looked at"),
                    Err(why) => tracing::info!(pid, %uid, %why, "look refused"),
                }
                let _ = reply.send(shown.and_then(|record| self.memory(&record, Form::Shown))); // as above
            }
            Request::Inspect(question) => question(&self.agent),
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
            Effect::Clear { place } => self.clear(place),
            Effect::Record(record) => self.record(record),
            Effect::Forget(reservation) => self.forget(reservation),
            Effect::HandOut { ticket, record } => self.hand_out(ticket, &record),
            Effect::Refuse { ticket, why } => self.refuse(ticket, why),
            Effect::Watch { reservation, process } => self.watch(reservation, process),
            Effect::Kill(reservation) => self.kill(reservation),
            Effect::FreeLocal(reservation) => self.free_local(reservation),
            Effect::SendHave(have) => self.have.put(have),
            Effect::Remember { rack } => self.remember(rack),
            Effect::HangUp(other) => self.hang_up(&other),
            Effect::Bounced(number, why) => self.bounced(number, &why),
        }
    }

    fn hand_out(&mut self, ticket: Ticket, record: &VmRecord) {
        let Some((form, reply)) = self.waiting.remove(&ticket) else { return };
        let handed = self.memory(record, form);
        let (vm, pid, slices) = (record.vm.as_str(), record.process.pid, record.slices.len());
        match &handed {
            Ok(_) => tracing::info!(vm, pid, slices, "memory handed out"),
            Err(error) => tracing::error!(vm, pid, error = units::chain(error), "memory not handed out"),
        }
        let _ = reply.send(handed); // the process may have ended, which is detected separately
    }

    fn memory(&self, record: &VmRecord, form: Form) -> Result<Handed, Asked> {
        let parts = self.host.memory(record, form).map_err(Asked::Host)?;
        Ok(Handed { parts, pinned: record.pinned })
    }

    fn refuse(&mut self, ticket: Ticket, why: Refusal) {
        if let Some((_, reply)) = self.waiting.remove(&ticket) {
            tracing::info!(why = %why, "attach refused");
            let _ = reply.send(Err(why.into())); // the caller may have left
        }
    }

    fn remember(&mut self, rack: String) {
        if let Err(error) = self.runtime_dir.remember_rack(&rack) {
            tracing::error!(rack, error = units::chain(&error), "rack not remembered");
        }
        self.rack.send_replace(Some(rack));
    }

    fn hang_up(&self, other: &OtherRack) {
        tracing::error!(error = %other, "manager is not ours");
        self.hang_up.notify_one();
    }

    fn bounced(&self, number: DesiredVersion, why: &Bounce) {
        self.metrics.bounced.inc();
        tracing::info!(order = %number, why = %why, "order bounced");
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Delay between attempts to watch a process.
pub(crate) const WATCH_AGAIN_AFTER: Duration = units::limits::HOST_RETRY.as_duration();
