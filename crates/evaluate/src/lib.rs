//! `tarn evaluate`, `tarn plan` and `tarn replay`. `tarn evaluate` measures, from files only, the accuracy of
//! predictions for ended VMs, the quality of shares for tenants from traces, the sharing of memory tiers,
//! and the eviction of memory to other hosts. The evaluated methods are in the crates `prediction`, `fairness` and `tiering`.

mod combination;
mod eviction;
mod figure;
mod frigid;
pub mod plan;
mod qos;
pub mod replay;
mod scenario_file;
mod sensitivity;
mod symbiosis;
mod tiering;

use clap::Subcommand;
use cli_runtime::{Failure, Format, table::percent};
use prediction::sensitivity::PDM_MIN;
use units::Fraction;

pub use combination::Combination;
pub use eviction::Eviction;
pub use frigid::{Frigid, TableFormat};
pub use qos::{Qos, RUN_COLUMNS, Runs};
pub use sensitivity::{Sensitivity, Workloads};
pub use symbiosis::Symbiosis;
pub use tiering::Tiering;

pub use frigid::custom_columns_help;
pub use sensitivity::LABEL_COLUMNS;

/// Returns the target rates of overpredictions and false positives at which results are printed.
fn printed_rates() -> [Fraction; 4] {
    [0.01, 0.02, 0.04, 0.1].map(|rate| Fraction::new(rate).expect("a rate is a fraction"))
}

/// Prediction or mechanism that `tarn evaluate` evaluates.
#[derive(Clone, Debug, Subcommand)]
pub enum Subject {
    /// Predictions of frigid memory, which VMs never touch. Each VM of --test is predicted by a
    /// model trained on VMs of both files that ended before its start
    #[command(after_help = frigid::help())]
    Frigid(Frigid),
    /// Predictions of latency sensitivity: workloads that may run entirely on pool memory. A model
    /// trained on half of the programs predicts the other half, for many random splits. Without
    /// --labels, the workloads are modelled
    #[command(after_help = sensitivity::help())]
    Sensitivity(Sensitivity),
    /// Both predictions together: memory placed on the pool within a limit on VMs slowed down
    /// beyond the PDM, and the operating point of each prediction
    #[command(after_help = combination::help())]
    Combination(Combination),
    /// QoS monitor: VMs on modelled racks, with workloads and slowdowns that are modelled, too
    #[command(after_help = qos::OUTPUT_HELP)]
    Qos(Qos),
    /// Symbiosis: shares of a host's memory and link for tenants that replay traces, computed by
    /// several schemes
    #[command(after_help = symbiosis::OUTPUT_HELP)]
    Symbiosis(Symbiosis),
    /// Equilibria: local memory of a host's tenants with several schemes, on a model of a host with
    /// memory tiers
    #[command(after_help = tiering::OUTPUT_HELP)]
    Tiering(Tiering),
    /// Glitter: times of tasks that evict memory to other servers over a network, with several schemes
    #[command(after_help = eviction::OUTPUT_HELP)]
    Eviction(Eviction),
}

/// Evaluates a subject and prints the results.
///
/// # Errors
/// [`Failure::File`] if a file cannot be read or written, or its content is invalid.
pub fn run(subject: Subject, format: Format) -> Result<(), Failure> {
    match subject {
        Subject::Frigid(args) => frigid::run(&args, format),
        Subject::Sensitivity(args) => sensitivity::run(&args, format),
        Subject::Combination(args) => combination::run(&args, format),
        Subject::Qos(args) => qos::run(&args, format),
        Subject::Symbiosis(args) => symbiosis::run(&args, format),
        Subject::Tiering(args) => tiering::run(&args, format),
        Subject::Eviction(args) => eviction::run(&args, format),
    }
}

/// Parses a performance degradation margin, a percentage from 0.1 to 100.
fn parse_margin(text: &str) -> Result<Fraction, String> {
    let margin = parse_percent(text).ok().filter(|margin| margin.get() >= PDM_MIN);
    margin.ok_or_else(|| "must be a percentage from 0.1 to 100".to_owned())
}

/// Parses a percentage from 0 to 100.
fn parse_percent(text: &str) -> Result<Fraction, String> {
    let percent: Option<f64> = text.parse().ok();
    let share = percent.and_then(|percent| Fraction::new(percent / 100.0).ok());
    share.ok_or_else(|| "must be a percentage from 0 to 100".to_owned())
}
