//! The promise: a manager that was stopped, or killed, answers again within 200 ms of its start, with 65,536 slices and
//! 4,096 reservations in its store. Timed from the start of the process to its first answer about the rack and all its
//! hosts, which must be what it was before; agents reconnect meanwhile, as they do in production.

use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use benches::{
    disk::Disk,
    failure::Failure,
    load::{self, Ends},
    programs::{Programs, target_folder},
    rack::{Plan, Rack, Reserver, look},
    report::{Rounds, table, tell},
};
use clap::Parser;

/// Goal, in milliseconds.
const AIM_MS: f64 = 200.0;
/// How long a start may take at all.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Interval between attempts: short compared with the result.
const ASK_EVERY: Duration = Duration::from_micros(500);
/// Clients that fill the store.
const CLIENTS: usize = 64;
/// How long filling it may take.
const FILL_WITHIN: Duration = Duration::from_secs(600);

/// How soon a manager is back
#[derive(Debug, Parser)]
struct Args {
    /// How often it is stopped, and how often killed; the report shows medians
    #[arg(long, default_value_t = 7)]
    rounds: u32,
    /// Reservations in the store
    #[arg(long, default_value_t = 4096)]
    reservations: u32,
    /// Slices of each reservation
    #[arg(long, default_value_t = 8)]
    slices_each: u32,
    /// Where the store goes, on a disk [default: cargo's target folder]
    #[arg(long)]
    dir: Option<PathBuf>,
    #[command(flatten)]
    plan: Plan,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    tell("restart", measure(&args)).await
}

async fn measure(args: &Args) -> Result<String, Failure> {
    let programs = Programs::ready()?;
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

/// Reserves until the store has the intended size, with every slice in use.
async fn fill(rack: &Rack, args: &Args) -> Result<(), Failure> {
    let channels = rack.connect(8).await?;
    let writer = |n: usize| {
        let reserver = Reserver::new(channels[n % channels.len()].clone(), args.plan, "fill");
        reserver.of_slices(u64::from(args.slices_each)).waiting_until_ready()
    };
    let ends = Ends { after: FILL_WITHIN, writes_max: u64::from(args.reservations) };
    let (outcome, _) = load::run((0..CLIENTS).map(writer).collect(), ends).await?;
    eprintln!("  filled: {} reservations in {:.1} s", outcome.writes, outcome.elapsed.as_secs_f64());
    Ok(())
}

/// Stops the manager, restarts it, and returns the milliseconds until its first reply.
async fn restart(rack: &mut Rack, args: &Args, gracefully: bool) -> Result<f64, Failure> {
    if let Some(manager) = rack.take_manager() {
        if gracefully { manager.stop().await? } else { manager.kill() }
    }
    let start = Instant::now();
    rack.start_manager()?;
    let slices_free = loop {
        let answer = look(&rack.uri(), &rack.bearer()?).await;
        if let Ok(answer) = answer {
            break answer.slices_free;
        }
        rack.still_runs()?;
        if start.elapsed() > ANSWER_WITHIN {
            answer?;
        }
        tokio::time::sleep(ASK_EVERY).await;
    };
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    eprintln!("  {}: {milliseconds:.0} ms", if gracefully { "stopped" } else { "killed" });
    remembers(args, slices_free)?;
    rack.hosts_are_up().await?;
    Ok(milliseconds)
}

/// A fast answer that has forgotten something is no answer.
fn remembers(args: &Args, slices_free: u32) -> Result<(), Failure> {
    let expected = args.plan.slices() - args.reservations * args.slices_each;
    if slices_free == expected {
        return Ok(());
    }
    let answer = format!("{slices_free} slices free after a restart, {expected} before");
    Err(Failure::Answer { what: "look at the rack".to_owned(), answer })
}

fn report(args: &Args, disk: &Disk, stopped: &Rounds, killed: &Rounds) -> String {
    let row = |name: &str, times: &Rounds| vec![name.to_owned(), times.show(), format!("{AIM_MS}")];
    let rows = [row("after SIGTERM", stopped), row("after SIGKILL", killed)];
    format!(
        "\nrestart with {} slices, {} reservations of {} slices; store on {}; {} rounds\n\n{}",
        args.plan.slices(),
        args.reservations,
        args.slices_each,
        disk.kind,
        args.rounds,
        table(&["ms to the first answer", "least-median-most", "aim"], &rows),
    )
}
