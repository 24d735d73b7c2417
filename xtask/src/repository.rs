//! Path of the repository, and cargo commands in this repository.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// Returns the path of the root of the repository.
pub fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().expect("xtask is a folder of the repository").to_owned()
}

/// Prefixes of environment variables that cargo sets for xtask. A nested cargo does not get these
/// variables, because changes of the variables would make cargo rebuild packages.
const PACKAGE_ENV_PREFIXES: [&str; 4] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_"];

/// Returns a cargo command that runs in the root of the repository, with the same cargo as this
/// task.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        if PACKAGE_ENV_PREFIXES.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command.args(arguments).current_dir(root());
    command
}
