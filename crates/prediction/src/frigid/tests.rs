//! What forecasts promise: risks in order, no more hit than asked for, nothing known before its time.

use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use units::{Bytes, Fraction, UnixMs};

use super::{
    trial::{self, Row, Verdict},
    *,
};

const HOUR_MS: u64 = 3_600_000;

fn fraction(share: f64) -> Fraction {
    Fraction::new(share.clamp(0.0, 1.0)).unwrap()
}

/// A VM of a customer, on for an hour from this one on.
fn row(key: &str, gib: u64, hour: u64, untouched: f64) -> Row {
    let groups = Groups { key: key.to_owned(), ..Groups::default() };
    let begins = UnixMs(hour * HOUR_MS);
    let ask = Ask { groups, requested: Bytes::gib(gib), cores: Some(2.0), begins };
    let ended = UnixMs((hour + 1) * HOUR_MS - 1);
    let usage = Usage { p99: None, mean: Some(Bytes::gib(1)), busy_percent: None };
    Row { ask, outcome: Outcome { ended, untouched: fraction(untouched), usage }, sound: true }
}

/// Customers with habits of their own: some always leave a half, some anything.
fn customers(rng: &mut Pcg64Mcg, rows: u64) -> Vec<Row> {
    let mut one = |n: u64| {
        let customer = rng.random_range(0..20);
        let untouched = match customer {
            0..10 => 0.5 + 0.1 * rng.random::<f64>(),
            _ => rng.random(),
        };
        row(&format!("c{customer}"), 1 << rng.random_range(0..6), n / 4, untouched)
    };
    (0..rows).map(&mut one).collect()
}

fn curve() -> impl Strategy<Value = Curve> {
    prop::array::uniform15(-0.2..1.2_f64).prop_map(Curve::new)
}

fn judged() -> impl Strategy<Value = Judged> {
    (curve(), 1.0..4.0_f64, 1..512_u64, 0.0..=1.0_f64).prop_map(|(curve, caution, gib, untouched)| Judged {
        curve,
        caution,
        requested: Bytes::gib(gib),
        untouched: fraction(untouched),
    })
}

proptest! {
    #[test]
    fn a_stake_is_a_share_and_never_riskier_than_allowed(
        curve in curve(), gib in 1..512_u64, price in 0.0..1e4_f64, rate in 0.0..0.3_f64, caution in 1.0..10.0_f64,
    ) {
        let appetite = Appetite::new(price, rate);
        let stake = curve.stake(Bytes::gib(gib), appetite, caution);
        prop_assert!((0.0..=1.0).contains(&stake.share));
        prop_assert!(stake.risk <= appetite.risk_max);
        let dearer = curve.stake(Bytes::gib(gib), Appetite { price: price * 2.0, ..appetite }, caution);
        prop_assert!(dearer.risk <= stake.risk && dearer.share <= stake.share, "dearer risk, and more of it");
        let careful = curve.stake(Bytes::gib(gib), appetite, caution * 1.5);
        prop_assert!(careful.share <= stake.share, "more caution, and more taken");
    }

    #[test]
    fn no_more_outcomes_than_asked_for_would_have_been_hit_at_the_price_that_they_make(
        outcomes in prop::collection::vec(judged(), 1..300), rate in 0.01..0.5_f64,
    ) {
        let mut calibration = Calibration::default();
        outcomes.iter().for_each(|judged| calibration.add("", judged.clone()));
        let Some(appetite) = calibration.appetite(rate) else { return Ok(()) };
        let hits = outcomes.iter().filter(|judged| {
            let stake = judged.curve.stake(judged.requested, appetite, judged.caution);
            stake.share > judged.untouched.get()
        });
        prop_assert!(hits.count() as f64 <= rate * outcomes.len() as f64);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))] // each trains dozens of models

    #[test]
    fn what_comes_later_changes_no_forecast(seed: u64, hour in 15..60_u64) {
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        let past = customers(&mut rng, 300);
        let test: Vec<Row> = customers(&mut rng, 300).into_iter().filter(|row| row.ask.begins.0 <= hour * HOUR_MS).collect();
        let mut other_future = past.clone();
        for row in other_future.iter_mut().filter(|row| row.outcome.ended.0 >= hour * HOUR_MS) {
            row.outcome.untouched = fraction(rng.random());
            row.outcome.usage = Usage::default();
        }
        prop_assert_eq!(trial::run(&past, &test, &[0.1]), trial::run(&other_future, &test, &[0.1]));
    }
}

