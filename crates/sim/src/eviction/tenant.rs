//! Fluid model of a tenant whose memory is evicted at a limited rate.

use tiering::{
    evict::{Counters, Policy, Settings, SettingsError, TenantSample},
    fair::TenantId,
};
use units::{Bytes, Ns};

/// Duration of a step of the simulation.
const STEP: Ns = Ns::ms(5);
/// Largest number of steps, so that a tenant that makes almost no progress ends.
const STEPS_MAX: u64 = 10_000_000;

/// Workload of a tenant, and the resources of its host.
#[derive(Clone, Copy, Debug)]
pub struct TenantSpec {
    /// Memory that the tenant touches until it is done, in bytes.
    pub working_set: f64,
    /// Rate at which the tenant touches new memory if it never waits (V_app), in bytes per second.
    pub growth_per_s: f64,
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
    policy: Option<Policy>,
    now: Ns,
    usage: f64,
    touched: f64,
    totals: Totals,
    outcome: Outcome,
}

/// Counters of the tenant.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    grown: f64,
    evicted: f64,
    evicting_s: f64,
    accessed: f64,
}

impl Tenant {
    /// Creates a tenant with the fixed threshold of Fastswap: the limit without the reserve of `settings`.
    pub fn with_fixed_threshold(spec: TenantSpec, settings: &Settings) -> Self {
        let threshold = spec.limit - to_f64(settings.reserve.get());
        let (usage, touched, now) = (0.0, 0.0, Ns::ZERO);
        let (totals, outcome) = (Totals::default(), Outcome::default());
        Self { spec, threshold, policy: None, now, usage, touched, totals, outcome }
    }

    /// Creates a tenant with an adaptive threshold.
    ///
    /// # Errors
    /// [`SettingsError`] if a setting violates its rule.
    pub fn with_adaptive_threshold(spec: TenantSpec, settings: &Settings) -> Result<Self, SettingsError> {
        let policy = Some(Policy::new(*settings)?);
        Ok(Self { policy, ..Self::with_fixed_threshold(spec, settings) })
    }

    /// Runs the tenant until it has touched its working set.
    pub fn run(mut self) -> Outcome {
        for _ in 0..STEPS_MAX {
            self.adapt_threshold();
            self.step();
            if self.touched >= self.spec.working_set {
                break;
            }
        }
        self.outcome.completion_s = self.now.as_duration().as_secs_f64();
        self.outcome
    }

    fn step(&mut self) {
        let TenantSpec { growth_per_s, accesses_again, fetch_s_per_byte, limit, eviction_per_s, .. } =
            self.spec;
        let seconds = STEP.as_duration().as_secs_f64();
        let evicted = if self.usage > self.threshold { eviction_per_s * seconds } else { 0.0 };
        let miss_ratio = if self.touched > 0.0 { (1.0 - self.usage / self.touched).max(0.0) } else { 0.0 };
        // Fetched memory, and time, per byte of new memory.
        let fetched_per_byte = accesses_again * miss_ratio;
        let s_per_byte = 1.0 / growth_per_s + fetched_per_byte * fetch_s_per_byte;
        let desired = seconds / s_per_byte;
        let room = limit - self.usage + evicted;
        let possible = room / (1.0 + fetched_per_byte);
        let added = desired.min(possible);
        let (grown, fetched) = (added * (1.0 + fetched_per_byte), added * fetched_per_byte);
        self.usage += grown - evicted;
        self.touched += added;
        self.now = self.now.after(STEP);
        self.totals.grown += grown;
        self.totals.evicted += evicted;
        self.totals.evicting_s += evicted / eviction_per_s;
        self.totals.accessed += added * (1.0 + accesses_again);
        self.outcome.fetched_bytes += fetched;
        self.outcome.fetching_s += fetched * fetch_s_per_byte;
        self.outcome.blocked_s += seconds * (1.0 - added / desired);
        if possible < desired {
            self.outcome.urgent_bytes += evicted;
        }
    }

    fn adapt_threshold(&mut self) {
        let sample = self.sample();
        if let Some(policy) = &mut self.policy
            && let [report] = policy.step(self.now, &[sample])
        {
            self.threshold = to_f64(report.threshold.get());
        }
    }

    fn sample(&self) -> TenantSample {
        let (totals, outcome) = (self.totals, self.outcome);
        TenantSample {
            id: TenantId(0),
            limit: to_bytes(self.spec.limit),
            usage: to_bytes(self.usage),
            is_blocked: self.usage >= self.spec.limit,
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
