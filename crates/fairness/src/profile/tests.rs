//! Tests of fits, reuse distances and utilities with simulated tenants of known behavior.

use std::collections::BTreeMap;

use proptest::{collection::vec, prelude::*};
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::*;
use crate::market::{Bundle, Slowdown, Supply, Utility};

/// Number of pages of 4 KiB per MiB.
const PAGES_PER_MIB: f64 = 256.0;

/// Tenant that accesses pages with frequencies by Zipf's law.
struct Zipf {
    /// Cumulative access frequency by rank, not normalized.
    cumulated: Vec<f64>,
}

impl Zipf {
    fn new(skew: f64, pages: usize) -> Self {
        let mut sum = 0.0;
        let cumulated = (1..=pages).map(|rank| {
            sum += (rank as f64).powf(-skew);
            sum
        });
        Self { cumulated: cumulated.collect() }
    }

    fn pages(&self) -> usize {
        self.cumulated.len()
    }

    fn misses(&self, pages: usize) -> f64 {
        1.0 - self.cumulated[pages.min(self.pages()) - 1] / self.cumulated[self.pages() - 1]
    }

    /// Returns the page of a random access.
    fn random_page(&self, rng: &mut Pcg64Mcg) -> u64 {
        let at = rng.random_range(0.0..self.cumulated[self.pages() - 1]);
        self.cumulated.partition_point(|sum| *sum <= at) as u64
    }

    fn sample_histogram(&self, samples: usize, seed: u64) -> Histogram {
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        let mut counts: BTreeMap<u64, u32> = BTreeMap::new();
        (0..samples).for_each(|_| *counts.entry(self.random_page(&mut rng)).or_default() += 1);
        Histogram::new(counts.into_values())
    }

    fn measured(&self, local: usize) -> MeasuredMissRatio {
        MeasuredMissRatio {
            pages: self.pages() as f64,
            local: local as f64,
            misses: self.misses(local),
            pages_per_mib: PAGES_PER_MIB,
        }
    }
}

/// Returns the number of pages in `n` GiB.
const fn gib(n: usize) -> usize {
    n * 1024 * 256
}

fn assert_near(actual: f64, expected: f64, tolerance: f64, context: &str) {
    assert!((actual - expected).abs() <= tolerance, "{context}: {actual}, expected {expected}");
}

#[test]
fn fit_extrapolates_from_half_to_twice_the_memory() {
    // For comparison: with 1.5 times the memory, Spirit's fit has errors of 5 to 35 %.
    let vectors = [
        (0.9, gib(8), 4_000),
        (0.9, gib(8), 40_000),
        (1.2, gib(8), 40_000),
        (0.6, gib(15), 40_000),
        (0.0, gib(16), 40_000),
    ];
    for (skew, pages, samples) in vectors {
        let zipf = Zipf::new(skew, pages);
        let local = pages / 5;
        let law = fit(&zipf.sample_histogram(samples, 1), &zipf.measured(local)).unwrap();
        for memory in [local / 2, local, local * 3 / 2, local * 2] {
            let (estimate, truth) = (law.misses(memory as f64 / PAGES_PER_MIB), zipf.misses(memory));
            assert_near(
                estimate,
                truth,
                0.015 * truth,
                &format!("zipf {skew}, {samples} samples, {memory} pages"),
            );
        }
    }
}

#[test]
fn fit_separates_a_hot_set_from_a_uniform_scan() {
    // A tenth of the pages receives 80 % of the accesses. The other accesses are uniform, so that
    // the frequencies do not follow a power law.
    let (pages, hot) = (200_000_usize, 20_000_usize);
    let misses = |memory: usize| {
        let (in_hot, in_cold) =
            (memory.min(hot) as f64 / hot as f64, memory.saturating_sub(hot) as f64 / (pages - hot) as f64);
        1.0 - 0.8 * in_hot - 0.2 * in_cold
    };
    let mut rng = Pcg64Mcg::seed_from_u64(7);
    let mut counts: BTreeMap<usize, u32> = BTreeMap::new();
    for _ in 0..200_000 {
        let page = if rng.random_bool(0.8) { rng.random_range(0..hot) } else { rng.random_range(hot..pages) };
        *counts.entry(page).or_default() += 1;
    }
    let local = 40_000;
    let measured = MeasuredMissRatio {
        pages: pages as f64,
        local: local as f64,
        misses: misses(local),
        pages_per_mib: PAGES_PER_MIB,
    };
    let law = fit(&Histogram::new(counts.into_values()), &measured).unwrap();
    for memory in [30_000, 40_000, 60_000, 80_000, 160_000] {
        assert_near(
            law.misses(memory as f64 / PAGES_PER_MIB),
            misses(memory),
            0.06,
            &format!("{memory} pages"),
        );
    }
}

