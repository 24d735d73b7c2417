//! Measures a step of the policy that shares memory tiers, with all tenants above their protection
//! and a host without free memory, and a step of the policy of early eviction, with all thresholds changing.
//!
//! Goals: less than 100 µs and 50 µs for 1,000 tenants. The times grow in proportion to the number of tenants.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use tiering::{
    evict,
    fair::{FAST, HostSample, Policy, Settings, TenantId, TenantSample, TierSample},
};
use units::{Bytes, Ns};

/// Allocator that the host agent uses in production.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Numbers of tenants.
const TENANTS: [u32; 4] = [10, 100, 1000, 10_000];
/// Duration for which the steps of one number of tenants are measured.
const MEASUREMENT_DURATION: Duration = Duration::from_secs(2);

fn main() {
    measure("tiering_step", fair_step);
    measure("eviction_step", eviction_step);
}

/// Prints the median times of a step for all numbers of tenants, and how they grow. `create` returns a
/// function that measures the step at a second, for a number of tenants.
fn measure<S: FnMut(u64) -> Duration>(name: &str, create: impl Fn(u32) -> S) {
    let times = TENANTS.map(|count| {
        let us = median_us(create(count));
        println!("time {name}_{count} {us:.1} us");
        us
    });
    println!("growth {name} {:.2}", growth_exponent(times));
}

/// Returns the exponent of the growth from the smallest to the largest number of tenants.
fn growth_exponent(times: [f64; TENANTS.len()]) -> f64 {
    let last = TENANTS.len() - 1;
    (times[last] / times[0]).ln() / f64::from(TENANTS[last] / TENANTS[0]).ln()
}

/// Returns the median of the times that `step` returns, in microseconds.
fn median_us(mut step: impl FnMut(u64) -> Duration) -> f64 {
    let (mut times, started) = (Vec::new(), Instant::now());
    for second in 0.. {
        times.push(step(second).as_secs_f64() * 1e6);
        if started.elapsed() >= MEASUREMENT_DURATION {
            break;
        }
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn fair_step(count: u32) -> impl FnMut(u64) -> Duration {
    let mut policy = Policy::new(Settings::default()).expect("the default settings are valid");
    let mut tenants: Vec<TenantSample> = (0..count).map(tenant).collect();
    move |second| {
        tenants.iter_mut().for_each(|tenant| change(tenant, second));
        let host = host(second, count);
        let start = Instant::now();
        black_box(policy.step(black_box(&host), black_box(&tenants)));
        start.elapsed()
    }
}

fn eviction_step(count: u32) -> impl FnMut(u64) -> Duration {
    let mut policy = evict::Policy::new(evict::Settings::default()).expect("the default settings are valid");
    let mut tenants: Vec<evict::TenantSample> = (0..count).map(evicted_tenant).collect();
    move |second| {
        tenants.iter_mut().for_each(|tenant| grow(tenant, second));
        let start = Instant::now();
        black_box(policy.step(Ns::secs(second), black_box(&tenants)));
        start.elapsed()
    }
}

/// Creates a tenant with a limit of 2 to 3 GiB.
fn evicted_tenant(id: u32) -> evict::TenantSample {
    let limit = Bytes::mib(2048 + u64::from(id % 1024));
    evict::TenantSample { id: TenantId(id), limit, usage: Bytes::gib(1), ..evict::TenantSample::default() }
}

/// Adds a second in which the tenant grows, and fetches some of its memory. In every second second, it grows
/// faster than it is evicted.
fn grow(tenant: &mut evict::TenantSample, second: u64) {
    let counters = &mut tenant.counters;
    counters.grown =
        counters.grown.saturating_add(Bytes::mib(150 + 200 * (second % 2) + u64::from(tenant.id.0 % 7)));
    counters.evicted = counters.evicted.saturating_add(Bytes::mib(150));
    counters.evicting = counters.evicting.after(Ns::ms(700));
    counters.blocked = counters.blocked.after(Ns::ms(100));
    counters.fetching = counters.fetching.after(Ns::ms(1));
    counters.misses += 100 + u64::from(tenant.id.0 % 7);
    counters.accesses += 100_000;
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
