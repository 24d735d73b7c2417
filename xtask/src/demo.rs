//! `cargo xtask demo`: runs a rack with real processes on this machine. A trace of VMs is replayed
//! through the scheduler API. A host loses power, the manager is killed, and the host returns. This
//! file contains the sequence of events; the folder `demo` contains the individual parts.

pub mod guest;
mod processes;
mod rack;
mod replay;
mod replay_report;
mod scratch;
mod service;
mod slice_history;
mod tarn_cli;

use std::{env, fs, path::PathBuf, time::Duration};

use emulated_host::Artifacts;
use rack::{DemoPlan, Rack};
use replay::{Replay, Trace};
use scratch::ScratchFolders;
use service::{Programs, Services};
use slice_history::SliceWatch;
use tarn_cli::{Host, TarnCli};

use crate::{artifacts, failure::Failure, step::build_programs, wait::Interrupt};

/// Options of the demo.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Trace of VM arrivals, plain or gzipped [default: generated from --seed]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// rack.toml of the demo; addresses, paths, tokens and certificates in it are replaced
    /// [default: 4 hosts, 2 EMCs]
    #[arg(long, value_name = "FILE")]
    rack: Option<PathBuf>,
    /// Replay only the first N VMs of the trace
    #[arg(long, value_name = "N", default_value_t = 2000)]
    limit: u64,
    /// Seed of the generated trace
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Write the result to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Text about the next steps, printed at the end of the demo.
const NEXT_STEPS: &str = "
  docs/install.md: installation on your own hosts
  cargo run --bin tarn -- --help: commands of an operator
  cargo xtask test: build and run all tests

";
/// Environment variable with a folder of prebuilt programs.
pub const BIN_DIR_ENV: &str = "TARN_BIN_DIR";
/// Fraction of the VMs in the trace that are placed before a host loses power. This and the next
/// two fractions are low because a small rack rejects most VMs.
const POWER_LOSS_FRACTION: f64 = 0.2;
/// Fraction of the VMs in the trace that are placed before the manager is killed.
const MANAGER_KILL_FRACTION: f64 = 0.3;
/// Fraction of the VMs in the trace that are placed before the host restarts.
const HOST_RETURN_FRACTION: f64 = 0.4;

/// Time limit for the start of the manager and the agents.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest delay of a lease expiry or a fence that the demo waits for. If the delay is longer, the
/// host returns before its lease expires.
const LEASE_WAIT_TIMEOUT: Duration = Duration::from_secs(15);
/// Time limit for all slices to be scrubbed and free after the replay.
const SLICES_FREE_TIMEOUT: Duration = Duration::from_secs(60);
/// Tolerated delay between a deadline of the rack and the resulting state change.
const DEADLINE_SLACK: Duration = Duration::from_secs(5);

/// Runs the demo, then stops its processes and removes its folders.
///
/// # Errors
/// Returns an error if a program fails, a time limit expires, the user interrupts the demo, or the
/// audit fails.
pub fn run(args: &Args) -> Result<(), Failure> {
    let programs = find_programs()?;
    let artifacts = Artifacts::open(&artifacts::ensure_downloaded()?)?;
    let interrupt = Interrupt::new()?;
    let trace = Trace::new(args.trace.as_deref(), args.limit, args.seed)?;
    let scratch = ScratchFolders::new()?;
    let result = run_rack(args, &programs, &interrupt, &trace, &scratch);
    let result =
        result.map(|replay_report| (replay_report, guest::run(&programs, &interrupt, &scratch, &artifacts)));
    let removed = scratch.remove();
    let (replay_report, guest) = result.inspect_err(|_| eprintln!("\nthe demo failed"))?;
    removed?;
    let replay_report = replay_report.with_guest(guest.as_ref().ok());
    replay_report.save_report(args.json.as_deref())?;
    print!("{replay_report}{NEXT_STEPS}");
    replay_report.check().and(guest.map(drop))
}

/// Returns the programs in the folder named by [`BIN_DIR_ENV`]. Builds the programs if this
/// variable is not set.
fn find_programs() -> Result<Programs, Failure> {
    let names = ["pool-manager", "host-agent", "tarn", "vmm-plugin", "xtask"];
    let [manager, agent, tarn, vmm, xtask] = match env::var_os(BIN_DIR_ENV).map(PathBuf::from) {
        Some(folder) => names.map(|name| folder.join(name)),
        None => build_programs(names)?,
    };
    Ok(Programs { manager, agent, tarn, vmm, xtask })
}

fn run_rack(
    args: &Args,
    programs: &Programs,
    interrupt: &Interrupt,
    trace: &Trace,
    scratch: &ScratchFolders,
) -> Result<replay_report::ReplayReport, Failure> {
    let rack = DemoPlan::read(args.rack.as_deref())?.deploy(scratch)?;
    let mut services = Services::new(programs, &rack, scratch);
    let result = run_scenario(programs, interrupt, trace, scratch, &rack, &mut services);
    // The log of a failed process contains the reason.
    let result = result.inspect_err(|_| services.print_log_tails());
    let stopped = services.stop();
    result.and_then(|replay_report| stopped.map(|()| replay_report))
}

