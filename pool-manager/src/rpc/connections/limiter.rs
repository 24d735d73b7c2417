//! Limits the number of connections in total and per source, so that one source cannot block
//! others.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard},
};

use units::limits::{
    CONNECTIONS_MAX, CONNECTIONS_PER_SOURCE_MAX, UNADMITTED_CONNECTIONS_MAX,
    UNADMITTED_CONNECTIONS_PER_SOURCE_MAX,
};

use super::ConnectionOrigin;

/// Counters of open connections, and their limits.
#[derive(Debug, Default)]
pub(super) struct ConnectionLimiter {
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    all: ConnectionCount,
    /// Counts by source, for sources with an open connection.
    by_source: BTreeMap<Source, ConnectionCount>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ConnectionCount {
    open: usize,
    unadmitted: usize,
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
    is_unadmitted: bool,
}

impl ConnectionLimiter {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().expect("no thread panics under this lock")
    }

    /// Returns a permit for a new connection without an authorized request. Connections of root and
    /// the manager's user are limited only in total.
    ///
    /// # Errors
    /// Returns a description of the limit that is reached.
    pub(super) fn acquire(self: &Arc<Self>, origin: &ConnectionOrigin) -> Result<ConnectionPermit, String> {
        let (source, is_trusted) = match *origin {
            ConnectionOrigin::Tcp(address) => (Source::Address(address.ip().to_canonical()), false),
            ConnectionOrigin::Unix { uid, is_trusted, .. } => (Source::User(uid), is_trusted),
        };
        let mut counts = self.lock();
        let per_source = counts.by_source.get(&source).copied().unwrap_or_default();
        let limits = [
            (counts.all.open, CONNECTIONS_MAX, "connections are open"),
            (per_source.open, CONNECTIONS_PER_SOURCE_MAX, "connections of this source are open"),
            (
                counts.all.unadmitted,
                UNADMITTED_CONNECTIONS_MAX,
                "connections without an authorized request are open",
            ),
            (
                per_source.unadmitted,
                UNADMITTED_CONNECTIONS_PER_SOURCE_MAX,
                "connections of this source without an authorized request are open",
            ),
        ];
        let applicable = if is_trusted { &limits[..1] } else { &limits[..] };
        if let Some((_, limit, description)) = applicable.iter().find(|(count, limit, _)| count >= limit) {
            return Err(format!("{limit} {description} already"));
        }
        counts.all.open += 1;
        counts.by_source.entry(source).or_default().open += 1;
        if !is_trusted {
            counts.all.unadmitted += 1;
            counts.by_source.entry(source).or_default().unadmitted += 1;
        }
        Ok(ConnectionPermit { limiter: Arc::clone(self), source, is_unadmitted: !is_trusted })
    }
}

impl ConnectionPermit {
    /// Returns whether no request of the connection has been authorized yet.
    pub(super) fn is_unadmitted(&self) -> bool {
        self.is_unadmitted
    }

    /// Removes the connection from the counts of connections without an authorized request.
    pub(super) fn admit(&mut self) {
        if std::mem::take(&mut self.is_unadmitted) {
            let mut counts = self.limiter.lock();
            counts.all.unadmitted -= 1;
            if let Some(per_source) = counts.by_source.get_mut(&self.source) {
                per_source.unadmitted -= 1;
            }
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.admit();
        let mut counts = self.limiter.lock();
        counts.all.open -= 1;
        if let Some(per_source) = counts.by_source.get_mut(&self.source) {
            per_source.open -= 1;
            if per_source.open == 0 {
                counts.by_source.remove(&self.source);
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

    #[test]
    fn source_at_its_limit_does_not_block_others() {
        let limiter = Arc::new(ConnectionLimiter::default());
        let acquire = |origin: &ConnectionOrigin| limiter.acquire(origin);
        let mut permits: Vec<_> =
            (0..UNADMITTED_CONNECTIONS_PER_SOURCE_MAX).map(|_| acquire(&address(1)).unwrap()).collect();
        let error = acquire(&address(1)).unwrap_err();
        assert!(error.contains("of this source without an authorized request"), "{error}");
        drop(acquire(&address(2)).unwrap());
        permits.iter_mut().for_each(ConnectionPermit::admit);
        while permits.len() < CONNECTIONS_PER_SOURCE_MAX {
            permits.push(acquire(&address(1)).unwrap());
            permits.last_mut().unwrap().admit();
        }
        assert!(acquire(&address(1)).unwrap_err().contains("connections of this source"));
        drop(acquire(&address(2)).unwrap());
        drop(permits);
        let counts = limiter.lock();
        assert!(counts.by_source.is_empty());
        assert_eq!((counts.all.open, counts.all.unadmitted), (0, 0));
    }

    #[test]
    fn trusted_users_are_limited_in_total_only() {
        let limiter = Arc::new(ConnectionLimiter::default());
        let user = |uid, is_trusted| ConnectionOrigin::Unix { uid, pid: None, is_trusted };
        let sources = UNADMITTED_CONNECTIONS_MAX / UNADMITTED_CONNECTIONS_PER_SOURCE_MAX;
        let sources = u32::try_from(sources).unwrap();
        let _permits: Vec<_> = (1..=sources)
            .flat_map(|uid| (0..UNADMITTED_CONNECTIONS_PER_SOURCE_MAX).map(move |_| uid))
            .map(|uid| limiter.acquire(&user(uid, false)).unwrap())
            .collect();
        assert!(limiter.acquire(&user(sources + 1, false)).is_err());
        assert!(!limiter.acquire(&user(0, true)).unwrap().is_unadmitted());
    }
}
