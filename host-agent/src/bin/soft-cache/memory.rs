//! Budget of the cache: its change by `CONFIG SET maxmemory`, and requests to the daemon.
//!
//! The thread that executes commands never waits for the daemon. A command that lacks budget is executed again after
//! the daemon has answered, and other clients are served meanwhile.

use std::{
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use service_files::log_limit::LogLimit;
use soft::{
    PAGE_BYTES, Pool, PoolError, PoolStats,
    client::{ConnectError, Connection, Requests},
};
use tokio::{sync::watch, time::timeout};
use units::limits::{
    SOFT_CACHE_BUDGET_WAITS_MAX, SOFT_CACHE_REQUEST_INTERVAL, SOFT_REQUEST_PAGES_MIN, SOFT_REQUEST_TIMEOUT,
};

use crate::{answer::Answer, error::CommandError};

/// Budget of the cache.
#[derive(Debug)]
pub struct Memory {
    pool: Arc<Pool>,
    /// Largest budget in pages that the address space permits.
    maximum: usize,
    /// Daemon that determines the budget.
    daemon: Option<Daemon>,
    is_changing: AtomicBool,
}

/// Requests to the daemon.
#[derive(Debug)]
struct Daemon {
    requests: Requests,
    /// Number of answered requests.
    answers: watch::Receiver<u64>,
    /// Number of insertions that lacked budget, since the last one that succeeded after a request.
    rejections: AtomicU32,
    /// Last state of the connection that [`Memory::log_connection`] has found.
    connection: Mutex<Connection>,
    log_limit: LogLimit,
}

impl Daemon {
    fn new(requests: Requests, answers: watch::Receiver<u64>) -> Self {
        let connection = Mutex::new(Connection::Connected);
        Self { requests, answers, rejections: AtomicU32::new(0), connection, log_limit: LogLimit::default() }
    }
}

impl Memory {
    /// Creates a pool with a constant budget in pages.
    ///
    /// # Errors
    /// The address space cannot be reserved.
    pub fn constant(pages: usize) -> Result<Self, PoolError> {
        Ok(Self::new(Pool::new(pages)?, pages, None))
    }

    /// Creates a pool whose budget comes from the daemon at a socket, up to `maximum` pages.
    ///
    /// # Errors
    /// The address space cannot be reserved, or the daemon cannot be used.
    pub fn from_daemon(socket: &Path, maximum: usize) -> Result<Self, ConnectError> {
        let (sender, answers) = watch::channel(0);
        let on_answer = move |answer| {
            sender.send_replace(answer);
        };
        let (pool, requests) = soft::client::connect_without_waiting(socket, maximum, on_answer)?;
        Ok(Self::new(pool, maximum, Some(Daemon::new(requests, answers))))
    }

    fn new(pool: Arc<Pool>, maximum: usize, daemon: Option<Daemon>) -> Self {
        Self { pool, maximum, daemon, is_changing: AtomicBool::new(false) }
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Returns the value of `maxmemory` in pages: the budget or, with the daemon, the largest budget, which the daemon
    /// can limit further.
    pub fn maxmemory(&self) -> usize {
        self.daemon.as_ref().map_or_else(|| self.stats().budget, |daemon| daemon.requests.maximum())
    }

    /// Returns whether the daemon determines the budget.
    pub fn has_daemon(&self) -> bool {
        self.daemon.is_some()
    }

    /// Returns the state of the connection to the daemon for INFO.
    pub fn connection(&self) -> &'static str {
        match self.daemon.as_ref().map(|daemon| daemon.requests.connection()) {
            None => "none",
            Some(Connection::Connected) => "connected",
            Some(Connection::Lost) => "disconnected",
            Some(Connection::Refused(_)) => "refused",
        }
    }

    /// Logs a change of the state of the connection since the last call.
    pub fn log_connection(&self) {
        let Some(Daemon { requests, connection, log_limit, .. }) = &self.daemon else { return };
        let current = requests.connection();
        let before =
            std::mem::replace(&mut *connection.lock().unwrap_or_else(PoisonError::into_inner), current);
        if before == current {
            return;
        }
        let Some(suppressed) = log_limit.count_line() else { return };
        match current {
            Connection::Connected => tracing::info!(suppressed, "connected to the soft memory daemon"),
            Connection::Lost => tracing::warn!(suppressed, "lost the connection to the soft memory daemon"),
            Connection::Refused(reason) => {
                tracing::warn!(%reason, suppressed, "refused by the soft memory daemon");
            }
        }
    }

    /// Logs that a new value was evicted at once.
    pub fn log_unstored(&self) {
        if let Some(suppressed) = self.daemon.as_ref().and_then(|daemon| daemon.log_limit.count_line()) {
            tracing::warn!(
                suppressed,
                "evicted a new value at once: the soft memory daemon provides no budget"
            );
        }
    }

    /// Returns whether this number of pages is within the largest budget.
    pub fn can_provide(&self, pages: usize) -> bool {
        pages <= self.maxmemory()
    }

    /// Requests budget for a command that needs `pages` unused pages, and has waited for `waits` answers already.
    /// Returns the answer for which the command must wait, or `None` if it must evict values instead. If the daemon has
    /// denied requests, only one of [`SOFT_CACHE_REQUEST_INTERVAL`] commands requests budget.
    pub fn request_budget(&self, pages: usize, waits: u32) -> Option<Answer> {
        let Daemon { requests, rejections, .. } = self.daemon.as_ref()?;
        let may_request =
            || rejections.fetch_add(1, Ordering::Relaxed).is_multiple_of(SOFT_CACHE_REQUEST_INTERVAL);
        if waits == 0 && !requests.is_open() && !may_request() {
            return None;
        }
        self.request_necessary_budget(pages, waits)
    }

    /// Does the same for a command for which no eviction suffices: each such command requests budget.
    pub fn request_necessary_budget(&self, pages: usize, waits: u32) -> Option<Answer> {
        let Daemon { requests, .. } = self.daemon.as_ref()?;
        if waits >= SOFT_CACHE_BUDGET_WAITS_MAX || !self.can_provide(pages) {
            return None;
        }
        let PoolStats { budget, held } = self.stats();
        let missing = pages.saturating_sub(budget.saturating_sub(held)).max(1);
        // A larger request amortizes its cost over many values, but may be denied.
        let wanted = missing.max(SOFT_REQUEST_PAGES_MIN << waits);
        requests.request(wanted).or_else(|| requests.request(missing)).map(Answer)
    }

    /// Records that an insertion succeeded after a request.
    pub fn count_success(&self) {
        self.daemon.iter().for_each(|daemon| daemon.rejections.store(0, Ordering::Relaxed));
    }

    /// Waits until the daemon has answered, at most [`SOFT_REQUEST_TIMEOUT`].
    pub async fn wait_for(&self, answer: Answer) {
        let Some(Daemon { requests, answers, .. }) = &self.daemon else { return };
        let mut answers = answers.clone();
        let answered = answers.wait_for(|number| *number >= answer.0);
        if timeout(SOFT_REQUEST_TIMEOUT.as_duration(), answered).await.is_err() {
            requests.give_up(answer.0);
        }
    }

    /// Returns the budget and its use.
    pub fn stats(&self) -> PoolStats {
        self.pool.stats()
    }

    /// Changes the budget to a number of bytes, rounded down to pages. Evicts values on another thread if the new
    /// budget is smaller, because this may take long.
    ///
    /// # Errors
    /// [`CommandError::MaxMemory`], [`CommandError::MaxMemoryBusy`] or [`CommandError::MaxMemoryOfDaemon`].
    pub fn resize(self: &Arc<Self>, bytes: u64) -> Result<(), CommandError> {
        if self.has_daemon() {
            return Err(CommandError::MaxMemoryOfDaemon);
        }
        let maximum = (self.maximum * PAGE_BYTES) as u64;
        let pages = usize::try_from(bytes).map_or(usize::MAX, |bytes| bytes / PAGE_BYTES);
        if pages == 0 || bytes > maximum {
            return Err(CommandError::MaxMemory { minimum: PAGE_BYTES as u64, maximum });
        }
        if self.is_changing.swap(true, Ordering::Acquire) {
            return Err(CommandError::MaxMemoryBusy);
        }
        let budget = self.pool.stats().budget;
        if pages >= budget {
            self.pool.grant(pages - budget);
            self.is_changing.store(false, Ordering::Release);
            return Ok(());
        }
        let memory = self.clone();
        tokio::task::spawn_blocking(move || {
            memory.pool.revoke(budget - pages);
            memory.is_changing.store(false, Ordering::Release);
        });
        Ok(())
    }
}
