//! `tarn evaluate`: how good forecasts would have been for VMs that have ended. It reads files and asks nobody; what a good
//! forecast is, is `prediction`'s to say.

mod sensitivity;

use std::{io, path::PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use prediction::{
    frigid::trial::{self, Stay, Verdict},
    table::{self, Layout, OWN_COLUMNS},
};
use units::Fraction;

pub use sensitivity::Sensitivity;

use crate::{
    Failure, Format, open, print,
    table::{Column, Row, col},
};

/// Rates that are asked for, of overpredictions and of false positives.
fn rates() -> [Fraction; 4] {
    [0.01, 0.02, 0.04, 0.1].map(|rate| Fraction::new(rate).expect("a rate is a share"))
}

/// What is evaluated.
#[derive(Clone, Debug, Subcommand)]
pub enum Subject {
    /// Frigid memory: what VMs never touch. Of each VM of --test, in the order in which they began, forecast from VMs of both
    /// files that had ended before
    #[command(after_help = own_columns())]
    Frigid(Frigid),
    /// Latency sensitivity: which workloads may run on pool memory alone. Of half of the programs, told by what the other half
    /// taught, many times over; without --labels they are modelled
    #[command(after_help = sensitivity::HELP)]
    Sensitivity(Sensitivity),
}

/// VMs that have ended.
#[derive(Clone, Debug, Args)]
pub struct Frigid {
    /// What the files are
    #[arg(long, value_enum)]
    format: TableFormat,
    /// VMs to learn from, beside those of --test that had ended; plain or gzipped
    #[arg(long, value_name = "FILE")]
    train: Option<PathBuf>,
    /// VMs to forecast, plain or gzipped; none that is in --train, too
    #[arg(long, value_name = "FILE")]
    test: PathBuf,
}

/// How tables are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TableFormat {
    /// Weeks of VMs, as made of the Bitbrains trace
    BitbrainsWeek,
    /// Tasks of nf-core workflows
    NfcoreTasks,
    /// Your own, see below
    Csv,
}

impl From<TableFormat> for Layout {
    fn from(format: TableFormat) -> Self {
        match format {
            TableFormat::BitbrainsWeek => Self::BitbrainsWeek,
            TableFormat::NfcoreTasks => Self::NfcoreTasks,
            TableFormat::Csv => Self::Own,
        }
    }
}

/// What the files of one's own must have.
fn own_columns() -> String {
    let column = |(name, must, what): &(&str, bool, &str)| {
        let must = if *must { "" } else { " (may be left out or empty)" };
        format!("  {name:<14} {what}{must}\n")
    };
    let columns: String = OWN_COLUMNS.iter().map(column).collect();
    format!("Columns of --format csv, named in its first line, in any order:\n{columns}")
}

/// Whether anything could be learnt of the one for the other.
fn overlap(train: &[Stay], test: &[Stay]) -> bool {
    let first_end = train.iter().map(|stay| stay.outcome.ended).min();
    first_end < test.iter().map(|stay| stay.ask.begins).max()
}

/// Evaluates and prints.
///
/// # Errors
/// A file cannot be read, or one of its rows breaks a rule.
pub fn run(subject: Subject, format: Format) -> Result<(), Failure> {
    match subject {
        Subject::Frigid(args) => frigid(&args, format),
        Subject::Sensitivity(args) => sensitivity::run(&args, format),
    }
}

fn frigid(args: &Frigid, format: Format) -> Result<(), Failure> {
    let read = |path: &PathBuf| open::read(path, |bytes| table::read(bytes, args.format.into()));
    let train = args.train.as_ref().map(read).transpose()?.unwrap_or_default();
    let test = read(&args.test)?;
    let said = trial::run(&train, &test, &rates()).map_err(|nothing| Failure::File {
        tried: "test forecasts by",
        path: args.test.clone(),
        errno: io::Error::new(io::ErrorKind::InvalidData, nothing),
    })?;
    if !train.is_empty() && !overlap(&train, &test) {
        print::note(
            format,
            "no VM of --train ended before the last of --test began: nothing was learnt from it",
        );
    }
    print::list(format, &said)
}

impl Row for Verdict {
    const COLUMNS: &'static [Column<Self>] = &[
        col("OVER, ASKED", |b| percent(b.rate_asked)),
        col("OVER", |b| percent(b.rate_actual)),
        col("FRIGID", |b| percent(b.frigid_share)),
        col("IN SLICES", |b| percent(b.slice_share)),
        col("OVER, IN SLICES", |b| percent(b.slice_rate)),
        col("FIXED SHARE", |b| percent(b.static_share)),
        col("OVER, FIXED", |b| percent(b.static_rate)),
        col("VMS", |b| b.vms.to_string()),
    ];
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}
