//! `tarn telemetry`: imports outcomes of VMs into the manager, and exports outcomes and measured moves as
//! CSV for training elsewhere.

use std::{
    fs,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use clap::{Args, Subcommand};
use evaluate::TableFormat;
use prediction::{
    frigid::{
        Groups, Outcome, VmRequest, VmUsage,
        backtest::{self, VmSample},
        feature_names,
    },
    qos::{LATENCY_RATIO_NAME, POOL_LOADS_NAME},
    sensitivity::COUNTER_NAMES,
    table,
};
use proto::v1;
use serde::Serialize;
use units::{Bytes, Fraction, UnixMs, limits::OUTCOMES_PER_REQUEST_MAX};

use crate::{
    Connection, Failure, Format, open, print,
    table::{Column, Row, col},
};

/// Commands for outcomes of VMs.
#[derive(Clone, Debug, Subcommand)]
pub enum Telemetry {
    /// Import outcomes of ended VMs from a table; VMs already stored are skipped
    #[command(after_help = evaluate::custom_columns_help())]
    Import(Import),
    /// Export all outcomes as CSV to stdout, with the columns of `import --format csv`; with --moves, the
    /// slowdowns measured by moves to local memory
    Export(Export),
}

/// Options of `tarn telemetry import`.
#[derive(Clone, Debug, Args)]
pub struct Import {
    /// Format of the table
    #[arg(long, value_enum)]
    format: TableFormat,
    /// File with the table, plain or gzip-compressed
    file: PathBuf,
    /// Keep the timestamps, which must be seconds since 1970; by default, all timestamps are
    /// shifted so that the last VM ends at the modification time of the file
    #[arg(long)]
    keep_timestamps: bool,
}

/// Options of `tarn telemetry export`.
#[derive(Clone, Debug, Args)]
pub struct Export {
    /// Export training features instead: numeric columns known at the start of each VM, and the
    /// label `untouched`, the untouched fraction of its memory. Unknown values are empty
    #[arg(long)]
    features: bool,
    /// Export the slowdowns measured by moves of VMs to local memory instead, with the columns of `tarn train
    /// loss --labels` of another rack. This rack's `tarn train` uses them without an export
    #[arg(long, conflicts_with = "features")]
    moves: bool,
}

/// Number of rows of an imported table by import result.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct ImportResult {
    added: u64,
    duplicates: u64,
    too_old: u64,
    invalid: u64,
}

/// Runs a command for outcomes.
pub(crate) async fn run(command: Telemetry, manager: &Connection, format: Format) -> Result<(), Failure> {
    match command {
        Telemetry::Import(args) => import(args, manager, format).await,
        Telemetry::Export(Export { moves: true, .. }) => export_moves(manager).await,
        Telemetry::Export(args) => export(&args, manager).await,
    }
}

async fn import(args: Import, manager: &Connection, format: Format) -> Result<(), Failure> {
    let read = open::table(&args.file, |bytes| table::read(bytes, args.format.into()))?;
    let rows = read.len() as u64;
    let mut trusted: Vec<VmSample> = read.into_iter().filter(|sample| sample.is_trusted).collect();
    let mut sum = ImportResult { invalid: rows - trusted.len() as u64, ..ImportResult::default() };
    if !args.keep_timestamps {
        shift_to_end_at(&mut trusted, modification_time(&args.file)?);
    }
    trusted.sort_by_key(|sample| sample.outcome.ended); // the manager stores outcomes in the order of arrival
    for page in trusted.chunks(OUTCOMES_PER_REQUEST_MAX) {
        let outcomes = page.iter().map(to_outcome_message).collect();
        let done = manager.call(manager.models().add_outcomes(v1::AddOutcomesRequest { outcomes })).await;
        let done = done.inspect_err(|_| {
            let done = sum.added + sum.duplicates + sum.too_old;
            print::note(
                format,
                &format!(
                    "the first {done} outcomes were processed; fix the error and import the file again, which skips duplicates"
                ),
            );
        })?;
        sum.added += u64::from(done.added);
        sum.duplicates += u64::from(done.duplicates);
        sum.too_old += u64::from(done.too_old);
    }
    print::one(format, &sum)
}

/// Returns the modification time of a file. It is the same for repeated imports of the file, so
/// that the shifted timestamps are the same and the manager detects duplicates.
fn modification_time(path: &Path) -> Result<UnixMs, Failure> {
    let modified = fs::metadata(path).and_then(|file| file.modified());
    let at = modified.map_err(|errno| Failure::File { operation: "read", path: path.to_owned(), errno })?;
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(UnixMs(u64::try_from(since.as_millis()).unwrap_or(u64::MAX)))
}

/// Shifts all timestamps of the samples so that the last VM ends at `end`.
fn shift_to_end_at(samples: &mut [VmSample], end: UnixMs) {
    let last = samples.iter().map(|sample| sample.outcome.ended.0).max().unwrap_or(end.0);
    let shifted = |at: UnixMs| UnixMs((at.0 + end.0).saturating_sub(last));
    for sample in samples {
        sample.request.begins = shifted(sample.request.begins);
        sample.outcome.ended = shifted(sample.outcome.ended);
    }
}

