//! `tarn evaluate symbiosis`: quality of shares by several schemes for tenants from traces.
//! `sim::symbiosis` computes shares, `figures` draws them.

mod figures;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use clap::Args;
use cli_runtime::{
    Failure, Format, open, print,
    table::{Column, Row, col, rows, wide},
};
use serde::Serialize;
use sim::symbiosis::{AccessTraceError, Host, Mix, Outcome, Tenant, compare, mixes, read};
use units::Fraction;

use super::{figure, share};

/// Tenants, and their memory.
#[derive(Clone, Debug, Args)]
pub struct Symbiosis {
    /// Folder of access traces of pages, blocks or keys: CSV, plain or gzipped, with a column
    /// `key`, `lbn` or `addr`
    #[arg(long, value_name = "DIR")]
    traces: PathBuf,
    /// Local memory, in percent of the tenants' footprints
    #[arg(long, value_name = "PERCENT", default_value = "20", value_parser = positive_share)]
    memory: Fraction,
    /// Also write all numbers to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw tenants, a market's rounds, gains of schemes, time of markets, and shares of changing
    /// tenants into this folder, each as SVG with its numbers as JSON (Spirit figures 1, 3, 6, 8
    /// and 9)
    #[arg(long, value_name = "FOLDER")]
    figures: Option<PathBuf>,
}

/// Help on the output.
pub(super) const PRINTED: &str = "\
GAIN is the geometric mean of what tenants have of their throughput with an equal split, less 1; WORST what the worst-off has; TENANTS, with -o wide,
what each has. Throughput is Spirit's slowdown with the miss ratios of the whole trace, counted; schemes are told miss ratios from the reuse
distances of 8,192 watched pages, all but `ideal`, which is the best on a grid of 1/200 that harms nobody. Every trace touches as much; of six
tenants one is bound by its processor, as far as that can be. `market` is Symbiosis alone; `symbiosis without envy` goes beyond it as far as
nobody would rather have another's share; `symbiosis` further.";

/// Parses a percentage below 100.
fn positive_share(text: &str) -> Result<Fraction, String> {
    share(text)
        .ok()
        .filter(|share| share.get() >= 0.01)
        .ok_or_else(|| "must be a number of percent from 1 to 100".to_owned())
}

/// Result of one scheme.
#[derive(Serialize)]
struct SchemeRow {
    mix: String,
    scheme: &'static str,
    /// Geometric mean relative to an equal split, minus 1.
    gain: f64,
    worst: f64,
    tenants: Vec<TenantRow>,
    certificate: Option<CertificateRow>,
}

#[derive(Serialize)]
struct TenantRow {
    trace: String,
    kind: String,
    /// Fractions of its footprint and of the link.
    memory_share: f64,
    bandwidth_share: f64,
    /// True throughput relative to an equal split.
    throughput_of_equal_split: f64,
}

/// The market's certificate, from estimated utilities.
#[derive(Serialize)]
struct CertificateRow {
    status: &'static str,
    memory_price: f64,
    dividend: f64,
    rounds: u32,
    refinements: u32,
    memory_sold: f64,
    bandwidth_sold: f64,
    overspent: f64,
    sharing_incentive: f64,
    envy: Option<f64>,
}

impl Row for SchemeRow {
    const COLUMNS: &'static [Column<Self>] = &[
        col("MIX", |l| l.mix.clone()),
        col("SCHEME", |l| l.scheme.to_owned()),
        col("GAIN", |l| super::percent(l.gain)),
        col("WORST", |l| format!("{:.3}", l.worst)),
        col("STATUS", |l| l.certificate.as_ref().map_or("-".to_owned(), |c| c.status.to_owned())),
        col("ENVY", |l| l.certificate.as_ref().and_then(|c| c.envy).map_or("-".to_owned(), super::percent)),
        wide("TENANTS", |l| {
            let tenants = l.tenants.iter().map(|t| format!("{} {:.2}", t.trace, t.throughput_of_equal_split));
            tenants.collect::<Vec<_>>().join(", ")
        }),
    ];
}

