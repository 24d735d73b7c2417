//! Access to the ledger and its lock. A caller with an event takes the lock and passes the event to
//! the state machine, which is quick; one thread performs the effects, see [`thread`]. Nothing is
//! decided here.
//!
//! ```text
//!   requests, agents, devices ──lock──▶ Manager ──effects──▶ the driver's thread ─▶ store · replies · devices · orders
//! ```
//!
//! Decisions collect in the next batch while one is being written, and readers never wait for the
//! disk.

mod chunk;
mod stopping;
mod thread;

use std::{
    collections::{HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use pool::{
    audit::Decision,
    denied::Denied,
    ledger::When,
    manager::{Answer, Ask, Closed, DeviceDone, Event, Manager, SessionId, Settings, Token},
    protocol::{Have, Hello, Want},
    record::Meta,
};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, broadcast, mpsc, oneshot, watch};
use units::limits::{
    EXPLAIN_CALLS_IN_FLIGHT_MAX, REPORT_PART_FACTS_MAX, REQUESTS_QUEUED_MAX, WATCH_CHUNKS_QUEUED_MAX,
    WATCHERS_MAX,
};
use units::{EmcId, HostId, Ns, UnixMs};

pub use self::chunk::WriteChunk;
use self::thread::Driving;
use crate::{
    convert,
    keeper::{self, Keeper},
    metrics::Metrics,
    power_off::StopCommand,
    records::{LoadError, Loaded},
    store::{Scan, Store, StoreError, Write},
};

/// Message of the driver to one agent's connection.
#[derive(Debug)]
pub enum ToSession {
    /// Desired state.
    Order(Want),
    /// Request for a complete report.
    RequestReport,
    /// The connection ends.
    Close(Closed),
}

/// Reason why a request has no result.
#[derive(Debug, thiserror::Error)]
pub enum Asked {
    /// The ledger rejects it.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// Too many requests are waiting.
    #[error("too many requests are waiting already: try again soon")]
    Overloaded,
    /// The manager is stopping.
    #[error("the manager is stopping")]
    Stopping,
    /// Decisions could not be read.
    #[error("decisions cannot be read")]
    Unreadable(#[source] LoadError),
}

type Replied = Result<Answer, Denied>;

/// Request to the store that bypasses the ledger.
enum Errand {
    /// Snapshot of the store, to be read beside the driver's thread.
    Snapshot(oneshot::Sender<Result<Box<dyn Scan>, StoreError>>),
    /// Entries to make durable, all or none; none of them is the ledger's.
    Keep(Vec<Write>, oneshot::Sender<Result<(), StoreError>>),
}

/// Connection of an agent.
struct Session {
    host: String,
    outbox: mpsc::Sender<ToSession>,
}

/// State behind the lock.
struct Core {
    manager: Manager,
    replies: HashMap<Token, oneshot::Sender<Replied>>,
    sessions: HashMap<SessionId, Session>,
    errands: VecDeque<Errand>,
    /// Fence commands, running and configured.
    stop: Option<StopCommand>,
    stopping: HashMap<HostId, Vec<stopping::Waiting>>,
    next_token: u64,
    next_session: u64,
    /// Time until which the driver's thread sleeps, if it does.
    asleep: Option<Ns>,
    /// No further events are accepted.
    closed: bool,
}

impl Core {
    /// Returns whether the driver's thread sleeps although there is work, or longer than it may.
    /// Most events only join an open batch that is not due yet, and do not require a wakeup.
    fn oversleeps(&self) -> bool {
        self.asleep.is_some_and(|until| {
            self.manager.has_news()
                || !self.errands.is_empty()
                || self.manager.next_wakeup().is_some_and(|at| at < until)
        })
    }
}

/// Ledger with its shared state.
struct Shared {
    core: Mutex<Core>,
    /// There is work for the driver's thread.
    work: Condvar,
    /// The open batch was passed to the store, or failed: there is space in the next one.
    room: Notify,
    /// Permits for requests that wait for the disk.
    places: Semaphore,
    /// Permits for searches of decisions.
    searches: Arc<Semaphore>,
    /// Number of times that the driver's thread has looked for work.
    turns: AtomicU64,
    clock: Clock,
    published: broadcast::Sender<WriteChunk>,
    changed: watch::Sender<u64>,
    /// Permits for streams to watchers.
    watchers: Arc<Semaphore>,
}

impl Shared {
    /// After a panic the ledger's state is unknown. The disk is consistent, and a new process reads
    /// it.
    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(|_| {
            tracing::error!("panic while the ledger was being changed");
            std::process::abort()
        })
    }

    /// Changes the state under the lock, and ensures that effects are performed.
    fn change<T>(&self, change: impl FnOnce(&mut Core, When) -> T) -> Result<T, Asked> {
        let mut core = self.lock();
        if core.closed {
            return Err(Asked::Stopping);
        }
        let changed = change(&mut core, self.clock.now());
        let wake = core.oversleeps();
        if wake {
            core.asleep = None;
        }
        drop(core);
        if wake {
            self.work.notify_one();
        }
        Ok(changed)
    }

    fn event(&self, event: Event) -> Result<(), Asked> {
        self.change(|core, when| core.manager.handle(when, event))
    }

    fn device_answers(&self, emc: EmcId, answers: Vec<DeviceDone>) -> Result<(), Asked> {
        self.change(|core, when| {
            answers.into_iter().for_each(|done| core.manager.handle(when, Event::Device(emc, done)));
        })
    }

    fn note_change(&self) {
        self.changed.send_modify(|count| *count += 1);
    }
}

/// Handle of the ledger; cheap to clone.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}

/// Caller that waits for a reply. When it is dropped, the ledger drops the request.
struct Waiting<'a> {
    shared: &'a Shared,
    token: Token,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let token = self.token;
        let _ = self.shared.change(|core, when| {
            if core.replies.remove(&token).is_some() {
                core.manager.handle(when, Event::Gone(token));
            }
        }); // a stopping manager drops all callers
    }
}

