//! `tarn plan`: computes the DRAM that a cluster would need with memory pools, from a trace of VM
//! arrivals. `sim::plan` replays the trace; this module reads it, selects the replays that the
//! policies need, and prints the results.

mod figures;
mod options;
mod report;
mod runner;
mod search;
mod spread;
mod stream;

use std::path::PathBuf;

use clap::Args as ClapArgs;
use cli_runtime::{Failure, Format, open};
use prediction::frigid::backtest::VmSample;
use sim::plan::{
    Cluster,
    customers::Customers,
    replay::{PoolPeaks, SampleTimes},
    slices::{PoolShape, SliceReport},
};
use units::{
    Bytes, Fraction, Ns,
    limits::{PLAN_LOCAL_FRACTIONS_MAX, PLAN_POLICIES_MAX, PLAN_POOL_SIZES_MAX, PLAN_SEEDS_MAX},
};

use self::{
    options::{BaselineKind, ClusterSize, Division, Models, Placement, Policy, PolicyKind, Prices, Slices},
    report::{Plan, PolicyRun},
    runner::{ReplayResult, ReplaySpec, Runner},
};
use crate::figure;

/// Options of `tarn plan`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Trace of VM arrivals, plain or gzip-compressed
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    #[command(flatten)]
    size: ClusterSize,
    /// Number of sockets that share a pool; each must divide --sockets [default: those of 2, 4, 8, 16,
    /// 32 and 64 that divide --sockets]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pool_sockets: Vec<u32>,
    /// Policies: none (all memory is local), static=F (a fraction F of each VM's memory is on a pool),
    /// frigid (predicted frigid memory is on a pool), or full (also the whole memory of VMs that
    /// tolerate the latency of the pool)
    #[arg(
        long,
        value_name = "POLICY,...",
        value_delimiter = ',',
        default_value = "none,static=0.1,static=0.3,static=0.5"
    )]
    policy: Vec<Policy>,
    /// Socket of each VM
    #[arg(long, value_enum, default_value_t)]
    placement: Placement,
    /// Memory without pools, to which the results are relative
    #[arg(long, value_enum, default_value_t)]
    baseline: BaselineKind,
    /// Local memory of each socket under frigid and full, as fractions of its memory without pools, with
    /// pools as large as their largest use; one row for each [default: the local and pool memory with
    /// the least sum that serves the VMs as well as the memory without pools]
    #[arg(long, value_name = "F,...", value_delimiter = ',', value_parser = options::parse_local_fraction)]
    local_fraction: Vec<f64>,
    /// Time from the start of the trace to the first sample, such as 1d; traces start with an empty
    /// cluster
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = options::parse_warm_up)]
    warm_up: Ns,
    /// Time between two samples of the memory in use, at least 1s
    #[arg(long, value_name = "DURATION", default_value = "300s", value_parser = options::parse_interval)]
    sample: Ns,
    #[command(flatten)]
    slices: Slices,
    #[command(flatten)]
    models: Models,
    #[command(flatten)]
    prices: Prices,
    /// Draw the results as SVG files in this directory: plan-required.svg (Pond figure 1c) and
    /// plan-saved.svg (Pond figure 11)
    #[arg(long, value_name = "DIR")]
    figure: Option<PathBuf>,
}

/// Sizes of pools that are compared by default, as in figure 11 of Pond.
const POOL_SOCKETS_DEFAULT: [u32; 6] = [2, 4, 8, 16, 32, 64];

/// Help on the output and on the formats of traces.
pub const OUTPUT_HELP: &str = "\
Each row of the result is a policy with a pool size. DRAM is a fraction of the DRAM of all sockets without pools:
  REQUIRED       local memory of all sockets, and all pools; each pool is as large as the largest use of any pool in a sample
  SAVED          1 - REQUIRED; negative if the pools need more than they save
  REJECTED       VMs that fit on no socket, of all VMs
  STRANDED       mean free local memory on sockets without free cores
  MISPREDICTED   VMs slowed down beyond --pdm, of the VMs placed after --warm-up. MIGRATIONS is their number: the requests of a monitor
                 that detects all of them
  SERVED         mean memory of the running VMs, of that without pools (-o wide)
  LOCAL, POOL    memory of each socket and of each pool
  EVENT PEAK     REQUIRED if each pool is as large as its largest use at any time after --warm-up, instead of in a sample; with
                 --slice, static has the larger of the local memories for the largest use in a sample and at any time
