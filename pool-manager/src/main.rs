//! The command `pool-manager`: one per rack.

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use exposition::logs::LogArgs;
use pool_manager::{offline, serve};
use units::chain;

/// A durable write allocates and frees many page-sized buffers, and every request some of its own.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Lends a rack's CXL memory to its hosts, slice by slice, and remembers who has what.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    log: LogArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a new rack: its store, its uuid and its hosts' tokens.
    Init {
        #[command(flatten)]
        rack: RackArg,
    },
    /// Run until SIGTERM; SIGHUP reads rack.toml again.
    Serve {
        #[command(flatten)]
        rack: RackArg,
        /// Check rack.toml and end.
        #[arg(long)]
        check_config: bool,
    },
    /// Check rack.toml and the whole store, without changing anything.
    Check {
        #[command(flatten)]
        rack: RackArg,
    },
    /// Copy the store into a file.
    Backup {
        #[command(flatten)]
        rack: RackArg,
        /// Must not exist.
        #[arg(long)]
        to: PathBuf,
    },
    /// Make the store from a backup. Every slice is quarantined until its hosts have reported.
    Restore {
        #[command(flatten)]
        rack: RackArg,
        /// File written by `backup`
        #[arg(long)]
        from: PathBuf,
        /// Even if there is a store.
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, clap::Args)]
struct RackArg {
    /// The rack, its hosts and its EMCs.
    #[arg(long = "config", env = "TARN_CONFIG", default_value = "/etc/tarn/rack.toml")]
    config: PathBuf,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let started = args.log.start().map_err(|wrong| format!("RUST_LOG: {wrong}").into());
    match started.and_then(|()| run(args.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<(), Box<dyn std::error::Error>> {
    match command {
        Command::Serve { rack, check_config: true } => offline::check_config(&rack.config)?,
        Command::Serve { rack, check_config: false } => {
            // The ledger has a thread of its own, which is busy when the others are.
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let workers = cores.saturating_sub(1).max(1);
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            let runtime = runtime.worker_threads(workers).enable_all().build()?;
            let served = runtime.block_on(serve::serve(rack.config));
            runtime.shutdown_timeout(serve::STOP_WITHIN); // a search of decisions may still run
            served?;
        }
        Command::Init { rack } => offline::init(&rack.config)?,
        Command::Check { rack } => offline::check(&rack.config)?,
        Command::Backup { rack, to } => offline::backup(&rack.config, &to)?,
        Command::Restore { rack, from, force } => offline::restore(&rack.config, &from, force)?,
    }
    Ok(())
}
