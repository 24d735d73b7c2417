//! Tests of early eviction: published vectors, the cycle of a threshold, and properties for any input.

use proptest::{collection::vec, prelude::*};
use units::{Bytes, Fraction, Ns};

use super::*;
use crate::fair::TenantId;

const MB: u64 = 1_000_000;

/// Returns the threshold after a cycle.
fn updated(form: PullBack, current: f64, alpha: f64, beta: f64, lower: f64) -> f64 {
    pulled_back_threshold(form, current, lowered_threshold(current, alpha, lower), beta)
}

#[test]
fn thresholds_equal_published_vectors() {
    for (current, alpha, beta, lower, arithmetic, harmonic) in [
        (100.0, 2.0, 1.0, 10.0, 50.0, 50.0),
        (100.0, 2.0, 1.25, 10.0, 60.0, 55.5556),
        (100.0, 2.0, 2.0, 10.0, 75.0, 66.6667),
        (100.0, 2.0, 10.0, 10.0, 95.0, 90.9091),
        (100.0, 4.0, 2.0, 10.0, 62.5, 40.0),
        (100.0, 1.5, 2.0, 10.0, 83.3333, 80.0),
        // Eq. 4 as a product of the threshold and α would be 350.
        (100.0, 10.0, 3.0, 50.0, 83.3333, 75.0),
    ] {
        for (form, expected) in [(PullBack::Arithmetic, arithmetic), (PullBack::Harmonic, harmonic)] {
            let threshold = updated(form, current, alpha, beta, lower);
            assert!((threshold - expected).abs() < 1e-4, "{form:?} {alpha} {beta}: {threshold}");
        }
    }
}

#[test]
fn reserve_is_at_most_an_eighth_of_the_limit() {
    let settings = Settings::default();
    let upper = [0, 8, 64, 80].map(|mib| settings.upper_threshold(Bytes::mib(mib)));
    assert_eq!(upper, [0, 7, 56, 72].map(Bytes::mib));
    assert_eq!(settings.lower_threshold(Bytes::mib(8)), Bytes::mib(4));
}

#[test]
fn pulled_back_threshold_is_the_previous_one_for_infinite_beta() {
    for form in [PullBack::Arithmetic, PullBack::Harmonic] {
        assert_eq!(updated(form, 100.0, 2.0, f64::INFINITY, 10.0), 100.0);
    }
}

#[test]
fn classes_by_remaining_memory_equal_published_vectors() {
    for (ratio, class, queue) in [
        (0.0, 2, 6),
        (0.05, 2, 6),
        (0.10, 2, 6),
        (0.1001, 3, 5),
        (0.20, 3, 5),
        (0.25, 4, 4),
        (0.50, 6, 2),
        (0.55, 7, 1),
        (0.90, 7, 1),
    ] {
        let found = FlowClass::by_remaining_memory(ratio);
        assert_eq!((found.number(), found.queue()), (class, queue), "{ratio}");
    }
    assert_eq!((FlowClass::URGENT.number(), FlowClass::URGENT.queue()), (1, 7));
}

#[test]
fn classes_by_time_equal_published_vectors() {
    let limits = [78.0, 213.0, 400.0, 600.0, 900.0];
    for (seconds, class) in
        [(0.0, 2), (77.9, 2), (78.0, 3), (212.9, 3), (213.0, 4), (900.0, 7), (f64::INFINITY, 7)]
    {
        let found = FlowClass::by_time_to_exhaustion(seconds, &limits);
        assert_eq!(found.number(), class, "{seconds} s");
    }
}

/// Tenant with a limit of 1 GB whose counters grow at fixed rates.
struct TestTenant {
    policy: Policy,
    sample: TenantSample,
    at: Ns,
}

/// Activity of a tenant in a cycle of one second.
#[derive(Clone, Copy, Debug, Default)]
struct Cycle {
    grown_mb: u64,
    evicted_mb: u64,
    blocked_ms: u64,
    misses: u64,
    fetching_ms: u64,
}

