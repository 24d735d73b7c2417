//! Compares the pause of a guest whose pool memory is moved to local memory while it runs with the pause
//! of a stop-and-copy of the same size.
//!
//! Goal: the pause is at most a tenth of the pause of a stop-and-copy.
//!
//! Two stock Debian guests run in an emulated host and write the same amount of memory. The pool memory
//! (1 GiB) of one guest is moved while the guest runs. The other guest is paused during its whole move.

use std::{process::ExitCode, time::Duration};

use benches::{
    failure::Failure,
    report::{Rounds, format_ratio, format_table, run_and_print},
};
use clap::Parser;
use tests::rehomed_guests::{control_guest, rehome, start_guest, start_rack, wait_for_rounds};

/// Data of each guest in its slice, in MiB.
const DATA_MIB: u32 = 768;

/// Measure the pause of a move to local memory
#[derive(Debug, Parser)]
struct Args {
    /// Number of racks; each measures both pauses once. The report shows medians
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=50))]
    rounds: u32,
    /// Flag that cargo passes to benchmarks, without effect
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    run_and_print("rehome_pause", measure(args.rounds)).await
}

async fn measure(rounds: u32) -> Result<String, Failure> {
    let (mut running, mut stopped) = (Rounds::default(), Rounds::default());
    for _ in 0..rounds {
        let [pause, stop] = tokio::task::spawn_blocking(measure_pauses).await.expect("the rack works");
        running.add(pause.as_secs_f64() * 1000.0);
        stopped.add(stop.as_secs_f64() * 1000.0);
    }
    let rows = vec![
        vec!["moved while the guest runs".to_owned(), running.spread(1)],
        vec!["moved while the guest is paused".to_owned(), stopped.spread(1)],
    ];
    let table = format_table(&["1 GiB of pool memory", "pause: min median max (ms)"], &rows);
    let ratio = format_ratio("rehome_pause_vs_stop_and_copy", stopped.median() / running.median());
    Ok(format!("{table}\n{ratio}"))
}

/// Returns the pause of the running guest, and the duration of the move of the paused guest.
fn measure_pauses() -> [Duration; 2] {
    let rack = start_rack("dax", 2, DATA_MIB);
    start_guest(&rack, "running");
    let pause = rehome(&rack, "running").pause;
    wait_for_rounds(&rack, "running", 1);
    start_guest(&rack, "paused");
    control_guest(&rack, "paused", "pause");
    let stop = rehome(&rack, "paused").duration;
    control_guest(&rack, "paused", "resume");
    wait_for_rounds(&rack, "paused", 1);
    [pause, stop]
}
