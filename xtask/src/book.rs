//! `cargo xtask book`: builds the documentation as a searchable site. The pages are in `docs/`, and
//! `docs/SUMMARY.md` defines their order.

use std::process::Command;

use crate::{failure::Failure, repository::root, step::run_step, tools};

/// Version of mdBook to install.
const MDBOOK_VERSION: &str = "0.5.4";

/// Builds `docs/` into `target/book` and prints the path of its first page.
///
/// # Errors
/// Returns an error if mdBook cannot be installed or rejects a page.
pub fn run() -> Result<(), Failure> {
    let program = tools::ensure_installed("mdbook", MDBOOK_VERSION)?;
    run_step("build the book", Command::new(program).arg("build").current_dir(root()))?;
    println!("{}", root().join("target/book/index.html").display());
    Ok(())
}