impl TestTenant {
    fn new(change: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = Settings { cycle: Ns::secs(1), reserve: Bytes::ZERO, ..Settings::default() };
        settings.lower = Fraction::new(0.2).unwrap();
        change(&mut settings);
        let limit = Bytes::new(1000 * MB);
        let sample = TenantSample { id: TenantId(1), limit, ..TenantSample::default() };
        let mut tenant = Self { policy: Policy::new(settings).unwrap(), sample, at: Ns::ZERO };
        tenant.policy.step(Ns::ZERO, &[sample]);
        tenant
    }

    /// Returns the threshold, in MB, and its change.
    fn run(&mut self, cycle: Cycle) -> (u64, ThresholdChange) {
        self.at = self.at.after(Ns::secs(1));
        let counters = &mut self.sample.counters;
        counters.grown = Bytes::new(counters.grown.get() + cycle.grown_mb * MB);
        counters.evicted = Bytes::new(counters.evicted.get() + cycle.evicted_mb * MB);
        counters.evicting = counters.evicting.after(Ns::secs(u64::from(cycle.evicted_mb > 0)));
        counters.blocked = counters.blocked.after(Ns::ms(cycle.blocked_ms));
        counters.fetching = counters.fetching.after(Ns::ms(cycle.fetching_ms));
        (counters.misses, counters.accesses) = (counters.misses + cycle.misses, counters.accesses + 1000);
        let report = self.policy.step(self.at, &[self.sample])[0];
        (report.threshold.get() / MB, report.change)
    }
}

const FAST_GROWTH: Cycle = Cycle { grown_mb: 200, evicted_mb: 100, blocked_ms: 0, misses: 0, fetching_ms: 0 };
const SLOW_GROWTH: Cycle = Cycle { grown_mb: 50, ..FAST_GROWTH };

#[test]
fn threshold_is_lowered_to_its_minimum_and_returns() {
    use ThresholdChange::{Lowered, Reset, Unchanged};
    let mut tenant = TestTenant::new(|_| {});
    assert_eq!(tenant.run(SLOW_GROWTH), (1000, Unchanged));
    let lowered: Vec<_> = (0..4).map(|_| tenant.run(FAST_GROWTH)).collect();
    assert_eq!(lowered, [(500, Lowered), (250, Lowered), (200, Lowered), (200, Lowered)]);
    let reset: Vec<_> = (0..4).map(|_| tenant.run(SLOW_GROWTH)).collect();
    assert_eq!(reset, [(400, Reset), (550, Reset), (662, Reset), (746, Reset)]);
    for _ in 0..60 {
        tenant.run(SLOW_GROWTH);
    }
    assert_eq!(tenant.run(SLOW_GROWTH), (1000, Unchanged));
}

#[test]
fn threshold_is_pulled_back_if_misses_increase() {
    use ThresholdChange::{Lowered, PulledBack};
    let mut tenant = TestTenant::new(|_| {});
    assert_eq!(tenant.run(Cycle { misses: 10, ..FAST_GROWTH }), (500, Lowered));
    assert_eq!(tenant.run(Cycle { misses: 20, ..FAST_GROWTH }), (375, PulledBack));
    assert_eq!(tenant.run(Cycle { misses: 20, ..FAST_GROWTH }), (200, Lowered));
    assert_eq!(tenant.run(Cycle { misses: 0, ..FAST_GROWTH }), (200, Lowered));
    assert_eq!(tenant.run(Cycle { misses: 5, ..FAST_GROWTH }), (200, PulledBack), "after a rate of 0");
}

#[test]
fn blocked_time_does_not_reduce_the_growth_rate() {
    let mut tenant = TestTenant::new(|_| {});
    // The tenant grows by 200 MB/s for half a second, and then waits for the eviction of 100 MB.
    let blocked = Cycle { grown_mb: 100, evicted_mb: 100, blocked_ms: 500, ..Cycle::default() };
    assert_eq!(tenant.run(blocked), (500, ThresholdChange::Lowered));
    let always = Cycle { blocked_ms: 1000, ..blocked };
    assert_eq!(tenant.run(always), (250, ThresholdChange::Lowered), "the last rate remains valid");
}

