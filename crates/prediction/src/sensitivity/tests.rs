//! Who is placed on the pool, and who is not.

use units::Fraction;

use super::{
    trial::{Untold, run},
    *,
};

fn fraction(share: f64) -> Fraction {
    Fraction::new(share).unwrap()
}

/// Programs whose slowdown follows from two counters together, and from neither alone.
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
fn a_forest_sees_what_no_threshold_on_one_counter_can() {
    let rates = [fraction(0.02), fraction(0.1)];
    for said in run(&workloads(120), fraction(0.05), &rates, 20, 1).unwrap() {
        // Half of the programs are not slowed down at all, and one in ten of the others.
        assert!(said.forest.placed > 0.5, "{said:?}");
        assert!(
            said.forest.placed > said.dram_bound.placed + 0.2
                && said.dram_bound.placed > said.memory_bound.placed,
            "{said:?}"
        );
        assert!(said.forest.tuned_fp <= said.fp_asked + 0.01, "{said:?}");
        assert!(said.forest.placed_p1 <= said.forest.placed && said.forest.placed <= said.forest.placed_p99);
    }
}

#[test]
fn thresholds_look_at_the_counters_they_are_named_after() {
    assert_eq!([COUNTERS[MEMORY_BOUND], COUNTERS[DRAM_BOUND]], ["memory_bound", "dram_bound"]);
}

#[test]
fn the_same_seed_parts_the_programs_alike() {
    let told = |seed| run(&workloads(40), fraction(0.05), &[fraction(0.1)], 3, seed).unwrap();
    assert_eq!(told(1), told(1));
    assert_ne!(told(1), told(2));
}

#[test]
fn what_cannot_be_told_is_said() {
    let told = |workloads: &[Workload], splits| {
        run(workloads, fraction(0.05), &[fraction(0.1)], splits, 1).unwrap_err()
    };
    assert_eq!(told(&workloads(9), 3), Untold::Few(9));
    assert_eq!(told(&workloads(40), 0), Untold::Splits(0));
    let idle: Vec<Workload> =
        workloads(40).into_iter().map(|one| Workload { slowdown: 0.0, ..one }).collect();
    assert_eq!(told(&idle, 3), Untold::OneKind);
}

#[test]
fn labels_are_read_by_name_and_what_was_not_measured_is_missing() {
    let head = format!("slowdown,{},program", COUNTERS.join(","));
    let row = |first: &str| format!("{head}\n0.25,{first}{},mcf\n", ",0.5".repeat(COUNTERS.len() - 1));
    let one = &read(row("").as_bytes()).unwrap()[0];
    assert_eq!((one.program.as_str(), one.slowdown, one.counters[1]), ("mcf", 0.25, 0.5));
    assert!(one.counters[0].is_nan());
    let refusal = |text: &str| read(text.as_bytes()).unwrap_err().to_string();
    assert_eq!(
        refusal(&row("NaN")),
        "line 2: retiring = \"NaN\": must be empty or a number from 0 to 1000000"
    );
    assert!(
        refusal(&row("0").replace("0.25", "-1")).starts_with("line 2: slowdown = \"-1\": must be a number")
    );
    assert_eq!(
        refusal(&format!("{head},dram_bound\n")),
        "column \"dram_bound\" is there twice: must be once"
    );
    assert!(refusal(&row("NaN").replace('\n', "\r\n")).starts_with("line 2: retiring"));
    assert!(refusal("program,slowdown\n").starts_with("there is no column \"retiring\""));
    assert!(
        refusal(&head.replace("program", "name"))
            .starts_with("column \"name\": must be program, slowdown, or one of")
    );
}
