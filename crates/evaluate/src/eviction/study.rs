//! All simulations of eviction: the cluster with each scheme, one task, and changed parameters.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use sim::eviction::{
    ClusterReport, EvictionScheme, Parameters, TaskReport, Workload, simulate_cluster, simulate_task,
};

/// Limits of local memory, as a part of the working set.
const LOCAL_RATIOS: [f64; 8] = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9];
/// Local memory at which throughput is compared (section IV-B).
const THROUGHPUT_RATIO: f64 = 0.2;
/// Local memory at which completion times of flows are compared (section IV-C2).
pub(super) const FLOW_RATIO: f64 = 0.4;
/// Growth rates of figure 13, in MB/s.
const GROWTH_MB_PER_S: [f64; 11] =
    [150.0, 250.0, 330.0, 430.0, 574.0, 657.0, 800.0, 1000.0, 1435.0, 2000.0, 2870.0];
/// Working set and local memory of figure 13.
const GROWTH_WORKING_SET_GB: f64 = 16.0;
/// Parts of the bandwidth in figure 14.
const BANDWIDTH_RATIOS: [f64; 4] = [1.0, 0.5, 0.25, 0.125];
/// Interval between two updates of the progress bar.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Factors of the changed parameters.
const SENSITIVITY_FACTORS: [f64; 2] = [0.8, 1.2];

/// All results.
#[derive(Debug, Serialize)]
pub(super) struct Study {
    pub headline: Headline,
    /// Figures 8, 9 and 12.
    pub cluster: Vec<ClusterRow>,
    /// Figures 10 and 11.
    pub one_task: Vec<TaskRow>,
    /// Figure 13.
    pub growth: Vec<GrowthRow>,
    /// Figure 14.
    pub bandwidth: Vec<BandwidthRow>,
    /// Results with changed parameters.
    pub sensitivity: Vec<SensitivityRow>,
    pub parameters: Parameters,
}

/// Means over all workloads. `None` if no task is blocked.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Headline {
    /// Throughput with both parts of Glitter, divided by that with none, at 20 % local memory.
    pub throughput_vs_fixed: f64,
    /// The same for the tasks of the other servers.
    pub others_throughput: f64,
    /// Mean completion time of urgent flows with classes, divided by that without, at 40 % local memory.
    pub urgent_fct_mean_vs_fixed: Option<f64>,
    /// The same for the 99th percentile.
    pub urgent_fct_p99_vs_fixed: Option<f64>,
}

/// Result of a cluster.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ClusterRow {
    pub workload: String,
    pub local_ratio: f64,
    pub scheme: EvictionScheme,
    #[serde(flatten)]
    pub report: ClusterReport,
}

/// Results of one task.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TaskRow {
    pub workload: String,
    pub local_ratio: f64,
    pub fixed: TaskReport,
    pub adaptive: TaskReport,
}

/// Results of one task at a growth rate.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct GrowthRow {
    pub growth_mb_per_s: f64,
    pub fixed: TaskReport,
    pub adaptive: TaskReport,
}

/// Results of a cluster with less bandwidth, at 20 % local memory.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct BandwidthRow {
    pub bandwidth_ratio: f64,
    pub fixed: ClusterReport,
    pub classes: ClusterReport,
}

/// Result with one changed parameter.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SensitivityRow {
    pub parameter: &'static str,
    pub factor: f64,
    pub headline: Headline,
}

/// Change of a parameter by a factor.
type Change = fn(&mut Parameters, f64);

/// Simulation of a cluster.
struct Job {
    parameters: Parameters,
    workload: Workload,
    local_ratio: f64,
    scheme: EvictionScheme,
}

impl Study {
    /// Runs all simulations, on all processors. The result does not depend on their number.
    pub(super) fn run(parameters: Parameters, with_sensitivity: bool) -> Self {
        let cluster_jobs = cluster_jobs(&parameters);
        let bandwidth_jobs = bandwidth_jobs(&parameters);
        let changes: Vec<_> = if with_sensitivity { changed(&parameters) } else { Vec::new() };
        let headline_jobs: Vec<Job> =
            changes.iter().flat_map(|(_, _, changed)| headline_jobs(changed)).collect();
        let mut jobs = Vec::new();
        let counts = [cluster_jobs.len(), bandwidth_jobs.len()];
        jobs.extend(cluster_jobs);
        jobs.extend(bandwidth_jobs);
        jobs.extend(headline_jobs);
        let reports = run_jobs(&jobs);
        let row = |(job, report): (&Job, &ClusterReport)| ClusterRow {
            workload: job.workload.name.clone(),
            local_ratio: job.local_ratio,
            scheme: job.scheme,
            report: *report,
        };
        let all: Vec<ClusterRow> = jobs.iter().zip(&reports).map(row).collect();
        let (cluster, rest) = all.split_at(counts[0]);
        let (bandwidth, sensitivity) = rest.split_at(counts[1]);
        let bandwidth = BANDWIDTH_RATIOS.iter().zip(bandwidth.chunks(2)).map(|(ratio, rows)| BandwidthRow {
            bandwidth_ratio: *ratio,
            fixed: rows[0].report,
            classes: rows[1].report,
        });
        let per_change = sensitivity.len() / changes.len().max(1);
        let sensitivity = changes.iter().zip(sensitivity.chunks(per_change.max(1)));
        let sensitivity = sensitivity.map(|((parameter, factor, _), rows)| SensitivityRow {
            parameter,
            factor: *factor,
            headline: Headline::of(rows),
        });
        Self {
            headline: Headline::of(cluster),
            cluster: cluster.to_vec(),
            one_task: one_task(&parameters),
            growth: growth(&parameters),
            bandwidth: bandwidth.collect(),
            sensitivity: sensitivity.collect(),
            parameters,
        }
    }
}

