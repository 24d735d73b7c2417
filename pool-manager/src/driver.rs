//! Access to the ledger and its lock. A caller with an event takes the lock and passes the event to
//! the state machine, which is quick; one thread performs the effects, see [`thread`]. Nothing is
//! decided here.
//!
//! ```text
//!   requests, agents, devices ─lock─▶ Manager ─effects─▶ driver's thread ─▶ store, replies,
//!                                                                         devices, desired states
//! ```
//!
//! Decisions collect in the next batch while one is being written, and readers never wait for the
//! disk.

mod fencing;
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
    ledger::When,
    manager::{CloseReason, DeviceReply, Event, Manager, Request, RequestReply, SessionId, Settings, Token},
    protocol::{DesiredState, Hello, ObservedState},
    record::Meta,
    rejection::Rejection,
};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, broadcast, mpsc, oneshot, watch};
use units::limits::{
    EXPLAIN_CALLS_IN_FLIGHT_MAX, REPORT_PART_FACTS_MAX, REQUESTS_QUEUED_MAX, WATCH_CHUNKS_QUEUED_MAX,
    WATCHERS_MAX,
};
use units::{EmcId, HostId, Ns, UnixMs};

use self::thread::DriverThread;
use crate::{
    convert,
    fence_command::FenceCommand,
    ledger_store::{self, LedgerStore},
    metrics::Metrics,
    records::{LoadError, StoreContents},
    store::{Scan, Store, StoreError, Write},
    write_chunk::WriteChunk,
};

/// Message of the driver to one agent's connection.
#[derive(Debug)]
pub enum SessionMessage {
    /// Desired state.
    Desired(DesiredState),
    /// Request for a complete report.
    RequestReport,
    /// The connection ends.
    Close(CloseReason),
}

/// Error of a request to the driver.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The ledger rejects it.
    #[error(transparent)]
    Rejection(#[from] Rejection),
    /// Too many requests are waiting.
    #[error("too many requests are waiting: try again later")]
    Overloaded,
    /// The manager is stopping.
    #[error("the manager is stopping")]
    Stopping,
    /// Decisions could not be read.
    #[error("decisions cannot be read")]
    Unreadable(#[source] LoadError),
}

type ReplyResult = Result<RequestReply, Rejection>;

/// Request to the store that bypasses the ledger.
enum StoreTask {
    /// Snapshot of the store, to be read beside the driver's thread.
    Snapshot(oneshot::Sender<Result<Box<dyn Scan>, StoreError>>),
    /// Entries other than the ledger's, to be made durable, all or none.
    Write(Vec<Write>, oneshot::Sender<Result<(), StoreError>>),
}

/// Connection of an agent.
struct Session {
    host: String,
    outbox: mpsc::Sender<SessionMessage>,
}

/// State behind the lock.
struct Core {
    manager: Manager,
    replies: HashMap<Token, oneshot::Sender<ReplyResult>>,
    sessions: HashMap<SessionId, Session>,
    store_tasks: VecDeque<StoreTask>,
    /// Configured fence command.
    fence_command: Option<FenceCommand>,
    /// EMCs that wait for a running fence command, by host.
    pending_fences: HashMap<HostId, Vec<fencing::WaitingEmc>>,
    next_token: u64,
    next_session: u64,
    /// Time until which the driver's thread sleeps, if it does.
    sleeping_until: Option<Ns>,
    /// No further events are accepted.
    closed: bool,
}

impl Core {
    /// Returns whether the driver's thread sleeps although there is work, or beyond its deadline.
    /// Most events only join an open batch that is not due yet, and require no wakeup.
    fn needs_wakeup(&self) -> bool {
        self.sleeping_until.is_some_and(|until| {
            self.manager.has_pending_work()
                || !self.store_tasks.is_empty()
                || self.manager.next_wakeup().is_some_and(|at| at < until)
        })
    }
}

/// State shared by the handles and the driver's thread.
struct Shared {
    core: Mutex<Core>,
    /// Signals work for the driver's thread.
    work: Condvar,
    /// Signals space in the open batch: the previous one was passed to the store, or failed.
    batch_space: Notify,
    /// Permits for requests that wait for the disk.
    request_permits: Semaphore,
    /// Permits for searches of decisions.
    explain_permits: Arc<Semaphore>,
    /// Iterations of the loop of the driver's thread.
    iterations: AtomicU64,
    clock: Clock,
    published: broadcast::Sender<WriteChunk>,
    changed: watch::Sender<u64>,
    /// Permits for streams to watchers.
    watch_permits: Arc<Semaphore>,
}

impl Shared {
    /// Locks the state. After a panic the ledger's state is unknown, and the process aborts: the
    /// disk is consistent, and a new process loads it.
    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(|_| {
            tracing::error!("panic during a change of the ledger");
            std::process::abort()
        })
    }

    /// Changes the state under the lock, and ensures that effects are performed.
    fn change<T>(&self, change: impl FnOnce(&mut Core, When) -> T) -> Result<T, DriverError> {
        let mut core = self.lock();
        if core.closed {
            return Err(DriverError::Stopping);
        }
        let changed = change(&mut core, self.clock.now());
        let wake = core.needs_wakeup();
        if wake {
            core.sleeping_until = None;
        }
        drop(core);
        if wake {
            self.work.notify_one();
        }
        Ok(changed)
    }

    fn handle_event(&self, event: Event) -> Result<(), DriverError> {
        self.change(|core, when| core.manager.handle(when, event))
    }

    fn handle_device_results(&self, emc: EmcId, results: Vec<DeviceReply>) -> Result<(), DriverError> {
        self.change(|core, when| {
            results.into_iter().for_each(|done| core.manager.handle(when, Event::Device(emc, done)));
        })
    }

    fn notify_change(&self) {
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
struct PendingRequest<'a> {
    shared: &'a Shared,
    token: Token,
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        let token = self.token;
        let _ = self.shared.change(|core, when| {
            if core.replies.remove(&token).is_some() {
                core.manager.handle(when, Event::CallerGone(token));
            }
        }); // a stopping manager drops all callers
    }
}

