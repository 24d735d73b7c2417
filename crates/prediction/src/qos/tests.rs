//! Tests of the QoS monitor: the truth table of Pond's section 4.6, hysteresis, invalid samples,
//! and the budget.

use proptest::prelude::*;
use units::{
    Fraction, Ns,
    limits::{QOS_RECOVERY_TIME, QOS_REQUESTS_PER_HOUR_MAX, QOS_SAMPLE_GAP_MAX},
};

use super::{
    loss::{LossDistribution, choose_error_quantile},
    *,
};
use crate::sensitivity::{COUNTER_NAMES, DRAM_BOUND_INDEX, IPC_INDEX, STORE_BOUND_INDEX, Workload};

/// Interval between samples.
const INTERVAL: Ns = Ns::secs(10);

fn fraction(share: f64) -> Fraction {
    Fraction::new(share).unwrap()
}

/// Returns counters that all have the value of the DRAM-bound fraction.
const fn counters(dram_bound: f64) -> [f64; COUNTER_NAMES.len()] {
    [dram_bound; COUNTER_NAMES.len()]
}

/// Returns a model for which the pool slows a workload down by 20 % if and only if the workload is
/// DRAM-bound for more than half of its cycles.
fn model() -> LossModel {
    let run = |n: u32| {
        let dram_bound = f64::from(n % 20) / 20.0;
        let slowdown = if dram_bound > 0.5 { 0.2 } else { 0.0 };
        let workload = Workload { program: format!("p{n}"), counters: counters(dram_bound), slowdown };
        let (placement, pool_loads) =
            if n < 100 { (Placement::EntirelyOnPool, 1.0) } else { (Placement::Split, 0.5) };
        LabelledRun { workload, placement, pool_loads, latency_ratio: 2.5, is_selected: false }
    };
    LossModel::train(&(0..200).map(run).collect::<Vec<_>>(), fraction(0.05), 1).unwrap()
}

/// VM under observation, with a clock.
struct Vm {
    judge: Judge,
    model: LossModel,
    pool_loads: Option<PoolLoads>,
    now: Ns,
}

impl Vm {
    fn new(placement: Placement) -> Self {
        let pool_loads = Some(PoolLoads { share: fraction(0.5), source: LoadSource::Events });
        let mut judge = Judge::new(placement);
        judge.set_latency_ratio(2.5);
        Self { judge, model: model(), pool_loads, now: Ns::ZERO }
    }

    /// Adds a sample: accessed pages out of 200, and the DRAM-bound fraction of cycles.
    fn observe(&mut self, accessed: Option<u32>, dram_bound: Option<f64>) -> Judgement {
        self.now = self.now.after(INTERVAL);
        let sample = Sample {
            at: self.now,
            accessed: accessed.map(|pages| AccessedShare::from_pages(pages, 200).unwrap()),
            touched: None,
            counters: dram_bound.map(counters),
            pool_loads: self.pool_loads,
        };
        self.judge.observe(&sample, Some(&self.model), self.now).unwrap()
    }

    fn observe_many(&mut self, count: usize, accessed: Option<u32>, dram_bound: Option<f64>) -> Judgement {
        (0..count).map(|_| self.observe(accessed, dram_bound)).last().unwrap()
    }
}

#[test]
fn vm_migrates_if_and_only_if_monitored_and_sensitive() {
    for (is_monitored, is_sensitive, expected) in [
        (false, false, Verdict::Fine),
        (false, true, Verdict::Fine),
        (true, false, Verdict::Fine),
        (true, true, Verdict::Migrate),
    ] {
        let dram_bound = Some(if is_sensitive { 0.9 } else { 0.1 });
        let accessed = Some(if is_monitored { 100 } else { 0 });
        let split = Vm::new(Placement::Split).observe_many(3, accessed, dram_bound);
        assert_eq!(split.verdict, expected, "{split:?}");
        if is_monitored {
            // A VM entirely on the pool is monitored regardless of its accesses.
            for accessed in [None, Some(0), Some(200)] {
                let whole = Vm::new(Placement::EntirelyOnPool).observe_many(3, accessed, dram_bound);
                assert_eq!(whole.verdict, expected, "{whole:?}");
            }
        }
    }
}

