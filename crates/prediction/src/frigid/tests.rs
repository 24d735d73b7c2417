//! Tests of the frigid-memory prediction: allocations within the risk limit, overprediction rates
//! within their targets, and no information from later outcomes.

use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use units::{Bytes, Fraction, UnixMs};

use super::{
    backtest::{self, BacktestResult, EmptyTestSet, Method, MethodScores, Score, VmSample},
    history::narrowest_group,
    margins::Margins,
    *,
};

const HOUR_MS: u64 = 3_600_000;

fn fraction(share: f64) -> Fraction {
    Fraction::new(share.clamp(0.0, 1.0)).unwrap()
}

fn rates(rates: &[f64]) -> Vec<Fraction> {
    rates.iter().map(|rate| fraction(*rate)).collect()
}

fn run(train: &[VmSample], test: &[VmSample], targets: &[f64]) -> Vec<BacktestResult> {
    backtest::run(train, test, &rates(targets)).unwrap()
}

/// Returns the sample of a VM of the customer `key` that starts at `hour` and runs for one hour.
fn row(key: &str, gib: u64, hour: u64, untouched: f64) -> VmSample {
    let groups = Groups { key: key.to_owned(), ..Groups::default() };
    let begins = UnixMs(hour * HOUR_MS);
    let request = VmRequest { groups, requested: Bytes::gib(gib), cores: Some(2.0), begins };
    let ended = UnixMs((hour + 1) * HOUR_MS - 1);
    let usage = VmUsage { p99: None, mean: Some(Bytes::gib(1)), busy_percent: None };
    VmSample { request, outcome: Outcome { ended, untouched: fraction(untouched), usage }, is_trusted: true }
}

/// Returns samples of 20 customers. The VMs of half of the customers leave 50 to 60 % untouched,
/// and all other VMs a random fraction.
fn customer_samples(rng: &mut Pcg64Mcg, rows: u64) -> Vec<VmSample> {
    let mut sample = |n: u64| {
        let customer = rng.random_range(0..20);
        let untouched = match customer {
            0..10 => 0.5 + 0.1 * rng.random::<f64>(),
            _ => rng.random(),
        };
        row(&format!("c{customer}"), 1 << rng.random_range(0..6), n / 4, untouched)
    };
    (0..rows).map(&mut sample).collect()
}

fn curve() -> impl Strategy<Value = QuantileCurve> {
    prop::array::uniform15(-0.2..1.2_f64).prop_map(QuantileCurve::new)
}

fn sample() -> impl Strategy<Value = CalibrationSample> {
    (curve(), 1.0..4.0_f64, 1..512_u64, 0.0..=1.0_f64).prop_map(|(curve, owner_margin, gib, untouched)| {
        CalibrationSample {
            begins: UnixMs(0),
            curve,
            owner_margin,
            requested: Bytes::gib(gib),
            untouched: fraction(untouched),
        }
    })
}

proptest! {
    #[test]
    fn allocation_never_exceeds_risk_limit(
        curve in curve(), gib in 1..512_u64, risk_multiplier in 0.0..1e4_f64, rate in 0.0..0.3_f64, owner_margin in 1.0..10.0_f64,
    ) {
        let risk_limit = RiskLimit::new(risk_multiplier, fraction(rate));
        let allocation = curve.allocation(Bytes::gib(gib), risk_limit, owner_margin);
        prop_assert!((0.0..=1.0).contains(&allocation.share));
        prop_assert!(allocation.risk <= 5.0 * rate, "the risk of a VM must not exceed five times the target rate");
        let higher_multiplier = curve.allocation(Bytes::gib(gib), RiskLimit { risk_multiplier: risk_multiplier * 2.0, ..risk_limit }, owner_margin);
        prop_assert!(
            higher_multiplier.risk <= allocation.risk && higher_multiplier.share <= allocation.share,
            "a higher risk multiplier must not increase the risk or the share",
        );
        let higher_margin = curve.allocation(Bytes::gib(gib), risk_limit, owner_margin * 1.5);
        prop_assert!(higher_margin.share <= allocation.share, "a higher owner margin must not increase the share");
    }

    #[test]
    fn risk_limit_keeps_overpredictions_within_target_rate(
        outcomes in prop::collection::vec(sample(), 1..300), rate in 0.01..0.5_f64,
    ) {
        let mut calibration = Calibration::default();
        outcomes.iter().for_each(|sample| calibration.add(None, *sample));
        let Some(risk_limit) = calibration.risk_limit(fraction(rate)) else { return Ok(()) };
        let overpredicted = outcomes.iter().filter(|sample| {
            let allocation = sample.curve.allocation(sample.requested, risk_limit, sample.owner_margin);
            allocation.share > sample.untouched.get()
        });
        prop_assert!(overpredicted.count() as f64 <= rate * outcomes.len() as f64);
    }
}

