//! Generates VMs from a seed, for use without a trace. The same seed and count give the same VMs.
//! Each VM is drawn independently, from distributions similar to those of Azure:
//!
//! | property | distribution |
//! |---|---|
//! | cores | 1: 40 %, 2: 25 %, 4: 20 %, 8: 11 %, 16: 4 % |
//! | GiB per core | 1.75: 45 %, 3.5: 30 %, 7: 20 %, 14: 5 % |
//! | lifetime | exponential with a mean of 15 min: 55 %, 2 h: 30 %, 1 day: 12 %, 10 days: 3 %; whole seconds, at least 1 |
//! | arrivals | Poisson, one per 120 s on average; the rate follows a daily sine of ±50 % |
//!
//! The distributions follow published data of Azure. Most VMs are small and short-lived, but a few
//! long-lived VMs cause most of the load. Memory per core varies, so some hosts run out of cores
//! and others out of memory.

use std::f64::consts::TAU;

use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;
use units::{Bytes, Ns};

use crate::trace::Arrival;

/// Distribution of cores per VM, as (percent of VMs, cores).
const CORES_DISTRIBUTION: [(u32, u32); 5] = [(40, 1), (25, 2), (20, 4), (11, 8), (4, 16)];
/// Distribution of memory per core, as (percent of VMs, MiB per core).
const MIB_PER_CORE_DISTRIBUTION: [(u32, u64); 4] = [(45, 1792), (30, 3584), (20, 7168), (5, 14336)];
/// Distribution of mean lifetimes, as (percent of VMs, seconds).
const LIFETIME_DISTRIBUTION_S: [(u32, f64); 4] = [(55, 900.0), (30, 7200.0), (12, 86_400.0), (3, 864_000.0)];
/// Mean time between two VM arrivals, in seconds.
const MEAN_ARRIVAL_GAP_S: f64 = 120.0;
/// Relative amplitude of the daily variation of the arrival rate: 0.5 means ±50 %.
const ARRIVAL_RATE_AMPLITUDE: f64 = 0.5;
const DAY_S: f64 = 86_400.0;

/// Generates `count` VMs in order of arrival.
pub fn generate(seed: u64, count: usize) -> Vec<Arrival> {
    let mut rng = Pcg64::seed_from_u64(seed);
    let mut now = 0.0;
    let vm = |n| {
        now = sample_next_arrival(&mut rng, now);
        generate_vm(&mut rng, n, now)
    };
    (1..=count as u64).map(vm).collect()
}

fn generate_vm(rng: &mut Pcg64, n: u64, now: f64) -> Arrival {
    let cores = sample_weighted(rng, &CORES_DISTRIBUTION);
    let memory = Bytes::mib(sample_weighted(rng, &MIB_PER_CORE_DISTRIBUTION) * u64::from(cores));
    let mean = sample_weighted(rng, &LIFETIME_DISTRIBUTION_S);
    let arrive = to_whole_seconds(now);
    let depart = arrive.after(to_whole_seconds(sample_exponential(rng, mean).max(1.0)));
    Arrival {
        line: n,
        id: format!("g{n}"),
        arrive: Some(arrive),
        depart: Some(depart),
        cores,
        memory,
        owner: None,
    }
}

/// Draws the next arrival time, in seconds, by thinning a Poisson process. Candidates arrive at the
/// peak rate. A candidate is accepted with probability (current rate / peak rate).
fn sample_next_arrival(rng: &mut Pcg64, mut now: f64) -> f64 {
    loop {
        now += sample_exponential(rng, MEAN_ARRIVAL_GAP_S / (1.0 + ARRIVAL_RATE_AMPLITUDE));
        let rate = 1.0 + ARRIVAL_RATE_AMPLITUDE * (TAU * now / DAY_S).sin();
        if rng.random::<f64>() * (1.0 + ARRIVAL_RATE_AMPLITUDE) < rate {
            return now;
        }
    }
}

fn sample_exponential(rng: &mut Pcg64, mean: f64) -> f64 {
    // The random number is below 1, so the logarithm of 1 minus this number is finite.
    -mean * (1.0 - rng.random::<f64>()).ln()
}

fn sample_weighted<T: Copy>(rng: &mut Pcg64, table: &[(u32, T)]) -> T {
    let total: u32 = table.iter().map(|(weight, _)| weight).sum();
    let mut at = rng.random_range(0..total);
    for (weight, value) in table {
        match at.checked_sub(*weight) {
            Some(remaining) => at = remaining,
            None => return *value,
        }
    }
    unreachable!("the weights add up to the total")
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times of a trace are in range")]
fn to_whole_seconds(time: f64) -> Ns {
    Ns::secs(time as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fraction(vms: &[Arrival], of: impl Fn(&Arrival) -> bool) -> f64 {
        vms.iter().filter(|vm| of(vm)).count() as f64 / vms.len() as f64
    }

    fn lifetime_s(vm: &Arrival) -> u64 {
        vm.depart.unwrap().since(vm.arrive.unwrap()).as_ms() / 1000
    }

    #[test]
    fn same_seed_generates_same_vms() {
        assert_eq!(generate(7, 500), generate(7, 500));
        assert_ne!(generate(7, 500), generate(8, 500));
        assert_eq!(generate(7, 500)[..100], generate(7, 100));
    }

    #[test]
    fn generated_vms_follow_documented_distributions() {
        let vms = generate(1, 20_000);
        let close = |a: f64, b: f64| (a - b).abs() < 0.02;
        assert!(close(fraction(&vms, |vm| vm.cores == 1), 0.40));
        assert!(close(fraction(&vms, |vm| vm.cores == 16), 0.04));
        assert!(close(fraction(&vms, |vm| vm.memory == Bytes::mib(1792 * u64::from(vm.cores))), 0.45));
        let hour = |mean: f64| 1.0 - (-3600.0 / mean).exp();
        let within_an_hour: f64 =
            LIFETIME_DISTRIBUTION_S.iter().map(|(w, mean)| f64::from(*w) / 100.0 * hour(*mean)).sum();
        assert!(close(fraction(&vms, |vm| lifetime_s(vm) < 3600), within_an_hour));
        let last = vms.last().unwrap().arrive.unwrap().as_ms() as f64 / 1000.0;
        // The tolerance is 4 %: the trace ends within a day, and the rate varies over the day.
        assert!((last / 20_000.0 / MEAN_ARRIVAL_GAP_S - 1.0).abs() < 0.04);
    }

    #[test]
    fn arrival_rate_varies_over_the_day() {
        let vms = generate(1, 20_000);
        let day = |vm: &Arrival| vm.arrive.unwrap().as_ms() / 1000 % 86_400 < 43_200;
        let expected = 0.5 + ARRIVAL_RATE_AMPLITUDE / std::f64::consts::PI;
        assert!((fraction(&vms, day) - expected).abs() < 0.02);
    }

    #[test]
    fn generated_vms_are_ordered_with_positive_lifetimes() {
        let vms = generate(3, 2_000);
        assert!(vms.is_sorted_by_key(|vm| vm.arrive));
        assert!(vms.iter().all(|vm| lifetime_s(vm) >= 1 && vm.memory.is_whole_mib()));
    }
}
