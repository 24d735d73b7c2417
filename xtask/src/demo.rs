//! `cargo xtask demo`: a rack on this machine with real processes, a stream of VMs through the
//! scheduler's API, a host that loses power, a manager that is killed, and a host that returns.
//! This file is the sequence of events; its parts are in the folder beside it.

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
use rack::{Plan, Rack};
use replay::{Replay, Trace};
use scratch::Scratch;
use service::{Programs, Services};
use slice_history::SliceWatch;
use tarn_cli::{Host, TarnCli};

use crate::{artifacts, failure::Failure, step::build, wait::Interrupt};

/// Options of the demo.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Trace of VM arrivals, plain or gzipped [default: generated from --seed]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// A rack.toml, of which addresses, paths, tokens and certificates are replaced [default: 4
    /// hosts, 2 EMCs]
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

/// Next steps, printed at the end.
const NEXT_STEPS: &str = "
  docs/install.md: installation on your own hosts
  cargo run --bin tarn -- --help: commands of an operator
  cargo xtask test: the tests of all this

";
/// Environment variable naming a folder with ready-built programs.
pub const BIN_DIR: &str = "TARN_BIN_DIR";
/// Times of events, as fractions of the trace's VMs that were placed: early, because a small rack
/// rejects most of them.
const POWER_LOSS_AT: f64 = 0.2;
const MANAGER_KILLED_AT: f64 = 0.3;
const HOST_RETURNS_AT: f64 = 0.4;

/// Time limit for the start of the manager and the agents.
const UP_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest lease that the demo lets expire. With a longer one, the host returns before its end.
const LEASE_SHOWN_MAX: Duration = Duration::from_secs(15);
/// Time limit for the last slices to be scrubbed and free.
const FREE_TIMEOUT: Duration = Duration::from_secs(60);
/// Tolerated delay of a state change after a deadline of the rack.
const DEADLINE_SLACK: Duration = Duration::from_secs(5);

/// Runs the demo, and removes its processes and folders.
///
/// # Errors
/// A program fails, a time limit expires, the user interrupts, or the audit fails.
pub fn run(args: &Args) -> Result<(), Failure> {
    let programs = programs()?;
    let artifacts = Artifacts::open(&artifacts::ensure()?)?;
    let interrupt = Interrupt::new()?;
    let trace = Trace::new(args.trace.as_deref(), args.limit, args.seed)?;
    let scratch = Scratch::new()?;
    let result = run_rack(args, &programs, &interrupt, &trace, &scratch);
    let result =
        result.map(|replay_report| (replay_report, guest::run(&programs, &interrupt, &scratch, &artifacts)));
    let removed = scratch.remove();
    let (replay_report, guest) = result.inspect_err(|_| eprintln!("\nthe demo failed"))?;
    removed?;
    let replay_report = replay_report.with_guest(guest.as_ref().ok());
    replay_report.save(args.json.as_deref())?;
    print!("{replay_report}{NEXT_STEPS}");
    replay_report.check().and(guest.map(drop))
}

/// Returns the programs in the folder that [`BIN_DIR`] names, or builds them.
fn programs() -> Result<Programs, Failure> {
    let names = ["pool-manager", "host-agent", "tarn", "vmm-plugin", "xtask"];
    let [manager, agent, tarn, vmm, xtask] = match env::var_os(BIN_DIR).map(PathBuf::from) {
        Some(folder) => names.map(|name| folder.join(name)),
        None => build(names)?,
    };
    Ok(Programs { manager, agent, tarn, vmm, xtask })
}

fn run_rack(
    args: &Args,
    programs: &Programs,
    interrupt: &Interrupt,
    trace: &Trace,
    scratch: &Scratch,
) -> Result<replay_report::ReplayReport, Failure> {
    let rack = Plan::read(args.rack.as_deref())?.deploy(scratch)?;
    let mut services = Services::new(programs, &rack, scratch);
    let result = scenario(programs, interrupt, trace, scratch, &rack, &mut services);
    // The log of a process that ended has the reason.
    let result = result.inspect_err(|_| services.print_log_tails());
    let stopped = services.stop();
    result.and_then(|replay_report| stopped.map(|()| replay_report))
}

