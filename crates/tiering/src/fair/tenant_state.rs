//! State of one tenant from step to step: counters of the last step, and the thrash level.

use units::{Bytes, Ns};

use super::{Counters, TenantId, TenantSample, ThrashSettings, ThrashState, thrash_throttle::ThrashThrottle};

/// State of a tenant. Its size is constant.
#[derive(Clone, Copy, Debug)]
pub(super) struct TenantState {
    /// Tenant.
    pub(super) id: TenantId,
    last: Counters,
    last_usage: Bytes,
    /// Cumulative decreases of the usage, which replace an unknown counter of freed pages.
    decreases: Bytes,
    /// Increase of the usage in the last step. It is the usage in the first step.
    growth: Bytes,
    /// Size of attempted promotions in the last step.
    attempted: Bytes,
    throttle: ThrashThrottle,
}

impl TenantState {
    /// Starts to observe a tenant. All its memory counts as newly allocated.
    pub(super) fn new(at: Ns, sample: &TenantSample) -> Self {
        let usage = sample.total_usage();
        let freed = sample.counters.freed.unwrap_or_default();
        Self {
            id: sample.id,
            last: sample.counters,
            last_usage: Bytes::ZERO,
            decreases: Bytes::ZERO,
            growth: usage,
            attempted: Bytes::ZERO,
            throttle: ThrashThrottle::new(at, sample, freed),
        }
    }

    /// Updates the state with the sample of the next step. Resets the state if a counter decreased.
    pub(super) fn observe(&mut self, at: Ns, sample: &TenantSample, settings: &ThrashSettings) {
        if self.has_restarted(&sample.counters) {
            *self = Self::new(at, sample);
        }
        let usage = sample.total_usage();
        self.growth = usage.saturating_sub(self.last_usage);
        self.attempted = sample.counters.attempted.saturating_sub(self.last.attempted);
        self.decreases = [self.decreases, self.last_usage.saturating_sub(usage)].into_iter().sum();
        (self.last, self.last_usage) = (sample.counters, usage);
        self.throttle.observe(at, sample, self.freed(sample), settings);
    }

    /// Restarts the period of the detection of thrashing, because the clock ran backwards.
    pub(super) fn restart_period(&mut self, at: Ns, sample: &TenantSample) {
        self.throttle.restart_period(at, sample, self.freed(sample));
    }

    /// Returns the memory that the tenant is expected to place in local memory before the next step:
    /// the allocations of the last step or, if that is more, twice the attempted promotions, at least
    /// `probe` if the tenant has memory in lower tiers. The tenant can then double the rate of its
    /// promotions in each step. Allocations that grow use the memory below the low watermark.
    pub(super) fn expected_growth(&self, lower_tiers_usage: Bytes, probe: Bytes) -> Bytes {
        let promotions = twice(self.attempted).max(probe).min(lower_tiers_usage);
        self.growth.max(promotions)
    }

    /// Returns the thrash level.
    pub(super) fn thrash_level(&self) -> u8 {
        self.throttle.level()
    }

    /// Returns the result of the last period of the detection of thrashing.
    pub(super) fn thrash_state(&self) -> ThrashState {
        self.throttle.state()
    }

    /// Returns the promotion rate before thrashing was detected, in bytes per second.
    pub(super) fn unthrottled_rate(&self) -> Bytes {
        self.throttle.unthrottled_rate()
    }

    fn freed(&self, sample: &TenantSample) -> Bytes {
        sample.counters.freed.unwrap_or(self.decreases)
    }

    /// Returns whether a cumulative counter decreased or became unknown or available.
    fn has_restarted(&self, now: &Counters) -> bool {
        let last = &self.last;
        now.demoted < last.demoted
            || now.promoted < last.promoted
            || now.attempted < last.attempted
            || now.sampled_promotions < last.sampled_promotions
            || now.sampled_thrashed < last.sampled_thrashed
            || now.freed.is_some() != last.freed.is_some()
            || now.freed < last.freed
    }
}

fn twice(size: Bytes) -> Bytes {
    Bytes::new(size.get().saturating_mul(2))
}