proptest! {
    // The number of cases is small, because each case trains dozens of models.
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn later_outcomes_do_not_change_predictions(seed: u64, hour in 15..60_u64) {
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        let past = customer_samples(&mut rng, 300);
        let test: Vec<VmSample> = customer_samples(&mut rng, 300).into_iter().filter(|row| row.request.begins.0 <= hour * HOUR_MS).collect();
        let mut other_future = past.clone();
        for row in other_future.iter_mut().filter(|row| row.outcome.ended.0 >= hour * HOUR_MS) {
            row.outcome.untouched = fraction(rng.random());
            row.outcome.usage = VmUsage::default();
        }
        prop_assert_eq!(run(&past, &test, &[0.1]), run(&other_future, &test, &[0.1]));
    }
}

/// Returns `count` calibration samples. The first `overpredicted` of them are overpredictions.
fn samples(overpredicted: u32, count: u32) -> impl Iterator<Item = CalibrationSample> {
    (0..count).map(move |n| CalibrationSample {
        begins: UnixMs(n.into()),
        curve: QuantileCurve::new([0.5; QUANTILE_LEVELS.len()]),
        owner_margin: 1.0,
        requested: Bytes::gib(8),
        untouched: fraction(if n < overpredicted { 0.1 } else { 0.9 }),
    })
}

#[test]
fn too_few_outcomes_give_no_risk_limit() {
    let mut calibration = Calibration::default();
    assert_eq!(calibration.risk_limit(fraction(0.1)), None);
    samples(0, 15).for_each(|sample| calibration.add(None, sample));
    assert_eq!(
        calibration.risk_limit(fraction(0.1)),
        None,
        "one assumed overprediction in 15 outcomes, plus the margin for chance, exceeds 10 %"
    );
    samples(0, 15).for_each(|sample| calibration.add(None, sample));
    assert!(calibration.risk_limit(fraction(0.1)).is_some());
}

#[test]
fn overpredictions_of_the_latest_outcomes_stop_allocations() {
    let mut calibration = Calibration::default();
    let allocation = |calibration: &Calibration| {
        let risk_limit = calibration.risk_limit(fraction(0.1));
        risk_limit.map(|risk_limit| {
            QuantileCurve::new([0.5; QUANTILE_LEVELS.len()]).allocation(Bytes::gib(8), risk_limit, 1.0).share
        })
    };
    samples(0, 1900).for_each(|sample| calibration.add(None, sample));
    assert_eq!(allocation(&calibration), Some(0.5));
    samples(50, 50).for_each(|sample| calibration.add(None, sample));
    assert!(
        allocation(&calibration).is_none_or(|share| share == 0.0),
        "50 of 1950 outcomes are below the target rate, but all of the latest 50 are overpredicted"
    );
}

