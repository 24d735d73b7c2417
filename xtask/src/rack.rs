//! `cargo xtask rack`: runs a rack of emulated hosts, and controls these hosts from another
//! terminal. The crate `emulated-host` implements the hosts.

mod commands;
mod eviction;
mod shell;
mod symbiosis;
mod tiering;

use std::{path::PathBuf, process, time::Duration};

use clap::{Subcommand, ValueEnum};
use emulated_host::{
    Artifacts,
    rack::{Device, Plan, Programs, Rack, RackHost, RackPlan},
};

use crate::{artifacts, failure::Failure, repository::root, step::build_programs, wait::Interrupt};

/// Default folder of a rack, relative to the root of the repository.
const DEFAULT_FOLDER: &str = "target/rack";

/// Time limit of a command on a host.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(600);

/// Options of `rack`: a rack to run, or an operation on a host of a running rack.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    operation: Option<Operation>,
    /// Number of hosts
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=8))]
    hosts: u8,
    /// Number of CXL devices, shared by all hosts
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4))]
    devices: u8,
    /// Number of slices of 1 GiB on each device
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    slices: u32,
    /// Backend of the host agents
    #[arg(long, value_enum, default_value_t = Backend::Dax)]
    backend: Backend,
    /// Folder for sockets and logs [default: target/rack]
    #[arg(long, value_name = "DEFAULT_FOLDER", global = true)]
    dir: Option<PathBuf>,
}

/// Backend of a host agent.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Backend {
    Dax,
    #[value(name = "memory_block")]
    MemoryBlock,
}

/// Operations on a host of a running rack.
#[derive(Debug, Subcommand)]
enum Operation {
    /// Compare Symbiosis with an equal split for two programs on a host of a separate rack
    Symbiosis(symbiosis::Args),
    /// Compare fair tiering with the tiering of the kernel, and with none, on a host of a separate rack
    Tiering(tiering::Args),
    /// Compare early eviction with the kernel alone for programs that swap, on a host of a separate rack
    Eviction(eviction::Args),
    /// Open a shell on a host; Ctrl-] closes the shell
    Shell { host: String },
    /// Run a command on a host and exit with its exit code. The arguments are joined by spaces, and the
    /// host's shell runs the result, as with ssh
    Run {
        host: String,
        #[arg(required = true, last = true)]
        command: Vec<String>,
    },
    /// Pause the CPUs of a host
    Pause { host: String },
    /// Resume the CPUs of a host
    Resume { host: String },
    /// Power a host off
    Off { host: String },
    /// Power a host on
    On { host: String },
    /// Power a host off and on again
    Reboot { host: String },
    /// Set the network link of a host up or down
    Link { host: String, state: Link },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Link {
    Up,
    Down,
}

/// Runs a rack until the user interrupts, or performs one operation on a host of a running rack.
///
/// # Errors
/// Returns an error if an artifact is missing or a host fails.
pub fn run(args: Args) -> Result<(), Failure> {
    let folder = args.dir.clone().unwrap_or_else(|| root().join(DEFAULT_FOLDER));
    let find = |host: &str| RackHost::find(&folder, host);
    match args.operation {
        None => run_until_interrupted(&args, &folder),
        Some(Operation::Symbiosis(args)) => symbiosis::run(&args, &folder),
        Some(Operation::Tiering(args)) => tiering::run(&args, &folder),
        Some(Operation::Eviction(args)) => eviction::run(&args, &folder),
        Some(Operation::Shell { host }) => shell::run(&find(&host)?),
        Some(Operation::Run { host, command }) => run_command(&find(&host)?, &command.join(" ")),
        Some(Operation::Pause { host }) => Ok(find(&host)?.pause()?),
        Some(Operation::Resume { host }) => Ok(find(&host)?.resume()?),
        Some(Operation::Off { host }) => Ok(find(&host)?.power_off()?),
        Some(Operation::On { host }) => power_on(&find(&host)?),
        Some(Operation::Reboot { host }) => {
            let mut host = find(&host)?;
            host.power_off()?;
            power_on(&host)
        }
        Some(Operation::Link { host, state }) => Ok(find(&host)?.set_link(state == Link::Up)?),
    }
}

/// Powers a host on and waits until the host is up. The process that runs the rack powers the host
/// off at the end.
fn power_on(host: &RackHost) -> Result<(), Failure> {
    host.power_on_detached()?;
    Ok(host.wait_until_up()?)
}

fn run_command(host: &RackHost, command: &str) -> Result<(), Failure> {
    let output = host.run_with_timeout(command, COMMAND_TIMEOUT)?;
    print!("{}", output.text);
    process::exit(output.status)
}

fn run_until_interrupted(args: &Args, folder: &std::path::Path) -> Result<(), Failure> {
    let artifacts = Artifacts::open(&artifacts::ensure_downloaded()?)?;
    let interrupt = Interrupt::new()?;
    let plan = plan(args, &artifacts)?;
    eprintln!("── booting {} hosts; logs are in {}", args.hosts, folder.join("logs").display());
    let start = std::time::Instant::now();
    let rack = Rack::start(&artifacts, plan, folder, || interrupt.should_continue())?;
    println!("the rack is up after {:.0} s\n{}", start.elapsed().as_secs_f64(), usage_text(&rack));
    while interrupt.pause().is_ok() {}
    eprintln!("── stopping the rack");
    Ok(())
}

fn plan(args: &Args, artifacts: &Artifacts) -> Result<RackPlan, Failure> {
    let names = ["pool-manager", "host-agent", "tarn", "power-off-host", "vmm-plugin"];
    let [manager, agent, tarn, power_off, vmm] = build_programs(names)?;
    let device = |n| Device { serial: u64::from(n), gib: args.slices, is_aligned: true };
    let mut hosts = Plan::new(usize::from(args.hosts), (1..=args.devices).map(device).collect());
    hosts.programs = vec![vmm, tarn.clone(), artifacts.tool_path("strace")];
    let backend = args.backend.to_possible_value().expect("every backend has a name");
    Ok(RackPlan::new(hosts, Programs { manager, agent, tarn, power_off }, backend.get_name()))
}

/// Returns a description of the available operations.
fn usage_text(rack: &Rack) -> String {
    let tarn = rack.tarn_script();
    let folder = rack.hosts().folder().display();
    let default_folder = root().join(DEFAULT_FOLDER);
    let dir =
        if rack.hosts().folder() == default_folder { String::new() } else { format!(" --dir {folder}") };
    format!(
        "
  {0} get hosts           control the rack; or get slices, top, doctor, reserve ...
  cargo xtask rack{dir} shell h0            open a shell on a host; Ctrl-] closes the shell
  cargo xtask rack{dir} run h0 -- COMMAND   or pause|resume|off|on|reboot h0, link h0 up|down
  {folder}/memory        memory of the devices, by serial
  {folder}/logs          logs of all processes
  Ctrl-C                               stop the rack and keep only the logs
",
        tarn.display()
    )
}
