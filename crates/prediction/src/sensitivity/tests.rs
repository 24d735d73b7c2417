//! Tests of the sensitivity prediction: the forest and its baselines, errors, and labels.

use units::Fraction;

use super::{
    backtest::{EvaluationError, UnseenKindStats, run},
    *,
};

fn fraction(share: f64) -> Fraction {
    Fraction::new(share).unwrap()
}

/// Returns workloads whose slowdown depends on two counters together, so that no threshold on one
/// counter predicts it. Each program has three workloads.
fn workloads(programs: u32) -> Vec<Workload> {
    let program = |n: u32| {
        let (mut counters, bound, parallel) =
            ([0.1; COUNTER_NAMES.len()], f64::from(n % 10) / 10.0, f64::from(n / 10 % 2));
        counters[DRAM_BOUND_INDEX] = bound;
        counters[MEMORY_BOUND_INDEX] = 0.9 - bound;
        counters[COUNTER_NAMES.len() - 1] = parallel;
        let slowdown = if parallel > 0.5 { 0.0 } else { bound };
        (0..3).map(move |_| Workload { program: format!("p{n}"), counters, slowdown })
    };
    (0..programs).flat_map(program).collect()
}

#[test]
fn forest_beats_single_counter_thresholds() {
    let rates = [fraction(0.02), fraction(0.1)];
    for result in run(&workloads(120), fraction(0.05), &rates, 20, 1).unwrap() {
        // Half of the programs, and a tenth of the other half, are not slowed down beyond the
        // margin.
        assert!(result.forest.placed > 0.5, "{result:?}");
        assert!(
            result.forest.placed > result.dram_bound.placed + 0.2
                && result.dram_bound.placed > result.memory_bound.placed,
            "{result:?}"
        );
        assert!(result.forest.tuned_fp <= result.fp_target + 0.01, "{result:?}");
        assert!(
            result.forest.placed_p1 <= result.forest.placed
                && result.forest.placed <= result.forest.placed_p99
        );
    }
}

#[test]
fn counter_indexes_match_counter_names() {
    assert_eq!(
        [
            MEMORY_BOUND_INDEX,
            DRAM_LATENCY_BOUND_INDEX,
            STORE_BOUND_INDEX,
            DRAM_BOUND_INDEX,
            IPC_INDEX,
            L3_MPKI_INDEX,
            MLP_INDEX
        ]
        .map(|index| COUNTER_NAMES[index]),
        [
            "memory_bound",
            "dram_latency_bound",
            "store_bound",
            "dram_bound",
            "ipc",
            "l3_mpki",
            "memory_level_parallelism"
        ]
    );
}

#[test]
fn l3_mpki_threshold_is_a_baseline() {
    let workloads: Vec<Workload> = workloads(40)
        .into_iter()
        .map(|mut workload| {
            workload.counters[L3_MPKI_INDEX] = 100.0 * workload.slowdown;
            workload
        })
        .collect();
    let result = run(&workloads, fraction(0.05), &[fraction(0.01)], 3, 1).unwrap()[0];
    // Half of the programs, and a tenth of the other half, are not slowed down beyond the margin.
    assert!((0.45..0.65).contains(&result.l3_mpki.placed), "{result:?}");
    assert!(result.l3_mpki.placed > result.dram_bound.placed + 0.2, "{result:?}");
}

#[test]
fn unseen_kind_is_scored_without_its_own_workloads() {
    // For the kind `odd`, the counter has the opposite meaning: a model from other kinds is wrong.
    let workload = |kind: &str, n: u32, is_slowed: bool, bound: f64| {
        let mut counters = [0.1; COUNTER_NAMES.len()];
        counters[DRAM_BOUND_INDEX] = bound;
        let slowdown = if is_slowed { 0.5 } else { 0.0 };
        Workload { program: format!("{kind}-{n}"), counters, slowdown }
    };
    let workloads: Vec<Workload> = (0..60)
        .flat_map(|n| {
            let is_slowed = n % 2 == 0;
            let (high, low) = if is_slowed { (0.9, 0.1) } else { (0.1, 0.9) };
            [
                workload("plain", n, is_slowed, high),
                workload("even", n, is_slowed, high),
                workload("odd", n, is_slowed, low),
            ]
        })
        .collect();
    assert_eq!(workloads[2].kind(), "odd");
    let of_two_kinds: Vec<Workload> =
        workloads.iter().filter(|workload| workload.kind() != "odd").cloned().collect();
    let unseen = |workloads: &[Workload]| {
        run(workloads, fraction(0.05), &[fraction(0.01)], 1, 1).unwrap()[0].dram_bound.unseen_kind
    };
    let UnseenKindStats { placed, fp } = unseen(&of_two_kinds).unwrap();
    assert!((placed - 0.5).abs() < 1e-9 && fp == 0.0, "{placed} {fp}");
    let UnseenKindStats { fp, .. } = unseen(&workloads).unwrap();
    assert!((fp - 1.0 / 6.0).abs() < 1e-9, "all slowed workloads of `odd` are placed: {fp}");
    let of_one_kind: Vec<Workload> =
        workloads.into_iter().filter(|workload| workload.kind() == "plain").collect();
    assert_eq!(unseen(&of_one_kind), None);
}

#[test]
fn same_seed_gives_same_splits() {
    let evaluate = |seed| run(&workloads(40), fraction(0.05), &[fraction(0.1)], 3, seed).unwrap();
    assert_eq!(evaluate(1), evaluate(1));
    assert_ne!(evaluate(1), evaluate(2));
}

#[test]
fn workloads_that_cannot_be_evaluated_are_rejected() {
    let evaluate = |workloads: &[Workload], splits| {
        run(workloads, fraction(0.05), &[fraction(0.1)], splits, 1).unwrap_err()
    };
    assert_eq!(evaluate(&workloads(9), 3), EvaluationError::TooFewPrograms(9));
    assert_eq!(evaluate(&workloads(40), 0), EvaluationError::Splits(0));
    let insensitive: Vec<Workload> =
        workloads(40).into_iter().map(|workload| Workload { slowdown: 0.0, ..workload }).collect();
    assert_eq!(evaluate(&insensitive, 3), EvaluationError::SingleClass);
}
