//! The way to the ledger, and the lock that guards it. Whoever has an event takes the lock and hands it to the protocol
//! machine, which is quick; one thread performs what follows, see [`thread`]. Nothing is decided here.
//!
//! ```text
//!   requests, agents, devices ──lock──▶ Manager ──effects──▶ the driver's thread ─▶ store · replies · devices · orders
//! ```
//!
//! Thus decisions gather in the next batch while one is being written, and whoever only looks never waits for the disk.

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

/// What the driver tells one agent's connection.
#[derive(Debug)]
pub enum ToSession {
    /// An order to pass on.
    Order(Want),
    /// A whole report is requested.
    RequestReport,
    /// The connection is over.
    Close(Closed),
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Asked {
    /// The ledger refuses.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// Too many requests are waiting.
    #[error("too many requests are waiting already: try again soon")]
    Overloaded,
    /// The manager is ending.
    #[error("the manager is stopping")]
    Stopping,
    /// Decisions could not be read.
    #[error("decisions cannot be read")]
    Unreadable(#[source] LoadError),
}

type Replied = Result<Answer, Denied>;

/// What is asked of the store, past the ledger.
enum Errand {
    /// The store as it is now, to be read beside the driver's thread.
    Snapshot(oneshot::Sender<Result<Box<dyn Scan>, StoreError>>),
    /// These are to be durable, all or none: none of them is the ledger's.
    Keep(Vec<Write>, oneshot::Sender<Result<(), StoreError>>),
}

/// One agent's connection.
struct Session {
    host: String,
    outbox: mpsc::Sender<ToSession>,
}

/// What the lock guards.
struct Core {
    manager: Manager,
    replies: HashMap<Token, oneshot::Sender<Replied>>,
    sessions: HashMap<SessionId, Session>,
    errands: VecDeque<Errand>,
    /// How machines are stopped, and those that are being stopped.
    stop: Option<StopCommand>,
    stopping: HashMap<HostId, Vec<stopping::Waiting>>,
    next_token: u64,
    next_session: u64,
    /// Until when the driver's thread sleeps, if it does.
    asleep: Option<Ns>,
    /// Nothing more is taken in.
    closed: bool,
}

impl Core {
    /// Whether the driver's thread sleeps while there is something to do, or longer than it may. Most facts only join an
    /// open batch that is not due yet, and are not worth waking anybody.
    fn oversleeps(&self) -> bool {
        self.asleep.is_some_and(|until| {
            self.manager.has_news()
                || !self.errands.is_empty()
                || self.manager.next_wakeup().is_some_and(|at| at < until)
        })
    }
}

/// The ledger and what everybody needs around it.
struct Shared {
    core: Mutex<Core>,
    /// There is something for the driver's thread to do.
    work: Condvar,
    /// The open batch was handed to the store, or given up: there is room in the next one.
    room: Notify,
    /// One place for every request that waits for the disk.
    places: Semaphore,
    /// One place for every search of the decisions.
    searches: Arc<Semaphore>,
    /// How often the driver's thread has looked for work.
    turns: AtomicU64,
    clock: Clock,
    published: broadcast::Sender<WriteChunk>,
    changed: watch::Sender<u64>,
    /// One permit for every stream to a watcher.
    watchers: Arc<Semaphore>,
}

impl Shared {
    /// Nobody knows what a panic left behind in the ledger. The disk knows what is true, and a new process reads it.
    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(|_| {
            tracing::error!("panic while the ledger was being changed");
            std::process::abort()
        })
    }

    /// Changes something under the lock, and sees that what follows is done.
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

/// A way to the ledger; cheap to clone.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}

/// Somebody who waits for a reply. Given up, the ledger forgets them.
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
        }); // a manager that ends forgets everybody
    }
}

