//! `power-off-host FOLDER HOST`: powers off a host of a rack, for the command of `[fence]` in
//! rack.toml. Exits with 0 only if the host's process has certainly ended.

#![forbid(unsafe_code)]

use std::{path::Path, process::ExitCode};

use emulated_host::{HostError, rack::Power};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, host] = &arguments[..] else {
        eprintln!("usage: power-off-host FOLDER HOST");
        return ExitCode::from(2);
    };
    match off(Path::new(folder), host) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let why = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
            eprintln!("error: {error}{why}");
            ExitCode::FAILURE
        }
    }
}

fn off(folder: &Path, host: &str) -> Result<(), HostError> {
    Power::open(folder, host)?.off()
}
