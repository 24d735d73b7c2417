//! Connection of a process to the soft memory daemon of its host.
//!
//! [`connect`] creates a pool without budget. The pool requests budget from the daemon when its structures need
//! pages. One thread receives the daemon's messages, and revokes pages for its demands; callbacks of evicted values
//! run in this thread.
//!
//! A program whose threads must not wait for the daemon uses [`connect_without_waiting`], and requests budget with
//! [`Requests`].
//!
//! If the connection ends, the pool keeps its budget, and the thread connects again. Without a connection, requests
//! for more budget fail. If the daemon refuses the process for `units::limits::SOFT_REFUSED_TIME`, the pool gives its
//! budget up, because the daemon does not count it.
//!
//! A process has at most one connection to a daemon. The drop of the last reference to the pool waits for the end of
//! the thread, at most `units::limits::SOFT_CLIENT_END_TIMEOUT`, unless the thread itself drops it, as a callback can.
//! [`Pool::release`] also waits if only the thread still uses the pool.
//!
//! A forked child does not use the connection of its parent, and can neither get nor give back budget.

#![expect(clippy::disallowed_methods, reason = "the connection has a clock, and waits for the daemon")]

mod socket;
mod state;

use std::{
    cell::Cell,
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    thread::{self, JoinHandle},
    time::Instant,
};

use rustix::fd::OwnedFd;
use units::{
    Ns,
    limits::{
        SOFT_CLIENT_END_TIMEOUT, SOFT_CONNECT_RETRY_INTERVAL, SOFT_CONNECT_RETRY_TIME,
        SOFT_RECONNECT_INTERVAL, SOFT_REFUSED_TIME, SOFT_REQUEST_TIMEOUT, SOFT_REVOKED_PAGES_MAX,
        SOFT_USAGE_INTERVAL, SOFT_WELCOME_TIMEOUT,
    },
};

use crate::{
    client::{
        socket::{connect_to, io_error, receive, wait_readable},
        state::State,
    },
    heap::{BudgetSource, Pool},
    protocol::{ClientMessage, DaemonMessage, VERSION},
};

pub use self::{socket::ConnectError, state::Connection};

/// Connects to the daemon, and creates a pool without budget, which requests up to `budget_max` pages of 4 KiB. The
/// address space is that of [`Pool::new`] with this budget. The connection ends when the pool is dropped. Tries again
/// for `units::limits::SOFT_CONNECT_RETRY_TIME` if the process is connected already, or if the daemon is busy.
///
/// # Errors
/// Returns an error if the pool cannot be created, or if the daemon cannot be reached or refuses the process, such as
/// [`Refusal::AlreadyConnected`](crate::protocol::Refusal::AlreadyConnected) if the process has another connected pool.
pub fn connect(path: &Path, budget_max: usize) -> Result<Arc<Pool>, ConnectError> {
    Link::start(path, budget_max, None).map(|(pool, _)| pool)
}

/// Does the same for a program whose threads must not wait for the daemon: insertions that lack budget fail or evict
/// at once. The program requests budget with the [`Requests`]. `on_answer` is called with the number of answered or
/// lost requests when it changes, in the thread of the connection.
///
/// # Errors
/// See [`connect`].
pub fn connect_without_waiting(
    path: &Path,
    budget_max: usize,
    on_answer: impl Fn(u64) + Send + Sync + 'static,
) -> Result<(Arc<Pool>, Requests), ConnectError> {
    let (pool, link) = Link::start(path, budget_max, Some(Box::new(on_answer)))?;
    Ok((pool, Requests(link)))
}

/// Requests for the budget of a pool from [`connect_without_waiting`].
#[derive(Clone, Debug)]
pub struct Requests(Arc<Link>);

impl Requests {
    /// Requests pages, unless an earlier request is not answered yet. Returns the number of the answer, or `None` if
    /// there is no request: the budget has its largest size, as many or fewer pages were denied a short time ago, there
    /// is no connection, or the answer to an earlier request is overdue.
    pub fn request(&self, pages: usize) -> Option<u64> {
        let held = self.0.own_pool()?.stats().held;
        let mut state = self.0.state();
        let is_awaited = !state.is_overdue && state.request(pages, held);
        is_awaited.then_some(state.answers + 1)
    }

    /// Returns the largest budget in pages: the smaller of those of the program and of the daemon.
    pub fn maximum(&self) -> usize {
        self.0.maximum()
    }

    /// Returns the state of the connection.
    pub fn connection(&self) -> Connection {
        self.0.state().connection
    }