#[test]
fn owner_margin_requires_significant_overprediction() {
    let mut calibration = Calibration::default();
    let owner = |name: &str| Some(name.to_owned());
    let owner_margin = |calibration: &Calibration, name: &str| calibration.owner_margin(owner(name).as_ref());
    samples(50, 99).for_each(|sample| calibration.add(owner("bad"), sample));
    assert_eq!(owner_margin(&calibration, "bad"), 1.0, "99 outcomes are too few");
    samples(1, 1).for_each(|sample| calibration.add(owner("bad"), sample));
    let margin = owner_margin(&calibration, "bad");
    assert!((4.5..5.5).contains(&margin), "10 % expected, 50 % observed: {margin}");
    samples(14, 100).for_each(|sample| calibration.add(owner("by chance"), sample));
    assert_eq!(owner_margin(&calibration, "by chance"), 1.0, "14 of 100 instead of 10 is not significant");
    samples(0, 100).for_each(|sample| calibration.add(owner("good"), sample));
    assert_eq!(owner_margin(&calibration, "good"), 1.0, "a margin is never below 1");
    samples(100, 100).for_each(|sample| calibration.add(None, sample));
    assert_eq!(calibration.owner_margin(None), 1.0, "the margin of an unknown owner is 1");
    samples(0, 2000).for_each(|sample| calibration.add(owner("bad"), sample));
    assert_eq!(owner_margin(&calibration, "bad"), 1.0, "old overpredictions decay");
}

#[test]
fn backtest_meets_target_rate_and_beats_fixed_share() {
    let mut rng = Pcg64Mcg::seed_from_u64(1);
    let (train, test) = (customer_samples(&mut rng, 3000), customer_samples(&mut rng, 3000));
    for BacktestResult {
        rate_target,
        rate_actual,
        frigid_share,
        slice_share,
        slice_rate,
        static_share,
        vms,
        ..
    } in run(&train, &test, &[0.01, 0.02, 0.04, 0.1])
    {
        let chance = 2.0 * (rate_target / f64::from(vms)).sqrt();
        assert!(rate_actual <= rate_target + chance, "rate {rate_actual}, target {rate_target}");
        assert!(rate_actual >= 0.3 * rate_target, "rate {rate_actual}, target {rate_target}");
        assert!(frigid_share > 0.15, "predicted share {frigid_share}");
        assert!(frigid_share > static_share, "share {frigid_share}, with a fixed share {static_share}");
        assert!((0.6 * frigid_share..frigid_share).contains(&slice_share), "{slice_share} of {frigid_share}");
        assert!(slice_rate <= rate_actual);
    }
}

#[test]
fn backtest_without_history_predicts_nothing() {
    let test: Vec<VmSample> = (0..40).map(|hour| row("", 8, hour, 0.9)).collect();
    let result = run(&[], &test, &[0.1])[0];
    assert_eq!((result.rate_actual, result.frigid_share), (0.0, 0.0));
}

#[test]
fn fixed_share_is_the_quantile_of_training_outcomes() {
    let train: Vec<VmSample> = (0..100_u32).map(|n| row("", 8, 0, f64::from(n) / 100.0)).collect();
    let test = [row("", 8, 2, 0.05), row("", 24, 2, 0.5)];
    let result = run(&train, &test, &[0.1])[0];
    assert_eq!((result.static_share, result.static_rate, result.vms), (0.1, 0.5, 2));
}

#[test]
fn vm_that_ends_when_another_starts_is_not_trained_on() {
    let ends = |hour: u64, ms: u64| UnixMs(hour * HOUR_MS + ms);
    let mut train: Vec<VmSample> = (0..100_u32).map(|n| row("", 8, 0, f64::from(n) / 100.0)).collect();
    let test = [row("", 8, 2, 0.5)];
    train.iter_mut().for_each(|sample| sample.outcome.ended = ends(2, 0));
    assert_eq!(run(&train, &test, &[0.1])[0].static_share, 0.0);
    train.iter_mut().for_each(|sample| sample.outcome.ended = ends(1, HOUR_MS - 1));
    assert_eq!(run(&train, &test, &[0.1])[0].static_share, 0.1);
}

