//! Downloads Valgrind from Debian into `target/valgrind`, with a C library whose debug symbols Valgrind needs. No
//! package is installed on this machine.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use crate::{apt::Apt, failure::Failure, repository::root};

/// Environment variable that passes the folder to the test of the C interface.
pub const FOLDER_ENV: &str = "TARN_VALGRIND";

const SUITE: &str = "bookworm";
/// Debian package that depends on the C library and its debug symbols.
const PACKAGE: &str = "valgrind";
/// Folder of the dynamic loader and the C library. Programs that Valgrind runs must use these.
const LIBRARY_DIR: &str = "lib/x86_64-linux-gnu";
/// Folder with one folder of debug symbols for each first byte of a build ID.
const DEBUG_DIR: &str = "usr/lib/debug/.build-id";
/// Shell script that starts Valgrind with the tools in the same folder, wherever this folder is.
const LAUNCHER: &str = "#!/bin/sh\nhere=$(dirname \"$(readlink -f \"$0\")\")\n\
    VALGRIND_LIB=\"$here/usr/libexec/valgrind\" exec \"$here/usr/bin/valgrind.bin\" \"$@\"\n";

/// Returns the folder with Valgrind, and downloads Valgrind if it is missing.
///
/// # Errors
/// Returns an error if a package cannot be downloaded or unpacked.
pub fn ensure_downloaded() -> Result<PathBuf, Failure> {
    let folder = root().join("target/valgrind");
    let launcher = folder.join("valgrind");
    if !launcher.exists() {
        download(&folder)?;
        // The launcher is written last because its existence marks the folder as complete.
        fs::write(&launcher, LAUNCHER).map_err(Failure::file_error("write", &launcher))?;
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&launcher, executable).map_err(Failure::file_error("write", &launcher))?;
    }
    Ok(folder)
}

fn download(folder: &Path) -> Result<(), Failure> {
    let _ = fs::remove_dir_all(folder); // an existing folder is incomplete
    let apt = Apt::prepare(&folder.join("apt"), &[SUITE])?;
    apt.unpack_with_dependencies(SUITE, PACKAGE, folder)?;
    move_debug_symbols(&folder.join(DEBUG_DIR), &folder.join(LIBRARY_DIR).join(".debug"))?;
    let apt_dir = folder.join("apt");
    fs::remove_dir_all(&apt_dir).map_err(Failure::file_error("remove", &apt_dir))
}

/// Moves debug symbols beside the libraries, where Valgrind finds them. Valgrind searches the original folder only
/// in the root of the file system.
fn move_debug_symbols(from: &Path, to: &Path) -> Result<(), Failure> {
    fs::create_dir_all(to).map_err(Failure::file_error("create", to))?;
    for folder in read_folder(from)? {
        for file in read_folder(&folder)? {
            let target = to.join(file.file_name().unwrap_or_default());
            fs::rename(&file, &target).map_err(Failure::file_error("move", &file))?;
        }
    }
    Ok(())
}

fn read_folder(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = fs::read_dir(folder).map_err(Failure::file_error("read", folder))?;
    Ok(entries.filter_map(Result::ok).map(|entry| entry.path()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_symbols_are_moved_beside_the_libraries() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("debug"), folder.path().join("lib/.debug"));
        for name in ["01/ab.debug", "ff/cd.debug"] {
            fs::create_dir_all(from.join(name).parent().unwrap()).unwrap();
            fs::write(from.join(name), name).unwrap();
        }
        move_debug_symbols(&from, &to).unwrap();
        let texts = ["ab.debug", "cd.debug"].map(|name| fs::read_to_string(to.join(name)).unwrap());
        assert_eq!(texts, ["01/ab.debug", "ff/cd.debug"]);
    }
}
