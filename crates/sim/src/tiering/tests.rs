//! Tests of the simulation: scenarios of the paper, invalid scenarios, and LRU lists.

use proptest::prelude::*;
use tiering::fair::FAST;

use super::{memory::TenantMemory, *};

fn report(name: &str) -> ScenarioReport {
    let all = scenarios();
    simulate(all.iter().find(|scenario| scenario.name() == name).unwrap())
}

fn scheme(report: &ScenarioReport, scheme: Scheme) -> &SchemeReport {
    report.scheme(scheme).unwrap()
}

/// Asserts that values differ from the expected ones by at most 1 %.
fn assert_near(values: &[f64], expected: &[f64]) {
    let is_near = |(value, expected): (&f64, &f64)| (value - expected).abs() <= 0.01 * expected;
    let is_complete = values.len() == expected.len();
    assert!(is_complete && values.iter().zip(expected).all(is_near), "{values:?}, expected {expected:?}");
}

#[test]
fn local_memory_is_preferred() {
    assert_near(&report("120/40/40").local_gb, &[120.0, 40.0, 40.0]);
}

#[test]
fn protection_is_enforced() {
    let report = report("120/90/90");
    assert_near(&report.local_gb, &[80.0, 80.0, 80.0]);
    // The tenant with the largest overage is demoted most. Later, it is limited as a thrashing tenant.
    let demoted = |tenant: usize| {
        let timeline = scheme(&report, Scheme::Equilibria).timeline.iter().take(200);
        timeline.map(|point| point.tenants[tenant].demoted_pages).sum::<u64>()
    };
    let [first, second, third] = [0, 1, 2].map(demoted);
    assert!(first > 2 * second && first > 2 * third, "{first} {second} {third}");
}

#[test]
fn unused_protection_is_donated() {
    let report = report("120/70/70");
    assert_near(&report.local_gb, &[100.0, 70.0, 70.0]);
    let demoted = |tenant: usize| {
        let timeline = &scheme(&report, Scheme::Equilibria).timeline;
        timeline.iter().map(|point| point.tenants[tenant].demoted_pages).sum::<u64>()
    };
    assert!(demoted(0) > 0 && demoted(1) == 0 && demoted(2) == 0);
}

#[test]
fn bound_is_enforced() {
    let report = report("120/40/40 bound 80");
    assert_near(&report.local_gb, &[80.0, 40.0, 40.0]);
    let largest = scheme(&report, Scheme::Equilibria).local_max_gb[0];
    // The tenant allocates 2 GB in the second between two steps.
    assert!(largest <= 82.1, "{largest}");
    assert_eq!(report.bound_excess_gb(), [("A", largest - 80.0)]);
}

#[test]
fn hot_neighbour_does_not_displace_protected_memory() {
    let report = report("noisy neighbour");
    assert_near(&report.local_gb, &[120.0, 120.0]);
    let smallest = |of| scheme(&report, of).local_min_gb[1];
    assert!(smallest(Scheme::Equilibria) >= 119.0 && smallest(Scheme::Tpp) < 100.0);
}

#[test]
fn launch_order_does_not_matter() {
    let report = report("launch order");
    assert_near(&report.local_gb, &[120.0, 120.0]);
    let late = |of| scheme(&report, of).local_gb[0];
    assert!(late(Scheme::Tpp) < 115.0 && late(Scheme::NoControl) < 80.0);
}

#[test]
fn borrower_with_rarely_accessed_memory_keeps_all_that_others_leave() {
    let local_gb = |hot_fraction, tenants: [(f64, f64); 3]| {
        let named = [("A", tenants[0].1), ("B", tenants[1].1), ("C", tenants[2].1)];
        let mut spec = ScenarioSpec { capacity_gb: 240.0, seconds: 600.0, ..spec(&named) };
        for (tenant, (start_s, _)) in spec.tenants.iter_mut().zip(tenants) {
            (tenant.start_s, tenant.protection_gb, tenant.hot_fraction) = (start_s, 80.0, hot_fraction);
        }
        simulate(&Scenario::from_spec(&spec).unwrap()).local_gb
    };
    let late = [(0.0, 120.0), (100.0, 70.0), (150.0, 70.0)];
    assert_near(&local_gb(0.01, late), &[100.0, 70.0, 70.0]);
    for hot_fraction in [0.01, 0.1] {
        let together = [(0.0, 120.0), (0.0, 90.0), (0.0, 90.0)];
        assert_near(&local_gb(hot_fraction, together), &[80.0, 80.0, 80.0]);
    }
}

#[test]
fn burst_of_a_neighbour_leaves_protected_memory_in_place() {
    let report = report("burst");
    let smallest = |of| scheme(&report, of).local_min_gb[0];
    assert!(smallest(Scheme::Equilibria) >= 119.0, "{}", smallest(Scheme::Equilibria));
    assert!(smallest(Scheme::Tpp) <= 0.7 * scheme(&report, Scheme::Tpp).local_max_gb[0]);
    assert!(report.local_gb[1] >= 112.0, "the growing tenant reaches its protection");
}

#[test]
fn donated_protection_returns() {
    let report = report("returning tenant");
    assert_near(&report.local_gb, &[160.0, 80.0]);
    assert!(scheme(&report, Scheme::Equilibria).local_max_gb[0] >= 200.0, "the protection was donated");
}

