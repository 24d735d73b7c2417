//! Tests of single steps: watermarks, bounds, scaled and donated protections, lower tiers.

use super::*;

/// Low watermark of the tests' host. The high watermark is 5 GB.
const LOW: Bytes = Bytes::new(4_375_000_000);

fn policy() -> Policy {
    Policy::new(Settings::default()).unwrap()
}

fn budget(decision: &Decision, id: u32) -> PromotionBudget {
    let report = decision.tenants().iter().find(|report| report.tenant == TenantId(id));
    report.unwrap().budget
}

#[test]
fn free_memory_above_the_watermark_needs_no_orders() {
    let mut policy = policy();
    let decision = policy.step(&host(Ns::secs(1), gb(50), gb(64)), &[tenant(1, gb(120), gb(80))]);
    assert_eq!(demotions(decision), []);
    assert_eq!(budget(decision, 1), PromotionBudget::UNLIMITED);
    assert!(!decision.tiers()[FAST].is_full);
}

#[test]
fn demotion_starts_below_low_and_ends_at_high_watermark() {
    let mut policy = policy();
    let borrowing = [tenant(1, gb(245), gb(80))];
    let free = |policy: &mut Policy, mb: u64| {
        let free = Bytes::new(mb * 1_000_000);
        demotions(policy.step(&host(Ns::secs(1), free, gb(64)), &borrowing))
    };
    assert_eq!(free(&mut policy, 4500), []);
    assert_eq!(free(&mut policy, 3700), [(1, FAST, Bytes::new(1_300_000_000), Urgency::Background)]);
    assert_eq!(free(&mut policy, 4500), [(1, FAST, Bytes::new(500_000_000), Urgency::Background)]);
    assert_eq!(free(&mut policy, 5000), []);
    assert_eq!(free(&mut policy, 4500), []);
    assert_eq!(free(&mut policy, 2000), [(1, FAST, gb(3), Urgency::Immediate)]);
}

#[test]
fn usage_beyond_the_capacity_is_demoted_in_one_step() {
    let mut policy = policy();
    let decision = policy.step(&host(Ns::secs(1), gb(0), gb(64)), &[tenant(1, gb(280), gb(80))]);
    assert_eq!(demotions(decision), [(1, FAST, gb(35), Urgency::Immediate)], "30 GB and the high watermark");
}

#[test]
fn demotion_is_proportional_to_usage_above_protection() {
    let mut policy = policy();
    let tenants = [tenant(1, gb(120), gb(80)), tenant(2, gb(90), gb(80)), tenant(3, gb(40), gb(80))];
    let decision = policy.step(&host(Ns::secs(1), gb(0), gb(64)), &tenants);
    // The memory of tenant 3 is new, so that it claims as much again: at most 5 GB above the low watermark.
    assert_eq!(
        demotions(decision),
        [
            (1, FAST, Bytes::new(7_500_000_000), Urgency::Immediate),
            (2, FAST, Bytes::new(1_875_000_000), Urgency::Immediate)
        ]
    );
    let [first, second, third] = [1, 2, 3].map(|id| decision.tenants()[id - 1]);
    assert_eq!(first.factor.ppm(), 197_531);
    assert_eq!(first.budget.candidates, Candidates::Hot);
    assert_eq!(second.factor.ppm(), 624_295);
    assert_eq!((third.factor, third.fast().donated()), (Factor::ONE, gb(40)));
}

#[test]
fn memory_without_tenant_reduces_protections() {
    let mut policy = policy();
    let tenants = [tenant(1, gb(80), gb(80)), tenant(2, gb(10), gb(80))];
    policy.step(&host(Ns::secs(1), gb(0), gb(64)), &tenants);
    let decision = policy.step(&host(Ns::secs(2), gb(0), gb(64)), &tenants);
    assert_eq!(decision.tiers()[FAST].usable, gb(85));
    assert_eq!(decision.tenants()[1].fast().scaled_protection, Bytes::new(42_500_000_000));
    assert_eq!(demotions(decision), [(1, FAST, gb(5), Urgency::Immediate)]);
}

/// Demotions from a tenant above its protection for a tenant below its protection, in the second step. The
/// low watermark is free. The lower tier contains 40 GB of the second tenant.
fn demoted_for_claims(usage_before: Bytes, usage: Bytes) -> Vec<(u32, usize, Bytes, Urgency)> {
    let mut policy = policy();
    let tenants = |usage| {
        let mut below = tenant(2, usage, gb(80));
        below.tiers[1].usage = gb(40);
        [tenant(1, gb(200), gb(80)), below]
    };
    policy.step(&host(Ns::secs(1), LOW, gb(24)), &tenants(usage_before));
    demotions(policy.step(&host(Ns::secs(2), LOW, gb(24)), &tenants(usage)))
}

