//! The simulation from the command line: many seeds as fast as they go, or one of them told as a story. What a seed
//! means and what is promised is the business of the room `sim`.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;
use sim::world::{Failure, Summary, World};

/// How much of what led to a failure is told unless more is asked for.
const EVENTS_TOLD: usize = 60;
/// How often progress is told.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);

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
    /// How many steps before everything comes to rest
    #[arg(long, default_value_t = tests::SIMULATION_STEPS)]
    steps: u64,
    /// Tell everything that led to a failure, not just the end of it
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

fn run(first: u64, seeds: u64, args: &Args) -> Result<Summary, Box<Failure>> {
    let (started, mut told, mut sum) = (Instant::now(), Instant::now(), Summary::default());
    for (seed, done) in (first..first + seeds).zip(1_u64..) {
        sum += one(seed, args)?;
        if told.elapsed() >= PROGRESS_EVERY {
            told = Instant::now();
            println!("{done} of {seeds} seeds, {:.0} seeds/s", done as f64 / started.elapsed().as_secs_f64());
        }
    }
    Ok(sum)
}

/// A seed that fails is lived again, told as a story.
fn one(seed: u64, args: &Args) -> Result<Summary, Box<Failure>> {
    let story = |events| World::new(seed).told(events).run(args.steps);
    if args.trace { story(usize::MAX) } else { story(0).or_else(|_| story(EVENTS_TOLD)) }
}
