//! `tarn evaluate frigid`: measures the accuracy of predictions of frigid memory. The figure
//! compares alternative methods.

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
    percent, printed_rates,
};

/// Options of `tarn evaluate frigid`: tables of ended VMs, and the figure.
#[derive(Clone, Debug, Args)]
pub struct Frigid {
    #[command(flatten)]
    vms: Vms,
    /// Draw predicted frigid memory against the rate of overpredictions, with other methods for
    /// comparison, as SVG (Pond figure 10c)
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
}

/// Tables of ended VMs.
#[derive(Clone, Debug, Args)]
pub(super) struct Vms {
    /// Layout of the files
    #[arg(long, value_enum)]
    format: TableFormat,
    /// VMs to train on, in addition to ended VMs of --test; plain or gzip-compressed
    #[arg(long, value_name = "FILE")]
    train: Option<PathBuf>,
    /// VMs to predict, plain or gzip-compressed; must not contain VMs of --train
    #[arg(long, value_name = "FILE")]
    test: PathBuf,
}

/// Layout of a table of ended VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TableFormat {
    /// Weeks of VMs, derived from the Bitbrains trace
    BitbrainsWeek,
    /// Tasks of nf-core workflows
    NfcoreTasks,
    /// Table of an operator, with the columns listed below
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

/// Largest rate of overpredictions that the figure shows.
const PLOTTED_RATE_MAX: f64 = 0.2;

/// Returns the help on the columns of `--format csv`.
pub fn custom_columns_help() -> String {
    let column = |(name, is_required, description): &(&str, bool, &str)| {
        let optional = if *is_required { "" } else { " (may be missing or empty)" };
        format!("  {name:<14} {description}{optional}\n")
    };
    let columns: String = CUSTOM_COLUMNS.iter().map(column).collect();
    format!("Columns of --format csv, with names in the first line, in any order:\n{columns}")
}

/// Evaluates the predictions, prints the results, and writes the figure if requested.
///
/// # Errors
/// [`Failure::File`] if a file cannot be read or written, or a row of a table is invalid.
pub(super) fn run(args: &Frigid, format: Format) -> Result<(), Failure> {
    let Some(path) = &args.figure else {
        let results =
            args.vms.evaluate(format, |train, test| backtest::run(train, test, &printed_rates()))?;
        return print::list(format, &results.into_iter().map(ResultRow).collect::<Vec<_>>());
    };
    let (mut results, scores_by_method) = args.vms.compare(format)?;
    results.retain(|result| printed_rates().iter().any(|rate| rate.get() == result.rate_target));
    print::list(format, &results.into_iter().map(ResultRow).collect::<Vec<_>>())?;
    figure::write(path, &draw(&scores_by_method))
}

impl Vms {
    /// Evaluates each method at each quantile level. The printed target rates are quantile levels,
    /// too.
    pub(super) fn compare(
        &self,
        format: Format,
    ) -> Result<(Vec<BacktestResult>, Vec<MethodScores>), Failure> {
        let rates = QUANTILE_LEVELS.map(|level| Fraction::new(level).expect("a level is a fraction"));
        self.evaluate(format, |train, test| backtest::compare(train, test, &rates))
    }

    fn evaluate<T>(
        &self,
        format: Format,
        evaluation: impl FnOnce(&[VmSample], &[VmSample]) -> Result<T, EmptyTestSet>,
    ) -> Result<T, Failure> {
        let read = |path: &PathBuf| open::table(path, |bytes| table::read(bytes, self.format.into()));
        let train = self.train.as_ref().map(read).transpose()?.unwrap_or_default();
        let test = read(&self.test)?;
        let result = evaluation(&train, &test).map_err(|empty| Failure::File {
            operation: "evaluate predictions with",
            path: self.test.clone(),
            errno: io::Error::new(io::ErrorKind::InvalidData, empty),
        })?;
        for (of, samples) in [("--train", &train), ("--test", &test)] {
            let suspect = samples.iter().filter(|sample| !sample.is_trusted).count();
            if suspect > 0 {
                let all = samples.len();
                print::note(format, &format!("{suspect} of {all} VMs of {of} are suspect and were skipped"));
            }
        }
        if !train.is_empty() && !has_trainable_vms(&train, &test) {
            print::note(
                format,
                "no VM of --train ended before the last VM of --test started: --train was not used for training",
            );
        }
        Ok(result)
    }
}

/// Returns whether a VM of `train` ended before the last VM of `test` started. If none did, no
/// prediction can be trained on `train`.
fn has_trainable_vms(train: &[VmSample], test: &[VmSample]) -> bool {
    let first_end = train.iter().map(|sample| sample.outcome.ended).min();
    first_end < test.iter().map(|sample| sample.request.begins).max()
}

/// Draws figure 10c of Pond.
fn draw(scores_by_method: &[MethodScores]) -> Figure {
    let points = |scores: &[Score]| scores.iter().map(|score| Point::new(score.rate, score.share)).collect();
    let series = scores_by_method.iter().map(|line| {
        let (index, name) = legend_entry(line.method);
        Series { name: name.to_owned(), style: SeriesStyle::Line(index), points: points(&line.scores) }
    });
    let mut series: Vec<Series> = series.collect();
    series.sort_by_key(|series| if let SeriesStyle::Line(index) = series.style { index } else { usize::MAX });
    Figure(vec![Panel {
        title: "Predicted frigid memory against overpredicted VMs".to_owned(),
        x_title: "VMs overpredicted (% of VMs)",
        y_title: "Memory predicted frigid (% of memory)",
        x: Scale::Percent,
        y: Scale::Percent,
        x_max: PLOTTED_RATE_MAX,
        series,
    }])
}

/// Returns the index of a method in the legend, and its name.
fn legend_entry(method: Method) -> (usize, &'static str) {
    match method {
        Method::Calibrated => (0, "Tarn: trees and margins, one risk multiplier"),
        Method::TreeQuantile => (1, "trees alone: one quantile for all VMs"),
        Method::GroupMinimum => (2, "minimum of similar VMs so far, minus 0 to 40 percentage points"),
        Method::OwnerMinimum => {
            (3, "minimum of the customer's or the same VM so far, minus 0 to 40 percentage points")
        }
        Method::FixedShare => (4, "a fixed share of each VM"),
    }
}

/// Row with the results at one target rate of overpredictions.
#[derive(Serialize)]
#[serde(transparent)]
struct ResultRow(BacktestResult);

impl Row for ResultRow {
    const COLUMNS: &'static [Column<Self>] = &[
        col("TARGET RATE", |v| percent(v.0.rate_target)),
        col("ACTUAL RATE", |v| percent(v.0.rate_actual)),
        col("FRIGID", |v| percent(v.0.frigid_share)),
        col("FRIGID SLICES", |v| percent(v.0.slice_share)),
        col("RATE OF SLICES", |v| percent(v.0.slice_rate)),
        col("FIXED SHARE", |v| percent(v.0.static_share)),
        col("RATE OF FIXED SHARE", |v| percent(v.0.static_rate)),
        col("VMS", |v| v.0.vms.to_string()),
    ];
}
