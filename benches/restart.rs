//! Measures the time from the start of a manager process to its first reply. The previous process
//! was stopped with SIGTERM or SIGKILL.
//!
//! Goal: at most 200 ms, with 65,536 slices and 4,096 reservations in the store. The restarted
//! manager must report the same number of free slices as before. Agents reconnect during the
//! measurement, as in production.

use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use benches::{
    disk::Disk,
    failure::Failure,
    load::{self, LoadLimits},
    process,
    programs::{Programs, target_folder},
    rack::{Plan, Rack, Reserver, query_rack},
    report::{Rounds, format_table, run_and_print},
};
use clap::Parser;

/// Goal for the time to the first reply, in milliseconds.
const RESTART_GOAL_MS: f64 = 200.0;
/// Maximum time from the start of a manager to its first reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between attempts to get a reply. Much shorter than the measured times, so that the
/// interval does not distort the times.
const RETRY_INTERVAL: Duration = Duration::from_micros(500);
/// Number of concurrent clients that fill the store.
const CLIENT_COUNT: usize = 64;
/// Maximum time to fill the store.
const FILL_TIMEOUT: Duration = Duration::from_secs(600);

/// Measure the time until a restarted manager replies
#[derive(Debug, Parser)]
struct Args {
    /// Number of stops and number of kills. The report shows medians
    #[arg(long, default_value_t = 7)]
    rounds: u32,
    /// Number of reservations in the store
    #[arg(long, default_value_t = 4096)]
    reservations: u32,
    /// Number of slices of each reservation
    #[arg(long, default_value_t = 8)]
    slices_each: u32,
    /// Folder of the store, on a disk [default: cargo's target folder]
    #[arg(long)]
    dir: Option<PathBuf>,
    #[command(flatten)]
    plan: Plan,
    /// Flag that cargo passes to benchmarks, without effect
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    run_and_print("restart", measure(&args)).await
}

async fn measure(args: &Args) -> Result<String, Failure> {
    let programs = Programs::find_or_build()?;
    let disk = Disk::new(&args.dir.clone().map_or_else(target_folder, Ok)?)?;
    let mut rack = Rack::start(args.plan, &programs, disk.path()).await?;
    fill(&rack, args).await?;
    let (mut stopped, mut killed) = (Rounds::default(), Rounds::default());
    for _ in 0..args.rounds {
        stopped.add(restart(&mut rack, args, true).await?);
        killed.add(restart(&mut rack, args, false).await?);
    }
    Ok(report(args, &disk, &stopped, &killed))
}

/// Fills the store with reservations, and waits until all their slices are online.
async fn fill(rack: &Rack, args: &Args) -> Result<(), Failure> {
    let channels = rack.connect(8).await?;
    let writer = |n: usize| {
        let reserver = Reserver::new(channels[n % channels.len()].clone(), args.plan, "fill");
        reserver.with_slices(u64::from(args.slices_each)).wait_ready()
    };
    let limits = LoadLimits { duration_max: FILL_TIMEOUT, writes_max: u64::from(args.reservations) };
    let (outcome, _) = load::run((0..CLIENT_COUNT).map(writer).collect(), limits).await?;
    eprintln!("  filled: {} reservations in {:.1} s", outcome.writes, outcome.elapsed.as_secs_f64());
    Ok(())
}

/// Stops the manager, restarts it, and returns the milliseconds until its first reply.
async fn restart(rack: &mut Rack, args: &Args, gracefully: bool) -> Result<f64, Failure> {
    if let Some(manager) = rack.take_manager() {
        if gracefully { process::stop(manager).await? } else { manager.kill() }
    }
    let start = Instant::now();
    rack.start_manager()?;
    let slices_free = loop {
        let reply = query_rack(&rack.uri(), &rack.bearer()?).await;
        if let Ok(reply) = reply {
            break reply.slices_free;
        }
        rack.check_running()?;
        if start.elapsed() > REPLY_TIMEOUT {
            reply?;
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    };
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    eprintln!("  {}: {milliseconds:.0} ms", if gracefully { "stopped" } else { "killed" });
    check_free_slices(args, slices_free)?;
    rack.wait_hosts_up().await?;
    Ok(milliseconds)
}

/// Checks that the restarted manager reports the expected number of free slices.
fn check_free_slices(args: &Args, slices_free: u32) -> Result<(), Failure> {
    let expected = args.plan.slices() - args.reservations * args.slices_each;
    if slices_free == expected {
        return Ok(());
    }
    let reply = format!("{slices_free} slices free after a restart, {expected} before");
    Err(Failure::UnexpectedReply { subject: "get the rack".to_owned(), reply })
}

fn report(args: &Args, disk: &Disk, stopped: &Rounds, killed: &Rounds) -> String {
    let row =
        |name: &str, times: &Rounds| vec![name.to_owned(), times.summary(), format!("{RESTART_GOAL_MS}")];
    let rows = [row("after SIGTERM", stopped), row("after SIGKILL", killed)];
    format!(
        "\nrestart with {} slices, {} reservations of {} slices; store on {}; {} rounds\n\n{}",
        args.plan.slices(),
        args.reservations,
        args.slices_each,
        disk.kind,
        args.rounds,
        format_table(&["ms to the first reply", "min-median-max", "goal"], &rows),
    )
}
