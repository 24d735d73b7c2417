//! `tarn evaluate symbiosis`: compares the shares that several schemes compute for tenants from
//! traces. `sim::symbiosis` computes the shares, `figures` draws the figures.

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
use sim::symbiosis::{AccessTraceError, Host, Mix, Outcome, Tenant, compare_schemes, mixes, read};
use units::Fraction;

use super::{figure, parse_percent};

/// Options of `tarn evaluate symbiosis`.
#[derive(Clone, Debug, Args)]
pub struct Symbiosis {
    /// Directory with traces of accesses to pages, blocks or keys: CSV, plain or gzip-compressed,
    /// with a column `key`, `lbn` or `addr`
    #[arg(long, value_name = "DIR")]
    traces: PathBuf,
    /// Local memory, in percent of the tenants' footprints
    #[arg(long, value_name = "PERCENT", default_value = "20", value_parser = parse_positive_percent)]
    memory: Fraction,
    /// Also write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw figures into this directory, each as SVG with its data as JSON: tenants, rounds of a
    /// market, gains of schemes, run time of markets, and shares of changing tenants (Spirit
    /// figures 1, 3, 6, 8 and 9)
    #[arg(long, value_name = "FOLDER")]
    figures: Option<PathBuf>,
}

/// Help on the printed columns.
pub(super) const OUTPUT_HELP: &str = "\
Columns:
  GAIN     geometric mean of the tenants' throughputs relative to an equal split, minus 1
  WORST    throughput of the worst-off tenant relative to an equal split
  STATUS   status of the market
  ENVY     largest relative gain that a tenant would have with another tenant's share, as estimated
  TENANTS  throughput of each tenant relative to an equal split (with -o wide)
Schemes:
  market     market of Symbiosis without refinement
  symbiosis  market refined by trades that increase the geometric mean of throughputs and cause no envy
  ideal      best shares on a grid of 1/200 with which no tenant loses, from exact miss ratios
Throughput follows Spirit's slowdown model, with the exact miss ratios of the whole trace. All schemes but `ideal` use estimated miss
ratios, from the reuse distances of at most 8,192 sampled pages. All tenants have footprints of the same size. One of six tenants has a
low miss cost, so that it is mostly compute-bound.";

/// Parses a percentage from 1 to 100.
fn parse_positive_percent(text: &str) -> Result<Fraction, String> {
    parse_percent(text)
        .ok()
        .filter(|share| share.get() >= 0.01)
        .ok_or_else(|| "must be a percentage from 1 to 100".to_owned())
}

/// Row with the result of one scheme for one mix of tenants.
#[derive(Serialize)]
struct SchemeRow {
    mix: String,
    scheme: &'static str,
    /// Geometric mean of the throughputs relative to an equal split, minus 1.
    gain: f64,
    /// Throughput of the worst-off tenant relative to an equal split.
    worst: f64,
    tenants: Vec<TenantRow>,
    certificate: Option<CertificateRow>,
}

#[derive(Serialize)]
struct TenantRow {
    trace: String,
    kind: String,
    /// Local memory, as a fraction of the tenant's footprint.
    memory_share: f64,
    /// Bandwidth, as a fraction of the link.
    bandwidth_share: f64,
    /// Throughput divided by the throughput with an equal split, computed from exact miss ratios.
    #[serde(rename = "throughput_of_equal_split")]
    throughput_vs_equal_split: f64,
}

/// Certificate of the market, computed from the estimated utilities.
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
            let tenants = l.tenants.iter().map(|t| format!("{} {:.2}", t.trace, t.throughput_vs_equal_split));
            tenants.collect::<Vec<_>>().join(", ")
        }),
    ];
}

