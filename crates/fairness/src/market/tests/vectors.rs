//! Worked examples with known outcomes, to nine digits if demand has a closed form.

use super::*;

/// Utility `f(c, b) = c²/2 + cb` of Spirit's figure 3, with its demand in closed form.
struct PaperUtility;

impl Utility for PaperUtility {
    fn value(&self, bundle: Bundle) -> f64 {
        let (c, b) = fractions(bundle);
        c * c / 2.0 + c * b
    }

    fn demand(&self, constraint: &BudgetConstraint, _: &Limits, _: &mut DemandHint) -> Demand {
        let BudgetConstraint { budget, prices } = *constraint;
        let all = Bundle::from(FINE_SUPPLY.all());
        let (price, other) = (prices.memory * all.memory, prices.bandwidth * all.bandwidth);
        let c = if price <= 0.5 { budget / price } else { budget / (3.0 * price - 1.0) };
        let c = c.min(1.0);
        let b = ((budget - price * c) / other).clamp(0.0, 1.0);
        Demand { bundle: Bundle { memory: c * all.memory, bandwidth: b * all.bandwidth }, satiated: false }
    }
}

/// Utility of a tenant that spends its whole budget on one good.
struct SingleGoodUtility(fn(Bundle) -> f64);

impl Utility for SingleGoodUtility {
    fn value(&self, bundle: Bundle) -> f64 {
        (self.0)(bundle)
    }

    fn demand(&self, constraint: &BudgetConstraint, within: &Limits, _: &mut DemandHint) -> Demand {
        let BudgetConstraint { budget, prices } = *constraint;
        let memory = Bundle { memory: (budget / prices.memory).min(within.max.memory), bandwidth: 0.0 };
        let bandwidth =
            Bundle { memory: 0.0, bandwidth: (budget / prices.bandwidth).min(within.max.bandwidth) };
        let bundle = if self.value(memory) > self.value(bandwidth) { memory } else { bandwidth };
        Demand { bundle, satiated: prices.cost_of(bundle) < budget * (1.0 - 1e-12) }
    }
}

/// Returns the three tenants of Spirit's figure 3.
fn paper_tenants(weights: [f64; 3]) -> Vec<Tenant<BoxedUtility>> {
    let utilities: [BoxedUtility; 3] = [
        Box::new(PaperUtility),
        Box::new(SingleGoodUtility(|bundle| bundle.bandwidth)),
        Box::new(SingleGoodUtility(|bundle| bundle.memory)),
    ];
    let tenants = utilities.into_iter().zip(weights);
    tenants.map(|(utility, weight)| Tenant::new(weight, FINE_SUPPLY, utility)).collect()
}

fn assert_near(actual: f64, expected: f64, tolerance: f64, context: &str) {
    assert!((actual - expected).abs() <= tolerance, "{context}: {actual}, expected {expected}");
}

#[test]
fn paper_example_clears_at_the_closed_form_prices() {
    let third = 1.0 / 3.0;
    // Columns: weights, memory price, bundle of the first tenant, bandwidth of the second, memory
    // of the third, value of the first.
    #[rustfmt::skip]
    let vectors = [
        ([third, third, third], 0.589197293, (0.434258546, 0.188580485), 0.811419515, 0.565741454, 0.176182929),
        ([0.5, 0.25, 0.25],     0.614356777, (0.593070331, 0.351732417), 0.648267583, 0.406929669, 0.384468270),
        ([0.2, 0.4, 0.4],       0.563299316, (0.289897949, 0.084040821), 0.915959179, 0.710102051, 0.066383672),
        ([0.1, 0.8, 0.1],       0.2,         (0.5,         0.0),         1.0,         0.5,         0.125),
        ([0.9, 0.05, 0.05],     0.658004215, (0.924012645, 0.853799368), 0.146200632, 0.075987355, 1.215821096),
    ];
    for (weights, price, (c1, b1), b2, c3, f1) in vectors {
        let (outcome, certificate) = clear_market(&paper_tenants(weights));
        let context = format!("{weights:?}, {:?}", outcome.status);
        assert_near(outcome.memory_price, price, 1e-9, &context);
        let [one, two, three] = [0, 1, 2].map(|tenant| fractions(outcome.bought[tenant]));
        for (actual, expected) in [(one.0, c1), (one.1, b1), (two.1, b2), (three.0, c3)] {
            assert_near(actual, expected, 1e-9, &context);
        }
        assert_near(PaperUtility.value(outcome.bought[0]), f1, 1e-9, &context);
        assert!(certificate.sharing_incentive >= 1.0 - 1e-9, "{context}: {certificate:?}");
        assert!(certificate.envy.unwrap() <= 1e-9, "{context}: {certificate:?}");
        assert_near(certificate.sold.memory, 1.0, 1e-9, &context);
        assert_near(certificate.sold.bandwidth, 1.0, 1e-9, &context);
    }
}

#[test]
fn unspent_budget_becomes_a_dividend() {
    let satiated = grid(|c: f64, b: f64| c.min(0.1) + b.min(0.1));
    let (outcome, certificate) =
        clear_market(&equal_tenants(vec![satiated, grid(|c: f64, b: f64| (c * b).sqrt())]));
    assert_near(outcome.dividend, 1.8, 1e-6, "dividend");
    assert_near(outcome.memory_price, 0.5, 1e-6, "price");
    for (tenant, share) in [(0, 0.1), (1, 0.9)] {
        let (memory, bandwidth) = fractions(outcome.bought[tenant]);
        assert_near(memory, share, 0.005, "memory");
        assert_near(bandwidth, share, 0.005, "bandwidth");
    }
    assert!(certificate.sharing_incentive >= 1.0, "{certificate:?}");
    assert!(certificate.envy.unwrap() <= 1e-6, "{certificate:?}");
}

