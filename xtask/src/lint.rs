//! `cargo xtask lint`: checks formatting, clippy warnings, documentation, and the licences and
//! sources of dependencies. Rules that need a custom check are in `tidy`.

use std::process::Command;

use crate::{
    failure::Failure,
    repository::{cargo, root},
    step::step,
    tools,
};

/// Version of cargo-deny to install.
const CARGO_DENY: &str = "0.20.2";

/// Runs the checks in order and stops at the first failure.
///
/// # Errors
/// Returns an error if a check fails or cargo-deny cannot be installed.
pub fn run() -> Result<(), Failure> {
    step("formatting", &mut cargo(&["fmt", "--all", "--check"]))?;
    step("clippy", &mut cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    let mut docs = cargo(&["doc", "--workspace", "--no-deps", "--document-private-items"]);
    step("documentation", docs.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links"))?;
    let mut deny = Command::new(tools::installed("cargo-deny", CARGO_DENY)?);
    step("dependencies", deny.args(["check", "licenses", "bans", "sources"]).current_dir(root()))
}
