//! Entry point of the command `tarn`, which is implemented in the library `cli`.

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    cli::run(std::env::args_os().collect()).await
}
