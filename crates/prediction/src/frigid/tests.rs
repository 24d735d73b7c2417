//! What forecasts promise: risks in order, no more hit than asked for, nothing known before its time.

use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use units::{Bytes, Fraction, UnixMs};

use super::{
    history::alike,
    margins::Margins,
    trial::{self, Line, NothingTested, Score, Stay, Verdict, Way},
    *,
};

const HOUR_MS: u64 = 3_600_000;

fn fraction(share: f64) -> Fraction {
    Fraction::new(share.clamp(0.0, 1.0)).unwrap()
}

fn rates(rates: &[f64]) -> Vec<Fraction> {
    rates.iter().map(|rate| fraction(*rate)).collect()
}

fn run(train: &[Stay], test: &[Stay], asked: &[f64]) -> Vec<Verdict> {
    trial::run(train, test, &rates(asked)).unwrap()
}

/// A VM of a customer, on for an hour from this one on.
fn row(key: &str, gib: u64, hour: u64, untouched: f64) -> Stay {
    let groups = Groups { key: key.to_owned(), ..Groups::default() };
    let begins = UnixMs(hour * HOUR_MS);
    let ask = Ask { groups, requested: Bytes::gib(gib), cores: Some(2.0), begins };
    let ended = UnixMs((hour + 1) * HOUR_MS - 1);
    let usage = Usage { p99: None, mean: Some(Bytes::gib(1)), busy_percent: None };
    Stay { ask, outcome: Outcome { ended, untouched: fraction(untouched), usage }, sound: true }
}

/// Customers with habits of their own: some always leave a half, some anything.
fn customers(rng: &mut Pcg64Mcg, rows: u64) -> Vec<Stay> {
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
        begins: UnixMs(0),
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
        let appetite = Appetite::new(price, fraction(rate));
        let stake = curve.stake(Bytes::gib(gib), appetite, caution);
        prop_assert!((0.0..=1.0).contains(&stake.share));
        prop_assert!(stake.risk <= 5.0 * rate, "one VM is risked more than five times what all are");
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
        outcomes.iter().for_each(|judged| calibration.add(None, *judged));
        let Some(appetite) = calibration.appetite(fraction(rate)) else { return Ok(()) };
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
        let test: Vec<Stay> = customers(&mut rng, 300).into_iter().filter(|row| row.ask.begins.0 <= hour * HOUR_MS).collect();
        let mut other_future = past.clone();
        for row in other_future.iter_mut().filter(|row| row.outcome.ended.0 >= hour * HOUR_MS) {
            row.outcome.untouched = fraction(rng.random());
            row.outcome.usage = Usage::default();
        }
        prop_assert_eq!(run(&past, &test, &[0.1]), run(&other_future, &test, &[0.1]));
    }
}

fn disappointed(times: u32, of: u32) -> impl Iterator<Item = Judged> {
    (0..of).map(move |n| Judged {
        begins: UnixMs(n.into()),
        curve: Curve::new([0.5; LEVELS.len()]),
        caution: 1.0,
        requested: Bytes::gib(8),
        untouched: fraction(if n % of < times { 0.1 } else { 0.9 }),
    })
}

#[test]
fn few_outcomes_make_no_price() {
    let mut calibration = Calibration::default();
    assert_eq!(calibration.appetite(fraction(0.1)), None);
    disappointed(0, 15).for_each(|judged| calibration.add(None, judged));
    assert_eq!(calibration.appetite(fraction(0.1)), None, "one hit would be more than one in ten");
    disappointed(0, 15).for_each(|judged| calibration.add(None, judged));
    assert!(calibration.appetite(fraction(0.1)).is_some());
}

#[test]
fn when_the_latest_disappoint_risk_is_dear_long_before_most_do() {
    let mut calibration = Calibration::default();
    let stake = |calibration: &Calibration| {
        let appetite = calibration.appetite(fraction(0.1));
        appetite.map(|appetite| Curve::new([0.5; LEVELS.len()]).stake(Bytes::gib(8), appetite, 1.0).share)
    };
    disappointed(0, 1900).for_each(|judged| calibration.add(None, judged));
    assert_eq!(stake(&calibration), Some(0.5));
    disappointed(50, 50).for_each(|judged| calibration.add(None, judged));
    assert!(
        stake(&calibration).is_none_or(|share| share == 0.0),
        "50 of 1950 are few, and the latest 50 are all"
    );
}

