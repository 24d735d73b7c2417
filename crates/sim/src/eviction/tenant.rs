//! Fluid model of a tenant whose memory is evicted at a limited rate.

use tiering::{
    evict::{Counters, FlowClass, Policy, Settings, SettingsError, TenantSample},
    fair::TenantId,
};
use units::{Bytes, Ns};

/// Duration of a step of a tenant without a cluster.
const STEP: Ns = Ns::ms(5);
/// Largest number of steps, so that a tenant that makes almost no progress ends.
const STEPS_MAX: u64 = 10_000_000;

/// Workload of a tenant, and the resources of its host.
#[derive(Clone, Copy, Debug)]
pub struct TenantSpec {
    /// Memory that the tenant touches until it is done, in bytes.
    pub working_set: f64,
    /// Mean rate at which the tenant touches new memory if it never waits (V_app), in bytes per second.
    pub growth_per_s: f64,
    /// If more than 0, the tenant touches new memory at twice this rate for this time, and none for the same
    /// time, in seconds.
    pub burst_s: f64,
    /// Accesses to memory that was touched before, per access to new memory.
    pub accesses_again: f64,
    /// Time for which the tenant waits while memory is fetched, in seconds per byte.
    pub fetch_s_per_byte: f64,
    /// Largest local memory, in bytes.
    pub limit: f64,
    /// Largest eviction rate (V_evict), in bytes per second.
    pub eviction_per_s: f64,
}

/// Result of a simulated tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Time until the tenant has touched its working set, in seconds.
    pub completion_s: f64,
    /// Time in which the tenant waited for evictions, in seconds.
    pub blocked_s: f64,
    /// Time in which the tenant waited for fetched memory, in seconds.
    pub fetching_s: f64,
    /// Memory that was evicted while the tenant waited (urgent eviction flows), in bytes.
    pub urgent_bytes: f64,
    /// Memory that was fetched, in bytes.
    pub fetched_bytes: f64,
}

/// Tenant of a host, in a simulation.
#[derive(Clone, Debug)]
pub struct Tenant {
    spec: TenantSpec,
    threshold: f64,
    is_adaptive: bool,
    policy: Policy,
    now: Ns,
    usage: f64,
    touched: f64,
    is_blocked: bool,
    totals: Totals,
    outcome: Outcome,
}

/// Counters of the tenant.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    grown: f64,
    touched: f64,
    evicted: f64,
    evicting_s: f64,
    accessed: f64,
}

impl Tenant {
    /// Creates a tenant with an adaptive threshold, or with the fixed threshold of Fastswap: the limit
    /// without the reserve of `settings`.
    ///
    /// # Errors
    /// [`SettingsError`] if a setting violates its rule.
    pub fn new(spec: TenantSpec, settings: &Settings, is_adaptive: bool) -> Result<Self, SettingsError> {
        let threshold = to_f64(settings.upper_threshold(to_bytes(spec.limit)).get());
        let policy = Policy::new(*settings)?;
        let (usage, touched, now, is_blocked) = (0.0, 0.0, Ns::ZERO, false);
        let (totals, outcome) = (Totals::default(), Outcome::default());
        Ok(Self { spec, threshold, is_adaptive, policy, now, usage, touched, is_blocked, totals, outcome })
    }

    /// Runs the tenant until it has touched its working set.
    pub fn run(mut self) -> Outcome {
        for _ in 0..STEPS_MAX {
            self.decide();
            self.advance(self.desired_eviction_per_s(), STEP);
            if self.is_done() {
                break;
            }
        }
        self.outcome.completion_s = self.now.as_duration().as_secs_f64();
        self.outcome
    }

    /// Returns whether the tenant has touched its working set.
    pub(super) fn is_done(&self) -> bool {
        self.touched >= self.spec.working_set
    }

    /// Frees all memory, and starts the tenant again. Its counters continue.
    pub(super) fn restart(&mut self) {
        (self.usage, self.touched) = (0.0, 0.0);
    }

