//! `tarn evaluate qos`: simulates the QoS monitor of running VMs. `sim::qos` implements the
//! simulation.

use std::path::PathBuf;

use clap::Args;
use cli_runtime::{
    Failure, Format, open, print,
    table::{Column, Row, col, wide},
};
use prediction::{labels::read_labelled_runs, qos::LabelledRun};
use serde::Serialize;
use sim::qos::{Parameters, Report, modelled_runs, simulate};
use units::{Fraction, limits::QOS_SIMULATED_VMS_MAX};

use super::{
    figure, parse_margin, parse_percent, percent,
    sensitivity::{MODELLED_NOTE, prediction_failure},
};

/// Options of `tarn evaluate qos`.
#[derive(Clone, Debug, Args)]
pub struct Qos {
    /// Seed of all random numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Number of VMs
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=i64::from(QOS_SIMULATED_VMS_MAX)))]
    vms: u32,
    /// Permitted slowdown, in percent: the performance degradation margin
    #[arg(long, value_name = "PERCENT", default_value = "5", value_parser = parse_margin)]
    pdm: Fraction,
    /// X: VMs that may be slowed down beyond the PDM, in percent of all VMs. Also the number of
    /// migration requests per hour
    #[arg(long, value_name = "PERCENT", default_value = "2", value_parser = parse_percent)]
    exceed_max: Fraction,
    /// Also write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Labelled or modelled runs with pool memory, and the permitted slowdown.
#[derive(Clone, Debug, Args)]
pub struct Runs {
    /// CSV file of labelled runs with pool memory: program, slowdown (0.1 is 10 %), pool_load_share,
    /// latency_ratio and a column per counter [default: modelled runs]
    #[arg(long, value_name = "FILE")]
    labels: Option<PathBuf>,
    /// Permitted slowdown, in percent: the performance degradation margin
    #[arg(long, value_name = "PERCENT", default_value = "5", value_parser = parse_margin)]
    pub pdm: Fraction,
}

impl Runs {
    /// Returns whether the runs come from a processor model.
    pub fn are_modelled(&self) -> bool {
        self.labels.is_none()
    }

    /// Reads the labelled runs or creates the modelled ones, and prints their number on stderr.
    ///
    /// # Errors
    /// [`Failure::File`] if the file cannot be read or a row is invalid.
    pub fn read(&self, format: Format) -> Result<Vec<LabelledRun>, Failure> {
        let runs = match &self.labels {
            Some(path) => open::table(path, read_labelled_runs)?,
            None => {
                print::note(format, MODELLED_NOTE);
                modelled_runs(MODELLED_RUNS_SEED)
            }
        };
        let slowed = runs.iter().filter(|run| run.workload.slowdown > self.pdm.get()).count();
        let (count, pdm) = (runs.len(), percent(self.pdm.get()));
        print::note(format, &format!("{count} runs, {slowed} of them slowed down by more than {pdm}"));
        Ok(runs)
    }
}

/// Seed of the modelled runs. It is fixed, so that results are reproducible.
const MODELLED_RUNS_SEED: u64 = 1;

/// Help on the columns of the labelled runs.
pub const RUN_COLUMNS: &str = "\
Columns of --labels, all required, in any order; a value that was not measured is empty:
  program                    name of the program, the same for runs with different inputs; at least 10 programs
  slowdown                   relative increase of the run time with pool memory, -0.9 to 100: 0.1 is 10 %
  pool_load_share            fraction of the loads from memory that the pool served, 0 to 1: 1 if all memory is on the pool
  latency_ratio              idle latency of the pool divided by the idle latency of local memory, 0.01 to 1000
  retiring frontend_bound bad_speculation core_bound memory_bound l1_bound l2_bound l3_bound
  dram_latency_bound dram_bandwidth_bound store_bound dram_bound
                             fractions of pipeline slots or cycles with this pool memory, 0 to 1.2
  ipc l1_mpki l2_mpki l3_mpki memory_level_parallelism
                             instructions per cycle; misses per 1000 instructions; outstanding misses
";