/// Evaluates the schemes, prints the results, and writes JSON and figures if requested.
///
/// # Errors
/// [`Failure::File`] if no trace is found, a trace cannot be read, or a file cannot be written.
pub(super) fn run(args: &Symbiosis, format: Format) -> Result<(), Failure> {
    args.figures.as_deref().map_or(Ok(()), figure::create_folder)?;
    // The computation takes minutes, so an unwritable output file is reported before it.
    args.json.as_deref().map_or(Ok(()), figure::check_writable)?;
    let traces = read_traces(&args.traces, format)?;
    let tenants: Vec<Tenant> = traces.iter().map(|trace| trace.tenant.clone()).collect();
    let compared: Vec<ComparedMix> =
        mixes(&tenants).into_iter().map(|mix| ComparedMix::new(mix, args.memory)).collect();
    let scheme_rows: Vec<SchemeRow> = compared.iter().flat_map(to_rows).collect();
    print::value(format, &scheme_rows, |is_wide| rows(&scheme_rows, is_wide))?;
    if let Some(path) = &args.json {
        figure::write_json(path, &scheme_rows)?;
    }
    let Some(folder) = &args.figures else { return Ok(()) };
    figures::write_all(
        folder,
        &figures::FigureInputs { traces, tenants, compared, memory: args.memory },
        format,
    )
}

/// Trace with its path and a tenant that replays it.
struct Trace {
    path: PathBuf,
    /// Tenant with the miss ratios of the trace. Its other parameters are set when it is added to a
    /// mix.
    tenant: Tenant,
}

fn read_traces(folder: &Path, format: Format) -> Result<Vec<Trace>, Failure> {
    let failed = |errno| Failure::File { operation: "read", path: folder.to_owned(), errno };
    let entries: io::Result<Vec<PathBuf>> =
        fs::read_dir(folder).map_err(failed)?.map(|entry| Ok(entry?.path())).collect();
    let mut paths: Vec<(String, PathBuf)> =
        entries.map_err(failed)?.into_iter().filter_map(|path| Some((trace_name(&path)?, path))).collect();
    paths.sort();
    let mut traces = Vec::new();
    for (name, path) in paths {
        match read_accesses(&path)? {
            Ok(accesses) => traces.push(Trace { path, tenant: Tenant::new(name, &accesses, 1.0, 1.0) }),
            Err(reason) => print::note(format, &format!("skipping {}: {reason}", path.display())),
        }
    }
    if traces.is_empty() {
        let message = "no trace found: the directory must contain a *.csv or *.csv.gz file with a column `key`, `lbn` or `addr` and enough accesses";
        return Err(failed(io::Error::other(message)));
    }
    Ok(traces)
}

/// Reads the accesses in a table. The inner error is the reason why the table is not a trace, or
/// has an unsuitable length.
fn read_accesses(path: &Path) -> Result<Result<Vec<u32>, AccessTraceError>, Failure> {
    open::table(path, |input| match read(input) {
        Err(reason @ (AccessTraceError::MissingColumn | AccessTraceError::InvalidLength(_))) => {
            Ok(Err(reason))
        }
        accesses => accesses.map(Ok),
    })
}

/// Returns the name of a trace: its file name without `.csv` or `.csv.gz`. Returns `None` for other
/// files.
fn trace_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(".csv.gz").or_else(|| name.strip_suffix(".csv"))?;
    Some(stem.to_owned())
}

/// Mix of tenants, with the result of each scheme.
struct ComparedMix {
    mix: Mix,
    outcomes: Vec<Outcome>,
}

impl ComparedMix {
    /// Runs all schemes for a mix. `memory` is the local memory as a fraction of the footprints.
    fn new(mix: Mix, memory: Fraction) -> Self {
        let host = Host { memory: memory.get() * mix.tenants.len() as f64 };
        Self { outcomes: compare_schemes(&mix.tenants, host), mix }
    }
}

fn to_rows(ComparedMix { mix, outcomes }: &ComparedMix) -> Vec<SchemeRow> {
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
                throughput_vs_equal_split: outcome.relative_throughputs[at],
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