With several --seed, each row has the number of its seed, and a second table (`spread` in JSON) has the mean and the range over all.

JSON and CSV contain fractions (0 to 1) and GiB; null or an empty cell means that a policy has no such number. In JSON, `results` has
policy, pool_sockets, dram_required, dram_saved, rejected, stranded_mean, mispredicted, migrations, buffer_slices and further numbers. `notes` has warnings about the input.

With --slice, static reduces local memory in the same ratio as the largest local use of any socket, because of the rounding to slices.
BUFFER is the number of slices that each pool needs in addition to its largest use at any time, so that no start waits for released
slices. REQUIRED, POOL, DRAM and COST do not contain it.
With --hosts-per-emc, each socket reaches only some EMCs of its pool. All EMCs are then as large as the largest use of any EMC at any
time, also in REQUIRED. Local memory and offline speeds are still those of a pool whose sockets reach all EMCs.

Under none and static, VMs are placed as without pools, and local memory is a fraction of the memory without pools. Under frigid and
full, a VM uses the free local memory of its socket first. Only the rest is on the pool, at most the predicted memory; otherwise, the VM
runs on another socket. All VMs of a socket have at most its memory without pools. Local memory from 40 % to 100 % is tested in steps
of 1 %. The chosen one is that with the least sum of local and pool memory that serves the VMs as well as the memory
without pools: no more VMs are rejected, and the running VMs have as much memory (99.8 %). With --baseline least, the memory without
pools is also the least in this way, within 0.25 % of --gib-per-core.

Traces do not contain touched memory (unless there is a column touched_gb), customers (except for an owner) and slowdowns. With --usage,
they are modelled: each owner of the usage tables is a customer with a workload of a simulated processor. Each batch_id, or each VM if
there is no such column, belongs to a random customer; an owner, app_name or subscriptionid is a customer of its own.

Rules: VMs arrive in the order of time, then id. Departures up to a second precede its arrivals. A VM that departs when it arrives is
not placed. A VM runs on one socket: of those with enough free cores and memory, the one with the fewest free cores, then the least
free memory, then the lowest number. Socket i belongs to pool i mod (sockets / pool size).

Formats of TRACE, detected by the first line; times are in seconds since the start of the trace:
  CSV with a header (also the processed traces of Azure V1, Huawei and Alibaba), columns in any order:
    vm_id        unique; VMs with the same arrival are ordered by id if ids are numbers, or else as in the file
    arrive_s     arrival; empty: the VM was running at the start
    depart_s     departure; empty: the VM runs to the end
    cores        1 to 4096
    mem_gb       memory, read as GiB and rounded to MiB
    socket       optional: number of the VM's socket, from 0, for --placement as-traced
    owner, app_name, batch_id
                 optional, the first of these: customer, application or batch
    touched_gb   optional: memory that the VM touched
  Azure V1 and V2 (vmtable.csv), with or without a header:
    vmid, subscriptionid, deploymentid, vmcreated, vmdeleted, maxcpu, avgcpu, p95maxcpu, vmcategory, vmcorecount, vmmemory (GB);
    V2 has buckets: >24 cores counts as 30, >64 GB as 70
  Huawei East-1: vmid, cpu, memory (GB), time, type (0: creation, 1: deletion), a row for each event;
    the sizes are those of the creation
  Alibaba pods (openb_pod_list): name, cpu_milli (rounded up to cores), memory_mib, creation_time, deletion_time
A trace in the order of arrival is read as a stream, and memory grows with the VMs that run at the same time and with the number of
different owners; other traces are sorted in memory (about 90 bytes per VM).";

/// Replays the trace, prints the results, and draws the figures if requested.
///
/// # Errors
/// [`Failure::InvalidValue`] if options contradict each other, [`Failure::File`] if the trace cannot
/// be read or is invalid, or if a figure cannot be written.
pub fn run(args: &Args, format: Format) -> Result<(), Failure> {
    args.figure.as_deref().map_or(Ok(()), figure::create_folder)?;
    let plan = compute(args, create_customers)?;
    // The table is printed even if a figure cannot be written.
    let drawn = args.figure.as_deref().map_or(Ok(()), |folder| figures::write_all(folder, &plan));
    plan.print(format)?;
    drawn
}

