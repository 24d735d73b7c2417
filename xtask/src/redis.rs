//! Downloads Redis from Debian into `target/redis`, for the tests and benchmarks of the cache server. No package is
//! installed on this machine.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use crate::{apt::Apt, failure::Failure, repository::root};

/// Environment variable that passes the folder to tests and benchmarks.
pub const FOLDER_ENV: &str = "TARN_REDIS";

const REDIS_SUITE: &str = "bookworm";
/// Debian package with all programs. The server is the same file as redis-check-rdb, under another name.
const REDIS_PACKAGE: &str = "redis-tools";
/// Programs: name, and name of the file in the package.
const PROGRAMS: [(&str, &str); 3] =
    [("redis-cli", "redis-cli"), ("redis-benchmark", "redis-benchmark"), ("redis-server", "redis-check-rdb")];

/// Returns the folder with the programs of Redis, and downloads them if they are missing.
///
/// # Errors
/// Returns an error if a package cannot be downloaded or unpacked.
pub fn ensure_downloaded() -> Result<PathBuf, Failure> {
    let folder = root().join("target/redis");
    let is_complete = PROGRAMS.iter().all(|(name, _)| folder.join(name).exists());
    if !is_complete {
        download(&folder)?;
        // The launchers are written last because their existence marks the folder as complete.
        PROGRAMS.iter().try_for_each(|(name, file)| write_launcher(&folder, name, file))?;
    }
    Ok(folder)
}

fn download(folder: &Path) -> Result<(), Failure> {
    let _ = fs::remove_dir_all(folder); // an existing folder is incomplete
    let apt = Apt::prepare(&folder.join("apt"), &[REDIS_SUITE])?;
    apt.unpack_with_dependencies(REDIS_SUITE, REDIS_PACKAGE, folder)?;
    let apt_dir = folder.join("apt");
    fs::remove_dir_all(&apt_dir).map_err(Failure::file_error("remove", &apt_dir))
}

/// Writes a shell script that starts a program with the libraries in the same folder, wherever this folder is.
fn write_launcher(folder: &Path, name: &str, file: &str) -> Result<(), Failure> {
    let script = format!(
        "#!/bin/sh\nhere=$(dirname \"$(readlink -f \"$0\")\")\nlibraries=lib/x86_64-linux-gnu\n\
         exec \"$here/$libraries/ld-linux-x86-64.so.2\" --library-path \"$here/$libraries:$here/usr/$libraries\" \
         --argv0 {name} \"$here/usr/bin/{file}\" \"$@\"\n"
    );
    let path = folder.join(name);
    fs::write(&path, script).map_err(Failure::file_error("write", &path))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).map_err(Failure::file_error("write", &path))
}
