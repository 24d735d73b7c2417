//! Sensitivity: the forest against its baselines, errors, and reading labels.

use units::Fraction;

use super::{
    backtest::{EvaluationError, run},
    *,
};

fn fraction(share: f64) -> Fraction {
    Fraction::new(share).unwrap()
}

/// Programs whose slowdown depends on two counters jointly, and on neither alone.
fn workloads(programs: u32) -> Vec<Workload> {
    let one = |n: u32| {
        let (mut counters, bound, parallel) =
            ([0.1; COUNTERS.len()], f64::from(n % 10) / 10.0, f64::from(n / 10 % 2));
        counters[DRAM_BOUND] = bound;
        counters[MEMORY_BOUND] = 0.9 - bound;
        counters[COUNTERS.len() - 1] = parallel;
        let slowdown = if parallel > 0.5 { 0.0 } else { bound };
        (0..3).map(move |_| Workload { program: format!("p{n}"), counters, slowdown })
    };
    (0..programs).flat_map(one).collect()
}

#[test]
fn forest_beats_single_counter_thresholds() {
    let rates = [fraction(0.02), fraction(0.1)];
    for result in run(&workloads(120), fraction(0.05), &rates, 20, 1).unwrap() {
        // Half of the programs are not slowed down, and one in ten of the others.
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
fn threshold_indexes_match_counter_names() {
    assert_eq!([COUNTERS[MEMORY_BOUND], COUNTERS[DRAM_BOUND]], ["memory_bound", "dram_bound"]);
}

#[test]
fn same_seed_gives_same_splits() {
    let evaluate = |seed| run(&workloads(40), fraction(0.05), &[fraction(0.1)], 3, seed).unwrap();
    assert_eq!(evaluate(1), evaluate(1));
    assert_ne!(evaluate(1), evaluate(2));
}

#[test]
fn unusable_workloads_are_rejected() {
    let evaluate = |workloads: &[Workload], splits| {
        run(workloads, fraction(0.05), &[fraction(0.1)], splits, 1).unwrap_err()
    };
    assert_eq!(evaluate(&workloads(9), 3), EvaluationError::TooFewPrograms(9));
    assert_eq!(evaluate(&workloads(40), 0), EvaluationError::Splits(0));
    let idle: Vec<Workload> =
        workloads(40).into_iter().map(|one| Workload { slowdown: 0.0, ..one }).collect();
    assert_eq!(evaluate(&idle, 3), EvaluationError::SingleClass);
}

#[test]
fn labels_match_columns_by_name_and_allow_missing_counters() {
    let head = format!("slowdown,{},program", COUNTERS.join(","));
    let row = |first: &str| format!("{head}\n0.25,{first}{},mcf\n", ",0.5".repeat(COUNTERS.len() - 1));
    let one = &read_labels(row("").as_bytes()).unwrap()[0];
    assert_eq!((one.program.as_str(), one.slowdown, one.counters[1]), ("mcf", 0.25, 0.5));
    assert!(one.counters[0].is_nan());
    let error_of = |text: &str| read_labels(text.as_bytes()).unwrap_err().to_string();
    assert_eq!(
        error_of(&row("NaN")),
        "line 2: retiring = \"NaN\": must be empty or a number from 0 to 1000000"
    );
    assert!(
        error_of(&row("0").replace("0.25", "-1")).starts_with("line 2: slowdown = \"-1\": must be a number")
    );
    assert_eq!(error_of(&format!("{head},dram_bound\n")), "duplicate column \"dram_bound\"");
    assert!(error_of(&row("NaN").replace('\n', "\r\n")).starts_with("line 2: retiring"));
    assert!(error_of("program,slowdown\n").starts_with("missing column \"retiring\""));
    assert!(
        error_of(&head.replace("program", "name"))
            .starts_with("unknown column \"name\": must be program, slowdown, or one of")
    );
}
