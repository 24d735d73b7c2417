//! Compares the cache server `soft-cache` with Debian's redis-server (maxmemory, allkeys-lru) in the same run.
//!
//! Goals: at least the throughput of Redis for GET and SET with 50 clients of redis-benchmark; at least the hit ratio
//! of Redis with at most as much resident memory; no error and at most twice the latency (99th percentile) while the
//! memory is halved under load.

#[path = "soft_cache/halving.rs"]
mod halving;
#[path = "soft_cache/hit_ratio.rs"]
mod hit_ratio;
#[path = "soft_cache/throughput.rs"]
mod throughput;

use std::process::ExitCode;

use benches::{cache_servers::Programs, failure::Failure, report::run_and_print};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    run_and_print("soft_cache", measure()).await
}

async fn measure() -> Result<String, Failure> {
    let programs = Programs::find()?;
    let throughput = throughput::measure(&programs)?;
    print!("{throughput}");
    let halving = halving::measure(&programs)?;
    print!("{halving}");
    hit_ratio::measure(&programs)
}
