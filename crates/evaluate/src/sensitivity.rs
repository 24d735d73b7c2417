//! `tarn evaluate sensitivity`: measures how many workloads each method would place on pool memory.
//! Workloads are read from a file of the operator, or MODELLED: programs on a simulated core, with
//! simulated counters and slowdowns. The output states whether workloads are modelled.

use std::{
    io,
    path::{Path, PathBuf},
};

use clap::Args;
use cli_runtime::{
    Failure, Format, open, print,
    table::{Column, Row, col, wide},
};
use prediction::{
    labels::read_labels,
    sensitivity::{
        DRAM_BOUND_INDEX, Workload,
        backtest::{self, BacktestResult, EvaluationError, PlacementStats},
    },
};
use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;
use serde::Serialize;
use sim::processor::{
    self, Measurement, Memory, SERVER_CORE, add_noise, kernel_family, measure, read_latency, read_trace,
};
use units::{Fraction, limits::CROSS_VALIDATION_SPLITS_MAX};

use super::{
    figure::{self, Figure, Panel, Point, Scale, Series, SeriesStyle},
    parse_margin, percent, printed_rates,
};

/// Options of `tarn evaluate sensitivity`: workloads, and the figure.
#[derive(Clone, Debug, Args)]
pub struct Sensitivity {
    #[command(flatten)]
    split_workloads: SplitWorkloads,
    /// Draw slowdowns against memory boundness, and the fraction placed against the rate of false
    /// positives, as SVG (Pond figures 10a and 10b)
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
}

/// Workloads, and the number of random splits.
#[derive(Clone, Debug, Args)]
pub(super) struct SplitWorkloads {
    #[command(flatten)]
    pub(super) workloads: Workloads,
    /// Number of random splits of the programs into halves
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=i64::from(CROSS_VALIDATION_SPLITS_MAX)))]
    splits: u32,
}

/// Labelled or modelled workloads, and the permitted slowdown.
#[derive(Clone, Debug, Args)]
pub struct Workloads {
    /// CSV file of labelled workloads: program, slowdown (0.1 is 10 %) and a column per counter
    /// [default: modelled workloads]
    #[arg(long, value_name = "FILE")]
    pub labels: Option<PathBuf>,
    /// CSV file of measured loaded latencies of servers `ddr5` and `cxl`, for modelled workloads
    /// [default: synthetic latencies]
    #[arg(long, value_name = "FILE", conflicts_with = "labels")]
    latency: Option<PathBuf>,
    /// Trace of memory accesses or keys, added as a modelled workload; may be repeated
    #[arg(long, value_name = "FILE", conflicts_with = "labels")]
    trace: Vec<PathBuf>,
    /// Permitted slowdown, in percent: the performance degradation margin
    #[arg(long, value_name = "PERCENT", default_value = "5", value_parser = parse_margin)]
    pub pdm: Fraction,
}

/// Help on the columns of the tables of workloads, latencies and traces.
pub const LABEL_COLUMNS: &str = "\
Columns of --labels, all required, in any order; a counter that was not measured is empty:
  program                    name of the program, the same for runs with different inputs; at least 10 programs
  slowdown                   relative increase of the run time with pool memory: 0.1 is 10 %
  retiring frontend_bound bad_speculation core_bound memory_bound l1_bound l2_bound l3_bound
  dram_latency_bound dram_bandwidth_bound store_bound dram_bound
                             fractions of pipeline slots or cycles with local memory, 0 to 1
  ipc l1_mpki l2_mpki l3_mpki memory_level_parallelism
                             instructions per cycle; misses per 1000 instructions; outstanding misses
Columns of --latency: server (ddr5, cxl), dst (d0), threads (16), mlc_w (0), random (0), latency_ns, bandwidth_mb_s
Columns of --trace: key; or op (l, s), addr, insns_since_prev
";

/// Note on modelled workloads.
pub(super) const MODELLED_NOTE: &str = "the workloads, their counters and their slowdowns are MODELLED, not measured; use --labels for measured workloads";

