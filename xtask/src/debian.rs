//! Debian packages that a task requires. If the user is root, missing packages are installed.
//! Otherwise, the task fails with the names of the missing packages. Builds do not require Debian
//! packages.

use std::{env, path::Path, process::Command};

use crate::{failure::Failure, step::run_step};

/// Required program and the Debian package that contains this program.
#[derive(Clone, Copy, Debug)]
pub struct PackageRequirement {
    /// Name of the program.
    pub program: &'static str,
    /// Name of the Debian package.
    pub package: &'static str,
}

/// Compiler of the driver for ns-3, the packet simulator.
pub const CXX: PackageRequirement = PackageRequirement { program: "g++", package: "g++" };

/// Installs the package of a requirement if the program is missing.
///
/// # Errors
/// Returns an error if the program is missing and the user is not root, or if the installation
/// fails.
pub fn ensure_installed(requirement: PackageRequirement) -> Result<(), Failure> {
    if is_installed(requirement.program) { Ok(()) } else { install(requirement) }
}

/// Installs the package of a requirement.
///
/// # Errors
/// Returns [`Failure::Missing`] if the user is not root, or an error if the installation fails.
pub fn install(requirement: PackageRequirement) -> Result<(), Failure> {
    let PackageRequirement { program, package } = requirement;
    if !rustix::process::geteuid().is_root() || !is_installed("apt-get") {
        return Err(Failure::Missing { program, package });
    }
    run_step("update package lists", apt().arg("update"))?;
    run_step(
        &format!("install {package}"),
        apt().args(["install", "--yes", "--no-install-recommends", package]),
    )
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command.arg("--quiet").env("DEBIAN_FRONTEND", "noninteractive");
    command
}

fn is_installed(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).chain([Path::new("/usr/sbin").to_owned()]).any(|dir| dir.join(program).is_file())
}
