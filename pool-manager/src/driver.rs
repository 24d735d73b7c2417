//! Connects the ledger's state machine ([`Manager`]) to requests, agents, devices and the store. A
//! caller locks the state machine, passes an event to it and unlocks it. One thread performs the
//! resulting effects, see [`thread`]. All decisions are made by the state machine.
//!
//! ```text
//!   requests, agents, devices ─lock─▶ Manager ─effects─▶ driver's thread ─▶ store, replies,
//!                                                                         devices, desired states
//! ```
//!
//! While one batch is being written to disk, new decisions are collected in the next batch. Readers
//! never wait for the disk.

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
    record::{Meta, Record},
    rejection::Rejection,
};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, broadcast, mpsc, oneshot, watch};
use units::limits::{
    EXPLAIN_CALLS_IN_FLIGHT_MAX, LEDGER_REQUESTS_QUEUED_MAX, REPORT_PART_ENTRIES_MAX,
    WATCH_CHUNKS_QUEUED_MAX, WATCH_STREAMS_MAX,
};
use units::{EmcId, FencingToken, HostId, Ns, UnixMs};

use self::thread::DriverThread;
use crate::{
    convert,
    election::ElectedManager,
    fence_command::FenceCommand,
    ledger_store::{self, LedgerStore},
    metrics::Metrics,
    records::LoadError,
    store::{Scan, Store, StoreError, Write},
    write_chunk::WriteChunk,
};

/// Message from the driver to the connection of one agent.
#[derive(Debug)]
pub enum SessionMessage {
    /// New desired state for the agent's host.
    Desired(DesiredState),
    /// Requests a complete report from the agent.
    RequestReport,
    /// Closes the connection.
    Close(CloseReason),
}