/// Help on the printed columns.
const OUTPUT_HELP: &str = "\
TARGET RATE is the allowed fraction of workloads that are placed wrongly (false positives). FOREST, DRAM BOUND, MEMORY BOUND and L3 MPKI
(misses of the last-level cache per 1000 instructions) are the fractions of workloads that each method would place on the pool, with the
best threshold in hindsight; in parentheses the 1st and 99th percentile over the splits. LEARNT columns have the fraction of workloads
placed with a threshold learnt from the training half, and the fraction placed wrongly. UNSEEN KIND columns have the same fractions if
each kind of programs is predicted by a model and a threshold from all other kinds. The kind of a program is its name up to the first `-`.";

/// Returns the help on the input files and the output.
pub(super) fn help() -> String {
    format!("{LABEL_COLUMNS}\n{OUTPUT_HELP}")
}

/// Number of different inputs of each modelled program.
const INPUTS_PER_PROGRAM: u64 = 3;
/// Synthetic local memory: idle latency in ns, and bandwidth per core in GB/s.
const SYNTHETIC_LOCAL_MEMORY: (f64, f64) = (100.0, 8.0);
/// Synthetic pool memory: idle latency in ns, and bandwidth per core in GB/s.
const SYNTHETIC_POOL_MEMORY: (f64, f64) = (250.0, 6.0);
/// Seed of random splits and of noise in modelled counters. It is fixed, so that results are
/// reproducible.
const SEED: u64 = 1;

/// Target rates of false positives for the figure and for `tarn evaluate combination`. They include
/// the target rates that are printed.
const FIGURE_RATES: [f64; 13] =
    [0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1];

/// Evaluates the methods, prints the results, and writes the figure if requested.
///
/// # Errors
/// [`Failure::File`] if a file cannot be read or written, or the workloads cannot be predicted.
pub(super) fn run(args: &Sensitivity, format: Format) -> Result<(), Failure> {
    let workloads = args.split_workloads.workloads.read(format)?;
    let modelled = args.split_workloads.workloads.are_modelled();
    let list = |results: &[BacktestResult]| {
        let rows = results.iter().map(|result| ResultRow { modelled, result: *result });
        print::list(format, &rows.collect::<Vec<_>>())
    };
    let Some(path) = &args.figure else {
        return list(&args.split_workloads.evaluate(&workloads, &printed_rates())?);
    };
    let results = args.split_workloads.evaluate_for_figure(&workloads)?;
    let is_printed =
        |result: &&BacktestResult| printed_rates().iter().any(|rate| rate.get() == result.fp_target);
    list(&results.iter().filter(is_printed).copied().collect::<Vec<_>>())?;
    figure::write(path, &draw(&workloads, &results, args.split_workloads.workloads.pdm, modelled))
}

impl Workloads {
    /// Returns whether the workloads come from a processor model.
    pub fn are_modelled(&self) -> bool {
        self.labels.is_none()
    }

    /// Reads the labelled workloads or creates the modelled ones, and prints their number on
    /// stderr.
    ///
    /// # Errors
    /// [`Failure::File`] if a file cannot be read or a row is invalid.
    pub fn read(&self, format: Format) -> Result<Vec<Workload>, Failure> {
        let workloads = match &self.labels {
            Some(path) => open::table(path, read_labels)?,
            None => create_modelled_workloads(self, format)?,
        };
        let slowed = workloads.iter().filter(|workload| workload.slowdown > self.pdm.get()).count();
        let (runs, pdm) = (workloads.len(), percent(self.pdm.get()));
        print::note(
            format,
            &format!("{runs} runs of workloads, {slowed} of them slowed down by more than {pdm}"),
        );
        Ok(workloads)
    }
}

