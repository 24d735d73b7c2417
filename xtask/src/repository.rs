//! Where this repository is, and cargo with its manifest. Knows nothing of what is in it.

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

/// The cargo that runs this task, in the root of the repository.
pub fn cargo(words: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(words).current_dir(root());
    command
}
