//! Tests of the detection of thrashing: the table of promoted pages, and the thrash level.

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use units::limits::TIERING_TENANTS_MAX;

use super::*;

const A: TenantId = TenantId(1);

/// Creates a table that samples each page.
fn table(entries: usize) -> ThrashTable {
    let residence_max = Ns::secs(30);
    let settings =
        ThrashTableSettings { entries, sample_shift: 0, residence_max, ..ThrashTableSettings::default() };
    ThrashTable::new(settings).unwrap()
}

#[test]
fn demotion_soon_after_promotion_is_thrashing_once() {
    let mut table = table(64);
    table.record_promotion(A, 7, Ns::secs(10));
    assert!(!table.record_demotion(A, 8, Ns::secs(11)));
    assert!(!table.record_demotion(TenantId(2), 7, Ns::secs(11)));
    assert!(table.record_demotion(A, 7, Ns::secs(39)));
    assert!(!table.record_demotion(A, 7, Ns::secs(39)));
    table.record_promotion(A, 7, Ns::secs(50));
    assert!(!table.record_demotion(A, 7, Ns::secs(80)), "30 s is the limit");
    table.record_promotion(A, 7, Ns::secs(90));
    assert!(!table.record_demotion(A, 7, Ns::secs(89)), "the clock ran backwards");
    assert_eq!(table.counts(A), ThrashCounts { promotions: 3, thrashed: 1 });
}

#[test]
fn full_table_replaces_the_oldest_entry() {
    let mut table = table(8);
    (0..9).for_each(|page| table.record_promotion(A, page, Ns::secs(page)));
    table.record_promotion(A, 1, Ns::secs(9));
    assert!(!table.record_demotion(A, 0, Ns::secs(10)));
    assert!((1..9).all(|page| table.record_demotion(A, page, Ns::secs(10))));
}

#[test]
fn table_ignores_excess_tenants_and_forgets_vanished_ones() {
    let mut table = table(64);
    let count = u32::try_from(TIERING_TENANTS_MAX).unwrap();
    (0..=count).for_each(|id| table.record_promotion(TenantId(id), 0, Ns::ZERO));
    assert_eq!(table.counts(TenantId(count - 1)).promotions, 1);
    assert_eq!(table.counts(TenantId(count)), ThrashCounts::default());
    let mut policy = Policy::new(Settings::default()).unwrap();
    table.apply(policy.step(&host(Ns::secs(1), gb(100), gb(10)), &[tenant(1, gb(1), gb(0))]));
    assert_eq!(table.counts(A).promotions, 1);
    assert_eq!(table.counts(TenantId(2)), ThrashCounts::default());
}

#[test]
fn longest_residence_grows_with_local_memory() {
    let mut table = table(64);
    let mut policy = Policy::new(Settings::default()).unwrap();
    let mut residence = |usage| {
        table.apply(policy.step(&host(Ns::secs(1), gb(9), gb(10)), &[tenant(1, usage, gb(0))]));
        table.residence_max(A)
    };
    assert_eq!(residence(Bytes::gib(4)), Ns::secs(30));
    assert_eq!(residence(Bytes::gib(100)), Ns::secs(400), "256 MiB/s replace 100 GiB in 400 s");
    assert_eq!(residence(Bytes::new(u64::MAX)), units::limits::THRASH_RESIDENCE_MAX);
}

#[test]
fn one_in_256_pages_is_sampled() {
    let mut table = ThrashTable::new(ThrashTableSettings::default()).unwrap();
    (0..256_000).for_each(|page| table.record_promotion(A, page * 4096, Ns::ZERO));
    let promotions = table.counts(A).promotions;
    assert!((900..1100).contains(&promotions), "{promotions} pages");
    let thrashed = (0..256_000).filter(|page| table.record_demotion(A, page * 4096, Ns::ZERO)).count();
    assert_eq!(thrashed as u64, promotions);
}

/// Steps a policy and a table with a tenant that promotes and demotes `pages` pages per second.
struct Thrasher {
    policy: Policy,
    table: ThrashTable,
    sample: TenantSample,
    at: u64,
}

impl Thrasher {
    fn new() -> Self {
        let mut sample = tenant(A.0, gb(10), gb(0));
        sample.tiers[1].usage = gb(90);
        let policy = Policy::new(Settings::default()).unwrap();
        Self { policy, table: table(1024), sample, at: 0 }
    }

    /// Runs for one period, and returns the thrash level.
    fn run_period(&mut self, pages: u64, residence: Ns) -> u8 {
        for _ in 0..5 {
            self.at += 1;
            for page in 0..pages {
                self.table.record_promotion(A, page, Ns::secs(self.at));
                self.table.record_demotion(A, page, Ns::secs(self.at).after(residence));
            }
            let ThrashCounts { promotions, thrashed } = self.table.counts(A);
            let counters = &mut self.sample.counters;
            (counters.sampled_promotions, counters.sampled_thrashed) = (promotions, thrashed);
            counters.promoted = Bytes::new(promotions * (16 << 20));
            let host = host(Ns::secs(self.at), gb(100), gb(10));
            self.table.apply(self.policy.step(&host, &[self.sample]));
        }
        self.policy.decision().tenants()[0].thrash_level
    }

    fn budget(&self) -> Option<u64> {
        self.policy.decision().tenants()[0].budget.bytes_per_s.map(Bytes::get)
    }
}