/// Error of a request to the driver.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The ledger rejects the request.
    #[error(transparent)]
    Rejection(#[from] Rejection),
    /// Too many other requests are waiting.
    #[error("too many requests are waiting: try again later")]
    Overloaded,
    /// The manager is stopping.
    #[error("the manager is stopping")]
    Stopping,
    /// The lease of this manager may have ended, and another one may be the leader.
    #[error("this manager is not the leader any more: try again")]
    NotLeader,
    /// The lease of this manager may have ended during a request. The request may have had an
    /// effect.
    #[error("the lease of this manager ended during the request, which may have had an effect: repeat it")]
    LeaseEnded,
    /// The store cannot be read.
    #[error("cannot read the store")]
    Unreadable(#[source] LoadError),
}

type ReplyResult = Result<RequestReply, Rejection>;

/// Store operation that does not change the ledger.
enum StoreTask {
    /// Creates a snapshot of the store, which the caller reads on another thread.
    Snapshot(oneshot::Sender<Result<Box<dyn Scan>, StoreError>>),
    /// Writes entries that do not belong to the ledger, atomically and durably.
    Write(Vec<Write>, oneshot::Sender<Result<(), StoreError>>),
}

/// Connection of one agent.
struct Session {
    host: String,
    outbox: mpsc::Sender<SessionMessage>,
}

/// State protected by the lock of [`SharedDriver`].
struct DriverCore {
    manager: Manager,
    replies: HashMap<Token, oneshot::Sender<ReplyResult>>,
    sessions: HashMap<SessionId, Session>,
    store_tasks: VecDeque<StoreTask>,
    /// Fence command from `rack.toml`.
    fence_command: Option<FenceCommand>,
    /// EMCs that wait for the running fence command of a host.
    pending_fences: HashMap<HostId, Vec<fencing::WaitingEmc>>,
    next_token: u64,
    next_session: u64,
    /// Time at which the driver's thread wakes up; `None` while the thread is not asleep.
    sleeping_until: Option<Ns>,
    /// Whether the driver is stopping and rejects further events.
    is_closed: bool,
}

impl DriverCore {
    /// Returns whether the driver's thread is asleep and must be woken, because it has work or an
    /// earlier deadline. Most events only add to a batch that is not yet due, and need no wakeup.
    fn needs_wakeup(&self) -> bool {
        self.sleeping_until.is_some_and(|until| {
            self.manager.has_pending_work()
                || !self.store_tasks.is_empty()
                || self.manager.next_wakeup().is_some_and(|at| at < until)
        })
    }
}

/// State shared by all [`Handle`]s and the driver's thread.
struct SharedDriver {
    core: Mutex<DriverCore>,
    /// Wakes the driver's thread when there is work.
    work_available: Condvar,
    /// Wakes callers that wait for space in the open batch, after the previous batch was passed to
    /// the store or has failed.
    batch_space: Notify,
    /// Limits the number of requests that wait for the disk.
    request_permits: Semaphore,
    /// Limits the number of concurrent searches in the audit log.
    explain_permits: Arc<Semaphore>,
    /// Number of iterations of the main loop of the driver's thread, for the watchdog.
    iterations: AtomicU64,
    clock: Clock,
    /// This manager as the elected leader; `None` if no other manager can take over.
    leader: Option<ElectedManager>,
    published: broadcast::Sender<WriteChunk>,
    changed: watch::Sender<u64>,
    /// Limit the number of open watch streams of each service.
    scheduler_watch_permits: Arc<Semaphore>,
    admin_watch_permits: Arc<Semaphore>,
}

impl SharedDriver {
    /// Locks the state. Aborts the process if a thread panicked while it held the lock, because the
    /// ledger in memory may be inconsistent. The ledger on disk is consistent, and a new process
    /// loads it.
    fn lock(&self) -> MutexGuard<'_, DriverCore> {
        self.core.lock().unwrap_or_else(|_| {
            tracing::error!("aborting: a thread panicked while it held the ledger's lock");
            std::process::abort()
        })
    }

    /// Runs `change` under the lock, and wakes the driver's thread if there are effects to perform.
    fn change<T>(&self, change: impl FnOnce(&mut DriverCore, When) -> T) -> Result<T, DriverError> {
        let mut core = self.lock();
        if core.is_closed {
            return Err(DriverError::Stopping);
        }
        let changed = change(&mut core, self.clock.now());
        let wake = core.needs_wakeup();
        if wake {
            core.sleeping_until = None;
        }
        drop(core);
        if wake {
            self.work_available.notify_one();
        }
        Ok(changed)
    }

    fn handle_event(&self, event: Event) -> Result<(), DriverError> {
        self.change(|core, when| core.manager.handle(when, event))
    }

    fn handle_device_results(&self, emc: EmcId, results: Vec<DeviceReply>) -> Result<(), DriverError> {
        self.change(|core, when| {
            results.into_iter().for_each(|reply| core.manager.handle(when, Event::Device(emc, reply)));
        })
    }

    fn fencing_token(&self) -> Result<FencingToken, DriverError> {
        let generation = self.lock().manager.durable().meta().generation;
        self.check_lease()?;
        let only = FencingToken { generation, election: 0 };
        Ok(self.leader.as_ref().map_or(only, |leader| leader.token(generation)))
    }

    /// Checks that no other manager has become the leader. Must be called after the state was read.
    fn check_lease(&self) -> Result<(), DriverError> {
        let is_valid = self.leader.as_ref().is_none_or(ElectedManager::is_certain);
        if is_valid { Ok(()) } else { Err(DriverError::NotLeader) }
    }

    fn notify_change(&self) {
        self.changed.send_modify(|count| *count += 1);
    }
}

/// Service with watch streams. Each service has its own limit, so that schedulers cannot prevent the
/// streams of administrators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchService {
    /// `WatchCapacity` and `WatchMigrations`.
    Scheduler,
    /// `Watch`.
    Admin,
}

/// Handle to the driver for requests and agents; cheap to clone.
#[derive(Clone)]
pub struct Handle(Arc<SharedDriver>);

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}

/// Guard of a caller that waits for a reply. Dropping the guard cancels the request in the ledger.
struct PendingRequest<'a> {
    shared: &'a SharedDriver,
    token: Token,
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        let token = self.token;
        let _ = self.shared.change(|core, when| {
            if core.replies.remove(&token).is_some() {
                core.manager.handle(when, Event::CallerGone(token));
            }
        }); // fails only if the manager is stopping, which drops all requests
    }
}

