//! The command `tarn`: words in, exit code out. Everything between is in the library beside it.

use std::process::ExitCode;

use clap::Parser as _;

#[tokio::main]
async fn main() -> ExitCode {
    cli::run(cli::Cli::parse()).await
}
