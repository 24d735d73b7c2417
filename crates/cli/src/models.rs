//! `tarn train`, `promote`, `rollback`, `import-model` and `export-model`: commands for prediction
//! models. The manager trains and evaluates the models.

use std::{io::Write as _, path::PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use evaluate::{LABEL_COLUMNS, RUN_COLUMNS, Runs, Workloads};
use prediction::{
    qos::LabelledRun,
    sensitivity::{Workload, measured_counters, measured_value},
};
use proto::v1;
use serde::Serialize;
use units::limits::{MODEL_BYTES_MAX, WORKLOAD_LABELS_MAX};

use crate::{
    Connection, Failure, Format, open, print,
    table::{self, Column, Row, col, format_timestamp, percent, wide},
    view::enum_name,
};

/// Quantity that a model predicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Frigid memory: memory that a VM never touches
    Frigid,
    /// Latency sensitivity: workloads that pool memory slows down
    Sensitivity,
    /// Loss: how much pool memory slows a running VM down
    Loss,
}

/// Kind of model to train.
#[derive(Clone, Debug, Subcommand)]
pub enum Train {
    /// Train a model of frigid (untouched) memory on the outcomes stored by the manager (see `tarn
    /// telemetry`)
    #[command(after_help = METRICS_HELP)]
    Frigid,
    /// Train a model of latency sensitivity on labelled workloads; without --labels, on synthetic
    /// workloads. Slowdowns measured by moves of VMs from the pool to local memory are added
    #[command(after_help = LABEL_COLUMNS)]
    Sensitivity {
        /// Training data.
        #[command(flatten)]
        workloads: Workloads,
        /// Use of measured moves.
        #[command(flatten)]
        moves: Moves,
    },
    /// Train a model of the loss of running VMs on labelled runs with pool memory; without --labels, on
    /// synthetic runs. Slowdowns measured by moves of VMs to local memory are added. The monitor of running
    /// VMs then uses the processor counters
    #[command(after_help = RUN_COLUMNS)]
    Loss {
        /// Training data.
        #[command(flatten)]
        runs: Runs,
        /// Use of measured moves.
        #[command(flatten)]
        moves: Moves,
    },
}

/// Use of measured moves as training data.
#[derive(Clone, Copy, Debug, Args)]
pub struct Moves {
    /// Do not use the slowdowns that were measured by moves of VMs to local memory
    #[arg(long)]
    pub without_moves: bool,
}

/// Help on the printed metrics of models.
pub const METRICS_HELP: &str = "\
Metrics of a frigid-memory model come from a backtest. Each VM is predicted by a model trained on VMs that ended before:
  TARGET RATE    allowed fraction of overpredicted VMs
  ACTUAL RATE    measured fraction of overpredicted VMs
  FRIGID         fraction of the VMs' memory that was predicted to stay untouched
  VMS            number of VMs in the backtest
Metrics of a loss model are the fractions of slowed-down runs and of other runs that it flags. Each run is estimated without the same
program, and runs with local and pool memory also without the pool loads and the latency, which agents cannot measure for such VMs.
Metrics of a sensitivity model are the fractions of labelled workloads placed entirely on the pool, and their error rates.
The comparison with the serving model uses only VMs that started after the serving model was created.";

/// Options of `tarn promote`.
#[derive(Clone, Debug, Args)]
#[command(after_help = METRICS_HELP)]
pub struct Promote {
    /// Kind of the model
    pub kind: Kind,
    /// Version of the model
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub version: u32,
    /// Compare the model with the serving model, and do not promote it
    #[arg(long)]
    pub validate_only: bool,
}

/// Options of `tarn rollback`.
#[derive(Clone, Debug, Args)]
pub struct Rollback {
    /// Kind of the model
    pub kind: Kind,
}

/// Options of `tarn import-model`.
#[derive(Clone, Debug, Args)]
pub struct Import {
    /// Kind of the model
    pub kind: Kind,
    /// Format of the file
    #[arg(long, value_enum, default_value_t = ModelFileFormat::Tarn)]
    pub format: ModelFileFormat,
    /// File with the model
    pub file: PathBuf,
    /// Workloads from which the thresholds of an external sensitivity model are selected. They must
    /// differ from the model's training data.
    #[command(flatten)]
    pub workloads: Workloads,
}

/// Options of `tarn export-model`.
#[derive(Clone, Debug, Args)]
pub struct Export {
    /// Kind of the model
    pub kind: Kind,
    /// Version of the model [default: the serving version]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub version: Option<u32>,
}

