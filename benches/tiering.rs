//! Measures a step of the policy that shares memory tiers, with all tenants above their protection
//! and a host without free memory.
//!
//! Goal: less than 100 µs for 1,000 tenants. The time grows in proportion to the number of tenants.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use tiering::fair::{FAST, HostSample, Policy, Settings, TenantId, TenantSample, TierSample};
use units::{Bytes, Ns};

/// Allocator that the host agent uses in production.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Numbers of tenants.
const TENANTS: [u32; 4] = [10, 100, 1000, 10_000];
/// Duration for which the steps of one number of tenants are measured.
const MEASUREMENT_DURATION: Duration = Duration::from_secs(2);

fn main() {
    let times = TENANTS.map(|count| {
        let us = median_step_us(count);
        println!("time tiering_step_{count} {us:.1} us");
        us
    });
    println!("growth tiering_step {:.2}", growth_exponent(times));
}

/// Returns the exponent of the growth from the smallest to the largest number of tenants.
fn growth_exponent(times: [f64; TENANTS.len()]) -> f64 {
    let last = TENANTS.len() - 1;
    (times[last] / times[0]).ln() / f64::from(TENANTS[last] / TENANTS[0]).ln()
}

/// Returns the median time of a step in microseconds.
fn median_step_us(count: u32) -> f64 {
    let mut policy = Policy::new(Settings::default()).expect("the default settings are valid");
    let mut tenants: Vec<TenantSample> = (0..count).map(tenant).collect();
    let (mut times, started) = (Vec::new(), Instant::now());
    for second in 0.. {
        tenants.iter_mut().for_each(|tenant| change(tenant, second));
        let host = host(second, count);
        let start = Instant::now();
        black_box(policy.step(black_box(&host), black_box(&tenants)));
        times.push(start.elapsed().as_secs_f64() * 1e6);
        if started.elapsed() >= MEASUREMENT_DURATION {
            break;
        }
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Creates a tenant with 2 to 3 GiB of local memory, of which 1 GiB is protected.
fn tenant(id: u32) -> TenantSample {
    let mut tenant = TenantSample::new(TenantId(id));
    tenant.tiers[FAST].usage = Bytes::mib(2048 + u64::from(id % 1024));
    tenant.tiers[FAST].protection = Bytes::gib(1);
    tenant.tiers[FAST].bound = id.is_multiple_of(4).then_some(Bytes::mib(2560));
    tenant.tiers[1].usage = Bytes::gib(1);
    tenant
}

/// Changes usage and counters, as between two samples.
fn change(tenant: &mut TenantSample, second: u64) {
    let usage = 2048 + (u64::from(tenant.id.0) * 31 + second * 7) % 1024;
    tenant.tiers[FAST].usage = Bytes::mib(usage);
    tenant.counters.promoted = Bytes::mib(second);
    tenant.counters.attempted = Bytes::mib(2 * second);
    tenant.counters.sampled_promotions = second;
    tenant.counters.sampled_thrashed = second / 2;
}

fn host(second: u64, count: u32) -> HostSample {
    let capacity = Bytes::gib(u64::from(count) * 3);
    let tier = |free| TierSample { capacity, free };
    HostSample::new(Ns::secs(second), &[tier(Bytes::ZERO), tier(capacity)])
}
