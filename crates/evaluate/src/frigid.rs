//! `tarn evaluate frigid`: accuracy of predictions of frigid memory and, as a figure, of
//! alternative methods.

use std::{io, path::PathBuf};

use clap::{Args, ValueEnum};
use cli_runtime::{
    Failure, Format, open, print,
    table::{Column, Row, col},
};
use prediction::{
    frigid::{
        QUANTILE_LEVELS,
        backtest::{self, BacktestResult, EmptyTestSet, Method, MethodScores, Score, VmSample},
    },
    table::{self, CUSTOM_COLUMNS, Layout},
};
use serde::Serialize;
use units::Fraction;

use super::{
    figure::{self, Figure, Panel, Point, Scale, Series, SeriesStyle},
    percent, rates,
};

/// VMs that have ended, and the figure.
#[derive(Clone, Debug, Args)]
pub struct Frigid {
    #[command(flatten)]
    vms: Vms,
    /// Draw frigid memory against the rate of overpredictions, beside other methods, as SVG (Pond
    /// figure 10c)
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
}

/// VMs that have ended.
#[derive(Clone, Debug, Args)]
pub(super) struct Vms {
    /// Layout of the files
    #[arg(long, value_enum)]
    format: TableFormat,
    /// VMs to learn from, beside those of --test that had ended; plain or gzipped
    #[arg(long, value_name = "FILE")]
    train: Option<PathBuf>,
    /// VMs to predict, plain or gzipped; must not contain VMs of --train
    #[arg(long, value_name = "FILE")]
    test: PathBuf,
}

/// Layout of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TableFormat {
    /// Weeks of VMs, derived from the Bitbrains trace
    BitbrainsWeek,
    /// Tasks of nf-core workflows
    NfcoreTasks,
    /// Custom columns, see below
    Csv,
}

impl From<TableFormat> for Layout {
    fn from(format: TableFormat) -> Self {
        match format {
            TableFormat::BitbrainsWeek => Self::BitbrainsWeek,
            TableFormat::NfcoreTasks => Self::NfcoreTasks,
            TableFormat::Csv => Self::Custom,
        }
    }
}

/// Largest rate in the figure.
const RATE_DRAWN_MAX: f64 = 0.2;

/// Help on the columns of custom files.
pub fn own_columns() -> String {
    let column = |(name, must, what): &(&str, bool, &str)| {
        let must = if *must { "" } else { " (may be left out or empty)" };
        format!("  {name:<14} {what}{must}\n")
    };
    let columns: String = CUSTOM_COLUMNS.iter().map(column).collect();
    format!("Columns of --format csv, named in its first line, in any order:\n{columns}")
}

/// Evaluates and prints.
///
/// # Errors
/// A file cannot be read or written, or a row violates a rule.
pub(super) fn run(args: &Frigid, format: Format) -> Result<(), Failure> {
    let Some(path) = &args.figure else {
        let results = args.vms.evaluate(format, |train, test| backtest::run(train, test, &rates()))?;
        return print::list(format, &results.into_iter().map(ResultRow).collect::<Vec<_>>());
    };
    let (mut results, scores_by_method) = args.vms.compare(format)?;
    results.retain(|result| rates().iter().any(|rate| rate.get() == result.rate_target));
    print::list(format, &results.into_iter().map(ResultRow).collect::<Vec<_>>())?;
    figure::write(path, &draw(&scores_by_method))
}

impl Vms {
    /// Evaluates each method at each quantile level; the printed rates are among them.
    pub(super) fn compare(
        &self,
        format: Format,
    ) -> Result<(Vec<BacktestResult>, Vec<MethodScores>), Failure> {
        let rates = QUANTILE_LEVELS.map(|level| Fraction::new(level).expect("a level is a share"));
        self.evaluate(format, |train, test| backtest::compare(train, test, &rates))
    }

    fn evaluate<T>(
        &self,
        format: Format,
        evaluation: impl FnOnce(&[VmSample], &[VmSample]) -> Result<T, EmptyTestSet>,
    ) -> Result<T, Failure> {
        let read = |path: &PathBuf| open::read(path, |bytes| table::read(bytes, self.format.into()));
        let train = self.train.as_ref().map(read).transpose()?.unwrap_or_default();
        let test = read(&self.test)?;
        let result = evaluation(&train, &test).map_err(|empty| Failure::File {
            operation: "test forecasts by",
            path: self.test.clone(),
            errno: io::Error::new(io::ErrorKind::InvalidData, empty),
        })?;
        for (of, samples) in [("--train", &train), ("--test", &test)] {
            let suspect = samples.iter().filter(|sample| !sample.is_trusted).count();
            if suspect > 0 {
                let all = samples.len();
                print::note(format, &format!("{suspect} of {all} VMs of {of} are suspect and left out"));
            }
        }
        if !train.is_empty() && !has_trainable_vms(&train, &test) {
            print::note(
                format,
                "no VM of --train ended before the last of --test began: nothing was learnt from it",
            );
        }
        Ok(result)
    }
}

/// Returns whether VMs of the first file could be learnt for the second.
fn has_trainable_vms(train: &[VmSample], test: &[VmSample]) -> bool {
    let first_end = train.iter().map(|sample| sample.outcome.ended).min();
    first_end < test.iter().map(|sample| sample.request.begins).max()
}

/// Returns figure 10c.
fn draw(scores_by_method: &[MethodScores]) -> Figure {
    let points = |scores: &[Score]| scores.iter().map(|score| Point::new(score.rate, score.share)).collect();
    let series = scores_by_method.iter().map(|line| {
        let (nth, name) = legend(line.method);
        Series { name: name.to_owned(), style: SeriesStyle::Line(nth), points: points(&line.scores) }
    });
    let mut series: Vec<Series> = series.collect();
    series.sort_by_key(|series| if let SeriesStyle::Line(nth) = series.style { nth } else { usize::MAX });
    Figure(vec![Panel {
        title: "Frigid memory against VMs of which too much was forecast".to_owned(),
        x_title: "VMs overpredicted (% of VMs)",
        y_title: "Memory forecast frigid (% of memory)",
        x: Scale::Percent,
        y: Scale::Percent,
        x_max: RATE_DRAWN_MAX,
        series,
    }])
}

/// Returns a method's index and name in the legend.
fn legend(method: Method) -> (usize, &'static str) {
    match method {
        Method::Calibrated => (0, "ours: trees and margins, risk at one price"),
        Method::TreeQuantile => (1, "trees alone: one quantile of every VM"),
        Method::GroupMinimum => (2, "lowest so far of VMs most alike, less 0 to 40 points"),
        Method::OwnerMinimum => (3, "lowest so far of the customer or else the VM, less 0 to 40 points"),
        Method::FixedShare => (4, "a fixed share of every VM"),
    }
}

/// Row of one target rate of overpredictions.
#[derive(Serialize)]
#[serde(transparent)]
struct ResultRow(BacktestResult);

impl Row for ResultRow {
    const COLUMNS: &'static [Column<Self>] = &[
        col("OVER, ASKED", |v| percent(v.0.rate_target)),
        col("OVER", |v| percent(v.0.rate_actual)),
        col("FRIGID", |v| percent(v.0.frigid_share)),
        col("IN SLICES", |v| percent(v.0.slice_share)),
        col("OVER, IN SLICES", |v| percent(v.0.slice_rate)),
        col("FIXED SHARE", |v| percent(v.0.static_share)),
        col("OVER, FIXED", |v| percent(v.0.static_rate)),
        col("VMS", |v| v.0.vms.to_string()),
    ];
}
