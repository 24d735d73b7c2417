//! Limits the number of connections in total and per source, so that one source cannot block
//! others. A connection without an authorized request can be evicted: a new connection closes it.
//! Clients authorize their first request within milliseconds, so that they connect even while
//! another local user opens connections in a loop.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll},
};

use tokio::sync::oneshot;
use units::limits::{
    CONNECTIONS_MAX, CONNECTIONS_PER_SOURCE_MAX, TRUSTED_CONNECTIONS_RESERVED, UNADMITTED_CONNECTIONS_MAX,
    UNADMITTED_CONNECTIONS_PER_SOURCE_MAX,
};

use super::ConnectionOrigin;

/// Open connections, and their limits.
#[derive(Debug, Default)]
pub(super) struct ConnectionLimiter {
    connections: Mutex<Connections>,
}

#[derive(Debug, Default)]
struct Connections {
    open: usize,
    /// Number of connections without an authorized request, of all sources.
    unadmitted: usize,
    /// Number of the next connection without an authorized request.
    next_number: u64,
    /// Connections by source, for sources with an open connection.
    by_source: BTreeMap<Source, SourceConnections>,
}

#[derive(Debug, Default)]
struct SourceConnections {
    open: usize,
    /// Senders of evictions, by number of the connection without an authorized request.
    unadmitted: BTreeMap<u64, oneshot::Sender<()>>,
}

/// Source of connections: an IP address or a local user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Address(IpAddr),
    User(u32),
}

/// Permit of one open connection. Dropping it decrements the counters.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    limiter: Arc<ConnectionLimiter>,
    source: Source,
    /// Number of the connection; `None` if a request was authorized or the user is trusted.
    unadmitted: Option<u64>,
}

/// Accepted connection.
#[derive(Debug)]
pub(super) struct Admission {
    /// Permit of the connection.
    pub(super) permit: ConnectionPermit,
    /// Eviction of the connection.
    pub(super) eviction: Eviction,
    /// Whether another connection was evicted for this one.
    pub(super) has_evicted: bool,
}

/// Eviction of a connection without an authorized request. The connection must be closed when the
/// eviction occurs.
#[derive(Debug)]
pub(super) enum Eviction {
    /// The eviction can still occur.
    Possible(oneshot::Receiver<()>),
    /// A request of the connection was authorized, or its user is trusted.
    Impossible,
    /// The connection must be closed.
    Occurred,
}

impl Eviction {
    /// Returns whether the eviction has occurred. It never occurs after a request was authorized.
    pub(super) fn poll_occurred(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Self::Possible(receiver) = self
            && let Poll::Ready(evicted) = Pin::new(receiver).poll(cx)
        {
            *self = if evicted.is_ok() { Self::Occurred } else { Self::Impossible };
        }
        if matches!(self, Self::Occurred) { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Waits until the eviction occurs.
    pub(super) async fn wait(&mut self) {
        std::future::poll_fn(|cx| self.poll_occurred(cx)).await;
    }
}

impl Source {
    /// Returns whether connections of different users can have this source.
    fn is_shared(self) -> bool {
        matches!(self, Self::Address(_))
    }
}

impl ConnectionLimiter {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().expect("no thread panics under this lock")
    }

    /// Admits a new connection without an authorized request. If there are too many of these
    /// connections, the oldest one of the same address, or of the source with the most of them, is
    /// evicted. Connections of root and the manager's user are limited only in total.
    ///
    /// # Errors
    /// Returns a description of the limit that is reached.
    pub(super) fn acquire(self: &Arc<Self>, origin: &ConnectionOrigin) -> Result<Admission, String> {
        let (source, is_trusted) = match *origin {
            ConnectionOrigin::Tcp(address) => (Source::Address(address.ip().to_canonical()), false),
            ConnectionOrigin::Unix { uid, is_trusted, .. } => (Source::User(uid), is_trusted),
        };
        let mut connections = self.lock();
        if is_trusted {
            connections.open_trusted(source)?;
            let permit = ConnectionPermit { limiter: Arc::clone(self), source, unadmitted: None };
            return Ok(Admission { permit, eviction: Eviction::Impossible, has_evicted: false });
        }
        let has_evicted = connections.make_space(source)?;
        let (number, eviction) = connections.open_unadmitted(source);
        let permit = ConnectionPermit { limiter: Arc::clone(self), source, unadmitted: Some(number) };
        Ok(Admission { permit, eviction, has_evicted })
    }
}

impl Connections {
    fn open_trusted(&mut self, source: Source) -> Result<(), String> {
        check_limit(self.open, CONNECTIONS_MAX, "connections are open")?;
        self.open += 1;
        self.by_source.entry(source).or_default().open += 1;
        Ok(())
    }