/// Runs the sequence of events and returns the report of the replay.
fn run_scenario(
    programs: &Programs,
    interrupt: &Interrupt,
    trace: &Trace,
    scratch: &ScratchFolders,
    rack: &Rack,
    services: &mut Services<'_>,
) -> Result<replay_report::ReplayReport, Failure> {
    let cli = TarnCli::new(programs, rack);
    print_heading(&format!("starting a rack: {}", rack.summary()));
    services.init_rack()?;
    services.start_manager()?;
    interrupt.wait_until("a reply of the manager", START_TIMEOUT, || cli.is_manager_ready())?;
    rack.hosts.iter().try_for_each(|host| services.start_agent(host))?;
    interrupt.wait_until("all hosts to be up", START_TIMEOUT, || are_all_hosts_up(&cli))?;
    print_details(&format!(
        "all hosts are up; to watch them: {} --endpoint {} top",
        programs.tarn.display(),
        rack.uri()
    ));

    let mut slice_watch = SliceWatch::start(programs, rack, scratch)?;
    print_heading(&format!("replaying VM arrivals and departures: {trace}"));
    let mut replay = Replay::start(programs, rack, trace, scratch)?;
    replay.wait_for_placements(POWER_LOSS_FRACTION, interrupt, services)?;

    print_details(&cli.get_table("hosts")?);
    let host = host_with_most_slices(&cli)?;
    print_heading(&format!("host {} loses power: its agent and its VMs are killed", host.host));
    let slices = cli.slices_of(&host.host)?;
    let vms = services.cut_power(&host.host)?;
    print_details(&format!("{vms} VMs with pool memory were killed; the host had {} slices", slices.len()));
    wait_until_fenced(&cli, interrupt, rack, &host.host)?;

    replay.wait_for_placements(MANAGER_KILL_FRACTION, interrupt, services)?;
    slice_watch.stop();
    print_heading(
        "the manager is killed and restarted; guests continue, and the scheduler retries requests without a reply",
    );
    services.kill_manager();
    services.start_manager()?;
    let elapsed = interrupt.wait_until("a reply of the manager", START_TIMEOUT, || cli.is_manager_ready())?;
    print_details(&format!("the manager replies again after {:.0} ms", elapsed.as_secs_f64() * 1000.0));

    replay.wait_for_placements(HOST_RETURN_FRACTION, interrupt, services)?;
    print_heading(&format!("host {} restarts", host.host));
    services.start_agent(&host.host)?;
    let elapsed = interrupt
        .wait_until("the lost host to be up again", START_TIMEOUT, || cli.has_state(&host.host, &["up"]))?;
    print_details(&format!(
        "the host reported that it has no slices, and is up after {:.0} ms",
        elapsed.as_secs_f64() * 1000.0
    ));

    let result = replay.finish(interrupt, services)?;
    interrupt.wait_until("all slices to be free", SLICES_FREE_TIMEOUT, || cli.has_no_draining_slice())?;
    print_heading(&format!(
        "next owners of slices of {}; all slices were scrubbed and are free now",
        host.host
    ));
    slices
        .iter()
        .filter_map(|slice| slice_watch.history_after(&host.host, *slice))
        .take(PRINTED_HISTORIES_MAX)
        .for_each(|history| print_details(&history));
    print_details(&cli.get_table("emcs")?);
    Ok(result)
}

/// Maximum number of slices whose history is printed.
const PRINTED_HISTORIES_MAX: usize = 3;

/// Waits until the lease of a host expires and until the host is fenced. Skips a wait that is
/// longer than [`LEASE_WAIT_TIMEOUT`].
fn wait_until_fenced(
    cli: &TarnCli<'_>,
    interrupt: &Interrupt,
    rack: &Rack,
    host: &str,
) -> Result<(), Failure> {
    for (delay, states, text) in [
        (
            Some(rack.lease_ttl),
            ["unknown", "fenced"],
            "the lease of the host expired: the host keeps its slices and gets no new slices",
        ),
        (
            rack.fence_after,
            ["fenced", "fenced"],
            "the host is fenced: its slices are revoked, scrubbed and reused",
        ),
    ] {
        let Some(delay) = delay.filter(|delay| *delay <= LEASE_WAIT_TIMEOUT) else {
            print_details(&format!(
                "the demo waits at most {} s for a lease or a fence: the host keeps its slices until it returns",
                LEASE_WAIT_TIMEOUT.as_secs()
            ));
            return Ok(());
        };
        let elapsed =
            interrupt.wait_until(states[0], delay + DEADLINE_SLACK, || cli.has_state(host, &states))?;
        print_details(&format!("after another {:.1} s: {text}", elapsed.as_secs_f64()));
    }
    Ok(())
}

fn are_all_hosts_up(cli: &TarnCli<'_>) -> Result<bool, Failure> {
    Ok(cli.hosts()?.iter().all(|host| host.state == "up"))
}

/// Returns the host with the most slices. Ties are resolved by the number of reservations.
fn host_with_most_slices(cli: &TarnCli<'_>) -> Result<Host, Failure> {
    let hosts = cli.hosts()?.into_iter();
    hosts.max_by_key(|host| (host.slices, host.reservations)).ok_or_else(|| Failure::UnexpectedOutput {
        program: "tarn get hosts".to_owned(),
        reason: "the rack has no hosts".to_owned(),
    })
}

fn print_heading(text: &str) {
    println!("\n● {text}");
}

fn print_details(text: &str) {
    text.lines().for_each(|line| println!("    {line}"));
}

/// Writes text to a file.
fn write_file(path: &std::path::Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(Failure::file_error("write", path))
}