#[test]
fn rates_before_and_without_eviction_are_known() {
    let mut tenant = TestTenant::new(|_| {});
    let before = Cycle { grown_mb: 287 * 2, ..Cycle::default() };
    assert_eq!(tenant.run(before), (500, ThresholdChange::Lowered), "twice the nominal eviction rate");
    let mut idle = TestTenant::new(|_| {});
    assert_eq!(idle.run(Cycle::default()), (1000, ThresholdChange::Unchanged));
}

#[test]
fn stalled_device_leads_to_the_fixed_threshold() {
    let mut tenant = TestTenant::new(|_| {});
    tenant.run(FAST_GROWTH);
    tenant.sample.counters.evicting = tenant.sample.counters.evicting.after(Ns::secs(1));
    assert_eq!(tenant.run(Cycle { grown_mb: 200, ..Cycle::default() }), (1000, ThresholdChange::Stalled));
    assert_eq!(tenant.run(FAST_GROWTH), (500, ThresholdChange::Lowered));
}

#[test]
fn costly_early_eviction_leads_to_the_fixed_threshold_for_a_while() {
    use ThresholdChange::{Costly, Lowered};
    let mut tenant = TestTenant::new(|_| {});
    assert_eq!(tenant.run(FAST_GROWTH), (500, Lowered));
    // 100 MB that are evicted early save half a second, of which the tenant may lose 0.5 % of a cycle: 5 ms.
    // Half of the evicted memory was evicted early: 4 ms are lost. After the next cycle, it is 67 %: 13 ms.
    assert_eq!(tenant.run(Cycle { fetching_ms: 8, ..FAST_GROWTH }), (250, Lowered));
    assert_eq!(tenant.run(Cycle { fetching_ms: 20, ..FAST_GROWTH }), (1000, Costly));
    let without_eviction = Cycle { evicted_mb: 0, ..FAST_GROWTH };
    assert_eq!(tenant.run(without_eviction), (1000, Costly), "7 ms more than allowed");
    assert_eq!(tenant.run(without_eviction), (500, Lowered));

    let mut tenant = TestTenant::new(|settings| settings.loss_limit = None);
    assert_eq!(tenant.run(FAST_GROWTH), (500, Lowered));
    assert_eq!(tenant.run(Cycle { fetching_ms: 900, ..FAST_GROWTH }), (250, Lowered));
}

#[test]
fn large_loss_suspends_early_eviction_for_a_limited_time() {
    let mut tenant = TestTenant::new(|_| {});
    tenant.run(FAST_GROWTH);
    for _ in 0..10 {
        tenant.run(Cycle { fetching_ms: 1000, ..FAST_GROWTH });
    }
    // At most 250 ms are remembered, of which each second makes up for 5 ms.
    let suspended =
        (0..60).take_while(|_| tenant.run(FAST_GROWTH) == (1000, ThresholdChange::Costly)).count();
    assert_eq!(suspended, 49);
}

#[test]
fn fetches_of_memory_that_was_not_evicted_early_are_no_loss() {
    let costly_fetch = Cycle { fetching_ms: 900, ..FAST_GROWTH };
    let mut at_its_limit = TestTenant::new(|_| {});
    at_its_limit.sample.usage = Bytes::new(1000 * MB);
    assert_eq!(at_its_limit.run(costly_fetch), (500, ThresholdChange::Lowered));
    assert_eq!(at_its_limit.run(costly_fetch), (250, ThresholdChange::Lowered));

    // With the largest threshold, nothing is evicted early, although the usage is below it.
    let mut with_fixed_threshold = TestTenant::new(|settings| settings.lower = Fraction::new(1.0).unwrap());
    for _ in 0..3 {
        assert_eq!(with_fixed_threshold.run(costly_fetch), (1000, ThresholdChange::Unchanged));
    }
}

