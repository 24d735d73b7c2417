//! Learner: estimates the utility of one tenant from the measurements of each epoch.
//!
//! Spirit samples accesses in hardware. A host without such hardware can measure times: the CPU
//! time of a tenant, and the number and the latency of page faults that wait for remote memory. If
//! page accesses are monitored, a power law models how stalls depend on memory. Otherwise, stalls
//! are modeled by a straight line. [`StallModel`] scales the model to the measured stalls.

use thiserror::Error;

use super::{
    FitError, Histogram, LinkTraffic, MeasuredMissRatio, MissModel, PowerLaw, TenantUtility, UtilityError,
    fit,
    stall_model::{RunningMean, StallModel},
    stall_utility, wanted,
};
use crate::{curve::Knot, market::Supply};

/// Measurements of a tenant in one epoch.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Length of the epoch, in seconds; more than 0.
    pub duration_s: f64,
    /// Local memory, in MiB.
    pub local_mib: f64,
    /// Remote memory, in MiB.
    pub remote_mib: f64,
    /// CPU time of all threads, in seconds.
    pub work_s: f64,
    /// Number of page faults that waited for remote memory.
    pub misses: f64,
    /// Number of pages read from remote memory, including readahead.
    pub pages_in: f64,
    /// Latency of a page fault that reads remote memory over an idle link, in seconds.
    pub miss_latency_s: f64,
    /// Bandwidth used on the link in the busier direction, in MB/s.
    pub used_mb_s: f64,
    /// Bandwidth limit of the tenant, in MB/s.
    pub limit_mb_s: f64,
    /// Time during which at least one thread was stalled by page transfers, including queueing, in
    /// seconds. `None` if this time is not measured.
    pub stalled_s: Option<f64>,
    /// Page accesses, or `None` if accesses are not monitored.
    pub accesses: Option<PageAccesses>,
}

/// Page accesses of a tenant in one epoch.
#[derive(Clone, Debug, Default)]
pub struct PageAccesses {
    /// Observed number of accesses to each block of pages.
    pub histogram: Histogram,
    /// Size of a block of pages, in MiB.
    pub block_mib: f64,
    /// Pages accessed per second. Immediately repeated accesses to a page count once.
    pub pages_per_second: f64,
}

/// Error for a measurement that is out of range.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
#[error("{quantity}: {value} is out of range, must be a finite number {rule}")]
pub struct SampleError {
    /// Name of the measurement in messages.
    pub quantity: &'static str,
    /// Rejected value of the measurement.
    pub value: f64,
    /// Required range, as a phrase that follows "must be a finite number" in messages.
    pub rule: &'static str,
}

/// An epoch counts as idle if the time of work and stalls is below this fraction of its length. The
/// time is then too short to estimate stalls.
const IDLE_FRACTION_MAX: f64 = 0.002;
/// Lower bound of the estimated speedup of a throttled tenant if its bandwidth limit were lifted.
const SPEEDUP_MIN: f64 = 1.25;
/// Upper bound of the estimated speedup of a throttled tenant. If more speedup is possible, the
/// measurements of the next epoch show it.
const SPEEDUP_MAX: f64 = 4.0;
/// A tenant that is stalled for at least this fraction of an epoch counts as stalled all the time.
const STALLED_FRACTION_MIN: f64 = 0.8;
/// If the ratio of the measured stall time to the sum of miss latencies is at least this value,
/// threads are assumed to stall one at a time. A smaller ratio means that stalls of several threads
/// overlap.
const SINGLE_THREAD_STALL_MIN: f64 = 0.7;
/// Lower bound of the latency of a miss, in seconds, against division by 0. It is far below the
/// latency of any device.
const MISS_LATENCY_MIN_S: f64 = 1e-9;
/// Size of a page of 4 KiB, in MB.
const PAGE_MB: f64 = 4096.0 / 1e6;
/// Lower bound of a tenant's work time, as a fraction of the epoch. It bounds the stall ratio of a
/// tenant that only waits.
const WORK_FRACTION_MIN: f64 = 1e-4;
/// Upper bound of stall ratios, in seconds per second of work.
const STALL_RATIO_MAX: f64 = 1e6;
/// Number of pages of 4 KiB per MiB.
const PAGES_PER_MIB: f64 = 256.0;
/// Error reported for miss ratios if accesses are not monitored. It is the largest possible error,
/// because such estimates may be arbitrarily wrong.
const UNKNOWN_MISS_RATIO_ERROR: f64 = 1.0;
/// Number of intervals of the stall curve between 0 MiB and the footprint.
const CURVE_INTERVALS: u32 = 64;

