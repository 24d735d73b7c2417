//! The command `host-agent`: one per host.

use std::{io::IsTerminal as _, path::PathBuf, process::ExitCode, time::Duration};

use clap::{Parser, Subcommand};
use host_agent::serve;
use units::chain;

/// How long a VM's record under way may take to be written after a signal. Host calls are not waited for: the next agent
/// finds what they left and goes on.
const STOP_WITHIN: Duration = Duration::from_secs(5);

/// Follows a rack's orders on one host, and hands VMs their memory.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run until SIGTERM. Guests run on.
    Serve {
        /// This host, its manager and where its slices are.
        #[arg(long, env = "TARN_CONFIG", default_value = "/etc/tarn/host.toml")]
        config: PathBuf,
        /// Check host.toml and the files it names, and end.
        #[arg(long)]
        check_config: bool,
    },
}

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    match run(args.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<(), Box<dyn std::error::Error>> {
    match command {
        Command::Serve { config, check_config: true } => Ok(serve::check_config(&config)?),
        Command::Serve { config, check_config: false } => {
            // One thread talks; whatever may take long has threads of its own. The cores are the guests'.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let ended = runtime.block_on(serve::serve(&config));
            runtime.shutdown_timeout(STOP_WITHIN);
            Ok(ended?)
        }
    }
}
