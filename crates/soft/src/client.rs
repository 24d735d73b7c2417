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
//! for more budget fail.
//!
//! A forked child does not use the connection of its parent, and can neither get nor give back budget.

#![expect(clippy::disallowed_methods, reason = "the connection has a clock, and waits for the daemon")]

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    thread,
    time::Instant,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    net::{
        AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
        connect as connect_socket, recv, send, shutdown, socket_with,
    },
};
use units::{
    Ns,
    limits::{
        SOFT_DENIAL_INTERVAL, SOFT_RECONNECT_INTERVAL, SOFT_REQUEST_TIMEOUT, SOFT_REVOKED_PAGES_MAX,
        SOFT_USAGE_INTERVAL, SOFT_WELCOME_TIMEOUT,
    },
};

use crate::{
    error::PoolError,
    heap::{BudgetSource, Pool},
    protocol::{ClientMessage, DaemonMessage, MESSAGE_BYTES, Refusal, VERSION},
};

/// Reason why a process cannot use the daemon.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The pool cannot be created.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The operating system rejected an operation.
    #[error("cannot {operation} the soft memory daemon at {}: {source}", path.display())]
    Io {
        /// Operation, such as `connect to`.
        operation: &'static str,
        /// Socket of the daemon.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The daemon refused the connection.
    #[error("the soft memory daemon at {} refused the connection: {reason}", path.display())]
    Refused {
        /// Socket of the daemon.
        path: PathBuf,
        /// Reason.
        reason: Refusal,
    },
}

/// Connects to the daemon, and creates a pool without budget, which requests up to `budget_max` pages of 4 KiB. The
/// address space is that of [`Pool::new`] with this budget. The connection ends when the pool is dropped.
///
/// # Errors
/// Returns an error if the pool cannot be created, or if the daemon cannot be reached or refuses the process.
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
        let is_awaited = !state.is_overdue && state.request(pages, self.0.budget_max, held);
        is_awaited.then_some(state.answers + 1)
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

fn io_error<E: Into<io::Error>>(path: &Path, operation: &'static str) -> impl FnOnce(E) -> ConnectError {
    let path = path.to_owned();
    move |error| ConnectError::Io { operation, path, source: error.into() }
}

/// Function that is called with the number of answered or lost requests.
type OnAnswer = Box<dyn Fn(u64) + Send + Sync>;

/// Connection to the daemon, as source of budget.
struct Link {
    path: PathBuf,
    /// Largest budget in pages.
    budget_max: u64,
    /// Process that connected.
    process: u32,
    pool: OnceLock<Weak<Pool>>,
    state: Mutex<State>,
    /// Notified when `answers` changes.
    answered: Condvar,
    /// Called when `answers` changes. With this function, insertions do not wait for answers.
    on_answer: Option<OnAnswer>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("path", &self.path).field("state", &self.state).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct State {
    socket: Option<Arc<OwnedFd>>,
    /// Budget that the daemon has recorded after it has received all messages. The budget of the pool is never
    /// larger: it is increased later and reduced earlier.
    recorded: u64,
    /// Whether a request was not answered yet.
    is_requested: bool,
    /// Whether the request was not answered in time. No thread waits for it any more.
    is_overdue: bool,
    /// Number of answered or lost requests.
    answers: u64,
    /// Time and pages of the last denied request.
    denied: Option<(Instant, u64)>,
    /// Pages of the last request.
    requested: u64,
    /// Pages that the daemon has not recorded any more, and that the pool has not given up yet.
    debt: u64,
}

impl State {
    /// Returns whether a request of at most this size was denied recently.
    fn was_denied_recently(&self, pages: u64) -> bool {
        let is_recent = |at: Instant| Ns::from(at.elapsed()) < SOFT_DENIAL_INTERVAL;
        self.denied.is_some_and(|(at, denied)| pages >= denied && is_recent(at))
    }

    /// Sends a message. A connection that accepts no message is given up: the daemon always reads its messages.
    fn send(&mut self, message: ClientMessage) -> bool {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let is_sent =
            self.socket.as_ref().is_some_and(|socket| send(socket, &message.encode(), flags).is_ok());
        if !is_sent {
            self.close();
        }
        is_sent
    }

    /// Ends the connection, also if a forked child has the socket, too. The thread notices it.
    fn close(&mut self) {
        if let Some(socket) = self.socket.take() {
            shutdown(&socket, Shutdown::Both).ok(); // the connection may have ended already
        }
    }

    /// Requests pages up to the largest budget, unless as many or fewer were denied recently. Returns whether there is
    /// a request, which may be an earlier one.
    fn request(&mut self, pages: usize, budget_max: u64, held: usize) -> bool {
        let pages = budget_max.saturating_sub(self.recorded).min(pages as u64);
        if !self.is_requested && self.debt == 0 && pages > 0 && !self.was_denied_recently(pages) {
            self.requested = pages;
            self.is_requested = self.send(ClientMessage::Request { pages, held: held as u64 });
        }
        self.is_requested
    }

    /// Records that the pool must give pages up that the daemon has not recorded any more.
    fn owe(&mut self, pages: u64) {
        self.recorded = self.recorded.saturating_sub(pages);
        self.debt = self.debt.saturating_add(pages);
    }