/// Performs the second phase of the fit as in the paper: gradient descent by finite differences
/// until the miss ratio matches, with at most ten thousand steps.
fn gradient_descent(mut law: PowerLaw, measured: &MeasuredMissRatio) -> PowerLaw {
    let squared_error =
        |law: &PowerLaw| (law.misses(measured.local / PAGES_PER_MIB) / measured.misses - 1.0).powi(2);
    for _ in 0..10_000 {
        let here = squared_error(&law);
        if here < 1e-10 {
            break;
        }
        let (steeper, higher) =
            (PowerLaw { slope: law.slope - 1e-6, ..law }, PowerLaw { floor: law.floor + 1e-9, ..law });
        law.slope += 0.01 * (squared_error(&steeper) - here) / 1e-6;
        law.floor = (law.floor - 1e-6 * (squared_error(&higher) - here) / 1e-9).max(0.0);
        law.slope = law.slope.clamp(-6.0, 0.0);
    }
    law
}

#[test]
fn second_phase_matches_the_papers_gradient_descent() {
    let zipf = Zipf::new(0.9, 50_000);
    let measured = zipf.measured(10_000);
    let law = fit(&zipf.sample_histogram(20_000, 3), &measured).unwrap();
    let by_descent = gradient_descent(PowerLaw { slope: law.slope + 0.1, floor: 0.0, ..law }, &measured);
    for memory in [5_000.0, 10_000.0, 20_000.0, 40_000.0] {
        let memory = memory / PAGES_PER_MIB;
        assert_near(law.misses(memory), by_descent.misses(memory), 0.02, "miss ratio");
    }
}

#[test]
fn fit_ignores_miss_ratio_at_zero_or_full_memory() {
    let zipf = Zipf::new(0.9, 50_000);
    let histogram = zipf.sample_histogram(20_000, 3);
    let middle = fit(&histogram, &zipf.measured(10_000)).unwrap();
    let measured =
        |local, misses| MeasuredMissRatio { pages: 50_000.0, local, misses, pages_per_mib: PAGES_PER_MIB };
    for (local, misses) in [(50_000.0, 0.0), (60_000.0, 0.0), (50_000.0, 0.1), (0.0, 1.0), (0.0, 0.5)] {
        let law = fit(&histogram, &measured(local, misses)).unwrap();
        let memory = 10_000.0 / PAGES_PER_MIB;
        assert_near(law.misses(memory), middle.misses(memory), 0.1, &format!("{local} pages, {misses}"));
    }
}

#[test]
fn invalid_samples_and_measurements_are_rejected() {
    let few = Histogram::new([0, 5, 3]);
    let measured = MeasuredMissRatio { pages: 100.0, local: 50.0, misses: 0.1, pages_per_mib: PAGES_PER_MIB };
    assert_eq!(
        fit(&few, &measured).unwrap_err().to_string(),
        "too few samples: 8 on 2 pages, must be at least 64 on 8 pages"
    );
    let enough = Histogram::new(vec![8; 100]);
    let error = |measured: MeasuredMissRatio| fit(&enough, &measured).unwrap_err().to_string();
    assert_eq!(
        error(MeasuredMissRatio { misses: f64::NAN, ..measured }),
        "miss ratio: NaN is out of range, must be 0 to 1"
    );
    assert_eq!(
        error(MeasuredMissRatio { misses: 1.5, ..measured }),
        "miss ratio: 1.5 is out of range, must be 0 to 1"
    );
    assert_eq!(
        error(MeasuredMissRatio { pages: -3.0, ..measured }),
        "number of pages: -3 is out of range, must be a finite number of at least 1"
    );
    assert_eq!(
        error(MeasuredMissRatio { local: f64::INFINITY, ..measured }),
        "number of local pages: inf is out of range, must be a finite number of at least 0"
    );
    assert_eq!(
        error(MeasuredMissRatio { pages_per_mib: 0.0, ..measured }),
        "pages per MiB: 0 is out of range, must be a finite number above 0"
    );
}