/// Target for the fraction of the harmed VMs that are flagged within three samples.
const FLAGGED_HARMED_MIN: f64 = 0.95;
/// Target for the fraction of the other VMs that are ever flagged.
const FLAGGED_UNHARMED_MAX: f64 = 0.01;

/// Help on the printed columns.
pub(super) const OUTPUT_HELP: &str = "\
Columns:
  VMS               number of VMs, each with 480 samples in four hours
  MONITORED         VMs that are placed entirely on the pool or access their pool node
  HARMED            VMs that are slowed down beyond the PDM at any time
  FLAGGED HARMED    harmed VMs that are flagged within three samples, of all harmed VMs
  FLAGGED UNHARMED  VMs that are flagged at any time, of all VMs that are never harmed
  REQUESTS          migration requests
  BUDGET EXCEEDED   migration requests beyond the budget
  FLAPS             sequences of the verdicts migrate, fine, migrate within an hour
  BASE RATE         flagged harmed and flagged unharmed VMs of a monitor that knows only the base rates (with -o wide)
All workloads run in a processor model. The slowdowns of the simulated VMs come from other inputs of the programs and from other latency
curves than the training set of the monitor.";

/// Runs the simulation, prints the results and writes them as JSON if requested.
///
/// # Errors
/// [`Failure::File`] if the file cannot be written, or if the simulated workloads cannot be
/// predicted because all or none of them are slowed down beyond the PDM.
pub(super) fn run(args: &Qos, format: Format) -> Result<(), Failure> {
    // The simulation takes a minute, so an unwritable output file is reported before it.
    args.json.as_deref().map_or(Ok(()), figure::check_writable)?;
    let parameters = Parameters { seed: args.seed, vms: args.vms, pdm: args.pdm, x: args.exceed_max };
    let report = simulate(parameters).map_err(|error| prediction_failure(None, error))?;
    args.json.as_ref().map_or(Ok(()), |path| figure::write_json(path, &report))?;
    let missed = missed_targets(report.monitor.flagged_harmed, report.monitor.flagged_unharmed);
    print::one(format, &ReportRow(report))?;
    missed.iter().for_each(|target| print::note(format, &format!("missed the target: {target}")));
    Ok(())
}

/// Returns the targets that the fractions of flagged VMs miss.
fn missed_targets(harmed: f64, unharmed: f64) -> Vec<String> {
    let mut missed = Vec::new();
    if harmed < FLAGGED_HARMED_MIN {
        missed.push(format!("at least {} of the harmed VMs are flagged", percent(FLAGGED_HARMED_MIN)));
    }
    if unharmed > FLAGGED_UNHARMED_MAX {
        missed.push(format!("at most {} of the other VMs are flagged", percent(FLAGGED_UNHARMED_MAX)));
    }
    missed
}

/// Row of the table.
#[derive(Serialize)]
#[serde(transparent)]
struct ReportRow(Report);

impl Row for ReportRow {
    const COLUMNS: &'static [Column<Self>] = &[
        col("VMS", |r| r.0.vms.to_string()),
        col("MONITORED", |r| r.0.monitored.to_string()),
        col("HARMED", |r| r.0.harmed.to_string()),
        col("FLAGGED HARMED", |r| percent(r.0.monitor.flagged_harmed)),
        col("FLAGGED UNHARMED", |r| percent(r.0.monitor.flagged_unharmed)),
        col("REQUESTS", |r| r.0.requests.to_string()),
        col("BUDGET EXCEEDED", |r| r.0.budget_exceeded.to_string()),
        col("FLAPS", |r| r.0.flaps.to_string()),
        wide("BASE RATE", |r| {
            let base_rate = r.0.base_rate;
            format!("{}, {}", percent(base_rate.flagged_harmed), percent(base_rate.flagged_unharmed))
        }),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missed_targets_are_named() {
        assert_eq!(missed_targets(0.95, 0.01), [""; 0]);
        let missed =
            ["at least 95.0 % of the harmed VMs are flagged", "at most 1.0 % of the other VMs are flagged"];
        assert_eq!(missed_targets(0.949, 0.0101), missed);
    }
}
