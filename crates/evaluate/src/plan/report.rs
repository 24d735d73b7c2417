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
    slices::SliceReport,
};
use units::{Fraction, Ns};

use super::{
    Args,
    options::{BaselineKind, Policy},
    runner::{ReplayResult, Runner, SlowedVms},
    spread::{PolicySpread, Spread},
};

/// Replay of a policy.
#[derive(Clone, Copy, Debug)]
pub(super) struct PolicyRun<'a> {
    pub policy: Policy,
    /// Local memory of each socket, in MiB.
    pub local_per_socket_mib: f64,
    /// The same if it suffices for the largest use at any time.
    pub local_at_event_peak_mib: f64,
    /// Fixed share by which the pools of the report are scaled; `None` if they are those of the policy.
    pub scaled_by: Option<Fraction>,
    /// Local memory of each socket in the replay that the policy does not need, in MiB.
    pub surplus_local_mib: f64,
    pub report: &'a ReplayReport,
    /// Slowed-down VMs, if the touched memory is known.
    pub slowed: Option<SlowedVms>,
    /// Results of the slices, by pool size; empty without slices.
    pub slices: &'a [SliceReport],
}

impl<'a> PolicyRun<'a> {
    /// Creates a run from a replay with the pools of the policy.
    pub(super) fn new(policy: Policy, result: &'a ReplayResult, slices: &'a [SliceReport]) -> Self {
        Self {
            policy,
            local_per_socket_mib: 0.0,
            local_at_event_peak_mib: 0.0,
            scaled_by: None,
            surplus_local_mib: 0.0,
            report: &result.report,
            slowed: result.slowed.first().copied(),
            slices,
        }
    }
}

/// Result of a plan.
#[derive(Debug, Serialize)]
pub(super) struct Plan {
    pub baseline: Baseline,
    pub models: ModelSummary,
    pub trace: TraceSummary,
    /// Properties of the input that make the results misleading.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Results of all seeds.
    pub results: Vec<PolicyResult>,
    /// Spread of each result over the seeds, in the order of the results of one seed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub spread: Vec<PolicySpread>,
}

/// Cluster without pools, to which the results are relative.
#[derive(Debug, Serialize)]
pub(super) struct Baseline {
    pub kind: BaselineKind,
    pub sockets: u32,
    pub cores_per_socket: u32,
    pub gib_per_socket: f64,
    pub dram_gib: f64,
    /// Largest memory in use on a socket at any time.
    pub largest_socket_peak_gib: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<f64>,
}

/// Models of the values that the trace does not contain.
#[derive(Debug, Serialize)]
pub(super) struct ModelSummary {
    /// Usage tables; empty if the touched memory is not modelled.
    pub usage_tables: Vec<String>,
    /// Number of owners in the usage tables, which are the modelled customers.
    pub modelled_customers: usize,
    pub pdm: f64,
    pub exceed_max: f64,
    /// Seeds of the customers; empty if nothing is modelled.
    pub seeds: Vec<u64>,
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
    /// Seed of the customers, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    pub dram_required: f64,
    pub dram_saved: f64,
    pub rejected: f64,
    pub stranded_mean: f64,
    /// VMs slowed down beyond the margin.
    pub mispredicted: Option<f64>,
    pub migrations: Option<u64>,
    pub buffer_slices: Option<u64>,
    /// Mean memory of the running VMs, as a fraction of that without pools.
    pub memory_served: f64,
    /// `dram_required` if each pool is as large as its largest use at any time.
    pub dram_required_at_event_peak: f64,
    pub local_fraction: f64,
    pub local_gib_per_socket: f64,
    pub pools: u32,
    pub gib_per_pool: f64,
    pub dram_gib: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<f64>,
    #[serde(flatten)]
    pub slices: Option<SliceResult>,
}

const MIB_PER_GIB: f64 = 1024.0;
/// Use of the fullest socket, as a fraction of its memory without pools, below which that memory is too much.
const SURPLUS_MAX: f64 = 0.98;
/// Number of samples below which the peaks of samples are unreliable.
const SAMPLES_MIN: u64 = 100;