#[test]
fn verdict_requires_three_samples() {
    let mut vm = Vm::new(Placement::EntirelyOnPool);
    for expected in [Verdict::Watch, Verdict::Watch, Verdict::Migrate, Verdict::Migrate] {
        assert_eq!(vm.observe(None, Some(0.9)).verdict, expected);
    }
    let mut vm = Vm::new(Placement::EntirelyOnPool);
    let without_counters = [Some(0.9), None, Some(0.9)].map(|bound| vm.observe(None, bound).verdict);
    assert_eq!(without_counters[2], Verdict::Migrate, "a missing sample does not delay the verdict");
    let mut vm = Vm::new(Placement::EntirelyOnPool);
    let single = [Some(0.9), None, None, None].map(|bound| vm.observe(None, bound).verdict);
    assert!(!single.contains(&Verdict::Migrate), "{single:?}");
}

#[test]
fn forgotten_harm_does_not_delay_the_recovery() {
    let mut vm = Vm::new(Placement::EntirelyOnPool);
    assert_eq!(vm.observe_many(3, None, Some(0.9)).verdict, Verdict::Migrate);
    assert_eq!(vm.observe_many(5, None, Some(0.1)).reason, Reason::Recovering);
    vm.judge.forget_harm();
    assert_eq!(vm.observe(None, Some(0.1)).verdict, Verdict::Fine);
}

#[test]
fn latency_ratio_can_become_known() {
    let sample =
        |at| Sample { at, accessed: None, touched: None, counters: Some(counters(0.9)), pool_loads: None };
    let (model, mut judge) = (model(), Judge::new(Placement::EntirelyOnPool));
    let unknown = judge.observe(&sample(Ns::secs(1)), Some(&model), Ns::secs(1)).unwrap();
    judge.set_latency_ratio(1.2);
    let known = judge.observe(&sample(Ns::secs(2)), Some(&model), Ns::secs(2)).unwrap();
    assert!(known.loss < unknown.loss, "{known:?} {unknown:?}");
}

#[test]
fn change_of_workload_is_detected_within_three_samples() {
    for placement in [Placement::EntirelyOnPool, Placement::Split] {
        let mut vm = Vm::new(placement);
        assert_eq!(vm.observe_many(50, Some(100), Some(0.1)).reason, Reason::Insensitive);
        let changed = [0.9; 3].map(|dram_bound| vm.observe(Some(100), Some(dram_bound)).verdict);
        assert_eq!(changed, [Verdict::Fine, Verdict::Migrate, Verdict::Migrate]);
    }
}

#[test]
fn single_outlier_does_not_change_the_verdict() {
    let mut vm = Vm::new(Placement::EntirelyOnPool);
    vm.observe_many(50, None, Some(0.1));
    for dram_bound in [0.9, 0.1, 0.1, 0.9, 0.1] {
        assert_eq!(vm.observe(None, Some(dram_bound)).verdict, Verdict::Fine);
    }
}

#[test]
fn vm_without_counters_requires_three_samples_and_many_accesses() {
    let mut vm = Vm::new(Placement::Split);
    for _ in 0..2 {
        assert_eq!(vm.observe(Some(180), None).verdict, Verdict::Watch);
    }
    assert_eq!(vm.observe(Some(180), None).reason, Reason::AccessedPool);
    let moderate = Vm::new(Placement::Split).observe_many(50, Some(80), None);
    assert_eq!(moderate.verdict, Verdict::Watch, "{moderate:?}");
    let slight = Vm::new(Placement::Split).observe_many(50, Some(20), None);
    assert_eq!(slight.verdict, Verdict::Fine, "{slight:?}");
    let whole = Vm::new(Placement::EntirelyOnPool).observe_many(50, Some(200), None);
    assert_eq!((whole.verdict, whole.reason), (Verdict::Fine, Reason::NoEvidence));
}

