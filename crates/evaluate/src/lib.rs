//! `tarn evaluate`: accuracy of predictions for VMs that have ended, and quality of shares for
//! tenants from traces. It reads files only; the methods are in `prediction` and `fairness`.

mod combination;
mod figure;
mod frigid;
pub mod replay;
mod sensitivity;
mod symbiosis;

use clap::Subcommand;
use cli_runtime::{Failure, Format, table::percent};
use units::Fraction;

pub use combination::Combination;
pub use frigid::{Frigid, TableFormat};
pub use sensitivity::{Sensitivity, Workloads};
pub use symbiosis::Symbiosis;

pub use frigid::own_columns;
pub use sensitivity::LABEL_COLUMNS;

/// Target rates of overpredictions and of false positives.
fn rates() -> [Fraction; 4] {
    [0.01, 0.02, 0.04, 0.1].map(|rate| Fraction::new(rate).expect("a rate is a share"))
}

/// Subject of an evaluation.
#[derive(Clone, Debug, Subcommand)]
pub enum Subject {
    /// Frigid memory: memory that VMs never touch. Each VM of --test is predicted in the order of
    /// starts, from VMs of both files that had ended before
    #[command(after_help = frigid::own_columns())]
    Frigid(Frigid),
    /// Latency sensitivity: workloads that may run on pool memory alone. Half of the programs are
    /// predicted by a model of the other half, many times; without --labels they are modelled
    #[command(after_help = sensitivity::help())]
    Sensitivity(Sensitivity),
    /// Both: memory that they put on the pool together within a limit of VMs slowed down beyond the
    /// PDM, and the operating point of each
    #[command(after_help = combination::help())]
    Combination(Combination),
    /// Symbiosis: shares of a host's memory and of its link, for tenants that replay traces, by
    /// several schemes
    #[command(after_help = symbiosis::PRINTED)]
    Symbiosis(Symbiosis),
}

/// Evaluates and prints.
///
/// # Errors
/// A file cannot be read or written, or a row violates a rule.
pub fn run(subject: Subject, format: Format) -> Result<(), Failure> {
    match subject {
        Subject::Frigid(args) => frigid::run(&args, format),
        Subject::Sensitivity(args) => sensitivity::run(&args, format),
        Subject::Combination(args) => combination::run(&args, format),
        Subject::Symbiosis(args) => symbiosis::run(&args, format),
    }
}

/// Parses a percentage.
fn share(text: &str) -> Result<Fraction, String> {
    let percent: Option<f64> = text.parse().ok();
    let share = percent.and_then(|percent| Fraction::new(percent / 100.0).ok());
    share.ok_or_else(|| "must be a number of percent from 0 to 100".to_owned())
}