impl Plan {
    /// Computes the result of each run with each pool size.
    pub(super) fn new(
        args: &Args,
        runner: &Runner<'_>,
        seed: Option<u64>,
        all_local: &ReplayReport,
        runs: &[PolicyRun<'_>],
    ) -> Self {
        let cluster = &runner.cluster;
        let dram_gib = cluster.total_mib() as f64 / MIB_PER_GIB;
        let of_run = |run: &PolicyRun<'_>| {
            let result = |(at, peaks)| PolicyResult {
                seed,
                memory_served: served(run.report, all_local),
                ..PolicyResult::new(cluster, args, run, peaks, run.slices.get(at))
            };
            run.report.pools.iter().enumerate().map(result).collect::<Vec<_>>()
        };
        let results: Vec<_> = runs.iter().flat_map(of_run).collect();
        Self {
            notes: notes(args, cluster, all_local, &results),
            baseline: Baseline {
                kind: args.baseline,
                sockets: cluster.sockets,
                cores_per_socket: cluster.cores_per_socket,
                gib_per_socket: dram_gib / f64::from(cluster.sockets),
                dram_gib,
                largest_socket_peak_gib: all_local.socket_max_mib as f64 / MIB_PER_GIB,
                cost_usd: args.prices.dram_usd_per_gib.map(|usd| usd * dram_gib),
            },
            models: ModelSummary {
                usage_tables: args.models.usage_paths(),
                modelled_customers: runner.customers.map_or(0, |customers| customers.profiles()),
                pdm: args.models.pdm.get(),
                exceed_max: args.models.exceed_max.get(),
                seeds: seed.into_iter().collect(),
            },
            trace: TraceSummary {
                vms: all_local.counts.vms,
                rejected: all_local.counts.rejected,
                departed_on_arrival: all_local.counts.instant,
                running_max: all_local.running_max,
                samples: all_local.samples,
            },
            results,
            spread: Vec::new(),
        }
    }

    /// Adds the plan of another seed of the same options.
    pub(super) fn with_seed(mut self, other: Self) -> Self {
        self.results.extend(other.results);
        self.models.seeds.extend(other.models.seeds);
        let spread = |of_seeds: Vec<&PolicyResult>| {
            let result = of_seeds[0];
            let saved: Vec<f64> = of_seeds.iter().map(|result| result.dram_saved).collect();
            let mispredicted: Option<Vec<f64>> = of_seeds.iter().map(|result| result.mispredicted).collect();
            PolicySpread {
                policy: result.policy,
                pool_sockets: result.pool_sockets,
                dram_saved: Spread::new(&saved),
                mispredicted: mispredicted.map(|fractions| Spread::new(&fractions)),
            }
        };
        self.spread = self.rows_over_seeds().map(spread).collect();
        self
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
        let Self { baseline, models, trace, .. } = self;
        let modelled = if models.usage_tables.is_empty() {
            String::new()
        } else {
            format!(
                "MODELLED: touched memory from {}; {} customers; slowdowns by a simulated processor; {}\n",
                models.usage_tables.join(", "),
                models.modelled_customers,
                seeds(&models.seeds)
            )
        };
        let notes: String = self.notes.iter().map(|note| format!("NOTE: {note}\n")).collect();
        let spread = if self.spread.is_empty() {
            String::new()
        } else {
            format!("\n\nMean, and range over {}:\n{}", seeds(&models.seeds), rows(&self.spread, all_columns))
        };
        format!(
            "{} VMs, of which {} are rejected and {} depart on arrival; at most {} run at the same time; {} samples\n\
             Without pools: {} sockets with {:.1} GiB each, {:.0} GiB in total; at most {:.1} GiB of a socket are in use\n\
             {modelled}{notes}\n{}{spread}",
            trace.vms,
            trace.rejected,
            trace.departed_on_arrival,
            trace.running_max,
            trace.samples,
            baseline.sockets,
            baseline.gib_per_socket,
            baseline.dram_gib,
            baseline.largest_socket_peak_gib,
            rows(&self.results, all_columns || baseline.cost_usd.is_some() || models.seeds.len() > 1),
        )
    }

