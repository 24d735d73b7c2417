//! `tarn evaluate`: how good forecasts would have been for VMs that have ended. It reads files and asks nobody; what a good
//! forecast is, is `prediction`'s to say.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use prediction::{
    frigid::trial::{self, Row as Stay, Verdict},
    table::{self, Layout, OWN_COLUMNS},
};
use serde::Serialize;

use crate::{
    Failure, Format, open, print,
    table::{Column, Row, col},
};

/// Rates of overprediction that are asked for.
const RATES: [f64; 4] = [0.01, 0.02, 0.04, 0.1];

/// What is evaluated.
#[derive(Clone, Debug, Subcommand)]
pub enum Subject {
    /// Frigid memory: what VMs never touch. Of each VM of --test, in the order in which they began, forecast from VMs of both
    /// files that had ended before
    #[command(after_help = own_columns())]
    Frigid(Frigid),
}

/// VMs that have ended.
#[derive(Clone, Debug, Args)]
pub struct Frigid {
    /// What the files are
    #[arg(long, value_enum)]
    format: Layouts,
    /// VMs to learn from, plain or gzipped
    #[arg(long, value_name = "FILE")]
    train: PathBuf,
    /// VMs to forecast, plain or gzipped
    #[arg(long, value_name = "FILE")]
    test: PathBuf,
}

/// How tables are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Layouts {
    /// Weeks of VMs, as made of the Bitbrains trace
    BitbrainsWeek,
    /// Tasks of nf-core workflows
    NfcoreTasks,
    /// Your own, see below
    Csv,
}

impl From<Layouts> for Layout {
    fn from(layouts: Layouts) -> Self {
        match layouts {
            Layouts::BitbrainsWeek => Self::BitbrainsWeek,
            Layouts::NfcoreTasks => Self::NfcoreTasks,
            Layouts::Csv => Self::Own,
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

/// Evaluates and prints.
///
/// # Errors
/// A file cannot be read, or one of its rows breaks a rule.
pub fn run(subject: Subject, format: Format) -> Result<(), Failure> {
    let Subject::Frigid(args) = subject;
    let read = |path| open::read(path, |bytes| table::read(bytes, args.format.into()));
    let (train, test): (Vec<Stay>, Vec<Stay>) = (read(&args.train)?, read(&args.test)?);
    let said: Vec<Bought> = trial::run(&train, &test, &RATES).into_iter().map(Bought::from).collect();
    print::list(format, &said)
}

/// A verdict as it is printed. All are shares, 0 to 1.
#[derive(Debug, Serialize)]
struct Bought {
    rate_asked: f64,
    rate_actual: f64,
    frigid_share: f64,
    slice_share: f64,
    static_share: f64,
    static_rate: f64,
}

impl From<Verdict> for Bought {
    fn from(verdict: Verdict) -> Self {
        let Verdict { rate_asked, rate_actual, frigid_share, slice_share, static_share, static_rate } =
            verdict;
        Self { rate_asked, rate_actual, frigid_share, slice_share, static_share, static_rate }
    }
}

impl Row for Bought {
    const COLUMNS: &'static [Column<Self>] = &[
        col("OVER, ASKED", |b| percent(b.rate_asked)),
        col("OVER", |b| percent(b.rate_actual)),
        col("FRIGID", |b| percent(b.frigid_share)),
        col("IN SLICES", |b| percent(b.slice_share)),
        col("FIXED SHARE", |b| percent(b.static_share)),
        col("OVER, FIXED", |b| percent(b.static_rate)),
    ];
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}