    /// Checks the limits for a new connection. Evicts a connection if this is necessary and allowed,
    /// and returns whether one was evicted.
    fn make_space(&mut self, source: Source) -> Result<bool, String> {
        let (open, unadmitted) =
            self.by_source.get(&source).map_or((0, 0), |of| (of.open, of.unadmitted.len()));
        let max = CONNECTIONS_MAX - TRUSTED_CONNECTIONS_RESERVED;
        check_limit(self.open, max, "connections are open")?;
        check_limit(open, CONNECTIONS_PER_SOURCE_MAX, "connections of this source are open")?;
        let description = "connections of this source without an authorized request are open";
        match check_limit(unadmitted, UNADMITTED_CONNECTIONS_PER_SOURCE_MAX, description) {
            Err(_) if source.is_shared() => self.evict_oldest(source),
            Err(limit) => return Err(limit),
            Ok(()) if self.unadmitted < UNADMITTED_CONNECTIONS_MAX => return Ok(false),
            Ok(()) => self.evict_oldest_of_largest_source(),
        }
        Ok(true)
    }

    /// Evicts the oldest connection of the source with the most connections without an authorized
    /// request. Of sources with equally many, chooses the one with the oldest connection.
    fn evict_oldest_of_largest_source(&mut self) {
        let size_and_age = |of: &SourceConnections| {
            of.unadmitted
                .first_key_value()
                .map(|(oldest, _)| (of.unadmitted.len(), std::cmp::Reverse(*oldest)))
        };
        let largest = self.by_source.iter().max_by_key(|(_, of)| size_and_age(of));
        if let Some(source) = largest.map(|(source, _)| *source) {
            self.evict_oldest(source);
        }
    }

    fn evict_oldest(&mut self, source: Source) {
        let oldest = self.by_source.get_mut(&source).and_then(|of| of.unadmitted.pop_first());
        if let Some((_, evict)) = oldest {
            self.unadmitted -= 1;
            let _ = evict.send(()); // fails only if the connection is being closed
        }
    }

    fn open_unadmitted(&mut self, source: Source) -> (u64, Eviction) {
        let (evict, evicted) = oneshot::channel();
        let number = self.next_number;
        self.next_number += 1;
        self.open += 1;
        self.unadmitted += 1;
        let of_source = self.by_source.entry(source).or_default();
        of_source.open += 1;
        of_source.unadmitted.insert(number, evict);
        (number, Eviction::Possible(evicted))
    }

    /// Removes a connection from the connections without an authorized request, unless it was
    /// evicted.
    fn remove_unadmitted(&mut self, source: Source, number: u64) {
        let of_source = self.by_source.get_mut(&source);
        if of_source.is_some_and(|of| of.unadmitted.remove(&number).is_some()) {
            self.unadmitted -= 1;
        }
    }
}

fn check_limit(count: usize, limit: usize, description: &str) -> Result<(), String> {
    if count < limit { Ok(()) } else { Err(format!("{limit} {description} already")) }
}

impl ConnectionPermit {
    /// Returns whether no request of the connection has been authorized yet.
    pub(super) fn is_unadmitted(&self) -> bool {
        self.unadmitted.is_some()
    }