    /// Returns, for each row of the results of one seed, the results of all seeds.
    fn rows_over_seeds(&self) -> impl Iterator<Item = Vec<&PolicyResult>> {
        let rows = self.results.len() / self.models.seeds.len().max(1);
        (0..rows).map(move |row| self.results.iter().skip(row).step_by(rows).collect())
    }

    /// Returns the mean of a value of each row over the seeds.
    pub(super) fn means(&self, value: impl Fn(&PolicyResult) -> f64) -> Vec<(Policy, u32, f64)> {
        let mean = |of_seeds: Vec<&PolicyResult>| {
            let sum: f64 = of_seeds.iter().copied().map(&value).sum();
            (of_seeds[0].policy, of_seeds[0].pool_sockets, sum / of_seeds.len() as f64)
        };
        self.rows_over_seeds().map(mean).collect()
    }

    /// Returns the results as CSV. The only text is the name of a policy, which no spreadsheet takes for a
    /// formula.
    pub(super) fn csv(&self) -> Result<String, Failure> {
        let failed = |error: csv::Error| Failure::Output(io::Error::other(error));
        let mut writer = csv::Writer::from_writer(Vec::new());
        for result in &self.results {
            writer.serialize(CsvRow::new(result)).map_err(failed)?;
        }
        let bytes =
            writer.into_inner().map_err(|error| Failure::Output(io::Error::other(error.to_string())))?;
        Ok(String::from_utf8(bytes).expect("the cells are UTF-8"))
    }
}

/// Returns the mean memory of the running VMs, as a fraction of that without pools.
fn served(report: &ReplayReport, all_local: &ReplayReport) -> f64 {
    if all_local.used_mean_mib > 0.0 { report.used_mean_mib / all_local.used_mean_mib } else { 1.0 }
}

/// Returns the properties of the input that make the results misleading.
fn notes(args: &Args, cluster: &Cluster, all_local: &ReplayReport, results: &[PolicyResult]) -> Vec<String> {
    let mut notes = Vec::new();
    let used = all_local.socket_max_mib as f64 * f64::from(cluster.sockets) / cluster.total_mib() as f64;
    let has_pools = results.iter().any(|result| result.gib_per_pool > 0.0);
    if args.baseline == BaselineKind::Given && used < SURPLUS_MAX && has_pools {
        notes.push(format!(
            "at most {:.0} % of the memory of a socket are in use without pools. Savings contain the rest: consider \
             --baseline least",
            100.0 * used
        ));
    }
    if args.warm_up > Ns::ZERO && all_local.first_arrival.is_some_and(|first| first >= args.warm_up) {
        notes.push("the first VM arrives after --warm-up: samples count an empty cluster".to_owned());
    }
    if all_local.samples < SAMPLES_MIN {
        notes.push("there are few samples: compare REQUIRED with EVENT PEAK (-o wide)".to_owned());
    }
    notes
}

/// Row of the CSV output.
#[derive(Debug, Serialize)]
struct CsvRow {
    policy: Policy,
    pool_sockets: u32,
    dram_required: f64,
    dram_saved: f64,
    rejected: f64,
    stranded_mean: f64,
    mispredicted: Option<f64>,
    migrations: Option<u64>,
    buffer_slices: Option<u64>,
    memory_served: f64,
    dram_required_at_event_peak: f64,
    local_fraction: f64,
    local_gib_per_socket: f64,
    pools: u32,
    gib_per_pool: f64,
    dram_gib: f64,
    cost_usd: Option<f64>,
    slices_assigned: Option<u64>,
    starts_with_slices: Option<u64>,
    slices_in_use_max: Option<u32>,
    offline_gib_per_s_p50: Option<f64>,
    offline_gib_per_s_p99: Option<f64>,
    offline_gib_per_s_p9999: Option<f64>,
    lost_emc_vms_max: Option<u32>,
    lost_emc_gib_max: Option<f64>,
    seed: Option<u64>,
}