impl Handle {
    /// Sends a request to the ledger; the reply is durable.
    ///
    /// # Errors
    /// The ledger rejects it, too many requests wait, or the manager is stopping.
    pub async fn ask(&self, ask: Ask) -> Result<Answer, Asked> {
        let mut place = Some(self.0.places.try_acquire().map_err(|_| Asked::Overloaded)?);
        self.room().await?;
        let waits_for_slices = ask.waits_for_slices();
        let (reply, answer) = oneshot::channel();
        let token = self.0.change(|core, when| {
            core.next_token += 1;
            let token = Token(core.next_token);
            core.replies.insert(token, reply);
            core.manager.handle(when, Event::Ask(token, ask));
            token
        })?;
        let waiting = Waiting { shared: &self.0, token };
        if waits_for_slices {
            place = None; // the ledger limits its waiters itself: they must not delay a release or a fence
        }
        let answered = answer.await;
        drop(place);
        std::mem::forget(waiting);
        Ok(answered.map_err(|_| Asked::Stopping)??)
    }

    /// Waits until the open batch is not full. Several callers may find space at once: the limit
    /// bounds the size of a write, and waiting callers are few.
    async fn room(&self) -> Result<(), Asked> {
        while self.look(|manager, _| manager.is_full())? {
            let mut emptied = std::pin::pin!(self.0.room.notified());
            emptied.as_mut().enable(); // from here on no notification is missed
            if self.look(|manager, _| manager.is_full())? {
                emptied.await;
            }
        }
        Ok(())
    }

    /// Reads durable and current state.
    ///
    /// # Errors
    /// The manager is stopping.
    pub fn look<T>(&self, question: impl FnOnce(&Manager, When) -> T) -> Result<T, Asked> {
        let core = self.0.lock();
        if core.closed { Err(Asked::Stopping) } else { Ok(question(&core.manager, self.0.clock.now())) }
    }