/// Estimates for one tenant, kept across epochs.
#[derive(Clone, Debug, Default)]
pub struct Learner {
    stalls: StallModel,
    /// Mean fraction of accesses that missed. `None` before the first epoch with monitored
    /// accesses.
    miss_ratio: Option<RunningMean>,
    /// Last fitted power law. `None` before the first successful fit.
    law: Option<PowerLaw>,
    /// Accessed pages per second. `None` before the first epoch with monitored accesses.
    pages_per_second: Option<f64>,
    /// Total memory of the tenant, local and remote, in MiB; at least 1 after the first epoch.
    footprint: f64,
    /// Modeled stall ratio without local memory, in seconds per second of work.
    stall_ratio_without_memory: f64,
    /// Bandwidth that the tenant would use with its memory if it were not throttled, in MB/s.
    wanted: f64,
    traffic: LinkTraffic,
}

impl Learner {
    /// Updates the estimates with the measurements of an epoch. `link` is the bandwidth of the link
    /// in MB/s. An idle epoch only updates the footprint and the wanted bandwidth.
    ///
    /// # Errors
    /// Returns [`SampleError`] for the first measurement that is out of range. The estimates are
    /// then unchanged.
    pub fn learn(&mut self, sample: &Sample, link: f64) -> Result<(), SampleError> {
        sample.check_sample()?;
        self.footprint = (sample.local_mib + sample.remote_mib).max(1.0);
        let speedup = sample.unthrottled_speedup(link);
        self.wanted = (sample.used_mb_s * speedup).min(link);
        if sample.work_s + sample.idle_link_stall_s().max(sample.stalled_s.unwrap_or(0.0))
            < IDLE_FRACTION_MAX * sample.duration_s
        {
            return Ok(());
        }
        // If this epoch has too few samples for a fit, the power law of an earlier epoch is kept.
        if let Some(miss_ratio) = sample.miss_ratio() {
            let miss_ratio = RunningMean::add_or_restart(self.miss_ratio, miss_ratio);
            self.miss_ratio = Some(miss_ratio);
            self.law = sample.power_law(miss_ratio.value).and_then(Result::ok).or(self.law);
        }
        let work = sample.bounded_work_s();
        self.pages_per_second =
            sample.accesses.as_ref().map(|accesses| accesses.pages_per_second).or(self.pages_per_second);
        // Without monitored accesses, assume that every page is accessed once per second.
        let pages_per_second = self.pages_per_second.unwrap_or(self.footprint * PAGES_PER_MIB);
        let accesses_per_work_s = pages_per_second * sample.duration_s / work;
        self.stall_ratio_without_memory = (accesses_per_work_s * sample.miss_latency_s).min(STALL_RATIO_MAX);
        let stall_ratio = (sample.idle_link_stall_s() / work).min(STALL_RATIO_MAX);
        let model = self.model();
        self.stalls.record(sample.local_mib.max(1.0), stall_ratio, model);
        self.traffic = sample.traffic(speedup, stall_ratio);
        Ok(())
    }

    /// Returns the stall ratio with `memory` MiB on an idle link, in seconds per second of work.
    pub fn stall_ratio(&self, memory: f64) -> f64 {
        self.stalls.predict(memory, self.model()).min(STALL_RATIO_MAX)
    }

    /// Returns a function of memory in MiB that models the stall ratio without measured stalls.
    fn model(&self) -> impl Fn(f64) -> f64 + use<> {
        let (law, footprint, stall_ratio_without_memory) =
            (self.law, self.footprint, self.stall_ratio_without_memory);
        move |memory| stall_ratio_without_memory * model_miss_ratio(law, footprint, memory)
    }

    /// Returns the utility of the tenant. Memory above `memory_max` MiB, the limit of the tenant,
    /// has no value.
    ///
    /// # Errors
    /// Returns [`UtilityError`] if no utility can be created from the estimates.
    pub fn utility(&self, supply: Supply, memory_max: f64) -> Result<TenantUtility, UtilityError> {
        let stall_ratio = |memory: f64| self.stall_ratio(memory.min(memory_max));
        let gamma = stall_ratio(0.0);
        let fraction_of_gamma =
            |memory: f64| if gamma > 0.0 { (stall_ratio(memory) / gamma).min(1.0) } else { 0.0 };
        let knots: Vec<Knot> = self
            .curve_memory_sizes(memory_max)
            .into_iter()
            .map(|memory| Knot { memory, misses: fraction_of_gamma(memory) })
            .collect();
        stall_utility(supply, knots, gamma, self.traffic)
    }

