//! Downloads the XML schemas of libvirt and the validator xmllint from Debian into
//! `target/libvirt`. No package is installed on this machine.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use crate::{apt::Apt, failure::Failure, repository::root};

/// Environment variable that passes the folder to the test of libvirt XML.
pub const FOLDER_ENV: &str = "TARN_LIBVIRT";

const LIBVIRT_SUITE: &str = "bookworm";
/// Debian package with the XML schemas.
const SCHEMAS_PACKAGE: &str = "libvirt0";
/// Debian package with xmllint.
const XMLLINT_PACKAGE: &str = "libxml2-utils";
/// Shell script that starts xmllint with the libraries in the same folder, wherever this folder is.
const XMLLINT_LAUNCHER: &str = "#!/bin/sh\nhere=$(dirname \"$(readlink -f \"$0\")\")\nlibraries=lib/x86_64-linux-gnu\n\
    exec \"$here/$libraries/ld-linux-x86-64.so.2\" --library-path \"$here/$libraries:$here/usr/$libraries\" \
    \"$here/usr/bin/xmllint\" \"$@\"\n";

/// Returns the folder with the schemas and xmllint, and downloads both if they are missing.
///
/// # Errors
/// Returns an error if a package cannot be downloaded or unpacked.
pub fn ensure_downloaded() -> Result<PathBuf, Failure> {
    let folder = root().join("target/libvirt");
    let launcher = folder.join("xmllint");
    if !launcher.exists() {
        download(&folder)?;
        // The launcher is written last because its existence marks the folder as complete.
        fs::write(&launcher, XMLLINT_LAUNCHER).map_err(Failure::file_error("write", &launcher))?;
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&launcher, executable).map_err(Failure::file_error("write", &launcher))?;
    }
    Ok(folder)
}

fn download(folder: &Path) -> Result<(), Failure> {
    let _ = fs::remove_dir_all(folder); // an existing folder is incomplete
    let apt = Apt::prepare(&folder.join("apt"), &[LIBVIRT_SUITE])?;
    apt.unpack_packages(LIBVIRT_SUITE, &[SCHEMAS_PACKAGE], folder)?;
    apt.unpack_with_dependencies(LIBVIRT_SUITE, XMLLINT_PACKAGE, folder)?;
    let apt_dir = folder.join("apt");
    fs::remove_dir_all(&apt_dir).map_err(Failure::file_error("remove", &apt_dir))
}