impl SplitWorkloads {
    /// Evaluates each method at each target rate of the figure.
    pub(super) fn evaluate_for_figure(&self, workloads: &[Workload]) -> Result<Vec<BacktestResult>, Failure> {
        self.evaluate(workloads, &FIGURE_RATES.map(|rate| Fraction::new(rate).expect("a rate is a fraction")))
    }

    fn evaluate(&self, workloads: &[Workload], rates: &[Fraction]) -> Result<Vec<BacktestResult>, Failure> {
        let results = backtest::run(workloads, self.workloads.pdm, rates, self.splits, SEED);
        results.map_err(|error| prediction_failure(self.workloads.labels.as_deref(), error))
    }
}

/// Converts the error of a prediction for workloads. `labels` is their file, `None` for modelled
/// workloads.
pub(super) fn prediction_failure(labels: Option<&Path>, error: EvaluationError) -> Failure {
    Failure::File {
        operation: "predict slowdowns of",
        path: labels.unwrap_or(Path::new("the modelled workloads")).to_owned(),
        errno: io::Error::new(io::ErrorKind::InvalidData, error),
    }
}

/// Row with the results of all methods at one target rate.
#[derive(Debug, Serialize)]
struct ResultRow {
    modelled: bool,
    #[serde(flatten)]
    result: BacktestResult,
}

/// Creates the modelled workloads: synthetic programs, and programs that replay the traces.
fn create_modelled_workloads(args: &Workloads, format: Format) -> Result<Vec<Workload>, Failure> {
    print::note(format, MODELLED_NOTE);
    let [local, pool] = match &args.latency {
        Some(path) => {
            let server = |name: &str| open::table(path, |bytes| read_latency(bytes, name));
            [server("ddr5")?, server("cxl")?]
        }
        None => [SYNTHETIC_LOCAL_MEMORY, SYNTHETIC_POOL_MEMORY]
            .map(|(idle_ns, gb_per_s)| Memory::synthetic(idle_ns, gb_per_s)),
    };
    let mut rng = Pcg64Mcg::seed_from_u64(SEED);
    let mut workloads = Vec::new();
    let mut run = |program: &str, program_accesses: &processor::Program| {
        let Measurement { counters, slowdown } = measure(&SERVER_CORE, program_accesses, &local, &pool);
        let counters = add_noise(&counters, &mut rng);
        workloads.push(Workload { program: program.to_owned(), counters, slowdown });
    };
    for kernel in kernel_family() {
        (0..INPUTS_PER_PROGRAM).for_each(|input| run(&kernel.name, &kernel.program(input)));
    }
    for path in &args.trace {
        for (added, programs) in open::table(path, read_trace)? {
            let name = format!("{}{added}", path.display());
            programs.iter().for_each(|program| run(&name, program));
        }
    }
    Ok(workloads)
}

/// Draws figures 10a and 10b of Pond.
fn draw(workloads: &[Workload], results: &[BacktestResult], pdm: Fraction, is_modelled: bool) -> Figure {
    let title = |subject: &str| format!("{subject}{}", if is_modelled { ", MODELLED workloads" } else { "" });
    let bound = |workload: &Workload| Point::new(workload.counters[DRAM_BOUND_INDEX], workload.slowdown);
    let dots = Series {
        name: format!("a run of a workload{}", if is_modelled { " (MODELLED)" } else { "" }),
        style: SeriesStyle::Dots,
        points: workloads.iter().map(bound).collect(),
    };
    let margin = Series {
        name: format!("margin (PDM): {}", percent(pdm.get())),
        style: SeriesStyle::HorizontalLine,
        points: vec![Point::new(0.0, pdm.get())],
    };
    let slowdowns = Panel {
        title: title("(a) Slowdown with pool memory"),
        x_title: "DRAM bound with local memory (% of cycles)",
        y_title: "Slowdown with pool memory (%)",
        x: Scale::Percent,
        y: Scale::Percent,
        x_max: 1.0,
        series: vec![dots, margin],
    };
    Figure(vec![slowdowns, placement_panel(results, title("(b) Predicted insensitive"))])
}

