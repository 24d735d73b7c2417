//! Root of this repository, and cargo with its manifest.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// The folder that holds everything.
pub fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().expect("xtask lies in the repository").to_owned()
}

/// Environment variables that cargo sets for the task's own package. A nested cargo would treat
/// them as changes, and rebuild dependents.
const OF_THIS_PACKAGE: [&str; 4] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_"];

/// The cargo that runs this task, in the root of the repository.
pub fn cargo(words: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        if OF_THIS_PACKAGE.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command.args(words).current_dir(root());
    command
}
