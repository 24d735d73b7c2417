//! Downloads the artifacts of emulated hosts and guests into `target/guests`: QEMU, two Debian
//! kernels and some tools. No package is installed on this machine. The crate `emulated-host` uses
//! the artifacts.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use emulated_host::{GUEST_MODULES, HOST_MODULES, RACK_MODULES};
use rustix::fs::{FlockOperation, flock};

use crate::{
    apt::{Apt, capture_output},
    failure::Failure,
    repository::root,
};

/// Debian suite of QEMU. QEMU 7.2 of Debian 12 does not run nested guests reliably.
const QEMU_SUITE: &str = "trixie-backports";
const QEMU_PACKAGE: &str = "qemu-system-x86";
/// Path of QEMU in its package.
const QEMU_PROGRAM: &str = "usr/bin/qemu-system-x86_64";
/// Folder of shared libraries in Debian packages.
const LIBRARY_DIR: &str = "usr/lib/x86_64-linux-gnu";
const DYNAMIC_LOADER: &str = "ld-linux-x86-64.so.2";
/// Firmware files and kernel loaders for the QEMU machines `q35`, `pc` and `microvm`.
const FIRMWARE_FILES: &[&str] = &[
    "usr/share/seabios/bios-256k.bin",
    "usr/share/seabios/bios-microvm.bin",
    "usr/share/qemu/linuxboot_dma.bin",
    "usr/share/qemu/kvmvapic.bin",
    "usr/share/qemu/pvh.bin",
];
/// Shell script that starts QEMU with the libraries in the same folder, wherever this folder is.
const QEMU_LAUNCHER: &str = "#!/bin/sh\nhere=$(dirname \"$(readlink -f \"$0\")\")\n\
    exec \"$here/lib/ld-linux-x86-64.so.2\" --library-path \"$here/lib\" \"$here/bin\" -L \"$here/share\" \"$@\"\n";

/// Programs for guests and hosts: local name, package, and path in the package.
const TOOLS: &[(&str, &str, &str)] = &[
    ("busybox", "busybox-static", "bin/busybox"),
    // BusyBox has a program named sort.
    ("coreutils-sort", "coreutils", "usr/bin/sort"),
    ("cpio", "cpio", "bin/cpio"),
    ("iasl", "acpica-tools", "usr/bin/iasl"),
    ("libstdbuf.so", "coreutils", "usr/libexec/coreutils/libstdbuf.so"),
    ("lz4", "lz4", "usr/bin/lz4"),
    ("mbw", "mbw", "usr/bin/mbw"),
    ("memcached", "memcached", "usr/bin/memcached"),
    // Runs with the libraries of QEMU.
    ("nbd-server", "nbd-server", "bin/nbd-server"),
    ("strace", "strace", "usr/bin/strace"),
    ("xz", "xz-utils", "usr/bin/xz"),
];
/// Libraries that [`TOOLS`] need: package, and names of the libraries.
const TOOL_LIBRARIES: &[(&str, &[&str])] = &[
    ("libevent-2.1-7", &["libevent-2.1.so.7"]),
    ("libsasl2-2", &["libsasl2.so.2"]),
    ("libssl3", &["libcrypto.so.3", "libssl.so.3"]),
    ("libunwind8", &["libunwind-ptrace.so.0", "libunwind-x86_64.so.8", "libunwind.so.8"]),
];
const TOOLS_SUITE: &str = "bookworm";

/// Kernels of guests: local name and Debian suite.
const KERNELS: &[(&str, &str)] = &[("6.1", "bookworm"), ("6.12", "bookworm-backports")];
/// Metapackage that depends on the newest cloud kernel of a suite.
const NEWEST_KERNEL: &str = "linux-image-cloud-amd64";

/// Returns the folder of the artifacts, and downloads the artifacts if they are missing or
/// outdated.
///
/// # Errors
/// Returns an error if a package cannot be downloaded or unpacked.
pub fn ensure_downloaded() -> Result<PathBuf, Failure> {
    let folder = root().join("target/guests");
    let expected_marker = format!(
        "{QEMU_SUITE} {KERNELS:?} {TOOLS:?} {TOOL_LIBRARIES:?} {FIRMWARE_FILES:?} {HOST_MODULES:?} {RACK_MODULES:?} {GUEST_MODULES:?}\n{QEMU_LAUNCHER}"
    );
    let marker = folder.join("complete");
    if fs::read_to_string(&marker).is_ok_and(|recorded| recorded == expected_marker) {
        return Ok(folder);
    }
    create_folder(&root().join("target"))?;
    let lock =
        fs::File::create(root().join("target/guests.lock")).map_err(Failure::file_error("lock", &folder))?;
    flock(&lock, FlockOperation::LockExclusive)
        .map_err(|errno| Failure::file_error("lock", &folder)(errno.into()))?;
    if fs::read_to_string(&marker).is_ok_and(|recorded| recorded == expected_marker) {
        return Ok(folder); // another process has created the folder in the meantime
    }
    eprintln!(
        "── downloading QEMU, kernels and tools for emulated hosts from Debian (about 80 MB) into {}",
        folder.display()
    );
    let _ = fs::remove_dir_all(&folder); // an existing folder is outdated
    let suites = [TOOLS_SUITE, "bookworm-backports", "trixie", QEMU_SUITE];
    let apt = Apt::prepare(&folder.join("apt"), &suites)?;
    let unpacked = folder.join("unpacked");
    download_tools(&apt, &unpacked, &folder.join("tools"))?;
    for (name, suite) in KERNELS {
        download_kernel(&apt, suite, &unpacked, &folder, name)?;
    }
    download_qemu(&apt, &unpacked, &folder.join("qemu"))?;
    remove_folder(&folder.join("apt"))?;
    fs::write(&marker, expected_marker).map_err(Failure::file_error("write", &marker))?;
    Ok(folder)
}

