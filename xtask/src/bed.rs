//! Artifacts of emulated hosts and their guests: QEMU, two Debian kernels and a few tools, unpacked
//! once into `target/guests`. Nothing is installed on this machine. The crate `emulated-host` uses
//! them.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use emulated_host::{GUEST_MODULES, HOST_MODULES, RACK_MODULES};
use rustix::fs::{FlockOperation, flock};

use crate::{
    apt::{Apt, said},
    failure::Failure,
    repository::root,
};

/// Suite with a QEMU whose emulated processor runs nested guests reliably; 7.2 of Debian 12 does
/// not.
const QEMU_SUITE: &str = "trixie-backports";
const QEMU_PACKAGE: &str = "qemu-system-x86";
/// Where QEMU and its libraries are in their packages.
const QEMU_PROGRAM: &str = "usr/bin/qemu-system-x86_64";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "ld-linux-x86-64.so.2";
/// Firmware of QEMU's machines `q35`, `pc` and `microvm`, and kernel loaders.
const FIRMWARE: &[&str] = &[
    "usr/share/seabios/bios-256k.bin",
    "usr/share/seabios/bios-microvm.bin",
    "usr/share/qemu/linuxboot_dma.bin",
    "usr/share/qemu/kvmvapic.bin",
    "usr/share/qemu/pvh.bin",
];
/// Starts QEMU with the libraries it was built for, wherever the folder lies.
const START_QEMU: &str = "#!/bin/sh\nhere=$(dirname \"$(readlink -f \"$0\")\")\n\
    exec \"$here/lib/ld-linux-x86-64.so.2\" --library-path \"$here/lib\" \"$here/bin\" -L \"$here/share\" \"$@\"\n";

/// Other programs that guests and hosts are made with, each with its package and its place in there.
const TOOLS: &[(&str, &str, &str)] = &[
    ("busybox", "busybox-static", "bin/busybox"),
    ("cpio", "cpio", "bin/cpio"),
    ("iasl", "acpica-tools", "usr/bin/iasl"),
    ("libstdbuf.so", "coreutils", "usr/libexec/coreutils/libstdbuf.so"),
    ("lz4", "lz4", "usr/bin/lz4"),
    ("mbw", "mbw", "usr/bin/mbw"),
    ("memcached", "memcached", "usr/bin/memcached"),
    ("strace", "strace", "usr/bin/strace"),
    ("xz", "xz-utils", "usr/bin/xz"),
];
/// Their dependencies on a bare machine: packages, and the libraries of each.
const TOOLS_LIBRARIES: &[(&str, &[&str])] = &[
    ("libevent-2.1-7", &["libevent-2.1.so.7"]),
    ("libsasl2-2", &["libsasl2.so.2"]),
    ("libssl3", &["libcrypto.so.3", "libssl.so.3"]),
    ("libunwind8", &["libunwind-ptrace.so.0", "libunwind-x86_64.so.8", "libunwind.so.8"]),
];
const TOOLS_SUITE: &str = "bookworm";

/// Kernels of guests: local name, and Debian suite.
const KERNELS: &[(&str, &str)] = &[("6.1", "bookworm"), ("6.12", "bookworm-backports")];
/// The package that always depends on a suite's newest kernel for clouds.
const NEWEST_KERNEL: &str = "linux-image-cloud-amd64";
/// Ensures that all artifacts exist, and returns their folder.
///
/// # Errors
/// Something cannot be had from here.
pub fn ensure() -> Result<PathBuf, Failure> {
    let place = root().join("target/guests");
    let wanted = format!(
        "{QEMU_SUITE} {KERNELS:?} {TOOLS:?} {TOOLS_LIBRARIES:?} {FIRMWARE:?} {HOST_MODULES:?} {RACK_MODULES:?} {GUEST_MODULES:?}\n{START_QEMU}"
    );
    let complete = place.join("complete");
    if fs::read_to_string(&complete).is_ok_and(|kept| kept == wanted) {
        return Ok(place);
    }
    make(&root().join("target"))?;
    let lock = fs::File::create(root().join("target/guests.lock")).map_err(Failure::file("lock", &place))?;
    flock(&lock, FlockOperation::LockExclusive)
        .map_err(|errno| Failure::file("lock", &place)(errno.into()))?;
    if fs::read_to_string(&complete).is_ok_and(|kept| kept == wanted) {
        return Ok(place); // another process has created it
    }
    eprintln!(
        "── emulated hosts need QEMU, kernels and tools from Debian (some 80 MB): into {}",
        place.display()
    );
    let _ = fs::remove_dir_all(&place); // the existing folder is outdated
    let suites = [TOOLS_SUITE, "bookworm-backports", "trixie", QEMU_SUITE];
    let apt = Apt::prepare(&place.join("apt"), &suites)?;
    let unpacked = place.join("unpacked");
    fetch_tools(&apt, &unpacked, &place.join("tools"))?;
    for (name, suite) in KERNELS {
        fetch_kernel(&apt, suite, &unpacked, &place, name)?;
    }
    fetch_qemu(&apt, &unpacked, &place.join("qemu"))?;
    clear(&place.join("apt"))?;
    fs::write(&complete, wanted).map_err(Failure::file("write", &complete))?;
    Ok(place)
}

