//! Tests of the market: its guarantees, its limits, and worked examples.

mod random;
mod vectors;

use super::*;
use crate::curve::{Knot, MissCurve};

/// Supply of 10¹² units of each good, so that rounding to whole units is negligible.
pub(super) const FINE_SUPPLY: Supply =
    Supply { memory_pages: 1_000_000_000_000, bandwidth_kb_s: 1_000_000_000_000 };

/// Converts a bundle to fractions of the supply.
pub(super) fn fractions(bundle: Bundle) -> (f64, f64) {
    let all = Bundle::from(FINE_SUPPLY.all());
    (bundle.memory / all.memory, bundle.bandwidth / all.bandwidth)
}

/// Boxed utility of any type.
pub(super) type BoxedUtility = Box<dyn Utility>;

/// Clears a market of these tenants with the supply [`FINE_SUPPLY`].
pub(super) fn clear_market(tenants: &[Tenant<BoxedUtility>]) -> (Outcome, Certificate) {
    let market = Market::new(FINE_SUPPLY, tenants).unwrap();
    let outcome = market.clear(0);
    let certificate = market.certify(&outcome);
    (outcome, certificate)
}

/// Creates a utility on a grid from a function of both goods as fractions of [`FINE_SUPPLY`].
pub(super) fn grid(value: impl Fn(f64, f64) -> f64 + 'static) -> BoxedUtility {
    grid_of(FINE_SUPPLY, value)
}

/// Creates a utility on a grid from a function of both goods as fractions of a supply.
pub(super) fn grid_of(supply: Supply, value: impl Fn(f64, f64) -> f64 + 'static) -> BoxedUtility {
    let all = Bundle::from(supply.all());
    let value = move |bundle: Bundle| value(bundle.memory / all.memory, bundle.bandwidth / all.bandwidth);
    Box::new(Grid::new(supply, value))
}

pub(super) fn equal_tenants(utilities: Vec<BoxedUtility>) -> Vec<Tenant<BoxedUtility>> {
    utilities.into_iter().map(|utility| Tenant::new(1.0, FINE_SUPPLY, utility)).collect()
}

#[test]
fn market_without_tenants_supply_or_weights_is_rejected() {
    let one = |weight| vec![Tenant::new(weight, FINE_SUPPLY, grid(|c, _| c))];
    let error =
        |supply, tenants: &[Tenant<BoxedUtility>]| Market::new(supply, tenants).map(drop).unwrap_err();
    assert_eq!(error(FINE_SUPPLY, &[]), MarketError::NoTenants);
    assert_eq!(
        error(Supply { memory_pages: 0, ..FINE_SUPPLY }, &one(1.0)),
        MarketError::EmptySupply("memory")
    );
    assert_eq!(
        error(Supply { bandwidth_kb_s: 0, ..FINE_SUPPLY }, &one(1.0)),
        MarketError::EmptySupply("bandwidth")
    );
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let text = error(FINE_SUPPLY, &one(weight)).to_string();
        let rule = "must be positive and at least a billionth of the sum of all weights";
        assert_eq!(text, format!("tenant 0: weight {weight} {rule}"));
    }
    let weights_1_and = |weight| [one(1.0), one(weight)].into_iter().flatten().collect::<Vec<_>>();
    assert_eq!(
        error(FINE_SUPPLY, &weights_1_and(1e-12)),
        MarketError::InvalidWeight { tenant: 1, value: 1e-12 }
    );
    assert_eq!(
        error(FINE_SUPPLY, &weights_1_and(1e308)),
        MarketError::InvalidWeight { tenant: 0, value: 1.0 }
    );
    let too_large = 1 << 60;
    assert_eq!(
        error(Supply { memory_pages: too_large, ..FINE_SUPPLY }, &one(1.0)),
        MarketError::SupplyTooLarge(too_large)
    );
}

#[test]
fn limits_that_exclude_the_fair_share_are_rejected() {
    let supply = Supply::new(300, 100);
    let tenants = |min, max| {
        let mut tenants = equal_tenants(vec![grid(|c, _| c), grid(|_, b| b), grid(|c, _| c)]);
        tenants.iter_mut().for_each(|tenant| tenant.max = supply.all());
        tenants[1].min.memory_pages = Share::new(min, 0).memory_pages;
        tenants[1].max.memory_pages = Share::new(max, 0).memory_pages;
        tenants
    };
    let check =
        |min, max| Market::new(supply, &tenants(min, max)).map(drop).map_err(|error| error.to_string());
    assert_eq!(check(100, 100), Ok(()), "the fair share itself is allowed");
    assert_eq!(
        check(101, 300).unwrap_err(),
        "tenant 1: minimum memory 101 must not exceed its fair share of 100.000"
    );
    assert_eq!(
        check(0, 99).unwrap_err(),
        "tenant 1: maximum memory 99 must not be below its fair share of 100.000"
    );
}