#[test]
fn indifferent_tenant_leaves_both_goods_to_the_others() {
    let (outcome, _) = clear_market(&equal_tenants(vec![grid(|_, _| 1.0), grid(|_, b| b), grid(|c, _| c)]));
    assert_near(fractions(outcome.bought[1]).1, 1.0, 1e-6, "bandwidth");
    assert_near(fractions(outcome.bought[2]).0, 1.0, 1e-6, "memory");
}

#[test]
fn abundant_good_is_almost_free_and_the_other_good_is_split_by_weight() {
    let small = || grid(|c: f64, b: f64| c * (0.1 + b.min(0.2)));
    let (outcome, certificate) = clear_market(&equal_tenants(vec![small(), small(), small()]));
    assert_near(outcome.memory_price, 1.0, 0.005, "price");
    for bundle in &outcome.bought {
        assert_near(fractions(*bundle).0, 1.0 / 3.0, 0.005, "memory");
        assert_near(fractions(*bundle).1, 0.2, 1e-6, "bandwidth");
    }
    assert!(certificate.sharing_incentive >= 1.0 - 1e-9, "{certificate:?}");
}

#[test]
fn two_tenants_that_use_only_one_good_get_one_good_each() {
    let either = || grid(|c: f64, b: f64| c.max(b));
    let (outcome, certificate) = clear_market(&equal_tenants(vec![either(), either()]));
    assert_near(outcome.memory_price, 0.5, 1e-6, "price");
    let mut bought: Vec<_> = outcome.bought.iter().copied().map(fractions).collect();
    bought.sort_by(|a, b| a.0.total_cmp(&b.0));
    assert_near(bought[0].1, 1.0, 1e-6, "all bandwidth");
    assert_near(bought[1].0, 1.0, 1e-6, "all memory");
    assert!(certificate.envy.unwrap() <= 1e-6);
}

#[test]
fn marginal_tenant_of_three_gets_its_fair_share() {
    let either = || grid(|c: f64, b: f64| c.max(b));
    let tenants = equal_tenants(vec![either(), either(), either()]);
    let market = Market::new(FINE_SUPPLY, &tenants).unwrap();
    let marginal = |turn| {
        let outcome = market.clear(turn);
        let Status::OneMarginal { tenant } = outcome.status else { panic!("{:?}", outcome.status) };
        let (memory, bandwidth) = fractions(outcome.bought[tenant]);
        assert_near(memory, 1.0 / 3.0, 1e-6, "memory");
        assert_near(bandwidth, 1.0 / 3.0, 1e-6, "bandwidth");
        assert_near(market.certify(&outcome).envy.unwrap(), 1.0, 1e-5, "envy of the marginal tenant");
        tenant
    };
    let marginal_tenants: std::collections::BTreeSet<usize> = (0..3).map(marginal).collect();
    assert_eq!(marginal_tenants.len(), 3, "`turn` rotates the marginal tenant");
}

/// Returns six tenants with slowdown utilities: three are sensitive to memory, three to bandwidth.
fn six_tenants() -> Vec<Tenant<BoxedUtility>> {
    six_scaled_tenants(1.0)
}

/// Returns the tenants of [`six_tenants`], scaled for a supply that `times` copies of them share.
fn six_scaled_tenants(times: f64) -> Vec<Tenant<BoxedUtility>> {
    let all = Bundle::from(FINE_SUPPLY.all());
    let curve = |skew: f64, footprint: f64| {
        let knot = |at: u32| {
            let part = f64::from(at) / 64.0;
            Knot { memory: part * footprint * all.memory / times, misses: 1.0 - part.powf(skew) }
        };
        MissCurve::new((0..=64).map(knot).collect()).unwrap()
    };
    let slowdown = |skew, footprint, wanted| -> BoxedUtility {
        Box::new(Slowdown::new(curve(skew, footprint), 100.0, wanted * all.bandwidth / times).unwrap())
    };
    equal_tenants(vec![
        slowdown(0.2, 0.83, 0.3),
        slowdown(0.25, 0.79, 0.3),
        slowdown(0.3, 0.74, 0.3),
        slowdown(0.95, 1.6, 1.0),
        slowdown(0.97, 1.6, 1.0),
        slowdown(0.99, 1.6, 1.0),
    ])
}

#[test]
fn exact_and_grid_utilities_agree() {
    let (exact, certificate) = clear_market(&six_tenants());
    assert!(certificate.sharing_incentive >= 1.0 - 1e-9, "{certificate:?}");
    assert!(certificate.envy.unwrap() <= 1e-9, "{certificate:?}");
    assert!(certificate.overspent <= 2e-6, "{certificate:?}");
    let on_grid = six_tenants().into_iter().map(|tenant| Tenant {
        utility: Box::new(Grid::new(FINE_SUPPLY, move |bundle| tenant.utility.value(bundle))) as BoxedUtility,
        ..tenant
    });
    let (grid, _) = clear_market(&on_grid.collect::<Vec<_>>());
    assert_near(exact.memory_price, grid.memory_price, 0.01, "price");
    for (tenant, one) in six_tenants().iter().enumerate() {
        let ratio = one.utility.value(grid.bought[tenant]) / one.utility.value(exact.bought[tenant]);
        assert_near(ratio, 1.0, 0.02, "throughput");
    }
}

#[test]
fn replicated_tenants_clear_at_the_same_price() {
    let (few, _) = clear_market(&six_tenants());
    let (many, certificate) =
        clear_market(&(0..200).flat_map(|_| six_scaled_tenants(200.0)).collect::<Vec<_>>());
    assert_near(many.memory_price, few.memory_price, 2e-6, "price");
    assert!(certificate.sharing_incentive >= 1.0 - 1e-9, "{certificate:?}");
}
