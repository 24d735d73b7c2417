//! `cargo xtask book`: builds the documentation as a site with search. The pages are in `docs/`,
//! their order in `docs/SUMMARY.md`.

use std::process::Command;

use crate::{failure::Failure, repository::root, step::step, tools};

/// Version of mdBook.
const VERSION: &str = "0.5.4";

/// Builds `docs/` into `target/book` and prints the path of its first page.
///
/// # Errors
/// mdBook cannot be installed, or rejects a page.
pub fn run() -> Result<(), Failure> {
    let program = tools::installed("mdbook", VERSION)?;
    step("book", Command::new(program).arg("build").current_dir(root()))?;
    println!("{}", root().join("target/book/index.html").display());
    Ok(())
}