impl Handle {
    /// Sends a request to the ledger, and returns the reply after the decision is durable.
    ///
    /// # Errors
    /// [`DriverError`] if the ledger rejects the request, too many requests are waiting, or the
    /// manager is stopping.
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
            // Waiters for slices must not block a release or a fence. The ledger limits their
            // number.
            permit = None;
        }
        let replied = answer.await;
        drop(permit);
        std::mem::forget(pending);
        let reply = replied.map_err(|_| DriverError::Stopping)?;
        // A request that was repeated is answered without a write, which would detect another leader.
        self.0.check_lease().map_err(|_| DriverError::LeaseEnded)?;
        Ok(reply?)
    }

    /// Waits until the open batch has space. Several callers can continue at once and exceed the
    /// limit slightly. This is harmless, because the number of waiting callers is limited.
    async fn wait_for_batch_space(&self) -> Result<(), DriverError> {
        while self.read(|manager, _| manager.is_full())? {
            let mut space = std::pin::pin!(self.0.batch_space.notified());
            space.as_mut().enable(); // registers for notifications before the second check
            if self.read(|manager, _| manager.is_full())? {
                space.await;
            }
        }
        Ok(())
    }

    /// Locks the state machine, and calls `read` with it and the current time.
    ///
    /// # Errors
    /// [`DriverError::Stopping`] if the manager is stopping, [`DriverError::NotLeader`] if its lease
    /// may have ended.
    pub fn read<T>(&self, read: impl FnOnce(&Manager, When) -> T) -> Result<T, DriverError> {
        let core = self.0.lock();
        if core.is_closed {
            return Err(DriverError::Stopping);
        }
        let value = read(&core.manager, self.0.clock.now());
        drop(core);
        self.0.check_lease().map(|()| value)
    }

    /// Checks that no other manager is the leader. Callers that reply with state of another part of the manager must
    /// call this after they have read the state.
    ///
    /// # Errors
    /// [`DriverError::NotLeader`].
    pub fn check_leader(&self) -> Result<(), DriverError> {
        self.0.check_lease()
    }

    /// Returns the fencing token of this manager.
    ///
    /// # Errors
    /// [`DriverError::NotLeader`] if another manager may be the leader.
    pub fn fencing_token(&self) -> Result<FencingToken, DriverError> {
        self.0.fencing_token()
    }

    /// Returns the stored decisions about a subject with their sequence numbers, oldest first.
    ///
    /// # Errors
    /// [`DriverError`] if the store cannot be read, too many searches are running, or the manager
    /// is stopping.
    pub async fn explain(&self, subject: String) -> Result<Vec<(u64, Decision)>, DriverError> {
        let permit =
            Arc::clone(&self.0.explain_permits).try_acquire_owned().map_err(|_| DriverError::Overloaded)?;
        let mut snapshot = self.snapshot().await?;
        let decisions = tokio::task::spawn_blocking(move || {
            let _permit = permit; // held until the search ends, even if the caller disconnects
            ledger_store::find_decisions(snapshot.as_mut(), &subject)
        });
        decisions.await.map_err(|_| DriverError::Stopping)?.map_err(DriverError::Unreadable)
    }

    /// Returns a snapshot of the store. Callers can read large tables from it on another thread, so
    /// that the driver's thread is not blocked.
    ///
    /// # Errors
    /// [`DriverError`] if the store cannot be read or the manager is stopping.
    pub async fn snapshot(&self) -> Result<Box<dyn Scan>, DriverError> {
        let (reply, answer) = oneshot::channel();
        self.0.change(|core, _| core.store_tasks.push_back(StoreTask::Snapshot(reply)))?;
        let snapshot = answer.await.map_err(|_| DriverError::Stopping)?;
        snapshot.map_err(|error| DriverError::Unreadable(error.into()))
    }

    /// Writes entries that do not belong to the ledger, atomically and durably.
    ///
    /// # Errors
    /// [`DriverError`] if the store failed, too many requests are waiting, or the manager is
    /// stopping. After a failure of the store, the entries may or may not be on disk.
    pub async fn write_entries(&self, writes: Vec<Write>) -> Result<(), DriverError> {
        let _permit = self.0.request_permits.try_acquire().map_err(|_| DriverError::Overloaded)?;
        let (reply, answer) = oneshot::channel();
        self.0.change(|core, _| core.store_tasks.push_back(StoreTask::Write(writes, reply)))?;
        answer.await.map_err(|_| DriverError::Stopping)?.map_err(|error| match error {
            StoreError::Full => Rejection::StoreFull.into(),
            _ => Rejection::StoreFailed.into(),
        })
    }

    /// Applies changed settings from `rack.toml`.
    ///
    /// # Errors
    /// [`DriverError::Stopping`] if the manager is stopping.
    pub fn apply_settings(
        &self,
        settings: Settings,
        fence_command: Option<FenceCommand>,
    ) -> Result<(), DriverError> {
        self.0.change(|core, _| {
            core.manager.set(settings);
            core.fence_command = fence_command;
        })
    }

    /// Raises the alarm of the rack with this reason, or ends it if `message` is `None`.
    ///
    /// # Errors
    /// [`DriverError::Stopping`] if the manager is stopping.
    pub fn set_alarm(&self, reason: &'static str, message: Option<String>) -> Result<(), DriverError> {
        self.0.change(|core, when| core.manager.set_rack_alarm(when, reason, message))
    }

    /// Registers the connection of an agent. Messages for the agent are sent to `outbox`. Also returns
    /// whether the manager accepted the agent; otherwise, the outbox receives the reason.
    ///
    /// # Errors
    /// [`DriverError::Stopping`] if the manager is stopping.
    pub fn connect_agent(
        &self,
        host: HostId,
        hello: Hello,
        outbox: mpsc::Sender<SessionMessage>,
    ) -> Result<(SessionId, bool), DriverError> {
        let session = self.0.change(|core, when| {
            let name = convert::host_name(core.manager.durable(), host);
            let (instance, boot) = (hello.instance.0, hello.boot_id.clone());
            core.next_session += 1;
            let session = SessionId(core.next_session);
            core.sessions.insert(session, Session { host: name.clone(), outbox });
            core.manager.handle(when, Event::AgentUp(session, host, hello));
            let is_accepted = core.manager.has_agent_session(session);
            if is_accepted {
                tracing::info!(host = name, instance, boot, "agent connected");
            }
            (session, is_accepted)
        });
        self.0.notify_change();
        session
    }

    /// Applies a report of an agent. A long report is split into parts, so that other requests run
    /// between them. If this future is dropped between two parts, the manager requests the report
    /// again.
    ///
    /// # Errors
    /// [`DriverError::Stopping`] if the manager is stopping.
    pub async fn handle_report(&self, session: SessionId, report: ObservedState) -> Result<(), DriverError> {
        for part in report.into_parts(REPORT_PART_ENTRIES_MAX) {
            let is_continued = part.is_continued;
            self.0.handle_event(Event::AgentReport(session, part))?;
            if is_continued {
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    /// Removes the connection of an agent.
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

    /// Stops the driver: further events are rejected, and the thread ends after all decisions are
    /// durable.
    pub fn close(&self) {
        let mut core = self.0.lock();
        core.is_closed = true;
        core.sleeping_until = None;
        drop(core);
        self.0.work_available.notify_one();
        self.0.batch_space.notify_waiters();
    }

    /// Wakes the driver's thread, and returns the number of iterations of its main loop. If the
    /// next call returns the same number, the thread is stuck.
    pub fn wake_and_count_iterations(&self) -> u64 {
        let iterations = self.0.iterations.load(Ordering::Relaxed);
        self.0.lock().sleeping_until = None;
        self.0.work_available.notify_one();
        iterations
    }

    /// Subscribes to durable changes of the ledger, see [`WriteChunk`]. A receiver that is more
    /// than [`WATCH_CHUNKS_QUEUED_MAX`] chunks behind loses the oldest chunks.
    pub fn subscribe_to_changes(&self) -> broadcast::Receiver<WriteChunk> {
        self.0.published.subscribe()
    }

    /// Returns a receiver that is notified when the state returned by [`Handle::read`] may have
    /// changed.
    pub fn subscribe_to_notifications(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    /// Reserves one of the [`WATCH_STREAMS_MAX`] watch streams of a service. Returns `None` if all of them
    /// are open.
    pub fn try_watch_permit(&self, service: WatchService) -> Option<OwnedSemaphorePermit> {
        let permits = match service {
            WatchService::Scheduler => &self.0.scheduler_watch_permits,
            WatchService::Admin => &self.0.admin_watch_permits,
        };
        Arc::clone(permits).try_acquire_owned().ok()
    }
}

/// Configuration and stored state at the start of the driver.
#[derive(Debug)]
pub struct InitialState {
    /// Lease and fencing times from `rack.toml`.
    pub settings: Settings,
    /// Command that powers off a host whose access to an EMC cannot be revoked.
    pub fence_command: Option<FenceCommand>,
    /// Metadata of the ledger.
    pub meta: Meta,
    /// Records of the ledger.
    pub records: Vec<Record>,
    /// Whether the store was restored from a backup since the last start.
    pub restored: bool,
    /// This manager as the elected leader; `None` if no other manager can take over.
    pub leader: Option<ElectedManager>,
}

/// Receiver that completes when the driver's thread has ended.
pub type DriverEnd = oneshot::Receiver<()>;

/// Starts the driver's thread; must be called within a Tokio runtime. The thread ends after
/// [`Handle::close`], once all decisions are durable and the store is closed.
///
/// # Errors
/// Returns the error of the operating system if the thread cannot be created.
pub fn start(
    initial: InitialState,
    store: Box<dyn Store>,
    metrics: Arc<Metrics>,
) -> std::io::Result<(Handle, DriverEnd)> {
    let InitialState { settings, fence_command, meta, records, restored, leader } = initial;
    let clock = Clock { base: meta.rack_time, started: Instant::now() };
    let mut manager = Manager::new(settings);
    manager.handle(clock.now(), Event::Loaded { meta, records, restored });
    let core = DriverCore {
        manager,
        replies: HashMap::new(),
        sessions: HashMap::new(),
        store_tasks: VecDeque::new(),
        fence_command,
        pending_fences: HashMap::new(),
        next_token: 0,
        next_session: 0,
        sleeping_until: None,
        is_closed: false,
    };
    let shared = Arc::new(SharedDriver {
        core: Mutex::new(core),
        work_available: Condvar::new(),
        batch_space: Notify::new(),
        request_permits: Semaphore::new(LEDGER_REQUESTS_QUEUED_MAX),
        explain_permits: Arc::new(Semaphore::new(EXPLAIN_CALLS_IN_FLIGHT_MAX)),
        iterations: AtomicU64::new(0),
        clock,
        leader,
        published: broadcast::channel(WATCH_CHUNKS_QUEUED_MAX).0,
        changed: watch::channel(0).0,
        scheduler_watch_permits: Arc::new(Semaphore::new(WATCH_STREAMS_MAX)),
        admin_watch_permits: Arc::new(Semaphore::new(WATCH_STREAMS_MAX)),
    });
    let mut thread = DriverThread::new(Arc::clone(&shared), LedgerStore::new(store, restored), metrics);
    let (end, ended) = oneshot::channel();
    std::thread::Builder::new().name("ledger".into()).spawn(move || {
        if catch_unwind(AssertUnwindSafe(|| thread.run())).is_err() {
            std::process::abort(); // without this thread nothing would be stored
        }
        drop(thread);
        let _ = end.send(()); // the receiver may have been dropped
    })?;
    Ok((Handle(shared), ended))
}

/// Clock of the rack time, which is the total time that managers of this rack have run.
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
