//! Runs the simulated rack with many seeds. `TARN_SEEDS` sets the number of seeds. The first seed
//! that fails is printed with its event log.

use sim::world::{RunSummary, World};
use tests::SIMULATION_STEPS;

/// Number of seeds if `TARN_SEEDS` is not set.
const SEED_COUNT_DEFAULT: u64 = 2000;
/// Maximum number of events printed before a failure.
const PRINTED_EVENTS_MAX: usize = 100;

#[test]
fn invariants_hold_under_all_faults() {
    let seeds = std::env::var("TARN_SEEDS")
        .map_or(SEED_COUNT_DEFAULT, |n| n.parse().expect("TARN_SEEDS is a number"));
    let mut sum = RunSummary::default();
    for seed in 0..seeds {
        match World::new(seed).run(SIMULATION_STEPS) {
            Ok(summary) => sum += summary,
            Err(_) => {
                panic!(
                    "{}",
                    World::new(seed)
                        .with_event_log(PRINTED_EVENTS_MAX)
                        .run(SIMULATION_STEPS)
                        .expect_err("a failing seed fails again")
                )
            }
        }
    }
    println!("{seeds} seeds: {sum:?}");
    let per_seed = |count: u64| count / seeds;
    assert!(
        per_seed(sum.reserved) > 0 && per_seed(sum.started) > 0 && per_seed(sum.scrubbed) > 0,
        "too few events: {sum:?}"
    );
    assert!(sum.moved > seeds && sum.faults > seeds, "too few events: {sum:?}");
}
