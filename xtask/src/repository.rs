//! Root of this repository, and cargo with its manifest.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// Returns the root of the repository.
pub fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().expect("xtask is a folder of the repository").to_owned()
}

/// Prefixes of environment variables that cargo sets for this package. A nested cargo would treat
/// them as changes, and rebuild dependents.
const PACKAGE_ENV_PREFIXES: [&str; 4] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_"];

/// Returns a command of the cargo that runs this task, in the root of the repository.
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
