//! State that all connections share.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use service_files::log_limit::RejectionLog;
use soft::SoftError;
use tokio::sync::Notify;
use units::{UnixMs, limits::SOFT_CACHE_BUFFER_BYTES_MAX};

use crate::{
    memory::Memory,
    password::Password,
    session::{Peer, Session},
    store::Store,
};

/// Numbers of events since the start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Accepted connections.
    pub connections: AtomicU64,
    /// Connections that were closed because of the limit of clients.
    pub rejected: AtomicU64,
    /// Executed commands, including those with an error.
    pub commands: AtomicU64,
    /// Connections that were closed because of a violation of the protocol, a limit or a timeout.
    pub closed: AtomicU64,
}

/// State that all connections share.
#[derive(Debug)]
pub struct Server {
    /// Values by key.
    pub store: Store,
    /// Budget of the values.
    pub memory: Arc<Memory>,
    /// Required password.
    pub password: Option<Password>,
    /// Maximum number of clients.
    pub clients_max: u32,
    /// Counts of events.
    pub counters: Counters,
    /// Rate-limited log of rejected clients and closed connections.
    pub log: RejectionLog,
    /// The same for wrong passwords, which a client can send in large numbers.
    pub password_log: RejectionLog,
    started: Instant,
    clients: AtomicUsize,
    /// Size of the buffers of all connections.
    buffer_bytes: AtomicUsize,
    is_stopping: AtomicBool,
    stop: Notify,
}

/// Counts a connected client until it is dropped.
#[derive(Debug)]
pub struct ClientSlot(Arc<Server>);

impl Drop for ClientSlot {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Server {
    /// Creates the state of a server whose values are in the memory.
    ///
    /// # Errors
    /// Returns an error if the pool has too many structures.
    pub fn new(memory: Memory, password: Option<Password>, clients_max: u32) -> Result<Self, SoftError> {
        Ok(Self {
            store: Store::new(memory.pool())?,
            memory: Arc::new(memory),
            password,
            clients_max,
            counters: Counters::default(),
            log: RejectionLog::default(),
            password_log: RejectionLog::default(),
            started: Instant::now(),
            clients: AtomicUsize::new(0),
            buffer_bytes: AtomicUsize::new(0),
            is_stopping: AtomicBool::new(false),
            stop: Notify::new(),
        })
    }

    /// Adds a client. Returns `None` if there are as many clients as allowed.
    pub fn add_client(self: &Arc<Self>, peer: Peer) -> Option<(ClientSlot, Session)> {
        let clients = self.clients.fetch_add(1, Ordering::Relaxed);
        let slot = ClientSlot(self.clone());
        if clients >= self.clients_max as usize {
            self.counters.rejected.fetch_add(1, Ordering::Relaxed);
            self.log.log(&peer, &format_args!("max number of clients reached ({})", self.clients_max));
            return None;
        }
        let id = self.counters.connections.fetch_add(1, Ordering::Relaxed) + 1;
        Some((slot, Session::new(id, peer, self.password.is_none())))
    }

    /// Returns the number of connected clients.
    pub fn clients(&self) -> usize {
        self.clients.load(Ordering::Relaxed)
    }

    /// Returns the size of the buffers of all connections in bytes.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes.load(Ordering::Relaxed)
    }

    /// Counts a change of the size of a connection's buffers. Returns whether all buffers together are within the
    /// limit.
    pub fn resize_buffers(&self, before: usize, now: usize) -> bool {
        let added = self.buffer_bytes.fetch_add(now, Ordering::Relaxed) + now;
        self.buffer_bytes.fetch_sub(before, Ordering::Relaxed);
        now <= before || added - before <= SOFT_CACHE_BUFFER_BYTES_MAX
    }

    /// Returns the time since the start in seconds.
    pub fn uptime_s(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    /// Makes all connections close after the replies to the requests that have arrived.
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        self.stop.notify_waiters();
    }

    /// Returns whether the server stops.
    pub fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// Waits for a call of [`stop`](Self::stop) after the creation of the future.
    pub fn stopped(&self) -> tokio::sync::futures::Notified<'_> {
        self.stop.notified()
    }
}

/// Returns the current time.
pub fn unix_now() -> UnixMs {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UnixMs(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