fn download_tools(apt: &Apt, unpacked: &Path, into: &Path) -> Result<(), Failure> {
    create_folder(&into.join("lib"))?;
    let library_packages = TOOL_LIBRARIES.iter().map(|(package, _)| *package);
    let packages: Vec<&str> = TOOLS.iter().map(|(_, package, _)| *package).chain(library_packages).collect();
    apt.unpack_packages(TOOLS_SUITE, &packages, unpacked)?;
    TOOLS.iter().try_for_each(|(name, _, program)| copy(&unpacked.join(program), &into.join(name)))?;
    let library = |name| copy(&unpacked.join(LIBRARY_DIR).join(name), &into.join("lib").join(name));
    TOOL_LIBRARIES.iter().flat_map(|(_, libraries)| *libraries).try_for_each(library)?;
    remove_folder(unpacked)
}

/// Downloads the newest kernel of a Debian suite, and keeps only the required files.
fn download_kernel(
    apt: &Apt,
    suite: &str,
    unpacked: &Path,
    folder: &Path,
    name: &str,
) -> Result<(), Failure> {
    let package = apt.first_dependency(suite, NEWEST_KERNEL)?;
    apt.unpack_packages(suite, &[&package], unpacked)?;
    let modules = folder.join(name).join("modules");
    create_folder(&modules)?;
    for module in HOST_MODULES.iter().chain(RACK_MODULES).chain(GUEST_MODULES) {
        copy_module(unpacked, module, &modules, &folder.join("tools/xz"))?;
    }
    let kernel = find_file(unpacked, |name| name.starts_with("vmlinuz-"))?
        .ok_or_else(|| Failure::BadResult(format!("no vmlinuz in the Debian package {package}")))?;
    copy(&kernel, &folder.join(name).join("vmlinuz"))?;
    remove_folder(unpacked)
}

/// Copies and decompresses a kernel module. A module built into the kernel has no file and is
/// skipped.
fn copy_module(unpacked: &Path, module: &str, into: &Path, xz: &Path) -> Result<(), Failure> {
    let names = [format!("{module}.ko"), format!("{module}.ko.xz")];
    let source = find_file(unpacked, |name| names.iter().any(|expected| expected == name))?;
    let Some(source) = source else { return Ok(()) };
    let target = into.join(source.file_name().unwrap_or_default());
    copy(&source, &target)?;
    if target.extension().is_some_and(|extension| extension == "xz") {
        capture_output(Command::new(xz).args(["--decompress", "--force"]).arg(&target))?;
    }
    Ok(())
}

/// Downloads QEMU from another Debian release, together with the libraries of this release.
fn download_qemu(apt: &Apt, unpacked: &Path, into: &Path) -> Result<(), Failure> {
    apt.unpack_with_dependencies(QEMU_SUITE, QEMU_PACKAGE, unpacked)?;
    let libraries = unpacked.join(LIBRARY_DIR);
    let mut list = Command::new(libraries.join(DYNAMIC_LOADER));
    list.arg("--library-path").arg(&libraries).arg("--list").arg(unpacked.join(QEMU_PROGRAM));
    let libraries_list = capture_output(&mut list)?;
    for folder in ["lib", "share"] {
        create_folder(&into.join(folder))?;
    }
    // Format of a line: `libz.so.1 => /path/libz.so.1 (0x...)`.
    let paths =
        libraries_list.lines().filter_map(|line| Some(line.split_once(" => ")?.1.rsplit_once(" (")?.0));
    for library in paths.map(Path::new).chain([&*libraries.join(DYNAMIC_LOADER)]) {
        copy(library, &into.join("lib").join(library.file_name().unwrap_or_default()))?;
    }
    for firmware in FIRMWARE_FILES.iter().map(|name| unpacked.join(name)) {
        copy(&firmware, &into.join("share").join(firmware.file_name().unwrap_or_default()))?;
    }
    copy(&unpacked.join(QEMU_PROGRAM), &into.join("bin"))?;
    let start = into.join("qemu-system-x86_64");
    fs::write(&start, QEMU_LAUNCHER).map_err(Failure::file_error("write", &start))?;
    fs::set_permissions(&start, fs::Permissions::from_mode(0o755))
        .map_err(Failure::file_error("write", &start))?;
    remove_folder(unpacked)
}

fn create_folder(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder).map_err(Failure::file_error("create", folder))
}

fn remove_folder(folder: &Path) -> Result<(), Failure> {
    fs::remove_dir_all(folder).map_err(Failure::file_error("remove", folder))
}

fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    fs::copy(from, to).map(drop).map_err(Failure::file_error("copy", from))
}

/// Returns the first file with a matching name in a folder and its subfolders.
fn find_file(folder: &Path, matches_name: impl Fn(&str) -> bool + Copy) -> Result<Option<PathBuf>, Failure> {
    let entries = fs::read_dir(folder).map_err(Failure::file_error("read", folder))?;
    for entry in entries.filter_map(Result::ok) {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if let Some(source) = find_file(&path, matches_name)? {
                return Ok(Some(source));
            }
        } else if entry.file_name().to_str().is_some_and(matches_name) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}
