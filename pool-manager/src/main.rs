//! Command line of `pool-manager`. One manager runs per rack.

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use exposition::logs::LogArgs;
use pool_manager::{offline, serve};
use units::chain;

/// Memory allocator; faster than the system allocator for the page-sized buffers of durable writes.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Assigns slices of a rack's CXL memory to hosts, and records the owner of each slice.
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
    /// Create a new rack: its store, its UUID, and tokens of hosts and clients.
    Init {
        #[command(flatten)]
        rack: RackArg,
    },
    /// Run the manager until SIGTERM. SIGHUP reloads rack.toml.
    Serve {
        #[command(flatten)]
        rack: RackArg,
        /// Check rack.toml and exit.
        #[arg(long)]
        check_config: bool,
    },
    /// Check rack.toml and the whole store without changes.
    Check {
        #[command(flatten)]
        rack: RackArg,
    },
    /// Copy the store into a file. The manager must be stopped, unless the store is in etcd.
    Backup {
        #[command(flatten)]
        rack: RackArg,
        /// Backup file to create; must not exist.
        #[arg(long)]
        to: PathBuf,
    },
    /// Let another manager take over from the leader. The leader completes its requests first. Requires a store in
    /// etcd.
    Transfer {
        #[command(flatten)]
        rack: RackArg,
        /// Name of the manager that must take over [default: the first standby].
        #[arg(long)]
        to: Option<String>,
    },
    /// Restore the store from a backup. Every slice is quarantined until its hosts have reported
    /// their state.
    Restore {
        #[command(flatten)]
        rack: RackArg,
        /// Backup file written by `backup`
        #[arg(long)]
        from: PathBuf,
        /// Rename the existing store, and create a new store in its place.
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, clap::Args)]
struct RackArg {
    /// Configuration of the rack, its hosts and its EMCs.
    #[arg(long = "config", env = "TARN_CONFIG", default_value = "/etc/tarn/rack.toml")]
    config: PathBuf,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let started = args.log.start().map_err(|error| format!("RUST_LOG: {error}").into());
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
            // Leave one core for the ledger's thread, which is busy at the same time as the
            // workers.
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let workers = cores.saturating_sub(1).max(1);
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            let runtime = runtime.worker_threads(workers).enable_all().build()?;
            let result = runtime.block_on(serve::serve(rack.config));
            runtime.shutdown_timeout(serve::STOP_TIMEOUT); // a blocking search in the audit log may still run
            result?;
        }
        Command::Init { rack } => offline::init(&rack.config)?,
        Command::Check { rack } => offline::check(&rack.config)?,
        Command::Backup { rack, to } => offline::backup(&rack.config, &to)?,
        Command::Transfer { rack, to } => offline::transfer(&rack.config, to.as_deref())?,
        Command::Restore { rack, from, force } => offline::restore(&rack.config, &from, force)?,
    }
    Ok(())
}
