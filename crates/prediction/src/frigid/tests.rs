//! Tests of the frigid-memory prediction: allocations within the risk limit, overprediction rates
//! within their targets, and no information from later outcomes.

use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use units::{Bytes, Fraction, UnixMs};

use super::{
    backtest::{self, BacktestResult, EmptyTestSet, Evaluation, Method, MethodScores, Score, VmSample},
    history::OwnerHistory,
    model::conformal_rank,
    *,
};

const HOUR_MS: u64 = 3_600_000;

fn fraction(share: f64) -> Fraction {
    Fraction::new(share.clamp(0.0, 1.0)).unwrap()
}

fn rates(rates: &[f64]) -> Vec<Fraction> {
    rates.iter().map(|rate| fraction(*rate)).collect()
}

fn evaluate(train: &[VmSample], test: &[VmSample], targets: &[f64]) -> Vec<Evaluation> {
    backtest::run(train, test, &rates(targets)).unwrap()
}

fn run(train: &[VmSample], test: &[VmSample], targets: &[f64]) -> Vec<BacktestResult> {
    evaluate(train, test, targets).into_iter().map(|evaluation| evaluation.result).collect()
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
    (curve(), 1..512_u64, 0.0..=1.0_f64, 0..20_u32).prop_map(|(curve, gib, untouched, owner)| {
        CalibrationSample {
            begins: UnixMs(0),
            owner: format!("owner {owner}"),
            curve,
            requested: Bytes::gib(gib),
            untouched: fraction(untouched),
        }
    })
}

fn calibrate(samples: impl IntoIterator<Item = CalibrationSample>) -> Calibration {
    let mut calibration = Calibration::default();
    samples.into_iter().for_each(|sample| calibration.add(sample));
    calibration
}

/// Returns whether the sample would have been overpredicted, or `None` if its size class has too few
/// outcomes.
fn is_overpredicted(sample: &CalibrationSample, risk_limit: &RiskLimit) -> Option<bool> {
    let allocation = sample.curve.allocation(sample.requested, risk_limit)?;
    Some(allocation.to_fraction().of(sample.requested) > sample.untouched.of(sample.requested))
}

