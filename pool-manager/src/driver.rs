//! The one task that owns the ledger. It feeds events to the protocol machine and performs the machine's effects; it
//! decides nothing itself.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, mpsc as blocking},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use pool::{
    audit::Decision,
    denied::Denied,
    ledger::When,
    manager::{
        Answer, Ask, Closed, DeviceCall, Effect, Event, Manager, Published, SessionId, Settings, Token,
    },
    protocol::{Have, Hello, Want},
};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use units::limits::{EXPLAIN_ENTRIES_MAX, REQUESTS_QUEUED_MAX, WATCH_EVENTS_BEHIND_MAX};
use units::{EmcId, HostId, Ns, UnixMs};

use crate::{
    device::Driver,
    emc::{self, EmcPlace},
    keeper::{self, Job},
    metrics::Metrics,
    records::{LoadError, Loaded},
    store::Store,
};

/// Events taken in before effects are performed.
const EVENTS_AT_ONCE_MAX: usize = 256;

/// A question about what is known now.
type Look = Box<dyn FnOnce(&Manager, When) + Send>;

/// What other tasks ask of the driver.
enum Request {
    Ask(Ask, oneshot::Sender<Result<Answer, Denied>>),
    Look(Look),
    Set(Settings),
    AgentUp(HostId, Hello, mpsc::Sender<ToSession>, oneshot::Sender<SessionId>),
    AgentHave(SessionId, Have),
    AgentDown(SessionId),
    Explain(String, oneshot::Sender<Result<Vec<(u64, Decision)>, LoadError>>),
}

/// What the driver tells one agent's connection.
#[derive(Debug)]
pub enum ToSession {
    /// An order to pass on.
    Order(Want),
    /// The connection is over.
    Close(Closed),
}

/// Why the driver gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum Asked {
    /// The ledger refuses.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// Too many requests are waiting.
    #[error("{REQUESTS_QUEUED_MAX} requests are waiting already: try again soon")]
    Overloaded,
    /// The manager is ending.
    #[error("the manager is stopping")]
    Stopping,
    /// Decisions could not be read.
    #[error("decisions cannot be read")]
    Unreadable(#[source] LoadError),
}

/// A way to the driver; cheap to clone.
#[derive(Clone)]
pub struct Handle {
    requests: mpsc::Sender<Request>,
    published: broadcast::Sender<Arc<Published>>,
    changed: watch::Receiver<u64>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}