impl Handle {
    /// Sends a request to the ledger; the reply is durable.
    ///
    /// # Errors
    /// The ledger rejects it, too many requests wait, or the manager is stopping.
    pub async fn request(&self, request: Request) -> Result<RequestReply, DriverError> {
        let mut permit = Some(self.0.request_permits.try_acquire().map_err(|_| DriverError::Overloaded)?);
        self.wait_for_batch_space().await?;
        let waits_for_slices = request.waits_for_slices();
        let (reply, answer) = oneshot::channel();
        let token = self.0.change(|core, when| {
            core.next_token += 1;
            let token = Token(core.next_token);
            core.replies.insert(token, reply);
            core.manager.handle(when, Event::Request(token, request));
            token
        })?;
        let pending = PendingRequest { shared: &self.0, token };
        if waits_for_slices {
            permit = None; // the ledger limits its waiters itself: they must not delay a release or a fence
        }
        let replied = answer.await;
        drop(permit);
        std::mem::forget(pending);
        Ok(replied.map_err(|_| DriverError::Stopping)??)
    }

    /// Waits until the open batch is not full. Several callers may find space at once: the limit
    /// bounds the size of a write, and waiting callers are few.
    async fn wait_for_batch_space(&self) -> Result<(), DriverError> {
        while self.read(|manager, _| manager.is_full())? {
            let mut space = std::pin::pin!(self.0.batch_space.notified());
            space.as_mut().enable(); // from here on no notification is missed
            if self.read(|manager, _| manager.is_full())? {
                space.await;
            }
        }
        Ok(())
    }

    /// Reads durable and current state.
    ///
    /// # Errors
    /// The manager is stopping.
    pub fn read<T>(&self, read: impl FnOnce(&Manager, When) -> T) -> Result<T, DriverError> {
        let core = self.0.lock();
        if core.closed { Err(DriverError::Stopping) } else { Ok(read(&core.manager, self.0.clock.now())) }
    }

