//! Clients of the cache: each requests a batch of random keys per interval, reads the values of missing keys from a
//! backend, and stores them in the cache.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use benches::{
    cache_client::{Client, Reply},
    failure::Failure,
};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64Mcg;

/// Number of values (Soft Memory, section 5).
pub const KEYS: u64 = 130_000;
/// A key and its value need 80 bytes in `soft-cache`, so that all need 10 MiB.
pub const VALUE: [u8; 64] = [b'v'; 64];
/// Number of clients, each with one batch at a time.
const CLIENTS: u64 = 8;
/// Number of keys that a client requests together.
const BATCH: u64 = 8;
/// Number of keys per second that all clients request, unless the backend is too slow.
pub const KEYS_PER_SECOND: u64 = 20_000;
/// Interval between two batches of a client.
const INTERVAL: Duration = Duration::from_nanos(1_000_000_000 * CLIENTS * BATCH / KEYS_PER_SECOND);

/// Load of a cache server, with its counters.
#[derive(Debug)]
pub struct Load {
    address: SocketAddr,
    backend_latency: Duration,
    start: Instant,
    is_done: AtomicBool,
    hits: AtomicU64,
    misses: AtomicU64,
    unanswered: AtomicU64,
    errors: AtomicU64,
    /// Time of the last reply in nanoseconds since the start.
    last_reply_ns: AtomicU64,
    longest_gap_ns: AtomicU64,
}

/// Numbers of requested keys.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub hits: u64,
    /// Keys that the server did not have.
    pub misses: u64,
    /// Keys that the server did not answer. Their values were read from the backend.
    pub unanswered: u64,
}

impl Counts {
    /// Returns the number of all keys.
    pub fn keys(self) -> u64 {
        self.hits + self.backend_reads()
    }

    /// Returns the number of values that were read from the backend.
    pub fn backend_reads(self) -> u64 {
        self.misses + self.unanswered
    }

    /// Returns the part of the keys that the server had, or NaN without keys.
    pub fn hit_ratio(self) -> f64 {
        self.hits as f64 / self.keys() as f64
    }

    /// Returns the counts since an earlier time.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            hits: self.hits - earlier.hits,
            misses: self.misses - earlier.misses,
            unanswered: self.unanswered - earlier.unanswered,
        }
    }
}

impl Load {
    /// Creates the load of the server at an address, without clients.
    pub fn new(address: SocketAddr, backend_latency: Duration) -> Self {
        Self {
            address,
            backend_latency,
            start: Instant::now(),
            is_done: AtomicBool::new(false),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            unanswered: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            last_reply_ns: AtomicU64::new(0),
            longest_gap_ns: AtomicU64::new(0),
        }
    }

    /// Runs `observe` while the clients send requests.
    pub fn run_during<R>(&self, observe: impl FnOnce() -> R) -> R {
        thread::scope(|scope| {
            for client in 0..CLIENTS {
                scope.spawn(move || self.run_client(client));
            }
            let result = observe();
            self.is_done.store(true, Ordering::Relaxed);
            result
        })
    }

    /// Returns the time since the start.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Returns the number of requested keys since the start.
    pub fn counts(&self) -> Counts {
        Counts {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            unanswered: self.unanswered.load(Ordering::Relaxed),
        }
    }

    /// Returns the number of error replies since the start.
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Returns the longest time without a reply to any client since the last call.
    pub fn take_longest_gap(&self) -> Duration {
        Duration::from_nanos(self.longest_gap_ns.swap(0, Ordering::Relaxed))
    }

    fn run_client(&self, client: u64) {
        let mut random = Pcg64Mcg::seed_from_u64(client);
        let mut connection = None;
        let mut due = Instant::now() + INTERVAL * u32::try_from(client).unwrap_or(0) / 8;
        while !self.is_done.load(Ordering::Relaxed) {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let keys: Vec<u64> = (0..BATCH).map(|_| random.random_range(0..KEYS)).collect();
            if self.request(&mut connection, &keys).is_err() {
                connection = None;
            }
            due = (due + INTERVAL).max(Instant::now());
        }
    }

    /// Requests keys, and stores the values of missing keys. Connects if there is no connection.
    fn request(&self, connection: &mut Option<Client>, keys: &[u64]) -> Result<(), Failure> {
        let missing = match self.get(connection, keys) {
            Ok(missing) => missing,
            Err(failure) => {
                self.unanswered.fetch_add(keys.len() as u64, Ordering::Relaxed);
                self.read_from_backend(keys.len());
                return Err(failure);
            }
        };
        self.record_reply();
        self.hits.fetch_add((keys.len() - missing.len()) as u64, Ordering::Relaxed);
        self.misses.fetch_add(missing.len() as u64, Ordering::Relaxed);
        self.read_from_backend(missing.len());
        if let Some(client) = connection {
            let errors = client.set_all(missing, &VALUE)?;
            self.errors.fetch_add(errors, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns the keys that the server does not have.
    fn get(&self, connection: &mut Option<Client>, keys: &[u64]) -> Result<Vec<String>, Failure> {
        let client = match connection {
            Some(client) => client,
            None => connection.insert(Client::connect(self.address)?),
        };
        let names = keys.iter().map(|key| key_name(*key));
        let names: Vec<String> = names.inspect(|name| client.add(&[b"GET", name.as_bytes()])).collect();
        client.send()?;
        let mut missing = Vec::new();
        for name in names {
            match client.receive()? {
                Reply::Success => {}
                Reply::Missing => missing.push(name),
                Reply::Error(_) => {
                    self.errors.fetch_add(1, Ordering::Relaxed);
                    missing.push(name);
                }
            }
        }
        Ok(missing)
    }

    /// Waits as long as the backend needs for values that are read one after the other.
    fn read_from_backend(&self, values: usize) {
        thread::sleep(self.backend_latency * u32::try_from(values).unwrap_or(u32::MAX));
    }

    fn record_reply(&self) {
        let now = u64::try_from(self.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let last = self.last_reply_ns.fetch_max(now, Ordering::Relaxed);
        self.longest_gap_ns.fetch_max(now.saturating_sub(last), Ordering::Relaxed);
    }
}

/// Returns the name of a key.
pub fn key_name(key: u64) -> String {
    format!("pair:{key}")
}
