//! Tests of malformed settings, and of tenants that appear, disappear, restart or are too many.

use proptest::prelude::*;
use units::limits::{THRASH_TABLE_ENTRIES_MAX, TIERING_TENANTS_MAX, TIERS_MAX};

use super::*;

#[test]
fn invalid_settings_are_rejected_with_field_value_and_rule() {
    let error = |settings: Settings| Policy::new(settings).unwrap_err().to_string();
    let defaults = Settings::default();
    let thrash = ThrashSettings::default();
    let cases = [
        (
            Settings { high_watermark: Factor::from_ppm(500_001), ..defaults },
            "invalid setting high_watermark = 500001: must be at most 500000 ppm (50 %)",
        ),
        (
            Settings { low_watermark: defaults.high_watermark, ..defaults },
            "invalid setting low_watermark = 20000: must be less than high_watermark, in ppm",
        ),
        (
            Settings { bound_margin: Factor::ONE, ..defaults },
            "invalid setting bound_margin = 1000000: must be at most 500000 ppm (50 %)",
        ),
        (
            Settings { promotion_bytes_per_s: Bytes::ZERO, ..defaults },
            "invalid setting promotion_bytes_per_s = 0: must be from 1 B/s to 1 TiB/s",
        ),
        (
            Settings { thrash: ThrashSettings { period: Ns::ZERO, ..thrash }, ..defaults },
            "invalid setting thrash.period = 0: must be from 100 ms to 1 h, in nanoseconds",
        ),
        (
            Settings { thrash: ThrashSettings { thrashed_min: 0, ..thrash }, ..defaults },
            "invalid setting thrash.thrashed_min = 0: must be more than 0",
        ),
    ];
    for (settings, message) in cases {
        assert_eq!(error(settings), message);
    }
}

#[test]
fn invalid_table_settings_are_rejected_with_field_value_and_rule() {
    let defaults = ThrashTableSettings::default();
    let field = |settings| ThrashTable::new(settings).map(|_| ()).unwrap_err().field;
    for entries in [0, 7, 12, THRASH_TABLE_ENTRIES_MAX + 8] {
        assert_eq!(field(ThrashTableSettings { entries, ..defaults }), "entries");
    }
    assert_eq!(field(ThrashTableSettings { sample_shift: 21, ..defaults }), "sample_shift");
    for residence_max in [Ns::ZERO, Ns::secs(3601), Ns::NEVER] {
        assert_eq!(field(ThrashTableSettings { residence_max, ..defaults }), "residence_max");
    }
}

#[test]
fn excess_and_duplicate_tenants_are_rejected_and_counted() {
    let mut policy = Policy::new(Settings::default()).unwrap();
    let count = u32::try_from(TIERING_TENANTS_MAX).unwrap();
    let mut tenants: Vec<TenantSample> = (0..count + 2).map(|id| tenant(id, gb(0), gb(0))).collect();
    tenants.insert(1, tenant(0, gb(5), gb(0)));
    for at in 1..3 {
        let decision = policy.step(&host(Ns::secs(at), gb(200), gb(64)), &tenants);
        assert_eq!((decision.tenants().len(), decision.rejected_tenants()), (TIERING_TENANTS_MAX, 3));
        assert_eq!(decision.tenants()[0].fast().usage, gb(0));
        assert_eq!(decision.tenants()[1].tenant, TenantId(1));
    }
}

#[test]
fn vanished_tenant_is_forgotten_and_returns_as_a_new_one() {
    let mut policy = Policy::new(Settings::default()).unwrap();
    let step = |policy: &mut Policy, at, tenants: &[TenantSample]| {
        policy.step(&host(Ns::secs(at), gb(200), gb(64)), tenants).tenants().to_vec()
    };
    let calm = tenant(1, gb(1), gb(0));
    step(&mut policy, 0, &[calm]);
    assert_eq!(step(&mut policy, 5, &[calm])[0].thrash, ThrashState::Calm);
    assert_eq!(step(&mut policy, 6, &[]), []);
    assert_eq!(step(&mut policy, 7, &[calm])[0].thrash, ThrashState::Unobserved);
}

