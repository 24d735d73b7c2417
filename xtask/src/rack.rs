//! `cargo xtask rack`: a rack in a box, and operations on its hosts from another terminal. The
//! crate `emulated-host` implements both.

mod shell;
mod symbiosis;

use std::{path::PathBuf, process, time::Duration};

use clap::{Subcommand, ValueEnum};
use emulated_host::{
    Artifacts, HostError,
    rack::{Device, Plan, Programs, Rack, RackHost, RackPlan},
};

use crate::{bed, failure::Failure, repository::root, step::build, wait::Patience};

/// Default folder of a rack, in the repository.
const FOLDER: &str = "target/rack";

/// How long a command in a host may take.
const COMMAND_WITHIN: Duration = Duration::from_secs(600);

/// A rack, or an operation on a host of a running one.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    act: Option<Act>,
    /// How many hosts
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=8))]
    hosts: u8,
    /// How many CXL devices they share
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4))]
    devices: u8,
    /// Slices of 1 GiB on each device
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    slices: u32,
    /// How hosts take slices
    #[arg(long, value_enum, default_value_t = Backend::Dax)]
    backend: Backend,
    /// Where its sockets and logs are [default: target/rack]
    #[arg(long, value_name = "FOLDER", global = true)]
    dir: Option<PathBuf>,
}

/// How hosts take slices.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Backend {
    Dax,
    #[value(name = "memory_block")]
    MemoryBlock,
}

/// Operations on a host, from another terminal.
#[derive(Debug, Subcommand)]
enum Act {
    /// Compare an equal split with Symbiosis for two programs on a host of a rack of their own
    Symbiosis(symbiosis::Args),
    /// A shell in it; Ctrl-] leaves it
    Shell { host: String },
    /// A command in it; the exit code is the command's
    Run {
        host: String,
        #[arg(required = true, last = true)]
        command: Vec<String>,
    },
    /// Stops its processor
    Pause { host: String },
    /// Lets its processor go on
    Resume { host: String },
    /// Cuts its power
    Off { host: String },
    /// Switches it on
    On { host: String },
    /// Cuts its power and switches it on
    Reboot { host: String },
    /// Connects it to the network, or cuts it off
    Link { host: String, state: Link },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Link {
    Up,
    Down,
}

/// Runs a rack until interrupted, or performs one operation on a host of a running one.
///
/// # Errors
/// A requirement is missing, or a host fails.
pub fn run(args: Args) -> Result<(), Failure> {
    let folder = args.dir.clone().unwrap_or_else(|| root().join(FOLDER));
    let find = |host: &str| RackHost::find(&folder, host);
    match args.act {
        None => stay(&args, &folder),
        Some(Act::Symbiosis(args)) => symbiosis::run(&args, &folder),
        Some(Act::Shell { host }) => shell::run(&find(&host)?),
        Some(Act::Run { host, command }) => command_in(&find(&host)?, &command.join(" ")),
        Some(Act::Pause { host }) => Ok(find(&host)?.pause()?),
        Some(Act::Resume { host }) => Ok(find(&host)?.resume()?),
        Some(Act::Off { host }) => Ok(find(&host)?.power_off()?),
        Some(Act::On { host }) => on(&find(&host)?),
        Some(Act::Reboot { host }) => {
            let mut host = find(&host)?;
            host.power_off()?;
            on(&host)
        }
        Some(Act::Link { host, state }) => Ok(find(&host)?.set_link(state == Link::Up)?),
    }
}

/// The rack's own process switches it off at the end.
fn on(host: &RackHost) -> Result<(), Failure> {
    host.power_on_detached()?;
    Ok(host.wait_up()?)
}

fn command_in(host: &RackHost, command: &str) -> Result<(), Failure> {
    let said = host.run_within(command, COMMAND_WITHIN)?;
    print!("{}", said.text);
    process::exit(said.status)
}

fn stay(args: &Args, folder: &std::path::Path) -> Result<(), Failure> {
    let bed = Artifacts::open(&bed::ensure()?)?;
    let patience = Patience::new()?;
    let plan = plan(args, &bed)?;
    eprintln!("── {} hosts boot; logs are in {}", args.hosts, folder.join("logs").display());
    let begun = std::time::Instant::now();
    let rack = Rack::start(&bed, plan, folder, || patience.lasts()).map_err(|error| match error {
        HostError::Interrupted => Failure::Interrupted,
        other => other.into(),
    })?;
    println!("the rack is up after {:.0} s\n{}", begun.elapsed().as_secs_f64(), invitation(&rack));
    while patience.pause().is_ok() {}
    eprintln!("── the rack ends");
    Ok(())
}

fn plan(args: &Args, bed: &Artifacts) -> Result<RackPlan, Failure> {
    let names = ["pool-manager", "host-agent", "tarn", "power-off-host", "vmm-plugin"];
    let [manager, agent, tarn, power_off, vmm] = build(names)?;
    let device = |n| Device { serial: u64::from(n), gib: args.slices, is_aligned: true };
    let mut hosts = Plan::new(usize::from(args.hosts), (1..=args.devices).map(device).collect());
    hosts.programs = vec![vmm, tarn.clone(), bed.tool("strace")];
    let backend = args.backend.to_possible_value().expect("every backend has a name");
    Ok(RackPlan::new(hosts, Programs { manager, agent, tarn, power_off }, backend.get_name()))
}

/// Prints the available operations.
fn invitation(rack: &Rack) -> String {
    let tarn = rack.tarn_script();
    let folder = rack.hosts().folder().display();
    let usual = root().join(FOLDER);
    let dir = if rack.hosts().folder() == usual { String::new() } else { format!(" --dir {folder}") };
    format!(
        "
  {0} get hosts           as its operator; or get slices, top, doctor, reserve ...
  cargo xtask rack{dir} shell h0            a shell in a host; Ctrl-] leaves it
  cargo xtask rack{dir} run h0 -- COMMAND   or pause|resume|off|on|reboot h0, link h0 up|down
  {folder}/memory        the devices' bytes, by serial
  {folder}/logs          what everybody says
  Ctrl-C                               ends it, and leaves only the logs
",
        tarn.display()
    )
}
