//! What a market promises, and the numbers of worked examples.

mod random;
mod vectors;

use super::*;

/// So many units that whole ones are parts of 1 to twelve digits.
pub(super) const FINE: Supply = Supply { memory_mib: 1_000_000_000_000, bandwidth_mb_s: 1_000_000_000_000 };

/// A bundle as parts of all that there is.
pub(super) fn part(bundle: Bundle) -> (f64, f64) {
    (bundle.memory / FINE.memory_mib as f64, bundle.bandwidth / FINE.bandwidth_mb_s as f64)
}

/// One on which market and tenants can be checked whatever it is made of.
pub(super) type Any = Box<dyn Utility>;

pub(super) fn cleared(tenants: &[Tenant<Any>]) -> (Outcome, Certificate) {
    let market = Market::new(FINE, tenants).unwrap();
    let outcome = market.clear(How::default());
    let certificate = market.certify(&outcome);
    (outcome, certificate)
}

pub(super) fn grid(value: impl Fn(f64, f64) -> f64 + 'static) -> Any {
    Box::new(Grid::new(FINE, move |bundle| {
        let (memory, bandwidth) = part(bundle);
        value(memory, bandwidth)
    }))
}

pub(super) fn equals(utilities: Vec<Any>) -> Vec<Tenant<Any>> {
    utilities.into_iter().map(|utility| Tenant::new(1.0, FINE, utility)).collect()
}

#[test]
fn a_market_without_tenants_supply_or_weights_is_refused_by_name() {
    let one = |weight| vec![Tenant::new(weight, FINE, grid(|c, _| c))];
    let error = |supply, tenants: &[Tenant<Any>]| Market::new(supply, tenants).map(drop).unwrap_err();
    assert_eq!(error(FINE, &[]), MarketError::NoTenants);
    assert_eq!(error(Supply { memory_mib: 0, ..FINE }, &one(1.0)), MarketError::NoSupply("memory"));
    assert_eq!(error(Supply { bandwidth_mb_s: 0, ..FINE }, &one(1.0)), MarketError::NoSupply("bandwidth"));
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let text = error(FINE, &one(weight)).to_string();
        let rule = "must be a number more than 0, and at least a billionth of all weights";
        assert_eq!(text, format!("tenant 0: weight {weight} {rule}"));
    }
    let beside = |weight| [one(1.0), one(weight)].into_iter().flatten().collect::<Vec<_>>();
    assert_eq!(error(FINE, &beside(1e-12)), MarketError::Weight { tenant: 1, value: 1e-12 });
    assert_eq!(error(FINE, &beside(1e308)), MarketError::Weight { tenant: 0, value: 1.0 });
    let all = 1 << 60;
    assert_eq!(error(Supply { memory_mib: all, ..FINE }, &one(1.0)), MarketError::TooMuch(all));
}

#[test]
fn limits_that_leave_no_room_for_a_fair_share_are_refused_by_name() {
    let supply = Supply { memory_mib: 300, bandwidth_mb_s: 100 };
    let tenants = |least, most| {
        let mut tenants = equals(vec![grid(|c, _| c), grid(|_, b| b), grid(|c, _| c)]);
        tenants.iter_mut().for_each(|tenant| tenant.most = supply.all());
        tenants[1].least.memory_mib = least;
        tenants[1].most.memory_mib = most;
        tenants
    };
    let check =
        |least, most| Market::new(supply, &tenants(least, most)).map(drop).map_err(|error| error.to_string());
    assert_eq!(check(100, 100), Ok(()), "a third of 300 is 100");
    assert_eq!(
        check(101, 300).unwrap_err(),
        "tenant 1: least memory 101 must not be more than its fair share, 100.000"
    );
    assert_eq!(
        check(0, 99).unwrap_err(),
        "tenant 1: most memory 99 must not be less than its fair share, 100.000"
    );
}

#[test]
fn whoever_is_alone_gets_all_that_there_is() {
    for utility in [grid(|c, _| c), grid(|_, b| b), grid(|_, _| 1.0), grid(|c, b| c * b)] {
        let (outcome, _) = cleared(&equals(vec![utility]));
        assert_eq!(outcome.shares, [FINE.all()]);
    }
}