#[test]
fn pool_touched_once_is_idle() {
    let mut vm = Vm::new(Placement::Split);
    vm.observe(Some(200), Some(0.9));
    let idle = vm.observe_many(3, Some(0), Some(0.9));
    assert_eq!((idle.verdict, idle.reason), (Verdict::Fine, Reason::IdlePool));
}

#[test]
fn untouched_pool_is_idle_without_access_samples() {
    let mut judge = Judge::new(Placement::Split);
    let model = model();
    let mut observe = |n: u64, touched: f64| {
        let at = Ns::secs(n);
        let (touched, counters) = (Some(fraction(touched)), Some(counters(0.9)));
        let sample = Sample { at, accessed: None, touched, counters, pool_loads: None };
        judge.observe(&sample, Some(&model), at).unwrap().verdict
    };
    assert_eq!([1, 2, 3].map(|n| observe(n, 0.01)), [Verdict::Fine; 3]);
    assert_eq!([4, 5, 6].map(|n| observe(n, 0.5)).last(), Some(&Verdict::Migrate));
}

#[test]
fn harmed_vm_recovers_after_an_hour_without_harm() {
    let mut vm = Vm::new(Placement::EntirelyOnPool);
    assert_eq!(vm.observe_many(3, None, Some(0.9)).verdict, Verdict::Migrate);
    let recovery_samples = usize::try_from(QOS_RECOVERY_TIME.0 / INTERVAL.0).unwrap();
    let recovering = vm.observe_many(recovery_samples, None, Some(0.0));
    assert_eq!((recovering.verdict, recovering.reason), (Verdict::Migrate, Reason::Recovering));
    assert_eq!(vm.observe_many(3, None, Some(0.0)).verdict, Verdict::Fine);
}

#[test]
fn gap_discards_earlier_samples() {
    let mut vm = Vm::new(Placement::EntirelyOnPool);
    vm.observe(None, Some(0.9));
    vm.now = vm.now.after(QOS_SAMPLE_GAP_MAX);
    let judgement = vm.observe(None, Some(0.9));
    assert_eq!((judgement.verdict, judgement.samples), (Verdict::Watch, 1));
}

#[test]
fn invalid_samples_are_rejected_without_effect() {
    let mut vm = Vm::new(Placement::EntirelyOnPool);
    let before = vm.observe_many(2, None, Some(0.9));
    let now = vm.now.after(INTERVAL);
    let mut rejection = |at: Ns, dram_bound: f64| {
        let mut counters = counters(0.9);
        counters[DRAM_BOUND_INDEX] = dram_bound;
        let sample = Sample { at, accessed: None, touched: None, counters: Some(counters), pool_loads: None };
        vm.judge.observe(&sample, Some(&vm.model), now).unwrap_err().to_string()
    };
    assert_eq!(rejection(Ns::secs(31), 0.9), "at 31s: must not be after the current time 30s");
    assert_eq!(rejection(Ns::secs(20), 0.9), "at 20s: must be after the previous sample at 20s");
    for value in [-0.1, f64::INFINITY, 2e6] {
        let expected = format!("counter dram_bound is {value}: must be a number from 0 to 1.2");
        assert_eq!(rejection(Ns::secs(30), value), expected);
    }
    assert_eq!(vm.judge.judgement(), before);
    assert_eq!(
        AccessedShare::from_pages(3, 2).unwrap_err().to_string(),
        "3 of 2 sampled pages: sampled must be 1 to 4096, and accessed at most sampled"
    );
    assert!(AccessedShare::from_pages(0, 0).is_err() && AccessedShare::from_pages(0, 4097).is_err());
}