    /// Returns the stored decisions about a subject, newest last.
    ///
    /// # Errors
    /// Decisions cannot be read, too many requests wait, or the manager is stopping.
    pub async fn explain(&self, subject: String) -> Result<Vec<(u64, Decision)>, Asked> {
        let place = Arc::clone(&self.0.searches).try_acquire_owned().map_err(|_| Asked::Overloaded)?;
        let mut snapshot = self.snapshot().await?;
        let found = tokio::task::spawn_blocking(move || {
            let _place = place; // released when everything is read, also without a waiting caller
            keeper::decisions(snapshot.as_mut(), &subject)
        });
        found.await.map_err(|_| Asked::Stopping)?.map_err(Asked::Unreadable)
    }

    /// Returns a snapshot of the store. Decisions and outcomes are many, and are read beside the
    /// driver's thread.
    ///
    /// # Errors
    /// The store cannot be read, or the manager is stopping.
    pub async fn snapshot(&self) -> Result<Box<dyn Scan>, Asked> {
        let (reply, answer) = oneshot::channel();
        self.0.change(|core, _| core.errands.push_back(Errand::Snapshot(reply)))?;
        let found = answer.await.map_err(|_| Asked::Stopping)?;
        found.map_err(|error| Asked::Unreadable(error.into()))
    }

    /// Makes entries durable that are not the ledger's, all or none.
    ///
    /// # Errors
    /// The store failed, and the outcome is unknown; too many requests wait, or the manager is
    /// stopping.
    pub async fn keep(&self, writes: Vec<Write>) -> Result<(), Asked> {
        let _place = self.0.places.try_acquire().map_err(|_| Asked::Overloaded)?;
        let (reply, answer) = oneshot::channel();
        self.0.change(|core, _| core.errands.push_back(Errand::Keep(writes, reply)))?;
        answer.await.map_err(|_| Asked::Stopping)?.map_err(|error| match error {
            StoreError::Full => Denied::StoreFull.into(),
            _ => Denied::StoreFailed.into(),
        })
    }

    /// Changes the settings of the operator.
    ///
    /// # Errors
    /// The manager is stopping.
    pub fn set(&self, settings: Settings, stop: Option<StopCommand>) -> Result<(), Asked> {
        self.0.change(|core, _| {
            core.manager.set(settings);
            core.stop = stop;
        })
    }

    /// Connects an agent.
    ///
    /// # Errors
    /// The manager is stopping.
    pub fn agent_up(
        &self,
        host: HostId,
        hello: Hello,
        outbox: mpsc::Sender<ToSession>,
    ) -> Result<SessionId, Asked> {
        let session = self.0.change(|core, when| {
            let name = convert::host_name(core.manager.durable(), host);
            tracing::info!(host = name, instance = hello.instance.0, boot = hello.boot_id, "agent connected");
            core.next_session += 1;
            let session = SessionId(core.next_session);
            core.sessions.insert(session, Session { host: name, outbox });
            core.manager.handle(when, Event::AgentUp(session, host, hello));
            session
        });
        self.0.note_change();
        session
    }