#[test]
fn unreliable_outcomes_are_neither_trained_nor_tested() {
    let mut rng = Pcg64Mcg::seed_from_u64(2);
    let (train, test) = (customer_samples(&mut rng, 1000), customer_samples(&mut rng, 1000));
    let with_unreliable = |samples: &[VmSample]| -> Vec<VmSample> {
        let unreliable = (0..250).map(|hour| VmSample { is_trusted: false, ..row("c1", 32, hour, 0.0) });
        samples.iter().cloned().chain(unreliable).collect()
    };
    assert_eq!(run(&train, &test, &[0.1]), run(&with_unreliable(&train), &with_unreliable(&test), &[0.1]));
    let unreliable: Vec<VmSample> =
        (0..9).map(|hour| VmSample { is_trusted: false, ..row("c1", 32, hour, 0.0) }).collect();
    assert_eq!(backtest::run(&train, &unreliable, &rates(&[0.1])), Err(EmptyTestSet));
    assert_eq!(backtest::run(&train, &[], &rates(&[0.1])), Err(EmptyTestSet));
}

#[test]
fn margins_use_the_narrowest_group_with_an_outcome() {
    let mut history = OutcomeHistory::default();
    let mut outcomes = Vec::new();
    for n in 0..200_u64 {
        let groups = Groups { vm: format!("vm{}", n % 2), key: "c".into(), ..Groups::default() };
        let sample = row("", 8, n, if n % 2 == 0 { 0.5 } else { 0.8 } - 0.001 * (n % 10) as f64);
        let request = VmRequest { groups, ..sample.request };
        outcomes.push((history.features(&request), sample.outcome.untouched.get()));
        history.add(&request, &sample.outcome);
    }
    let margins = Margins::learn_margins(outcomes.iter().map(|(features, untouched)| (features, *untouched)));
    let request = |vm: &str, key: &str| {
        let groups = Groups { vm: vm.into(), key: key.into(), ..Groups::default() };
        VmRequest { groups, ..row("", 8, 300, 0.0).request }
    };
    let shares = |request: &VmRequest| margins.predict_shares(&history.features(request));
    assert_eq!(
        narrowest_group(&history.features(&request("vm1", "c"))).unwrap().0,
        0,
        "the VM name is narrower than the customer"
    );
    let of_vm1 = shares(&request("vm1", "c")).unwrap();
    assert!(of_vm1.iter().all(|share| (0.78..0.82).contains(share)), "{of_vm1:?}");
    assert_eq!(shares(&request("new", "new")), None, "no group has an outcome");
    assert_eq!(
        shares(&request("new", "c")),
        None,
        "no margins were learned for customers, because every VM has a narrower group"
    );
}

#[test]
fn group_features_cover_the_latest_outcomes_and_all_extremes() {
    let mut history = OutcomeHistory::default();
    for n in 0..100_u32 {
        let sample = row("c", 10, u64::from(n), if n == 0 { 0.0 } else { f64::from(n) / 100.0 });
        history.add(&sample.request, &sample.outcome);
    }
    let request = VmRequest {
        groups: Groups { key: "c".into(), ..Groups::default() },
        ..row("", 10, 200, 0.0).request
    };
    let features = history.features(&request);
    let read = |name: &str| {
        let at = feature_names().position(|other| other == format!("key.{name}")).unwrap();
        (features[at] * 1000.0).round() / 1000.0
    };
    // Features that are not extremes or counts cover the latest 64 outcomes, with untouched
    // fractions of 0.36 to 0.99.
    let expected = [
        ("count", 100.0),
        ("last", 0.99),
        ("before_last", 0.98),
        ("lowest", 0.0),
        ("lowest_share", 0.0),
        ("lowest_of_4", 0.96),
        ("second_lowest", 0.37),
        ("tenth", 0.42),
        ("median", 0.68),
        ("mean", 0.675),
        ("rise", 0.315),
        ("below_10", 0.1),
        ("below_70", 0.7),
    ];
    for (name, value) in expected {
        assert_eq!(read(name), value, "{name}");
    }
}

