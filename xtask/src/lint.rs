//! `cargo xtask lint`: checks formatting, clippy warnings, documentation, and the licences and
//! sources of dependencies. Rules that need a custom check are in `tidy`.

use std::process::Command;

use crate::{
    failure::Failure,
    repository::{cargo, root},
    step::run_step,
    tools,
};

/// Version of cargo-deny to install.
const CARGO_DENY_VERSION: &str = "0.20.2";

/// Runs the checks in order and stops at the first failure.
///
/// # Errors
/// Returns an error if a check fails or cargo-deny cannot be installed.
pub fn run() -> Result<(), Failure> {
    run_step("formatting", &mut cargo(&["fmt", "--all", "--check"]))?;
    run_step("clippy", &mut cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    let mut docs = cargo(&["doc", "--workspace", "--no-deps", "--document-private-items"]);
    run_step("documentation", docs.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links"))?;
    let mut deny = Command::new(tools::ensure_installed("cargo-deny", CARGO_DENY_VERSION)?);
    run_step("dependencies", deny.args(["check", "licenses", "bans", "sources"]).current_dir(root()))
}