    /// Gives back budget that the pool does not have any more. Without a connection, the next one begins without
    /// it.
    fn give_back(&mut self, pages: u64, held: u64) {
        self.recorded = self.recorded.saturating_sub(pages);
        self.send(ClientMessage::Returned { pages, held });
    }
}

impl BudgetSource for Link {
    /// Waits until a request is answered, unless insertions do not wait. The thread adds the granted pages.
    fn request(&self, pages: usize) -> usize {
        let Some(pool) = self.own_pool().filter(|_| self.on_answer.is_none()) else { return 0 };
        let held = pool.stats().held;
        let mut state = self.state();
        if !state.request(pages, self.budget_max, held) || state.is_overdue {
            return 0;
        }
        let answers = state.answers;
        let timeout = SOFT_REQUEST_TIMEOUT.as_duration();
        let waited = self.answered.wait_timeout_while(state, timeout, |state| state.answers == answers);
        let (mut state, result) = waited.unwrap_or_else(PoisonError::into_inner);
        state.is_overdue = result.timed_out();
        0
    }

    fn request_ahead(&self, pages: usize) {
        let Some(pool) = self.own_pool() else { return };
        let held = pool.stats().held;
        self.state().request(pages, self.budget_max, held);
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
            state.close(); // the pool is being dropped
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
            budget_max: budget_max as u64,
            process: std::process::id(),
            pool: OnceLock::new(),
            state: Mutex::default(),
            answered: Condvar::new(),
            on_answer,
        });
        let pool = Pool::with_source(0, Pool::address_space_for(budget_max), link.clone())?;
        link.pool.get_or_init(|| Arc::downgrade(&pool));
        let (first, connection) = (link.open()?, link.clone());
        let thread = thread::Builder::new().name("tarn-soft".to_owned());
        thread.spawn(move || connection.run(first)).map_err(io_error(path, "start the thread for"))?;
        Ok((pool, link))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pool(&self) -> Option<Arc<Pool>> {
        self.pool.get()?.upgrade()
    }

    /// Returns the pool, unless this process is a forked child.
    fn own_pool(&self) -> Option<Arc<Pool>> {
        if self.process == std::process::id() { self.pool() } else { None }
    }

    /// Connects, and states the recorded budget. Gives up the part of it that the daemon does not accept.
    fn open(&self) -> Result<Arc<OwnedFd>, ConnectError> {
        // If the daemon is stopped and its queue of connections is full, this is an error.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(io_error(&self.path, "create a socket for"))?;
        let address = SocketAddrUnix::new(&self.path).map_err(io_error(&self.path, "connect to"))?;
        connect_socket(&socket, &address).map_err(io_error(&self.path, "connect to"))?;
        let socket = Arc::new(socket);
        let mut state = self.state();
        let budget = state.recorded;
        state.socket = Some(socket.clone());
        state.send(ClientMessage::Hello { version: VERSION, budget });
        drop(state);
        let answer = match wait_readable(&socket, SOFT_WELCOME_TIMEOUT) {
            Ok(true) => receive(&socket),
            Ok(false) => Err(io::ErrorKind::TimedOut.into()),
            Err(error) => Err(error),
        };
        match answer {
            Ok(DaemonMessage::Welcome { budget: kept }) => {
                self.state().owe(budget.saturating_sub(kept));
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
        if let Some(pool) = self.pool().filter(|_| debt > 0) {
            let revoked = pool.revoke(to_usize(debt)) as u64;
            let mut state = self.state();
            state.debt = state.debt.saturating_sub(revoked).min(pool.stats().budget as u64);
        }
    }

    /// Handles messages until the pool is dropped.
    fn run(&self, first: Arc<OwnedFd>) {
        let mut connection = Some(first);
        loop {
            let ended = connection.take().map_or(Ended::Lost, |socket| self.serve(&socket));
            if matches!(ended, Ended::PoolDropped) {
                return;
            }
            self.forget_connection();
            thread::sleep(SOFT_RECONNECT_INTERVAL.as_duration());
            if self.pool().is_none() {
                return;
            }
            connection = self.open().ok();
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
        self.answered.notify_all();
        self.on_answer.iter().for_each(|on_answer| on_answer(answers));
    }

    fn serve(&self, socket: &Arc<OwnedFd>) -> Ended {
        let mut reported = None;
        let mut reported_at = Instant::now();
        loop {
            let Some(pool) = self.pool() else { return Ended::PoolDropped };
            let held = pool.stats().held as u64;
            drop(pool); // the owner of the pool can drop it meanwhile
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
        let pool = self.pool().ok_or(Ended::PoolDropped)?;
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
                self.revoke(&pool, pages);
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

/// Waits until a message or the end of the connection can be received. Returns `false` after the timeout.
fn wait_readable(socket: &OwnedFd, timeout: Ns) -> io::Result<bool> {
    let timeout = Timespec::try_from(timeout.as_duration()).map_err(io::Error::other)?;
    loop {
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn receive(socket: &OwnedFd) -> io::Result<DaemonMessage> {
    let mut buffer = [0; MESSAGE_BYTES + 1]; // a longer message is detected by its length
    let (received, _) = recv(socket, &mut buffer, RecvFlags::empty())?;
    DaemonMessage::decode(&buffer[..received]).map_err(io::Error::other)
}
