//! Measures the overhead of sampling running VMs.
//!
//! Goals: measuring 50 VMs takes less than 1 % of one core. A guest loses at most 2 % of its
//! throughput (upper 95 % bound of the mean loss).
//!
//! The first part samples 50 stand-in processes, each with 1 GiB mapped memory and four threads with
//! names of vCPUs, at the shortest configurable interval. The processor counters are replaced by
//! software events, so that machines without counters read as many events. The alternative of the
//! ratio is a walk of the page tables of the same processes (`/proc/PID/smaps`). The second part runs
//! a guest that writes to 1 GiB of pool memory, alternately with and without sampling. The guest is
//! sampled more often than by an agent with the default interval. The setup of
//! DAMON is measured with a simulated sysfs; the work of the kernel's DAMON thread is not included.

#[path = "vm_sampling/guest.rs"]
mod guest;
#[path = "vm_sampling/stand_ins.rs"]
mod stand_ins;

use std::{process::ExitCode, time::Duration};

use benches::{
    failure::Failure,
    report::{format_ratio, format_table, run_and_print},
};
use clap::Parser;

/// Shortest configurable interval between two samples of a VM.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(2);
/// Goal: largest share of one core that sampling takes, in percent.
const CORE_PERCENT_MAX: f64 = 1.0;
/// Goal: largest loss of throughput of a guest, in percent.
const LOSS_PERCENT_MAX: f64 = 2.0;

/// Measure the overhead of sampling VMs
#[derive(Debug, Parser)]
struct Args {
    /// Number of rounds in which all stand-in processes are sampled
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(5..=1000))]
    rounds: u32,
    /// Number of pairs of a period with sampling and a period without
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(20..=1000))]
    pairs: u32,
    /// Duration of a period, in seconds
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(2..=600))]
    period_s: u64,
    /// Interval between two samples of the guest, in seconds. An agent takes a sample every 30
    /// seconds by default
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..=600))]
    guest_interval_s: u64,
    /// Run as a stand-in process
    #[arg(long, hide = true)]
    stand_in: bool,
    /// Flag that cargo passes to benchmarks, without effect
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.stand_in {
        return stand_ins::run_stand_in();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime can be created");
    runtime.block_on(run_and_print("vm_sampling", measure(&args)))
}

async fn measure(args: &Args) -> Result<String, Failure> {
    let cost = stand_ins::measure(args.rounds)?;
    let mut report = cost.table();
    report += &format!("{}\n", format_ratio("vm_sampling_cpu", CORE_PERCENT_MAX / cost.core_percent()));
    report += &format!("{}\n", format_ratio("vm_sampling_vs_smaps", cost.ratio_to_smaps()));
    let (period, interval) = (Duration::from_secs(args.period_s), Duration::from_secs(args.guest_interval_s));
    if let Some(losses) = guest::measure(args.pairs, period, interval).await? {
        let head = ["guest throughput", "pairs", "mean loss %", "upper 95 % bound", "min-median-max"];
        report += &format_table(&head, &[losses.row()]);
        let ratio = LOSS_PERCENT_MAX / losses.upper_bound().max(f64::EPSILON);
        report += &format!("{}\n", format_ratio("vm_sampling_guest_loss", ratio.min(100.0)));
    }
    Ok(report)
}
