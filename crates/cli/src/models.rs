//! `tarn train`, `promote`, `rollback`, `import-model` and `export-model`: what forecasts learn from and which model serves. What a model
//! is worth is the manager's to say.

use std::{io::Write as _, path::PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use evaluate::{LABEL_COLUMNS, Workloads};
use prediction::sensitivity::{Workload, measured_counters};
use proto::v1;
use serde::Serialize;
use units::limits::MODEL_BYTES_MAX;

use crate::{
    Connection, Failure, Format, open, print,
    table::{self, Column, Row, col, moment, percent, wide},
};

/// Kinds of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Frigid memory: what VMs never touch
    Frigid,
    /// Latency sensitivity: whom pool memory slows down
    Sensitivity,
}

/// What is trained.
#[derive(Clone, Debug, Subcommand)]
pub enum Train {
    /// Frigid memory, from the outcomes that the manager keeps (see `tarn telemetry`)
    #[command(after_help = PRINTED)]
    Frigid,
    /// Latency sensitivity, from labelled workloads; without --labels they are modelled
    #[command(after_help = LABEL_COLUMNS)]
    Sensitivity(Workloads),
}

/// What is printed of a model.
pub const PRINTED: &str = "\
Of frigid memory: of the OF VMS latest VMs, each forecast by a model made the same way of VMs that had ended before, too much was forecast of
OVER of them where OVER, ASKED was allowed, and FRIGID of all their memory was forecast to stay untouched.
Of sensitivity: what share of the labelled workloads would be placed whole, at cuts by which so many of all are placed wrongly.
A comparison is on VMs that began after the model that serves had been made.";

/// One model.
#[derive(Clone, Debug, Args)]
#[command(after_help = PRINTED)]
pub struct Promote {
    /// Its kind
    pub kind: Kind,
    /// Its version
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub version: u32,
    /// Say how it compares with the one that serves, change nothing
    #[arg(long)]
    pub validate_only: bool,
}

/// A kind of model.
#[derive(Clone, Debug, Args)]
pub struct OfKind {
    /// Of which models
    pub kind: Kind,
}

/// A model that is taken in.
#[derive(Clone, Debug, Args)]
pub struct Import {
    /// Its kind
    pub kind: Kind,
    /// How it is written
    #[arg(long, value_enum, default_value_t = Written::Tarn)]
    pub format: Written,
    /// The model
    pub file: PathBuf,
    /// Workloads to choose cuts by, for a model of sensitivity that was trained elsewhere; not those that it was trained on
    #[command(flatten)]
    pub workloads: Workloads,
}

/// A model that is written out.
#[derive(Clone, Debug, Args)]
pub struct Export {
    /// Its kind
    pub kind: Kind,
    /// Its version [default: the one that serves]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub version: Option<u32>,
}

/// How a model is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Written {
    /// What `tarn export-model` writes
    Tarn,
    /// LightGBM's text (`save_model`), one output
    Lightgbm,
    /// ONNX, one ensemble of trees, as skl2onnx makes it of scikit-learn's
    Onnx,
}

/// Makes a model; it does not serve before it is promoted.
pub(crate) async fn train(what: Train, to: &Connection, format: Format) -> Result<(), Failure> {
    let (kind, labels) = match what {
        Train::Frigid => (Kind::Frigid, None),
        Train::Sensitivity(workloads) => (Kind::Sensitivity, Some(labels(&workloads, format)?)),
    };
    let request = v1::TrainModelRequest { kind: v1::ModelKind::from(kind).into(), labels };
    made(to.ask_within(to.patience(), to.models().train_model(request)).await?, format)
}

/// Takes in a model; it does not serve before it is promoted.
pub(crate) async fn import(args: Import, to: &Connection, format: Format) -> Result<(), Failure> {
    let content = open::bytes(&args.file, MODEL_BYTES_MAX)?;
    let needs_labels = args.kind == Kind::Sensitivity && args.format != Written::Tarn;
    let labels = needs_labels.then(|| labels(&args.workloads, format)).transpose()?;
    let request = v1::ImportModelRequest {
        kind: v1::ModelKind::from(args.kind).into(),
        format: v1::ModelFormat::from(args.format).into(),
        content,
        labels,
    };
    made(to.ask_within(to.patience(), to.models().import_model(request)).await?, format)
}