#[test]
fn confidence_interval_matches_published_values() {
    // Brown, Cai and DasGupta (2001): Wilson's interval for 0 of 10, and for 5 of 10.
    for (accessed, low, high) in [(0, 0.0, 0.2775), (5, 0.2366, 0.7634), (10, 0.7225, 1.0)] {
        let share = AccessedShare::from_pages(accessed, 10).unwrap();
        assert!((share.low.get() - low).abs() < 5e-5 && (share.high.get() - high).abs() < 5e-5, "{share:?}");
    }
}

#[test]
fn only_measured_pool_loads_permit_an_early_verdict() {
    let model = noisy_model();
    let evidence = Evidence { counters: counters(0.5), pool_loads: 1.0, latency_ratio: 2.5 };
    let threshold = |placement, quality| model.estimate(&evidence, placement, quality).threshold;
    for placement in [Placement::EntirelyOnPool, Placement::Split] {
        let measured = threshold(placement, Quality::Measured);
        assert!(measured < 0.05 && measured > 0.025, "{measured}");
        assert!(measured < threshold(placement, Quality::Sampled));
        assert!(measured < threshold(placement, Quality::Unknown));
    }
}

/// Returns a model whose estimates have an error: the DRAM-bound fraction of cycles determines the
/// loss only up to a factor from 0.8 to 1.2.
fn noisy_model() -> LossModel {
    let run = |n: u32| {
        let loss = f64::from(n % 100) / 1000.0;
        let factor = 0.8 + 0.4 * f64::from(n * 7 % 11) / 10.0;
        let workload =
            Workload { program: format!("p{n}"), counters: counters(10.0 * loss), slowdown: factor * loss };
        let placement = if n.is_multiple_of(2) { Placement::EntirelyOnPool } else { Placement::Split };
        LabelledRun { workload, placement, pool_loads: 1.0, latency_ratio: 2.5, is_selected: false }
    };
    LossModel::train(&(0..1000).map(run).collect::<Vec<_>>(), fraction(0.05), 1).unwrap()
}

/// VMs are moved because of high estimates, so their errors are biased.
#[test]
fn selected_runs_do_not_calibrate_the_thresholds() {
    let run = |n: u32, is_selected: bool| {
        let loss = f64::from(n % 100) / 1000.0;
        // The estimates of selected runs are too high: their true losses are two thirds.
        let slowdown = if is_selected { loss / 1.5 } else { loss };
        let program = format!("p{n}{is_selected}");
        let workload = Workload { program, counters: counters(10.0 * loss), slowdown };
        LabelledRun { is_selected, ..LabelledRun::new(workload, 1.0, 2.5) }
    };
    let train = |runs: &[LabelledRun]| LossModel::train(runs, fraction(0.05), 1).unwrap();
    let unselected: Vec<_> = (0..1000).map(|n| run(n, false)).collect();
    let selected: Vec<_> = (0..200).map(|n| run(n, true)).collect();
    let both = train(&[unselected.clone(), selected.clone()].concat());
    assert_eq!((both.accuracy.runs, train(&selected).accuracy.runs), (1000, 200));
    let marked = |runs: &[LabelledRun]| -> Vec<LabelledRun> {
        runs.iter().map(|run| LabelledRun { is_selected: false, ..run.clone() }).collect()
    };
    let biased = train(&[unselected, marked(&selected)].concat());
    let threshold = |model: &LossModel| {
        let evidence = Evidence { counters: counters(0.5), pool_loads: 1.0, latency_ratio: 2.5 };
        model.estimate(&evidence, Placement::EntirelyOnPool, Quality::Measured).threshold
    };
    assert!(threshold(&both) < threshold(&biased), "{} {}", threshold(&both), threshold(&biased));
}

