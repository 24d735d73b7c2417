//! Two clocks that must not mix: one that only runs forward and is used for decisions, one that people read.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// A moment on a clock that never goes back, in nanoseconds from an arbitrary start; or a span of it.
///
/// The manager's deadlines run on *rack time*: the time it has been running, carried over restarts. While it is down no
/// deadline comes nearer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ns(pub u64);

impl Ns {
    /// The start, or no time at all.
    pub const ZERO: Self = Self(0);
    /// Later than anything.
    pub const NEVER: Self = Self(u64::MAX);

    /// So many milliseconds.
    pub const fn ms(n: u64) -> Self {
        Self(n.saturating_mul(1_000_000))
    }

    /// So many seconds.
    pub const fn secs(n: u64) -> Self {
        Self(n.saturating_mul(1_000_000_000))
    }

    /// This much later; stays at the end of time.
    #[must_use]
    pub const fn after(self, span: Self) -> Self {
        Self(self.0.saturating_add(span.0))
    }

    /// From `earlier` to here; nothing if it is not earlier.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }

    /// In whole milliseconds, rounded down.
    pub const fn as_ms(self) -> u64 {
        self.0 / 1_000_000
    }

    /// As the standard library's span.
    pub const fn as_duration(self) -> Duration {
        Duration::from_nanos(self.0)
    }
}

impl From<Duration> for Ns {
    fn from(span: Duration) -> Self {
        Self(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for Ns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_duration())
    }
}

/// A moment people read, in milliseconds since 1970. It may jump; nothing is decided by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct UnixMs(pub u64);