impl Handle {
    fn send(&self, request: Request) -> Result<(), Asked> {
        self.requests.try_send(request).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Asked::Overloaded,
            mpsc::error::TrySendError::Closed(_) => Asked::Stopping,
        })
    }

    /// Asks the ledger; the answer is durable.
    ///
    /// # Errors
    /// The ledger refuses, too many wait, or the manager stops.
    pub async fn ask(&self, ask: Ask) -> Result<Answer, Asked> {
        let (reply, answer) = oneshot::channel();
        self.send(Request::Ask(ask, reply))?;
        Ok(answer.await.map_err(|_| Asked::Stopping)??)
    }

    /// Looks at what is durable and known now.
    ///
    /// # Errors
    /// Too many wait, or the manager stops.
    pub async fn look<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Manager, When) -> T + Send + 'static,
    ) -> Result<T, Asked> {
        let (reply, answer) = oneshot::channel();
        let look = Box::new(move |manager: &Manager, when: When| drop(reply.send(question(manager, when))));
        self.send(Request::Look(look))?;
        answer.await.map_err(|_| Asked::Stopping)
    }

    /// Every remembered decision about a subject, the newest last.
    ///
    /// # Errors
    /// Decisions cannot be read, too many wait, or the manager stops.
    pub async fn explain(&self, subject: String) -> Result<Vec<(u64, Decision)>, Asked> {
        let (reply, answer) = oneshot::channel();
        self.send(Request::Explain(subject, reply))?;
        answer.await.map_err(|_| Asked::Stopping)?.map_err(Asked::Unreadable)
    }

    /// Changes what an operator may set.
    ///
    /// # Errors
    /// The manager stops.
    pub async fn set(&self, settings: Settings) -> Result<(), Asked> {
        self.requests.send(Request::Set(settings)).await.map_err(|_| Asked::Stopping)
    }

    /// An agent connected.
    ///
    /// # Errors
    /// The manager stops.
    pub async fn agent_up(
        &self,
        host: HostId,
        hello: Hello,
        outbox: mpsc::Sender<ToSession>,
    ) -> Result<SessionId, Asked> {
        let (reply, answer) = oneshot::channel();
        let request = Request::AgentUp(host, hello, outbox, reply);
        self.requests.send(request).await.map_err(|_| Asked::Stopping)?;
        answer.await.map_err(|_| Asked::Stopping)
    }

    /// An agent reports.
    ///
    /// # Errors
    /// The manager stops.
    pub async fn agent_have(&self, session: SessionId, have: Have) -> Result<(), Asked> {
        self.requests.send(Request::AgentHave(session, have)).await.map_err(|_| Asked::Stopping)
    }

    /// An agent's connection is gone.
    pub async fn agent_down(&self, session: SessionId) {
        let _ = self.requests.send(Request::AgentDown(session)).await; // a stopping manager forgets it anyway
    }

    /// Durable changes from now on.
    pub fn changes(&self) -> broadcast::Receiver<Arc<Published>> {
        self.published.subscribe()
    }

    /// Wakes whenever what [`Handle::look`] shows may have changed.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changed.clone()
    }

    /// For wrapping a question into a set of limits: how many connections watch now.
    pub fn watchers(&self) -> usize {
        self.published.receiver_count()
    }
}

/// How a driver begins.
#[derive(Debug)]
pub struct Start {
    /// What an operator may set.
    pub settings: Settings,
    /// What the store has.
    pub loaded: Loaded,
    /// For a rack that has just been founded.
    pub rack_uuid: String,
}

/// Starts the driver, the store's thread and the devices' threads. The task ends when every [`Handle`] is gone and the
/// last batch is durable; then the store is closed.
///
/// # Errors
/// The operating system has no more threads.
pub fn start(
    start: Start,
    store: Box<dyn Store>,
    metrics: Arc<Metrics>,
) -> std::io::Result<(Handle, tokio::task::JoinHandle<()>)> {
    let (requests, received) = mpsc::channel(REQUESTS_QUEUED_MAX);
    let (facts, facts_received) = mpsc::unbounded_channel(); // bounded by what the machine asked for
    let (published, _) = broadcast::channel(WATCH_EVENTS_BEHIND_MAX);
    let (changed, changed_seen) = watch::channel(0);
    let (jobs, jobs_received) = blocking::channel();
    let restored = start.loaded.restored;
    let stored = facts.clone();
    let keeper = std::thread::Builder::new().name("store".into()).spawn(move || {
        keeper::serve(store, restored, &jobs_received, |done| drop(stored.send(Fact::Store(done))))
    })?;
    let meta = start.loaded.meta.unwrap_or_else(|| pool::record::Meta::new(start.rack_uuid));
    let clock = Clock { base: meta.rack_time, started: Instant::now() };
    let mut driver = Driving {
        manager: Manager::new(start.settings),
        clock,
        jobs,
        facts,
        emcs: HashMap::new(),
        sessions: HashMap::new(),
        replies: HashMap::new(),
        next_token: 0,
        next_session: 0,
        published: published.clone(),
        changed,
        metrics,
    };
    driver.event(Event::Loaded { meta, records: start.loaded.records, restored });
    let task = tokio::spawn(async move {
        driver.run(received, facts_received).await;
        drop(driver); // ends the threads
        let _ = tokio::task::spawn_blocking(move || keeper.join()).await;
    });
    Ok((Handle { requests, published, changed: changed_seen }, task))
}

