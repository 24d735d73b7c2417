//! `tarn evaluate`: how good forecasts would have been for VMs that have ended, and shares for tenants whose traces are there. It reads
//! files and asks nobody; what is good is `prediction`'s and `fairness`' to say.

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

/// Rates that are asked for, of overpredictions and of false positives.
fn rates() -> [Fraction; 4] {
    [0.01, 0.02, 0.04, 0.1].map(|rate| Fraction::new(rate).expect("a rate is a share"))
}

/// What is evaluated.
#[derive(Clone, Debug, Subcommand)]
pub enum Subject {
    /// Frigid memory: what VMs never touch. Of each VM of --test, in the order in which they began, forecast from VMs of both
    /// files that had ended before
    #[command(after_help = frigid::own_columns())]
    Frigid(Frigid),
    /// Latency sensitivity: which workloads may run on pool memory alone. Of half of the programs, told by what the other half
    /// taught, many times over; without --labels they are modelled
    #[command(after_help = sensitivity::help())]
    Sensitivity(Sensitivity),
    /// Both: how much memory they put on the pool together while no more VMs than allowed are expected to be slowed down beyond the
    /// margin, and at which rates each is operated for that
    #[command(after_help = combination::help())]
    Combination(Combination),
    /// Symbiosis: shares of a host's memory and of its link, for tenants that do what traces did, by several schemes
    #[command(after_help = symbiosis::PRINTED)]
    Symbiosis(Symbiosis),
}

/// Evaluates and prints.
///
/// # Errors
/// A file cannot be read or written, or a row breaks a rule.
pub fn run(subject: Subject, format: Format) -> Result<(), Failure> {
    match subject {
        Subject::Frigid(args) => frigid::run(&args, format),
        Subject::Sensitivity(args) => sensitivity::run(&args, format),
        Subject::Combination(args) => combination::run(&args, format),
        Subject::Symbiosis(args) => symbiosis::run(&args, format),
    }
}

/// A share, from words that are percent of it.
fn share(text: &str) -> Result<Fraction, String> {
    let percent: Option<f64> = text.parse().ok();
    let share = percent.and_then(|percent| Fraction::new(percent / 100.0).ok());
    share.ok_or_else(|| "must be a number of percent from 0 to 100".to_owned())
}