/// Half of the programs are limited by stores. Their loss is up to twice the loss that the other
/// counters indicate, or half of it. The loss of the other programs has an error of up to 2 %.
#[test]
fn uncertain_estimate_has_a_lower_threshold() {
    let with_stores = |loss: f64, store_bound: f64| {
        let mut counters = counters(10.0 * loss);
        counters[STORE_BOUND_INDEX] = store_bound;
        counters
    };
    let run = |n: u32| {
        let loss = f64::from(n % 100) / 1000.0;
        let (store_bound, error) = if n.is_multiple_of(2) { (0.0, 0.03) } else { (1.0, 1.0) };
        let factor = 2_f64.powf(error * (f64::from(n * 7 % 11) / 5.0 - 1.0));
        let counters = with_stores(loss, store_bound);
        let workload = Workload { program: format!("p{n}"), counters, slowdown: factor * loss };
        LabelledRun::new(workload, 1.0, 2.5)
    };
    let model = LossModel::train(&(0..1000).map(run).collect::<Vec<_>>(), fraction(0.05), 1).unwrap();
    let threshold = |store_bound: f64| {
        let counters = with_stores(0.05, store_bound);
        let evidence = Evidence { counters, pool_loads: 1.0, latency_ratio: 2.5 };
        model.estimate(&evidence, Placement::EntirelyOnPool, Quality::Measured).threshold
    };
    let [certain, uncertain] = [0.0, 1.0].map(threshold);
    assert!((0.04..0.05).contains(&certain) && (0.025..0.035).contains(&uncertain), "{certain} {uncertain}");
}

#[test]
fn loss_grows_with_pool_loads_and_latency() {
    let run = |n: u32| {
        let (pool_loads, latency_ratio) = (f64::from(n % 20) / 20.0, 1.8 + f64::from(n / 20 % 10) / 10.0);
        let slowdown = 0.2 * pool_loads * (latency_ratio - 1.0);
        let workload = Workload { program: format!("p{n}"), counters: counters(0.3), slowdown };
        LabelledRun { workload, placement: Placement::Split, pool_loads, latency_ratio, is_selected: false }
    };
    let model = LossModel::train(&(0..400).map(run).collect::<Vec<_>>(), fraction(0.05), 1).unwrap();
    let loss = |pool_loads: f64, latency_ratio: f64| {
        let evidence = Evidence { counters: counters(0.3), pool_loads, latency_ratio };
        model.estimate(&evidence, Placement::Split, Quality::Measured).loss
    };
    assert!((loss(0.5, 2.0) - 0.1).abs() < 0.02, "{}", loss(0.5, 2.0));
    assert!(loss(0.1, 2.0) < 0.05 && loss(0.9, 2.0) > 0.15 && loss(0.5, 2.6) > loss(0.5, 1.8) + 0.03);
    assert!((0.02..0.3).contains(&loss(f64::NAN, 2.0)), "an unknown fraction has an average loss");
}

#[test]
fn budget_is_the_misplaced_fraction_rounded_up() {
    let x = fraction(0.02);
    assert_eq!([0, 1, 50, 51, 1000].map(|vms| hourly_budget(x, vms)), [0, 1, 1, 2, 20]);
    assert_eq!(hourly_budget(fraction(0.0), 9), 0);
    assert_eq!(hourly_budget(fraction(1.0), usize::MAX), QOS_REQUESTS_PER_HOUR_MAX);
}

#[test]
fn most_harmed_vms_come_first() {
    let candidates = [(1, 0.5), (2, 0.9), (3, 0.5), (4, f64::NAN)];
    assert_eq!(select_most_harmed(candidates[..3].iter().copied(), 2), [2, 1]);
    assert_eq!(select_most_harmed(candidates, 0), [0; 0]);
}

