//! Downloads etcd from Debian into `target/etcd`, for the tests and benchmarks of the store in etcd. No package is
//! installed on this machine.

use std::{fs, path::PathBuf};

use crate::{apt::Apt, failure::Failure, repository::root};

/// Environment variable that passes the folder to tests and benchmarks.
pub const FOLDER_ENV: &str = "TARN_ETCD";

const SUITE: &str = "bookworm";
const PACKAGE: &str = "etcd-server";
const PROGRAM: &str = "usr/bin/etcd";

/// Returns the folder with etcd, and downloads etcd if it is missing.
///
/// # Errors
/// Returns an error if the package cannot be downloaded or unpacked.
pub fn ensure_downloaded() -> Result<PathBuf, Failure> {
    let folder = root().join("target/etcd");
    let program = folder.join("etcd");
    if !program.exists() {
        let _ = fs::remove_dir_all(&folder); // an existing folder is incomplete
        let (apt_dir, unpacked) = (folder.join("apt"), folder.join("unpacked"));
        Apt::prepare(&apt_dir, &[SUITE])?.unpack_packages(SUITE, &[PACKAGE], &unpacked)?;
        // Its existence marks the folder as complete.
        fs::rename(unpacked.join(PROGRAM), &program).map_err(Failure::file_error("move", &program))?;
        for unneeded in [apt_dir, unpacked] {
            fs::remove_dir_all(&unneeded).map_err(Failure::file_error("remove", &unneeded))?;
        }
    }
    Ok(folder)
}
