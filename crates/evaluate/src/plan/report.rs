//! Results of `tarn plan`: one row per policy and pool size, printed as a table, JSON, YAML or CSV.

use std::io;

use cli_runtime::{
    Failure, Format, print,
    table::{Column, Row, col, percent, rows, wide},
};
use serde::Serialize;
use sim::plan::{
    Cluster,
    replay::{PoolPeaks, ReplayReport},
    result::DramNeed,
};

use super::options::{Policy, Prices};

/// Result of a plan.
#[derive(Debug, Serialize)]
pub(super) struct Plan {
    pub baseline: Baseline,
    pub trace: TraceSummary,
    pub results: Vec<PolicyResult>,
}

/// Cluster without pools, to which the results are relative.
#[derive(Debug, Serialize)]
pub(super) struct Baseline {
    pub sockets: u32,
    pub cores_per_socket: u32,
    pub gib_per_socket: f64,
    pub dram_gib: f64,
    /// Largest memory in use on a socket in a sample.
    pub largest_socket_peak_gib: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<f64>,
}

/// Numbers of VMs and samples.
#[derive(Debug, Serialize)]
pub(super) struct TraceSummary {
    pub vms: u64,
    pub rejected: u64,
    /// VMs that depart when they arrive; they are not placed.
    pub departed_on_arrival: u64,
    /// Largest number of VMs that ran at the same time.
    pub running_max: usize,
    pub samples: u64,
}

/// Result of a policy with a pool size. The numbers are fractions, 0 to 1, unless the name has a
/// unit. `None` means that the policy has no such number.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PolicyResult {
    pub policy: Policy,
    pub pool_sockets: u32,
    pub dram_required: f64,
    pub dram_saved: f64,
    pub rejected: f64,
    pub stranded_mean: f64,
    /// VMs slowed down beyond the margin.
    pub mispredicted: Option<f64>,
    pub migrations: Option<u64>,
    pub buffer_slices: Option<u64>,
    /// `dram_required` if each pool is as large as its largest use at any time.
    pub dram_required_at_event_peak: f64,
    pub local_gib_per_socket: f64,
    pub pools: u32,
    pub gib_per_pool: f64,
    pub dram_gib: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<f64>,
}

const MIB_PER_GIB: f64 = 1024.0;

impl Plan {
    /// Computes the result of each policy with each pool size.
    pub(super) fn new(cluster: Cluster, policies: &[Policy], prices: &Prices, report: &ReplayReport) -> Self {
        let dram_gib = cluster.total_mib() as f64 / MIB_PER_GIB;
        let results = policies.iter().flat_map(|policy| {
            report.pools.iter().map(|peaks| PolicyResult::new(&cluster, *policy, prices, report, peaks))
        });
        Self {
            baseline: Baseline {
                sockets: cluster.sockets,
                cores_per_socket: cluster.cores_per_socket,
                gib_per_socket: dram_gib / f64::from(cluster.sockets),
                dram_gib,
                largest_socket_peak_gib: report.socket_peak_mib as f64 / MIB_PER_GIB,
                cost_usd: prices.dram_usd_per_gib.map(|usd| usd * dram_gib),
            },
            trace: TraceSummary {
                vms: report.counts.vms,
                rejected: report.counts.rejected,
                departed_on_arrival: report.counts.instant,
                running_max: report.running_max,
                samples: report.samples,
            },
            results: results.collect(),
        }
    }

    /// Prints the result on stdout.
    ///
    /// # Errors
    /// [`Failure::Output`] if stdout cannot be written.
    pub(super) fn print(&self, format: Format) -> Result<(), Failure> {
        match format {
            Format::Csv => print::out(&self.csv()?),
            Format::Table | Format::Wide | Format::Json | Format::Yaml => {
                print::value(format, self, |all_columns| self.text(all_columns))
            }
        }
    }

    fn text(&self, all_columns: bool) -> String {
        let Self { baseline, trace, .. } = self;
        format!(
            "{} VMs, of which {} are rejected and {} depart on arrival; at most {} run at the same time; {} samples\n\
             Without pools: {} sockets with {:.0} GiB each, {:.0} GiB in total; at most {:.0} GiB of a socket are in use\n\n{}",
            trace.vms,
            trace.rejected,
            trace.departed_on_arrival,
            trace.running_max,
            trace.samples,
            baseline.sockets,
            baseline.gib_per_socket,
            baseline.dram_gib,
            baseline.largest_socket_peak_gib,
            rows(&self.results, all_columns || self.baseline.cost_usd.is_some()),
        )
    }

