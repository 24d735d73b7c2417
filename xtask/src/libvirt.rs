//! The XML schemas of libvirt, and xmllint to validate documents against them, unpacked once from
//! Debian packages into `target/libvirt`. Nothing is installed.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use crate::{apt::Apt, failure::Failure, repository::root};

/// Environment variable with this folder, for the test of libvirt's XML.
pub const FOLDER_ENV: &str = "TARN_LIBVIRT";

const SUITE: &str = "bookworm";
/// The package with the schemas.
const SCHEMAS: &str = "libvirt0";
/// The package with xmllint.
const XMLLINT: &str = "libxml2-utils";
/// Starts xmllint with its own libraries, independent of the location of the folder.
const XMLLINT_LAUNCHER: &str = "#!/bin/sh\nhere=$(dirname \"$(readlink -f \"$0\")\")\nlibraries=lib/x86_64-linux-gnu\n\
    exec \"$here/$libraries/ld-linux-x86-64.so.2\" --library-path \"$here/$libraries:$here/usr/$libraries\" \
    \"$here/usr/bin/xmllint\" \"$@\"\n";

/// Ensures that both exist, and returns their folder.
///
/// # Errors
/// A package cannot be fetched or unpacked.
pub fn ensure() -> Result<PathBuf, Failure> {
    let folder = root().join("target/libvirt");
    let launcher = folder.join("xmllint");
    if !launcher.exists() {
        fetch(&folder)?;
        // Written last: it marks the folder as complete.
        fs::write(&launcher, XMLLINT_LAUNCHER).map_err(Failure::file("write", &launcher))?;
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&launcher, executable).map_err(Failure::file("write", &launcher))?;
    }
    Ok(folder)
}

fn fetch(folder: &Path) -> Result<(), Failure> {
    let _ = fs::remove_dir_all(folder); // the existing folder is incomplete
    let apt = Apt::prepare(&folder.join("apt"), &[SUITE])?;
    apt.unpack(SUITE, &[SCHEMAS], folder)?;
    apt.unpack_with_dependencies(SUITE, XMLLINT, folder)?;
    let lists = folder.join("apt");
    fs::remove_dir_all(&lists).map_err(Failure::file("remove", &lists))
}
