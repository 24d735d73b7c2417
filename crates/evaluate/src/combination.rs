//! `tarn evaluate combination`: computes how much memory both predictions together place on the
//! pool, within a limit on VMs slowed down beyond the PDM. The inputs are the operating points that
//! `tarn evaluate frigid` and `tarn evaluate sensitivity` measure. `prediction::combination`
//! selects the best pair.

use std::path::PathBuf;

use clap::Args;
use cli_runtime::{
    Failure, Format, print,
    table::{Column, Row, col, rows},
};
use prediction::{
    combination::{CombinedPoint, FrigidPoint, InsensitivityPoint, VmMix, choose_combination, frontier},
    frigid::backtest::{Method, MethodScores, Score},
    sensitivity::backtest::BacktestResult,
};
use serde::Serialize;
use units::Fraction;

use super::{
    figure::{self, Figure, Panel, Point, Scale, Series, SeriesStyle},
    frigid::{Vms, custom_columns_help},
    parse_percent, percent,
    sensitivity::{self, SplitWorkloads},
};

/// Options of `tarn evaluate combination`: VMs, workloads and the permitted risk.
#[derive(Clone, Debug, Args)]
pub struct Combination {
    #[command(flatten)]
    vms: Vms,
    #[command(flatten)]
    split_workloads: SplitWorkloads,
    /// X: VMs that may be slowed down beyond the PDM, in percent of all VMs
    #[arg(long, value_name = "PERCENT", default_value = "2", value_parser = parse_percent)]
    exceed_max: Fraction,
    /// h: VMs with enough history to predict their sensitivity, in percent of all VMs; 80 in Pond
    /// 6.1
    #[arg(long, value_name = "PERCENT", default_value = "80", value_parser = parse_percent)]
    history: Fraction,
    /// r: VMs slowed down beyond the PDM among those with overpredicted frigid memory, in percent;
    /// about 25 for a PDM of 5 % in Pond 6.5
    #[arg(long, value_name = "PERCENT", default_value = "25", value_parser = parse_percent)]
    overpredicted_exceeds: Fraction,
    /// Draw memory on the pool against VMs expected to be slowed down beyond the PDM, for both
    /// predictions together and for each alone, as SVG (Pond figure 10d)
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
}

/// Returns the help on the output and the input files.
pub(super) fn help() -> String {
    format!("{OUTPUT_HELP}\n\n{}\n{}", custom_columns_help(), sensitivity::LABEL_COLUMNS)
}

const OUTPUT_HELP: &str = "\
Each row is a pair of operating points, one of each prediction, with the expected result:
  POOL MEMORY      memory on the pool, of all memory
  BEYOND PDM       VMs slowed down beyond the PDM, of all VMs
  INSENSITIVE      workloads placed entirely on the pool, of all workloads
  FALSE POSITIVES  workloads placed wrongly, of all workloads
  FRIGID           memory placed on the pool in whole slices, of the memory of all other VMs
  OVERPREDICTED    VMs with overpredicted frigid memory, of all other VMs
The first table has the best pair within --exceed-max, for both predictions together and for each alone. The second table has all
optimal pairs for both predictions, for increasing BEYOND PDM (Pond Eq. 1, corrected as described in `prediction::combination`).";

/// Evaluates both predictions, prints the combined result, and writes the figure if requested.
///
/// # Errors
/// [`Failure::File`] if a file cannot be read or written, a row of a file is invalid, or the
/// workloads cannot be predicted.
pub(super) fn run(args: &Combination, format: Format) -> Result<(), Failure> {
    let workloads = args.split_workloads.workloads.read(format)?;
    let results = args.split_workloads.evaluate_for_figure(&workloads)?;
    let (_, scores_by_method) = args.vms.compare(format)?;
    let points = OperatingPoints::new(&results, &scores_by_method);
    let combined = CombinedResult::new(args, &points);
    print::value(format, &combined, |_| combined.text())?;
    args.figure.as_ref().map_or(Ok(()), |path| figure::write(path, &combined.draw(&points)))
}

/// Measured operating points of each prediction.
struct OperatingPoints {
    insensitive: Vec<InsensitivityPoint>,
    frigid: Vec<FrigidPoint>,
    /// Operating points with a fixed frigid fraction for all VMs, for comparison.
    fixed: Vec<FrigidPoint>,
}

