//! Tests of the policy: vectors of the equations, single steps, and closed loops with a model host.

mod closed_loop;
mod explanations;
mod limits;
mod steps;
mod thrashing;

use units::{Bytes, Ns};

use super::*;

/// Size of 1 GB, the unit of the paper.
const GB: u64 = 1_000_000_000;

fn gb(n: u64) -> Bytes {
    Bytes::new(n * GB)
}

/// Creates a tenant with usage and protection of local memory.
fn tenant(id: u32, usage: Bytes, protection: Bytes) -> TenantSample {
    let mut tenant = TenantSample::new(TenantId(id));
    tenant.tiers[FAST] = TenantTier { usage, protection, bound: None };
    tenant
}

/// Creates a host with free memory in two tiers of 250 GB and 64 GB.
fn host(at: Ns, free_fast: Bytes, free_slow: Bytes) -> HostSample {
    let tier = |capacity, free| TierSample { capacity, free };
    HostSample::new(at, &[tier(gb(250), free_fast), tier(gb(64), free_slow)])
}

/// Returns the demotions of a decision: tenant, tier, size and urgency.
fn demotions(decision: &Decision) -> Vec<(u32, usize, Bytes, Urgency)> {
    let orders = decision.orders().iter().filter_map(|order| match *order {
        Order::Demote { tenant, tier, bytes, urgency } => Some((tenant.0, tier, bytes, urgency)),
        Order::LimitPromotion { .. } => None,
    });
    orders.collect()
}

#[test]
fn demotion_target_matches_equation_1() {
    let vectors = [
        (70 * GB, 0),
        (80 * GB, 0),
        (80_800_000_000, 9900),
        (88 * GB, 90_909),
        (90 * GB, 111_111),
        (100 * GB, 200_000),
        (120 * GB, 333_333),
        (240 * GB, 666_666),
    ];
    for (usage, pages) in vectors {
        assert_eq!(demotion_target(1_000_000, usage, 80 * GB), pages, "usage {usage}");
    }
    assert_eq!(demotion_target(1_000_000, 5, 0), 1_000_000);
    assert_eq!(demotion_target(7, 0, 0), 0);
    assert_eq!(demotion_target(u64::MAX, u64::MAX, 0), u64::MAX);
}

#[test]
fn promotion_factor_matches_equation_2() {
    let vectors = [
        (70 * GB, 1_000_000),
        (80 * GB, 1_000_000),
        (80_800_000_000, 960_980),
        (88 * GB, 683_013),
        (90 * GB, 624_295),
        (100 * GB, 409_600),
        (120 * GB, 197_531),
        (160 * GB, 62_500),
        (240 * GB, 62_500),
    ];
    for (usage, ppm) in vectors {
        assert_eq!(promotion_factor(Bytes::new(usage), gb(80), true).ppm(), ppm, "usage {usage}");
        assert_eq!(promotion_factor(Bytes::new(usage), gb(80), false), Factor::ONE);
    }
    assert_eq!(promotion_factor(gb(1), Bytes::ZERO, true).ppm(), 62_500);
    assert_eq!(promotion_factor(Bytes::ZERO, Bytes::ZERO, true), Factor::ONE);
    let huge = Bytes::new(u64::MAX);
    assert_eq!(promotion_factor(huge, Bytes::new(u64::MAX - 1), true), Factor::ONE);
}

#[test]
fn thrash_level_halves_the_rate_to_its_floor() {
    let rate = |level| equations::throttled_rate(Bytes::new(1 << 20), level).get();
    assert_eq!(
        [rate(0), rate(1), rate(8), rate(9), rate(255)],
        [1 << 20, 1 << 19, 1 << 12, 1 << 12, 1 << 12]
    );
}
