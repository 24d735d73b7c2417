//! `cargo xtask sim`: runs simulations of racks, one per seed, in release mode. The crate `sim` and
//! the program `sim` in the package `tests` implement the simulation. `cargo xtask sim symbiosis`
//! runs `tarn evaluate symbiosis` on traces. The other simulations run `tarn evaluate` with
//! the same names. `cargo xtask sim eviction --topology` compares the model of a network with ns-3.

use std::path::{self, PathBuf};

use crate::{failure::Failure, ns3, repository::cargo, step::run_step};

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
    /// Simulate the QoS monitor of running VMs
    Qos {
        /// Seed of all random numbers
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Write the results to this file, as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
    /// Compare schemes that share memory tiers among tenants
    Tiering {
        /// File with a scenario [default: the scenarios of the paper]
        #[arg(long, value_name = "FILE")]
        scenario: Option<PathBuf>,
        /// Write the results to this file, as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Write the figures to this folder
        #[arg(long, value_name = "FOLDER")]
        figures: Option<PathBuf>,
    },
    /// Compare schemes that evict memory to other servers over a network
    Eviction {
        /// File with changed parameters [default: the parameters of the paper]
        #[arg(long, value_name = "FILE")]
        scenario: Option<PathBuf>,
        /// Instead, simulate the list of flows in this file, and compare their completion times with ns-3
        #[arg(long, value_name = "FILE", conflicts_with_all = ["scenario", "sensitivity", "figures"])]
        topology: Option<PathBuf>,
        /// Also change each rate by 20 %
        #[arg(long)]
        sensitivity: bool,
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
    match &args.simulation {
        Some(OtherSimulation::Symbiosis { traces, json, figures }) => {
            let files =
                [("--traces", Some(traces)), ("--json", json.as_ref()), ("--figures", figures.as_ref())];
            evaluate("symbiosis", &[], &files)
        }
        Some(OtherSimulation::Qos { seed, json }) => {
            evaluate("qos", &["--seed", &seed.to_string()], &[("--json", json.as_ref())])
        }
        Some(OtherSimulation::Tiering { scenario, json, figures }) => {
            let files = [
                ("--scenario", scenario.as_ref()),
                ("--json", json.as_ref()),
                ("--figures", figures.as_ref()),
            ];
            evaluate("tiering", &[], &files)
        }
        Some(OtherSimulation::Eviction { topology: Some(topology), json, .. }) => {
            ns3::compare(topology, json.as_deref())
        }
        Some(OtherSimulation::Eviction { scenario, sensitivity, json, figures, .. }) => {
            let files = [
                ("--scenario", scenario.as_ref()),
                ("--json", json.as_ref()),
                ("--figures", figures.as_ref()),
            ];
            evaluate("eviction", if *sensitivity { &["--sensitivity"] } else { &[] }, &files)
        }
        None => {
            let (seeds, from) = (args.seeds.to_string(), args.from.to_string());
            let arguments = ["run", "--release", "--package", "tests", "--bin", "sim", "--"];
            run_step("simulation", cargo(&arguments).args(["--seeds", &seeds, "--from", &from]))
        }
    }
}

/// Runs `tarn evaluate SUBJECT` with options and files.
fn evaluate(subject: &str, options: &[&str], files: &[(&str, Option<&PathBuf>)]) -> Result<(), Failure> {
    let mut tarn =
        cargo(&["run", "--release", "--package", "cli", "--bin", "tarn", "--", "evaluate", subject]);
    tarn.args(options);
    for (flag, given) in files {
        if let Some(given) = given {
            // Paths are relative to the folder of the user, but cargo runs in the root of the repository.
            tarn.arg(flag).arg(path::absolute(given).map_err(Failure::file_error("find", given))?);
        }
    }
    run_step(subject, &mut tarn)
}