#[test]
fn tenant_below_its_protection_gets_memory_back_without_attempted_promotions() {
    // A sixteenth of the promotion rate of 1 GiB/s.
    assert_eq!(demoted_for_claims(gb(45), gb(45)), [(1, FAST, Bytes::mib(64), Urgency::Background)]);
}

#[test]
fn tenant_below_its_protection_claims_its_growth() {
    assert_eq!(demoted_for_claims(gb(44), gb(45)), [(1, FAST, gb(1), Urgency::Background)]);
}

#[test]
fn tier_is_full_until_free_memory_exceeds_the_high_watermark() {
    for (free_mb, is_full) in [(3700, true), (5000, true), (5600, true), (5700, false)] {
        let free = Bytes::new(free_mb * 1_000_000);
        let mut policy = policy();
        let decision = policy.step(&host(Ns::secs(1), free, gb(64)), &[tenant(1, gb(243), gb(80))]);
        assert_eq!(decision.tiers()[FAST].is_full, is_full, "{free_mb} MB are free");
    }
}

#[test]
fn tenant_within_a_huge_page_of_its_protection_claims_nothing() {
    let claims = |usage_mib: u64| {
        // 80 MiB are protected, and the low watermark is free.
        let mut returning = tenant(2, Bytes::mib(usage_mib), Bytes::mib(80));
        returning.tiers[1].usage = gb(10);
        let decision_of = |policy: &mut Policy, returning| {
            let host = host(Ns::secs(1), LOW, gb(54));
            let decision = policy.step(&host, &[tenant(1, gb(240), gb(80)), returning]);
            (demotions(decision).len(), budget(decision, 2).candidates)
        };
        decision_of(&mut policy(), returning)
    };
    assert_eq!([77, 78, 79].map(claims), [(1, Candidates::All), (1, Candidates::All), (0, Candidates::All)]);
}

#[test]
fn returning_tenant_claims_its_donated_protection() {
    let mut policy = policy();
    // Tenant 2 has 10 GB in CXL memory.
    let mut returning = tenant(2, gb(60), gb(80));
    returning.tiers[1].usage = gb(10);
    let borrowing = tenant(1, gb(185), gb(80));
    policy.step(&host(Ns::secs(1), gb(5), gb(50)), &[borrowing, returning]);
    returning.counters.attempted = gb(1);
    let decision = policy.step(&host(Ns::secs(2), gb(5), gb(50)), &[borrowing, returning]);
    // It claims 2 GB, of which 625 MB are free above the low watermark.
    assert_eq!(demotions(decision), [(1, FAST, Bytes::new(1_375_000_000), Urgency::Background)]);
    let reports = decision.tenants();
    assert_eq!(reports[0].fast().demotion.unwrap().reason, DemotionReason::ClaimedProtection);
    assert_eq!(reports[0].throttle, Some(ThrottleReason::AboveProtection));
    assert_eq!(reports[1].budget, PromotionBudget { bytes_per_s: None, candidates: Candidates::All });
}

#[test]
fn idle_tenant_below_its_protection_claims_nothing() {
    let mut policy = policy();
    let tenants = [tenant(1, gb(185), gb(80)), tenant(2, gb(60), gb(80))];
    policy.step(&host(Ns::secs(1), gb(5), gb(64)), &tenants);
    let decision = policy.step(&host(Ns::secs(2), gb(5), gb(64)), &tenants);
    assert_eq!(demotions(decision), []);
}

#[test]
fn bound_is_enforced_gently_near_it_and_at_once_above_it() {
    let mut policy = policy();
    let demoted = |policy: &mut Policy, usage| {
        let mut bounded = tenant(1, Bytes::new(usage), gb(80));
        bounded.tiers[FAST].bound = Some(gb(80));
        let decision = policy.step(&host(Ns::secs(1), gb(100), gb(64)), &[bounded]);
        (demotions(decision), decision.tenants()[0].throttle)
    };
    // The margin is 200 MB.
    assert_eq!(demoted(&mut policy, 79_700_000_000), (vec![], None));
    let gentle = vec![(1, FAST, Bytes::new(150_000_000), Urgency::Background)];
    assert_eq!(demoted(&mut policy, 79_950_000_000), (gentle, Some(ThrottleReason::NearBound)));
    let at_once = vec![(1, FAST, Bytes::new(10_200_000_000), Urgency::Immediate)];
    assert_eq!(demoted(&mut policy, 90 * GB), (at_once, Some(ThrottleReason::NearBound)));
}

