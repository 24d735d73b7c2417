//! Counts of a replay beside the journal. `report.rs` evaluates them.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use hdrhistogram::Histogram;

/// Counts of one replay.
#[derive(Debug)]
pub(super) struct Tally {
    /// In microseconds.
    pub(super) reserve: Histogram<u64>,
    /// In microseconds.
    pub(super) ready: Histogram<u64>,
    pub(super) placed: u64,
    pub(super) rejected: u64,
    pub(super) lost: u64,
    /// Slices examined by a stand-in before their use.
    pub(super) read: u64,
    /// Slices that were not zeroed.
    pub(super) dirty: u64,
    /// Slices whose pattern was overwritten.
    pub(super) overwritten: BTreeSet<u32>,
    /// VMs with slices that were not examined, by reason.
    pub(super) unread: BTreeMap<String, u64>,
}

impl Default for Tally {
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

impl Tally {
    pub(super) fn record_reserve(&mut self, span: Duration) {
        record(&mut self.reserve, span);
    }

    pub(super) fn record_ready(&mut self, span: Duration) {
        record(&mut self.ready, span);
    }

    /// Counts a VM whose slices were not examined.
    pub(super) fn count_unread(&mut self, reason: String) {
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
        let mut tally = Tally::default();
        for ms in [1, 5, 70_000] {
            tally.record_reserve(Duration::from_millis(ms));
        }
        let close = |q, ms: u64| tally.reserve.value_at_quantile(q).abs_diff(1000 * ms) <= ms;
        assert!(close(0.5, 5) && close(0.99, 70_000), "{:?}", tally.reserve);
    }
}
