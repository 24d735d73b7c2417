//! Installs development tools from the crate registry into `target/tools`, in fixed versions.

use std::path::PathBuf;

use crate::{
    failure::Failure,
    repository::{cargo, root},
    step::run_step,
};

/// Returns the path of a tool, and installs the tool if it is missing.
///
/// # Errors
/// Returns an error if `cargo install` fails.
pub fn ensure_installed(name: &str, version: &str) -> Result<PathBuf, Failure> {
    let folder = root().join("target/tools").join(format!("{name}-{version}"));
    let program = folder.join("bin").join(name);
    if !program.is_file() {
        // A build without optimization takes less time than it costs in the short runs of a tool.
        let mut install = cargo(&["install", "--debug", "--locked", name, "--version", version, "--root"]);
        run_step(&format!("install {name} {version}"), install.arg(&folder))?;
    }
    Ok(program)
}
