//! The command `vmm-plugin`: launches a guest, and asks those that run.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use units::chain;
use vmm_plugin::{ask, config, confine, exit, machine};

/// Launches Linux guests under KVM whose pool memory is a NUMA node without cores.
///
/// Exit codes of `run`: 0 the guest switched itself off, 1 nothing was started, 2 wrong usage, 10 the guest asked for a
/// reset, 11 it crashed, 12 it did not switch itself off and was stopped, 20 a slice was taken away under it, 21 the host
/// had no memory left, 30 the VMM itself tried what it never needs. Those of the other commands: 0 done, 1 error, 2 wrong
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
    Run(Box<config::Written>),
    #[command(flatten)]
    Ask(ask::Ask),
}

fn main() -> ExitCode {
    let written = match Args::parse().command {
        Command::Run(written) => written,
        Command::Ask(ask) => return ask::run(&ask),
    };
    let ran = run(*written);
    exit::tidy();
    match ran {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {}", chain(error.as_ref()));
            ExitCode::from(exit::FAILED)
        }
    }
}

fn run(written: config::Written) -> Result<u8, Box<dyn std::error::Error>> {
    exit::when_any_thread_panics();
    let config = written.check()?;
    confine::open_many_files()?;
    let machine = machine::build(&config)?;
    Ok(machine::run(machine, &config.console)?)
}