/// Draws figure 10b: each method with the best thresholds in hindsight as in the paper, and the
/// forest also with learnt thresholds.
fn placement_panel(results: &[BacktestResult], title: String) -> Panel {
    let line = |index, name: &str, point: fn(&BacktestResult) -> Point| Series {
        name: name.to_owned(),
        style: SeriesStyle::Line(index),
        points: results.iter().map(point).collect(),
    };
    let forest = "forest, best threshold in hindsight (bars: 98 % of the splits)";
    let dram_bound = "DRAM bound, best threshold in hindsight";
    let memory_bound = "memory bound, best threshold in hindsight";
    let l3_mpki = "L3 MPKI, best threshold in hindsight";
    let series = vec![
        line(0, forest, |result| hindsight_point(result, &result.forest)),
        line(1, dram_bound, |result| hindsight_point(result, &result.dram_bound)),
        line(2, memory_bound, |result| hindsight_point(result, &result.memory_bound)),
        line(3, l3_mpki, |result| hindsight_point(result, &result.l3_mpki)),
        line(4, "forest, threshold learnt from the training half", |result| {
            Point::new(result.forest.tuned_fp, result.forest.tuned_placed)
        }),
    ];
    Panel {
        title,
        x_title: "False positives (% of workloads)",
        y_title: "Placed entirely on the pool (% of workloads)",
        x: Scale::Percent,
        y: Scale::Percent,
        x_max: 1.0,
        series,
    }
}

fn hindsight_point(result: &BacktestResult, placed: &PlacementStats) -> Point {
    let PlacementStats { placed, placed_p1, placed_p99, .. } = *placed;
    Point { x: result.fp_target, y: placed, error_bar: Some((placed_p1, placed_p99)) }
}

impl Row for ResultRow {
    const COLUMNS: &'static [Column<Self>] = &[
        col("TARGET RATE", |t| percent(t.result.fp_target)),
        col("FOREST", |t| format_placed_fraction(&t.result.forest)),
        col("DRAM BOUND", |t| format_placed_fraction(&t.result.dram_bound)),
        col("MEMORY BOUND", |t| format_placed_fraction(&t.result.memory_bound)),
        col("L3 MPKI", |t| format_placed_fraction(&t.result.l3_mpki)),
        col("FOREST (LEARNT)", |t| format_learnt_fraction(&t.result.forest)),
        col("FOREST (UNSEEN KIND)", |t| format_unseen_kind(&t.result.forest)),
        col("L3 MPKI (UNSEEN KIND)", |t| format_unseen_kind(&t.result.l3_mpki)),
        wide("DRAM BOUND (LEARNT)", |t| format_learnt_fraction(&t.result.dram_bound)),
        wide("MEMORY BOUND (LEARNT)", |t| format_learnt_fraction(&t.result.memory_bound)),
        wide("L3 MPKI (LEARNT)", |t| format_learnt_fraction(&t.result.l3_mpki)),
        wide("DRAM BOUND (UNSEEN KIND)", |t| format_unseen_kind(&t.result.dram_bound)),
        wide("MEMORY BOUND (UNSEEN KIND)", |t| format_unseen_kind(&t.result.memory_bound)),
        wide("MODELLED", |t| t.modelled.to_string()),
    ];
}

fn format_placed_fraction(placed: &PlacementStats) -> String {
    let PlacementStats { placed, placed_p1, placed_p99, .. } = *placed;
    format!("{} ({} to {})", percent(placed), percent(placed_p1), percent(placed_p99))
}

fn format_learnt_fraction(placed: &PlacementStats) -> String {
    format!("{}, {} wrong", percent(placed.tuned_placed), percent(placed.tuned_fp))
}

fn format_unseen_kind(placed: &PlacementStats) -> String {
    let unseen = placed.unseen_kind;
    unseen.map_or_else(String::new, |unseen| {
        format!("{}, {} wrong", percent(unseen.placed), percent(unseen.fp))
    })
}
