//! Program `power-off-host FOLDER HOST`, which powers off a host of an emulated rack. The section
//! `[fence]` of rack.toml names this program as the fence command. The exit code is 0 only if the
//! host's process has ended.

#![forbid(unsafe_code)]

use std::{path::Path, process::ExitCode};

use emulated_host::{HostError, rack::Power};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, host] = &arguments[..] else {
        eprintln!("usage: power-off-host FOLDER HOST");
        return ExitCode::from(2);
    };
    match power_off(Path::new(folder), host) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
            eprintln!("error: {error}{}", cause.unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}

fn power_off(folder: &Path, host: &str) -> Result<(), HostError> {
    Power::open(folder, host)?.switch_off()
}