/// Something that other threads report.
enum Fact {
    Store(keeper::Done),
    Device(EmcId, pool::manager::DeviceDone),
}

/// Rack time: how long the manager has run, all its lives added up.
#[derive(Clone, Copy)]
struct Clock {
    base: Ns,
    started: Instant,
}

impl Clock {
    fn now(self) -> When {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall = UnixMs(u64::try_from(wall.as_millis()).unwrap_or(u64::MAX));
        When { now: self.base.after(self.started.elapsed().into()), wall }
    }

    fn instant(self, at: Ns) -> tokio::time::Instant {
        (self.started + at.since(self.base).as_duration().min(std::time::Duration::from_secs(3600))).into()
    }
}

struct Driving {
    manager: Manager,
    clock: Clock,
    jobs: blocking::Sender<Job>,
    facts: mpsc::UnboundedSender<Fact>,
    emcs: HashMap<EmcId, blocking::Sender<DeviceCall>>,
    sessions: HashMap<SessionId, mpsc::Sender<ToSession>>,
    replies: HashMap<Token, oneshot::Sender<Result<Answer, Denied>>>,
    next_token: u64,
    next_session: u64,
    published: broadcast::Sender<Arc<Published>>,
    changed: watch::Sender<u64>,
    metrics: Arc<Metrics>,
}