/// Checks the options, and computes the results with the customers of each seed.
fn compute(args: &Args, customers: CreateCustomers) -> Result<Plan, Failure> {
    let cluster = args.size.cluster()?;
    let pool_sizes = pool_sizes(&args.pool_sockets, &cluster, &args.slices)?;
    options::check_count("--policy", args.policy.len(), PLAN_POLICIES_MAX)?;
    options::check_count("--local-fraction", args.local_fraction.len(), PLAN_LOCAL_FRACTIONS_MAX)?;
    options::check_count("--seed", args.models.seed.len(), PLAN_SEEDS_MAX)?;
    options::check_distinct("--pool-sockets", &args.pool_sockets)?;
    options::check_distinct("--policy", &args.policy)?;
    options::check_distinct("--local-fraction", &args.local_fraction)?;
    options::check_distinct("--seed", &args.models.seed)?;
    check_combination(args)?;
    let usage = usage(args)?;
    let fixed_shares: Vec<Fraction> = args.policy.iter().filter_map(|policy| fixed_share(*policy)).collect();
    let mut runner = Runner {
        trace: &args.trace,
        cluster,
        trace_limits: cluster,
        pool_sizes: &pool_sizes,
        placement: args.placement,
        times: SampleTimes { first: args.warm_up, interval: args.sample },
        customers: None,
        pdm: args.models.pdm,
        forecasts: Vec::new(),
        fixed_shares: &fixed_shares,
        slice_mib: args.slices.slice.0,
    };
    runner.cluster.memory_per_socket = baseline_memory(args.baseline, &runner)?;
    let Some(usage) = usage else { return plan(args, &runner, None) };
    let has_stable_owners = stream::has_stable_owners(&args.trace)?;
    let of_seed = |seed: &u64| {
        let customers = customers(args, &usage, has_stable_owners, *seed)?;
        let mut runner = Runner { customers: Some(&customers), ..runner.clone() };
        if args.predicts() {
            runner.forecasts = runner.forecast(&customers, args.models.limits(&customers))?;
        }
        plan(args, &runner, Some(*seed))
    };
    let plans: Vec<Plan> = args.models.seed.iter().map(of_seed).collect::<Result<_, _>>()?;
    Ok(plans.into_iter().reduce(Plan::with_seed).expect("there is a default seed"))
}

impl Args {
    /// Returns whether a policy needs predictions.
    fn predicts(&self) -> bool {
        self.policy.iter().any(|policy| policy.predicts())
    }

    /// Returns whether the trace is read more than once.
    fn reads_again(&self) -> bool {
        self.baseline != BaselineKind::Given || !self.models.usage.is_empty() || self.slices.slice.0.is_some()
    }
}

/// Checks options that depend on each other.
fn check_combination(args: &Args) -> Result<(), Failure> {
    let usage_error = |rule: &str| Err(Failure::Usage(rule.to_owned()));
    if args.predicts() && args.models.usage.is_empty() {
        return usage_error("--policy frigid and full: require --usage, to model the touched memory");
    }
    if !args.predicts() && !args.local_fraction.is_empty() {
        return usage_error("--local-fraction: requires --policy frigid or full");
    }
    if args.predicts() && args.placement == Placement::AsTraced && args.local_fraction.is_empty() {
        return usage_error("--placement as-traced: requires --local-fraction with --policy frigid and full");
    }
    if args.slices.slice.0.is_none() && args.slices.is_changed() {
        return usage_error(
            "--emcs-per-host, --hosts-per-emc and --offline-gib-per-s: require --slice with a size",
        );
    }
    if args.figure.is_some() && args.local_fraction.len() > 1 {
        return usage_error("--figure: requires at most one --local-fraction");
    }
    if args.reads_again() && args.trace.metadata().is_ok_and(|metadata| !metadata.is_file()) {
        return Err(Failure::InvalidValue {
            field: "TRACE",
            value: args.trace.display().to_string(),
            rule: "must be a regular file, because --usage, --slice and --baseline read it more than once"
                .into(),
        });
    }
    Ok(())
}