#[test]
fn state_of_a_tenant_survives_a_change_of_order() {
    let mut policy = Policy::new(Settings::default()).unwrap();
    let (first, second) = (tenant(1, gb(1), gb(0)), tenant(2, gb(1), gb(0)));
    policy.step(&host(Ns::secs(0), gb(200), gb(64)), &[first, second]);
    policy.step(&host(Ns::secs(5), gb(200), gb(64)), &[second, first]);
    assert!(policy.decision().tenants().iter().all(|report| report.thrash == ThrashState::Calm));
}

fn any_bytes() -> impl Strategy<Value = Bytes> {
    prop_oneof![Just(0), Just(u64::MAX), any::<u64>(), 0..300 * GB].prop_map(Bytes::new)
}

prop_compose! {
    fn any_tenant()(
        id in 0_u32..6,
        tiers in prop::array::uniform4((any_bytes(), any_bytes(), prop::option::of(any_bytes()))),
        sizes in prop::array::uniform5(any_bytes()),
        counts in prop::array::uniform2(any::<u64>()),
        is_known in any::<bool>(),
    ) -> TenantSample {
        let [demoted, promoted, attempted, active, freed] = sizes;
        TenantSample {
            id: TenantId(id),
            tiers: tiers.map(|(usage, protection, bound)| TenantTier { usage, protection, bound }),
            counters: Counters {
                demoted,
                promoted,
                attempted,
                sampled_promotions: counts[0],
                sampled_thrashed: counts[1],
                active: is_known.then_some(active),
                freed: is_known.then_some(freed),
            },
        }
    }
}

proptest! {
    #[test]
    fn any_samples_give_valid_and_repeatable_orders(
        steps in prop::collection::vec(
            (
                any::<u64>(),
                prop::array::uniform4((any_bytes(), any_bytes())),
                prop::collection::vec(any_tenant(), 0..8),
            ),
            1..6,
        ),
    ) {
        let (mut policy, mut again) = (
            Policy::new(Settings::default()).unwrap(),
            Policy::new(Settings::default()).unwrap(),
        );
        for (at, tiers, tenants) in steps {
            let tiers = tiers.map(|(capacity, free)| TierSample { capacity, free });
            let host = HostSample { at: Ns(at), tiers };
            let decision = policy.step(&host, &tenants).clone();
            prop_assert_eq!(&decision, again.step(&host, &tenants));
            check_decision(&host, &decision)?;
        }
    }
}

/// Checks that protections are respected and fit, and that each order is possible.
fn check_decision(host: &HostSample, decision: &Decision) -> Result<(), TestCaseError> {
    for tier in 0..TIERS_MAX {
        let report = decision.tiers()[tier];
        prop_assert!(report.scaled_protection <= report.usable);
        let lower_free: Bytes = (tier + 1..TIERS_MAX).map(|lower| decision.tiers()[lower].free).sum();
        let demoted = decision.tenants().iter().filter_map(|tenant| tenant.tiers[tier].demotion);
        prop_assert!(demoted.map(|demotion| demotion.bytes).sum::<Bytes>() <= lower_free);
        prop_assert!(report.usable <= host.tiers[tier].capacity);
        for tenant in decision.tenants() {
            let report = tenant.tiers[tier];
            let Some(demotion) = report.demotion else { continue };
            prop_assert!(demotion.bytes > Bytes::ZERO && demotion.bytes <= report.usage);
            let is_bound = matches!(demotion.reason, DemotionReason::AboveBound | DemotionReason::NearBound);
            prop_assert!(is_bound || demotion.bytes <= report.borrowed());
        }
    }
    let budgets = decision.orders().iter().filter(|order| matches!(order, Order::LimitPromotion { .. }));
    prop_assert_eq!(budgets.count(), decision.tenants().len());
    Ok(())
}

proptest! {
    #[test]
    fn distribution_respects_limits_and_assigns_all(
        size in any_bytes(),
        parts in prop::collection::vec((any_bytes(), any_bytes()), 0..20),
    ) {
        let mut parts: Vec<distribution::Part> = parts
            .into_iter()
            .map(|(weight, max)| distribution::Part { weight: weight.get(), max: max.get(), assigned: 0 })
            .collect();
        let left = distribution::distribute(size.get(), &mut parts);
        let assigned: u128 = parts.iter().map(|part| u128::from(part.assigned)).sum();
        prop_assert_eq!(assigned + u128::from(left), u128::from(size.get()));
        prop_assert!(parts.iter().all(|part| part.assigned <= part.max));
        prop_assert!(left == 0 || parts.iter().all(|part| part.weight == 0 || part.assigned == part.max));
    }
}