fn made(model: v1::Model, format: Format) -> Result<(), Failure> {
    let model = Model::from(model);
    let next = format!("it serves after `tarn promote {} {}`", model.kind, model.version);
    print::say(format, &model, |_| model.text())?;
    print::note(format, &next);
    Ok(())
}

/// A model serves, or is compared with the one that does.
pub(crate) async fn promote(args: Promote, to: &Connection, format: Format) -> Result<(), Failure> {
    let request = v1::PromoteModelRequest {
        kind: v1::ModelKind::from(args.kind).into(),
        version: args.version,
        validate_only: args.validate_only,
    };
    let promoted = to.ask_within(to.patience(), to.models().promote_model(request)).await?;
    let model = Model::from(promoted);
    print::say(format, &model, |_| model.text())
}

/// The model before serves again.
pub(crate) async fn roll_back(of: OfKind, to: &Connection, format: Format) -> Result<(), Failure> {
    let request = v1::RollbackModelRequest { kind: v1::ModelKind::from(of.kind).into() };
    let serves = to.ask(to.models().rollback_model(request)).await?.model.map(Model::from);
    print::say(format, &serves, |_| match &serves {
        Some(model) => model.text(),
        None => format!("no model of {} serves any more: {}\n", of.kind.name(), of.kind.without()),
    })
}

/// Lists models.
pub(crate) async fn list(to: &Connection, format: Format) -> Result<(), Failure> {
    let models = to.ask(to.models().list_models(v1::ListModelsRequest {})).await?.models;
    print::list(format, &models.into_iter().map(Model::from).collect::<Vec<_>>())
}

/// Writes a model's file to stdout.
pub(crate) async fn export(args: Export, to: &Connection) -> Result<(), Failure> {
    let request = v1::GetModelRequest {
        kind: v1::ModelKind::from(args.kind).into(),
        version: args.version.unwrap_or_default(),
    };
    let content = to.ask(to.models().get_model(request)).await?.content;
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&content).and_then(|()| stdout.flush()).map_err(Failure::Output)
}

fn labels(workloads: &Workloads, format: Format) -> Result<v1::Labels, Failure> {
    let labelled = |workload: Workload| v1::LabelledWorkload {
        program: workload.program,
        counters: measured_counters(&workload.counters)
            .map(|(name, counter)| (name.to_owned(), counter))
            .collect(),
        slowdown: workload.slowdown,
    };
    let read = workloads.read(format)?;
    let pdm = workloads.pdm.get();
    let modelled = workloads.are_modelled();
    Ok(v1::Labels { workloads: read.into_iter().map(labelled).collect(), pdm, modelled })
}

impl Kind {
    /// What becomes of VMs when no model of this kind serves.
    const fn without(self) -> &'static str {
        match self {
            Self::Frigid => "plans put [policy] pool_share of every VM on the pool, whatever it is",
            Self::Sensitivity => "no VM is placed on the pool whole",
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Frigid => "frigid",
            Self::Sensitivity => "sensitivity",
        }
    }
}

impl From<Kind> for v1::ModelKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Frigid => Self::Frigid,
            Kind::Sensitivity => Self::Sensitivity,
        }
    }
}

impl From<Written> for v1::ModelFormat {
    fn from(written: Written) -> Self {
        match written {
            Written::Tarn => Self::Tarn,
            Written::Lightgbm => Self::Lightgbm,
            Written::Onnx => Self::Onnx,
        }
    }
}

/// A model as it is shown.
#[derive(Clone, Debug, Serialize)]
struct Model {
    kind: &'static str,
    version: u32,
    serves: bool,
    trained_by: String,
    made_unix_ms: u64,
    rows: u64,
    window_unix_ms: Option<(u64, u64)>,
    bytes: u64,
    modelled: bool,
    metrics: Vec<Metric>,
    comparison: Option<Comparison>,
}