fn fixed_share(policy: Policy) -> Option<Fraction> {
    match policy.kind() {
        PolicyKind::FixedShare(share) => Some(share),
        PolicyKind::Predicted(_) => None,
    }
}

/// Reads the usage tables. Returns `None` without tables.
fn usage(args: &Args) -> Result<Option<Vec<VmSample>>, Failure> {
    if args.models.usage.is_empty() {
        return Ok(None);
    }
    let mut usage = Vec::new();
    for table in &args.models.usage {
        let layout = table.format.into();
        usage.extend(open::table(&table.path, |bytes| prediction::table::read(bytes, layout))?);
    }
    Ok(Some(usage))
}

/// Creates the customers of a seed from usage tables. The flag is set if owners in the trace are customers or
/// applications.
type CreateCustomers = fn(&Args, &[VmSample], bool, u64) -> Result<Customers, Failure>;

fn create_customers(
    args: &Args,
    usage: &[VmSample],
    has_stable_owners: bool,
    seed: u64,
) -> Result<Customers, Failure> {
    let failed = |error| Failure::InvalidValue {
        field: "--usage",
        value: args.models.usage_paths().join(", "),
        rule: format!("{error}").into(),
    };
    Customers::new(usage, args.models.pdm, has_stable_owners, seed).map_err(failed)
}

/// Returns the memory of each socket without pools.
fn baseline_memory(kind: BaselineKind, runner: &Runner<'_>) -> Result<Bytes, Failure> {
    let given = runner.cluster.memory_per_socket;
    if kind == BaselineKind::Given {
        return Ok(given);
    }
    let all_local = runner.pass(&[ReplaySpec::ALL_LOCAL])?.swap_remove(0);
    if kind == BaselineKind::SocketPeak {
        return Ok(Bytes::mib(all_local.report.socket_max_mib.max(1)));
    }
    let fraction = search::least_without_pools(runner, &all_local.report)?;
    Ok(runner::part_of(given, fraction).max(Bytes::mib(1)))
}

/// Runs all replays that the policies need, and computes their results. The customers, if any, have this seed.
fn plan(args: &Args, runner: &Runner<'_>, seed: Option<u64>) -> Result<Plan, Failure> {
    let divisions: Vec<Division> = [Division::Frigid, Division::Full]
        .into_iter()
        .filter(|division| args.policy.iter().any(|policy| policy.kind() == PolicyKind::Predicted(*division)))
        .collect();
    let fractions = &args.local_fraction;
    let mut specs = vec![ReplaySpec::ALL_LOCAL];
    if runner.slice_mib.is_some() {
        let share = |share: &Fraction| ReplaySpec::new(Division::Share(*share), 1.0);
        specs.extend(runner.fixed_shares.iter().map(share));
    }
    for division in &divisions {
        specs.extend(fractions.iter().map(|fraction| ReplaySpec::new(*division, *fraction)));
    }
    let mut results = runner.pass(&specs)?;
    let all_local = results.remove(0);
    if fractions.is_empty() && !divisions.is_empty() {
        results.extend(search::least_with_pools(runner, &divisions, &all_local.report)?);
    }
    let slices = replay_slices(args, runner, &results)?;
    let with_slices: Vec<ReplayWithSlices> = results.into_iter().zip(slices).collect();
    let memory_mib = (runner.cluster.memory_per_socket.get() >> 20) as f64;
    let runs = args
        .policy
        .iter()
        .flat_map(|policy| policy_runs(*policy, runner, &all_local, &with_slices, memory_mib));
    let runs: Vec<PolicyRun<'_>> = runs.collect();
    Ok(Plan::new(args, runner, seed, &all_local.report, &runs))
}

/// Replay with the results of its slices, by pool size; empty without slices.
type ReplayWithSlices = (ReplayResult, Vec<SliceReport>);