impl Headline {
    /// Computes the means from the results of all workloads.
    fn of(rows: &[ClusterRow]) -> Self {
        let ratio_at =
            |local_ratio: f64, scheme: EvictionScheme, of: &dyn Fn(&ClusterReport) -> Option<f64>| {
                let of_scheme = |scheme| {
                    rows.iter().filter(move |row| row.local_ratio == local_ratio && row.scheme == scheme)
                };
                let pairs = of_scheme(scheme).zip(of_scheme(EvictionScheme::Fixed));
                let ratios: Vec<f64> =
                    pairs.filter_map(|(row, fixed)| Some(of(&row.report)? / of(&fixed.report)?)).collect();
                (!ratios.is_empty()).then(|| ratios.iter().sum::<f64>() / ratios.len() as f64)
            };
        let throughput = |of: fn(&ClusterReport) -> f64| {
            ratio_at(THROUGHPUT_RATIO, EvictionScheme::Both, &|report| Some(1.0 / of(report)))
        };
        Self {
            throughput_vs_fixed: throughput(|report| report.normalized_time).unwrap_or(1.0),
            others_throughput: throughput(|report| report.others_normalized_time).unwrap_or(1.0),
            urgent_fct_mean_vs_fixed: ratio_at(FLOW_RATIO, EvictionScheme::Classes, &|report| {
                report.urgent_mean_s
            }),
            urgent_fct_p99_vs_fixed: ratio_at(FLOW_RATIO, EvictionScheme::Classes, &|report| {
                report.urgent_p99_s
            }),
        }
    }
}

fn job(parameters: &Parameters, workload: &Workload, local_ratio: f64, scheme: EvictionScheme) -> Job {
    Job { parameters: parameters.clone(), workload: workload.clone(), local_ratio, scheme }
}

fn cluster_jobs(parameters: &Parameters) -> Vec<Job> {
    let mut jobs = Vec::new();
    for workload in &parameters.workloads {
        for local_ratio in LOCAL_RATIOS {
            jobs.extend(EvictionScheme::ALL.map(|scheme| job(parameters, workload, local_ratio, scheme)));
        }
    }
    jobs
}

/// Returns the simulations that the headline needs.
fn headline_jobs(parameters: &Parameters) -> Vec<Job> {
    let points = [
        (THROUGHPUT_RATIO, EvictionScheme::Fixed),
        (THROUGHPUT_RATIO, EvictionScheme::Both),
        (FLOW_RATIO, EvictionScheme::Fixed),
        (FLOW_RATIO, EvictionScheme::Classes),
    ];
    let of_workload =
        |workload: &Workload| points.map(|(ratio, scheme)| job(parameters, workload, ratio, scheme));
    parameters.workloads.iter().flat_map(of_workload).collect()
}

/// Returns the simulations of figure 14: the first workload, with and without classes.
fn bandwidth_jobs(parameters: &Parameters) -> Vec<Job> {
    let with_bandwidth = |ratio: f64| {
        let core_gbit_per_s = parameters.core_gbit_per_s * ratio;
        let server_gbit_per_s = parameters.server_gbit_per_s * ratio;
        Parameters { core_gbit_per_s, server_gbit_per_s, ..parameters.clone() }
    };
    let schemes = [EvictionScheme::Fixed, EvictionScheme::Classes];
    let of_ratio = |ratio: f64| {
        let parameters = with_bandwidth(ratio);
        schemes.map(|scheme| job(&parameters, &parameters.workloads[0], THROUGHPUT_RATIO, scheme))
    };
    BANDWIDTH_RATIOS.into_iter().flat_map(of_ratio).collect()
}