/// Runs all events in order.
fn scenario(
    programs: &Programs,
    interrupt: &Interrupt,
    trace: &Trace,
    scratch: &Scratch,
    rack: &Rack,
    services: &mut Services<'_>,
) -> Result<replay_report::ReplayReport, Failure> {
    let cli = TarnCli::new(programs, rack);
    print_heading(&format!("starting a rack: {}", rack.summary()));
    services.init_rack()?;
    services.start_manager()?;
    interrupt.wait_until("a reply of the manager", UP_TIMEOUT, || cli.is_manager_ready())?;
    rack.hosts.iter().try_for_each(|host| services.start_agent(host))?;
    interrupt.wait_until("all hosts to be up", UP_TIMEOUT, || all_up(&cli))?;
    print_details(&format!(
        "all hosts are up; to watch them: {} --endpoint {} top",
        programs.tarn.display(),
        rack.uri()
    ));

    let mut slice_watch = SliceWatch::start(programs, rack, scratch)?;
    print_heading(&format!("replaying VM arrivals and departures: {trace}"));
    let mut replay = Replay::start(programs, rack, trace, scratch)?;
    replay.wait_for_placements(POWER_LOSS_AT, interrupt, services)?;

    print_details(&cli.table("hosts")?);
    let host = host_with_most_slices(&cli)?;
    print_heading(&format!("host {} loses power: its agent and its VMs are killed", host.host));
    let slices = cli.slices_of(&host.host)?;
    let vms = services.cut_power(&host.host)?;
    print_details(&format!("{vms} VMs with pool memory were killed; the host had {} slices", slices.len()));
    wait_until_fenced(&cli, interrupt, rack, &host.host)?;

    replay.wait_for_placements(MANAGER_KILLED_AT, interrupt, services)?;
    slice_watch.stop();
    print_heading(
        "the manager is killed and restarted; guests continue, the scheduler retries unanswered requests",
    );
    services.kill_manager();
    services.start_manager()?;
    let elapsed = interrupt.wait_until("a reply of the manager", UP_TIMEOUT, || cli.is_manager_ready())?;
    print_details(&format!("the manager replies again after {:.0} ms", elapsed.as_secs_f64() * 1000.0));

    replay.wait_for_placements(HOST_RETURNS_AT, interrupt, services)?;
    print_heading(&format!("host {} restarts", host.host));
    services.start_agent(&host.host)?;
    let elapsed = interrupt
        .wait_until("the lost host to be up again", UP_TIMEOUT, || cli.has_state(&host.host, &["up"]))?;
    print_details(&format!(
        "the host reported that it has no slices, and is up after {:.0} ms",
        elapsed.as_secs_f64() * 1000.0
    ));

    let result = replay.finish(interrupt, services)?;
    interrupt.wait_until("all slices to be free", FREE_TIMEOUT, || cli.has_no_draining_slice())?;
    print_heading(&format!(
        "next owners of slices of {}, all of which were scrubbed and freed in the end",
        host.host
    ));
    slices
        .iter()
        .filter_map(|slice| slice_watch.history_after(&host.host, *slice))
        .take(HISTORIES_SHOWN)
        .for_each(|history| print_details(&history));
    print_details(&cli.table("emcs")?);
    Ok(result)
}

/// Number of slices whose history is printed.
const HISTORIES_SHOWN: usize = 3;

/// Waits until the lease of a host has expired and, if the deadline is short, until it is fenced.
fn wait_until_fenced(
    cli: &TarnCli<'_>,
    interrupt: &Interrupt,
    rack: &Rack,
    host: &str,
) -> Result<(), Failure> {
    for (delay, states, text) in [
        (Some(rack.ttl), ["unknown", "fenced"], "its lease expired: it gets no new slices and keeps its own"),
        (rack.fence_after, ["fenced", "fenced"], "it is fenced: its slices are revoked, scrubbed and reused"),
    ] {
        let Some(delay) = delay.filter(|delay| *delay <= LEASE_SHOWN_MAX) else {
            print_details("its lease is longer than this demo waits: it keeps its slices until it returns");
            return Ok(());
        };
        let elapsed =
            interrupt.wait_until(states[0], delay + DEADLINE_SLACK, || cli.has_state(host, &states))?;
        print_details(&format!("after another {:.1} s: {text}", elapsed.as_secs_f64()));
    }
    Ok(())
}

fn all_up(cli: &TarnCli<'_>) -> Result<bool, Failure> {
    Ok(cli.hosts()?.iter().all(|host| host.state == "up"))
}

/// Returns the host with the most slices and, among equals, the most reservations.
fn host_with_most_slices(cli: &TarnCli<'_>) -> Result<Host, Failure> {
    let hosts = cli.hosts()?.into_iter();
    hosts.max_by_key(|host| (host.slices, host.reservations)).ok_or_else(|| Failure::UnexpectedOutput {
        program: "tarn get hosts".to_owned(),
        why: "the rack has no hosts".to_owned(),
    })
}

fn print_heading(text: &str) {
    println!("\n● {text}");
}

fn print_details(text: &str) {
    text.lines().for_each(|line| println!("    {line}"));
}

/// Writes a file of the demo.
fn write(path: &std::path::Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(Failure::file("write", path))
}
