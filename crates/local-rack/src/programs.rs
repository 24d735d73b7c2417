//! Lookup of the programs of a rack; builds them with cargo if necessary.

use std::{
    env, io,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

/// Environment variable with the directory of prebuilt programs.
const BIN_DIR_ENV: &str = "TARN_BIN_DIR";

/// Error of [`program_dir`].
#[derive(Debug, thiserror::Error)]
pub enum ProgramsError {
    /// Cargo's target directory cannot be derived from the path of this program.
    #[error("cannot find cargo's target directory: this program is not in target/PROFILE/deps")]
    NoTargetDir,
    /// Cargo cannot be started.
    #[error("cannot start {}", program.display())]
    Start {
        /// Path of cargo.
        program: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Cargo failed to build the programs.
    #[error("cargo build failed ({status}); its output is above")]
    Build {
        /// Exit status of cargo.
        status: ExitStatus,
    },
}

/// Returns the directory that contains the programs of `packages`. If `TARN_BIN_DIR` is set, this
/// is its value. Otherwise, cargo first builds the programs in the profile of the calling test or
/// benchmark.
///
/// # Errors
/// [`ProgramsError`] if cargo's target directory is not found or the build fails.
pub fn program_dir(packages: &[&str]) -> Result<PathBuf, ProgramsError> {
    if let Some(dir) = env::var_os(BIN_DIR_ENV) {
        return Ok(dir.into());
    }
    let test_program = env::current_exe().map_err(|_| ProgramsError::NoTargetDir)?;
    let deps = test_program.parent().filter(|dir| dir.ends_with("deps"));
    let profile_dir = deps.and_then(Path::parent).ok_or(ProgramsError::NoTargetDir)?;
    build_programs(profile_dir, packages)?;
    Ok(profile_dir.to_owned())
}

fn build_programs(profile_dir: &Path, packages: &[&str]) -> Result<(), ProgramsError> {
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