    /// Returns the stored decisions about a subject, newest last.
    ///
    /// # Errors
    /// Decisions cannot be read, too many requests wait, or the manager is stopping.
    pub async fn explain(&self, subject: String) -> Result<Vec<(u64, Decision)>, DriverError> {
        let permit =
            Arc::clone(&self.0.explain_permits).try_acquire_owned().map_err(|_| DriverError::Overloaded)?;
        let mut snapshot = self.snapshot().await?;
        let decisions = tokio::task::spawn_blocking(move || {
            let _permit = permit; // released when everything is read, also without a waiting caller
            ledger_store::decisions(snapshot.as_mut(), &subject)
        });
        decisions.await.map_err(|_| DriverError::Stopping)?.map_err(DriverError::Unreadable)
    }

    /// Returns a snapshot of the store. Decisions and outcomes are many, and are read beside the
    /// driver's thread.
    ///
    /// # Errors
    /// The store cannot be read, or the manager is stopping.
    pub async fn snapshot(&self) -> Result<Box<dyn Scan>, DriverError> {
        let (reply, answer) = oneshot::channel();
        self.0.change(|core, _| core.store_tasks.push_back(StoreTask::Snapshot(reply)))?;
        let snapshot = answer.await.map_err(|_| DriverError::Stopping)?;
        snapshot.map_err(|error| DriverError::Unreadable(error.into()))
    }

    /// Makes entries other than the ledger's durable, all or none.
    ///
    /// # Errors
    /// The store failed, and the outcome is unknown; too many requests wait, or the manager is
    /// stopping.
    pub async fn write_entries(&self, writes: Vec<Write>) -> Result<(), DriverError> {
        let _permit = self.0.request_permits.try_acquire().map_err(|_| DriverError::Overloaded)?;
        let (reply, answer) = oneshot::channel();
        self.0.change(|core, _| core.store_tasks.push_back(StoreTask::Write(writes, reply)))?;
        answer.await.map_err(|_| DriverError::Stopping)?.map_err(|error| match error {
            StoreError::Full => Rejection::StoreFull.into(),
            _ => Rejection::StoreFailed.into(),
        })
    }

    /// Changes the settings of the operator.
    ///
    /// # Errors
    /// The manager is stopping.
    pub fn set(&self, settings: Settings, fence_command: Option<FenceCommand>) -> Result<(), DriverError> {
        self.0.change(|core, _| {
            core.manager.set(settings);
            core.fence_command = fence_command;
        })
    }

    /// Connects an agent.
    ///
    /// # Errors
    /// The manager is stopping.
    pub fn connect_agent(
        &self,
        host: HostId,
        hello: Hello,
        outbox: mpsc::Sender<SessionMessage>,
    ) -> Result<SessionId, DriverError> {
        let session = self.0.change(|core, when| {
            let name = convert::host_name(core.manager.durable(), host);
            tracing::info!(host = name, instance = hello.instance.0, boot = hello.boot_id, "agent connected");
            core.next_session += 1;
            let session = SessionId(core.next_session);
            core.sessions.insert(session, Session { host: name, outbox });
            core.manager.handle(when, Event::AgentUp(session, host, hello));
            session
        });
        self.0.notify_change();
        session
    }