proptest! {
    #[test]
    fn allocation_never_exceeds_risk_limit(
        curve in curve(), gib in 1..512_u64, risk_multiplier in 0.0..1e4_f64, rate in 0.0..0.3_f64,
    ) {
        let size_bounds = SizeBounds([Bytes::gib(4), Bytes::gib(64)]);
        let limit = |multiplier| RiskLimit {
            size_bounds,
            risk_multipliers: [Some(multiplier); SIZE_CLASSES],
            risk_max: 3.0 * rate,
        };
        let allocation = curve.allocation(Bytes::gib(gib), &limit(risk_multiplier)).unwrap();
        prop_assert!((0.0..=1.0).contains(&allocation.share));
        prop_assert!(allocation.risk <= 3.0 * rate, "the risk of a VM must not exceed three times the target rate");
        let higher_multiplier = curve.allocation(Bytes::gib(gib), &limit(risk_multiplier * 2.0)).unwrap();
        prop_assert!(
            higher_multiplier.risk <= allocation.risk && higher_multiplier.share <= allocation.share,
            "a higher risk multiplier must not increase the risk or the share",
        );
    }

    #[test]
    fn risk_limit_keeps_each_size_class_within_target_rate(
        outcomes in prop::collection::vec(sample(), 1..600), rate in 0.01..0.5_f64,
    ) {
        let Some(risk_limit) = calibrate(outcomes.clone()).risk_limit(fraction(rate)) else { return Ok(()) };
        for class in 0..SIZE_CLASSES {
            let in_class = outcomes.iter().filter(|sample| risk_limit.size_bounds.class(sample.requested) == class);
            let overpredicted: Vec<bool> =
                in_class.filter_map(|sample| is_overpredicted(sample, &risk_limit)).collect();
            let count = overpredicted.iter().filter(|is_overpredicted| **is_overpredicted).count();
            prop_assert!(count as f64 <= rate * overpredicted.len() as f64, "class {}", class);
        }
    }

    #[test]
    fn size_classes_of_distinct_sizes_are_thirds(sizes in prop::collection::btree_set(1..10_000_u64, 1..200)) {
        let sizes: Vec<Bytes> = sizes.into_iter().map(Bytes::mib).collect();
        let bounds = SizeBounds::thirds(sizes.clone()).unwrap();
        for class in 0..SIZE_CLASSES {
            let vms = sizes.iter().filter(|size| bounds.class(**size) == class).count();
            prop_assert!(vms.abs_diff(sizes.len() / SIZE_CLASSES) <= 1, "class {}: {} of {}", class, vms, sizes.len());
        }
    }

    #[test]
    fn conformal_rank_is_the_largest_valid_rank(n in 1..5000_usize, level in 0.001..0.999_f64) {
        let rank = conformal_rank(n, level).unwrap_or(0);
        // Of n + 1 exchangeable numbers, the last is below the k-th lowest of the others with
        // probability k / (n + 1).
        prop_assert!(rank as f64 <= level * (n + 1) as f64);
        prop_assert!(rank == n || (rank + 1) as f64 > level * (n + 1) as f64);
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

/// Returns `count` calibration samples of VMs of 8 GiB, of `owners` owners in turn. The first
/// `overpredicted` of the samples are overpredictions.
fn samples(overpredicted: u32, count: u32, owners: u32) -> impl Iterator<Item = CalibrationSample> {
    (0..count).map(move |n| CalibrationSample {
        begins: UnixMs(n.into()),
        owner: format!("owner {}", n % owners),
        curve: QuantileCurve::new([0.5; QUANTILE_LEVELS.len()]),
        requested: Bytes::gib(8),
        untouched: fraction(if n < overpredicted { 0.1 } else { 0.9 }),
    })
}

/// Returns the allocated share of a VM of 8 GiB at a target rate of 10 %, or `None` if there are too
/// few outcomes.
fn allocated_share(calibration: &Calibration) -> Option<f64> {
    let curve = QuantileCurve::new([0.5; QUANTILE_LEVELS.len()]);
    Some(curve.allocation(Bytes::gib(8), &calibration.risk_limit(fraction(0.1))?)?.share)
}

#[test]
fn too_few_outcomes_give_no_risk_limit() {
    assert_eq!(Calibration::default().risk_limit(fraction(0.1)), None);
    assert_eq!(
        calibrate(samples(0, 26, 26)).risk_limit(fraction(0.1)),
        None,
        "one assumed overprediction in 26 outcomes, plus 1.645 standard deviations, exceeds 10 %"
    );
    assert_eq!(allocated_share(&calibrate(samples(0, 27, 27))), Some(0.5));
}

#[test]
fn overpredictions_of_one_owner_are_not_independent() {
    // 60 of 1000 outcomes are overpredicted. If they are independent, the bound on the rate is 7 %.
    assert_eq!(allocated_share(&calibrate(samples(60, 1000, 1000))), Some(0.5));
    let of_one_owner = samples(60, 1000, 1000).map(|sample| {
        let is_overpredicted = sample.untouched.get() < 0.5;
        CalibrationSample { owner: if is_overpredicted { "one".into() } else { sample.owner }, ..sample }
    });
    let share = allocated_share(&calibrate(of_one_owner));
    assert!(share.is_none_or(|share| share == 0.0), "the bound is 6 % + 1.645 · 5.6 %: {share:?}");
}

#[test]
fn overpredicted_size_class_does_not_stop_other_classes() {
    let of_size = |overpredicted, gib| {
        samples(overpredicted, 300, 300)
            .map(move |sample| CalibrationSample { requested: Bytes::gib(gib), ..sample })
    };
    let calibration = calibrate(of_size(0, 1).chain(of_size(0, 8)).chain(of_size(200, 64)));
    let risk_limit = calibration.risk_limit(fraction(0.1)).unwrap();
    let curve = QuantileCurve::new([0.5; QUANTILE_LEVELS.len()]);
    let share = |gib| curve.allocation(Bytes::gib(gib), &risk_limit).map(|allocation| allocation.share);
    assert_eq!((share(1), share(8)), (Some(0.5), Some(0.5)));
    assert!(share(64).is_none_or(|share| share == 0.0), "{risk_limit:?}");
}

#[test]
fn predictions_are_limited_by_the_history_of_the_owner() {
    let curve = QuantileCurve::new([0.8; QUANTILE_LEVELS.len()]);
    let limited = curve.limited_by(OwnerHistory { lowest: 0.25, tenth: 0.5 });
    for (at, level) in QUANTILE_LEVELS.into_iter().enumerate() {
        let expected = if level <= 0.1 { 0.25 } else { 0.5 };
        assert_eq!(limited.untouched_at_level(at), expected, "level {level}");
    }
    let low = QuantileCurve::new([0.125; QUANTILE_LEVELS.len()]);
    assert_eq!(low.limited_by(OwnerHistory { lowest: 0.25, tenth: 0.5 }), low);
}

#[test]
fn predictions_are_rounded_down_to_one_128th() {
    let owner = OwnerHistory { lowest: 0.9977, tenth: 1.0 };
    let limited = QuantileCurve::new([1.0; QUANTILE_LEVELS.len()]).limited_by(owner);
    assert_eq!(limited.untouched_at_level(0), 127.0 / 128.0);
    assert_eq!(limited.untouched_at_level(QUANTILE_LEVELS.len() - 1), 1.0);
}

/// Returns a predictor with a model that predicts 75 % for every VM, and no outcomes.
fn predictor_without_outcomes() -> OnlinePredictor {
    let mut predictor = OnlinePredictor::default();
    let features = OutcomeHistory::default().features(&row("c", 8, 0, 0.75).request);
    predictor.install_model(Model::train(&[features; 60], &[0.75; 60], 1), Calibration::default());
    predictor
}

/// Returns the prediction at the lowest quantile level for a VM of the customer `key` that starts at
/// `hour`.
fn predict(predictor: &OnlinePredictor, key: &str, hour: u64) -> Option<f64> {
    let curve = predictor.assess_vm(&row(key, 8, hour, 0.0).request).prediction?;
    Some(curve.untouched_at_level(0))
}

#[test]
fn vm_of_new_owner_has_no_prediction() {
    let mut predictor = predictor_without_outcomes();
    assert_eq!(predict(&predictor, "c", 24), None);
    let sample = row("c", 8, 0, 0.75);
    predictor.record_outcome(&sample.request, &sample.outcome, None);
    assert_eq!(predict(&predictor, "c", 24), Some(0.75));
    assert_eq!(predict(&predictor, "d", 24), None, "no VM of this owner has ended");
    assert_eq!(predict(&predictor, "", 24), None, "the owner is unknown");
}

#[test]
fn owner_needs_four_ended_vms_for_predictions_on_its_first_day() {
    let mut predictor = predictor_without_outcomes();
    for (hour, prediction) in [(9, None), (5, None), (7, None), (8, Some(0.75))] {
        let sample = row("c", 8, hour, 0.75);
        predictor.record_outcome(&sample.request, &sample.outcome, None);
        assert_eq!(predict(&predictor, "c", 28), prediction, "after the VM of hour {hour}");
    }
    let mut predictor = predictor_without_outcomes();
    for hour in [9, 5, 7] {
        let sample = row("c", 8, hour, 0.75);
        predictor.record_outcome(&sample.request, &sample.outcome, None);
    }
    assert_eq!(predict(&predictor, "c", 29), Some(0.75), "the first VM started a day before");
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
        assert!(rate_actual >= 0.1 * rate_target, "rate {rate_actual}, target {rate_target}");
        assert!(frigid_share > 0.1, "predicted share {frigid_share}");
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

/// Returns samples of VMs of one owner that leave 0 to 99 % of their memory untouched, twice, and a
/// history that is long enough for a forecast at a target rate of 10 %.
fn spread_samples() -> Vec<VmSample> {
    let spread = |hour| (0..100_u32).map(move |n| row("c", 8, hour, f64::from(n) / 100.0));
    (0..4).flat_map(spread).collect()
}

#[test]
fn fixed_share_is_the_quantile_of_training_outcomes() {
    let test = [row("c", 8, 6, 0.05), row("c", 8, 6, 0.5)];
    let result = run(&spread_samples(), &test, &[0.1])[0];
    assert_eq!((result.static_share, result.static_rate, result.vms), (0.1, 0.5, 2));
}

#[test]
fn vm_that_ends_when_another_starts_is_not_trained_on() {
    let test = [row("c", 8, 6, 0.5)];
    let mut train = spread_samples();
    train.iter_mut().for_each(|sample| sample.outcome.ended = UnixMs(6 * HOUR_MS));
    let result = run(&train, &test, &[0.1])[0];
    assert_eq!((result.vms, result.vms_without_forecast), (0, 1));
}

#[test]
fn vms_without_forecast_are_counted_but_not_scored() {
    let mut rng = Pcg64Mcg::seed_from_u64(4);
    let train = customer_samples(&mut rng, 2000);
    let test = [row("c1", 8, 600, 0.55), row("new", 24, 600, 0.0), row("", 8, 600, 0.0)];
    let evaluation = &evaluate(&train, &test, &[0.1])[0];
    assert_eq!((evaluation.result.vms, evaluation.result.vms_without_forecast), (1, 2));
    assert_eq!(evaluation.memory_without_forecast, 0.8);
    assert_eq!((evaluation.result.rate_actual, evaluation.by_owner.owners), (0.0, 1));
}

#[test]
fn parts_of_an_evaluation_sum_to_the_whole() {
    let mut rng = Pcg64Mcg::seed_from_u64(5);
    let (train, test) = (customer_samples(&mut rng, 2000), customer_samples(&mut rng, 1000));
    for Evaluation { result, by_size, by_owner, rate_margin, .. } in evaluate(&train, &test, &[0.04, 0.1]) {
        let overpredicted = result.rate_actual * f64::from(result.vms);
        assert!(overpredicted > 0.0 && rate_margin > 0.0);
        assert_eq!(by_size.iter().map(|class| class.vms).sum::<u32>(), result.vms);
        let of_classes: f64 = by_size.iter().map(|class| class.rate * f64::from(class.vms)).sum();
        assert!((of_classes - overpredicted).abs() < 1e-6, "{of_classes} {overpredicted}");
        assert!(by_size.windows(2).all(|two| two[0].largest < two[1].smallest), "{by_size:?}");
        let of_worst: u32 = by_owner.worst.iter().map(|owner| owner.overpredicted).sum();
        assert!((1.0..=overpredicted + 1e-6).contains(&f64::from(of_worst)), "{by_owner:?}");
        assert!(by_owner.worst.is_sorted_by(|one, next| one.overpredicted >= next.overpredicted));
        assert!(by_owner.owners == 20 && by_owner.above_target <= 20);
    }
}

#[test]
fn simple_rule_subtracts_a_constant_from_the_lowest_of_the_owner() {
    let train = spread_samples();
    let evaluation = &evaluate(&train, &[row("c", 8, 6, 0.5)], &[0.1])[0];
    // The lowest untouched fraction of the owner is 0, so the rule predicts nothing.
    assert_eq!((evaluation.rule.share, evaluation.rule.rate), (0.0, 0.0));
    let mut train: Vec<VmSample> =
        train.iter().map(|sample| row("c", 8, sample.request.begins.0 / HOUR_MS, 0.5)).collect();
    let test = [row("c", 8, 6, 0.5), row("c", 8, 6, 0.5)];
    let rule = evaluate(&train, &test, &[0.1])[0].rule;
    assert_eq!((rule.share, rule.rate, rule.share_in_hindsight), (0.5, 0.0, 0.5));
    // One outcome of 400 does not change the constant, but the lowest untouched fraction.
    train[399] = row("c", 8, 3, 0.25);
    let rule = evaluate(&train, &test, &[0.1])[0].rule;
    assert_eq!((rule.share, rule.rate, rule.share_in_hindsight), (0.25, 0.0, 0.25));
}

#[test]
fn cross_validation_does_not_learn_from_held_out_owners() {
    let mut rng = Pcg64Mcg::seed_from_u64(6);
    let samples = customer_samples(&mut rng, 3000);
    let all = run(&[], &samples, &[0.1])[0];
    let folds = backtest::cross_validate(&samples, 4, &rates(&[0.1])).unwrap()[0].result;
    assert_eq!(folds.vms + folds.vms_without_forecast, 3000);
    assert!(folds.rate_actual > 0.0 && folds.frigid_share > 0.1 && folds != all, "{folds:?}");
    // A single fold holds out every owner, so there is no model.
    let single = backtest::cross_validate(&samples, 1, &rates(&[0.1])).unwrap()[0].result;
    assert_eq!((single.vms, single.vms_without_forecast), (0, 3000));
    assert_eq!(backtest::cross_validate(&[], 4, &rates(&[0.1])), Err(EmptyTestSet));
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
    let (evaluations, all) = backtest::compare(&train, &test, &rates(&QUANTILE_LEVELS[..12])).unwrap();
    assert_eq!(evaluations, evaluate(&train, &test, &QUANTILE_LEVELS[..12]));
    for (Evaluation { result, .. }, (calibrated, fixed)) in
        evaluations.iter().zip(scores(&all, Method::Calibrated).iter().zip(scores(&all, Method::FixedShare)))
    {
        // The scores are of all VMs, the result of the VMs with a forecast.
        let vms = f64::from(result.vms);
        let with_forecast = vms / (vms + f64::from(result.vms_without_forecast));
        assert!((calibrated.rate - result.rate_actual * with_forecast).abs() < 1e-9, "{result:?}");
        assert!((calibrated.slice_rate - result.slice_rate * with_forecast).abs() < 1e-9, "{result:?}");
        assert!(calibrated.share <= result.frigid_share && calibrated.slice_share <= result.slice_share);
        if result.vms_without_forecast == 0 {
            assert_eq!((fixed.rate, fixed.share), (result.static_rate, result.static_share));
        }
    }
    assert!(scores(&all, Method::Calibrated).last().unwrap().share > 0.1);
    for method in Method::ALL {
        let scores = scores(&all, method);
        assert!(scores.is_sorted_by_key(|score| (score.rate, score.share)), "{method:?}: {scores:?}");
        assert!(scores[0].share < scores[11].share, "{method:?}: {scores:?}");
    }
    assert_eq!(backtest::compare(&train, &[], &rates(&[0.1])), Err(EmptyTestSet));
}

#[test]
fn history_of_an_owner_contains_only_its_ended_vms() {
    let named = |vm: &str, sample: VmSample| {
        let groups = Groups { vm: vm.to_owned(), ..sample.request.groups.clone() };
        VmSample { request: VmRequest { groups, ..sample.request }, ..sample }
    };
    let mut history = OutcomeHistory::default();
    for ended in [named("a", row("c", 8, 0, 0.75)), row("c", 8, 1, 0.5)] {
        history.add(&ended.request, &ended.outcome);
    }
    let lowest = |sample: VmSample| {
        let features = history.features(&sample.request);
        OwnerHistory::find(&sample.request.groups, &features).map(|owner| owner.lowest)
    };
    assert_eq!(lowest(named("a", row("c", 8, 3, 0.5))), Some(0.5), "the owner is the customer");
    assert_eq!(lowest(named("a", row("", 8, 3, 0.5))), Some(0.75), "without a customer, the VM is the owner");
    assert_eq!(lowest(row("c", 16, 3, 0.5)), Some(0.75), "4 of 16 GiB are touched");
    assert_eq!(lowest(row("unknown", 8, 3, 0.5)), None);
    assert_eq!(lowest(row("", 8, 3, 0.5)), None);
}
