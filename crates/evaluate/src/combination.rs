//! `tarn evaluate combination`: how much memory both forecasts together would put on the pool while no more VMs than allowed are expected
//! to be slowed down beyond the margin. What each buys at what risk, the two other evaluations say; how risk is divided, is
//! `prediction::combination`'s to say.

use std::path::PathBuf;

use clap::Args;
use cli_runtime::{
    Failure, Format, print,
    table::{Column, Row, col, rows},
};
use prediction::{
    combination::{CombinedPoint, FrigidPoint, InsensitivityPoint, VmMix, frontier, solve},
    frigid::backtest::{Method, MethodScores, Score},
    sensitivity::backtest::BacktestResult,
};
use serde::Serialize;
use units::Fraction;

use super::{
    figure::{self, Figure, Look, Panel, Point, Scale, Series},
    frigid::{Vms, own_columns},
    percent,
    sensitivity::{self, Parted},
    share,
};

/// VMs, workloads, and how much risk there is to take.
#[derive(Clone, Debug, Args)]
pub struct Combination {
    #[command(flatten)]
    vms: Vms,
    #[command(flatten)]
    parted: Parted,
    /// X: VMs that may be slowed down beyond the margin, in percent of all
    #[arg(long, value_name = "PERCENT", default_value = "2", value_parser = share)]
    exceed_max: Fraction,
    /// h: VMs with enough of a history to tell whether they are insensitive, in percent of all; Pond 6.1 says 80
    #[arg(long, value_name = "PERCENT", default_value = "80", value_parser = share)]
    history: Fraction,
    /// r: of VMs of which too much is forecast frigid, those slowed down beyond the margin, in percent; for a margin of 5 %, Pond 6.5 says
    /// about 25
    #[arg(long, value_name = "PERCENT", default_value = "25", value_parser = share)]
    overpredicted_exceeds: Fraction,
    /// Draws memory on the pool against VMs expected to be slowed down beyond the margin, together and each alone, as SVG (Pond figure 10d)
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
}

/// What is printed, and what the files must have.
pub(super) fn help() -> String {
    format!("{PRINTED}\n\n{}\n{}", own_columns(), sensitivity::LABEL_COLUMNS)
}

const PRINTED: &str = "\
POOL is the share of all memory that is on the pool, MISSES the share of all VMs expected to be slowed down beyond the margin, at the
rates of the columns to the right: WHOLE of all workloads are placed on the pool whole, and FALSE of all wrongly; of the other VMs, FRIGID
of the memory is placed on the pool in whole slices, and too much of OVER of these VMs. First what is chosen, beside what each would place
alone; then all that could be chosen if more or fewer misses were allowed (Pond Eq. 1 as `prediction::combination` reads it).";

/// Evaluates and prints.
///
/// # Errors
/// A file cannot be read or written, or a row breaks a rule, or nothing can be told of the workloads.
pub(super) fn run(args: &Combination, format: Format) -> Result<(), Failure> {
    let workloads = args.parted.workloads.read(format)?;
    let told = args.parted.told_often(&workloads)?;
    let (_, lines) = args.vms.compare(format)?;
    let points = Points::new(&told, &lines);
    let combined = Combined::new(args, &points);
    print::value(format, &combined, |_| combined.text())?;
    args.figure.as_ref().map_or(Ok(()), |path| figure::write(path, &combined.drawing(&points)))
}

/// What each forecast bought at what risk.
struct Points {
    insensitive: Vec<InsensitivityPoint>,
    frigid: Vec<FrigidPoint>,
    /// The same of a fixed share.
    fixed: Vec<FrigidPoint>,
}

impl Points {
    /// The forest's at cuts that were learnt from the other half, not at the best in hindsight; frigid memory's in whole slices, for that is
    /// what is placed.
    fn new(told: &[BacktestResult], lines: &[MethodScores]) -> Self {
        let part = |part: f64| Fraction::new(part).expect("what is counted of all is a share");
        let placed = |verdict: &BacktestResult| InsensitivityPoint {
            fp: part(verdict.forest.tuned_fp),
            placed: part(verdict.forest.tuned_placed),
        };
        let taken =
            |score: &Score| FrigidPoint { op: part(score.slice_rate), share: part(score.slice_share) };
        let of = |way| lines.iter().filter(move |line| line.method == way).flat_map(|line| &line.scores);
        Self {
            insensitive: told.iter().map(placed).collect(),
            frigid: of(Method::Calibrated).map(taken).collect(),
            fixed: of(Method::FixedShare).map(taken).collect(),
        }
    }
}

/// What is printed.
#[derive(Debug, Serialize)]
struct Combined {
    /// Whether the workloads are what a model makes.
    modelled: bool,
    inputs: Inputs,
    chosen: CombinedPoint,
    alone: Alone,
    frontier: Vec<CombinedPoint>,
}

