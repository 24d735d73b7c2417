//! Development tools from the crate registry, installed into `target/tools` in fixed versions. Their
//! use is in the task that needs them.

use std::path::PathBuf;

use crate::{
    failure::Failure,
    repository::{cargo, root},
    step::step,
};

/// Returns the program of a tool. It is installed if it is missing.
///
/// # Errors
/// `cargo install` fails.
pub fn installed(name: &str, version: &str) -> Result<PathBuf, Failure> {
    let folder = root().join("target/tools").join(format!("{name}-{version}"));
    let program = folder.join("bin").join(name);
    if !program.is_file() {
        let mut install = cargo(&["install", "--locked", name, "--version", version, "--root"]);
        step(&format!("install {name} {version}"), install.arg(&folder))?;
    }
    Ok(program)
}
