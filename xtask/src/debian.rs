//! Programs from Debian that a task needs: installed if missing and allowed, else asked for. The build needs none.

use std::{env, path::Path, process::Command};

use crate::{failure::Failure, step::step};

/// A program and the package that holds it.
#[derive(Clone, Copy, Debug)]
pub struct Needed {
    /// The program.
    pub program: &'static str,
    /// The package.
    pub package: &'static str,
}

/// Packages that benchmarks compare with. Packages of emulated hosts are unpacked by `bed`.
pub const FOR_BENCH: Needed = Needed { program: "etcd", package: "etcd-server" };

/// Sees to it that the program is there.
///
/// # Errors
/// It is missing and this user may not install it, or installing fails.
pub fn ensure(needed: Needed) -> Result<(), Failure> {
    if installed(needed.program) { Ok(()) } else { install(needed) }
}

/// Installs its package.
///
/// # Errors
/// This user may not, or it fails.
pub fn install(needed: Needed) -> Result<(), Failure> {
    let Needed { program, package } = needed;
    if !rustix::process::geteuid().is_root() || !installed("apt-get") {
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

fn installed(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).chain([Path::new("/usr/sbin").to_owned()]).any(|dir| dir.join(program).is_file())
}
