//! `tarn evaluate frigid`: how well it would have been told what VMs never touch; and, drawn, how that compares with other ways to tell.

use std::{io, path::PathBuf};

use clap::{Args, ValueEnum};
use prediction::{
    frigid::{
        LEVELS,
        trial::{self, Line, NothingTested, Score, Stay, Verdict, Way},
    },
    table::{self, Layout, OWN_COLUMNS},
};
use units::Fraction;

use super::{
    figure::{self, Figure, Look, Panel, Point, Scale, Series},
    percent, rates,
};
use crate::{
    Failure, Format, open, print,
    table::{Column, Row, col},
};

/// VMs that have ended, and where to draw.
#[derive(Clone, Debug, Args)]
pub struct Frigid {
    #[command(flatten)]
    vms: Vms,
    /// Draws the share that is frigid against the rate of overpredictions, beside other ways to forecast, as SVG (Pond figure 10c)
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
}

/// VMs that have ended.
#[derive(Clone, Debug, Args)]
pub(super) struct Vms {
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

/// The highest rate that is drawn.
const RATE_DRAWN_MAX: f64 = 0.2;

/// What the files of one's own must have.
pub(crate) fn own_columns() -> String {
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
/// A file cannot be read or written, or a row breaks a rule.
pub(super) fn run(args: &Frigid, format: Format) -> Result<(), Failure> {
    let Some(path) = &args.figure else {
        return print::list(
            format,
            &args.vms.held_against(format, |train, test| trial::run(train, test, &rates()))?,
        );
    };
    let (mut verdicts, lines) = args.vms.compare(format)?;
    verdicts.retain(|verdict| rates().iter().any(|rate| rate.get() == verdict.rate_asked));
    print::list(format, &verdicts)?;
    figure::write(path, &drawing(&lines))
}

impl Vms {
    /// What each way to forecast would have bought at each of the trees' levels; the printed rates are among them.
    pub(super) fn compare(&self, format: Format) -> Result<(Vec<Verdict>, Vec<Line>), Failure> {
        let rates = LEVELS.map(|level| Fraction::new(level).expect("a level is a share"));
        self.held_against(format, |train, test| trial::compare(train, test, &rates))
    }

    fn held_against<T>(
        &self,
        format: Format,
        trial: impl FnOnce(&[Stay], &[Stay]) -> Result<T, NothingTested>,
    ) -> Result<T, Failure> {
        let read = |path: &PathBuf| open::read(path, |bytes| table::read(bytes, self.format.into()));
        let train = self.train.as_ref().map(read).transpose()?.unwrap_or_default();
        let test = read(&self.test)?;
        let said = trial(&train, &test).map_err(|nothing| Failure::File {
            operation: "test forecasts by",
            path: self.test.clone(),
            errno: io::Error::new(io::ErrorKind::InvalidData, nothing),
        })?;
        for (of, stays) in [("--train", &train), ("--test", &test)] {
            let suspect = stays.iter().filter(|stay| !stay.sound).count();
            if suspect > 0 {
                let all = stays.len();
                print::note(format, &format!("{suspect} of {all} VMs of {of} are suspect and left out"));
            }
        }
        if !train.is_empty() && !overlap(&train, &test) {
            print::note(
                format,
                "no VM of --train ended before the last of --test began: nothing was learnt from it",
            );
        }
        Ok(said)
    }
}

/// Whether anything could be learnt of the one for the other.
fn overlap(train: &[Stay], test: &[Stay]) -> bool {
    let first_end = train.iter().map(|stay| stay.outcome.ended).min();
    first_end < test.iter().map(|stay| stay.ask.begins).max()
}

/// Figure 10c.
fn drawing(lines: &[Line]) -> Figure {
    let points = |scores: &[Score]| scores.iter().map(|score| Point::new(score.rate, score.share)).collect();
    let series = lines.iter().map(|line| {
        let (nth, name) = legend(line.way);
        Series { name: name.to_owned(), look: Look::Line(nth), points: points(&line.scores) }
    });
    let mut series: Vec<Series> = series.collect();
    series.sort_by_key(|series| if let Look::Line(nth) = series.look { nth } else { usize::MAX });
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

/// Where a way stands in the legend, and what it is called.
fn legend(way: Way) -> (usize, &'static str) {
    match way {
        Way::Ours => (0, "ours: trees and margins, risk at one price"),
        Way::Trees => (1, "trees alone: one quantile of every VM"),
        Way::Lowest => (2, "lowest so far of VMs most alike, less 0 to 40 points"),
        Way::LowestOfOwner => (3, "lowest so far of the customer or else the VM, less 0 to 40 points"),
        Way::Fixed => (4, "a fixed share of every VM"),
    }
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
