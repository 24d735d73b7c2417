//! Command line of the simulation: many seeds in parallel, or one with its event log. The crate
//! `sim` defines worlds and invariants.

use std::{
    process::ExitCode,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use sim::world::{Failure, Summary, World};

/// Events printed before a failure by default.
const EVENTS_TOLD: usize = 60;
/// Interval of progress messages.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);
/// How often is looked whether it is over.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Grows racks from seeds and looks after every step whether each promise is kept
#[derive(Debug, Parser)]
struct Args {
    /// How many seeds
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Just this seed
    #[arg(long, conflicts_with_all = ["seeds", "from"])]
    seed: Option<u64>,
    /// Steps before the world becomes quiescent
    #[arg(long, default_value_t = tests::SIMULATION_STEPS)]
    steps: u64,
    /// Print all events before a failure, not just the last ones
    #[arg(long)]
    trace: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let (first, seeds) = args.seed.map_or((args.from, args.seeds), |seed| (seed, 1));
    match run(first, seeds, &args) {
        Ok(summary) => {
            println!("{seeds} seeds kept every promise: {summary:?}");
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

/// Runs one thread per core. Of several failures the one of the lowest seed is reported.
fn run(first: u64, seeds: u64, args: &Args) -> Result<Summary, Box<Failure>> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let turns = Turns { next: AtomicU64::new(0), done: AtomicU64::new(0), over: AtomicBool::new(false) };
    let outcomes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(|| turns.take(first, seeds, args))).collect();
        turns.tell(seeds);
        threads.into_iter().map(|thread| thread.join().expect("a world does not panic")).collect()
    });
    let mut sum = Summary::default();
    let mut failures = Vec::new();
    for outcome in outcomes {
        match outcome {
            Ok(part) => sum += part,
            Err(failure) => failures.push(failure),
        }
    }
    failures.into_iter().min_by_key(|failure| failure.seed).map_or(Ok(sum), Err)
}

/// Which seed is next, and how many are done.
struct Turns {
    next: AtomicU64,
    done: AtomicU64,
    over: AtomicBool,
}

impl Turns {
    /// Grows one seed after the other until none is left or one has failed.
    fn take(&self, first: u64, seeds: u64, args: &Args) -> Result<Summary, Box<Failure>> {
        let mut sum = Summary::default();
        while !self.over.load(Ordering::Relaxed) {
            let n = self.next.fetch_add(1, Ordering::Relaxed);
            if n >= seeds {
                break;
            }
            sum += one(first + n, args).inspect_err(|_| self.over.store(true, Ordering::Relaxed))?;
            self.done.fetch_add(1, Ordering::Relaxed);
        }
        self.over.store(true, Ordering::Relaxed); // those under way are ended all the same
        Ok(sum)
    }

    /// Prints the progress periodically.
    fn tell(&self, seeds: u64) {
        let (started, mut told) = (Instant::now(), Instant::now());
        while !self.over.load(Ordering::Relaxed) {
            thread::sleep(LOOK_EVERY);
            if told.elapsed() >= PROGRESS_EVERY {
                told = Instant::now();
                let done = self.done.load(Ordering::Relaxed);
                let pace = done as f64 / started.elapsed().as_secs_f64();
                println!("{done} of {seeds} seeds, {pace:.0} seeds/s");
            }
        }
    }
}

/// Runs a failing seed again, with its event log.
fn one(seed: u64, args: &Args) -> Result<Summary, Box<Failure>> {
    let story = |events| World::new(seed).with_event_log(events).run(args.steps);
    if args.trace { story(usize::MAX) } else { story(0).or_else(|_| story(EVENTS_TOLD)) }
}
