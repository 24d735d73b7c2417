//! Counters and latency histograms of a replay. `report.rs` creates the report from them.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use hdrhistogram::Histogram;

/// Counters and latency histograms of one replay.
#[derive(Debug)]
pub(super) struct ReplayTally {
    /// Durations of Reserve calls, in microseconds.
    pub(super) reserve: Histogram<u64>,
    /// Durations from a Reserve call until all slices are online, in microseconds.
    pub(super) ready: Histogram<u64>,
    pub(super) placed: u64,
    pub(super) rejected: u64,
    /// Number of VMs whose test VMM died before the departure.
    pub(super) lost: u64,
    /// Number of slices that a test VMM read before using them.
    pub(super) read: u64,
    /// Number of slices in which a test VMM found non-zero bytes.
    pub(super) dirty: u64,
    /// Slices whose pattern was overwritten while a test VMM used them.
    pub(super) overwritten: BTreeSet<u32>,
    /// Number of VMs whose slices were not read, by reason.
    pub(super) unread: BTreeMap<String, u64>,
}

impl Default for ReplayTally {
    fn default() -> Self {
        let histogram = || Histogram::new(3).expect("3 significant digits are supported");
        Self {
            reserve: histogram(),
            ready: histogram(),
            placed: 0,
            rejected: 0,
            lost: 0,
            read: 0,
            dirty: 0,
            overwritten: BTreeSet::new(),
            unread: BTreeMap::new(),
        }
    }
}

impl ReplayTally {
    pub(super) fn record_reserve_time(&mut self, span: Duration) {
        record(&mut self.reserve, span);
    }

    pub(super) fn record_ready_time(&mut self, span: Duration) {
        record(&mut self.ready, span);
    }

    /// Counts a VM whose slices were not read, with the reason.
    pub(super) fn count_unread_vm(&mut self, reason: String) {
        *self.unread.entry(reason).or_default() += 1;
    }
}

fn record(histogram: &mut Histogram<u64>, span: Duration) {
    let micros = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
    histogram.record(micros).expect("an auto-resizing histogram accepts every value");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_keeps_times_within_its_precision() {
        let mut tally = ReplayTally::default();
        for ms in [1, 5, 70_000] {
            tally.record_reserve_time(Duration::from_millis(ms));
        }
        let close = |q, ms: u64| tally.reserve.value_at_quantile(q).abs_diff(1000 * ms) <= ms;
        assert!(close(0.5, 5) && close(0.99, 70_000), "{:?}", tally.reserve);
    }
}
