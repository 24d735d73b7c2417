//! Programs under test: those of `TARN_BIN_DIR` if it is set, else built by cargo in release mode
//! into the target folder of this benchmark.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::failure::Failure;

/// Environment variable naming a folder with ready-built programs.
const BIN_DIR: &str = "TARN_BIN_DIR";

/// Programs of the services.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `pool-manager`.
    pub pool_manager: PathBuf,
    /// `host-agent`.
    pub host_agent: PathBuf,
}

impl Programs {
    /// Finds or builds the programs.
    ///
    /// # Errors
    /// Cargo fails.
    pub fn find_or_build() -> Result<Self, Failure> {
        let folder = folder_with(&["pool-manager", "host-agent"])?;
        Ok(Self { pool_manager: folder.join("pool-manager"), host_agent: folder.join("host-agent") })
    }
}

/// Finds or builds the VMM.
///
/// # Errors
/// Cargo fails.
pub fn vmm_plugin() -> Result<PathBuf, Failure> {
    Ok(folder_with(&["vmm-plugin"])?.join("vmm-plugin"))
}

/// Finds or builds the programs of a rack of emulated hosts.
///
/// # Errors
/// Cargo fails.
pub fn rack_programs() -> Result<emulated_host::rack::Programs, Failure> {
    let folder = folder_with(&["pool-manager", "host-agent", "cli", "emulated-host"])?;
    Ok(emulated_host::rack::Programs {
        manager: folder.join("pool-manager"),
        agent: folder.join("host-agent"),
        tarn: folder.join("tarn"),
        power_off: folder.join("power-off-host"),
    })
}

/// Returns the folder of the programs of these packages, and builds them if necessary.
fn folder_with(packages: &[&str]) -> Result<PathBuf, Failure> {
    if let Some(folder) = env::var_os(BIN_DIR) {
        return Ok(PathBuf::from(folder));
    }
    let target = target_folder()?;
    build(&target, packages)?;
    Ok(target.join("release"))
}

/// Returns cargo's target folder, which contains this benchmark as `PROFILE/deps/NAME`.
///
/// # Errors
/// The kernel does not report the path of this program.
pub fn target_folder() -> Result<PathBuf, Failure> {
    let test_program = env::current_exe().map_err(Failure::file("find", "/proc/self/exe"))?;
    Ok(test_program.ancestors().nth(3).unwrap_or(Path::new("/")).to_owned())
}

fn build(target: &Path, packages: &[&str]) -> Result<(), Failure> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(&cargo)
        .args(["build", "--release", "--bins"])
        .args(packages.iter().flat_map(|package| ["--package", package]))
        .arg("--manifest-path")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"))
        .env("CARGO_TARGET_DIR", target)
        .stdin(Stdio::null())
        .status()
        .map_err(|source| Failure::Start { program: cargo.into(), source })?;
    if status.success() { Ok(()) } else { Err(Failure::Build { status }) }
}
