//! The policy of early eviction: adapts the threshold of each tenant, and classifies its flows.

use std::collections::BTreeMap;

use units::{Bytes, Ns, limits::TIERING_TENANTS_MAX};

use super::{
    Counters, FlowClass, Settings, SettingsError, TenantReport, TenantSample, ThresholdChange,
    early_loss::{Cycle, EarlyLoss},
    lowered_threshold, pulled_back_threshold, to_f64,
};
use crate::fair::TenantId;

/// Part of a cycle, as a divisor, in which a tenant must run so that its growth rate is measured, and in
/// which memory must be evicted so that the eviction rate is measured.
const MEASURED_DIVISOR: u64 = 20;
/// Largest ratio of the growth rate to the eviction rate. A larger ratio has the same effect: the
/// threshold is lowered to its minimum at once.
const ALPHA_MAX: f64 = 1e6;
/// Distance from its maximum at which a threshold is reset completely, in bytes.
const RESET_COMPLETE_BYTES: f64 = 4096.0;

/// Policy of early eviction for the tenants of a host. The number of tenants is limited by
/// [`TIERING_TENANTS_MAX`].
#[derive(Clone, Debug)]
pub struct Policy {
    settings: Settings,
    states: BTreeMap<TenantId, TenantState>,
    /// Number of steps.
    steps: u64,
    reports: Vec<TenantReport>,
}

/// State of a tenant between two steps.
#[derive(Clone, Copy, Debug)]
struct TenantState {
    /// Start of the current cycle.
    cycle_start: Ns,
    /// Counters at this time.
    counters: Counters,
    /// Limit of the tenant, to which the threshold refers.
    limit: Bytes,
    /// Threshold, in bytes.
    threshold: f64,
    /// Growth rate without blocking (V_app), in bytes per second.
    growth: f64,
    /// Eviction rate while memory is evicted (V_evict), in bytes per second.
    eviction: f64,
    /// Memory that was evicted since the eviction rate was measured, and the time in which it was evicted.
    unmeasured: (Bytes, Ns),
    /// Cache miss rate of the last cycle with accesses, from 0 to 1.
    miss_rate: Option<f64>,
    early_loss: EarlyLoss,
    change: ThresholdChange,
    /// Number of the last step with a sample of the tenant.
    sampled_in: u64,
}

impl Policy {
    /// Creates a policy without tenants.
    ///
    /// # Errors
    /// [`SettingsError`] if a setting violates its rule.
    pub fn new(settings: Settings) -> Result<Self, SettingsError> {
        settings.check()?;
        Ok(Self { settings, states: BTreeMap::new(), steps: 0, reports: Vec::new() })
    }

    /// Adapts the thresholds of the tenants whose cycle has ended, and classifies the flows of all tenants.
    /// Returns a report per sample. Tenants without a sample are forgotten. Samples beyond the limit, and
    /// samples of a tenant that has another sample in this step, are ignored.
    pub fn step(&mut self, at: Ns, samples: &[TenantSample]) -> &[TenantReport] {
        self.reports.clear();
        self.steps += 1;
        for sample in samples.iter().take(TIERING_TENANTS_MAX) {
            let new = || TenantState::new(at, sample, &self.settings);
            let state = self.states.entry(sample.id).or_insert_with(new);
            if std::mem::replace(&mut state.sampled_in, self.steps) == self.steps {
                continue;
            }
            state.observe(at, sample, &self.settings);
            self.reports.push(state.report(sample, &self.settings));
        }
        if self.reports.len() < self.states.len() {
            self.states.retain(|_, state| state.sampled_in == self.steps);
        }
        &self.reports
    }
}

impl TenantState {
    fn new(at: Ns, sample: &TenantSample, settings: &Settings) -> Self {
        Self {
            cycle_start: at,
            counters: sample.counters,
            limit: sample.limit,
            threshold: to_f64(settings.upper_threshold(sample.limit).get()),
            growth: 0.0,
            eviction: to_f64(settings.nominal_eviction_bytes_per_s.get()),
            unmeasured: (Bytes::ZERO, Ns::ZERO),
            miss_rate: None,
            early_loss: EarlyLoss::default(),
            change: ThresholdChange::Unchanged,
            sampled_in: 0,
        }
    }

    fn observe(&mut self, at: Ns, sample: &TenantSample, settings: &Settings) {
        let Some(cycle) = sample.counters.since(&self.counters).filter(|_| at >= self.cycle_start) else {
            *self = Self { sampled_in: self.sampled_in, ..Self::new(at, sample, settings) };
            return;
        };
        self.set_limit(sample.limit, settings);
        let elapsed = at.since(self.cycle_start);
        if elapsed < settings.cycle {
            return;
        }
        self.measure_rates(elapsed, &cycle);
        if let Some(limit) = settings.loss_limit {
            let (_, upper) = self.threshold_range(settings);
            let is_early = self.threshold < upper && to_f64(sample.usage.get()) < upper;
            let (growth, eviction) = (self.growth, self.eviction);
            self.early_loss
                .add_cycle(&Cycle { elapsed, counters: &cycle, is_early, growth, eviction }, limit);
        }
        let beta = self.measure_miss_rate(&cycle);
        self.change = self.adapt_threshold(beta, settings);
        (self.cycle_start, self.counters) = (at, sample.counters);
    }