    /// Returns whether a request is not answered yet, and not overdue.
    pub fn is_open(&self) -> bool {
        let state = self.0.state();
        state.is_requested && !state.is_overdue
    }

    /// Records that an answer is overdue. There are no further requests until it arrives.
    pub fn give_up(&self, answer: u64) {
        let mut state = self.0.state();
        state.is_overdue |= state.is_requested && state.answers < answer;
    }
}

thread_local! {
    /// Address of the [`Link`] whose messages this thread handles, or 0. The ID of a thread would need memory that is
    /// never freed in threads of C programs.
    static SERVED: Cell<usize> = const { Cell::new(0) };
}

/// Function that is called with the number of answered or lost requests.
type OnAnswer = Box<dyn Fn(u64) + Send + Sync>;

/// Connection to the daemon, as source of budget.
struct Link {
    path: PathBuf,
    /// Process that connected.
    process: u32,
    pool: OnceLock<Weak<Pool>>,
    state: Mutex<State>,
    /// Notified when `answers` changes, when the pool is dropped, and when the thread does not use it any more.
    changed: Condvar,
    /// Called when `answers` changes. With this function, insertions do not wait for answers.
    on_answer: Option<OnAnswer>,
    /// Thread that handles messages.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("path", &self.path).field("state", &self.state).finish_non_exhaustive()
    }
}

impl BudgetSource for Link {
    /// Waits until a request is answered, unless insertions do not wait. The thread adds the granted pages.
    fn request(&self, pages: usize) -> usize {
        let Some(pool) = self.own_pool().filter(|_| self.on_answer.is_none()) else { return 0 };
        let held = pool.stats().held;
        let mut state = self.state();
        if !state.request(pages, held) || state.is_overdue {
            return 0;
        }
        let answers = state.answers;
        let timeout = SOFT_REQUEST_TIMEOUT.as_duration();
        let waited = self.changed.wait_timeout_while(state, timeout, |state| state.answers == answers);
        let (mut state, result) = waited.unwrap_or_else(PoisonError::into_inner);
        state.is_overdue = result.timed_out();
        0
    }

    fn request_ahead(&self, pages: usize) {
        let Some(pool) = self.own_pool() else { return };
        let held = pool.stats().held;
        self.state().request(pages, held);
    }

    fn maximum(&self) -> usize {
        to_usize(self.state().maximum())
    }

    fn give_back(&self, pages: usize) {
        if self.process != std::process::id() {
            return;
        }
        let pool = self.pool();
        let held = pool.as_ref().map_or(0, |pool| pool.stats().held);
        let mut state = self.state();
        if pages > 0 {
            state.give_back(pages as u64, held as u64);
        }
        if pool.is_none() {
            // The pool is being dropped.
            state.close();
            state.is_ending = true;
            drop(state);
            self.changed.notify_all();
            self.wait_for_end();
        }
    }

    /// Waits for the end of the thread, if the pool is dropped or used by nothing but the thread, at most
    /// [`SOFT_CLIENT_END_TIMEOUT`]. Does not wait in the thread itself.
    fn wait_for_end(&self) {
        // The lock of the thread is not available to a forked child, and not to the thread itself.
        if self.process != std::process::id() || SERVED.get() == self.address() {
            return;
        }
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            return;
        }
        let is_in_use = |state: &mut State| {
            let owners = self.pool.get().map_or(0, Weak::strong_count);
            !state.has_ended && (owners == 0 || (owners == 1 && state.is_pool_in_use))
        };
        let timeout = SOFT_CLIENT_END_TIMEOUT.as_duration();
        let waited = self.changed.wait_timeout_while(self.state(), timeout, is_in_use);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let has_ended = state.has_ended;
        drop(state);
        if let Some(thread) = thread.take_if(|_| has_ended) {
            thread.join().ok(); // a panic of the thread was reported already
        }
    }
}

/// Reason why a connection ended.
enum Ended {
    /// The pool was dropped.
    PoolDropped,
    /// The connection is lost, or the daemon sent an invalid message.
    Lost,
}

