//! Location of the programs of a rack.

use std::{
    env, io,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

/// Environment variable with the directory of programs that are built already.
const BIN_DIR: &str = "TARN_BIN_DIR";

/// Error of [`program_dir`].
#[derive(Debug, thiserror::Error)]
pub enum ProgramsError {
    /// The directory of this program is unknown, so cargo's target directory is.
    #[error("cannot find cargo's target directory: this program is not in target/PROFILE/deps")]
    NoTarget,
    /// Cargo cannot be started.
    #[error("cannot start {}", program.display())]
    Start {
        /// Path of cargo.
        program: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// Cargo cannot build the programs.
    #[error("cargo build failed ({status}); its output is above")]
    Build {
        /// Exit status of cargo.
        status: ExitStatus,
    },
}

/// Returns the directory of the programs of these packages: `TARN_BIN_DIR` if it is set, else that of
/// cargo's target directory, where they are built now in the profile of the calling test or benchmark.
///
/// # Errors
/// [`ProgramsError`] if cargo cannot build them.
pub fn program_dir(packages: &[&str]) -> Result<PathBuf, ProgramsError> {
    if let Some(dir) = env::var_os(BIN_DIR) {
        return Ok(dir.into());
    }
    let own = env::current_exe().map_err(|_| ProgramsError::NoTarget)?;
    let deps = own.parent().filter(|dir| dir.ends_with("deps"));
    let profile_dir = deps.and_then(Path::parent).ok_or(ProgramsError::NoTarget)?;
    build(profile_dir, packages)?;
    Ok(profile_dir.to_owned())
}

fn build(profile_dir: &Path, packages: &[&str]) -> Result<(), ProgramsError> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(&cargo);
    command.args(["build", "--quiet", "--bins"]);
    command.args(packages.iter().flat_map(|package| ["--package", package]));
    command.args(profile_dir.ends_with("release").then_some("--release"));
    command.args(["--manifest-path", concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml")]);
    command.env("CARGO_TARGET_DIR", profile_dir.parent().unwrap_or(profile_dir));
    let status = command.stdin(Stdio::null()).status();
    let status = status.map_err(|source| ProgramsError::Start { program: cargo.into(), source })?;
    if status.success() { Ok(()) } else { Err(ProgramsError::Build { status }) }
}