/// What it follows from. Shares, 0 to 1.
#[derive(Debug, Serialize)]
struct Inputs {
    exceed_max: Fraction,
    pdm: Fraction,
    #[serde(flatten)]
    mix: VmMix,
    insensitive: Vec<InsensitivityPoint>,
    frigid: Vec<FrigidPoint>,
}

/// What one of them would be chosen for without the other.
#[derive(Debug, Serialize)]
struct Alone {
    frigid: CombinedPoint,
    insensitive: CombinedPoint,
    fixed: CombinedPoint,
}

impl Combined {
    fn new(args: &Combination, Points { insensitive, frigid, fixed }: &Points) -> Self {
        let mix = VmMix { history: args.history, exceeds: args.overpredicted_exceeds };
        let chosen = |insensitive: &[InsensitivityPoint], frigid: &[FrigidPoint]| {
            solve(insensitive, frigid, mix, args.exceed_max)
        };
        Self {
            modelled: args.parted.workloads.are_modelled(),
            inputs: Inputs {
                exceed_max: args.exceed_max,
                pdm: args.parted.workloads.pdm,
                mix,
                insensitive: insensitive.clone(),
                frigid: frigid.clone(),
            },
            chosen: chosen(insensitive, frigid),
            alone: Alone {
                frigid: chosen(&[], frigid),
                insensitive: chosen(insensitive, &[]),
                fixed: chosen(&[], fixed),
            },
            frontier: frontier(insensitive, frigid, mix),
        }
    }

    fn text(&self) -> String {
        let Alone { frigid, insensitive, fixed } = self.alone;
        let chosen = [
            ("both forecasts", self.chosen),
            ("frigid memory alone", frigid),
            ("insensitivity alone", insensitive),
            ("a fixed share", fixed),
        ];
        let chosen = chosen.map(|(by, choice)| Chosen { by, choice });
        let frontier: Vec<_> = self.frontier.iter().copied().map(FrontierPoint).collect();
        format!("{}\n{}", rows(&chosen, false), rows(&frontier, false))
    }

    /// Figure 10d.
    fn drawing(&self, Points { insensitive, frigid, fixed }: &Points) -> Figure {
        let mix = self.inputs.mix;
        let line = |nth, name: &str, choices: &[CombinedPoint]| Series {
            name: name.to_owned(),
            look: Look::Line(nth),
            points: choices.iter().map(point).collect(),
        };
        let series = vec![
            line(0, "both forecasts", &self.frontier),
            line(1, "frigid memory alone", &frontier(&[], frigid, mix)),
            line(2, "insensitivity alone", &frontier(insensitive, &[], mix)),
            line(3, "a fixed share of every VM", &frontier(&[], fixed, mix)),
            Series { name: "chosen".to_owned(), look: Look::Ring, points: vec![point(&self.chosen)] },
            Series {
                name: format!("allowed (X): {}", percent(self.inputs.exceed_max.get())),
                look: Look::Upright,
                points: vec![Point::new(self.inputs.exceed_max.get(), 0.0)],
            },
        ];
        let modelled = if self.modelled { ", sensitivity of MODELLED workloads" } else { "" };
        Figure(vec![Panel {
            title: format!("Memory on the pool against VMs slowed down{modelled}"),
            x_title: "VMs expected beyond the margin (% of VMs)",
            y_title: "Memory on the pool (% of memory)",
            x: Scale::Percent,
            y: Scale::Percent,
            x_max: 1.0,
            series,
        }])
    }
}

fn point(choice: &CombinedPoint) -> Point {
    Point::new(choice.miss, choice.pool)
}

/// What was chosen, and for which forecasts.
struct Chosen {
    by: &'static str,
    choice: CombinedPoint,
}

impl Row for Chosen {
    const COLUMNS: &'static [Column<Self>] = &[
        col("BY", |c| c.by.to_owned()),
        col("POOL", |c| percent(c.choice.pool)),
        col("MISSES", |c| hundredths(c.choice.miss)),
        col("WHOLE", |c| percent(c.choice.insensitive.placed.get())),
        col("FALSE", |c| percent(c.choice.insensitive.fp.get())),
        col("FRIGID", |c| percent(c.choice.frigid.share.get())),
        col("OVER", |c| percent(c.choice.frigid.op.get())),
    ];
}

/// Point of the frontier between memory on the pool and misses.
struct FrontierPoint(CombinedPoint);

impl Row for FrontierPoint {
    const COLUMNS: &'static [Column<Self>] = &[
        col("POOL", |p| percent(p.0.pool)),
        col("MISSES", |p| hundredths(p.0.miss)),
        col("WHOLE", |p| percent(p.0.insensitive.placed.get())),
        col("FALSE", |p| percent(p.0.insensitive.fp.get())),
        col("FRIGID", |p| percent(p.0.frigid.share.get())),
        col("OVER", |p| percent(p.0.frigid.op.get())),
    ];
}

/// Misses are few.
fn hundredths(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}
