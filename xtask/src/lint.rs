//! `cargo xtask lint`: formatting, clippy and documentation without warnings, and licences and sources of
//! dependencies. Rules that no tool has are `tidy`'s.

use std::process::Command;

use crate::{
    failure::Failure,
    repository::{cargo, root},
    step::step,
    tools,
};

/// Version of cargo-deny.
const CARGO_DENY: &str = "0.20.2";

/// Runs all four checks up to the first that fails.
///
/// # Errors
/// A check fails, or cargo-deny cannot be installed.
pub fn run() -> Result<(), Failure> {
    step("formatting", &mut cargo(&["fmt", "--all", "--check"]))?;
    step("clippy", &mut cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    let mut docs = cargo(&["doc", "--workspace", "--no-deps", "--document-private-items"]);
    step("documentation", docs.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links"))?;
    let mut deny = Command::new(tools::installed("cargo-deny", CARGO_DENY)?);
    step("dependencies", deny.args(["check", "licenses", "bans", "sources"]).current_dir(root()))
}
