//! Samples of a running VM, and their validation.

use serde::{Deserialize, Serialize};
use units::{Fraction, Ns, limits::QOS_PAGES_PER_SAMPLE_MAX};

use crate::sensitivity::{COUNTER_NAMES, counter_range};

/// Placement of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Placement {
    /// All memory is on the pool, because the workload was predicted to be insensitive.
    EntirelyOnPool,
    /// Only the memory that was predicted to be frigid is on the pool.
    Split,
}

/// Fraction of a VM's pool node that the VM accessed in an interval, with the 95 % confidence
/// interval of the estimate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AccessedShare {
    /// Lower end of the confidence interval.
    pub low: Fraction,
    /// Estimate.
    pub estimate: Fraction,
    /// Upper end of the confidence interval.
    pub high: Fraction,
}

/// Error for an invalid result of page sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{accessed} of {sampled} sampled pages: sampled must be 1 to {QOS_PAGES_PER_SAMPLE_MAX}, and accessed at most sampled"
)]
pub struct AccessedShareError {
    accessed: u32,
    sampled: u32,
}

/// Quantile of the standard normal distribution for a two-sided 95 % confidence interval.
const Z_95: f64 = 1.959_964;

impl AccessedShare {
    /// Computes the accessed share from a random sample of pages. The confidence interval is
    /// Wilson's score interval (1927), which also holds if no page or every page was accessed.
    ///
    /// # Errors
    /// [`AccessedShareError`] if no page was sampled, if too many pages were sampled, or if more
    /// pages were accessed than sampled.
    pub fn from_pages(accessed: u32, sampled: u32) -> Result<Self, AccessedShareError> {
        if sampled == 0 || sampled > QOS_PAGES_PER_SAMPLE_MAX || accessed > sampled {
            return Err(AccessedShareError { accessed, sampled });
        }
        let (n, share) = (f64::from(sampled), f64::from(accessed) / f64::from(sampled));
        let square = Z_95 * Z_95 / n;
        let center = (share + square / 2.0) / (1.0 + square);
        let margin = Z_95 / (1.0 + square) * (share * (1.0 - share) / n + square / (4.0 * n)).sqrt();
        let fraction = |x: f64| Fraction::new(x.clamp(0.0, 1.0)).expect("a clamped number is a fraction");
        // Rounding errors could move the ends past the estimate.
        let low = fraction((center - margin).min(share));
        let high = fraction((center + margin).max(share));
        Ok(Self { low, estimate: fraction(share), high })
    }

    /// Creates the accessed share of a source that looks at every page.
    pub const fn exact(share: Fraction) -> Self {
        Self { low: share, estimate: share, high: share }
    }
}

/// Source of the fraction of loads that the pool serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadSource {
    /// Processor events that count loads by the memory that served them, or memory bandwidth per
    /// node.
    Events,
    /// Sampled accesses to pages. Accesses that the caches serve count, too, so the fraction is less
    /// exact.
    AccessSampling,
}

/// Fraction of a VM's loads from memory that the pool served in an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolLoads {
    /// Fraction of the loads.
    pub share: Fraction,
    /// Source of the fraction.
    pub source: LoadSource,
}

/// Sample of a running VM over one interval.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// End of the interval.
    pub at: Ns,
    /// Fraction of the pool node that the VM accessed in the interval. `None` if the host cannot
    /// observe accesses to this VM's pool node.
    pub accessed: Option<AccessedShare>,
    /// Fraction of the pool node that the VM has touched since it started. `None` if the host
    /// cannot observe it.
    pub touched: Option<Fraction>,
    /// Core counters of the VM's vCPUs in the interval, in the order of [`COUNTER_NAMES`]. Counters
    /// that were not measured are NaN. `None` if the host cannot measure counters.
    pub counters: Option<[f64; COUNTER_NAMES.len()]>,
    /// Loads from the pool. `None` if the host cannot measure them. Not required for a VM that is
    /// placed entirely on the pool.
    pub pool_loads: Option<PoolLoads>,
}

/// Reason why a sample is rejected.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// The sample ends in the future.
    #[error("at {at}: must not be after the current time {now}")]
    Future {
        /// End of the sample.
        at: Ns,
        /// Current time.
        now: Ns,
    },
    /// The sample is not newer than the previous sample of the VM.
    #[error("at {at}: must be after the previous sample at {previous}")]
    NotNewer {
        /// End of the sample.
        at: Ns,
        /// End of the previous sample.
        previous: Ns,
    },
    /// A counter is out of range.
    #[error("counter {name} is {value}: must be a number from 0 to {max}")]
    Counter {
        /// Name of the counter.
        name: &'static str,
        /// Value of the counter.
        value: f64,
        /// Largest valid value.
        max: f64,
    },
}

impl Sample {
    /// Checks that the sample is newer than `previous`, not in the future, and has valid counters.
    pub(super) fn check(&self, previous: Option<Ns>, now: Ns) -> Result<(), SampleError> {
        if self.at > now {
            return Err(SampleError::Future { at: self.at, now });
        }
        if let Some(previous) = previous
            && self.at <= previous
        {
            return Err(SampleError::NotNewer { at: self.at, previous });
        }
        let measured = self.counters.iter().flatten().enumerate().filter(|(_, value)| !value.is_nan());
        match { measured }.find(|(index, value)| !counter_range(*index).contains(value)) {
            Some((index, value)) => Err(SampleError::Counter {
                name: COUNTER_NAMES[index],
                value: *value,
                max: *counter_range(index).end(),
            }),
            None => Ok(()),
        }
    }
}