impl CsvRow {
    fn new(result: &PolicyResult) -> Self {
        Self {
            policy: result.policy,
            pool_sockets: result.pool_sockets,
            dram_required: result.dram_required,
            dram_saved: result.dram_saved,
            rejected: result.rejected,
            stranded_mean: result.stranded_mean,
            mispredicted: result.mispredicted,
            migrations: result.migrations,
            buffer_slices: result.buffer_slices,
            memory_served: result.memory_served,
            dram_required_at_event_peak: result.dram_required_at_event_peak,
            local_fraction: result.local_fraction,
            local_gib_per_socket: result.local_gib_per_socket,
            pools: result.pools,
            gib_per_pool: result.gib_per_pool,
            dram_gib: result.dram_gib,
            cost_usd: result.cost_usd,
            slices_assigned: result.slices.map(|slices| slices.slices_assigned),
            starts_with_slices: result.slices.map(|slices| slices.starts_with_slices),
            slices_in_use_max: result.slices.map(|slices| slices.slices_in_use_max),
            offline_gib_per_s_p50: result.slices.map(|slices| slices.offline_gib_per_s_p50),
            offline_gib_per_s_p99: result.slices.map(|slices| slices.offline_gib_per_s_p99),
            offline_gib_per_s_p9999: result.slices.map(|slices| slices.offline_gib_per_s_p9999),
            lost_emc_vms_max: result.slices.map(|slices| slices.lost_emc_vms_max),
            lost_emc_gib_max: result.slices.map(|slices| slices.lost_emc_gib_max),
            seed: result.seed,
        }
    }
}

impl PolicyResult {
    fn new(
        cluster: &Cluster,
        args: &Args,
        run: &PolicyRun<'_>,
        peaks: &PoolPeaks,
        slices: Option<&SliceReport>,
    ) -> Self {
        let need = |local_mib: f64, pool_mib: u64| {
            let factor = run.scaled_by.map_or(1.0, Fraction::get);
            DramNeed::new(cluster, local_mib, peaks.pools, factor * pool_mib as f64)
        };
        let sparse = args.slices.sparse_pool(peaks.pool_sockets, slices);
        let pool_mib = |mib| sparse.map_or(mib, |pool| pool.mib);
        let sampled = need(run.local_per_socket_mib, pool_mib(peaks.sampled_mib));
        let at_event_peak = need(run.local_at_event_peak_mib, pool_mib(peaks.event_mib));
        let total_mib = cluster.total_mib() as f64;
        let local_fraction = run.local_per_socket_mib * f64::from(cluster.sockets) / total_mib;
        let stranded_mib = match run.scaled_by {
            // The free local memory of a fixed share is a part of the free memory without pools.
            Some(share) => (1.0 - share.get()) * run.report.stranded_mean_mib,
            None => run.report.stranded_mean_mib - run.surplus_local_mib * run.report.full_sockets_mean,
        };
        let cost = args.prices.dram_usd_per_gib.zip(args.prices.cxl_usd_per_gib);
        Self {
            policy: run.policy,
            pool_sockets: peaks.pool_sockets,
            seed: None,
            memory_served: 1.0,
            dram_required: sampled.required,
            dram_saved: sampled.saved(),
            rejected: run.report.rejected(),
            stranded_mean: stranded_mib / total_mib,
            mispredicted: run.slowed.map(SlowedVms::fraction),
            migrations: run.slowed.map(|slowed| slowed.slowed),
            buffer_slices: slices
                .map(|slices| sparse.map_or(slices.buffer().into(), |pool| pool.buffer_slices)),
            dram_required_at_event_peak: at_event_peak.required,
            local_fraction,
            local_gib_per_socket: sampled.local_per_socket_mib / MIB_PER_GIB,
            pools: peaks.pools,
            gib_per_pool: sampled.per_pool_mib / MIB_PER_GIB,
            dram_gib: (sampled.local_mib + sampled.pools_mib) / MIB_PER_GIB,
            cost_usd: cost
                .map(|(dram, cxl)| (dram * sampled.local_mib + cxl * sampled.pools_mib) / MIB_PER_GIB),
            slices: args
                .slices
                .slice
                .0
                .zip(slices)
                .map(|(slice_mib, report)| SliceResult::new(report, slice_mib)),
        }
    }
}