#[test]
fn bandwidth_demand_predicts_throughput_after_a_change() {
    // Columns: current miss ratio, bandwidth limit and used bandwidth; new miss ratio and bandwidth
    // limit; ratio of new to current throughput. γ is 100, and the link has 4 MB/s.
    let vectors = [
        (0.05, 1.0, 0.4, 0.05, 1.0, 1.0),
        (0.05, 1.0, 0.4, 0.02, 1.0, 2.0),
        (0.05, 1.0, 0.4, 0.05, 0.2, 0.545455),
        (0.05, 1.0, 0.4, 0.02, 0.2, 1.2),
        (0.05, 1.0, 1.0, 0.05, 2.0, 1.909091),
        (0.05, 1.0, 1.0, 0.05, 0.5, 0.512195),
        (0.05, 1.0, 1.0, 0.02, 0.5, 1.235294),
        (0.05, 1.0, 0.85, 0.05, 1.2, 1.188679),
        (0.0, 1.0, 0.5, 0.01, 1.0, 0.5),
    ];
    for (now, limit, used, then, limit_then, ratio) in vectors {
        let throughput = |misses, bandwidth| {
            let curve = MissCurve::new(vec![Knot { memory: 0.0, misses }]).unwrap();
            let slowdown = Slowdown::new(curve, 100.0, wanted(used, limit, 4.0)).unwrap();
            slowdown.value(Bundle { memory: 1.0, bandwidth })
        };
        let got = throughput(then, limit_then) / throughput(now, limit);
        assert_near(got, ratio, 1e-6, &format!("{now} {limit} {used} -> {then} {limit_then}"));
    }
}

/// Returns the miss ratio of an LRU cache of `pages` pages by simulation.
fn lru_misses(accesses: &[u64], pages: usize) -> f64 {
    let mut resident: Vec<u64> = Vec::new();
    let mut misses = 0;
    for page in accesses {
        match resident.iter().position(|other| other == page) {
            Some(at) => drop(resident.remove(at)),
            None => misses += 1,
        }
        resident.push(*page);
        if resident.len() > pages {
            resident.remove(0);
        }
    }
    f64::from(misses) / accesses.len() as f64
}

fn reuse_distances(accesses: &[u64], pages_max: usize) -> ReuseDistances {
    let mut reuse = ReuseDistances::new(pages_max, 1.0);
    accesses.iter().for_each(|page| reuse.touch(*page));
    reuse
}

proptest! {
    #[test]
    fn miss_ratio_is_exact_if_all_pages_are_sampled(accesses in vec(0_u64..40, 1..400)) {
        let reuse = reuse_distances(&accesses, 64);
        for pages in 1_usize..45 {
            prop_assert!((reuse.misses(pages as f64) - lru_misses(&accesses, pages)).abs() <= 1e-9, "{pages} pages");
        }
    }

    #[test]
    fn fit_passes_through_the_measured_miss_ratio(
        counts in vec(0_u32..1000, 20..200),
        of_pages in 1.0..50.0,
        local in 0.02..0.98,
        misses in 0.01..0.99,
    ) {
        let histogram = Histogram::new(counts.iter().copied().chain([9; 9]));
        let pages = 209.0 * of_pages;
        let measured = MeasuredMissRatio { pages, local: local * pages, misses, pages_per_mib: PAGES_PER_MIB };
        let law = fit(&histogram, &measured).unwrap();
        let sizes = [0.0, 0.1, 0.5, 0.9, 1.0, 2.0].map(|part| law.misses(part * law.footprint()));
        prop_assert!(sizes.is_sorted_by(|one, next| one >= next), "{law:?}: {sizes:?}");
        prop_assert!(sizes[0] <= 1.0 && sizes[5] == 0.0, "{law:?}: {sizes:?}");
        let estimate = law.misses(local * law.footprint());
        let is_too_steep = law.slope <= -5.9;
        let misses_all = law.scan_fraction == 1.0 && misses >= 0.9;
        prop_assert!(
            (estimate - misses).abs() <= 1e-5 || misses_all || is_too_steep && estimate >= misses,
            "{law:?}: {estimate}, expected {misses}"
        );
        // With decreasing frequencies, the first pages receive at least a proportional fraction of
        // accesses. A higher measured miss ratio can only be explained by a scan.
        prop_assert!(misses <= 1.0 - local || law.scan_fraction > 0.0, "{law:?}");
        prop_assert!(law.curve().is_ok());
    }
}