    /// Measures the growth rate and the eviction rate of a cycle. A rate that cannot be measured keeps its
    /// value.
    fn measure_rates(&mut self, elapsed: Ns, cycle: &Counters) {
        // A blocked tenant grows only as fast as its memory is evicted, which does not show its demand.
        let running = elapsed.0.saturating_sub(cycle.blocked.0);
        if running >= elapsed.0 / MEASURED_DIVISOR {
            self.growth = rate(cycle.grown, Ns(running));
        }
        let (evicted, evicting) = &mut self.unmeasured;
        (*evicted, *evicting) = (evicted.saturating_add(cycle.evicted), evicting.after(cycle.evicting));
        if evicting.0 > elapsed.0 / MEASURED_DIVISOR {
            self.eviction = rate(*evicted, *evicting);
            self.unmeasured = (Bytes::ZERO, Ns::ZERO);
        }
    }

    /// Returns β, the ratio of the cache miss rate to that of the last cycle (Eq. 3). The paper does not
    /// define it if the last rate was 0: it is 1 for another rate of 0, and infinite otherwise.
    fn measure_miss_rate(&mut self, cycle: &Counters) -> f64 {
        if cycle.accesses == 0 {
            return 1.0;
        }
        let current = (to_f64(cycle.misses) / to_f64(cycle.accesses)).min(1.0);
        match self.miss_rate.replace(current) {
            None => 1.0,
            Some(last) if last > 0.0 => current / last,
            Some(_) if current > 0.0 => f64::INFINITY,
            Some(_) => 1.0,
        }
    }

    /// Adapts the threshold at the end of a cycle (section III-B, Fig. 6).
    fn adapt_threshold(&mut self, beta: f64, settings: &Settings) -> ThresholdChange {
        let (lower, upper) = self.threshold_range(settings);
        let current = self.threshold;
        if self.eviction <= 0.0 {
            // No eviction is completed, so early eviction cannot prevent blocking.
            self.set_threshold(upper, settings);
            return ThresholdChange::Stalled;
        }
        if lower >= upper {
            return ThresholdChange::Unchanged;
        }
        if self.early_loss.is_too_large() {
            self.set_threshold(upper, settings);
            return ThresholdChange::Costly;
        }
        let alpha = (self.growth / self.eviction).min(ALPHA_MAX);
        if alpha <= 1.0 {
            if current >= upper {
                return ThresholdChange::Unchanged;
            }
            let reset = current + (upper - current) / f64::from(settings.reset_cycles);
            let is_complete = upper - reset < RESET_COMPLETE_BYTES;
            self.set_threshold(if is_complete { upper } else { reset }, settings);
            return ThresholdChange::Reset;
        }
        let lowered = lowered_threshold(current, alpha, lower);
        self.set_threshold(pulled_back_threshold(settings.pull_back, current, lowered, beta), settings);
        if beta > 1.0 { ThresholdChange::PulledBack } else { ThresholdChange::Lowered }
    }

    /// Returns the smallest and the largest threshold.
    fn threshold_range(&self, settings: &Settings) -> (f64, f64) {
        let range = (settings.lower_threshold(self.limit), settings.upper_threshold(self.limit));
        (to_f64(range.0.get()), to_f64(range.1.get()))
    }

    /// Sets the limit. The threshold keeps its ratio to the largest one.
    fn set_limit(&mut self, limit: Bytes, settings: &Settings) {
        if limit == self.limit {
            return;
        }
        let (_, before) = self.threshold_range(settings);
        self.limit = limit;
        let (_, upper) = self.threshold_range(settings);
        let ratio = if before > 0.0 { self.threshold / before } else { 1.0 };
        self.set_threshold(ratio * upper, settings);
    }

    fn set_threshold(&mut self, threshold: f64, settings: &Settings) {
        let (lower, upper) = self.threshold_range(settings);
        self.threshold = threshold.clamp(lower, upper);
    }

    fn report(&self, sample: &TenantSample, settings: &Settings) -> TenantReport {
        let threshold = to_bytes(self.threshold);
        TenantReport {
            id: sample.id,
            usage: sample.usage,
            limit: sample.limit,
            threshold,
            lower_threshold: settings.lower_threshold(sample.limit),
            upper_threshold: settings.upper_threshold(sample.limit),
            excess: sample.usage.saturating_sub(threshold),
            growth_bytes_per_s: to_bytes(self.growth),
            eviction_bytes_per_s: to_bytes(self.eviction),
            change: self.change,
            class: self.class(sample, settings),
        }
    }

    /// Returns the class of the tenant's flows (Algorithm 1).
    fn class(&self, sample: &TenantSample, settings: &Settings) -> FlowClass {
        let remaining = to_f64(sample.limit.saturating_sub(sample.usage).get());
        match &settings.exhaustion_limits {
            _ if sample.is_blocked => FlowClass::URGENT,
            Some(_) if self.growth <= 0.0 => FlowClass::LEAST_URGENT,
            Some(limits) => FlowClass::by_time_to_exhaustion(remaining / self.growth, limits),
            None => FlowClass::by_remaining_memory(remaining / to_f64(sample.limit.get().max(1))),
        }
    }
}

/// Returns a rate in bytes per second. `time` is more than 0.
fn rate(bytes: Bytes, time: Ns) -> f64 {
    to_f64(bytes.get()) / time.as_duration().as_secs_f64()
}

/// Rounds down to whole bytes. Numbers out of range saturate.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the conversion saturates")]
fn to_bytes(number: f64) -> Bytes {
    Bytes::new(number as u64)
}