/// Replays the slices of all replays, in pools that are as large as the largest use of any pool.
fn replay_slices(
    args: &Args,
    runner: &Runner<'_>,
    results: &[ReplayResult],
) -> Result<Vec<Vec<SliceReport>>, Failure> {
    let Some(slice_mib) = runner.slice_mib else { return Ok(vec![Vec::new(); results.len()]) };
    let shape = |peaks: &PoolPeaks| PoolShape {
        pool_sockets: peaks.pool_sockets,
        attachment: args.slices.attachment(),
        slice_mib,
        slices_without_buffer: u32::try_from(peaks.event_mib / slice_mib).unwrap_or(u32::MAX),
        offline_gib_per_s: args.slices.offline_gib_per_s,
        first: args.warm_up,
    };
    let specs: Vec<_> = results
        .iter()
        .map(|result| (result.spec, result.report.pools.iter().map(shape).collect::<Vec<_>>()))
        .collect();
    runner.slice_pass(&specs)
}

/// Returns the replays of a policy, one per fraction of local memory or per pool size. `memory_mib` is the
/// memory of each socket without pools.
fn policy_runs<'a>(
    policy: Policy,
    runner: &Runner<'_>,
    all_local: &'a ReplayResult,
    results: &'a [ReplayWithSlices],
    memory_mib: f64,
) -> Vec<PolicyRun<'a>> {
    let find =
        |division: Division| results.iter().filter(move |(result, _)| result.spec.division == division);
    match policy.kind() {
        PolicyKind::FixedShare(share) if runner.slice_mib.is_none() => {
            let at = runner.fixed_shares.iter().position(|other| *other == share);
            let local_mib = (1.0 - share.get()) * memory_mib;
            vec![PolicyRun {
                policy,
                local_per_socket_mib: local_mib,
                local_at_event_peak_mib: local_mib,
                scaled_by: Some(share),
                surplus_local_mib: 0.0,
                report: &all_local.report,
                slowed: at.and_then(|at| all_local.slowed.get(at)).copied(),
                slices: &[],
            }]
        }
        PolicyKind::FixedShare(share) => {
            // The rounding to slices leaves a different part of each VM in local memory. The local memory is
            // reduced as much as its largest use.
            let reduced = |use_mib: u64, all_local_mib: u64| {
                if all_local_mib == 0 {
                    memory_mib
                } else {
                    memory_mib * use_mib as f64 / all_local_mib as f64
                }
            };
            let run = |(result, slices): &'a ReplayWithSlices| {
                let (with, without) = (&result.report, &all_local.report);
                let local_per_socket_mib = reduced(with.socket_peak_mib, without.socket_peak_mib);
                let at_event_peak_mib = reduced(with.socket_event_mib, without.socket_event_mib);
                PolicyRun {
                    local_per_socket_mib,
                    // Each sample is also an event.
                    local_at_event_peak_mib: at_event_peak_mib.max(local_per_socket_mib),
                    surplus_local_mib: memory_mib - local_per_socket_mib,
                    ..PolicyRun::new(policy, result, slices)
                }
            };
            find(Division::Share(share)).take(1).map(run).collect()
        }
        PolicyKind::Predicted(division) => {
            let run = |(result, slices): &'a ReplayWithSlices| {
                let local_mib = (result.spec.local_fraction * memory_mib).round();
                PolicyRun {
                    local_per_socket_mib: local_mib,
                    local_at_event_peak_mib: local_mib,
                    ..PolicyRun::new(policy, result, slices)
                }
            };
            find(division).map(run).collect()
        }
    }
}

/// Returns the checked pool sizes, or the default sizes that divide the cluster.
fn pool_sizes(requested: &[u32], cluster: &Cluster, slices: &Slices) -> Result<Vec<u32>, Failure> {
    options::check_count("--pool-sockets", requested.len(), PLAN_POOL_SIZES_MAX)?;
    if let Some(size) = requested.iter().find(|size| !cluster.is_divided_by(**size)) {
        return Err(Failure::InvalidValue {
            field: "--pool-sockets",
            value: size.to_string(),
            rule: format!("must divide --sockets ({})", cluster.sockets).into(),
        });
    }
    let is_possible = |size: &u32| cluster.is_divided_by(*size) && slices.check(*size).is_ok();
    let sizes = match requested {
        [] => POOL_SOCKETS_DEFAULT.into_iter().filter(is_possible).collect(),
        requested => requested.to_vec(),
    };
    let sizes = if sizes.is_empty() { vec![cluster.sockets] } else { sizes };
    sizes.iter().try_for_each(|size| slices.check(*size))?;
    Ok(sizes)
}

#[cfg(test)]
mod tests;
