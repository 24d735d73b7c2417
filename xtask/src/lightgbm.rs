//! Python with LightGBM, in `target/lightgbm`, for comparisons with predictions. Created once, from
//! packages of fixed versions.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{
    debian::{self, Needed},
    failure::Failure,
    repository::root,
    step::step,
};

/// Names the folder to the benchmark.
pub const PLACE: &str = "TARN_LIGHTGBM";
const PACKAGES: [&str; 2] = ["lightgbm==4.7.0", "numpy==2.4.6"];

/// Ensures that it exists, and returns its path.
///
/// # Errors
/// It cannot be had from here.
pub fn ensure() -> Result<PathBuf, Failure> {
    let place = root().join("target/lightgbm");
    let whole = place.join("whole");
    let packages = PACKAGES.join("\n");
    if fs::read_to_string(&whole).ok().as_ref() != Some(&packages) {
        let _ = fs::remove_dir_all(&place); // the existing folder is incomplete
        make(&place)?;
        fs::write(&whole, packages).map_err(Failure::file("write", &whole))?;
    }
    Ok(place)
}

fn make(place: &Path) -> Result<(), Failure> {
    if !says_yes(Path::new("python3"), "import ensurepip") {
        debian::install(Needed { program: "python3", package: "python3-venv" })?;
    }
    let mut venv = Command::new("python3");
    step("a Python of its own", venv.args(["-m", "venv"]).arg(place))?;
    let mut pip = Command::new(place.join("bin/pip"));
    step(&format!("fetch {}", PACKAGES.join(", ")), pip.args(["install", "--quiet"]).args(PACKAGES))?;
    if !says_yes(&place.join("bin/python"), "import lightgbm") {
        debian::install(Needed { program: "libgomp.so.1", package: "libgomp1" })?;
    }
    Ok(())
}

/// Whether a Python can do something.
fn says_yes(python: &Path, what: &str) -> bool {
    let quiet = || Stdio::null();
    let status = Command::new(python).args(["-c", what]).stdout(quiet()).stderr(quiet()).status();
    status.is_ok_and(|status| status.success())
}
