//! Measurement of one tenant: from the kernel's counters to the work of an epoch, and its profile.

use std::time::Duration;

use fairness::profile::{Learner, PageAccesses, Sample, SampleError};
use units::Bytes;

use crate::host::{
    cgroup::Counters,
    memory::usage::PAGE,
    watched::{Eyes, Watched},
};

/// Blocks that a tenant's memory is divided into, about: fewer than its pages, so that large tenants cost no more than small ones.
const BLOCKS: u64 = 16_384;

/// One tenant, epoch after epoch.
#[derive(Clone, Debug, Default)]
pub(super) struct Meter {
    /// Time and value of the last reading.
    last: Option<(Duration, Counters)>,
    learner: Learner,
}

/// The end of an epoch, for all tenants alike but for the limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Period {
    /// When counters were read.
    pub now: Duration,
    /// How long a page takes that is waited for, in seconds.
    pub miss: f64,
    /// Bandwidth limit of the tenant, in MB/s.
    pub limit: f64,
    /// Bandwidth of the link, in MB/s.
    pub link: f64,
}

/// Work of a tenant in an epoch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Memory it has.
    pub memory: Bytes,
    /// Of the link, the busier way, in MB/s.
    pub used: f64,
    /// Part of its time that some of it waited for pages or for devices, 0 to 1.
    pub waited: f64,
    /// Pages per second that came back after they had been taken away.
    pub refaults: f64,
    /// Source of its page accesses, if any.
    pub seen_by: Option<Eyes>,
}

impl Meter {
    pub(super) fn learner(&self) -> &Learner {
        &self.learner
    }

    /// Returns the work since the last call; `None` for the first.
    ///
    /// # Errors
    /// Impossible measurements.
    pub(super) fn measure(
        &mut self,
        now: Counters,
        watched: Option<Watched>,
        period: &Period,
    ) -> Result<Option<Measured>, SampleError> {
        let last = self.last.replace((period.now, now));
        // Decreasing counters belong to another cgroup of the same name.
        let is_same =
            |(_, last): &(Duration, Counters)| last.worked_us <= now.worked_us && last.misses <= now.misses;
        let Some((then, last)) = last.filter(is_same) else {
            self.learner = Learner::default();
            return Ok(None);
        };
        let seconds = period.now.saturating_sub(then).as_secs_f64();
        let (read, written) = (now.read.saturating_sub(last.read), now.written.saturating_sub(last.written));
        // A tenant that mostly uses other devices stalls on those.
        let is_of_link = read + written >= now.elsewhere.saturating_sub(last.elsewhere);
        let stalled = now.stalled_us.zip(last.stalled_us).map(|(now, last)| {
            let (memory, devices) = (now.0.saturating_sub(last.0), now.1.saturating_sub(last.1));
            let us = if is_of_link { memory.max(devices) } else { memory };
            (us as f64 / 1e6).min(seconds)
        });
        let moved = read.max(written);
        let sample = Sample {
            duration_s: seconds,
            local_mib: mib(now.memory),
            remote_mib: mib(now.swapped),
            work_s: (now.worked_us - last.worked_us) as f64 / 1e6,
            misses: (now.misses - last.misses) as f64,
            pages_in: now.refaults.saturating_sub(last.refaults) as f64,
            miss_latency_s: period.miss,
            used_mb_s: moved as f64 / 1e6 / seconds,
            limit_mb_s: period.limit,
            stalled_s: stalled,
            accesses: watched.as_ref().map(|watched| touched(watched, now)),
        };
        self.learner.learn(&sample, period.link)?;
        let waited = stalled.map_or_else(|| reckoned(&sample), |stalled| stalled / seconds);
        Ok(Some(Measured {
            memory: now.memory,
            used: sample.used_mb_s,
            waited: waited.clamp(0.0, 1.0),
            refaults: sample.pages_in / seconds,
            seen_by: watched.map(|watched| watched.by),
        }))
    }
}

pub(super) fn mib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / Bytes::mib(1).get() as f64
}

/// Where the kernel does not count how long it waited.
fn reckoned(sample: &Sample) -> f64 {
    let waited = sample.misses * sample.miss_latency_s;
    if waited > 0.0 { waited / (waited + sample.work_s) } else { 0.0 }
}

/// Regions are of addresses: where there is less memory than addresses were touched, blocks are larger, and touches fewer.
fn touched(watched: &Watched, now: Counters) -> PageAccesses {
    let has = now.everywhere().get().max(1);
    let part = watched.part_there(has);
    let block = (has / BLOCKS).max(PAGE);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
    let of_addresses = (block as f64 / part) as u64;
    PageAccesses {
        histogram: watched.histogram(of_addresses),
        block_mib: mib(Bytes::new(block)),
        pages_per_second: watched.pages_per_second() * part,
    }
}