#[test]
fn single_tenant_gets_the_whole_supply() {
    for utility in [grid(|c, _| c), grid(|_, b| b), grid(|_, _| 1.0), grid(|c, b| c * b)] {
        let (outcome, _) = clear_market(&equal_tenants(vec![utility]));
        assert_eq!(outcome.shares, [FINE_SUPPLY.all()]);
    }
}

/// Cobb-Douglas utility: the tenant spends the fraction `memory` of its budget on memory.
struct Product {
    memory: f64,
}

impl Utility for Product {
    fn value(&self, bundle: Bundle) -> f64 {
        bundle.memory.powf(self.memory) * bundle.bandwidth.powf(1.0 - self.memory)
    }

    fn demand(&self, constraint: &BudgetConstraint, _: &Limits, _: &mut DemandHint) -> Demand {
        let BudgetConstraint { budget, prices } = *constraint;
        let bundle = Bundle {
            memory: self.memory * budget / prices.memory,
            bandwidth: (1.0 - self.memory) * budget / prices.bandwidth,
        };
        Demand { bundle, satiated: false }
    }
}

#[test]
fn cobb_douglas_market_clears_after_few_prices() {
    for (one, other) in [(0.9, 0.8), (0.5, 0.2), (0.01, 0.04)] {
        let utilities = [one, other].map(|memory| Box::new(Product { memory }) as BoxedUtility);
        let (outcome, _) = clear_market(&equal_tenants(utilities.into()));
        assert_eq!(outcome.status, Status::Exact);
        assert!(outcome.rounds <= 5, "{outcome:?}");
        assert!((outcome.memory_price - f64::midpoint(one, other)).abs() < 1e-9, "{outcome:?}");
    }
}

#[test]
fn unsold_supply_is_distributed_by_weight() {
    let mut tenants = equal_tenants(vec![grid(|_, _| 1.0), grid(|_, _| 1.0)]);
    tenants[1].weight = 3.0;
    let (outcome, certificate) = clear_market(&tenants);
    let quarter = FINE_SUPPLY.memory_pages / 4;
    assert_eq!(outcome.shares[0], Share { memory_pages: quarter, bandwidth_kb_s: quarter });
    assert_eq!(certificate.sold, Bundle::default());
    assert!((certificate.left_over.memory - 1.0).abs() < 1e-9);
}

#[test]
fn market_clears_if_working_sets_exceed_the_fair_share() {
    // The memory holds 13 of 24 working sets. The remainder of 0.063 is more than a fair share of
    // 0.042 and less than a working set of 0.072. Giving one tenant its demand does not help the
    // other tenants.
    let jumping = || grid(|c: f64, b: f64| if c >= 0.0721 { 2.0 * (0.5 + b) } else { 0.5 + b });
    let (outcome, certificate) = clear_market(&equal_tenants((0..24).map(|_| jumping()).collect()));
    assert!(certificate.sharing_incentive >= 1.0 - 1e-6, "{:?} {certificate:?}", outcome.status);
}

#[test]
fn budget_of_a_capped_tenant_becomes_a_dividend() {
    let product = || grid(|c: f64, b: f64| c * b);
    let mut tenants =
        equal_tenants(vec![grid(|c: f64, b: f64| c.min(0.1) + b.min(0.1)), product(), product()]);
    tenants[1].max = Share {
        memory_pages: 2 * FINE_SUPPLY.memory_pages / 5,
        bandwidth_kb_s: 2 * FINE_SUPPLY.bandwidth_kb_s / 5,
    };
    let (outcome, certificate) = clear_market(&tenants);
    assert!((outcome.dividend - 1.5).abs() <= 0.01, "{certificate:?}");
    for (tenant, share) in [(0, 0.1), (1, 0.4), (2, 0.5)] {
        let (memory, bandwidth) = fractions(outcome.bought[tenant]);
        assert!((memory - share).abs() <= 0.01 && (bandwidth - share).abs() <= 0.01, "{tenant}: {outcome:?}");
    }
}

