//! libvirt's schemas of its XML, and the program that checks by them, out of Debian's packages and unpacked into
//! `target/libvirt` once. Nothing is installed, and least of all libvirt's daemon.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use crate::{apt::Apt, failure::Failure, repository::root};

/// Environment variable with this folder, for the test of libvirt's XML.
pub const LIBVIRT: &str = "TARN_LIBVIRT";

const SUITE: &str = "bookworm";
/// The package with the schemas.
const SCHEMAS: &str = "libvirt0";
/// The package with the program.
const XMLLINT: &str = "libxml2-utils";
/// Starts it with the libraries that were unpacked with it, wherever the folder lies.
const START_XMLLINT: &str = "#!/bin/sh\nhere=$(dirname \"$(readlink -f \"$0\")\")\nlibraries=lib/x86_64-linux-gnu\n\
    exec \"$here/$libraries/ld-linux-x86-64.so.2\" --library-path \"$here/$libraries:$here/usr/$libraries\" \
    \"$here/usr/bin/xmllint\" \"$@\"\n";

/// Ensures that both exist, and returns their folder.
///
/// # Errors
/// They cannot be had from here.
pub fn ensure() -> Result<PathBuf, Failure> {
    let place = root().join("target/libvirt");
    let start = place.join("xmllint");
    if !start.exists() {
        fetch(&place)?;
        // Last, so that with it everything is there.
        fs::write(&start, START_XMLLINT).map_err(Failure::file("write", &start))?;
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&start, executable).map_err(Failure::file("write", &start))?;
    }
    Ok(place)
}

fn fetch(place: &Path) -> Result<(), Failure> {
    let _ = fs::remove_dir_all(place); // the existing folder is incomplete
    let apt = Apt::prepare(&place.join("apt"), &[SUITE])?;
    apt.unpack(SUITE, &[SCHEMAS], place)?;
    apt.unpack_with_dependencies(SUITE, XMLLINT, place)?;
    let lists = place.join("apt");
    fs::remove_dir_all(&lists).map_err(Failure::file("remove", &lists))
}