#[test]
fn eviction_rate_is_measured_over_a_part_of_a_cycle_at_least() {
    let mut tenant = TestTenant::new(|_| {});
    let mut evicts = |evicted_mb, evicting_ms| {
        tenant.at = tenant.at.after(Ns::secs(1));
        let counters = &mut tenant.sample.counters;
        counters.evicted = Bytes::new(counters.evicted.get() + evicted_mb * MB);
        counters.evicting = counters.evicting.after(Ns::ms(evicting_ms));
        tenant.policy.step(tenant.at, &[tenant.sample])[0].eviction_bytes_per_s.get() / MB
    };
    assert_eq!(evicts(1, 50), 287, "too short");
    assert_eq!(evicts(9, 50), 100, "10 MB in 100 ms");
    assert_eq!(evicts(100, 40), 100, "too short again");
    assert_eq!(evicts(0, 160), 500);
}

#[test]
fn restarted_counters_and_vanished_tenants_restart_the_measurement() {
    let mut tenant = TestTenant::new(|_| {});
    tenant.run(FAST_GROWTH);
    tenant.sample.counters = Counters::default();
    let report = tenant.policy.step(Ns::secs(2), &[tenant.sample])[0];
    assert_eq!((report.threshold, report.growth_bytes_per_s), (Bytes::new(1000 * MB), Bytes::ZERO));
    tenant.run(FAST_GROWTH);
    assert!(tenant.policy.step(Ns::secs(4), &[]).is_empty());
    assert_eq!(tenant.policy.step(Ns::secs(5), &[tenant.sample])[0].threshold, Bytes::new(1000 * MB));
}

#[test]
fn limit_change_keeps_the_ratio_of_the_threshold() {
    let mut tenant = TestTenant::new(|_| {});
    tenant.run(FAST_GROWTH);
    for (limit, threshold) in [(400, 200), (2000, 1000), (1000, 500)] {
        tenant.sample.limit = Bytes::new(limit * MB);
        let report = tenant.policy.step(tenant.at, &[tenant.sample])[0];
        assert_eq!(report.threshold, Bytes::new(threshold * MB), "limit of {limit} MB");
    }
    tenant.sample.limit = Bytes::ZERO;
    let report = tenant.policy.step(tenant.at, &[tenant.sample])[0];
    assert_eq!((report.threshold, report.class.number()), (Bytes::ZERO, 2));
}

#[test]
fn class_follows_blocking_and_time_to_exhaustion() {
    let mut tenant = TestTenant::new(|settings| settings.exhaustion_limits = Some([1.0, 2.0, 3.0, 4.0, 5.0]));
    tenant.sample.usage = Bytes::new(500 * MB);
    let class = |tenant: &mut TestTenant| tenant.policy.step(tenant.at, &[tenant.sample])[0].class.number();
    assert_eq!(class(&mut tenant), 7, "no growth");
    tenant.run(FAST_GROWTH);
    assert_eq!(class(&mut tenant), 4, "2.5 s until the limit");
    tenant.sample.is_blocked = true;
    assert_eq!(class(&mut tenant), 1);
}

#[test]
fn second_sample_of_a_tenant_is_ignored() {
    let mut policy = Policy::new(Settings::default()).unwrap();
    let sample = TenantSample { id: TenantId(7), limit: Bytes::gib(1), ..TenantSample::default() };
    assert_eq!(policy.step(Ns::ZERO, &[sample, sample]).len(), 1);
}

#[test]
fn invalid_settings_are_rejected_by_field() {
    let message = |change: fn(&mut Settings)| {
        let mut settings = Settings::default();
        change(&mut settings);
        Policy::new(settings).unwrap_err().to_string()
    };
    assert_eq!(
        message(|settings| settings.cycle = Ns::ZERO),
        "invalid setting cycle = 0 ns: must be from 1 ms to 60 s"
    );
    for (field, change) in [
        ("lower", (|settings| settings.lower = Fraction::new(0.0).unwrap()) as fn(&mut Settings)),
        ("nominal_eviction_bytes_per_s", |settings| settings.nominal_eviction_bytes_per_s = Bytes::ZERO),
        ("reset_cycles", |settings| settings.reset_cycles = 0),
        ("reset_cycles", |settings| settings.reset_cycles = 1001),
        ("exhaustion_limits", |settings| settings.exhaustion_limits = Some([2.0, 1.0, 3.0, 4.0, 5.0])),
        ("exhaustion_limits", |settings| settings.exhaustion_limits = Some([f64::NAN; 5])),
    ] {
        assert!(message(change).starts_with(&format!("invalid setting {field} = ")), "{}", message(change));
    }
}