#[test]
fn free_bandwidth_is_added_to_memory_only_demand() {
    let supply = Supply::new(300, 100);
    let utility = Grid::new(supply, |bundle: Bundle| bundle.memory * (1.0 + bundle.bandwidth.min(20.0)));
    let prices = Prices { memory: 1.0 / 300.0, bandwidth: 0.0 };
    let within = Limits { min: Bundle::default(), max: supply.all().into() };
    let demand =
        utility.demand(&BudgetConstraint { budget: 1.0 / 3.0, prices }, &within, &mut DemandHint::default());
    assert_eq!(demand.bundle, Bundle { memory: 100.0, bandwidth: 20.0 });
}

#[test]
fn unsold_supply_respects_maximum_shares() {
    let mut tenants = equal_tenants(vec![grid(|_, _| 1.0), grid(|_, _| 1.0)]);
    tenants[0].max.memory_pages = FINE_SUPPLY.memory_pages / 2;
    let (outcome, _) = clear_market(&tenants);
    assert_eq!(outcome.shares[0].memory_pages, FINE_SUPPLY.memory_pages / 2);
    assert_eq!(outcome.shares[1].memory_pages, FINE_SUPPLY.memory_pages / 2);
}

#[test]
fn supply_of_few_units_is_sold_completely() {
    let supply = Supply { memory_pages: 7, bandwidth_kb_s: 5 };
    let tenants: Vec<_> = (0..3)
        .map(|_| Tenant::new(1.0, supply, Grid::new(supply, |b: Bundle| (b.memory * b.bandwidth).sqrt())))
        .collect();
    let outcome = Market::new(supply, &tenants).unwrap().clear(0);
    assert_eq!(outcome.shares.iter().copied().sum::<Share>(), supply.all(), "{:?}", outcome.shares);
}

/// Returns a tenant whose throughput rises with memory, and another whose throughput is bound by
/// bandwidth.
fn two_caches(supply: Supply) -> [Tenant<BoxedUtility>; 2] {
    [(20_000.0, 100.0), (50_000.0, 1000.0)].map(|(footprint, wanted)| {
        let knots = vec![Knot { memory: 0.0, misses: 1.0 }, Knot { memory: footprint, misses: 0.01 }];
        let utility = Slowdown::new(MissCurve::new(knots).unwrap(), 100.0, wanted).unwrap();
        Tenant::new(1.0, supply, Box::new(utility) as BoxedUtility)
    })
}

#[test]
fn rounding_does_not_take_the_last_unit_below_a_cliff() {
    // The first tenant needs no bandwidth if all its memory is local, and stops otherwise.
    let supply = Supply::new(65_536, 4000);
    for footprint in [1000.5, 1000.501] {
        let knots = vec![Knot { memory: 0.0, misses: 1.0 }, Knot { memory: footprint, misses: 0.0 }];
        let loop_in_memory = Slowdown::new(MissCurve::new(knots).unwrap(), 100.0, 2000.0).unwrap();
        let first = Tenant::new(1.0, supply, Box::new(loop_in_memory) as BoxedUtility);
        let tenants: Vec<_> = [first].into_iter().chain(two_caches(supply)).collect();
        let market = Market::new(supply, &tenants).unwrap();
        let outcome = market.clear(0);
        assert_eq!(outcome.bought[0], Bundle { memory: footprint, bandwidth: 0.0 });
        let gain = market.gain(0, outcome.shares[0].into());
        assert!(gain >= 1.0, "gain {gain} with {:?}", outcome.shares[0]);
        assert!(market.certify(&outcome).sharing_incentive >= 1.0 - 1e-6, "{outcome:?}");
    }
}

#[test]
fn certificate_is_of_the_shares_that_tenants_receive() {
    let supply = Supply { memory_pages: 5, bandwidth_kb_s: 3 };
    let product = || -> BoxedUtility { Box::new(Grid::new(supply, |b: Bundle| b.memory * b.bandwidth)) };
    let tenants = [Tenant::new(1.0, supply, product()), Tenant::new(1.0, supply, product())];
    let market = Market::new(supply, &tenants).unwrap();
    let outcome = market.clear(0);
    let value = |tenant: usize| market.value(tenant, outcome.shares[tenant].into());
    let (less, more) = (value(0).min(value(1)), value(0).max(value(1)));
    let certificate = market.certify(&outcome);
    assert_eq!(certificate.sharing_incentive, less / market.value(0, market.fair_share(0)));
    assert_eq!(certificate.envy, Some(more / less - 1.0));
}
