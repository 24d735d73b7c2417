//! Time on two clocks: monotonic time for decisions, and Unix time for people.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// Instant on a monotonic clock, in nanoseconds from an arbitrary start; or a duration.
///
/// Deadlines of the manager use *rack time*: the total time the manager has been running, across
/// restarts. It stops while the manager is down, so that no deadline approaches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ns(pub u64);

impl Ns {
    /// Start of the clock, or a duration of 0.
    pub const ZERO: Self = Self(0);
    /// Later than any other instant.
    pub const NEVER: Self = Self(u64::MAX);

    /// Creates a duration of `n` milliseconds. Saturates.
    pub const fn ms(n: u64) -> Self {
        Self(n.saturating_mul(1_000_000))
    }

    /// Creates a duration of `n` seconds. Saturates.
    pub const fn secs(n: u64) -> Self {
        Self(n.saturating_mul(1_000_000_000))
    }

    /// Returns the instant `span` later. Saturates.
    #[must_use]
    pub const fn after(self, span: Self) -> Self {
        Self(self.0.saturating_add(span.0))
    }

    /// Returns the duration from `earlier` to this instant; 0 if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }

    /// Returns whole milliseconds, rounded down.
    pub const fn as_ms(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Converts to a standard duration.
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

/// Unix time in milliseconds, for people. It may jump and is not used for decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct UnixMs(pub u64);