#[test]
fn thrashing_tenant_is_halved_each_period_and_doubled_on_recovery() {
    let mut thrasher = Thrasher::new();
    let levels: Vec<u8> = (0..10).map(|_| thrasher.run_period(64, Ns::secs(1))).collect();
    // The first period starts at 1 s, with the first sample.
    assert_eq!(levels, [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]);
    // 64 pages of 16 MiB per second, halved eight times.
    assert_eq!(thrasher.budget(), Some((64 << 24) >> 8));
    let levels: Vec<u8> = (0..9).map(|_| thrasher.run_period(0, Ns::secs(1))).collect();
    assert_eq!(levels, [8, 7, 6, 5, 4, 3, 2, 1, 0]);
    assert_eq!(thrasher.budget(), None);
}

#[test]
fn residence_limit_doubles_with_the_thrash_level() {
    let mut thrasher = Thrasher::new();
    assert_eq!([0, 1].map(|_| thrasher.run_period(64, Ns::secs(1))), [0, 1]);
    thrasher.table.record_promotion(A, 999, Ns::secs(0));
    assert!(thrasher.table.record_demotion(A, 999, Ns::secs(59)));
}

#[test]
fn recovery_is_delayed_each_time_that_thrashing_returns() {
    let mut thrasher = Thrasher::new();
    thrasher.run_period(0, Ns::secs(1));
    let mut recoveries = Vec::new();
    for _ in 0..5 {
        assert_eq!(thrasher.run_period(64, Ns::secs(1)), 1);
        recoveries.push((1..100).find(|_| thrasher.run_period(0, Ns::secs(1)) == 0).unwrap());
    }
    // The level rises once more, and then falls twice after 1, 4, 16 and 64 calm periods.
    assert_eq!(recoveries, [3, 6, 18, 66, 66]);
    (0..256).for_each(|_| {
        thrasher.run_period(0, Ns::secs(1));
    });
    assert_eq!(thrasher.run_period(64, Ns::secs(1)), 1);
    let levels = [0; 3].map(|pages| thrasher.run_period(pages, Ns::secs(1)));
    assert_eq!(levels, [2, 1, 0], "earlier thrashing is forgotten");
}

#[test]
fn few_thrashed_pages_or_a_small_ratio_are_not_thrashing() {
    let mut thrasher = Thrasher::new();
    assert!((0..5).all(|_| thrasher.run_period(1, Ns::secs(1)) == 0), "5 pages per period");
    let mut calm = Thrasher::new();
    for page in 10_000..20_000 {
        // Most promoted pages stay.
        if page % 100 == 0 {
            assert_eq!(calm.run_period(2, Ns::secs(1)), 0);
        }
        calm.table.record_promotion(A, page, Ns::secs(calm.at));
    }
}

#[test]
fn changing_working_set_is_not_throttled() {
    let mut thrasher = Thrasher::new();
    thrasher.sample.counters.active = Some(gb(20));
    for period in 0..6 {
        thrasher.sample.counters.active = Some(gb(if period % 2 == 0 { 20 } else { 60 }));
        assert_eq!(thrasher.run_period(64, Ns::secs(1)), 0);
    }
    assert_eq!(thrasher.policy.decision().tenants()[0].thrash, ThrashState::Transition);
    // A fork or an exit changes the usage.
    let mut freeing = Thrasher::new();
    for period in 0..6 {
        freeing.sample.tiers[1].usage = gb(if period % 2 == 0 { 90 } else { 20 });
        assert_eq!(freeing.run_period(64, Ns::secs(1)), 0);
    }
}

#[test]
fn restarted_counters_reset_the_thrash_level() {
    let mut thrasher = Thrasher::new();
    (0..5).for_each(|_| {
        thrasher.run_period(64, Ns::secs(1));
    });
    thrasher.table = table(1024);
    thrasher.sample.counters = Counters::default();
    assert_eq!(thrasher.run_period(0, Ns::secs(1)), 0);
    assert_eq!(thrasher.budget(), None);
}

#[test]
fn clock_that_runs_backwards_restarts_the_period() {
    let mut thrasher = Thrasher::new();
    assert_eq!([0, 1].map(|_| thrasher.run_period(64, Ns::secs(1))), [0, 1]);
    thrasher.at = 0;
    assert_eq!([0, 1].map(|_| thrasher.run_period(64, Ns::secs(1))), [1, 2]);
}

#[test]
fn tenants_that_do_not_thrash_are_never_thrash_throttled() {
    let mut rng = Pcg64Mcg::seed_from_u64(1);
    let mut policy = Policy::new(Settings::default()).unwrap();
    let mut table = table(1 << 14);
    let mut tenants: Vec<TenantSample> = (0..10_000)
        .map(|id| {
            let mut tenant =
                tenant(id, Bytes::new(rng.random_range(0..GB)), Bytes::new(rng.random_range(0..GB)));
            tenant.tiers[1].usage = Bytes::new(rng.random_range(0..GB));
            tenant
        })
        .collect();
    for at in 0..40 {
        for tenant in &mut tenants {
            // The pages that are promoted and demoted are different ones, or the residence is long.
            let page = rng.random_range(0..1_000_000);
            let moved = rng.random_range(0..20);
            (0..moved).for_each(|n| table.record_promotion(tenant.id, page + n, Ns::secs(100 * at)));
            (0..moved).for_each(|n| {
                assert!(!table.record_demotion(tenant.id, page + n, Ns::secs(100 * at + 31)));
            });
            let counts = table.counts(tenant.id);
            tenant.counters.promoted = Bytes::new(counts.promotions * 4096);
            tenant.counters.sampled_promotions = counts.promotions;
            tenant.counters.sampled_thrashed = counts.thrashed;
        }
        table.apply(policy.step(&host(Ns::secs(100 * at), gb(0), gb(64)), &tenants));
        assert!(policy.decision().tenants().iter().all(|report| report.thrash_level == 0));
    }
}
