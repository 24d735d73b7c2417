//! `tarn plan`: computes the DRAM that a cluster would need with memory pools, from a trace of VM
//! arrivals. `sim::plan` replays the trace; this module reads it, selects the replays that the
//! policies need, and prints the results.

mod figures;
mod options;
mod report;
mod stream;

use std::path::PathBuf;

use clap::Args as ClapArgs;
use cli_runtime::{Failure, Format};
use sim::plan::{
    Cluster,
    input::PlannedVm,
    replay::{PlacedMemory, PlacementRule, Replay, ReplayReport, SampleTimes},
};
use units::{
    Ns,
    limits::{PLAN_POLICIES_MAX, PLAN_POOL_SIZES_MAX, PLAN_SAMPLE_INTERVAL_MIN},
};

use self::options::{ClusterSize, Placement, Policy, Prices};
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
    /// Policies: none (all memory is local), or static=F (a fraction F of each VM's memory is on a
    /// pool)
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',', default_value = "none,static=0.1,static=0.3,static=0.5")]
    policy: Vec<Policy>,
    /// Socket of each VM
    #[arg(long, value_enum, default_value_t)]
    placement: Placement,
    /// Time from the start of the trace to the first sample, such as 1d; traces start with an empty
    /// cluster
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = options::parse_warm_up)]
    warm_up: Ns,
    /// Time between two samples of the memory in use, at least 1s
    #[arg(long, value_name = "DURATION", default_value = "300s", value_parser = options::parse_interval)]
    sample: Ns,
    #[command(flatten)]
    prices: Prices,
    /// Draw the results as SVG files in this directory: plan-required.svg (Pond figure 1c) and
    /// plan-saved.svg (Pond figure 11)
    #[arg(long, value_name = "DIR")]
    figure: Option<PathBuf>,
}

/// Sizes of pools that are compared by default, as in figure 11 of Pond.
const POOL_SOCKETS_DEFAULT: [u32; 6] = [2, 4, 8, 16, 32, 64];

const OUTPUT_HELP: &str = "\
Each row of the result is a policy with a pool size. DRAM is a fraction of the DRAM of all sockets without pools:
  REQUIRED       local memory of all sockets, and all pools; each pool is as large as the largest use of any pool in a sample
  SAVED          1 - REQUIRED; negative if the pools need more than they save
  REJECTED       VMs that fit on no socket, of all VMs
  STRANDED       mean free local memory on sockets without free cores
  LOCAL, POOL    memory of each socket and of each pool
  EVENT PEAK     REQUIRED if each pool is as large as its largest use at any time after --warm-up, instead of in a sample
JSON and CSV contain fractions (0 to 1) and GiB; null or an empty cell means that a policy has no such number. In JSON, `results` has
policy, pool_sockets, dram_required, dram_saved, rejected, stranded_mean, mispredicted, migrations, buffer_slices and further numbers.

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
  Alibaba pods (openb_pod_list): name, cpu_milli (rounded up to cores), memory_mib, creation_time, deletion_time
A trace in the order of arrival is read as a stream, and memory grows with the VMs that run at the same time; other traces are sorted
in memory (about 90 bytes per VM).";

/// Returns the help on the output and on the formats of traces.
pub fn help() -> &'static str {
    OUTPUT_HELP
}

/// Replays the trace, prints the results, and draws the figures if requested.
///
/// # Errors
/// [`Failure::InvalidValue`] if options contradict each other, [`Failure::File`] if the trace cannot
/// be read or is invalid, or if a figure cannot be written.
pub fn run(args: &Args, format: Format) -> Result<(), Failure> {
    let cluster = args.size.cluster()?;
    let pool_sizes = pool_sizes(&args.pool_sockets, &cluster)?;
    options::check_count("--policy", args.policy.len(), PLAN_POLICIES_MAX)?;
    args.figure.as_deref().map_or(Ok(()), figure::create_folder)?;
    let report = replay(args, cluster, &pool_sizes)?;
    let plan = report::Plan::new(cluster, &args.policy, &args.prices, &report);
    plan.print(format)?;
    args.figure.as_deref().map_or(Ok(()), |folder| figures::write_all(folder, &plan))
}

/// Returns the checked pool sizes, or the default sizes that divide the cluster.
fn pool_sizes(requested: &[u32], cluster: &Cluster) -> Result<Vec<u32>, Failure> {
    options::check_count("--pool-sockets", requested.len(), PLAN_POOL_SIZES_MAX)?;
    if let Some(size) = requested.iter().find(|size| !cluster.is_divided_by(**size)) {
        return Err(Failure::InvalidValue {
            field: "--pool-sockets",
            value: size.to_string(),
            rule: format!("must divide --sockets ({})", cluster.sockets).into(),
        });
    }
    if !requested.is_empty() {
        return Ok(requested.to_vec());
    }
    let sizes: Vec<u32> =
        POOL_SOCKETS_DEFAULT.into_iter().filter(|size| cluster.is_divided_by(*size)).collect();
    Ok(if sizes.is_empty() { vec![cluster.sockets] } else { sizes })
}

/// Replays the trace once for all policies that keep the placement without pools.
fn replay(args: &Args, cluster: Cluster, pool_sizes: &[u32]) -> Result<ReplayReport, Failure> {
    let (rule, needs_socket) = match args.placement {
        Placement::BestFit => (PlacementRule::BestFit, false),
        Placement::AsTraced => (PlacementRule::AsTraced, true),
    };
    let times = SampleTimes { first: args.warm_up, interval: args.sample };
    let start = || (Replay::new(&cluster, pool_sizes, rule, times), Ns::ZERO);
    let consume = |(replay, last): &mut (Replay, Ns), vms: &[PlannedVm]| {
        for vm in vms {
            replay.arrive(&whole_memory(vm));
            *last = vm.arrive;
        }
    };
    let (replay, last) = stream::replay_trace(&args.trace, cluster, needs_socket, start, consume)?;
    let report = replay.finish(last);
    if report.samples == 0 {
        return Err(Failure::InvalidValue {
            field: "--warm-up",
            value: args.warm_up.to_string(),
            rule: "must be before the last event of the trace".into(),
        });
    }
    Ok(report)
}

/// Returns the demand of a VM whose whole memory counts in its socket and in its pool.
fn whole_memory(vm: &PlannedVm) -> PlacedMemory {
    PlacedMemory {
        arrive: vm.arrive,
        depart: vm.depart,
        cores: vm.cores,
        socket_mib: vm.mib,
        pool_mib: vm.mib,
        traced_socket: vm.socket,
    }
}