#[test]
fn few_outcomes_make_no_price() {
    let mut calibration = Calibration::default();
    assert_eq!(calibration.appetite(0.1), None);
    let judged = Judged {
        curve: Curve::new([0.5; LEVELS.len()]),
        caution: 1.0,
        requested: Bytes::gib(8),
        untouched: fraction(0.9),
    };
    (0..15).for_each(|_| calibration.add("", judged.clone()));
    assert_eq!(calibration.appetite(0.1), None, "one more hit would be more than one in ten");
    (0..15).for_each(|_| calibration.add("", judged.clone()));
    assert!(calibration.appetite(0.1).is_some());
}

#[test]
fn an_owner_whose_vms_disappoint_is_met_with_caution_once_that_is_certain() {
    let judged = |untouched| Judged {
        curve: Curve::new([0.5; LEVELS.len()]),
        caution: 1.0,
        requested: Bytes::gib(8),
        untouched: fraction(untouched),
    };
    let mut calibration = Calibration::default();
    for n in 0..99 {
        calibration.add("bad", judged(if n % 2 == 0 { 0.1 } else { 0.9 }));
        calibration.add("good", judged(0.9));
    }
    assert_eq!(calibration.caution("bad"), 1.0, "too few to tell");
    calibration.add("bad", judged(0.1));
    calibration.add("good", judged(0.9));
    let caution = calibration.caution("bad");
    assert!((4.0..6.0).contains(&caution), "one in two where it should be one in ten: {caution}");
    assert_eq!(calibration.caution("good"), 1.0, "nobody is trusted more than the trees");
    assert_eq!(calibration.caution("unknown"), 1.0);
    (0..2000).for_each(|_| calibration.add("bad", judged(0.9)));
    assert_eq!(calibration.caution("bad"), 1.0, "who mends its ways is trusted again");
}

#[test]
fn habits_are_learnt_and_the_rate_that_is_asked_for_is_kept() {
    let mut rng = Pcg64Mcg::seed_from_u64(1);
    let (train, test) = (customers(&mut rng, 3000), customers(&mut rng, 3000));
    for Verdict { rate_asked, rate_actual, frigid_share, slice_share, static_share, .. } in
        trial::run(&train, &test, &[0.01, 0.02, 0.04, 0.1])
    {
        assert!(rate_actual <= rate_asked + 0.01, "{rate_actual} where {rate_asked} was asked for");
        assert!(frigid_share > 0.15, "half of the VMs leave a half, {frigid_share} is forecast");
        assert!(frigid_share > static_share, "a fixed share, {static_share}, is better");
        assert!(slice_share <= frigid_share);
    }
}

#[test]
fn before_anything_is_known_nothing_is_taken() {
    let test: Vec<Row> = (0..40).map(|hour| row("", 8, hour, 0.9)).collect();
    let verdict = trial::run(&[], &test, &[0.1])[0];
    assert_eq!((verdict.rate_actual, verdict.frigid_share), (0.0, 0.0));
}

#[test]
fn outcomes_that_cannot_be_trusted_are_neither_learnt_nor_tested() {
    let mut rng = Pcg64Mcg::seed_from_u64(2);
    let (train, test) = (customers(&mut rng, 1000), customers(&mut rng, 1000));
    let lies = |hour| Row { sound: false, ..row("liar", 32, hour, 1.0) };
    let with_lies: Vec<Row> = train.iter().cloned().chain((0..250).map(lies)).collect();
    assert_eq!(trial::run(&train, &test, &[0.1]), trial::run(&with_lies, &test, &[0.1]));
}

#[test]
fn a_vm_that_resembles_none_is_described_by_what_it_asks_for() {
    let mut history = History::default();
    let ask =
        |groups: Groups| Ask { groups, requested: Bytes::gib(8), cores: None, begins: UnixMs(10 * HOUR_MS) };
    let known = |features: &[f64; FEATURES]| -> Vec<String> {
        feature_names()
            .zip(features)
            .filter(|(_, x)| !x.is_nan())
            .map(|(name, x)| format!("{name}={x}"))
            .collect()
    };
    assert_eq!(known(&history.features(&ask(Groups::default()))), ["requested_gib=8"]);
    let before = row("c", 16, 4, 0.75);
    history.add(&before.ask, &before.outcome);
    let said = known(&history.features(&ask(Groups { key: "c".into(), ..Groups::default() })));
    // It touched 4 of 16 GiB: of 8 that is half.
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
    assert_eq!(said, expected);
}