#[test]
fn an_owner_whose_vms_disappoint_is_met_with_caution_once_that_is_no_chance() {
    let mut calibration = Calibration::default();
    let owner = |name: &str| Some(name.to_owned());
    let caution = |calibration: &Calibration, name: &str| calibration.caution(owner(name).as_ref());
    disappointed(50, 99).for_each(|judged| calibration.add(owner("bad"), judged));
    assert_eq!(caution(&calibration, "bad"), 1.0, "too few to tell");
    disappointed(1, 1).for_each(|judged| calibration.add(owner("bad"), judged));
    let said = caution(&calibration, "bad");
    assert!((4.5..5.5).contains(&said), "one in two where it should be one in ten: {said}");
    disappointed(14, 100).for_each(|judged| calibration.add(owner("unlucky"), judged));
    assert_eq!(caution(&calibration, "unlucky"), 1.0, "14 of 100 where it should be 10 is chance");
    disappointed(0, 100).for_each(|judged| calibration.add(owner("good"), judged));
    assert_eq!(caution(&calibration, "good"), 1.0, "nobody is trusted more than the model");
    disappointed(100, 100).for_each(|judged| calibration.add(None, judged));
    assert_eq!(calibration.caution(None), 1.0, "strangers do not answer for each other");
    disappointed(0, 2000).for_each(|judged| calibration.add(owner("bad"), judged));
    assert_eq!(caution(&calibration, "bad"), 1.0, "who mends its ways is trusted again");
}

#[test]
fn habits_are_learnt_and_the_rate_that_is_asked_for_is_kept() {
    let mut rng = Pcg64Mcg::seed_from_u64(1);
    let (train, test) = (customers(&mut rng, 3000), customers(&mut rng, 3000));
    for Verdict {
        rate_asked, rate_actual, frigid_share, slice_share, slice_rate, static_share, vms, ..
    } in run(&train, &test, &[0.01, 0.02, 0.04, 0.1])
    {
        let chance = 2.0 * (rate_asked / f64::from(vms)).sqrt();
        assert!(rate_actual <= rate_asked + chance, "{rate_actual} where {rate_asked} was asked for");
        assert!(rate_actual >= 0.3 * rate_asked, "{rate_actual} where {rate_asked} was asked for");
        assert!(frigid_share > 0.15, "half of the VMs leave a half, {frigid_share} is forecast");
        assert!(frigid_share > static_share, "a fixed share, {static_share}, is better");
        assert!((0.6 * frigid_share..frigid_share).contains(&slice_share), "{slice_share} of {frigid_share}");
        assert!(slice_rate <= rate_actual);
    }
}

#[test]
fn before_anything_is_known_nothing_is_taken() {
    let test: Vec<Stay> = (0..40).map(|hour| row("", 8, hour, 0.9)).collect();
    let verdict = run(&[], &test, &[0.1])[0];
    assert_eq!((verdict.rate_actual, verdict.frigid_share), (0.0, 0.0));
}

#[test]
fn a_fixed_share_is_what_as_many_of_the_outcomes_left_less() {
    let train: Vec<Stay> = (0..100_u32).map(|n| row("", 8, 0, f64::from(n) / 100.0)).collect();
    let test = [row("", 8, 2, 0.05), row("", 24, 2, 0.5)];
    let verdict = run(&train, &test, &[0.1])[0];
    assert_eq!((verdict.static_share, verdict.static_rate, verdict.vms), (0.1, 0.5, 2));
}

#[test]
fn a_vm_that_ends_when_another_begins_has_not_ended_before() {
    let ends = |hour: u64, ms: u64| UnixMs(hour * HOUR_MS + ms);
    let mut train: Vec<Stay> = (0..100_u32).map(|n| row("", 8, 0, f64::from(n) / 100.0)).collect();
    let test = [row("", 8, 2, 0.5)];
    train.iter_mut().for_each(|stay| stay.outcome.ended = ends(2, 0));
    assert_eq!(run(&train, &test, &[0.1])[0].static_share, 0.0);
    train.iter_mut().for_each(|stay| stay.outcome.ended = ends(1, HOUR_MS - 1));
    assert_eq!(run(&train, &test, &[0.1])[0].static_share, 0.1);
}

#[test]
fn outcomes_that_cannot_be_trusted_are_neither_learnt_nor_tested() {
    let mut rng = Pcg64Mcg::seed_from_u64(2);
    let (train, test) = (customers(&mut rng, 1000), customers(&mut rng, 1000));
    let with_lies = |stays: &[Stay]| -> Vec<Stay> {
        let lies = (0..250).map(|hour| Stay { sound: false, ..row("c1", 32, hour, 0.0) });
        stays.iter().cloned().chain(lies).collect()
    };
    assert_eq!(run(&train, &test, &[0.1]), run(&with_lies(&train), &with_lies(&test), &[0.1]));
    let lies: Vec<Stay> = (0..9).map(|hour| Stay { sound: false, ..row("c1", 32, hour, 0.0) }).collect();
    assert_eq!(trial::run(&train, &lies, &rates(&[0.1])), Err(NothingTested));
    assert_eq!(trial::run(&train, &[], &rates(&[0.1])), Err(NothingTested));
}