/// Returns the parameters with each rate changed by each factor.
fn changed(parameters: &Parameters) -> Vec<(&'static str, f64, Parameters)> {
    let rates: [(&'static str, Change); 5] = [
        ("core_gbit_per_s", |parameters, factor| parameters.core_gbit_per_s *= factor),
        ("server_gbit_per_s", |parameters, factor| parameters.server_gbit_per_s *= factor),
        ("eviction_mb_per_s", |parameters, factor| parameters.eviction_mb_per_s *= factor),
        ("growth_mb_per_s of the workloads", |parameters, factor| {
            parameters.workloads.iter_mut().for_each(|workload| workload.growth_mb_per_s *= factor);
        }),
        ("growth_mb_per_s of other_workload", |parameters, factor| {
            parameters.other_workload.growth_mb_per_s *= factor;
        }),
    ];
    let change = |(name, change): (&'static str, Change)| {
        SENSITIVITY_FACTORS.map(|factor| {
            let mut changed = parameters.clone();
            change(&mut changed, factor);
            (name, factor, changed)
        })
    };
    rates.into_iter().flat_map(change).collect()
}

fn one_task(parameters: &Parameters) -> Vec<TaskRow> {
    let row = |workload: &Workload, local_ratio: f64| TaskRow {
        workload: workload.name.clone(),
        local_ratio,
        fixed: simulate_task(parameters, workload, local_ratio, false),
        adaptive: simulate_task(parameters, workload, local_ratio, true),
    };
    let workloads = parameters.workloads.iter();
    workloads.flat_map(|workload| LOCAL_RATIOS.map(|local_ratio| row(workload, local_ratio))).collect()
}

fn growth(parameters: &Parameters) -> Vec<GrowthRow> {
    let row = |growth_mb_per_s: f64| {
        let workload = Workload {
            name: "growth".to_owned(),
            working_set_gb: GROWTH_WORKING_SET_GB,
            growth_mb_per_s,
            burst_s: 0.0,
            accesses_again: 0.0,
            fetch_ns_per_byte: 0.0,
        };
        let simulate = |is_adaptive| simulate_task(parameters, &workload, FLOW_RATIO, is_adaptive);
        GrowthRow { growth_mb_per_s, fixed: simulate(false), adaptive: simulate(true) }
    };
    GROWTH_MB_PER_S.map(row).to_vec()
}

/// Returns a progress bar on standard error, which is visible from the start if this is a terminal.
fn progress_bar(jobs: usize) -> ProgressBar {
    let template = "{bar:40} {pos}/{len} simulations in {elapsed}, {eta} left";
    let style = ProgressStyle::with_template(template).expect("the template is valid");
    let bar = ProgressBar::new(jobs as u64).with_style(style);
    bar.enable_steady_tick(PROGRESS_INTERVAL);
    bar
}

/// Runs simulations on all processors, and returns their results in the same order.
fn run_jobs(jobs: &[Job]) -> Vec<ClusterReport> {
    let bar = progress_bar(jobs.len());
    let next = AtomicUsize::new(0);
    let reports = Mutex::new(vec![None; jobs.len()]);
    let take_next = || {
        let index = next.fetch_add(1, Ordering::Relaxed);
        Some((index, jobs.get(index)?))
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((index, job)) = take_next() {
                    let Job { parameters, workload, local_ratio, scheme } = job;
                    let report = simulate_cluster(parameters, workload, *local_ratio, *scheme);
                    reports.lock().expect("no simulation panics")[index] = Some(report);
                    bar.inc(1);
                }
            });
        }
    });
    bar.finish_and_clear();
    let reports = reports.into_inner().expect("no simulation panics");
    reports.into_iter().map(|report| report.expect("all simulations have run")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn small() -> Parameters {
        let changes = json!({
            "leaves": 2, "servers_per_leaf": 2, "tasks_per_server": 1, "intensive_servers": 2, "warm_up_s": 1, "measured_s": 4,
            "workloads": [{"name": "short", "working_set_gb": 0.5, "growth_mb_per_s": 400}]
        });
        Parameters::with(changes.as_object().unwrap().clone()).unwrap()
    }

    #[test]
    fn study_contains_all_results_and_is_deterministic() {
        let study = Study::run(small(), true);
        let counts = [study.cluster.len(), study.one_task.len(), study.growth.len(), study.bandwidth.len()];
        assert_eq!(counts, [32, 8, 11, 4]);
        assert_eq!(study.sensitivity.len(), 10);
        assert!(study.headline.throughput_vs_fixed > 1.0, "the network is idle: {:?}", study.headline);
        assert_eq!(study.headline.urgent_fct_mean_vs_fixed, Some(1.0));
        let again = serde_json::to_value(Study::run(small(), true)).unwrap();
        assert_eq!(serde_json::to_value(&study).unwrap(), again);
    }
}