/// Evaluates and prints.
///
/// # Errors
/// A trace cannot be read, there is none, or a file cannot be written.
pub(super) fn run(args: &Symbiosis, format: Format) -> Result<(), Failure> {
    args.figures.as_deref().map_or(Ok(()), figures::create_folder)?;
    // Checks the output before minutes of computation.
    args.json.as_deref().map_or(Ok(()), figure::check_writable)?;
    let traces = traces(&args.traces, format)?;
    let tenants: Vec<Tenant> = traces.iter().map(|trace| trace.tenant.clone()).collect();
    let compared: Vec<ComparedMix> =
        mixes(&tenants).into_iter().map(|mix| ComparedMix::new(mix, args.memory)).collect();
    let rows_of: Vec<SchemeRow> = compared.iter().flat_map(rows_of).collect();
    print::value(format, &rows_of, |is_wide| rows(&rows_of, is_wide))?;
    if let Some(path) = &args.json {
        figure::write_atomically(path, &json(path, &rows_of)?)?;
    }
    let Some(folder) = &args.figures else { return Ok(()) };
    figures::write_all(
        folder,
        &figures::FigureInputs { traces, tenants, compared, memory: args.memory },
        format,
    )
}

/// JSON output.
fn json(path: &Path, numbers: &impl Serialize) -> Result<Vec<u8>, Failure> {
    let failed = |error| Failure::File {
        operation: "write",
        path: path.to_owned(),
        errno: io::Error::other::<serde_json::Error>(error),
    };
    serde_json::to_vec_pretty(numbers).map_err(failed)
}

/// Trace with its path.
struct Trace {
    path: PathBuf,
    /// Its true throughput and estimates come from the trace; its stalls from its mix.
    tenant: Tenant,
}

fn traces(folder: &Path, format: Format) -> Result<Vec<Trace>, Failure> {
    let failed = |errno| Failure::File { operation: "read", path: folder.to_owned(), errno };
    let entries: io::Result<Vec<PathBuf>> =
        fs::read_dir(folder).map_err(failed)?.map(|entry| Ok(entry?.path())).collect();
    let mut paths: Vec<(String, PathBuf)> =
        entries.map_err(failed)?.into_iter().filter_map(|path| Some((trace_name(&path)?, path))).collect();
    paths.sort();
    let mut traces = Vec::new();
    for (name, path) in paths {
        match touches(&path)? {
            Ok(touches) => traces.push(Trace { path, tenant: Tenant::new(name, &touches, 1.0, 1.0) }),
            Err(reason) => print::note(format, &format!("{} is left out: {reason}", path.display())),
        }
    }
    if traces.is_empty() {
        let none = "there is no trace in it: no *.csv, no *.csv.gz with a column `key`, `lbn` or `addr` and enough touches";
        return Err(failed(io::Error::other(none)));
    }
    Ok(traces)
}

/// Returns the accesses of a table; or the reason why it is no trace, or too short.
fn touches(path: &Path) -> Result<Result<Vec<u32>, AccessTraceError>, Failure> {
    open::read(path, |input| match read(input) {
        Err(reason @ (AccessTraceError::MissingColumn | AccessTraceError::InvalidLength(_))) => {
            Ok(Err(reason))
        }
        touches => touches.map(Ok),
    })
}

/// Returns the name of a possible trace.
fn trace_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(".csv.gz").or_else(|| name.strip_suffix(".csv"))?;
    Some(stem.to_owned())
}

/// Tenants, with their results by each scheme.
struct ComparedMix {
    mix: Mix,
    outcomes: Vec<Outcome>,
}

impl ComparedMix {
    /// Evaluates a mix with memory for a fraction of the footprints.
    fn new(mix: Mix, memory: Fraction) -> Self {
        let host = Host { memory: memory.get() * mix.tenants.len() as f64 };
        Self { outcomes: compare(&mix.tenants, host), mix }
    }
}

fn rows_of(ComparedMix { mix, outcomes }: &ComparedMix) -> Vec<SchemeRow> {
    let equal = outcomes[0].shares[0];
    let line = |outcome: &Outcome| SchemeRow {
        mix: mix.name.clone(),
        scheme: outcome.scheme.name(),
        gain: outcome.gain(),
        worst: outcome.worst(),
        tenants: (0..mix.tenants.len())
            .map(|at| TenantRow {
                trace: mix.tenants[at].name.clone(),
                kind: format!("{:?}", mix.tenants[at].kind(equal)).to_lowercase(),
                memory_share: outcome.shares[at].memory,
                bandwidth_share: outcome.shares[at].bandwidth,
                throughput_of_equal_split: outcome.against_equal[at],
            })
            .collect(),
        certificate: outcome.certificate.as_ref().map(|certificate| CertificateRow {
            status: certificate.status.name(),
            memory_price: certificate.memory_price,
            dividend: certificate.dividend,
            rounds: certificate.rounds,
            refinements: certificate.refinements,
            memory_sold: certificate.sold.memory,
            bandwidth_sold: certificate.sold.bandwidth,
            overspent: certificate.overspent,
            sharing_incentive: certificate.sharing_incentive,
            envy: certificate.envy,
        }),
    };
    outcomes.iter().map(line).collect()
}