#[test]
fn what_nobody_wants_is_handed_out_by_weight() {
    let mut tenants = equals(vec![grid(|_, _| 1.0), grid(|_, _| 1.0)]);
    tenants[1].weight = 3.0;
    let (outcome, certificate) = cleared(&tenants);
    let quarter = FINE.memory_mib / 4;
    assert_eq!(outcome.shares[0], Share { memory_mib: quarter, bandwidth_mb_s: quarter });
    assert_eq!(certificate.sold, Bundle::default());
    assert!((certificate.left_over.memory - 1.0).abs() < 1e-9);
}

#[test]
fn many_equals_whose_working_sets_do_not_fit_are_settled_at_once() {
    // Thirteen of these sets fit, and what remains is more than a share and less than a set: whoever is set aside, the others are no better off.
    let leaping = || grid(|c: f64, b: f64| if c >= 0.0721 { 2.0 * (0.5 + b) } else { 0.5 + b });
    let (outcome, certificate) = cleared(&equals((0..24).map(|_| leaping()).collect()));
    assert!(certificate.sharing_incentive >= 1.0 - 1e-6, "{:?} {certificate:?}", outcome.status);
}

#[test]
fn what_somebody_who_has_all_that_it_may_cannot_spend_is_for_the_others() {
    let product = || grid(|c: f64, b: f64| c * b);
    let mut tenants = equals(vec![grid(|c: f64, b: f64| c.min(0.1) + b.min(0.1)), product(), product()]);
    tenants[1].most =
        Share { memory_mib: 2 * FINE.memory_mib / 5, bandwidth_mb_s: 2 * FINE.bandwidth_mb_s / 5 };
    let (outcome, certificate) = cleared(&tenants);
    assert!((outcome.dividend - 1.5).abs() <= 0.01, "{certificate:?}");
    for (tenant, share) in [(0, 0.1), (1, 0.4), (2, 0.5)] {
        let (memory, bandwidth) = part(outcome.bought[tenant]);
        assert!((memory - share).abs() <= 0.01 && (bandwidth - share).abs() <= 0.01, "{tenant}: {outcome:?}");
    }
}

#[test]
fn who_spends_all_on_memory_has_bandwidth_for_nothing_if_that_has_no_price() {
    let supply = Supply { memory_mib: 300, bandwidth_mb_s: 100 };
    let utility = Grid::new(supply, |bundle: Bundle| bundle.memory * (1.0 + bundle.bandwidth.min(20.0)));
    let prices = Prices { memory: 1.0 / 300.0, bandwidth: 0.0 };
    let within = Limits { least: Bundle::default(), most: supply.all().into() };
    let asked = utility.asks(&Purse { budget: 1.0 / 3.0, prices }, &within, &mut Mark::default());
    assert_eq!(asked.bundle, Bundle { memory: 100.0, bandwidth: 20.0 });
}

#[test]
fn leftovers_do_not_push_anybody_over_its_most() {
    let mut tenants = equals(vec![grid(|_, _| 1.0), grid(|_, _| 1.0)]);
    tenants[0].most.memory_mib = FINE.memory_mib / 2;
    let (outcome, _) = cleared(&tenants);
    assert_eq!(outcome.shares[0].memory_mib, FINE.memory_mib / 2);
    assert_eq!(outcome.shares[1].memory_mib, FINE.memory_mib / 2);
}

#[test]
fn units_are_few_and_still_no_more_than_there_are() {
    let supply = Supply { memory_mib: 7, bandwidth_mb_s: 5 };
    let tenants: Vec<_> = (0..3)
        .map(|_| Tenant::new(1.0, supply, Grid::new(supply, |b: Bundle| (b.memory * b.bandwidth).sqrt())))
        .collect();
    let outcome = Market::new(supply, &tenants).unwrap().clear(How::default());
    let memory: u64 = outcome.shares.iter().map(|share| share.memory_mib).sum();
    let bandwidth: u64 = outcome.shares.iter().map(|share| share.bandwidth_mb_s).sum();
    assert_eq!((memory, bandwidth), (7, 5), "{:?}", outcome.shares);
}
