//! Samples of a run, and the results that follow from them.

use std::time::Duration;

use crate::load::Counts;

/// Time at the end of the phase with both processes over which the steady hit ratio is averaged.
const STEADY_TIME: Duration = Duration::from_secs(5);
/// Largest difference from the steady hit ratio.
const STEADY_TOLERANCE: f64 = 0.02;

/// State at a time.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Time since the start of the load.
    pub time: Duration,
    /// Memory that the cache reports, or 0 without a server.
    pub cache_bytes: u64,
    /// Memory of the second process.
    pub second_bytes: u64,
    /// Requested keys since the start of the load.
    pub counts: Counts,
}

/// Samples of a run in the order of time.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    pub samples: Vec<Sample>,
    /// Index of the sample before the second process requests its memory.
    pub request: usize,
    /// Index of the first sample after the end of the second process.
    pub end: usize,
}

/// Time from the request until the hit ratio is steady.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Refill {
    pub time: Duration,
    /// Values that were read from the backend in this time.
    pub backend_reads: u64,
}

impl Timeline {
    /// Returns the hit ratio at the end of the phase with both processes.
    pub fn steady_hit_ratio(&self) -> f64 {
        let both = &self.samples[self.request..self.end];
        let last = both[both.len() - 1];
        let first = both.iter().find(|sample| sample.time + STEADY_TIME >= last.time).unwrap_or(&last);
        last.counts.since(first.counts).hit_ratio()
    }

    /// Returns the time until the first interval between samples with the steady hit ratio. The result is accurate to
    /// such an interval. `None` if there is no such interval.
    pub fn refill(&self) -> Option<Refill> {
        let least = self.steady_hit_ratio() - STEADY_TOLERANCE;
        let both = &self.samples[self.request..self.end];
        let is_steady = |pair: &&[Sample]| pair[1].counts.since(pair[0].counts).hit_ratio() >= least;
        let steady = both.windows(2).find(is_steady)?[1];
        Some(Refill {
            time: steady.time - both[0].time,
            backend_reads: steady.counts.since(both[0].counts).backend_reads(),
        })
    }

    /// Returns a value of each sample over the time in seconds.
    pub fn points(&self, value: impl Fn(&Sample) -> f64) -> Vec<(f64, f64)> {
        self.samples.iter().map(|sample| (sample.time.as_secs_f64(), value(sample))).collect()
    }

    /// Returns a value of the counts of each interval and its length in seconds, over the time in seconds. Omits values
    /// that are not numbers.
    pub fn rates(&self, value: impl Fn(Counts, f64) -> f64) -> Vec<(f64, f64)> {
        let rate = |pair: &[Sample]| {
            let seconds = (pair[1].time - pair[0].time).as_secs_f64();
            (pair[1].time.as_secs_f64(), value(pair[1].counts.since(pair[0].counts), seconds))
        };
        self.samples.windows(2).map(rate).filter(|(_, value)| value.is_finite()).collect()
    }
}
