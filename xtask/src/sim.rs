//! `cargo xtask sim`: the rack in one thread, grown from many seeds, in release. The simulation itself is the room `sim`
//! and the program of that name in `tests`. And `cargo xtask sim symbiosis`: tenants of one host out of traces, by `tarn`.

use std::path::{self, Path, PathBuf};

use crate::{failure::Failure, repository::cargo, step::step};

/// Seeds, or another simulation.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    /// How many
    #[arg(long, default_value_t = 1_000_000)]
    seeds: u64,
    /// The first
    #[arg(long, default_value_t = 0)]
    from: u64,
}

/// Other simulations.
#[derive(Clone, Debug, clap::Subcommand)]
enum Other {
    /// Compare shares by several schemes, for tenants that replay traces
    Symbiosis {
        /// A folder of traces
        #[arg(long, value_name = "DIR")]
        traces: PathBuf,
        /// Write all numbers there, as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Draw into that folder
        #[arg(long, value_name = "FOLDER")]
        figures: Option<PathBuf>,
    },
}

/// Runs them all; a seed that fails is printed by the simulation and ends it.
///
/// # Errors
/// A seed fails, or a trace cannot be read.
pub fn run(args: &Args) -> Result<(), Failure> {
    if let Some(Other::Symbiosis { traces, json, figures }) = &args.other {
        return symbiosis(traces, json.as_deref(), figures.as_deref());
    }
    let (seeds, from) = (args.seeds.to_string(), args.from.to_string());
    let words = ["run", "--release", "--package", "tests", "--bin", "sim", "--"];
    step("simulation", cargo(&words).args(["--seeds", &seeds, "--from", &from]))
}

fn symbiosis(traces: &Path, json: Option<&Path>, figures: Option<&Path>) -> Result<(), Failure> {
    // Cargo runs in the root, and paths are where the caller is.
    let here = |given: &Path| path::absolute(given).map_err(Failure::file("find", given));
    let mut tarn =
        cargo(&["run", "--release", "--package", "cli", "--bin", "tarn", "--", "evaluate", "symbiosis"]);
    tarn.arg("--traces").arg(here(traces)?);
    for (flag, given) in [("--json", json), ("--figures", figures)] {
        if let Some(given) = given {
            tarn.arg(flag).arg(here(given)?);
        }
    }
    step("symbiosis", &mut tarn)
}
