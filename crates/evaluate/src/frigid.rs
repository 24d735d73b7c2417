//! `tarn evaluate frigid`: measures the accuracy of predictions of frigid memory. The figure
//! compares alternative methods.

use std::{io, path::PathBuf};

use clap::{Args, ValueEnum};
use cli_runtime::{
    Failure, Format, open, print,
    table::{Column, Row, col, rows, wide},
};
use prediction::{
    frigid::{
        QUANTILE_LEVELS,
        backtest::{
            self, EmptyTestSet, Evaluation, Method, MethodScores, OwnerRate, Score, SizeClassResult, VmSample,
        },
    },
    table::{self, CUSTOM_COLUMNS, Layout},
};
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
    /// Cross-validate over the owners of --test: predict the VMs of each of N parts of the owners
    /// with models that learn only from the other owners
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=OWNER_FOLDS_MAX), conflicts_with_all = ["train", "figure"])]
    owner_folds: Option<u8>,
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

/// Largest number of parts of the owners in cross-validation.
const OWNER_FOLDS_MAX: i64 = 50;
/// Largest rate of overpredictions that the figure shows.
const PLOTTED_RATE_MAX: f64 = 0.2;

/// Help on the printed tables.
const OUTPUT_HELP: &str = "\
The first table has a row for each target rate of overpredictions. Rates and shares are of the VMs with a forecast. A VM has no forecast
if no model was trained when it started, if too few VMs of its owner had ended, or if its size class had too few outcomes.
  ACTUAL RATE         overpredicted VMs, with the half-width of the 95 % confidence interval; VMs of one owner are not independent
  FRIGID              memory predicted frigid, of the memory of these VMs
  RULE                memory predicted by the simple rule for the same VMs: the lowest untouched fraction of the owner's ended VMs,
                      minus a constant that is learned from the latest outcomes
  RULE IN HINDSIGHT   the same with the best constant, known only in hindsight, for the same number of overpredicted VMs
  NO FORECAST         VMs without a forecast, and their part of the memory of all tested VMs
The second table has the result for each size class (thirds of the VMs), and the third table has the result by owner: the number of
owners with more overpredicted VMs than the target rate, and the owners with the most overpredicted VMs.";

/// Returns the help on the output and on the input files.
pub(super) fn help() -> String {
    format!("{OUTPUT_HELP}\n\n{}", custom_columns_help())
}

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
        let evaluations = args.vms.evaluate(format, |train, test| match args.owner_folds {
            Some(folds) => backtest::cross_validate(test, folds.into(), &printed_rates()),
            None => backtest::run(train, test, &printed_rates()),
        })?;
        return print_evaluations(format, &evaluations);
    };
    let (mut evaluations, scores_by_method) = args.vms.compare(format)?;
    evaluations
        .retain(|evaluation| printed_rates().iter().any(|rate| rate.get() == evaluation.result.rate_target));
    print_evaluations(format, &evaluations)?;
    figure::write(path, &draw(&scores_by_method))
}

/// Prints the results of all VMs, by size class and by owner.
fn print_evaluations(format: Format, evaluations: &[Evaluation]) -> Result<(), Failure> {
    print::value(format, &evaluations, |_| {
        let results: Vec<ResultRow> = evaluations.iter().cloned().map(ResultRow).collect();
        let of_sizes = |evaluation: &Evaluation| {
            let rate_target = evaluation.result.rate_target;
            evaluation.by_size.clone().into_iter().map(move |class| SizeRow { rate_target, class })
        };
        let sizes: Vec<SizeRow> = evaluations.iter().flat_map(of_sizes).collect();
        let owners: Vec<OwnerRow> = evaluations.iter().cloned().map(OwnerRow).collect();
        format!("{}\n{}\n{}", rows(&results, false), rows(&sizes, false), rows(&owners, false))
    })
}

impl Vms {
    /// Evaluates each method at each quantile level. The printed target rates are quantile levels,
    /// too.
    pub(super) fn compare(&self, format: Format) -> Result<(Vec<Evaluation>, Vec<MethodScores>), Failure> {
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
        Method::Calibrated => (0, "Tarn: trees, calibrated by size class"),
        Method::TreeQuantile => (1, "trees alone: one quantile for all VMs"),
        Method::OwnerMinimum => (2, "minimum of the customer's or the same VM so far, minus a constant"),
        Method::FixedShare => (3, "a fixed share of each VM"),
    }
}

/// Row with the result of all VMs at one target rate of overpredictions.
struct ResultRow(Evaluation);

impl Row for ResultRow {
    const COLUMNS: &'static [Column<Self>] = &[
        col("TARGET RATE", |v| percent(v.0.result.rate_target)),
        col("ACTUAL RATE", |v| format!("{} ± {}", percent(v.0.result.rate_actual), percent(v.0.rate_margin))),
        col("FRIGID", |v| percent(v.0.result.frigid_share)),
        col("FRIGID SLICES", |v| percent(v.0.result.slice_share)),
        col("RATE OF SLICES", |v| percent(v.0.result.slice_rate)),
        col("RULE", |v| percent(v.0.rule.share)),
        col("RATE OF RULE", |v| percent(v.0.rule.rate)),
        col("RULE IN HINDSIGHT", |v| percent(v.0.rule.share_in_hindsight)),
        wide("FIXED SHARE", |v| percent(v.0.result.static_share)),
        wide("RATE OF FIXED SHARE", |v| percent(v.0.result.static_rate)),
        col("VMS", |v| v.0.result.vms.to_string()),
        col("NO FORECAST", |v| {
            format!("{}, {}", v.0.result.vms_without_forecast, percent(v.0.memory_without_forecast))
        }),
    ];
}

/// Row with the result of one size class at one target rate of overpredictions.
struct SizeRow {
    rate_target: f64,
    class: SizeClassResult,
}

impl Row for SizeRow {
    const COLUMNS: &'static [Column<Self>] = &[
        col("TARGET RATE", |v| percent(v.rate_target)),
        col("SIZE", |v| format!("{} to {}", v.class.smallest, v.class.largest)),
        col("ACTUAL RATE", |v| percent(v.class.rate)),
        col("FRIGID", |v| percent(v.class.share)),
        col("VMS", |v| v.class.vms.to_string()),
    ];
}

/// Row with the result by owner at one target rate of overpredictions.
struct OwnerRow(Evaluation);

impl Row for OwnerRow {
    const COLUMNS: &'static [Column<Self>] = &[
        col("TARGET RATE", |v| percent(v.0.result.rate_target)),
        col("OWNERS", |v| v.0.by_owner.owners.to_string()),
        col("ABOVE TARGET", |v| v.0.by_owner.above_target.to_string()),
        col("MOST OVERPREDICTED VMS", |v| {
            let of = |owner: &OwnerRate| format!("{}: {} of {}", owner.owner, owner.overpredicted, owner.vms);
            v.0.by_owner.worst.iter().map(of).collect::<Vec<_>>().join("; ")
        }),
    ];
}
