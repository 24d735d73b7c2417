//! The command `host-agent`: one per host.

use std::{
    error::Error,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Parser, Subcommand, ValueEnum};
use exposition::logs::LogArgs;
use host_agent::{host::doctor, serve};
use units::chain;

/// How long a VM's record under way may take to be written after a signal. Host calls are not waited for: the next agent
/// finds what they left and goes on.
const STOP_WITHIN: Duration = Duration::from_secs(5);

/// Follows a rack's orders on one host, and hands VMs their memory.
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
    /// Run until SIGTERM. Guests run on.
    Serve {
        /// This host, its manager and where its slices are.
        #[arg(long, env = "TARN_CONFIG", default_value = "/etc/tarn/host.toml")]
        config: PathBuf,
        /// Check host.toml and the files it names, and end.
        #[arg(long)]
        check_config: bool,
    },
    /// Say what is missing, wrong or dangerous on this machine, and what mends it; changes nothing.
    Doctor {
        /// What this machine is to be.
        #[arg(long, env = "TARN_CONFIG", default_value = "/etc/tarn/host.toml")]
        config: PathBuf,
        /// How to print.
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
}

/// How findings are printed.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Format {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
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

fn run(command: Command) -> Result<(), Box<dyn Error>> {
    match command {
        Command::Serve { config, check_config: true } => Ok(serve::check_config(&config)?),
        Command::Serve { config, check_config: false } => {
            // One thread serves requests; long work has threads of its own. The cores are for
            // guests.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let ended = runtime.block_on(serve::serve(&config));
            runtime.shutdown_timeout(STOP_WITHIN);
            Ok(ended?)
        }
        Command::Doctor { config, output } => examine(&config, output),
    }
}

/// Prints the findings; a problem is an error.
fn examine(config: &Path, output: Format) -> Result<(), Box<dyn Error>> {
    let findings = doctor::examine(&doctor::Machine::this(), config);
    let text = match output {
        Format::Text => doctor::text(&findings),
        Format::Json => serde_json::to_string_pretty(&findings)? + "\n",
    };
    io::stdout().write_all(text.as_bytes())?;
    match findings.iter().filter(|finding| !finding.ok).count() {
        0 => Ok(()),
        1 => Err("1 thing is wrong".into()),
        wrong => Err(format!("{wrong} things are wrong").into()),
    }
}