#[test]
fn margins_are_below_the_lowest_share_of_the_narrowest_group_that_is_known() {
    let mut history = History::default();
    let mut known = Vec::new();
    for n in 0..200_u64 {
        let groups = Groups { vm: format!("vm{}", n % 2), key: "c".into(), ..Groups::default() };
        let stay = row("", 8, n, if n % 2 == 0 { 0.5 } else { 0.8 } - 0.001 * (n % 10) as f64);
        let ask = Ask { groups, ..stay.ask };
        known.push((history.features(&ask), stay.outcome.untouched.get()));
        history.add(&ask, &stay.outcome);
    }
    let margins = Margins::learn(known.iter().map(|(features, untouched)| (features, *untouched)));
    let ask = |vm: &str, key: &str| {
        let groups = Groups { vm: vm.into(), key: key.into(), ..Groups::default() };
        Ask { groups, ..row("", 8, 300, 0.0).ask }
    };
    let shares = |ask: &Ask| margins.shares(&history.features(ask));
    assert_eq!(
        alike(&history.features(&ask("vm1", "c"))).unwrap().0,
        0,
        "its own name is narrower than its customer's"
    );
    let of_vm1 = shares(&ask("vm1", "c")).unwrap();
    assert!(of_vm1.iter().all(|share| (0.78..0.82).contains(share)), "{of_vm1:?}");
    assert_eq!(shares(&ask("new", "new")), None, "nothing is known of it");
    assert_eq!(shares(&ask("new", "c")), None, "no outcome tells of a customer's first VMs");
}

#[test]
fn of_many_outcomes_the_latest_are_ranked_and_the_extremes_of_all_are_kept() {
    let mut history = History::default();
    for n in 0..100_u32 {
        let stay = row("c", 10, u64::from(n), if n == 0 { 0.0 } else { f64::from(n) / 100.0 });
        history.add(&stay.ask, &stay.outcome);
    }
    let ask = Ask { groups: Groups { key: "c".into(), ..Groups::default() }, ..row("", 10, 200, 0.0).ask };
    let features = history.features(&ask);
    let said = |name: &str| {
        let at = feature_names().position(|other| other == format!("key.{name}")).unwrap();
        (features[at] * 1000.0).round() / 1000.0
    };
    // The latest 64 left 0.36 to 0.99.
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
        assert_eq!(said(name), value, "{name}");
    }
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

fn scores(lines: &[Line], way: Way) -> &[Score] {
    &lines.iter().find(|line| line.way == way).unwrap().scores
}

#[test]
fn to_be_compared_changes_nothing_and_each_way_is_held_against_the_same_vms() {
    let mut rng = Pcg64Mcg::seed_from_u64(3);
    let (train, test) = (customers(&mut rng, 1000), customers(&mut rng, 500));
    let (verdicts, lines) = trial::compare(&train, &test, &rates(&LEVELS[..12])).unwrap();
    assert_eq!(verdicts, run(&train, &test, &LEVELS[..12]));
    for (verdict, (ours, fixed)) in
        verdicts.iter().zip(scores(&lines, Way::Ours).iter().zip(scores(&lines, Way::Fixed)))
    {
        assert_eq!((ours.rate, ours.share), (verdict.rate_actual, verdict.frigid_share));
        assert_eq!((ours.slice_rate, ours.slice_share), (verdict.slice_rate, verdict.slice_share));
        assert_eq!((fixed.rate, fixed.share), (verdict.static_rate, verdict.static_share));
    }
    let trees = scores(&lines, Way::Trees);
    assert!(trees.is_sorted_by_key(|score| (score.rate, score.share)), "{trees:?}");
    for rule in [Way::Lowest, Way::LowestOfOwner] {
        let scores = scores(&lines, rule);
        assert!(
            scores.is_sorted_by(|one, less| one.share > less.share && one.rate >= less.rate),
            "{scores:?}"
        );
    }
    assert_eq!(trial::compare(&train, &[], &rates(&[0.1])), Err(NothingTested));
}

#[test]
fn rules_take_the_lowest_share_of_those_that_had_ended_and_nothing_of_strangers() {
    let named = |vm: &str, stay: Stay| {
        let groups = Groups { vm: vm.to_owned(), ..stay.ask.groups.clone() };
        Stay { ask: Ask { groups, ..stay.ask }, ..stay }
    };
    let train = [named("a", row("c", 8, 0, 0.75)), row("c", 8, 1, 0.5), row("c", 8, 9, 0.0)];
    let taken = |test: Stay| {
        let (_, lines) = trial::compare(&train, &[test], &rates(&[0.1])).unwrap();
        [Way::Lowest, Way::LowestOfOwner].map(|way| scores(&lines, way)[0].share)
    };
    assert_eq!(
        taken(named("a", row("c", 8, 3, 0.5))),
        [0.75, 0.5],
        "its own name is narrower than its owner's"
    );
    assert_eq!(taken(named("a", row("", 8, 3, 0.5))), [0.75, 0.75], "without a customer it is its own owner");
    assert_eq!(taken(row("c", 8, 1, 0.5)), [0.75, 0.75], "the second has not ended");
    assert_eq!(taken(row("stranger", 8, 3, 0.5)), [0.0, 0.0]);
}