impl Handle {
    /// Asks the ledger; the answer is durable.
    ///
    /// # Errors
    /// The ledger refuses, too many wait, or the manager stops.
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
            place = None; // the ledger counts its waiters itself: they must not keep a release or a fence out
        }
        let answered = answer.await;
        drop(place);
        std::mem::forget(waiting);
        Ok(answered.map_err(|_| Asked::Stopping)??)
    }

    /// Waits until the open batch is not full. Many may find room at once: the limit is one on the size of a write, and
    /// those who wait are few.
    async fn room(&self) -> Result<(), Asked> {
        while self.look(|manager, _| manager.is_full())? {
            let mut emptied = std::pin::pin!(self.0.room.notified());
            emptied.as_mut().enable(); // from here on no word of it is missed
            if self.look(|manager, _| manager.is_full())? {
                emptied.await;
            }
        }
        Ok(())
    }

    /// Looks at what is durable and known now.
    ///
    /// # Errors
    /// The manager stops.
    pub fn look<T>(&self, question: impl FnOnce(&Manager, When) -> T) -> Result<T, Asked> {
        let core = self.0.lock();
        if core.closed { Err(Asked::Stopping) } else { Ok(question(&core.manager, self.0.clock.now())) }
    }

    /// Every remembered decision about a subject, the newest last.
    ///
    /// # Errors
    /// Decisions cannot be read, too many wait, or the manager stops.
    pub async fn explain(&self, subject: String) -> Result<Vec<(u64, Decision)>, Asked> {
        let place = Arc::clone(&self.0.searches).try_acquire_owned().map_err(|_| Asked::Overloaded)?;
        let mut snapshot = self.snapshot().await?;
        let found = tokio::task::spawn_blocking(move || {
            let _place = place; // given back when all is read, also if nobody waits any more
            keeper::decisions(snapshot.as_mut(), &subject)
        });
        found.await.map_err(|_| Asked::Stopping)?.map_err(Asked::Unreadable)
    }

    /// The store as it is now. Decisions and outcomes are many: they are read beside the driver's thread.
    ///
    /// # Errors
    /// The store cannot be read, or the manager stops.
    pub async fn snapshot(&self) -> Result<Box<dyn Scan>, Asked> {
        let (reply, answer) = oneshot::channel();
        self.0.change(|core, _| core.errands.push_back(Errand::Snapshot(reply)))?;
        let found = answer.await.map_err(|_| Asked::Stopping)?;
        found.map_err(|error| Asked::Unreadable(error.into()))
    }

    /// Makes entries durable that are not the ledger's, all or none.
    ///
    /// # Errors
    /// The store failed, and nobody knows which; too many wait, or the manager stops.
    pub async fn keep(&self, writes: Vec<Write>) -> Result<(), Asked> {
        let _place = self.0.places.try_acquire().map_err(|_| Asked::Overloaded)?;
        let (reply, answer) = oneshot::channel();
        self.0.change(|core, _| core.errands.push_back(Errand::Keep(writes, reply)))?;
        answer.await.map_err(|_| Asked::Stopping)?.map_err(|error| match error {
            StoreError::Full => Denied::StoreFull.into(),
            _ => Denied::StoreFailed.into(),
        })
    }

    /// Changes what an operator may set.
    ///
    /// # Errors
    /// The manager stops.
    pub fn set(&self, settings: Settings, stop: Option<StopCommand>) -> Result<(), Asked> {
        self.0.change(|core, _| {
            core.manager.set(settings);
            core.stop = stop;
        })
    }

    /// An agent connected.
    ///
    /// # Errors
    /// The manager stops.
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

    /// An agent reports. Other requests take their turn between the parts of a long report. Cancelled between two parts, it
    /// leaves a report without an end, which the manager requests again.
    ///
    /// # Errors
    /// The manager stops.
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

    /// An agent's connection is gone.
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

    /// Takes nothing more in. The driver ends when everything decided so far is durable.
    pub fn close(&self) {
        let mut core = self.0.lock();
        core.closed = true;
        core.asleep = None;
        drop(core);
        self.0.work.notify_one();
        self.0.room.notify_waiters();
    }

    /// Wakes the driver's thread for nothing, and says how often it has looked for work until now: a number that stays
    /// the same from one call to a later one is of a thread that is stuck.
    pub fn turns(&self) -> u64 {
        let turns = self.0.turns.load(Ordering::Relaxed);
        self.0.lock().asleep = None;
        self.0.work.notify_one();
        turns
    }

    /// Durable writes from now on, in chunks, see [`WriteChunk`]. A receiver that is more than
    /// [`WATCH_CHUNKS_QUEUED_MAX`] chunks behind loses the oldest.
    pub fn changes(&self) -> broadcast::Receiver<WriteChunk> {
        self.0.published.subscribe()
    }

    /// Wakes whenever what [`Handle::look`] shows may have changed.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    /// Takes a permit for one watch stream; `None` if [`WATCHERS_MAX`] streams are open.
    pub fn try_watch_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.0.watchers).try_acquire_owned().ok()
    }
}

/// How a driver begins.
#[derive(Debug)]
pub struct Start {
    /// What an operator may set.
    pub settings: Settings,
    /// How machines are stopped that no EMC can cut off.
    pub stop: Option<StopCommand>,
    /// What the store has.
    pub loaded: Loaded,
    /// For a rack that has just been founded.
    pub rack_uuid: String,
}

/// Hears when the driver has ended.
pub type Ended = oneshot::Receiver<()>;

/// Starts the driver's thread, to be called within a runtime. It ends after [`Handle::close`], when everything decided is
/// durable and the store is closed.
///
/// # Errors
/// The operating system has no more threads.
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
        let _ = end.send(()); // nobody may want to know
    })?;
    Ok((Handle(shared), ended))
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
}

#[cfg(test)]
mod tests;
