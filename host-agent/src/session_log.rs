//! Limits the log of failed sessions, so that an agent without a manager does not fill the log.

use std::time::{Duration, Instant};

use units::limits::{SESSION_LOG_INTERVAL_MAX, SESSION_LOG_INTERVAL_MIN};

/// Selects the failed sessions that are logged.
///
/// The first failure is logged. Failures for the same reason follow after 10 s, then 20 s and so on, at
/// most 10 min. Another reason is logged at the earliest 10 s after the last line.
#[derive(Debug, Default)]
pub struct SessionLog {
    last: Option<LoggedFailure>,
    suppressed: u64,
}

#[derive(Debug)]
struct LoggedFailure {
    error: String,
    at: Instant,
    /// Time until the same error is logged again.
    interval: Duration,
}

impl SessionLog {
    /// Counts a failed session. `lasted` is its duration; `None` if the manager did not accept the session.
    /// Returns `None` if the failure must not be logged, otherwise the number of failures suppressed since the
    /// last logged one.
    pub fn count_failure(&mut self, error: &str, lasted: Option<Duration>, now: Instant) -> Option<u64> {
        let min = SESSION_LOG_INTERVAL_MIN.as_duration();
        let has_worked = lasted.is_some_and(|lasted| lasted >= min);
        let last = self.last.take().filter(|_| !has_worked);
        let interval = match last {
            Some(last) => {
                let is_same = last.error == error;
                if now.duration_since(last.at) < if is_same { last.interval } else { min } {
                    self.last = Some(last);
                    self.suppressed += 1;
                    return None;
                }
                if is_same { (last.interval * 2).min(SESSION_LOG_INTERVAL_MAX.as_duration()) } else { min }
            }
            None => min,
        };
        self.last = Some(LoggedFailure { error: error.to_owned(), at: now, interval });
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the seconds at which failures of sessions that fail every second are logged.
    fn logged_seconds(seconds: u64, error: impl Fn(u64) -> &'static str) -> Vec<u64> {
        let (mut log, start) = (SessionLog::default(), Instant::now());
        let mut is_logged = |second: &u64| {
            let now = start + Duration::from_secs(*second);
            log.count_failure(error(*second), None, now).is_some()
        };
        (0..seconds).filter(|second| is_logged(second)).collect()
    }

    /// Regression test: an agent without a manager logged a line every second.
    #[test]
    fn repeated_failure_is_logged_at_growing_intervals() {
        let logged = logged_seconds(2500, |_| "cannot connect");
        assert_eq!(logged, [0, 10, 30, 70, 150, 310, 630, 1230, 1830, 2430]);
    }

    #[test]
    fn other_failure_is_logged_after_the_shortest_interval() {
        let logged = logged_seconds(200, |second| if second < 75 { "cannot connect" } else { "other rack" });
        assert_eq!(logged, [0, 10, 30, 70, 80, 90, 110, 150]);
        let alternating = logged_seconds(41, |second| if second % 2 == 0 { "a" } else { "b" });
        assert_eq!(alternating, [0, 10, 21, 31]);
    }

    #[test]
    fn end_of_a_working_session_is_logged_with_the_number_of_suppressed_failures() {
        let (mut log, start) = (SessionLog::default(), Instant::now());
        let mut count = |lasted_s: Option<u64>, at_s: u64| {
            let at = start + Duration::from_secs(at_s);
            log.count_failure("closed", lasted_s.map(Duration::from_secs), at)
        };
        assert_eq!(count(None, 0), Some(0));
        assert_eq!(count(None, 1), None);
        assert_eq!(count(Some(1), 2), None);
        assert_eq!(count(Some(10), 12), Some(2));
        assert_eq!(count(None, 13), None);
    }
}