fn fetch_tools(apt: &Apt, unpacked: &Path, into: &Path) -> Result<(), Failure> {
    make(&into.join("lib"))?;
    let of_libraries = TOOLS_LIBRARIES.iter().map(|(package, _)| *package);
    let packages: Vec<&str> = TOOLS.iter().map(|(_, package, _)| *package).chain(of_libraries).collect();
    apt.unpack(TOOLS_SUITE, &packages, unpacked)?;
    TOOLS.iter().try_for_each(|(name, _, program)| copy(&unpacked.join(program), &into.join(name)))?;
    let library = |name| copy(&unpacked.join(LIBRARIES).join(name), &into.join("lib").join(name));
    TOOLS_LIBRARIES.iter().flat_map(|(_, libraries)| *libraries).try_for_each(library)?;
    clear(unpacked)
}

/// Fetches a suite's newest kernel and keeps the required files.
fn fetch_kernel(apt: &Apt, suite: &str, unpacked: &Path, place: &Path, name: &str) -> Result<(), Failure> {
    let package = apt.first_dependency(suite, NEWEST_KERNEL)?;
    apt.unpack(suite, &[&package], unpacked)?;
    let modules = place.join(name).join("modules");
    make(&modules)?;
    for module in HOST_MODULES.iter().chain(RACK_MODULES).chain(GUEST_MODULES) {
        keep_module(unpacked, module, &modules, &place.join("tools/xz"))?;
    }
    let kernel = find(unpacked, |name| name.starts_with("vmlinuz-"))?
        .ok_or_else(|| Failure::Result(format!("there is no vmlinuz in Debian's {package}")))?;
    copy(&kernel, &place.join(name).join("vmlinuz"))?;
    clear(unpacked)
}

/// A module that the kernel has built in is not there, and not missed.
fn keep_module(unpacked: &Path, module: &str, into: &Path, xz: &Path) -> Result<(), Failure> {
    let names = [format!("{module}.ko"), format!("{module}.ko.xz")];
    let found = find(unpacked, |name| names.iter().any(|known| known == name))?;
    let Some(found) = found else { return Ok(()) };
    let kept = into.join(found.file_name().unwrap_or_default());
    copy(&found, &kept)?;
    if kept.extension().is_some_and(|extension| extension == "xz") {
        said(Command::new(xz).args(["--decompress", "--force"]).arg(&kept))?;
    }
    Ok(())
}

/// QEMU of another Debian, with that one's libraries beside it.
fn fetch_qemu(apt: &Apt, unpacked: &Path, into: &Path) -> Result<(), Failure> {
    apt.unpack_with_dependencies(QEMU_SUITE, QEMU_PACKAGE, unpacked)?;
    let libraries = unpacked.join(LIBRARIES);
    let mut list = Command::new(libraries.join(LOADER));
    list.arg("--library-path").arg(&libraries).arg("--list").arg(unpacked.join(QEMU_PROGRAM));
    let listed = said(&mut list)?;
    for folder in ["lib", "share"] {
        make(&into.join(folder))?;
    }
    // As in `libz.so.1 => /place/libz.so.1 (0x...)`.
    let places = listed.lines().filter_map(|line| Some(line.split_once(" => ")?.1.rsplit_once(" (")?.0));
    for library in places.map(Path::new).chain([&*libraries.join(LOADER)]) {
        copy(library, &into.join("lib").join(library.file_name().unwrap_or_default()))?;
    }
    for firmware in FIRMWARE.iter().map(|name| unpacked.join(name)) {
        copy(&firmware, &into.join("share").join(firmware.file_name().unwrap_or_default()))?;
    }
    copy(&unpacked.join(QEMU_PROGRAM), &into.join("bin"))?;
    let start = into.join("qemu-system-x86_64");
    fs::write(&start, START_QEMU).map_err(Failure::file("write", &start))?;
    fs::set_permissions(&start, fs::Permissions::from_mode(0o755)).map_err(Failure::file("write", &start))?;
    clear(unpacked)
}

fn make(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder).map_err(Failure::file("make", folder))
}

fn clear(folder: &Path) -> Result<(), Failure> {
    fs::remove_dir_all(folder).map_err(Failure::file("remove", folder))
}

fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    fs::copy(from, to).map(drop).map_err(Failure::file("copy", from))
}

/// Returns the first file below a folder with a matching name.
fn find(folder: &Path, is_right: impl Fn(&str) -> bool + Copy) -> Result<Option<PathBuf>, Failure> {
    let entries = fs::read_dir(folder).map_err(Failure::file("read", folder))?;
    for entry in entries.filter_map(Result::ok) {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if let Some(found) = find(&path, is_right)? {
                return Ok(Some(found));
            }
        } else if entry.file_name().to_str().is_some_and(is_right) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}