#[test]
fn lower_tier_has_bounds_of_its_own() {
    let report = report("lower tiers");
    let tiers = &scheme(&report, Scheme::Equilibria).tiers_gb[0];
    assert_near(&tiers[..3], &[80.0, 40.0, 80.0]);
}

#[test]
fn thrashing_is_mitigated_within_four_periods() {
    let report = report("thrashing");
    assert_near(&report.local_gb, &[10.0, 50.0, 50.0]);
    let thrashing = report.thrashing.unwrap();
    assert!(thrashing.migrated_before > 100_000.0, "{thrashing:?}");
    assert!(thrashing.decrease >= 0.9 && thrashing.neighbour_gain >= 0.05, "{thrashing:?}");
}

fn spec(tenants: &[(&str, f64)]) -> ScenarioSpec {
    let tenant = |(name, demand_gb): &(&str, f64)| TenantSpec {
        name: (*name).to_owned(),
        start_s: 0.0,
        demand_gb: *demand_gb,
        protection_gb: 10.0,
        bound_gb: None,
        hot_fraction: 1.0,
    };
    let tenants = tenants.iter().map(tenant).collect();
    ScenarioSpec { name: "mine".to_owned(), capacity_gb: 20.0, seconds: 60.0, tenants }
}

#[test]
fn same_scenario_gives_the_same_report() {
    let scenario = Scenario::from_spec(&spec(&[("A", 15.0), ("B", 15.0)])).unwrap();
    let [first, second] = [(); 2].map(|()| format!("{:?}", simulate(&scenario)));
    assert_eq!(first, second);
}

/// Change that makes a scenario invalid.
type Change<'a> = &'a dyn Fn(&mut ScenarioSpec);

#[test]
fn invalid_scenarios_are_rejected_with_field_value_and_rule() {
    let error = |change: Change<'_>| {
        let mut spec = spec(&[("A", 15.0), ("B", 15.0)]);
        change(&mut spec);
        Scenario::from_spec(&spec).unwrap_err().to_string()
    };
    let cases: [(Change<'_>, &str); 14] = [
        (&|spec| spec.name.clear(), r#"invalid name = "": must have from 1 to 63 bytes"#),
        (&|spec| spec.capacity_gb = 0.0, "invalid capacity_gb = 0.0: must be a number from 1 to 4096"),
        (&|spec| spec.capacity_gb = f64::NAN, "invalid capacity_gb = NaN: must be a number from 1 to 4096"),
        (&|spec| spec.seconds = 1e300, "invalid seconds = 1e300: must be a number from 60 to 7200"),
        (&|spec| spec.seconds = 60.5, "invalid seconds = 60.5: must be a whole number"),
        (&|spec| spec.tenants.clear(), "invalid number of tenants = 0: must be from 1 to 64"),
        (
            &|spec| spec.tenants = vec![spec.tenants[0].clone(); 65],
            "invalid number of tenants = 65: must be from 1 to 64",
        ),
        (
            &|spec| spec.tenants[1].demand_gb = -1.0,
            "invalid tenants[1].demand_gb = -1.0: must be a number from 0 to 4096",
        ),
        (
            &|spec| spec.tenants[0].protection_gb = f64::INFINITY,
            "invalid tenants[0].protection_gb = inf: must be a number from 0 to 4096",
        ),
        (
            &|spec| spec.tenants[0].bound_gb = Some(-0.5),
            "invalid tenants[0].bound_gb = -0.5: must be a number from 0 to 4096",
        ),
        (
            &|spec| spec.tenants[0].start_s = 61.0,
            "invalid tenants[0].start_s = 61.0: must be a number from 0 to 60",
        ),
        (
            &|spec| spec.tenants[0].hot_fraction = 0.0,
            "invalid tenants[0].hot_fraction = 0.0: must be a number from 0.01 to 1",
        ),
        (&|spec| spec.tenants[1].name = "A".to_owned(), r#"invalid tenants[1].name = "A": must be unique"#),
        (
            &|spec| spec.tenants.iter_mut().for_each(|tenant| tenant.demand_gb = 3000.0),
            "invalid sum of demand_gb = 6000.0: must be a number from 0 to 4096",
        ),
    ];
    for (change, message) in cases {
        assert_eq!(error(change), message);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn lists_contain_each_unit_once(operations in prop::collection::vec((0_u8..6, any::<usize>()), 0..400)) {
        let mut memory = TenantMemory::default();
        for (operation, choice) in operations {
            match operation {
                0 | 1 => memory.allocate(choice % 2),
                2 if memory.len() > 0 => {
                    memory.access(choice % memory.len());
                }
                3 if memory.len() > 0 => memory.migrate(choice % memory.len(), choice % 2),
                4 => {
                    memory.free_last();
                }
                _ => {
                    let before = memory.units_in(FAST);
                    let victim = memory.select_victim(FAST);
                    prop_assert_eq!(victim.is_some(), before > 0);
                    victim.into_iter().for_each(|unit| memory.migrate(unit, 1));
                }
            }
            prop_assert_eq!(memory.units_in(0) + memory.units_in(1), memory.len());
            prop_assert!(memory.active_units() <= memory.len());
        }
        // Each unit of a tier is found as a victim exactly once.
        for _ in 0..memory.units_in(FAST) {
            let victim = memory.select_victim(FAST).unwrap();
            prop_assert_eq!(memory.tier_of(victim), FAST);
            memory.migrate(victim, 1);
        }
        prop_assert_eq!(memory.select_victim(FAST), None);
    }
}