impl OperatingPoints {
    /// Collects the operating points. For sensitivity, the thresholds are learnt from training
    /// data, not chosen in hindsight. Frigid memory is rounded down to whole slices, as in a real
    /// placement.
    fn new(results: &[BacktestResult], scores_by_method: &[MethodScores]) -> Self {
        let fraction = |value: f64| Fraction::new(value).expect("a part of a count is a fraction");
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

/// Printed result of the evaluation.
#[derive(Debug, Serialize)]
struct CombinedResult {
    /// Whether the workloads come from a processor model instead of measurements.
    modelled: bool,
    inputs: Inputs,
    chosen: CombinedPoint,
    alone: SinglePredictions,
    frontier: Vec<CombinedPoint>,
}

/// Inputs of the combination. Numbers are fractions, 0 to 1.
#[derive(Debug, Serialize)]
struct Inputs {
    exceed_max: Fraction,
    pdm: Fraction,
    #[serde(flatten)]
    mix: VmMix,
    insensitive: Vec<InsensitivityPoint>,
    frigid: Vec<FrigidPoint>,
}

/// Best operating points if only one prediction, or a fixed frigid fraction, is used.
#[derive(Debug, Serialize)]
struct SinglePredictions {
    frigid: CombinedPoint,
    insensitive: CombinedPoint,
    fixed: CombinedPoint,
}

impl CombinedResult {
    fn new(args: &Combination, OperatingPoints { insensitive, frigid, fixed }: &OperatingPoints) -> Self {
        let mix = VmMix { history: args.history, exceeds: args.overpredicted_exceeds };
        let chosen = |insensitive: &[InsensitivityPoint], frigid: &[FrigidPoint]| {
            choose_combination(insensitive, frigid, mix, args.exceed_max)
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
            alone: SinglePredictions {
                frigid: chosen(&[], frigid),
                insensitive: chosen(insensitive, &[]),
                fixed: chosen(&[], fixed),
            },
            frontier: frontier(insensitive, frigid, mix),
        }
    }

    fn text(&self) -> String {
        let SinglePredictions { frigid, insensitive, fixed } = self.alone;
        let chosen = [
            ("both predictions", self.chosen),
            ("frigid memory alone", frigid),
            ("insensitivity alone", insensitive),
            ("a fixed share", fixed),
        ];
        let chosen = chosen.map(|(method, point)| ChosenPoint { method, point });
        let frontier: Vec<_> = self.frontier.iter().copied().map(FrontierPoint).collect();
        format!("{}\n{}", rows(&chosen, false), rows(&frontier, false))
    }

    /// Draws figure 10d of Pond.
    fn draw(&self, OperatingPoints { insensitive, frigid, fixed }: &OperatingPoints) -> Figure {
        let mix = self.inputs.mix;
        let line = |index, name: &str, pairs: &[CombinedPoint]| Series {
            name: name.to_owned(),
            style: SeriesStyle::Line(index),
            points: pairs.iter().map(to_point).collect(),
        };
        let series = vec![
            line(0, "both predictions", &self.frontier),
            line(1, "frigid memory alone", &frontier(&[], frigid, mix)),
            line(2, "insensitivity alone", &frontier(insensitive, &[], mix)),
            line(3, "a fixed share of each VM", &frontier(&[], fixed, mix)),
            Series {
                name: "chosen".to_owned(),
                style: SeriesStyle::Ring,
                points: vec![to_point(&self.chosen)],
            },
            Series {
                name: format!("allowed (X): {}", percent(self.inputs.exceed_max.get())),
                style: SeriesStyle::VerticalLine,
                points: vec![Point::new(self.inputs.exceed_max.get(), 0.0)],
            },
        ];
        let modelled = if self.modelled { ", sensitivity of MODELLED workloads" } else { "" };
        Figure(vec![Panel {
            title: format!("Memory on the pool against VMs slowed down{modelled}"),
            x_title: "VMs expected to be slowed down beyond the PDM (% of VMs)",
            y_title: "Memory on the pool (% of memory)",
            x: Scale::Percent,
            y: Scale::Percent,
            x_max: 1.0,
            series,
        }])
    }
}

fn to_point(pair: &CombinedPoint) -> Point {
    Point::new(pair.miss, pair.pool)
}

/// Row of the best pair of operating points for one method.
struct ChosenPoint {
    method: &'static str,
    point: CombinedPoint,
}

impl Row for ChosenPoint {
    const COLUMNS: &'static [Column<Self>] = &[
        col("METHOD", |c| c.method.to_owned()),
        col("POOL MEMORY", |c| percent(c.point.pool)),
        col("BEYOND PDM", |c| format_small_percent(c.point.miss)),
        col("INSENSITIVE", |c| percent(c.point.insensitive.placed.get())),
        col("FALSE POSITIVES", |c| percent(c.point.insensitive.fp.get())),
        col("FRIGID", |c| percent(c.point.frigid.share.get())),
        col("OVERPREDICTED", |c| percent(c.point.frigid.op.get())),
    ];
}

/// Row of an optimal pair of operating points: more pool memory requires more mispredictions.
struct FrontierPoint(CombinedPoint);

impl Row for FrontierPoint {
    const COLUMNS: &'static [Column<Self>] = &[
        col("POOL MEMORY", |p| percent(p.0.pool)),
        col("BEYOND PDM", |p| format_small_percent(p.0.miss)),
        col("INSENSITIVE", |p| percent(p.0.insensitive.placed.get())),
        col("FALSE POSITIVES", |p| percent(p.0.insensitive.fp.get())),
        col("FRIGID", |p| percent(p.0.frigid.share.get())),
        col("OVERPREDICTED", |p| percent(p.0.frigid.op.get())),
    ];
}

/// Formats a small fraction as a percentage with two decimals.
fn format_small_percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}
