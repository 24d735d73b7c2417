//! Tests of the simulation: scenarios of the paper, and invalid scenarios.

use super::*;

fn report(name: &str) -> ScenarioReport {
    let all = scenarios();
    simulate(all.iter().find(|scenario| scenario.name() == name).unwrap())
}

fn assert_near(values: &[f64], expected: &[f64]) {
    let is_near = |(value, expected): (&f64, &f64)| (value - expected).abs() <= 0.01 * expected;
    assert!(values.iter().zip(expected).all(is_near), "{values:?}, expected {expected:?}");
}

#[test]
fn scenarios_of_the_paper_reach_its_local_memory() {
    assert_near(&report("120/40/40").local_gb, &[120.0, 40.0, 40.0]);
    assert_near(&report("120/90/90").local_gb, &[80.0, 80.0, 80.0]);
    assert_near(&report("120/70/70").local_gb, &[100.0, 70.0, 70.0]);
    assert_near(&report("120/40/40 bound 80").local_gb, &[80.0, 40.0, 40.0]);
}