/// What a rate bought.
#[derive(Clone, Debug, Serialize)]
struct Metric {
    rate_asked: f64,
    rate_actual: f64,
    share: f64,
    of: u64,
}

/// Against the one that serves.
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
        let kind = if m.kind() == v1::ModelKind::Sensitivity { Kind::Sensitivity } else { Kind::Frigid };
        let metric = |m: v1::Metric| Metric {
            rate_asked: m.target_rate,
            rate_actual: m.actual_rate,
            share: m.share,
            of: m.samples,
        };
        Self {
            kind: kind.name(),
            version: m.version,
            serves: m.serving,
            trained_by: m.trained_by,
            made_unix_ms: m.created_unix_ms,
            rows: m.rows,
            window_unix_ms: m.window_start_unix_ms.zip(m.window_end_unix_ms),
            bytes: m.bytes,
            modelled: m.modelled,
            metrics: m.metrics.into_iter().map(metric).collect(),
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
    /// For people: the model, what its like did, and how it compares.
    fn text(&self) -> String {
        let of_vms = self.kind == Kind::Frigid.name();
        let metrics = if of_vms { table::rows(&self.metrics, false) } else { self.cuts() };
        let compared = self.comparison.as_ref().map(|c| {
            let newer = format!("{}/{} {}", self.kind, self.version, percent(c.share));
            let serving = format!("{}/{} {}", self.kind, c.version, percent(c.share_of_serving));
            format!(
                "\nof {} later VMs, with {} overpredicted at most: {newer}, {serving}\n",
                c.vms,
                percent(c.rate)
            )
        });
        format!(
            "{}\n{metrics}{}",
            table::rows(std::slice::from_ref(self), false),
            compared.unwrap_or_else(|| self.not_compared())
        )
    }

    /// Silence would be taken for consent.
    fn not_compared(&self) -> String {
        let why = match self.kind {
            _ if self.serves => return String::new(),
            "frigid" => "none serves, or too few VMs have begun since the one that does was made",
            _ => "models of sensitivity are compared by their cuts",
        };
        format!("\nnot compared with the one that serves: {why}\n")
    }

    /// The cuts that come nearest to some rates, of many.
    fn cuts(&self) -> String {
        let up_to = |rate: f64| self.metrics.iter().rfind(|cut| cut.rate_actual <= rate);
        let line = |rate: f64| {
            let cut = up_to(rate)?;
            Some(format!("{} placed, {} of all wrongly\n", percent(cut.share), percent(cut.rate_actual)))
        };
        let mut lines: Vec<String> = [0.01, 0.02, 0.04, 0.1].into_iter().filter_map(line).collect();
        lines.dedup();
        lines.concat()
    }
}

impl Row for Model {
    const COLUMNS: &'static [Column<Self>] = &[
        col("KIND", |m| m.kind.to_owned()),
        col("VERSION", |m| m.version.to_string()),
        col("SERVES", |m| if m.serves { "yes".to_owned() } else { "-".to_owned() }),
        col("TRAINED BY", |m| m.trained_by.clone() + if m.modelled { " (modelled workloads)" } else { "" }),
        col("MADE", |m| moment(m.made_unix_ms)),
        col("ROWS", |m| m.rows.to_string()),
        col("FROM", |m| m.window_unix_ms.map_or_else(|| "-".to_owned(), |(begins, _)| moment(begins))),
        col("TO", |m| m.window_unix_ms.map_or_else(|| "-".to_owned(), |(_, ends)| moment(ends))),
        wide("BYTES", |m| m.bytes.to_string()),
    ];
}

impl Row for Metric {
    const COLUMNS: &'static [Column<Self>] = &[
        col("OVER, ASKED", |m| percent(m.rate_asked)),
        col("OVER", |m| percent(m.rate_actual)),
        col("FRIGID", |m| percent(m.share)),
        col("OF VMS", |m| m.of.to_string()),
    ];
}
