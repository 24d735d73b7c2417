//! Command line of `host-agent`, the agent that runs on each host.

use std::{
    error::Error,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Parser, Subcommand, ValueEnum};
use exposition::logs::LogArgs;
use host_agent::{doctor, serve};
use units::chain;

/// Time limit, after a signal, for the completion of pending writes of VM records. Host calls in
/// progress are abandoned; the next agent completes them.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Applies the desired state of a rack on one host, and passes memory to VMs.
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
    /// Run until SIGTERM. Guests keep running.
    Serve {
        /// Configuration of this host.
        #[arg(long, env = "TARN_CONFIG", default_value = "/etc/tarn/host.toml")]
        config: PathBuf,
        /// Check host.toml and the files named in it, and exit.
        #[arg(long)]
        check_config: bool,
    },
    /// Report missing, wrong or dangerous settings of this machine, with fixes, without changing
    /// any.
    Doctor {
        /// Configuration of this host.
        #[arg(long, env = "TARN_CONFIG", default_value = "/etc/tarn/host.toml")]
        config: PathBuf,
        /// Output format.
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
}

/// Output format of findings.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Format {
    /// Text for people.
    #[default]
    Text,
    /// JSON for programs.
    Json,
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

fn run(command: Command) -> Result<(), Box<dyn Error>> {
    match command {
        Command::Serve { config, check_config: true } => Ok(serve::check_config(&config)?),
        Command::Serve { config, check_config: false } => {
            // One thread serves all requests, so that processors are left to guests. Long work has
            // separate threads.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let result = runtime.block_on(serve::serve(&config));
            runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
            Ok(result?)
        }
        Command::Doctor { config, output } => examine_host(&config, output),
    }
}

/// Runs the doctor and prints its findings.
///
/// # Errors
/// A check found a problem, or standard output cannot be written.
fn examine_host(config: &Path, output: Format) -> Result<(), Box<dyn Error>> {
    let findings = doctor::examine_host(&doctor::Machine::this(), config);
    let text = match output {
        Format::Text => doctor::format_findings(&findings),
        Format::Json => serde_json::to_string_pretty(&findings)? + "\n",
    };
    io::stdout().write_all(text.as_bytes())?;
    match findings.iter().filter(|finding| !finding.ok).count() {
        0 => Ok(()),
        1 => Err("1 problem found".into()),
        count => Err(format!("{count} problems found").into()),
    }
}
