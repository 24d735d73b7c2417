//! `cargo xtask sim`: the rack in one thread, grown from many seeds, in release. The simulation itself is the room `sim`
//! and the program of that name in `tests`.

use crate::{failure::Failure, repository::cargo, step::step};

/// Which seeds.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Args {
    /// How many
    #[arg(long, default_value_t = 1_000_000)]
    seeds: u64,
    /// The first
    #[arg(long, default_value_t = 0)]
    from: u64,
}

/// Runs them all; a seed that fails is printed by the simulation and ends it.
///
/// # Errors
/// A seed fails.
pub fn run(args: &Args) -> Result<(), Failure> {
    let (seeds, from) = (args.seeds.to_string(), args.from.to_string());
    let words = ["run", "--release", "--package", "tests", "--bin", "sim", "--"];
    step("simulation", cargo(&words).args(["--seeds", &seeds, "--from", &from]))
}