    /// Returns the results as CSV. No cell starts with a character that a spreadsheet takes for the
    /// start of a formula, except the sign of a negative number.
    fn csv(&self) -> Result<String, Failure> {
        let failed = |error: csv::Error| Failure::Output(io::Error::other(error));
        let mut writer = csv::Writer::from_writer(Vec::new());
        for result in &self.results {
            writer.serialize(CsvRow::new(result)).map_err(failed)?;
        }
        let bytes = writer.into_inner().map_err(|error| Failure::Output(io::Error::other(error.to_string())))?;
        Ok(String::from_utf8(bytes).expect("the cells are UTF-8"))
    }
}

/// Row of the CSV output.
#[derive(Debug, Serialize)]
struct CsvRow {
    policy: String,
    pool_sockets: u32,
    dram_required: f64,
    dram_saved: f64,
    rejected: f64,
    stranded_mean: f64,
    mispredicted: Option<f64>,
    migrations: Option<u64>,
    buffer_slices: Option<u64>,
    dram_required_at_event_peak: f64,
    local_gib_per_socket: f64,
    pools: u32,
    gib_per_pool: f64,
    dram_gib: f64,
    cost_usd: Option<f64>,
}

impl CsvRow {
    fn new(result: &PolicyResult) -> Self {
        Self {
            policy: spreadsheet_text(&result.policy.to_string()),
            pool_sockets: result.pool_sockets,
            dram_required: result.dram_required,
            dram_saved: result.dram_saved,
            rejected: result.rejected,
            stranded_mean: result.stranded_mean,
            mispredicted: result.mispredicted,
            migrations: result.migrations,
            buffer_slices: result.buffer_slices,
            dram_required_at_event_peak: result.dram_required_at_event_peak,
            local_gib_per_socket: result.local_gib_per_socket,
            pools: result.pools,
            gib_per_pool: result.gib_per_pool,
            dram_gib: result.dram_gib,
            cost_usd: result.cost_usd,
        }
    }
}

/// Adds an apostrophe to a text that a spreadsheet would take for a formula.
fn spreadsheet_text(text: &str) -> String {
    if text.starts_with(['=', '+', '-', '@', '\t', '\r']) { format!("'{text}") } else { text.to_owned() }
}

impl PolicyResult {
    fn new(cluster: &Cluster, policy: Policy, prices: &Prices, report: &ReplayReport, peaks: &PoolPeaks) -> Self {
        let need = DramNeed::of_fixed_share(cluster, policy.share(), peaks);
        let at_event_peak = PoolPeaks { sampled_mib: peaks.event_mib, ..*peaks };
        let local_share = 1.0 - policy.share().get();
        let cost = prices.dram_usd_per_gib.zip(prices.cxl_usd_per_gib);
        Self {
            policy,
            pool_sockets: peaks.pool_sockets,
            dram_required: need.required,
            dram_saved: need.saved(),
            rejected: report.rejected(),
            stranded_mean: local_share * report.stranded_mean_mib / cluster.total_mib() as f64,
            mispredicted: None,
            migrations: None,
            buffer_slices: None,
            dram_required_at_event_peak: DramNeed::of_fixed_share(cluster, policy.share(), &at_event_peak).required,
            local_gib_per_socket: need.local_per_socket_mib / MIB_PER_GIB,
            pools: peaks.pools,
            gib_per_pool: need.per_pool_mib / MIB_PER_GIB,
            dram_gib: (need.local_mib + need.pools_mib) / MIB_PER_GIB,
            cost_usd: cost.map(|(dram, cxl)| (dram * need.local_mib + cxl * need.pools_mib) / MIB_PER_GIB),
        }
    }
}

impl Row for PolicyResult {
    const COLUMNS: &'static [Column<Self>] = &[
        col("POLICY", |r| r.policy.to_string()),
        col("POOL SOCKETS", |r| r.pool_sockets.to_string()),
        col("REQUIRED", |r| percent(r.dram_required)),
        col("SAVED", |r| percent(r.dram_saved)),
        col("REJECTED", |r| format!("{:.3} %", 100.0 * r.rejected)),
        col("STRANDED", |r| percent(r.stranded_mean)),
        wide("EVENT PEAK", |r| percent(r.dram_required_at_event_peak)),
        col("LOCAL", |r| format!("{:.1}GiB", r.local_gib_per_socket)),
        col("POOLS", |r| r.pools.to_string()),
        col("POOL", |r| format!("{:.1}GiB", r.gib_per_pool)),
        col("DRAM", |r| format!("{:.0}GiB", r.dram_gib)),
        wide("COST", |r| r.cost_usd.map_or("-".to_owned(), |usd| format!("{usd:.0}USD"))),
    ];
}