    /// Returns the bandwidth that the tenant could use with its current memory, in MB/s.
    pub fn wanted(&self) -> f64 {
        self.wanted
    }

    /// Returns the approximate standard error of miss ratios, 0 to 1. Returns 1 if accesses are not
    /// monitored.
    pub fn error(&self) -> f64 {
        self.law.as_ref().map_or(UNKNOWN_MISS_RATIO_ERROR, MissModel::error)
    }

    /// Returns the memory sizes of the stall curve in MiB, in ascending order: grid sizes that are
    /// closer together near 0, the measured sizes, and the memory limit of the tenant.
    fn curve_memory_sizes(&self, memory_max: f64) -> Vec<f64> {
        let even_in_square_root = (0..=CURVE_INTERVALS)
            .map(|at| self.footprint * (f64::from(at) / f64::from(CURVE_INTERVALS)).powi(2));
        let mut sizes: Vec<f64> = even_in_square_root
            .chain(self.stalls.measured_memory_sizes())
            .chain(Some(memory_max).filter(|memory_max| memory_max.is_finite()))
            .collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup_by(|next, last| *next - *last < 1e-6);
        sizes
    }
}

/// Returns the miss ratio with `memory` MiB. Without a power law, the miss ratio falls linearly
/// from 1 to 0 at the footprint.
fn model_miss_ratio(law: Option<PowerLaw>, footprint: f64, memory: f64) -> f64 {
    match law {
        Some(law) => law.misses(memory),
        None => (1.0 - memory / footprint).max(0.0),
    }
}

