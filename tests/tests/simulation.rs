//! Seeds of the simulated rack: `TARN_SEEDS` sets their number; a failing one is printed with its
//! event log.

use sim::world::{Summary, World};
use tests::SIMULATION_STEPS;

const SEEDS_DEFAULT: u64 = 2000;
/// Events printed before a failure.
const EVENTS_TOLD: usize = 100;

#[test]
fn every_promise_is_kept_whatever_happens_to_wire_disk_devices_hosts_and_manager() {
    let seeds =
        std::env::var("TARN_SEEDS").map_or(SEEDS_DEFAULT, |n| n.parse().expect("TARN_SEEDS is a number"));
    let mut sum = Summary::default();
    for seed in 0..seeds {
        match World::new(seed).run(SIMULATION_STEPS) {
            Ok(summary) => sum += summary,
            Err(_) => {
                panic!(
                    "{}",
                    World::new(seed).with_event_log(EVENTS_TOLD).run(SIMULATION_STEPS).expect_err("a seed replays")
                )
            }
        }
    }
    println!("{seeds} seeds: {sum:?}");
    let each = |count: u64| count / seeds;
    assert!(
        each(sum.reserved) > 0 && each(sum.started) > 0 && each(sum.scrubbed) > 0,
        "too little happened: {sum:?}"
    );
    assert!(sum.moved > seeds && sum.faults > seeds, "too little happened: {sum:?}");
}
