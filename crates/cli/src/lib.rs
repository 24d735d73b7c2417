//! The command line of Tarn, as a library so that tests and packaging can hold it: the words people type, the calls they
//! become, and how answers and refusals are printed. It decides nothing that a service decides.
#![forbid(unsafe_code)]

mod args;
mod connect;
mod failure;
mod hint;

use std::process::ExitCode;

pub use args::{Cli, Command, Format, Global};
pub use connect::Connection;
pub use failure::{Exit, Failure};

/// Every word that `tarn` understands, for manual pages and completions.
pub fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// Does what was asked and says how it went, on stdout and stderr and as the exit code.
pub async fn run(cli: Cli) -> ExitCode {
    let format = cli.global.output;
    match dispatch(cli).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(format),
    }
}

async fn dispatch(_cli: Cli) -> Result<(), Failure> {
    Ok(())
}