proptest! {
    /// At most the given fraction of the workloads has a larger error than the threshold allows for.
    #[test]
    fn error_quantile_limits_the_probability_of_harm(
        scored in prop::collection::vec((0.025..0.1, 0.1..1.0, 0.03..0.08), 20..200),
        probability in 0.05..0.95,
    ) {
        let scored: Vec<(LossDistribution, f64)> = scored
            .into_iter()
            .map(|(estimate, deviation, loss)| (LossDistribution { loss: estimate, deviation }, loss))
            .collect();
        let quantile = choose_error_quantile(scored.iter().copied(), 0.05, probability);
        let exceeds = |(estimate, loss): &&(LossDistribution, f64)| estimate.error(*loss) > quantile;
        prop_assert!(scored.iter().filter(exceeds).count() as f64 <= probability * scored.len() as f64);
        let (lowest, highest) = (0.05 / 3.0, 0.05 * 3.0);
        for (estimate, _) in &scored {
            let threshold = estimate.threshold(0.05, quantile);
            prop_assert!((lowest..=highest).contains(&threshold));
            let at_threshold = LossDistribution { loss: threshold, ..*estimate };
            let is_bounded = threshold == lowest || threshold == highest;
            prop_assert!(is_bounded || (at_threshold.error(0.05) - quantile).abs() < 1e-9);
        }
        let few = choose_error_quantile(scored[..10].iter().copied(), 0.05, probability);
        prop_assert_eq!(few, 0.0, "too few estimates");
    }

    /// The sequence Migrate, another verdict, Migrate takes more than the recovery time.
    #[test]
    fn verdicts_do_not_flap(samples in prop::collection::vec((0_u32..=200, 0.0..1.0), 1..500)) {
        let mut vm = Vm::new(Placement::Split);
        let mut harmed_since = None;
        let mut recovered = false;
        for (accessed, dram_bound) in samples {
            let verdict = vm.observe(Some(accessed), Some(dram_bound)).verdict;
            match (verdict, harmed_since) {
                (Verdict::Migrate, None) => harmed_since = Some(vm.now),
                (Verdict::Migrate, Some(since)) if recovered => {
                    prop_assert!(vm.now.since(since) > QOS_RECOVERY_TIME);
                    (harmed_since, recovered) = (Some(vm.now), false);
                }
                (Verdict::Fine | Verdict::Watch, Some(_)) => recovered = true,
                _ => {}
            }
        }
    }

    /// The confidence interval contains the estimate and shrinks with the number of pages.
    #[test]
    fn confidence_interval_contains_estimate((sampled, accessed) in (1_u32..=1024).prop_flat_map(|n| (Just(n), 0..=n))) {
        let share = AccessedShare::from_pages(accessed, sampled).unwrap();
        prop_assert!(share.low <= share.estimate && share.estimate <= share.high);
        let larger = AccessedShare::from_pages(4 * accessed, 4 * sampled).unwrap();
        prop_assert!(larger.high.get() - larger.low.get() < share.high.get() - share.low.get());
    }
}

/// Returns counters with these instructions per cycle.
fn counters_with_ipc(ipc: f64) -> [f64; COUNTER_NAMES.len()] {
    let mut counters = counters(0.9);
    counters[IPC_INDEX] = ipc;
    counters
}

/// Returns the loss of a VM with these instructions per cycle before and after its move, with this
/// relative variation of the samples.
fn measured_loss(before: f64, after: f64, variation: f64) -> Option<MeasuredLoss> {
    let vary = |n: usize, ipc: f64| ipc * if n.is_multiple_of(2) { 1.0 + variation } else { 1.0 - variation };
    let mut judge = Judge::new(Placement::Split);
    judge.set_latency_ratio(2.5);
    let accessed = AccessedShare::from_pages(100, 200).ok();
    for n in 1..=6 {
        let at = Ns::secs(30 * n as u64);
        let counters = Some(counters_with_ipc(vary(n, before)));
        let sample = Sample { at, accessed, touched: None, counters, pool_loads: None };
        judge.observe(&sample, None, at).unwrap();
    }
    let mut measurement = MoveMeasurement::after_move(&judge)?;
    let settling = (7..9).map(|n| (n, 0.1)); // does not count
    let mut after = settling.chain((9..40).map(|n| (n, vary(n, after))));
    after.find_map(|(n, ipc)| match measurement.observe(&counters_with_ipc(ipc), Ns::secs(30 * n as u64)) {
        MoveProgress::Measured(loss) => Some(*loss),
        MoveProgress::Measuring | MoveProgress::TooLate => None,
    })
}

