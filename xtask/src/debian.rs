//! Debian packages that a task requires. Missing ones are installed if the user is root, and
//! otherwise reported. Builds require none.

use std::{env, path::Path, process::Command};

use crate::{failure::Failure, step::step};

/// A program and the package that contains it.
#[derive(Clone, Copy, Debug)]
pub struct Requirement {
    /// The program.
    pub program: &'static str,
    /// The package.
    pub package: &'static str,
}

/// Server that the benchmarks compare with.
pub const ETCD: Requirement = Requirement { program: "etcd", package: "etcd-server" };

/// Installs the package if the program is missing.
///
/// # Errors
/// The program is missing and the user is not root, or the installation fails.
pub fn ensure(requirement: Requirement) -> Result<(), Failure> {
    if is_installed(requirement.program) { Ok(()) } else { install(requirement) }
}

/// Installs the package.
///
/// # Errors
/// The user is not root, or the installation fails.
pub fn install(requirement: Requirement) -> Result<(), Failure> {
    let Requirement { program, package } = requirement;
    if !rustix::process::geteuid().is_root() || !is_installed("apt-get") {
        return Err(Failure::Missing { program, package });
    }
    step("package lists", apt().arg("update"))?;
    step(&format!("install {package}"), apt().args(["install", "--yes", "--no-install-recommends", package]))
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
