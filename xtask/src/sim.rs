//! `cargo xtask sim`: runs simulations of racks, one per seed, in release mode. The crate `sim` and
//! the program `sim` in the package `tests` implement the simulation. `cargo xtask sim symbiosis`
//! runs `tarn evaluate symbiosis` on traces.

use std::path::{self, Path, PathBuf};

use crate::{failure::Failure, repository::cargo, step::run_step};

/// Options of `sim`: a range of seeds, or another simulation.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    simulation: Option<OtherSimulation>,
    /// Number of seeds
    #[arg(long, default_value_t = 1_000_000)]
    seeds: u64,
    /// First seed
    #[arg(long, default_value_t = 0)]
    from: u64,
}

/// Simulations other than the rack simulation.
#[derive(Clone, Debug, clap::Subcommand)]
enum OtherSimulation {
    /// Compare allocation schemes for tenants that replay traces
    Symbiosis {
        /// Folder with the traces
        #[arg(long, value_name = "DIR")]
        traces: PathBuf,
        /// Write the results to this file, as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Write the figures to this folder
        #[arg(long, value_name = "FOLDER")]
        figures: Option<PathBuf>,
    },
}

/// Runs the simulation for all seeds. The simulation stops at the first seed that fails and prints
/// the failure.
///
/// # Errors
/// Returns an error if a seed fails or a trace cannot be read.
pub fn run(args: &Args) -> Result<(), Failure> {
    if let Some(OtherSimulation::Symbiosis { traces, json, figures }) = &args.simulation {
        return run_symbiosis(traces, json.as_deref(), figures.as_deref());
    }
    let (seeds, from) = (args.seeds.to_string(), args.from.to_string());
    let arguments = ["run", "--release", "--package", "tests", "--bin", "sim", "--"];
    run_step("simulation", cargo(&arguments).args(["--seeds", &seeds, "--from", &from]))
}

fn run_symbiosis(traces: &Path, json: Option<&Path>, figures: Option<&Path>) -> Result<(), Failure> {
    // Paths are relative to the folder of the user, but cargo runs in the root of the repository.
    let absolute = |given: &Path| path::absolute(given).map_err(Failure::file_error("find", given));
    let mut tarn =
        cargo(&["run", "--release", "--package", "cli", "--bin", "tarn", "--", "evaluate", "symbiosis"]);
    tarn.arg("--traces").arg(absolute(traces)?);
    for (flag, given) in [("--json", json), ("--figures", figures)] {
        if let Some(given) = given {
            tarn.arg(flag).arg(absolute(given)?);
        }
    }
    run_step("symbiosis", &mut tarn)
}
