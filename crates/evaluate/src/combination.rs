//! `tarn evaluate combination`: memory that both predictions together put on the pool within a
//! limit of VMs slowed down beyond the PDM. The trade-offs come from the other two evaluations;
//! `prediction::combination` divides the risk.

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
    figure::{self, Figure, Panel, Point, Scale, Series, SeriesStyle},
    frigid::{Vms, own_columns},
    percent,
    sensitivity::{self, SplitWorkloads},
    share,
};

/// VMs, workloads, and the permitted risk.
#[derive(Clone, Debug, Args)]
pub struct Combination {
    #[command(flatten)]
    vms: Vms,
    #[command(flatten)]
    split_workloads: SplitWorkloads,
    /// X: VMs that may be slowed down beyond the PDM, in percent of all
    #[arg(long, value_name = "PERCENT", default_value = "2", value_parser = share)]
    exceed_max: Fraction,
    /// h: VMs with enough history to predict their sensitivity, in percent of all; 80 in Pond 6.1
    #[arg(long, value_name = "PERCENT", default_value = "80", value_parser = share)]
    history: Fraction,
    /// r: VMs slowed down beyond the PDM among those with overpredicted frigid memory, in percent;
    /// about 25 for a PDM of 5 % in Pond 6.5
    #[arg(long, value_name = "PERCENT", default_value = "25", value_parser = share)]
    overpredicted_exceeds: Fraction,
    /// Draw memory on the pool against VMs expected to be slowed down beyond the PDM, for both and
    /// for each alone, as SVG (Pond figure 10d)
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
}

/// Help on the output and the input files.
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
/// A file cannot be read or written, a row violates a rule, or the workloads cannot be predicted.
pub(super) fn run(args: &Combination, format: Format) -> Result<(), Failure> {
    let workloads = args.split_workloads.workloads.read(format)?;
    let results = args.split_workloads.evaluate_for_figure(&workloads)?;
    let (_, scores_by_method) = args.vms.compare(format)?;
    let points = Points::new(&results, &scores_by_method);
    let combined = Combined::new(args, &points);
    print::value(format, &combined, |_| combined.text())?;
    args.figure.as_ref().map_or(Ok(()), |path| figure::write(path, &combined.draw(&points)))
}

/// Results of each prediction at each risk.
struct Points {
    insensitive: Vec<InsensitivityPoint>,
    frigid: Vec<FrigidPoint>,
    /// Results of a fixed fraction.
    fixed: Vec<FrigidPoint>,
}

impl Points {
    /// Computes the results: the forest's at learnt thresholds, not at the best in hindsight;
    /// frigid memory in whole slices, as placed.
    fn new(results: &[BacktestResult], scores_by_method: &[MethodScores]) -> Self {
        let fraction = |value: f64| Fraction::new(value).expect("what is counted of all is a share");
        let insensitivity_point = |result: &BacktestResult| InsensitivityPoint {
            fp: fraction(result.forest.tuned_fp),
            placed: fraction(result.forest.tuned_placed),
        };
        let frigid_point = |score: &Score| FrigidPoint {
            op: fraction(score.slice_rate),
            share: fraction(score.slice_share),
        };
        let scores = |method| {
            scores_by_method.iter().filter(move |line| line.method == method).flat_map(|line| &line.scores)
        };
        Self {
            insensitive: results.iter().map(insensitivity_point).collect(),
            frigid: scores(Method::Calibrated).map(frigid_point).collect(),
            fixed: scores(Method::FixedShare).map(frigid_point).collect(),
        }
    }
}

/// Output.
#[derive(Debug, Serialize)]
struct Combined {
    /// The workloads come from a processor model.
    modelled: bool,
    inputs: Inputs,
    chosen: CombinedPoint,
    alone: Alone,
    frontier: Vec<CombinedPoint>,
}

/// Inputs. Fractions, 0 to 1.
#[derive(Debug, Serialize)]
struct Inputs {
    exceed_max: Fraction,
    pdm: Fraction,
    #[serde(flatten)]
    mix: VmMix,
    insensitive: Vec<InsensitivityPoint>,
    frigid: Vec<FrigidPoint>,
}

/// Returns the choice for one prediction without the other.
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
            modelled: args.split_workloads.workloads.are_modelled(),
            inputs: Inputs {
                exceed_max: args.exceed_max,
                pdm: args.split_workloads.workloads.pdm,
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

    /// Returns figure 10d.
    fn draw(&self, Points { insensitive, frigid, fixed }: &Points) -> Figure {
        let mix = self.inputs.mix;
        let line = |nth, name: &str, choices: &[CombinedPoint]| Series {
            name: name.to_owned(),
            style: SeriesStyle::Line(nth),
            points: choices.iter().map(point).collect(),
        };
        let series = vec![
            line(0, "both forecasts", &self.frontier),
            line(1, "frigid memory alone", &frontier(&[], frigid, mix)),
            line(2, "insensitivity alone", &frontier(insensitive, &[], mix)),
            line(3, "a fixed share of every VM", &frontier(&[], fixed, mix)),
            Series { name: "chosen".to_owned(), style: SeriesStyle::Ring, points: vec![point(&self.chosen)] },
            Series {
                name: format!("allowed (X): {}", percent(self.inputs.exceed_max.get())),
                style: SeriesStyle::Upright,
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

/// Chosen point, with its predictions.
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

/// Point of the frontier between memory on the pool and mispredictions.
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

/// Formats a small percentage.
fn hundredths(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}