proptest! {
    #[test]
    fn stall_utility_is_limited_by_stalls_or_by_the_link(
        stall_ratio in 0.0..50.0_f64,
        mb_per_stall_second in 0.0..500.0,
        mb_per_work_second in 0.0..50.0,
        memory in 0.0..100.0_f64,
        bandwidth in 1.0..100.0,
    ) {
        let supply = Supply::new(100, 100);
        let knots = vec![Knot { memory: 0.0, misses: 1.0 }, Knot { memory: 80.0, misses: 0.0 }];
        let utility = stall_utility(supply, knots, stall_ratio, LinkTraffic { mb_per_stall_second, mb_per_work_second }).unwrap();
        let value = |memory, bandwidth| utility.value(Bundle { memory, bandwidth });
        let stalled = stall_ratio * (1.0 - memory / 80.0).max(0.0);
        let run_time = (1.0 + stalled).max((stalled * mb_per_stall_second + mb_per_work_second) / bandwidth);
        // The value may be lower than 1 / run_time by up to a sixth if stalls and link take the
        // same time. It may be slightly higher because stalls below the noise floor are ignored.
        let ratio = run_time * value(memory, bandwidth);
        prop_assert!((0.84..=1.01).contains(&ratio), "{ratio}");
        prop_assert!(value(memory + 1.0, bandwidth) >= value(memory, bandwidth));
        prop_assert!(value(memory, bandwidth + 1.0) >= value(memory, bandwidth));
    }
}

#[test]
fn sample_of_one_percent_of_pages_estimates_the_miss_ratio() {
    let zipf = Zipf::new(0.8, 100_000);
    let mut rng = Pcg64Mcg::seed_from_u64(5);
    let accesses: Vec<u64> = (0..1_000_000).map(|_| zipf.random_page(&mut rng)).collect();
    let (all, sample) = (reuse_distances(&accesses, 200_000), reuse_distances(&accesses, 1_000));
    for pages in [1_000.0, 3_000.0, 10_000.0, 30_000.0, 80_000.0] {
        assert_near(sample.misses(pages), all.misses(pages), 0.04, &format!("{pages} pages"));
    }
}

#[test]
fn loop_misses_until_it_fits_entirely() {
    let accesses: Vec<u64> = (0..200_000).map(|at| at % 10_000).collect();
    let sample = reuse_distances(&accesses, 1_000);
    let all = reuse_distances(&accesses, 20_000);
    assert_near(all.misses(9_800.0), 1.0, 1e-9, "all pages sampled, loop does not fit");
    assert_near(all.misses(10_000.0), 0.05, 1e-9, "all pages sampled, loop fits");
    assert_near(all.footprint(), 10_000.0, 1e-9, "footprint");
    assert_near(sample.misses(8_500.0), 1.0, 0.01, "a tenth of the pages sampled, loop does not fit");
    assert_near(sample.misses(11_500.0), 0.05, 0.02, "a tenth of the pages sampled, loop fits");
}

#[test]
fn miss_ratio_follows_new_accesses_after_decay() {
    let mut reuse = ReuseDistances::new(1_000, 1.0);
    (0..100_000).for_each(|at| reuse.touch(at % 5_000));
    assert_near(reuse.misses(1_000.0), 1.0, 0.01, "loop over 5,000 pages");
    for _ in 0..2 {
        reuse.decay(0.1);
        (0..100_000).for_each(|at| reuse.touch(1_000_000 + at % 500));
    }
    assert_near(reuse.misses(1_000.0), 0.02, 0.03, "loop over 500 pages after decay");
}