/// Samples of one tenant: time since the last sample, limit, usage and increases of the counters.
fn any_samples() -> impl Strategy<Value = Vec<(u64, u64, u64, [u64; 7], bool)>> {
    let size = prop_oneof![Just(0), 0..1_u64 << 20, 0..1_u64 << 40, Just(u64::MAX / 64)];
    let time = prop_oneof![0..2_000_000_000_u64, Just(u64::MAX / 128)];
    vec((time, size.clone(), size.clone(), proptest::array::uniform7(size), any::<bool>()), 1..64)
}

proptest! {
    #[test]
    fn threshold_is_within_its_range_for_any_input(samples in any_samples(), reserve in 0..1_u64 << 30) {
        let settings = Settings { reserve: Bytes::new(reserve), ..Settings::default() };
        let mut policy = Policy::new(settings).unwrap();
        let (mut at, mut sum) = (0_u64, [0_u64; 7]);
        for (elapsed, limit, usage, added, is_blocked) in samples {
            at = at.saturating_add(elapsed);
            sum.iter_mut().zip(added).for_each(|(sum, added)| *sum = sum.saturating_add(added));
            let counters = Counters {
                grown: Bytes::new(sum[0]),
                evicted: Bytes::new(sum[1]),
                evicting: Ns(sum[2]),
                blocked: Ns(sum[3]),
                fetching: Ns(sum[4]),
                misses: sum[5],
                accesses: sum[6],
            };
            let limit = Bytes::new(limit);
            let sample = TenantSample { id: TenantId(0), limit, usage: Bytes::new(usage), is_blocked, counters };
            let report = policy.step(Ns(at), &[sample])[0];
            let tolerance = limit.get() >> 50; // rounding of large limits
            prop_assert!(report.threshold.get() + tolerance >= settings.lower_threshold(limit).get());
            prop_assert!(report.threshold.get() <= settings.upper_threshold(limit).get() + tolerance);
            prop_assert!((1..=CLASSES).contains(&report.class.number()));
            prop_assert_eq!(report.class == FlowClass::URGENT, is_blocked);
        }
    }

    #[test]
    fn threshold_converges_and_resets_for_any_rates(grown in 1_u64..3000, evicted in 1_u64..3000, lower_percent in 10_u32..90) {
        let mut tenant = TestTenant::new(|settings| settings.lower = Fraction::new(f64::from(lower_percent) / 100.0).unwrap());
        let cycle = Cycle { grown_mb: grown, evicted_mb: evicted, ..Cycle::default() };
        let thresholds: Vec<u64> = (0..10_000).map(|_| tenant.run(cycle).0).collect();
        let expected = if grown > evicted { u64::from(10 * lower_percent) } else { 1000 };
        prop_assert!(thresholds.last().unwrap().abs_diff(expected) <= 1, "{:?}", thresholds.last());
        prop_assert!(thresholds.is_sorted_by(|first, second| first >= second));
        for _ in 0..100 {
            tenant.run(SLOW_GROWTH);
        }
        prop_assert_eq!(tenant.run(SLOW_GROWTH), (1000, ThresholdChange::Unchanged));
    }

    #[test]
    fn classes_are_monotone(first in 0.0..1.0, second in 0.0..1.0) {
        let (less, more) = if first < second { (first, second) } else { (second, first) };
        prop_assert!(FlowClass::by_remaining_memory(less) <= FlowClass::by_remaining_memory(more));
        let limits = [0.1, 0.2, 0.5, 0.5, 0.9];
        prop_assert!(
            FlowClass::by_time_to_exhaustion(less, &limits) <= FlowClass::by_time_to_exhaustion(more, &limits)
        );
    }
}