#[test]
fn loss_is_the_increase_of_the_instructions_per_cycle_after_a_move() {
    let measured = measured_loss(0.8, 1.0, 0.0).unwrap();
    assert!((measured.loss - 0.25).abs() < 1e-9 && measured.is_label(), "{measured:?}");
    assert_eq!((measured.before.counters[IPC_INDEX], measured.after[IPC_INDEX]), (0.8, 1.0));
    let run = measured.labelled_run("p".to_owned());
    assert_eq!(
        (run.placement, run.latency_ratio, run.workload.slowdown),
        (Placement::Split, 2.5, measured.loss)
    );
    assert!(run.pool_loads.is_nan());
    assert!(measured_loss(1.0, 1.0, 0.01).unwrap().loss.abs() < 0.01);
    let slower = measured_loss(1.0, 0.9, 0.0).unwrap();
    assert!(slower.loss < -0.09 && !slower.is_label(), "the workload has changed: {slower:?}");
    assert!(run.is_selected);
}

#[test]
fn loss_of_a_varying_workload_is_no_label() {
    let measured = measured_loss(0.8, 1.0, 0.2).unwrap();
    assert!(!measured.is_label() && measured.standard_error > 0.05, "{measured:?}");
}

#[test]
fn loss_requires_instruction_counts_before_and_after_the_move() {
    assert_eq!(measured_loss(f64::NAN, 1.0, 0.0), None);
    assert_eq!(measured_loss(1.0, f64::NAN, 0.0), None);
    assert!(MoveMeasurement::after_move(&Judge::new(Placement::Split)).is_none());
}

/// Returns a VM that has been sampled for a minute, and the beginning of its measurement after a move.
fn moved_vm() -> (Vm, MoveMeasurement) {
    let mut vm = Vm::new(Placement::Split);
    vm.observe_many(6, Some(100), Some(0.9));
    let measurement = MoveMeasurement::after_move(&vm.judge).unwrap();
    (vm, measurement)
}

#[test]
fn samples_before_a_gap_do_not_count_for_the_loss_after_a_move() {
    let (vm, mut measurement) = moved_vm();
    let mut at = vm.now;
    for _ in 0..11 {
        at = at.after(INTERVAL);
        assert_eq!(measurement.observe(&counters_with_ipc(5.0), at), MoveProgress::Measuring);
    }
    // A sample that follows too soon does not count.
    assert_eq!(measurement.observe(&counters_with_ipc(5.0), Ns(at.0 + 1)), MoveProgress::Measuring);
    at = Ns(at.after(QOS_SAMPLE_GAP_MAX).0 + 1);
    for n in 1..=12 {
        match measurement.observe(&counters_with_ipc(0.9), at) {
            MoveProgress::Measured(measured) => assert_eq!((n, measured.loss), (12, 0.0)),
            progress => assert_eq!((progress, n < 12), (MoveProgress::Measuring, true)),
        }
        at = at.after(INTERVAL);
    }
}

#[test]
fn late_sample_after_a_move_ends_the_measurement() {
    let (vm, mut measurement) = moved_vm();
    let late = vm.now.after(Ns::secs(901));
    assert_eq!(measurement.observe(&counters_with_ipc(5.0), late), MoveProgress::TooLate);
    assert_eq!(measurement.observe(&counters_with_ipc(5.0), Ns::secs(61)), MoveProgress::Measuring);
}

