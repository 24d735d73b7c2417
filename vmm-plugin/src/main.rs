//! The command `vmm-plugin`: launches a guest, asks those that run, and tells other VMMs how to run the same.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use units::chain;
use vmm_plugin::{
    ask, config,
    confine::{self, ConfineError},
    exit, machine, other,
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
    Run(Box<config::Own>),
    #[command(flatten)]
    Ask(ask::Ask),
    /// Print what starts the same guest under another VMM. Nothing is registered: whoever starts it so releases its memory
    /// only after it has ended.
    Args(Box<other::Args>),
    /// Become another VMM that runs the same guest. Its memory goes back when it ends.
    Exec(Box<other::exec::Args>),
}

fn main() -> ExitCode {
    let ran = match Args::parse().command {
        Command::Run(written) => run(*written),
        Command::Ask(ask) => return ask::run(&ask),
        Command::Args(args) => print(*args),
        Command::Exec(args) => exec(*args),
    };
    exit::tidy();
    match ran {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {}", chain(error.as_ref()));
            ExitCode::from(exit::FAILED)
        }
    }
}

fn run(written: config::Own) -> Result<u8, Box<dyn std::error::Error>> {
    exit::when_any_thread_panics();
    let (config, run_dir, confinement) = written.check()?;
    let confinement = match confinement.prepare() {
        Err(error @ ConfineError::StaysRoot) => {
            eprintln!("error: {error}");
            return Ok(exit::USAGE);
        }
        prepared => prepared?,
    };
    confine::open_many_files()?;
    let machine = machine::build(&config, &run_dir, confinement)?;
    Ok(machine::run(machine, &config.console)?)
}

fn exec(args: other::exec::Args) -> Result<u8, Box<dyn std::error::Error>> {
    confine::open_many_files()?;
    match other::exec::exec(args)? {}
}

fn print(args: other::Args) -> Result<u8, Box<dyn std::error::Error>> {
    print!("{}", other::written(args)?);
    Ok(0)
}