    /// Applies a report of an agent. Other requests run between the parts of a long report.
    /// Cancelled between two parts, it leaves an incomplete report, which the manager requests
    /// again.
    ///
    /// # Errors
    /// The manager is stopping.
    pub async fn agent_have(&self, session: SessionId, have: Have) -> Result<(), Asked> {
        for part in have.into_parts(REPORT_PART_FACTS_MAX) {
            let is_continued = part.is_continued;
            self.0.event(Event::AgentHave(session, part))?;
            if is_continued {
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    /// Disconnects an agent.
    pub fn agent_down(&self, session: SessionId) {
        let had = self.0.change(|core, when| {
            core.manager.handle(when, Event::AgentDown(session));
            core.sessions.remove(&session)
        });
        if let Ok(Some(Session { host, .. })) = had {
            tracing::info!(host, "agent disconnected");
        }
        self.0.note_change();
    }

    /// Accepts no further events. The driver ends when all decisions are durable.
    pub fn close(&self) {
        let mut core = self.0.lock();
        core.closed = true;
        core.asleep = None;
        drop(core);
        self.0.work.notify_one();
        self.0.room.notify_waiters();
    }

    /// Wakes the driver's thread, and returns how often it has looked for work: an unchanged number
    /// indicates a stuck thread.
    pub fn turns(&self) -> u64 {
        let turns = self.0.turns.load(Ordering::Relaxed);
        self.0.lock().asleep = None;
        self.0.work.notify_one();
        turns
    }

    /// Subscribes to durable writes in chunks, see [`WriteChunk`]. A receiver that is more than
    /// [`WATCH_CHUNKS_QUEUED_MAX`] chunks behind loses the oldest.
    pub fn changes(&self) -> broadcast::Receiver<WriteChunk> {
        self.0.published.subscribe()
    }

    /// Waits until the state shown by [`Handle::look`] may have changed.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    /// Takes a permit for a watch stream; `None` if [`WATCHERS_MAX`] streams are open.
    pub fn try_watch_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.0.watchers).try_acquire_owned().ok()
    }
}

/// Initial state of a driver.
#[derive(Debug)]
pub struct Start {
    /// Settings of the operator.
    pub settings: Settings,
    /// Fence command, for machines whose access no EMC can revoke.
    pub stop: Option<StopCommand>,
    /// Contents of the store.
    pub loaded: Loaded,
    /// The rack was created just now.
    pub rack_uuid: String,
}

/// Receiver of the driver's end.
pub type Ended = oneshot::Receiver<()>;

/// Starts the driver's thread, within a runtime. It ends after [`Handle::close`], when all
/// decisions are durable and the store is closed.
///
/// # Errors
/// The operating system cannot create a thread.
pub fn start(start: Start, store: Box<dyn Store>, metrics: Arc<Metrics>) -> std::io::Result<(Handle, Ended)> {
    let restored = start.loaded.restored;
    let meta = start.loaded.meta.unwrap_or_else(|| Meta::new(start.rack_uuid));
    let clock = Clock { base: meta.rack_time, started: Instant::now() };
    let mut manager = Manager::new(start.settings);
    manager.handle(clock.now(), Event::Loaded { meta, records: start.loaded.records, restored });
    let core = Core {
        manager,
        replies: HashMap::new(),
        sessions: HashMap::new(),
        errands: VecDeque::new(),
        stop: start.stop,
        stopping: HashMap::new(),
        next_token: 0,
        next_session: 0,
        asleep: None,
        closed: false,
    };
    let shared = Arc::new(Shared {
        core: Mutex::new(core),
        work: Condvar::new(),
        room: Notify::new(),
        places: Semaphore::new(REQUESTS_QUEUED_MAX),
        searches: Arc::new(Semaphore::new(EXPLAIN_CALLS_IN_FLIGHT_MAX)),
        turns: AtomicU64::new(0),
        clock,
        published: broadcast::channel(WATCH_CHUNKS_QUEUED_MAX).0,
        changed: watch::channel(0).0,
        watchers: Arc::new(Semaphore::new(WATCHERS_MAX)),
    });
    let mut driving = Driving::new(Arc::clone(&shared), Keeper::new(store, restored), metrics);
    let (end, ended) = oneshot::channel();
    std::thread::Builder::new().name("ledger".into()).spawn(move || {
        if catch_unwind(AssertUnwindSafe(|| driving.run())).is_err() {
            std::process::abort(); // it panicked: nothing would be stored any more
        }
        drop(driving);
        let _ = end.send(()); // there may be no receiver
    })?;
    Ok((Handle(shared), ended))
}

/// Rack time: total running time of the manager.
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
}

#[cfg(test)]
mod tests;
