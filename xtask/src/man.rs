//! `cargo xtask man`: writes the manual pages of `tarn`, which `tarn man` generates.

use std::{fs, process::Command};

use crate::{
    failure::Failure,
    repository::root,
    step::{build, step},
};

/// Builds `tarn` and writes its manual pages to `target/man`.
///
/// # Errors
/// Returns an error if the build fails or a page cannot be written.
pub fn run() -> Result<(), Failure> {
    let [tarn] = build(["tarn"])?;
    let pages = root().join("target/man");
    fs::create_dir_all(&pages).map_err(Failure::file("create", &pages))?;
    step("write manual pages", Command::new(tarn).arg("man").arg(&pages))?;
    println!("man -l {}", pages.join("tarn.1").display());
    Ok(())
}