    /// Applies a report of an agent. Other requests run between the parts of a long report.
    /// Cancelled between two parts, it leaves an incomplete report, which the manager requests
    /// again.
    ///
    /// # Errors
    /// The manager is stopping.
    pub async fn handle_report(&self, session: SessionId, report: ObservedState) -> Result<(), DriverError> {
        for part in report.into_parts(REPORT_PART_FACTS_MAX) {
            let is_continued = part.is_continued;
            self.0.handle_event(Event::AgentReport(session, part))?;
            if is_continued {
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    /// Disconnects an agent.
    pub fn disconnect_agent(&self, session: SessionId) {
        let session = self.0.change(|core, when| {
            core.manager.handle(when, Event::AgentDown(session));
            core.sessions.remove(&session)
        });
        if let Ok(Some(Session { host, .. })) = session {
            tracing::info!(host, "agent disconnected");
        }
        self.0.notify_change();
    }

    /// Accepts no further events. The driver ends when all decisions are durable.
    pub fn close(&self) {
        let mut core = self.0.lock();
        core.closed = true;
        core.sleeping_until = None;
        drop(core);
        self.0.work.notify_one();
        self.0.batch_space.notify_waiters();
    }

    /// Wakes the driver's thread, and returns the number of iterations of its loop so far: an
    /// unchanged number indicates a stuck thread.
    pub fn iterations(&self) -> u64 {
        let iterations = self.0.iterations.load(Ordering::Relaxed);
        self.0.lock().sleeping_until = None;
        self.0.work.notify_one();
        iterations
    }

    /// Subscribes to durable writes in chunks, see [`WriteChunk`]. A receiver that is more than
    /// [`WATCH_CHUNKS_QUEUED_MAX`] chunks behind loses the oldest.
    pub fn changes(&self) -> broadcast::Receiver<WriteChunk> {
        self.0.published.subscribe()
    }

    /// Waits until the state shown by [`Handle::read`] may have changed.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    /// Takes a permit for a watch stream; `None` if [`WATCHERS_MAX`] streams are open.
    pub fn try_watch_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.0.watch_permits).try_acquire_owned().ok()
    }
}

/// Initial state of a driver.
#[derive(Debug)]
pub struct InitialState {
    /// Settings of the operator.
    pub settings: Settings,
    /// Fence command, for machines whose access no EMC can revoke.
    pub fence_command: Option<FenceCommand>,
    /// Contents of the store.
    pub loaded: StoreContents,
    /// Uuid of the rack if the store has none.
    pub rack_uuid: String,
}

/// Resolves when the driver has ended.
pub type DriverEnd = oneshot::Receiver<()>;

/// Starts the driver's thread, within a runtime. It ends after [`Handle::close`], when all
/// decisions are durable and the store is closed.
///
/// # Errors
/// The operating system cannot create a thread.
pub fn start(
    initial: InitialState,
    store: Box<dyn Store>,
    metrics: Arc<Metrics>,
) -> std::io::Result<(Handle, DriverEnd)> {
    let restored = initial.loaded.restored;
    let meta = initial.loaded.meta.unwrap_or_else(|| Meta::new(initial.rack_uuid));
    let clock = Clock { base: meta.rack_time, started: Instant::now() };
    let mut manager = Manager::new(initial.settings);
    manager.handle(clock.now(), Event::Loaded { meta, records: initial.loaded.records, restored });
    let core = Core {
        manager,
        replies: HashMap::new(),
        sessions: HashMap::new(),
        store_tasks: VecDeque::new(),
        fence_command: initial.fence_command,
        pending_fences: HashMap::new(),
        next_token: 0,
        next_session: 0,
        sleeping_until: None,
        closed: false,
    };
    let shared = Arc::new(Shared {
        core: Mutex::new(core),
        work: Condvar::new(),
        batch_space: Notify::new(),
        request_permits: Semaphore::new(REQUESTS_QUEUED_MAX),
        explain_permits: Arc::new(Semaphore::new(EXPLAIN_CALLS_IN_FLIGHT_MAX)),
        iterations: AtomicU64::new(0),
        clock,
        published: broadcast::channel(WATCH_CHUNKS_QUEUED_MAX).0,
        changed: watch::channel(0).0,
        watch_permits: Arc::new(Semaphore::new(WATCHERS_MAX)),
    });
    let mut thread = DriverThread::new(Arc::clone(&shared), LedgerStore::new(store, restored), metrics);
    let (end, ended) = oneshot::channel();
    std::thread::Builder::new().name("ledger".into()).spawn(move || {
        if catch_unwind(AssertUnwindSafe(|| thread.run())).is_err() {
            std::process::abort(); // after a panic nothing would be stored
        }
        drop(thread);
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
