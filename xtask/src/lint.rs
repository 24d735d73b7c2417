//! `cargo xtask lint`: formatting, clippy and documentation without warnings, and the licences of
//! dependencies.
//! The rules that no tool knows are `tidy`'s.

use crate::{failure::Failure, licences, repository::cargo, step::step};

/// Runs all four; the first that complains ends it.
///
/// # Errors
/// One complains.
pub fn run() -> Result<(), Failure> {
    step("formatting", &mut cargo(&["fmt", "--all", "--check"]))?;
    step("clippy", &mut cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    let mut docs = cargo(&["doc", "--workspace", "--no-deps", "--document-private-items"]);
    step("documentation", docs.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links"))?;
    licences::run()
}
