//! The command `vmm-plugin`: parses the command line and runs, controls or exports guests.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use units::chain;
use vmm_plugin::{
    config,
    confine::{self, ConfineError},
    control_client, exit, machine, vmm_backends,
};

/// Launches Linux guests under KVM whose pool memory is a CPU-less NUMA node.
///
/// Exit codes of `run`: 0 the guest powered off, 1 error before the guest started or in the VMM, 2
/// usage error, 10 the guest requested a reset, 11 the guest crashed, 12 the guest was stopped, 20
/// a slice was revoked, 21 host memory exhausted, 22 uncorrectable memory error, 30 forbidden
/// system call in the VMM. Exit codes of the other commands: 0 success, 1 error, 2 usage error, 3
/// VM not running, 4 not possible in the VM's state, 6 unavailable, 124 timeout.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a guest until it ends. SIGTERM presses the guest's power button, and a second SIGTERM
    /// stops the guest
    Run(Box<config::RunArgs>),
    #[command(flatten)]
    Control(control_client::ControlCommand),
    /// Print the arguments that start the same guest under another VMM. The guest is not registered
    /// with the agent, so release the guest's memory only after the guest has ended
    Args(Box<vmm_backends::PrintArgs>),
    /// Replace this process by another VMM that runs the same guest. The guest's memory is released
    /// when that VMM ends
    Exec(Box<vmm_backends::exec::ExecArgs>),
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Run(args) => run(*args),
        Command::Control(command) => return control_client::run(&command),
        Command::Args(args) => print(*args),
        Command::Exec(args) => exec(*args),
    };
    exit::restore_terminal_settings();
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {}", chain(error.as_ref()));
            ExitCode::from(exit::FAILED)
        }
    }
}

fn run(args: config::RunArgs) -> Result<u8, Box<dyn std::error::Error>> {
    exit::install_panic_hook();
    let (config, run_dir, confinement) = args.check()?;
    let confinement = match confinement.prepare() {
        Err(error @ ConfineError::MissingUser) => {
            eprintln!("error: {error}");
            return Ok(exit::USAGE_ERROR);
        }
        prepared => prepared?,
    };
    confine::raise_file_limit()?;
    let machine = machine::build(&config, &run_dir, confinement)?;
    Ok(machine::run(machine, &config)?)
}

fn exec(args: vmm_backends::exec::ExecArgs) -> Result<u8, Box<dyn std::error::Error>> {
    confine::raise_file_limit()?;
    match vmm_backends::exec::exec(args)? {}
}

fn print(args: vmm_backends::PrintArgs) -> Result<u8, Box<dyn std::error::Error>> {
    print!("{}", vmm_backends::render(args)?);
    Ok(0)
}
