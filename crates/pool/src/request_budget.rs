//! Counts recent requests, so that the number of requests per hour is limited.

use serde::{Deserialize, Serialize};
use units::Ns;

/// Length of a counting period.
const PERIOD: Ns = Ns::secs(300);
/// Number of periods that count, including the current one. They contain every window of one hour
/// that ends in the current period.
const PERIODS: usize = 13;

/// Number of requests in each recent period of five minutes. The size is bounded, and the counts are
/// part of the durable ledger, so that a restart does not increase the budget.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestCounts {
    /// Number of the period of the latest request.
    latest: u64,
    /// Counts of the latest and of earlier periods, the latest first; at most [`PERIODS`].
    counts: Vec<u32>,
}

impl RequestCounts {
    /// Returns the number of requests in the last hour, and possibly of the five minutes before it.
    pub fn recent(&self, now: Ns) -> u32 {
        let elapsed = usize::try_from(period(now).saturating_sub(self.latest)).unwrap_or(usize::MAX);
        let counted = self.counts.iter().take(PERIODS.saturating_sub(elapsed));
        counted.fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Records a request.
    pub fn record(&mut self, now: Ns) {
        let elapsed = usize::try_from(period(now).saturating_sub(self.latest)).unwrap_or(usize::MAX);
        self.latest = self.latest.max(period(now));
        let empty = if self.counts.is_empty() { 1 } else { elapsed.min(PERIODS) };
        self.counts.splice(..0, std::iter::repeat_n(0, empty));
        self.counts.truncate(PERIODS);
        self.counts[0] = self.counts[0].saturating_add(1);
    }
}

/// Returns the number of the period that contains a time.
const fn period(at: Ns) -> u64 {
    at.0 / PERIOD.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOUR: Ns = Ns::secs(3600);

    proptest! {
        /// Requests that are made only while fewer than `max` are counted never exceed `max` in any
        /// window of one hour, and a budget that was unused for 65 minutes is available again.
        #[test]
        fn requests_within_the_budget_never_exceed_it_in_any_hour(
            max in 1_u32..6,
            steps in prop::collection::vec(0_u64..1500, 1..200),
        ) {
            let mut counts = RequestCounts::default();
            let mut now = Ns::secs(7);
            let mut sent: Vec<Ns> = Vec::new();
            for step in steps {
                now = now.after(Ns::secs(step));
                let in_last_hour = sent.iter().filter(|at| now.since(**at) < HOUR).count();
                let in_longer_window = sent.iter().filter(|at| now.since(**at) < Ns::secs(3900)).count();
                let recent = counts.recent(now) as usize;
                prop_assert!(in_last_hour <= recent && recent <= in_longer_window);
                if counts.recent(now) < max {
                    counts.record(now);
                    sent.push(now);
                }
                prop_assert!(counts.counts.len() <= PERIODS);
            }
        }
    }

    #[test]
    fn time_before_the_latest_request_counts_with_the_latest_period() {
        let mut counts = RequestCounts::default();
        counts.record(Ns::secs(1000));
        counts.record(Ns::secs(10));
        assert_eq!([Ns::secs(10), Ns::secs(1000), Ns::secs(4800)].map(|now| counts.recent(now)), [2, 2, 0]);
    }
}