/// Results of the slices of a policy with a pool size.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct SliceResult {
    /// Slices assigned to VMs after the warm-up.
    pub slices_assigned: u64,
    /// VMs with slices that started after the warm-up.
    pub starts_with_slices: u64,
    pub slices_in_use_max: u32,
    /// Offline speed that starts need without a buffer: percentiles of the starts.
    pub offline_gib_per_s_p50: f64,
    pub offline_gib_per_s_p99: f64,
    pub offline_gib_per_s_p9999: f64,
    /// Largest number of VMs with memory on one EMC, and largest memory in use on one EMC.
    pub lost_emc_vms_max: u32,
    pub lost_emc_gib_max: f64,
}

impl SliceResult {
    fn new(report: &SliceReport, slice_mib: u64) -> Self {
        let [p50, p99, p9999] = report.offline_gib_per_s;
        Self {
            slices_assigned: report.assigned,
            starts_with_slices: report.starts,
            slices_in_use_max: report.in_use_max,
            offline_gib_per_s_p50: p50,
            offline_gib_per_s_p99: p99,
            offline_gib_per_s_p9999: p9999,
            lost_emc_vms_max: report.vms_per_emc_max,
            lost_emc_gib_max: (u64::from(report.in_use_per_emc_max) * slice_mib) as f64 / MIB_PER_GIB,
        }
    }
}

/// Formats a value of the slices, or a dash without slices.
fn slice_cell(result: &PolicyResult, format: impl Fn(&SliceResult) -> String) -> String {
    result.slices.as_ref().map_or("-".to_owned(), format)
}

/// Formats the seeds as text.
fn seeds(seeds: &[u64]) -> String {
    let numbers: Vec<String> = seeds.iter().map(u64::to_string).collect();
    format!("seed{} {}", if numbers.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

impl Row for PolicyResult {
    const COLUMNS: &'static [Column<Self>] = &[
        col("POLICY", |r| r.policy.to_string()),
        col("POOL SOCKETS", |r| r.pool_sockets.to_string()),
        wide("SEED", |r| r.seed.map_or("-".to_owned(), |seed| seed.to_string())),
        col("REQUIRED", |r| percent(r.dram_required)),
        col("SAVED", |r| percent(r.dram_saved)),
        col("REJECTED", |r| format!("{:.3} %", 100.0 * r.rejected)),
        col("STRANDED", |r| percent(r.stranded_mean)),
        col("MISPREDICTED", |r| {
            r.mispredicted.map_or("-".to_owned(), |share| format!("{:.2} %", 100.0 * share))
        }),
        wide("MIGRATIONS", |r| r.migrations.map_or("-".to_owned(), |count| count.to_string())),
        wide("SERVED", |r| percent(r.memory_served)),
        wide("EVENT PEAK", |r| percent(r.dram_required_at_event_peak)),
        col("LOCAL", |r| format!("{:.1}GiB", r.local_gib_per_socket)),
        col("POOLS", |r| r.pools.to_string()),
        col("POOL", |r| format!("{:.1}GiB", r.gib_per_pool)),
        col("DRAM", |r| format!("{:.0}GiB", r.dram_gib)),
        col("BUFFER", |r| r.buffer_slices.map_or("-".to_owned(), |slices| slices.to_string())),
        wide("OFFLINE P50/P99/P99.99", |r| {
            slice_cell(r, |s| {
                let [p50, p99, p9999] =
                    [s.offline_gib_per_s_p50, s.offline_gib_per_s_p99, s.offline_gib_per_s_p9999];
                format!("{p50:.2}/{p99:.2}/{p9999:.2}GiB/s")
            })
        }),
        wide("LOST EMC", |r| {
            slice_cell(r, |s| format!("{} VMs, {:.0}GiB", s.lost_emc_vms_max, s.lost_emc_gib_max))
        }),
        wide("COST", |r| r.cost_usd.map_or("-".to_owned(), |usd| format!("{usd:.0}USD"))),
    ];
}