    /// Returns the results until now, without `completion_s`.
    pub(super) fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Returns the memory that the tenant has touched since its creation, in bytes.
    pub(super) fn progress(&self) -> f64 {
        self.totals.touched
    }

    /// Returns whether the tenant waited for an eviction in the last step.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Returns the rate at which the tenant evicts memory if the network does not limit it, in bytes per
    /// second.
    pub(super) fn desired_eviction_per_s(&self) -> f64 {
        if self.usage > self.threshold { self.spec.eviction_per_s } else { 0.0 }
    }

    /// Simulates a step of this duration, in which memory is evicted at this rate, in bytes per second.
    pub(super) fn advance(&mut self, eviction_per_s: f64, step: Ns) {
        let TenantSpec { accesses_again, fetch_s_per_byte, limit, .. } = self.spec;
        let seconds = step.as_duration().as_secs_f64();
        let evicted = eviction_per_s * seconds;
        let miss_ratio = if self.touched > 0.0 { (1.0 - self.usage / self.touched).max(0.0) } else { 0.0 };
        // Fetched memory, and time, per byte of new memory.
        let fetched_per_byte = accesses_again * miss_ratio;
        let s_per_byte = self.growth_per_s().recip() + fetched_per_byte * fetch_s_per_byte;
        let desired = seconds / s_per_byte;
        let room = limit - self.usage + evicted;
        let possible = room / (1.0 + fetched_per_byte);
        let added = desired.min(possible);
        let (grown, fetched) = (added * (1.0 + fetched_per_byte), added * fetched_per_byte);
        self.totals.evicting_s += if self.usage > self.threshold { seconds } else { 0.0 };
        self.usage += grown - evicted;
        self.touched += added;
        self.now = self.now.after(step);
        self.totals.grown += grown;
        self.totals.touched += added;
        self.totals.evicted += evicted;
        self.totals.accessed += added * (1.0 + accesses_again);
        self.outcome.fetched_bytes += fetched;
        self.outcome.fetching_s += fetched * fetch_s_per_byte;
        self.is_blocked = possible < desired;
        if self.is_blocked {
            self.outcome.blocked_s += seconds * (1.0 - added / desired);
            self.outcome.urgent_bytes += evicted;
        }
    }

    /// Returns the current rate at which the tenant touches new memory if it never waits.
    fn growth_per_s(&self) -> f64 {
        let TenantSpec { growth_per_s, burst_s, .. } = self.spec;
        if burst_s == 0.0 {
            return growth_per_s;
        }
        let phase = self.now.as_duration().as_secs_f64() % (2.0 * burst_s);
        if phase < burst_s { 2.0 * growth_per_s } else { 0.0 }
    }

    /// Adapts the threshold, and returns the class of the tenant's flows.
    pub(super) fn decide(&mut self) -> FlowClass {
        let sample = self.sample();
        let [report] = *self.policy.step(self.now, &[sample]) else { unreachable!("there is one sample") };
        if self.is_adaptive {
            self.threshold = to_f64(report.threshold.get());
        }
        report.class
    }

    fn sample(&self) -> TenantSample {
        let (totals, outcome) = (self.totals, self.outcome);
        TenantSample {
            id: TenantId(0),
            limit: to_bytes(self.spec.limit),
            usage: to_bytes(self.usage),
            is_blocked: self.is_blocked,
            counters: Counters {
                grown: to_bytes(totals.grown),
                evicted: to_bytes(totals.evicted),
                evicting: to_ns(totals.evicting_s),
                blocked: to_ns(outcome.blocked_s),
                fetching: to_ns(outcome.fetching_s),
                misses: to_bytes(outcome.fetched_bytes).get(),
                accesses: to_bytes(totals.accessed).get(),
            },
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "simulated sizes are below 2^53")]
fn to_f64(number: u64) -> f64 {
    number as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "sizes are not negative")]
fn to_bytes(size: f64) -> Bytes {
    Bytes::new(size.round() as u64)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are not negative")]
fn to_ns(seconds: f64) -> Ns {
    Ns((seconds * 1e9).round() as u64)
}