/// A workload may change in a long gap after the move, too.
#[test]
fn late_sample_after_a_gap_ends_the_measurement() {
    let (vm, mut measurement) = moved_vm();
    let counters = counters_with_ipc(0.9);
    assert_eq!(measurement.observe(&counters, vm.now.after(INTERVAL)), MoveProgress::Measuring);
    assert_eq!(measurement.observe(&counters, vm.now.after(Ns::secs(900))), MoveProgress::Measuring);
    assert_eq!(measurement.observe(&counters, vm.now.after(Ns::secs(901 + 900))), MoveProgress::TooLate);
}

#[test]
fn vm_with_idle_pool_in_some_samples_is_not_measured() {
    let mut vm = Vm::new(Placement::Split);
    vm.observe_many(6, Some(100), Some(0.9));
    vm.observe(Some(0), Some(0.9));
    assert!(MoveMeasurement::after_move(&vm.judge).is_none());
    let mut vm = Vm::new(Placement::Split);
    vm.observe_many(5, Some(100), Some(0.9));
    assert!(MoveMeasurement::after_move(&vm.judge).is_none(), "too few samples");
}

#[test]
fn loss_of_a_workload_with_a_trend_or_an_implausible_loss_is_no_label() {
    let (vm, mut measurement) = moved_vm();
    let mut loss_of = |ipc: &dyn Fn(u32) -> f64| {
        let progress = (1..=12).map(|n| {
            measurement.observe(&counters_with_ipc(ipc(n)), vm.now.after(Ns::secs(30 * u64::from(n))))
        });
        match progress.last() {
            Some(MoveProgress::Measured(loss)) => *loss,
            progress => panic!("{progress:?}"),
        }
    };
    // The second half of the samples that count is 10 % faster.
    let trend = loss_of(&|n| if n > 7 { 0.99 } else { 0.9 });
    assert!(!trend.is_label() && trend.standard_error > 0.045, "{trend:?}");
    assert!(!MeasuredLoss { standard_error: 0.0, loss: 3.1, ..trend.clone() }.is_label());
    assert!(MeasuredLoss { standard_error: 0.02, loss: 3.0, ..trend }.is_label());
}

#[test]
fn only_a_vm_entirely_on_the_pool_is_a_label_for_its_sensitivity() {
    let split = measured_loss(0.8, 1.0, 0.0).unwrap();
    assert_eq!(split.workload("p".to_owned()), None);
    let entire = MeasuredLoss { placement: Placement::EntirelyOnPool, ..split };
    let workload = entire.workload("p".to_owned()).unwrap();
    assert_eq!((workload.counters[IPC_INDEX], workload.slowdown), (1.0, entire.loss));
}

#[test]
fn runs_without_pool_evidence_are_training_data() {
    let known = |n: u32| {
        let dram_bound = f64::from(n % 20) / 20.0;
        let slowdown = if dram_bound > 0.5 { 0.2 } else { 0.0 };
        Workload { program: format!("p{n}"), counters: counters(dram_bound), slowdown }
    };
    let runs: Vec<LabelledRun> = (0..200).map(|n| LabelledRun::new(known(n), f64::NAN, f64::NAN)).collect();
    let model = LossModel::train(&runs, fraction(0.05), 1).unwrap();
    assert_eq!(model.accuracy.runs, 200);
    // Each run counts once, also if some values are known.
    let mixed: Vec<LabelledRun> = (0..200)
        .map(|n| LabelledRun::new(known(n), f64::from(n % 2), if n % 3 == 0 { 2.5 } else { f64::NAN }))
        .collect();
    assert_eq!(LossModel::train(&mixed, fraction(0.05), 1).unwrap().accuracy.runs, 200);
    let loss = |dram_bound: f64| {
        let counters = counters(dram_bound);
        let evidence = Evidence { counters, pool_loads: f64::NAN, latency_ratio: f64::NAN };
        model.estimate(&evidence, Placement::Split, Quality::Unknown).loss
    };
    assert!(loss(0.9) > 0.1 && loss(0.1) < 0.02, "{} {}", loss(0.9), loss(0.1));
}
