//! Limits the rate of log lines that clients can cause.

use std::{
    fmt::Display,
    sync::Mutex,
    time::{Duration, Instant},
};

/// Maximum number of lines logged per interval. Further lines are only counted.
const LOGGED_LINES_MAX: u32 = 20;
/// Length of the interval of the rate limit.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Limit on the rate of log lines of one kind.
#[derive(Debug, Default)]
pub struct LogLimit {
    interval: Mutex<Option<LogInterval>>,
}

#[derive(Debug)]
struct LogInterval {
    began: Instant,
    logged: u32,
    suppressed: u64,
}

impl LogLimit {
    /// Counts a line. Returns `None` if it must be suppressed, otherwise the number of lines
    /// suppressed since the last logged line.
    pub fn count_line(&self) -> Option<u64> {
        self.count_line_at(Instant::now())
    }

    fn count_line_at(&self, now: Instant) -> Option<u64> {
        let mut interval = self.interval.lock().expect("no thread panics under this lock");
        let current = interval.get_or_insert(LogInterval { began: now, logged: 0, suppressed: 0 });
        if now.duration_since(current.began) >= LOG_INTERVAL {
            (current.began, current.logged) = (now, 0);
        }
        if current.logged == LOGGED_LINES_MAX {
            current.suppressed += 1;
            return None;
        }
        current.logged += 1;
        Some(std::mem::take(&mut current.suppressed))
    }
}

/// Rate-limited log of rejected connections and requests.
#[derive(Debug, Default)]
pub struct RejectionLog(LogLimit);

impl RejectionLog {
    /// Logs a rejection, unless the limit of the interval is reached. The next logged rejection
    /// contains the number of suppressed rejections.
    pub fn log(&self, peer: &impl Display, reason: &impl Display) {
        if let Some(suppressed) = self.0.count_line() {
            tracing::warn!(%peer, %reason, suppressed, "rejected connection or request");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suppressed_lines_are_counted_in_the_next_interval() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        for _ in 0..LOGGED_LINES_MAX {
            assert_eq!(limit.count_line_at(start), Some(0));
        }
        for _ in 0..7 {
            assert_eq!(limit.count_line_at(start + LOG_INTERVAL / 2), None);
        }
        assert_eq!(limit.count_line_at(start + LOG_INTERVAL), Some(7));
        assert_eq!(limit.count_line_at(start + LOG_INTERVAL), Some(0));
    }
}
