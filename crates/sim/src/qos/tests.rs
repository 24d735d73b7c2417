//! Tests of the simulation of the QoS monitor.

use units::{Fraction, Ns};

use super::{report::BudgetChecker, *};

#[test]
fn monitor_flags_harmed_vms_and_few_others() {
    let fraction = |share: f64| Fraction::new(share).unwrap();
    let parameters = Parameters { seed: 7, vms: 2000, pdm: fraction(0.05), x: fraction(0.02) };
    let report = simulate(parameters).unwrap();
    assert!(report.harmed >= 20 && report.monitored > report.harmed, "{report:?}");
    assert!(report.monitor.flagged_harmed >= 0.95, "{report:?}");
    assert!(report.monitor.flagged_unharmed <= 0.01, "{report:?}");
    assert!(report.base_rate.flagged_harmed < 0.5, "{report:?}");
    assert_eq!((report.budget_exceeded, report.flaps), (0, 0), "{report:?}");
    assert!(report.requests > 0, "{report:?}");
}

#[test]
fn budget_checker_counts_requests_beyond_the_limit() {
    let mut checker = BudgetChecker::new(Fraction::new(0.02).unwrap(), 100);
    for second in [0, 1, 3599, 7300] {
        checker.record(Ns::secs(second));
    }
    assert_eq!(checker.exceeded(), 1, "the third request is beyond the limit of two");
}