fn to_outcome_message(sample: &VmSample) -> v1::Outcome {
    let VmRequest { groups, requested, cores, begins } = sample.request.clone();
    let Groups { vm, key, kind, place } = groups;
    let Outcome { ended, usage, .. } = sample.outcome;
    v1::Outcome {
        vm,
        profile: Some(v1::VmProfile { key, kind, place, ..Default::default() }),
        requested_bytes: requested.get(),
        cores: cores.unwrap_or_default(),
        started_unix_ms: begins.0,
        ended_unix_ms: ended.0,
        peak_bytes: sample.outcome.peak(requested).get(),
        p99_bytes: usage.p99.map(Bytes::get),
        mean_bytes: usage.mean.map(Bytes::get),
        cpu_utilization_percent: usage.busy_percent,
    }
}

async fn export(args: &Export, manager: &Connection) -> Result<(), Failure> {
    let mut samples = Vec::new();
    let mut after = Some(0);
    while let Some(from) = after {
        let request = v1::ListOutcomesRequest { after: from, limit: 0 };
        let page = manager.call(manager.models().list_outcomes(request)).await?;
        samples.extend(page.outcomes.into_iter().map(to_sample));
        after = page.next_after.filter(|next| *next > from);
    }
    if args.features { print_features(&samples) } else { print_outcomes(&samples) }
}

/// Prints the measured moves as CSV, with the columns of `tarn train loss --labels`.
async fn export_moves(manager: &Connection) -> Result<(), Failure> {
    let header =
        ["program", "slowdown", POOL_LOADS_NAME, LATENCY_RATIO_NAME].into_iter().chain(COUNTER_NAMES);
    print::out(&(header.collect::<Vec<_>>().join(",") + "\n"))?;
    let mut after = Some(0);
    while let Some(from) = after {
        let request = v1::ListMeasuredMovesRequest { after: from, limit: 0 };
        let page = manager.call(manager.models().list_measured_moves(request)).await?;
        for run in page.moves.into_iter().filter_map(|moved| moved.run) {
            let number = |number: Option<f64>| number.map(|number| number.to_string()).unwrap_or_default();
            let first = [
                quote_csv(&run.program),
                run.slowdown.to_string(),
                number(run.pool_load_share),
                number(run.latency_ratio),
            ];
            let counters = COUNTER_NAMES.iter().map(|name| number(run.counters.get(*name).copied()));
            print::out(&(first.into_iter().chain(counters).collect::<Vec<_>>().join(",") + "\n"))?;
        }
        after = page.next_after.filter(|next| *next > from);
    }
    Ok(())
}

fn to_sample(o: v1::Outcome) -> VmSample {
    let v1::VmProfile { key, kind, place, .. } = o.profile.unwrap_or_default();
    let requested = Bytes::new(o.requested_bytes);
    let untouched = requested.saturating_sub(Bytes::new(o.peak_bytes));
    let share = untouched.get() as f64 / requested.get().max(1) as f64;
    let request = VmRequest {
        groups: Groups { vm: o.vm, key, kind, place },
        requested,
        cores: (o.cores > 0.0).then_some(o.cores),
        begins: UnixMs(o.started_unix_ms),
    };
    let outcome = Outcome {
        ended: UnixMs(o.ended_unix_ms),
        untouched: Fraction::new(share).expect("untouched memory is at most the requested memory"),
        usage: VmUsage {
            p99: o.p99_bytes.map(Bytes::new),
            mean: o.mean_bytes.map(Bytes::new),
            busy_percent: o.cpu_utilization_percent,
        },
    };
    VmSample { request, outcome, is_trusted: true }
}

/// Prints the outcomes as CSV, with the columns of `tarn telemetry import --format csv`.
fn print_outcomes(samples: &[VmSample]) -> Result<(), Failure> {
    print::out(
        "began_s,ended_s,requested_gib,peak_gib,vm,key,kind,place,cores,p99_gib,mean_gib,busy_percent\n",
    )?;
    for VmSample { request, outcome, .. } in samples {
        let gib = |bytes: Bytes| (bytes.get() as f64 / Bytes::gib(1).get() as f64).to_string();
        let seconds = |at: UnixMs| (at.0 as f64 / 1000.0).to_string();
        let number = |number: Option<f64>| number.map(|number| number.to_string()).unwrap_or_default();
        let memory = |bytes: Option<Bytes>| bytes.map(gib).unwrap_or_default();
        let Groups { vm, key, kind, place } = &request.groups;
        let cells = [
            seconds(request.begins),
            seconds(outcome.ended),
            gib(request.requested),
            gib(outcome.peak(request.requested)),
            quote_csv(vm),
            quote_csv(key),
            quote_csv(kind),
            quote_csv(place),
            number(request.cores),
            memory(outcome.usage.p99),
            memory(outcome.usage.mean),
            number(outcome.usage.busy_percent),
        ];
        print::out(&(cells.join(",") + "\n"))?;
    }
    Ok(())
}

/// Quotes a CSV value if it contains a comma or a quotation mark.
fn quote_csv(text: &str) -> String {
    if text.contains([',', '"']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}

/// Prints the training features and the label of each VM.
fn print_features(samples: &[VmSample]) -> Result<(), Failure> {
    print::out(&(feature_names().chain(["untouched".to_owned()]).collect::<Vec<_>>().join(",") + "\n"))?;
    for (features, untouched) in backtest::features_at_start(samples) {
        let number = |number: f64| if number.is_nan() { String::new() } else { number.to_string() };
        print::out(&format!("{},{}\n", features.map(number).join(","), untouched.get()))?;
    }
    Ok(())
}

impl Row for ImportResult {
    const COLUMNS: &'static [Column<Self>] = &[
        col("ADDED", |a| a.added.to_string()),
        col("DUPLICATES", |a| a.duplicates.to_string()),
        col("TOO OLD", |a| a.too_old.to_string()),
        col("INVALID", |a| a.invalid.to_string()),
    ];
}