impl Driving {
    async fn run(&mut self, mut requests: mpsc::Receiver<Request>, mut facts: mpsc::UnboundedReceiver<Fact>) {
        let mut open = true;
        self.manager.settle(self.clock.now());
        self.perform();
        while open || self.manager.is_writing() {
            let wake = self.manager.next_wakeup().map(|at| self.clock.instant(at));
            let wake = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                Some(fact) = facts.recv() => self.fact(fact),
                request = requests.recv(), if open && !self.manager.is_full() => match request {
                    Some(request) => self.request(request),
                    None => open = false,
                },
                () = wake => self.event(Event::Tick),
            }
            for _ in 0..EVENTS_AT_ONCE_MAX {
                if let Ok(fact) = facts.try_recv() {
                    self.fact(fact);
                } else if self.manager.is_full() {
                    break;
                } else if let Ok(request) = requests.try_recv() {
                    self.request(request);
                } else {
                    break;
                }
            }
            self.manager.settle(self.clock.now());
            self.perform();
        }
    }

    fn event(&mut self, event: Event) {
        self.manager.handle(self.clock.now(), event);
    }

    fn fact(&mut self, fact: Fact) {
        match fact {
            Fact::Device(emc, done) => self.event(Event::Device(emc, done)),
            Fact::Store(keeper::Done::Stored { batch, result }) => {
                if let Err(error) = &result {
                    tracing::error!(batch, error = emc::chain(error), "store failed");
                    self.metrics.store_failures.inc();
                }
                self.event(Event::Stored { batch, ok: result.is_ok() });
            }
            Fact::Store(keeper::Done::Space { low }) => self.event(Event::StoreSpace { low }),
            Fact::Store(keeper::Done::Reloaded(Ok(loaded))) => {
                tracing::warn!(records = loaded.records.len(), "store read again");
                if let Some(meta) = loaded.meta {
                    self.event(Event::Loaded { meta, records: loaded.records, restored: loaded.restored });
                }
            }
            Fact::Store(keeper::Done::Reloaded(Err(error))) => {
                tracing::error!(error = emc::chain(&error), "store cannot be read again");
                let (jobs, retry) = (self.jobs.clone(), units::limits::STORE_RETRY.as_duration());
                tokio::spawn(async move {
                    tokio::time::sleep(retry).await;
                    drop(jobs.send(Job::Reload));
                });
            }
        }
    }

    fn request(&mut self, request: Request) {
        match request {
            Request::Ask(ask, reply) => {
                self.next_token += 1;
                let token = Token(self.next_token);
                self.replies.insert(token, reply);
                self.event(Event::Ask(token, ask));
            }
            Request::Look(look) => look(&self.manager, self.clock.now()),
            Request::Set(settings) => self.manager.set(settings),
            Request::AgentUp(host, hello, outbox, reply) => {
                self.next_session += 1;
                let session = SessionId(self.next_session);
                self.sessions.insert(session, outbox);
                let _ = reply.send(session);
                tracing::info!(
                    host = host.0,
                    instance = hello.instance.0,
                    boot = hello.boot_id,
                    "agent connected"
                );
                self.event(Event::AgentUp(session, host, hello));
                self.note_change();
            }
            Request::AgentHave(session, have) => self.event(Event::AgentHave(session, have)),
            Request::AgentDown(session) => {
                if self.sessions.remove(&session).is_some() {
                    tracing::info!(session = session.0, "agent disconnected");
                }
                self.event(Event::AgentDown(session));
                self.note_change();
            }
            Request::Explain(subject, reply) => {
                let keep = |decision: &Decision, subject: &str| decision.subject.to_string() == subject;
                let _ = self.jobs.send(Job::Decisions { keep, subject, most: EXPLAIN_ENTRIES_MAX, reply });
            }
        }
    }

    fn note_change(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    fn perform(&mut self) {
        let mut published = false;
        while let Some(effect) = self.manager.poll_effect() {
            match effect {
                Effect::Store { batch, records } => {
                    self.metrics.batch_records.observe(records.len() as f64);
                    let _ = self.jobs.send(Job::Commit { batch, records });
                }
                Effect::Reload => drop(self.jobs.send(Job::Reload)),
                Effect::Reply(token, answer) => {
                    if let Some(reply) = self.replies.remove(&token)
                        && reply.send(*answer).is_err()
                    {
                        tracing::debug!(token = token.0, "caller gone");
                    }
                }
                Effect::Device(emc, call) => self.call_device(emc, call),
                Effect::Send(session, want) => {
                    if let Some(outbox) = self.sessions.get(&session) {
                        let _ = outbox.try_send(ToSession::Order(want)); // a lost order is repeated
                    }
                }
                Effect::Close(session, why) => self.close(session, why),
                Effect::Durable(durable) => {
                    self.metrics.transitions(&durable);
                    let _ = self.published.send(Arc::new(durable)); // nobody may be watching
                    published = true;
                }
            }
        }
        if published || self.manager.take_changed() {
            self.note_change();
        }
    }

    fn close(&mut self, session: SessionId, why: Closed) {
        tracing::warn!(session = session.0, ?why, "agent connection ended");
        if let Some(outbox) = self.sessions.remove(&session) {
            let _ = outbox.try_send(ToSession::Close(why)); // a full outbox is dropped, which ends the session too
        }
    }

    fn call_device(&mut self, id: EmcId, call: DeviceCall) {
        if !self.emcs.contains_key(&id)
            && let Some(calls) = self.open_emc(id)
        {
            self.emcs.insert(id, calls);
        }
        match self.emcs.get(&id) {
            Some(calls) => drop(calls.send(call)),
            None => {
                let failure = pool::manager::DeviceFailure::Error("no thread for its driver".into());
                drop(self.facts.send(Fact::Device(id, pool::manager::DeviceDone::Failed { call, failure })));
            }
        }
    }

    fn open_emc(&self, id: EmcId) -> Option<blocking::Sender<DeviceCall>> {
        let emc = &self.manager.durable().emc(id)?.emc;
        let driver = Driver::named(&emc.driver)?;
        let place =
            EmcPlace { id, driver, path: PathBuf::from(&emc.path), first: emc.first, slices: emc.slices };
        let facts = self.facts.clone();
        let started = emc::start(place, move |id, done| drop(facts.send(Fact::Device(id, done))));
        started.inspect_err(|error| tracing::error!(emc = id.0, %error, "no thread for an EMC")).ok()
    }
}
