//! Times on two clocks: monotonic time for decisions, and Unix time for logs and output.

use std::{
    fmt,
    time::{Duration, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

/// Duration in nanoseconds, or an instant on a monotonic clock in nanoseconds since the clock's
/// start.
///
/// Deadlines of the manager use *rack time*: the total time for which the manager has been running,
/// across restarts. Rack time stops while the manager is down, so no deadline expires meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ns(pub u64);

impl Ns {
    /// Duration of 0, or the start of the clock.
    pub const ZERO: Self = Self(0);
    /// Instant that is never reached.
    pub const NEVER: Self = Self(u64::MAX);

    /// Creates a duration of `n` milliseconds. Saturates at `u64::MAX` nanoseconds.
    pub const fn ms(n: u64) -> Self {
        Self(n.saturating_mul(1_000_000))
    }

    /// Creates a duration of `n` seconds. Saturates at `u64::MAX` nanoseconds.
    pub const fn secs(n: u64) -> Self {
        Self(n.saturating_mul(1_000_000_000))
    }

    /// Returns the instant that is `span` later. Saturates at [`Ns::NEVER`].
    #[must_use]
    pub const fn after(self, span: Self) -> Self {
        Self(self.0.saturating_add(span.0))
    }

    /// Returns the duration from `earlier` to this instant, or 0 if `earlier` is later than this
    /// instant.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }

    /// Returns the duration in whole milliseconds, rounded down.
    pub const fn as_ms(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Converts the duration to [`Duration`].
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

/// Unix time in milliseconds, for logs and output. Decisions do not use Unix time, because the
/// system clock can be set forward or back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct UnixMs(pub u64);

impl UnixMs {
    /// First millisecond of the year 10000. RFC 3339 has only years of four digits.
    const YEAR_10000: Self = Self(253_402_300_800_000);
}

/// Formats the time as RFC 3339 in whole seconds. From the year 10000 on, the number of
/// milliseconds followed by `ms` is printed instead.
impl fmt::Display for UnixMs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self >= Self::YEAR_10000 {
            return write!(f, "{}ms", self.0);
        }
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(self.0)).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unix_time_is_formatted_as_rfc_3339_up_to_the_year_9999() {
        assert_eq!(UnixMs(1_500).to_string(), "1970-01-01T00:00:01Z");
        assert_eq!(UnixMs(1_700_000_000_999).to_string(), "2023-11-14T22:13:20Z");
        assert_eq!(UnixMs(UnixMs::YEAR_10000.0 - 1).to_string(), "9999-12-31T23:59:59Z");
        assert_eq!(UnixMs::YEAR_10000.to_string(), "253402300800000ms");
        assert_eq!(UnixMs(u64::MAX).to_string(), "18446744073709551615ms");
    }
}