impl Sample {
    fn check_sample(&self) -> Result<(), SampleError> {
        let invalid = |quantity, value, rule| Err(SampleError { quantity, value, rule });
        if !(self.duration_s.is_finite() && self.duration_s > 0.0) {
            return invalid("epoch duration in seconds", self.duration_s, "above 0");
        }
        let accesses = self.accesses.as_ref();
        let all = [
            ("local memory in MiB", self.local_mib),
            ("remote memory in MiB", self.remote_mib),
            ("work time in seconds", self.work_s),
            ("number of misses", self.misses),
            ("number of pages read", self.pages_in),
            ("miss latency in seconds", self.miss_latency_s),
            ("used bandwidth in MB/s", self.used_mb_s),
            ("bandwidth limit in MB/s", self.limit_mb_s),
            ("stall time in seconds", self.stalled_s.unwrap_or(0.0)),
            ("block size in MiB", accesses.map_or(1.0, |accesses| accesses.block_mib)),
            ("pages accessed per second", accesses.map_or(0.0, |accesses| accesses.pages_per_second)),
        ];
        match all.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            Some((quantity, value)) => invalid(quantity, value, "of at least 0"),
            None => Ok(()),
        }
    }

    /// Returns the work time of all threads in seconds, at least [`WORK_FRACTION_MIN`] of the
    /// epoch.
    fn bounded_work_s(&self) -> f64 {
        self.work_s.max(WORK_FRACTION_MIN * self.duration_s)
    }

    /// Returns the total time that the misses would have taken on an idle link, in seconds.
    fn idle_link_stall_s(&self) -> f64 {
        self.misses * self.miss_latency_s
    }

    /// Estimates the factor by which the tenant would have been faster without its bandwidth limit.
    /// Returns 1 for a tenant that was not throttled.
    fn unthrottled_speedup(&self, link: f64) -> f64 {
        let wanted = wanted(self.used_mb_s, self.limit_mb_s, link);
        if wanted <= self.used_mb_s || self.used_mb_s == 0.0 {
            return 1.0;
        }
        let speedup_by_bandwidth = wanted / self.used_mb_s;
        let Some(stalled) = self.stalled_s else { return speedup_by_bandwidth };
        // The measured stall time counts simultaneous stalls of several threads once. The number of
        // stalled threads is unknown if the tenant was stalled nearly all the time, or for a
        // shorter time than its misses take.
        if stalled >= STALLED_FRACTION_MIN * self.duration_s
            || stalled < SINGLE_THREAD_STALL_MIN * self.idle_link_stall_s()
        {
            return speedup_by_bandwidth.min(SPEEDUP_MAX);
        }
        let stalled = stalled * (self.work_s / self.duration_s).max(1.0);
        ((self.bounded_work_s() + stalled) / (self.bounded_work_s() + self.idle_link_stall_s()))
            .clamp(SPEEDUP_MIN, SPEEDUP_MAX)
    }

    /// Returns the traffic that the tenant would cause without throttling, given its estimated
    /// speedup and its stall ratio on an idle link.
    fn traffic(&self, speedup: f64, stall_ratio: f64) -> LinkTraffic {
        let used = self.used_mb_s * speedup;
        let read_mb_s = (self.pages_in * PAGE_MB / self.duration_s * speedup).min(used);
        // If the tenant did not stall, assume that it would read one page per miss latency.
        let mb_per_stall_second = if stall_ratio > 0.0 {
            read_mb_s * (1.0 + stall_ratio) / stall_ratio
        } else {
            PAGE_MB / self.miss_latency_s.max(MISS_LATENCY_MIN_S)
        };
        LinkTraffic { mb_per_stall_second, mb_per_work_second: (used - read_mb_s) * (1.0 + stall_ratio) }
    }

    /// Returns the fraction of accesses that missed, or `None` if accesses are not monitored. A
    /// page read from remote memory counts as accessed even if the monitor missed the access.
    fn miss_ratio(&self) -> Option<f64> {
        let pages_in = self.pages_in.max(self.misses);
        let accesses = (self.accesses.as_ref()?.pages_per_second * self.duration_s).max(pages_in);
        Some(if accesses > 0.0 { pages_in / accesses } else { 0.0 })
    }

    /// Fits a power law to the access counts of blocks and to the miss ratio `misses`. Returns
    /// `None` if accesses are not monitored.
    fn power_law(&self, misses: f64) -> Option<Result<PowerLaw, FitError>> {
        let accesses = self.accesses.as_ref().filter(|accesses| accesses.block_mib > 0.0)?;
        let measured = MeasuredMissRatio {
            pages: (self.local_mib + self.remote_mib) / accesses.block_mib,
            local: self.local_mib / accesses.block_mib,
            misses,
            pages_per_mib: 1.0 / accesses.block_mib,
        };
        Some(fit(&accesses.histogram, &measured))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::market::{Bundle, Utility};

    const SUPPLY: Supply = Supply::new(1000, 100);

    /// Sample of a tenant with 400 of its 1000 MiB in local memory. It works for 5 s of the epoch
    /// of 10 s and is stalled for 5 s.
    fn sample() -> Sample {
        Sample {
            duration_s: 10.0,
            local_mib: 400.0,
            remote_mib: 600.0,
            work_s: 5.0,
            misses: 5000.0,
            pages_in: 5000.0,
            miss_latency_s: 1e-3,
            used_mb_s: 5000.0 * PAGE_MB / 10.0,
            limit_mb_s: 50.0,
            stalled_s: None,
            accesses: None,
        }
    }

    #[test]
    fn measured_stall_overrides_the_model() {
        let mut learner = Learner::default();
        learner.learn(&sample(), 100.0).unwrap();
        assert_eq!(learner.stall_ratio(400.0), 1.0);
        assert!(learner.stall_ratio(1000.0) < 1e-9 && learner.stall_ratio(0.0) > 1.0);
        let utility = learner.utility(SUPPLY, f64::INFINITY).unwrap();
        let value = |memory, bandwidth| utility.value(Bundle { memory, bandwidth });
        assert!((value(400.0, 50.0) - 0.5).abs() < 0.01, "works half of the time");
        assert!((value(1000.0, 50.0) - 1.0).abs() < 1e-9);
        let used = sample().used_mb_s;
        assert!(
            value(400.0, 2.0 * used) > 0.98 * value(400.0, 50.0),
            "a link of twice the used bandwidth is sufficient"
        );
        assert!(value(400.0, used / 2.0) < 0.55 * value(400.0, 50.0), "half the bandwidth halves throughput");
        let throttled_ratio = |memory| value(memory, used / 2.0) / value(memory, 50.0);
        assert!(
            throttled_ratio(800.0) > 1.3 * throttled_ratio(400.0),
            "more memory reduces the traffic and so the effect of throttling"
        );
    }

    #[test]
    fn saturated_tenant_wants_its_unthrottled_bandwidth() {
        let wanted = |stalled| {
            let mut learner = Learner::default();
            learner
                .learn(&Sample { misses: 2000.0, used_mb_s: 45.0, stalled_s: stalled, ..sample() }, 200.0)
                .unwrap();
            learner.wanted()
        };
        assert_eq!(wanted(None), 200.0, "bandwidth of the link if stalls are not measured");
        assert_eq!(
            wanted(Some(7.0)),
            45.0 * 12.0 / 7.0,
            "5 s of work plus 7 s of stalls take 7 s on an idle link: 5 s of work, 2 s of stalls"
        );
        assert_eq!(wanted(Some(2.0)), 45.0 * SPEEDUP_MIN, "lower bound of the speedup");
        assert_eq!(wanted(Some(9.9)), 45.0 * SPEEDUP_MAX, "stalled nearly all the time");
        assert_eq!(wanted(Some(1.0)), 45.0 * SPEEDUP_MAX, "stalls of several threads overlap");
    }

    #[test]
    fn tenant_without_stalls_gains_nothing_from_more_memory() {
        let mut learner = Learner::default();
        let busy = Sample { remote_mib: 0.0, misses: 0.0, pages_in: 0.0, used_mb_s: 0.0, ..sample() };
        learner.learn(&busy, 100.0).unwrap();
        let utility = learner.utility(SUPPLY, f64::INFINITY).unwrap();
        let value = |memory| utility.value(Bundle { memory, bandwidth: 1.0 });
        assert_eq!(value(400.0), value(1000.0));
        assert!(value(200.0) < value(400.0), "less memory than measured may cause stalls");
    }

    #[test]
    fn memory_above_the_tenant_limit_has_no_value() {
        let mut learner = Learner::default();
        learner.learn(&sample(), 100.0).unwrap();
        let utility = learner.utility(SUPPLY, 500.0).unwrap();
        let value = |memory| utility.value(Bundle { memory, bandwidth: 50.0 });
        assert!(value(400.0) < value(500.0));
        assert!((value(500.0) - value(900.0)).abs() < 1e-9);
    }

    #[test]
    fn tenant_with_few_stalls_still_needs_its_bandwidth() {
        // The first tenant has eight busy threads that stall for 1 % of their work time. The second
        // tenant only writes and does not stall. Both use 26 MB/s.
        let busy = Sample { work_s: 80.0, misses: 800.0, used_mb_s: 26.0, ..sample() };
        for sample in [busy, Sample { misses: 0.0, pages_in: 0.0, used_mb_s: 26.0, ..sample() }] {
            let mut learner = Learner::default();
            learner.learn(&sample, 100.0).unwrap();
            let utility = learner.utility(SUPPLY, f64::INFINITY).unwrap();
            let value = |memory, bandwidth| utility.value(Bundle { memory, bandwidth });
            assert!(value(400.0, 52.0) > 0.97, "{}", value(400.0, 52.0));
            assert!((value(400.0, 13.0) - 0.5).abs() < 0.02, "{}", value(400.0, 13.0));
        }
    }

    #[test]
    fn throttled_tenant_is_not_idle() {
        let mut learner = Learner::default();
        let stalled =
            Sample { work_s: 0.05, misses: 4000.0, miss_latency_s: 5e-6, stalled_s: Some(9.9), ..sample() };
        learner.learn(&Sample { used_mb_s: 4.0, limit_mb_s: 4.0, ..stalled }, 100.0).unwrap();
        assert_eq!(learner.wanted(), 4.0 * SPEEDUP_MAX);
        assert!(learner.stall_ratio(100.0) > learner.stall_ratio(400.0));
    }

    #[test]
    fn wanted_bandwidth_does_not_grow_with_the_limit() {
        let mut learner = Learner::default();
        let sample = Sample { used_mb_s: 20.0, stalled_s: Some(5.0), ..sample() };
        for _ in 0..5 {
            let limit = learner.wanted().max(20.0);
            learner.learn(&Sample { limit_mb_s: limit, ..sample.clone() }, 100.0).unwrap();
            assert_eq!(learner.wanted(), 20.0 * SPEEDUP_MIN);
        }
    }

    #[test]
    fn stalled_tenant_is_not_idle() {
        let mut learner = Learner::default();
        learner.learn(&Sample { work_s: 0.05, misses: 2500.0, ..sample() }, 100.0).unwrap();
        assert_eq!(learner.stall_ratio(400.0), 50.0);
    }

    #[test]
    fn single_miss_hardly_changes_the_estimate() {
        let estimates = |misses| {
            let mut learner = Learner::default();
            learner.learn(&Sample { misses, pages_in: misses, ..sample() }, 100.0).unwrap();
            let utility = learner.utility(SUPPLY, f64::INFINITY).unwrap();
            [learner.stall_ratio(200.0), utility.value(Bundle { memory: 200.0, bandwidth: 20.0 })]
        };
        let (one_miss, no_miss) = (estimates(1.0), estimates(0.0));
        assert!(
            (one_miss[0] / no_miss[0] - 1.0).abs() < 1e-3 && (one_miss[1] / no_miss[1] - 1.0).abs() < 1e-3,
            "{one_miss:?} {no_miss:?}"
        );
    }

    #[test]
    fn idle_epoch_leaves_the_estimate_unchanged() {
        let mut learner = Learner::default();
        learner.learn(&sample(), 100.0).unwrap();
        let before = learner.stall_ratio(200.0);
        learner.learn(&Sample { work_s: 0.01, misses: 1.0, ..sample() }, 100.0).unwrap();
        assert_eq!(learner.stall_ratio(200.0), before);
    }

    #[test]
    fn readahead_pages_count_as_misses() {
        let counts = vec![10; 1000];
        let sample = |pages_in| {
            let accesses = PageAccesses {
                histogram: Histogram::new(counts.clone()),
                block_mib: 1.0,
                pages_per_second: 4000.0,
            };
            Sample { accesses: Some(accesses), pages_in, ..sample() }
        };
        let stall_ratio_change = |pages_in| {
            let mut learner = Learner::default();
            learner.learn(&sample(pages_in), 100.0).unwrap();
            learner.stall_ratio(700.0) / learner.stall_ratio(400.0)
        };
        assert_eq!(stall_ratio_change(40_000.0), 1.0, "memory does not reduce the stalls of a scan");
        assert!(stall_ratio_change(5000.0) < 0.8);
    }

    #[test]
    fn invalid_sample_is_rejected_and_leaves_estimates_unchanged() {
        let mut learner = Learner::default();
        learner.learn(&sample(), 100.0).unwrap();
        let before = format!("{learner:?}");
        let invalid = [
            (
                Sample { misses: f64::NAN, ..sample() },
                "number of misses: NaN is out of range, must be a finite number of at least 0",
            ),
            (
                Sample { local_mib: -1.0, ..sample() },
                "local memory in MiB: -1 is out of range, must be a finite number of at least 0",
            ),
            (
                Sample { duration_s: 0.0, ..sample() },
                "epoch duration in seconds: 0 is out of range, must be a finite number above 0",
            ),
            (
                Sample { used_mb_s: f64::INFINITY, ..sample() },
                "used bandwidth in MB/s: inf is out of range, must be a finite number of at least 0",
            ),
        ];
        for (sample, message) in invalid {
            assert_eq!(learner.learn(&sample, 100.0).unwrap_err().to_string(), message);
            assert_eq!(format!("{learner:?}"), before);
        }
    }

    #[test]
    fn page_accesses_shape_the_miss_curve() {
        // A tenth of the blocks is accessed nine times as often as the other blocks, so that the
        // first 100 MiB reduce stalls most.
        let counts = (0..1000).map(|block| if block < 100 { 90 } else { 10 });
        let accesses =
            PageAccesses { histogram: Histogram::new(counts), block_mib: 1.0, pages_per_second: 1500.0 };
        let mut learner = Learner::default();
        learner.learn(&Sample { accesses: Some(accesses), ..sample() }, 100.0).unwrap();
        assert_eq!(learner.stall_ratio(400.0), 1.0);
        let mut unmonitored = Learner::default();
        unmonitored.learn(&sample(), 100.0).unwrap();
        assert!(
            learner.stall_ratio(50.0) / learner.stall_ratio(150.0)
                > 1.05 * unmonitored.stall_ratio(50.0) / unmonitored.stall_ratio(150.0)
        );
        assert!(learner.error() < unmonitored.error());
    }
}
