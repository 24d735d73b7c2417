//! Command line of the rack simulation. Runs many seeds in parallel, or one seed with its event
//! log. The crate `sim` implements the simulation and its invariants.

use std::{
    process::ExitCode,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread::{self, ScopedJoinHandle},
    time::{Duration, Instant},
};

use clap::Parser;
use sim::world::{Failure, RunSummary, World};

/// Maximum number of events printed before a failure without `--trace`.
const PRINTED_EVENTS_MAX: usize = 60;
/// Interval between progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);
/// Interval between checks whether all seeds are done.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Simulate racks from random seeds and check invariants after each step
#[derive(Debug, Parser)]
struct Args {
    /// Number of seeds
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// First seed
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Run only this seed
    #[arg(long, conflicts_with_all = ["seeds", "from"])]
    seed: Option<u64>,
    /// Number of steps with faults, before the rack must become quiescent
    #[arg(long, default_value_t = tests::SIMULATION_STEPS)]
    steps: u64,
    /// Print all events before a failure, not only the last events
    #[arg(long)]
    trace: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let (first, seeds) = args.seed.map_or((args.from, args.seeds), |seed| (seed, 1));
    match run(first, seeds, &args) {
        Ok(summary) => {
            println!("{seeds} seeds passed: {summary:?}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            println!(
                "{failure}\nreplay: cargo run --release -p tests --bin sim -- --seed {} --steps {} --trace",
                failure.seed, args.steps
            );
            ExitCode::FAILURE
        }
    }
}

/// Runs all seeds with one thread per core. Returns the failure with the lowest seed, if any.
fn run(first: u64, seeds: u64, args: &Args) -> Result<RunSummary, Box<Failure>> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let queue =
        SeedQueue { next: AtomicU64::new(0), done: AtomicU64::new(0), is_done: AtomicBool::new(false) };
    let outcomes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> =
            (0..cores).map(|_| scope.spawn(|| queue.run_seeds(first, seeds, args))).collect();
        queue.print_progress(seeds, &threads);
        threads.into_iter().map(|thread| thread.join().expect("a world does not panic")).collect()
    });
    let mut sum = RunSummary::default();
    let mut failures = Vec::new();
    for outcome in outcomes {
        match outcome {
            Ok(part) => sum += part,
            Err(failure) => failures.push(failure),
        }
    }
    failures.into_iter().min_by_key(|failure| failure.seed).map_or(Ok(sum), Err)
}

/// Queue of seeds, shared by all threads.
struct SeedQueue {
    next: AtomicU64,
    done: AtomicU64,
    is_done: AtomicBool,
}

impl SeedQueue {
    /// Runs seeds until all seeds are done or one fails.
    fn run_seeds(&self, first: u64, seeds: u64, args: &Args) -> Result<RunSummary, Box<Failure>> {
        let mut sum = RunSummary::default();
        while !self.is_done.load(Ordering::Relaxed) {
            let n = self.next.fetch_add(1, Ordering::Relaxed);
            if n >= seeds {
                break;
            }
            sum += run_seed(first + n, args).inspect_err(|_| self.is_done.store(true, Ordering::Relaxed))?;
            self.done.fetch_add(1, Ordering::Relaxed);
        }
        Ok(sum)
    }

    /// Prints the progress periodically until a thread ends, because all seeds are done or one fails or panics.
    fn print_progress<T>(&self, seeds: u64, threads: &[ScopedJoinHandle<'_, T>]) {
        let (start, mut last_print) = (Instant::now(), Instant::now());
        while !threads.iter().any(ScopedJoinHandle::is_finished) {
            thread::sleep(POLL_INTERVAL);
            if last_print.elapsed() >= PROGRESS_INTERVAL {
                last_print = Instant::now();
                let done = self.done.load(Ordering::Relaxed);
                let rate = done as f64 / start.elapsed().as_secs_f64();
                println!("{done} of {seeds} seeds, {rate:.0} seeds/s");
            }
        }
        self.is_done.store(true, Ordering::Relaxed);
    }
}

/// Runs a seed. If the seed fails, runs the seed again with an event log.
fn run_seed(seed: u64, args: &Args) -> Result<RunSummary, Box<Failure>> {
    let run = |events| World::new(seed).with_event_log(events).run(args.steps);
    if args.trace { run(usize::MAX) } else { run(0).or_else(|_| run(PRINTED_EVENTS_MAX)) }
}
