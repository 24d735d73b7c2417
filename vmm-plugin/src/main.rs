//! The command `vmm-plugin`: launches a guest, asks those that run, and tells other VMMs how to run the same.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use units::chain;
use vmm_plugin::{
    config,
    confine::{self, ConfineError},
    control_client, exit, machine, vmm_backends,
};

/// Launches Linux guests under KVM whose pool memory is a NUMA node without cores.
///
/// Exit codes of `run`: 0 the guest switched itself off, 1 nothing was started, 2 wrong usage, 10 the guest asked for a
/// reset, 11 it crashed, 12 it did not switch itself off and was stopped, 20 a slice was taken away under it, 21 the host
/// had no memory left, 22 its memory is broken, 30 the VMM itself tried what it never needs. Those of the other commands: 0 done, 1 error, 2 wrong
/// usage, 3 no such VM runs here, 4 its state does not allow this, 6 it cannot answer now, 124 timed out.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a guest until it ends. SIGTERM asks it to switch itself off; a second one stops it.
    Run(Box<config::RunArgs>),
    #[command(flatten)]
    Control(control_client::ControlCommand),
    /// Print what starts the same guest under another VMM. Nothing is registered: whoever starts it so releases its memory
    /// only after it has ended.
    Args(Box<vmm_backends::PrintArgs>),
    /// Become another VMM that runs the same guest. Its memory goes back when it ends.
    Exec(Box<vmm_backends::exec::ExecArgs>),
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Run(args) => run(*args),
        Command::Control(command) => return control_client::run(&command),
        Command::Args(args) => print(*args),
        Command::Exec(args) => exec(*args),
    };
    exit::restore_terminal();
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
            return Ok(exit::USAGE);
        }
        prepared => prepared?,
    };
    confine::raise_file_limit()?;
    let machine = machine::build(&config, &run_dir, confinement)?;
    Ok(machine::run(machine, &config.console)?)
}

fn exec(args: vmm_backends::exec::ExecArgs) -> Result<u8, Box<dyn std::error::Error>> {
    confine::raise_file_limit()?;
    match vmm_backends::exec::exec(args)? {}
}

fn print(args: vmm_backends::PrintArgs) -> Result<u8, Box<dyn std::error::Error>> {
    print!("{}", vmm_backends::render(args)?);
    Ok(0)
}