/// File format of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModelFileFormat {
    /// Format of `tarn export-model`
    Tarn,
    /// LightGBM text file (`save_model`) with one output
    Lightgbm,
    /// ONNX file with one tree ensemble, as converted from scikit-learn by skl2onnx
    Onnx,
}

/// Trains a model and prints its metrics. The model does not serve before its promotion.
pub(crate) async fn train(command: Train, manager: &Connection, format: Format) -> Result<(), Failure> {
    let (kind, labels, without_measured_moves) = match command {
        Train::Frigid => (Kind::Frigid, None, false),
        Train::Sensitivity { workloads, moves } => {
            (Kind::Sensitivity, Some(read_labels(&workloads, format)?), moves.without_moves)
        }
        Train::Loss { runs, moves } => (Kind::Loss, Some(read_runs(&runs, format)?), moves.without_moves),
    };
    let kind = v1::ModelKind::from(kind).into();
    let request = v1::TrainModelRequest { kind, labels, without_measured_moves };
    print_created(
        manager.call_with_timeout(manager.wait_timeout(), manager.models().train_model(request)).await?,
        format,
    )
}

/// Imports a model and prints its metrics. The model does not serve before its promotion.
pub(crate) async fn import(args: Import, manager: &Connection, format: Format) -> Result<(), Failure> {
    let content = open::bytes(&args.file, MODEL_BYTES_MAX)?;
    let needs_labels = args.kind == Kind::Sensitivity && args.format != ModelFileFormat::Tarn;
    if let Some(labels) = args.workloads.labels.as_ref().filter(|_| !needs_labels) {
        let rule = "is permitted only for a sensitivity model of another tool";
        let value = labels.display().to_string();
        return Err(Failure::InvalidValue { field: "--labels", value, rule: rule.into() });
    }
    let labels = needs_labels.then(|| read_labels(&args.workloads, format)).transpose()?;
    let request = v1::ImportModelRequest {
        kind: v1::ModelKind::from(args.kind).into(),
        format: v1::ModelFormat::from(args.format).into(),
        content,
        labels,
    };
    print_created(
        manager.call_with_timeout(manager.wait_timeout(), manager.models().import_model(request)).await?,
        format,
    )
}

fn print_created(model: v1::Model, format: Format) -> Result<(), Failure> {
    let model = Model::from(model);
    let next = format!("to use this model, run `tarn promote {} {}`", model.kind, model.version);
    print::value(format, &model, |_| model.to_text())?;
    print::note(format, &next);
    Ok(())
}

/// Promotes a model, or only compares it with the serving model.
pub(crate) async fn promote(args: Promote, manager: &Connection, format: Format) -> Result<(), Failure> {
    let request = v1::PromoteModelRequest {
        kind: v1::ModelKind::from(args.kind).into(),
        version: args.version,
        validate_only: args.validate_only,
    };
    let promoted =
        manager.call_with_timeout(manager.wait_timeout(), manager.models().promote_model(request)).await?;
    let model = Model::from(promoted);
    print::value(format, &model, |_| model.to_text())
}

/// Makes the previous serving model serve again, and prints it.
pub(crate) async fn roll_back(args: Rollback, manager: &Connection, format: Format) -> Result<(), Failure> {
    let request = v1::RollbackModelRequest { kind: v1::ModelKind::from(args.kind).into() };
    let serves = manager.call(manager.models().rollback_model(request)).await?.model.map(Model::from);
    print::value(format, &serves, |_| match &serves {
        Some(model) => model.to_text(),
        None => format!("no {} model serves: {}\n", args.kind.name(), args.kind.without_model()),
    })
}

/// Prints all models, one per row.
pub(crate) async fn list(manager: &Connection, format: Format) -> Result<(), Failure> {
    let models = manager.call(manager.models().list_models(v1::ListModelsRequest {})).await?.models;
    print::list(format, &models.into_iter().map(Model::from).collect::<Vec<_>>())
}

/// Writes the file of a model to stdout.
pub(crate) async fn export(args: Export, manager: &Connection) -> Result<(), Failure> {
    let request = v1::GetModelRequest {
        kind: v1::ModelKind::from(args.kind).into(),
        version: args.version.unwrap_or_default(),
    };
    let content = manager.call(manager.models().get_model(request)).await?.content;
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&content).and_then(|()| stdout.flush()).map_err(Failure::Output)
}