    /// Removes the connection from the connections without an authorized request, so that it cannot
    /// be evicted any more. Has no effect on an eviction that has occurred.
    pub(super) fn admit(&mut self) {
        if let Some(number) = self.unadmitted.take() {
            self.limiter.lock().remove_unadmitted(self.source, number);
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.admit();
        let mut connections = self.limiter.lock();
        connections.open -= 1;
        if let Some(of_source) = connections.by_source.get_mut(&self.source) {
            of_source.open -= 1;
            if of_source.open == 0 {
                connections.by_source.remove(&self.source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> ConnectionOrigin {
        ConnectionOrigin::Tcp(([10, 0, 0, last], 1).into())
    }

    fn user(uid: u32, is_trusted: bool) -> ConnectionOrigin {
        ConnectionOrigin::Unix { uid, pid: None, is_trusted }
    }

    fn is_evicted(admission: &mut Admission) -> bool {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        admission.eviction.poll_occurred(&mut cx).is_ready()
    }

    fn evicted(admissions: &mut [Admission]) -> Vec<usize> {
        (0..admissions.len()).filter(|i| is_evicted(&mut admissions[*i])).collect()
    }

    #[test]
    fn address_at_its_limit_evicts_its_oldest_connection() {
        let limiter = Arc::new(ConnectionLimiter::default());
        let acquire = |origin: &ConnectionOrigin| limiter.acquire(origin).unwrap();
        let mut other = acquire(&address(2));
        let mut admissions: Vec<_> =
            (0..UNADMITTED_CONNECTIONS_PER_SOURCE_MAX).map(|_| acquire(&address(1))).collect();
        assert!(evicted(&mut admissions).is_empty());
        admissions[0].permit.admit();
        assert!(!acquire(&address(1)).has_evicted, "an admitted connection counts as unadmitted");
        admissions.push(acquire(&address(1)));
        let newest = acquire(&address(1));
        assert!(newest.has_evicted);
        admissions.push(newest);
        assert_eq!(evicted(&mut admissions), [1]);
        assert!(!is_evicted(&mut other));
        drop((admissions, other));
        let connections = limiter.lock();
        assert!(connections.by_source.is_empty());
        assert_eq!((connections.open, connections.unadmitted), (0, 0));
    }

    #[test]
    fn total_limit_evicts_from_the_source_with_the_most_connections() {
        let limiter = Arc::new(ConnectionLimiter::default());
        let mut quiet = limiter.acquire(&address(1)).unwrap();
        let sizes = [(2, 120), (3, 125), (4, 122), (5, 124), (6, 20)];
        let mut admissions = Vec::new();
        for (last, size) in sizes {
            admissions.extend((0..size).map(|_| limiter.acquire(&address(last)).unwrap()));
        }
        assert_eq!(admissions.len() + 1, UNADMITTED_CONNECTIONS_MAX);
        assert!(evicted(&mut admissions).is_empty());
        let _next = limiter.acquire(&address(7)).unwrap();
        assert_eq!(evicted(&mut admissions), [120], "must evict the oldest connection of address 3");
        let _next = limiter.acquire(&address(8)).unwrap();
        assert_eq!(evicted(&mut admissions), [120, 121], "addresses 3 and 5 have equally many");
        assert!(!is_evicted(&mut quiet));
    }

    #[test]
    fn admitted_connections_of_a_source_are_limited() {
        let limiter = Arc::new(ConnectionLimiter::default());
        let mut admissions = Vec::new();
        for _ in 0..CONNECTIONS_PER_SOURCE_MAX {
            admissions.push(limiter.acquire(&address(1)).unwrap());
            admissions.last_mut().unwrap().permit.admit();
        }
        assert!(limiter.acquire(&address(1)).unwrap_err().contains("connections of this source are open"));
        drop(limiter.acquire(&address(2)).unwrap());
        assert!(evicted(&mut admissions).is_empty());
    }

    #[test]
    fn local_user_at_the_limit_is_rejected_without_an_effect_on_others() {
        let limiter = Arc::new(ConnectionLimiter::default());
        let mut admissions: Vec<_> = (0..UNADMITTED_CONNECTIONS_PER_SOURCE_MAX)
            .map(|_| limiter.acquire(&user(1, false)).unwrap())
            .collect();
        let error = limiter.acquire(&user(1, false)).unwrap_err();
        assert!(error.contains("of this source without an authorized request"), "{error}");
        assert!(evicted(&mut admissions).is_empty());
        assert!(!limiter.acquire(&user(2, false)).unwrap().has_evicted);
        assert!(!limiter.acquire(&user(0, true)).unwrap().permit.is_unadmitted());
    }

    #[test]
    fn trusted_users_have_reserved_connections() {
        let limiter = Arc::new(ConnectionLimiter::default());
        let mut admissions = Vec::new();
        let uids = (1..).flat_map(|uid| std::iter::repeat_n(uid, CONNECTIONS_PER_SOURCE_MAX));
        for uid in uids.take(CONNECTIONS_MAX - TRUSTED_CONNECTIONS_RESERVED) {
            admissions.push(limiter.acquire(&user(uid, false)).unwrap());
            admissions.last_mut().unwrap().permit.admit();
        }
        let error = limiter.acquire(&user(9, false)).unwrap_err();
        assert!(error.contains("connections are open already"), "{error}");
        for _ in 0..TRUSTED_CONNECTIONS_RESERVED {
            admissions.push(limiter.acquire(&user(0, true)).unwrap());
        }
        assert!(limiter.acquire(&user(0, true)).is_err());
    }
}
