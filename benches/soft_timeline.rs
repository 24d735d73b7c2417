//! Measures the timeline of the paper (Soft Memory, section 5, figure 2): a cache holds 10 MiB of the 20 MiB of soft
//! memory, and a second process requests 12 MiB, which the daemon takes from the cache in part.
//!
//! The alternatives are without soft memory: the cache server is killed, as the OOM killer does, and is started again
//! at once with the memory that is left. Its clients fill it again by their misses. The server is `soft-cache` with a
//! constant budget, or Debian's redis-server with the same part of the memory that it needs for the values. A server
//! killed by the kernel is usually started again later than here.
//!
//! The load is the same for all servers: clients that request random keys, and read the values of missing keys from a
//! backend of constant latency. All keys are equally popular, so that the clients need each value that the second
//! process displaces, and a restarted server is full as early as possible.

#[path = "soft_timeline/load.rs"]
mod load;
#[path = "soft_timeline/report.rs"]
mod report;
#[path = "soft_timeline/run.rs"]
mod run;
#[path = "soft_timeline/second_process.rs"]
mod second_process;
#[path = "soft_timeline/timeline.rs"]
mod timeline;

use std::{process::ExitCode, time::Duration};

use benches::{cache_servers::Programs, failure::Failure};

use crate::run::{Scheme, run};

/// Latencies of the backend. Without latency, only the load limits the time to fill the cache again.
const BACKEND_LATENCIES: [Duration; 2] = [Duration::ZERO, Duration::from_millis(1)];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, name, socket] = &arguments[..]
        && name == second_process::ARGUMENT
    {
        second_process::main(socket);
        return ExitCode::SUCCESS;
    }
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("soft_timeline: {}", failure.error_chain());
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<(), Failure> {
    let programs = Programs::find()?;
    for latency in BACKEND_LATENCIES {
        let mut runs = Vec::new();
        for scheme in Scheme::ALL {
            runs.push(run(&programs, scheme, latency)?);
        }
        print!("{}", report::format(latency, &runs));
        report::write_figure(latency, &runs)?;
    }
    Ok(())
}
