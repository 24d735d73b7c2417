//! `cargo xtask man`: writes the manual pages of `tarn`, which `tarn man` generates.

use std::{fs, process::Command};

use crate::{
    failure::Failure,
    repository::root,
    step::{build_programs, run_step},
};

/// Builds `tarn` and writes its manual pages to `target/man`.
///
/// # Errors
/// Returns an error if the build fails or a page cannot be written.
pub fn run() -> Result<(), Failure> {
    let [tarn] = build_programs(["tarn"])?;
    let pages = root().join("target/man");
    fs::create_dir_all(&pages).map_err(Failure::file_error("create", &pages))?;
    run_step("write manual pages", Command::new(tarn).arg("man").arg(&pages))?;
    println!("man -l {}", pages.join("tarn.1").display());
    Ok(())
}