impl Link {
    /// Creates a pool, and connects it.
    fn start(
        path: &Path,
        budget_max: usize,
        on_answer: Option<OnAnswer>,
    ) -> Result<(Arc<Pool>, Arc<Self>), ConnectError> {
        let link = Arc::new(Self {
            path: path.to_owned(),
            process: std::process::id(),
            pool: OnceLock::new(),
            state: Mutex::new(State::new(budget_max as u64)),
            changed: Condvar::new(),
            on_answer,
            thread: Mutex::default(),
        });
        let pool = Pool::with_source(0, Pool::address_space_for(budget_max), link.clone())?;
        link.pool.get_or_init(|| Arc::downgrade(&pool));
        let (first, connection) = (link.open_with_retries()?, link.clone());
        let thread = thread::Builder::new().name("tarn-soft".to_owned());
        let thread = thread.spawn(move || {
            SERVED.set(connection.address());
            connection.run(first);
            connection.state().has_ended = true;
            connection.changed.notify_all();
        });
        let thread = thread.map_err(io_error(path, "start the thread for"))?;
        *link.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok((pool, link))
    }

    /// Connects, with further attempts after a transient error.
    fn open_with_retries(&self) -> Result<Arc<OwnedFd>, ConnectError> {
        let started = Instant::now();
        let mut pause = SOFT_CONNECT_RETRY_INTERVAL.as_duration();
        loop {
            match self.open() {
                Err(error) if error.is_transient() => {
                    let left = SOFT_CONNECT_RETRY_TIME.as_duration().saturating_sub(started.elapsed());
                    if left.is_zero() {
                        return Err(error);
                    }
                    thread::sleep(pause.min(left));
                    pause *= 2;
                }
                result => return result,
            }
        }
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pool(&self) -> Option<Arc<Pool>> {
        self.pool.get()?.upgrade()
    }

    /// Calls a function of the thread with the pool. Returns `None` if the pool was dropped.
    fn with_pool<R>(&self, function: impl FnOnce(&Pool) -> R) -> Option<R> {
        self.state().is_pool_in_use = true;
        let pool = self.pool();
        let result = pool.as_deref().map(function);
        drop(pool);
        self.state().is_pool_in_use = false;
        self.changed.notify_all();
        result
    }

    /// Returns the pool, unless this process is a forked child.
    fn own_pool(&self) -> Option<Arc<Pool>> {
        if self.process == std::process::id() { self.pool() } else { None }
    }

    /// Connects, and states the recorded budget. Gives up the part of it that the daemon does not accept.
    fn open(&self) -> Result<Arc<OwnedFd>, ConnectError> {
        let socket = Arc::new(connect_to(&self.path)?);
        let mut state = self.state();
        let budget = state.recorded;
        if !state.is_ending {
            state.socket = Some(socket.clone());
        }
        state.send(ClientMessage::Hello { version: VERSION, budget });
        drop(state);
        let answer = match wait_readable(&socket, SOFT_WELCOME_TIMEOUT) {
            Ok(true) => receive(&socket),
            Ok(false) => Err(io::ErrorKind::TimedOut.into()),
            Err(error) => Err(error),
        };
        match answer {
            Ok(DaemonMessage::Welcome { budget: kept, maximum }) => {
                let mut state = self.state();
                state.daemon_max = maximum;
                state.connection = Connection::Connected;
                state.owe(budget.saturating_sub(kept));
                drop(state);
                self.pay_debt();
                Ok(socket)
            }
            Ok(DaemonMessage::Refused(reason)) => {
                Err(ConnectError::Refused { path: self.path.clone(), reason })
            }
            Ok(_) => Err(io_error(&self.path, "understand")(io::Error::from(io::ErrorKind::InvalidData))),
            Err(error) => Err(io_error(&self.path, "receive from")(error)),
        }
    }

    /// Revokes budget that the daemon has not recorded, as far as possible.
    fn pay_debt(&self) {
        let debt = self.state().debt;
        if debt > 0 {
            self.with_pool(|pool| {
                let revoked = pool.revoke(to_usize(debt)) as u64;
                let mut state = self.state();
                state.debt = state.debt.saturating_sub(revoked).min(pool.stats().budget as u64);
            });
        }
    }

    /// Handles messages until the pool is dropped.
    fn run(&self, first: Arc<OwnedFd>) {
        let mut connection = Some(first);
        let mut refused_since = None;
        loop {
            let ended = connection.take().map_or(Ended::Lost, |socket| self.serve(&socket));
            if matches!(ended, Ended::PoolDropped) {
                return;
            }
            self.forget_connection();
            if self.wait_before_reconnection() {
                return;
            }
            match self.open() {
                Ok(socket) => {
                    refused_since = None;
                    connection = Some(socket);
                }
                Err(error) => self.handle_failure(&error, &mut refused_since),
            }
        }
    }

    /// Waits before a further attempt to connect. Returns whether the pool was dropped.
    fn wait_before_reconnection(&self) -> bool {
        let interval = SOFT_RECONNECT_INTERVAL.as_duration();
        let waited = self.changed.wait_timeout_while(self.state(), interval, |state| !state.is_ending);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_ending
    }

    /// Gives the budget up if the daemon has refused the process for a long time: it does not count this budget.
    fn handle_failure(&self, error: &ConnectError, refused_since: &mut Option<Instant>) {
        let ConnectError::Refused { reason, .. } = error else {
            self.state().connection = Connection::Lost;
            return;
        };
        let since = *refused_since.get_or_insert_with(Instant::now);
        let mut state = self.state();
        state.connection = Connection::Refused(*reason);
        if Ns::from(since.elapsed()) >= SOFT_REFUSED_TIME {
            let recorded = state.recorded;
            state.owe(recorded);
            drop(state);
            self.pay_debt();
        }
    }

    fn forget_connection(&self) {
        self.state().close();
        self.finish_request();
    }

    /// Records that the request, if there is one, is not answered any more, and informs all that wait for it.
    fn finish_request(&self) {
        let mut state = self.state();
        (state.is_requested, state.is_overdue) = (false, false);
        state.answers += 1;
        let answers = state.answers;
        drop(state);
        self.changed.notify_all();
        self.on_answer.iter().for_each(|on_answer| on_answer(answers));
    }

    fn serve(&self, socket: &Arc<OwnedFd>) -> Ended {
        let mut reported = None;
        let mut reported_at = Instant::now();
        loop {
            let Some(held) = self.with_pool(|pool| pool.stats().held as u64) else {
                return Ended::PoolDropped;
            };
            let mut wait = SOFT_USAGE_INTERVAL.since(reported_at.elapsed().into());
            if wait == Ns::ZERO {
                (reported_at, wait) = (Instant::now(), SOFT_USAGE_INTERVAL);
                self.pay_debt();
                if !self.report(held, &mut reported) {
                    return Ended::Lost;
                }
            }
            match wait_readable(socket, wait) {
                Ok(false) => {}
                Ok(true) => match receive(socket).map(|message| self.handle(message)) {
                    Ok(Ok(())) => {}
                    Ok(Err(ended)) => return ended,
                    Err(_) => return Ended::Lost,
                },
                Err(_) => return Ended::Lost,
            }
        }
    }

    /// Reports the held pages if they or the budget have changed: the daemon counts granted pages as held until the
    /// next report. Returns whether the connection still exists.
    fn report(&self, held: u64, reported: &mut Option<(u64, u64)>) -> bool {
        let mut state = self.state();
        let use_of_budget = (held, state.recorded);
        let has_changed = reported.replace(use_of_budget) != Some(use_of_budget);
        if has_changed { state.send(ClientMessage::Usage { held }) } else { state.socket.is_some() }
    }

    fn handle(&self, message: DaemonMessage) -> Result<(), Ended> {
        self.with_pool(|pool| self.handle_with(pool, message)).unwrap_or(Err(Ended::PoolDropped))
    }

    fn handle_with(&self, pool: &Pool, message: DaemonMessage) -> Result<(), Ended> {
        match message {
            DaemonMessage::Granted { pages } => {
                let mut state = self.state();
                state.recorded = state.recorded.saturating_add(pages);
                state.denied = (pages == 0).then(|| (Instant::now(), state.requested));
                drop(state);
                if pages > 0 {
                    pool.grant(to_usize(pages));
                }
                self.finish_request();
                Ok(())
            }
            DaemonMessage::Demand { demand, pages } => {
                self.revoke(pool, pages);
                let held = pool.stats().held as u64;
                let is_sent = self.state().send(ClientMessage::Answered { demand, held });
                if is_sent { Ok(()) } else { Err(Ended::Lost) }
            }
            DaemonMessage::Welcome { .. } | DaemonMessage::Refused(_) => Err(Ended::Lost),
        }
    }

    /// Revokes pages, and gives them back in steps, so that the daemon can use the first ones early.
    fn revoke(&self, pool: &Pool, pages: u64) {
        let mut missing = to_usize(pages);
        while missing > 0 {
            let step = missing.min(SOFT_REVOKED_PAGES_MAX);
            let revoked = pool.revoke(step);
            self.state().give_back(revoked as u64, pool.stats().held as u64);
            if revoked < step {
                return;
            }
            missing -= step;
        }
    }
}

fn to_usize(pages: u64) -> usize {
    usize::try_from(pages).unwrap_or(usize::MAX)
}
