//! Measurement of one tenant: computes the tenant's work in an epoch from the kernel's counters,
//! and learns the tenant's profile.

use std::time::Duration;

use fairness::profile::{Learner, PageAccesses, Sample, SampleError};
use units::Bytes;

use crate::{
    host::{access_profile::AccessProfile, cgroup::Counters, memory::usage::PAGE_BYTES},
    shares::TenantMeasurement,
};

/// Approximate number of blocks into which the memory of a tenant is divided for its histogram. The
/// number is fixed, so that the cost does not grow with the memory.
const BLOCKS_PER_TENANT: u64 = 16_384;

/// Meter of one tenant, which is kept from epoch to epoch.
#[derive(Clone, Debug, Default)]
pub(super) struct Meter {
    /// Time and values of the last reading of the counters.
    last: Option<(Duration, Counters)>,
    learner: Learner,
}

/// Conditions of an epoch. All except the tenant's limit are the same for all tenants.
#[derive(Clone, Copy, Debug)]
pub(super) struct MeasuredPeriod {
    /// Time at which the counters were read.
    pub now: Duration,
    /// Latency of a page fault that reads from the swap device, in seconds.
    pub miss_latency_s: f64,
    /// Bandwidth limit of the tenant, in MB/s.
    pub limit_mb_s: f64,
    /// Bandwidth of the link, in MB/s.
    pub link_mb_s: f64,
}

impl Meter {
    pub(super) fn learner(&self) -> &Learner {
        &self.learner
    }

    /// Returns the tenant's work since the last call, and updates its profile. Returns `None` in
    /// the first call.
    ///
    /// # Errors
    /// [`SampleError`] if the measurements are impossible.
    pub(super) fn measure(
        &mut self,
        now: Counters,
        profile: Option<AccessProfile>,
        period: &MeasuredPeriod,
    ) -> Result<Option<TenantMeasurement>, SampleError> {
        let last = self.last.replace((period.now, now));
        // Decreased counters mean that a new cgroup of the same name has replaced the old cgroup.
        let is_same = |(_, last): &(Duration, Counters)| {
            last.cpu_us <= now.cpu_us && last.major_faults <= now.major_faults
        };
        let Some((then, last)) = last.filter(is_same) else {
            self.learner = Learner::default();
            return Ok(None);
        };
        let seconds = period.now.saturating_sub(then).as_secs_f64();
        let (read, written) = (now.read.saturating_sub(last.read), now.written.saturating_sub(last.written));
        // If a tenant mostly uses other devices, its I/O stalls are not caused by the link.
        let is_of_link = read + written >= now.other_device_bytes.saturating_sub(last.other_device_bytes);
        let stalled = now.stalled_us.zip(last.stalled_us).map(|(now, last)| {
            let (memory, devices) = (now.0.saturating_sub(last.0), now.1.saturating_sub(last.1));
            let us = if is_of_link { memory.max(devices) } else { memory };
            (us as f64 / 1e6).min(seconds)
        });
        let moved = read.max(written);
        let sample = Sample {
            duration_s: seconds,
            local_mib: to_mib(now.memory),
            remote_mib: to_mib(now.swapped),
            work_s: (now.cpu_us - last.cpu_us) as f64 / 1e6,
            misses: (now.major_faults - last.major_faults) as f64,
            pages_in: now.refaults.saturating_sub(last.refaults) as f64,
            miss_latency_s: period.miss_latency_s,
            used_mb_s: moved as f64 / 1e6 / seconds,
            limit_mb_s: period.limit_mb_s,
            stalled_s: stalled,
            accesses: profile.as_ref().map(|profile| to_page_accesses(profile, now)),
        };
        self.learner.learn(&sample, period.link_mb_s)?;
        let stalled_fraction =
            stalled.map_or_else(|| estimate_stalled_fraction(&sample), |stalled| stalled / seconds);
        Ok(Some(TenantMeasurement {
            memory: now.memory,
            used_mb_s: sample.used_mb_s,
            stalled_fraction: stalled_fraction.clamp(0.0, 1.0),
            refaults: sample.pages_in / seconds,
            source: profile.map(|profile| profile.source),
        }))
    }
}

pub(super) fn to_mib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / Bytes::mib(1).get() as f64
}

/// Estimates the stalled fraction from page faults, for kernels that do not count stalls.
fn estimate_stalled_fraction(sample: &Sample) -> f64 {
    let stalled_fraction = sample.misses * sample.miss_latency_s;
    if stalled_fraction > 0.0 { stalled_fraction / (stalled_fraction + sample.work_s) } else { 0.0 }
}

/// Converts a profile of address ranges to a profile of memory. If the accessed address ranges are
/// larger than the tenant's memory, they are scaled down to its size.
fn to_page_accesses(profile: &AccessProfile, now: Counters) -> PageAccesses {
    let bytes = now.memory_with_swap().get().max(1);
    let resident = profile.resident_fraction(bytes);
    let block = (bytes / BLOCKS_PER_TENANT).max(PAGE_BYTES);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a size in bytes, at least a page"
    )]
    let address_block = (block as f64 / resident) as u64;
    PageAccesses {
        histogram: profile.histogram(address_block),
        block_mib: to_mib(Bytes::new(block)),
        pages_per_second: profile.pages_per_second() * resident,
    }
}