fn read_labels(workloads: &Workloads, format: Format) -> Result<v1::Labels, Failure> {
    let read: Vec<_> = workloads.read(format)?.into_iter().map(labelled_workload).collect();
    check_label_count(read.len())?;
    Ok(v1::Labels { workloads: read, pdm: workloads.pdm.get(), modelled: workloads.are_modelled() })
}

fn read_runs(runs: &Runs, format: Format) -> Result<v1::Labels, Failure> {
    let labelled = |LabelledRun { workload, pool_loads, latency_ratio, .. }| v1::LabelledWorkload {
        pool_load_share: measured_value(pool_loads),
        latency_ratio: measured_value(latency_ratio),
        ..labelled_workload(workload)
    };
    let read: Vec<_> = runs.read(format)?.into_iter().map(labelled).collect();
    check_label_count(read.len())?;
    Ok(v1::Labels { workloads: read, pdm: runs.pdm.get(), modelled: runs.are_modelled() })
}

fn check_label_count(count: usize) -> Result<(), Failure> {
    if count <= WORKLOAD_LABELS_MAX {
        return Ok(());
    }
    let rule = format!("must be at most {WORKLOAD_LABELS_MAX}").into();
    Err(Failure::InvalidValue { field: "--labels", value: format!("{count} rows"), rule })
}

fn labelled_workload(workload: Workload) -> v1::LabelledWorkload {
    let counters = measured_counters(&workload.counters).map(|(name, counter)| (name.to_owned(), counter));
    v1::LabelledWorkload {
        counters: counters.collect(),
        program: workload.program,
        slowdown: workload.slowdown,
        ..Default::default()
    }
}

impl Kind {
    /// Describes what the manager does while no model of this kind serves.
    const fn without_model(self) -> &'static str {
        match self {
            Self::Frigid => {
                "plans place a fixed fraction of each VM's memory on the pool ([policy] pool_share)"
            }
            Self::Sensitivity => "no VM is placed entirely on the pool",
            Self::Loss => "running VMs are judged by the accesses to their pool memory alone",
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Frigid => "frigid",
            Self::Sensitivity => "sensitivity",
            Self::Loss => "loss",
        }
    }
}

impl From<Kind> for v1::ModelKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Frigid => Self::Frigid,
            Kind::Sensitivity => Self::Sensitivity,
            Kind::Loss => Self::Loss,
        }
    }
}

impl From<ModelFileFormat> for v1::ModelFormat {
    fn from(written: ModelFileFormat) -> Self {
        match written {
            ModelFileFormat::Tarn => Self::Tarn,
            ModelFileFormat::Lightgbm => Self::Lightgbm,
            ModelFileFormat::Onnx => Self::Onnx,
        }
    }
}

/// Model as printed by `tarn get models`, with its metrics.
#[derive(Clone, Debug, Serialize)]
struct Model {
    kind: String,
    version: u32,
    serving: bool,
    trained_by: String,
    created_unix_ms: u64,
    rows: u64,
    window_unix_ms: Option<(u64, u64)>,
    bytes: u64,
    modelled: bool,
    measured_moves: u64,
    pdm: Option<f64>,
    metrics: Vec<Metric>,
    loss_accuracy: Option<LossAccuracy>,
    comparison: Option<Comparison>,
}

/// Accuracy of a model of the loss on its training data.
#[derive(Clone, Debug, Serialize)]
struct LossAccuracy {
    runs: u32,
    flagged_harmed: f64,
    flagged_unharmed: f64,
}

/// Metrics of a model at one target error rate.
#[derive(Clone, Debug, Serialize)]
struct Metric {
    target_rate: f64,
    actual_rate: f64,
    share: f64,
    samples: u64,
}

/// Comparison of a model with the serving model.
#[derive(Clone, Debug, Serialize)]
struct Comparison {
    version: u32,
    vms: u64,
    rate: f64,
    share: f64,
    share_of_serving: f64,
}

impl From<v1::Model> for Model {
    fn from(m: v1::Model) -> Self {
        let metric = |m: v1::Metric| Metric {
            target_rate: m.target_rate,
            actual_rate: m.actual_rate,
            share: m.share,
            samples: m.samples,
        };
        Self {
            kind: enum_name(m.kind, "MODEL_KIND_", v1::ModelKind::as_str_name),
            version: m.version,
            serving: m.serving,
            trained_by: m.trained_by,
            created_unix_ms: m.created_unix_ms,
            rows: m.rows,
            window_unix_ms: m.window_start_unix_ms.zip(m.window_end_unix_ms),
            bytes: m.bytes,
            modelled: m.modelled,
            measured_moves: m.measured_moves,
            pdm: m.pdm,
            metrics: m.metrics.into_iter().map(metric).collect(),
            loss_accuracy: m.loss_accuracy.map(|accuracy| LossAccuracy {
                runs: accuracy.runs,
                flagged_harmed: accuracy.flagged_harmed,
                flagged_unharmed: accuracy.flagged_unharmed,
            }),
            comparison: m.comparison.map(|c| Comparison {
                version: c.version,
                vms: c.vms,
                rate: c.rate,
                share: c.share,
                share_of_serving: c.share_of_serving,
            }),
        }
    }
}

