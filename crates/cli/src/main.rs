//! The command `tarn`: words in, exit code out. Everything between is in the library beside it.

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    cli::run(std::env::args_os().collect()).await
}