#[test]
fn bound_below_protection_limits_protection() {
    let mut policy = policy();
    let mut bounded = tenant(1, gb(10), gb(80));
    bounded.tiers[FAST].bound = Some(gb(10));
    bounded.tiers[1].usage = gb(50);
    let decision = policy.step(&host(Ns::secs(1), LOW, gb(10)), &[bounded, tenant(2, gb(235), gb(80))]);
    // Tenant 1 cannot use more memory, so it claims nothing.
    assert_eq!(decision.tenants()[0].fast().demotion.unwrap().reason, DemotionReason::NearBound);
    assert_eq!(decision.tenants()[1].fast().demotion, None);
    // Throttled below its protection, its factor is 1.
    assert_eq!(decision.tenants()[0].factor, Factor::ONE);
}

#[test]
fn excessive_protections_are_scaled_in_proportion() {
    let mut policy = policy();
    let tenants = [tenant(1, gb(100), gb(300)), tenant(2, gb(100), gb(100))];
    // 40 GB belong to no tenant: 250 - 10 - 200. With the high watermark, 205 GB are usable.
    let decision = policy.step(&host(Ns::secs(1), gb(10), gb(64)), &tenants);
    let tier = decision.tiers()[FAST];
    assert_eq!((tier.usable, tier.protection, tier.is_scaled()), (gb(205), gb(400), true));
    let scaled: Vec<u64> =
        decision.tenants().iter().map(|report| report.fast().scaled_protection.get()).collect();
    assert_eq!(scaled, [153_750_000_000, 51_250_000_000]);
}

#[test]
fn lower_tier_has_limits_of_its_own() {
    let mut policy = policy();
    let tier = |capacity, free| TierSample { capacity: gb(capacity), free: gb(free) };
    let host = HostSample::new(Ns::secs(1), &[tier(250, 100), tier(64, 0), tier(64, 60)]);
    let mut bounded = tenant(1, gb(10), gb(10));
    bounded.tiers[1] = TenantTier { usage: gb(20), protection: gb(20), bound: Some(gb(10)) };
    let mut protected = tenant(2, gb(10), gb(10));
    protected.tiers[1] = TenantTier { usage: gb(30), protection: gb(30), bound: None };
    let mut unprotected = tenant(3, gb(10), gb(10));
    unprotected.tiers[1].usage = gb(10);
    let decision = policy.step(&host, &[bounded, protected, unprotected]);
    let demoted: Vec<_> =
        demotions(decision).into_iter().map(|(tenant, tier, bytes, _)| (tenant, tier, bytes)).collect();
    // The bound frees 10.025 GB, which exceeds the high watermark.
    assert_eq!(demoted, [(1, 1, Bytes::new(10_025_000_000))]);
    let decision = policy.step(&host, &[protected, unprotected]);
    assert_eq!(demotions(decision), [(3, 1, Bytes::new(1_280_000_000), Urgency::Immediate)]);
}

#[test]
fn demotion_is_limited_by_the_room_in_lower_tiers() {
    let mut policy = policy();
    let mut limited = tenant(1, gb(200), gb(80));
    limited.tiers[1] = TenantTier { usage: gb(9), protection: gb(0), bound: Some(gb(10)) };
    let tenants = [limited, tenant(2, gb(50), gb(40))];
    let decision = policy.step(&host(Ns::secs(1), gb(0), gb(3)), &tenants);
    let demoted: Vec<_> = demotions(decision).iter().map(|demotion| (demotion.0, demotion.2)).collect();
    assert_eq!(demoted, [(1, gb(1)), (2, gb(2))]);
    assert_eq!(decision.tiers()[FAST].shortfall, gb(2));
}

#[test]
fn host_without_lower_tier_gets_no_demotions() {
    let mut policy = policy();
    let host = HostSample::new(Ns::secs(1), &[TierSample { capacity: gb(100), free: gb(0) }]);
    let decision = policy.step(&host, &[tenant(1, gb(100), gb(10))]);
    assert_eq!(demotions(decision), []);
    assert_eq!(decision.tiers()[FAST].shortfall, gb(2));
}

#[test]
fn orders_contain_one_budget_per_tenant() {
    let mut policy = policy();
    let tenants = [tenant(5, gb(1), gb(80)), tenant(3, gb(2), gb(80))];
    let decision = policy.step(&host(Ns::secs(1), gb(200), gb(64)), &tenants);
    let limited: Vec<u32> = decision
        .orders()
        .iter()
        .map(|order| match order {
            Order::LimitPromotion { tenant, .. } | Order::Demote { tenant, .. } => tenant.0,
        })
        .collect();
    assert_eq!(limited, [5, 3]);
}