impl Model {
    /// Formats the model, its metrics and the comparison as text.
    fn to_text(&self) -> String {
        let of_vms = self.kind == Kind::Frigid.name();
        let metrics = match &self.loss_accuracy {
            Some(accuracy) => accuracy.to_text(),
            None if of_vms => table::rows(&self.metrics, false),
            None => self.threshold_lines(),
        };
        let compared = self.comparison.as_ref().map(|c| {
            let newer = format!("{}/{} {}", self.kind, self.version, percent(c.share));
            let serving = format!("{}/{} {}", self.kind, c.version, percent(c.share_of_serving));
            format!(
                "\nfrigid memory of {} later VMs at an overprediction rate of at most {}: {newer}, {serving}\n",
                c.vms,
                percent(c.rate)
            )
        });
        format!(
            "{}\n{metrics}{}",
            table::rows(std::slice::from_ref(self), false),
            compared.unwrap_or_else(|| self.missing_comparison_note())
        )
    }

    /// Explains why there is no comparison, so that a missing comparison is not mistaken for a good
    /// result. Returns an empty string for the serving model.
    fn missing_comparison_note(&self) -> String {
        let reason = match self.kind.as_str() {
            _ if self.serving => return String::new(),
            "frigid" => "no model serves, or too few VMs have started since it was created",
            "loss" => "compare the fractions of flagged runs of both models",
            _ => "compare the results of both models at the same error rate",
        };
        format!("\nnot compared with the serving model: {reason}\n")
    }

    /// Formats the fraction of workloads placed on the pool at error rates of at most 1, 2, 4 and
    /// 10 %.
    fn threshold_lines(&self) -> String {
        let up_to = |rate: f64| self.metrics.iter().rfind(|metric| metric.actual_rate <= rate);
        let line = |rate: f64| {
            let metric = up_to(rate)?;
            Some(format!(
                "{} of workloads placed on the pool, error rate {}\n",
                percent(metric.share),
                percent(metric.actual_rate)
            ))
        };
        let mut lines: Vec<String> = [0.01, 0.02, 0.04, 0.1].into_iter().filter_map(line).collect();
        lines.dedup();
        lines.concat()
    }
}

impl LossAccuracy {
    fn to_text(&self) -> String {
        format!(
            "of {} runs, {} of the slowed-down ones and {} of the others are flagged\n",
            self.runs,
            percent(self.flagged_harmed),
            percent(self.flagged_unharmed)
        )
    }
}

impl Row for Model {
    const COLUMNS: &'static [Column<Self>] = &[
        col("KIND", |m| m.kind.clone()),
        col("VERSION", |m| m.version.to_string()),
        col("SERVING", |m| if m.serving { "yes".to_owned() } else { "-".to_owned() }),
        col("TRAINED BY", |m| m.trained_by.clone() + if m.modelled { " (synthetic workloads)" } else { "" }),
        col("PDM", |m| m.pdm.map_or_else(|| "-".to_owned(), percent)),
        wide("MEASURED MOVES", |m| m.measured_moves.to_string()),
        col("CREATED", |m| format_timestamp(m.created_unix_ms)),
        col("ROWS", |m| m.rows.to_string()),
        col("DATA FROM", |m| {
            m.window_unix_ms.map_or_else(|| "-".to_owned(), |(begins, _)| format_timestamp(begins))
        }),
        col("DATA TO", |m| {
            m.window_unix_ms.map_or_else(|| "-".to_owned(), |(_, ends)| format_timestamp(ends))
        }),
        wide("BYTES", |m| m.bytes.to_string()),
    ];
}

impl Row for Metric {
    const COLUMNS: &'static [Column<Self>] = &[
        col("TARGET RATE", |m| percent(m.target_rate)),
        col("ACTUAL RATE", |m| percent(m.actual_rate)),
        col("FRIGID", |m| percent(m.share)),
        col("VMS", |m| m.samples.to_string()),
    ];
}
