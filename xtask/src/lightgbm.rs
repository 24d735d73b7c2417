//! Python virtual environment with LightGBM in `target/lightgbm`, for the benchmarks that compare
//! predictions with LightGBM. The versions of the packages are fixed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{
    debian::{self, PackageRequirement},
    failure::Failure,
    repository::root,
    step::run_step,
};

/// Environment variable that passes the folder to the benchmarks.
pub const FOLDER_ENV: &str = "TARN_LIGHTGBM";
const PYTHON_PACKAGES: [&str; 2] = ["lightgbm==4.7.0", "numpy==2.4.6"];

/// Returns the folder of the virtual environment, and creates the environment if it is missing or
/// outdated.
///
/// # Errors
/// Returns an error if Python or a package cannot be installed.
pub fn ensure_installed() -> Result<PathBuf, Failure> {
    let folder = root().join("target/lightgbm");
    let marker = folder.join("whole");
    let packages = PYTHON_PACKAGES.join("\n");
    if fs::read_to_string(&marker).ok().as_ref() != Some(&packages) {
        let _ = fs::remove_dir_all(&folder); // an existing folder is incomplete or outdated
        create_venv(&folder)?;
        fs::write(&marker, packages).map_err(Failure::file_error("write", &marker))?;
    }
    Ok(folder)
}

fn create_venv(folder: &Path) -> Result<(), Failure> {
    if !can_run_python(Path::new("python3"), "import ensurepip") {
        debian::install(PackageRequirement { program: "python3", package: "python3-venv" })?;
    }
    let mut venv = Command::new("python3");
    run_step("create Python virtual environment", venv.args(["-m", "venv"]).arg(folder))?;
    let mut pip = Command::new(folder.join("bin/pip"));
    run_step(
        &format!("install {}", PYTHON_PACKAGES.join(", ")),
        pip.args(["install", "--quiet"]).args(PYTHON_PACKAGES),
    )?;
    if !can_run_python(&folder.join("bin/python"), "import lightgbm") {
        debian::install(PackageRequirement { program: "libgomp.so.1", package: "libgomp1" })?;
    }
    Ok(())
}

/// Returns whether a Python interpreter runs a statement without an error.
fn can_run_python(python: &Path, statement: &str) -> bool {
    let null = || Stdio::null();
    let status = Command::new(python).args(["-c", statement]).stdout(null()).stderr(null()).status();
    status.is_ok_and(|status| status.success())
}