#[test]
fn vm_without_history_has_only_request_features() {
    let mut history = OutcomeHistory::default();
    let request = |groups: Groups| VmRequest {
        groups,
        requested: Bytes::gib(8),
        cores: None,
        begins: UnixMs(10 * HOUR_MS),
    };
    let known_features = |features: &[f64; FEATURE_COUNT]| -> Vec<String> {
        feature_names()
            .zip(features)
            .filter(|(_, x)| !x.is_nan())
            .map(|(name, x)| format!("{name}={x}"))
            .collect()
    };
    assert_eq!(known_features(&history.features(&request(Groups::default()))), ["requested_gib=8"]);
    let before = row("c", 16, 4, 0.75);
    history.add(&before.request, &before.outcome);
    let actual = known_features(&history.features(&request(Groups { key: "c".into(), ..Groups::default() })));
    // The earlier VM touched 4 of 16 GiB, which is half of the 8 GiB of the current request.
    let expected = [
        "requested_gib=8",
        "key.count=1",
        "key.hours_ago=5.000000277777778",
        "key.last=0.5",
        "key.lowest=0.5",
        "key.lowest_share=0.75",
        "key.lowest_of_4=0.5",
        "key.tenth=0.5",
        "key.median=0.5",
        "key.mean=0.5",
        "key.rise=0",
        "key.growth=0.5",
        "key.last_mean=0.875",
        "key.below_10=0",
        "key.below_30=0",
        "key.below_50=0",
        "key.below_70=0",
    ];
    assert_eq!(actual, expected);
}

fn scores(all: &[MethodScores], method: Method) -> &[Score] {
    &all.iter().find(|scores| scores.method == method).unwrap().scores
}

#[test]
fn compare_scores_all_methods_without_changing_results() {
    let mut rng = Pcg64Mcg::seed_from_u64(3);
    let (train, test) = (customer_samples(&mut rng, 1000), customer_samples(&mut rng, 500));
    let (results, all) = backtest::compare(&train, &test, &rates(&QUANTILE_LEVELS[..12])).unwrap();
    assert_eq!(results, run(&train, &test, &QUANTILE_LEVELS[..12]));
    for (result, (calibrated, fixed)) in
        results.iter().zip(scores(&all, Method::Calibrated).iter().zip(scores(&all, Method::FixedShare)))
    {
        assert_eq!((calibrated.rate, calibrated.share), (result.rate_actual, result.frigid_share));
        assert_eq!((calibrated.slice_rate, calibrated.slice_share), (result.slice_rate, result.slice_share));
        assert_eq!((fixed.rate, fixed.share), (result.static_rate, result.static_share));
    }
    let trees = scores(&all, Method::TreeQuantile);
    assert!(trees.is_sorted_by_key(|score| (score.rate, score.share)), "{trees:?}");
    // Subtracting a larger constant reduces the predicted memory and the rate of overpredictions.
    for rule in [Method::GroupMinimum, Method::OwnerMinimum] {
        let scores = scores(&all, rule);
        assert!(
            scores.is_sorted_by(|one, next| one.share > next.share && one.rate >= next.rate),
            "{scores:?}"
        );
    }
    assert_eq!(backtest::compare(&train, &[], &rates(&[0.1])), Err(EmptyTestSet));
}

#[test]
fn minimum_rules_use_only_ended_vms_of_the_same_groups() {
    let named = |vm: &str, sample: VmSample| {
        let groups = Groups { vm: vm.to_owned(), ..sample.request.groups.clone() };
        VmSample { request: VmRequest { groups, ..sample.request }, ..sample }
    };
    let train = [named("a", row("c", 8, 0, 0.75)), row("c", 8, 1, 0.5), row("c", 8, 9, 0.0)];
    let predicted = |test: VmSample| {
        let (_, all) = backtest::compare(&train, &[test], &rates(&[0.1])).unwrap();
        [Method::GroupMinimum, Method::OwnerMinimum].map(|method| scores(&all, method)[0].share)
    };
    assert_eq!(
        predicted(named("a", row("c", 8, 3, 0.5))),
        [0.75, 0.5],
        "the VM name is narrower than the customer"
    );
    assert_eq!(
        predicted(named("a", row("", 8, 3, 0.5))),
        [0.75, 0.75],
        "without a customer, the VM itself is the owner"
    );
    assert_eq!(predicted(row("c", 8, 1, 0.5)), [0.75, 0.75], "the second VM has not ended yet");
    assert_eq!(predicted(row("unknown", 8, 3, 0.5)), [0.0, 0.0]);
}
