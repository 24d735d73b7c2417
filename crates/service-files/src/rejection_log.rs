//! Logs rejected connections and requests with client and reason, at a limited rate.

use std::{
    fmt::Display,
    sync::Mutex,
    time::{Duration, Instant},
};

/// Maximum number of rejections logged per interval. Further rejections are only counted.
const LOGGED_REJECTIONS_MAX: u32 = 20;
/// Length of the interval of the rate limit.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Rate-limited log of rejected connections and requests.
#[derive(Debug, Default)]
pub struct RejectionLog {
    interval: Mutex<Option<LogInterval>>,
}

#[derive(Debug)]
struct LogInterval {
    began: Instant,
    logged: u32,
    suppressed: u64,
}

impl RejectionLog {
    /// Logs a rejection, unless the limit of the interval is reached. The next logged rejection
    /// contains the number of suppressed rejections.
    pub fn log(&self, peer: &impl Display, reason: &impl Display) {
        if let Some(suppressed) = self.count_rejection(Instant::now()) {
            tracing::warn!(%peer, %reason, suppressed, "rejected connection or request");
        }
    }

    /// Counts a rejection. Returns `None` if it must be suppressed, otherwise the number of
    /// rejections suppressed since the last logged rejection.
    fn count_rejection(&self, now: Instant) -> Option<u64> {
        let mut interval = self.interval.lock().expect("no thread panics under this lock");
        let current = interval.get_or_insert(LogInterval { began: now, logged: 0, suppressed: 0 });
        if now.duration_since(current.began) >= LOG_INTERVAL {
            (current.began, current.logged) = (now, 0);
        }
        if current.logged == LOGGED_REJECTIONS_MAX {
            current.suppressed += 1;
            return None;
        }
        current.logged += 1;
        Some(std::mem::take(&mut current.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suppressed_rejections_are_counted_in_the_next_interval() {
        let (rejections, start) = (RejectionLog::default(), Instant::now());
        for _ in 0..LOGGED_REJECTIONS_MAX {
            assert_eq!(rejections.count_rejection(start), Some(0));
        }
        for _ in 0..7 {
            assert_eq!(rejections.count_rejection(start + LOG_INTERVAL / 2), None);
        }
        assert_eq!(rejections.count_rejection(start + LOG_INTERVAL), Some(7));
        assert_eq!(rejections.count_rejection(start + LOG_INTERVAL), Some(0));
    }
}
