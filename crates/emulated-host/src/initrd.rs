//! A file system in memory: busybox, modules of a kernel, and one script that is all there is to do.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use tempfile::TempDir;

use crate::{Artifacts, HostError};

/// The modules that a guest loads, in order; a kernel may have some of them built in.
pub const GUEST_MODULES: &[&str] = &[
    "virtio_ring",
    "virtio",
    "virtio_mmio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "virtio-rng",
    "failover",
    "net_failover",
    "virtio_net",
    "button",
    "evdev",
];

/// Where programs look for libraries.
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// A folder whose name says whose it is.
pub(crate) fn folder() -> Result<TempDir, HostError> {
    let made = tempfile::Builder::new().prefix("tarn-host-").tempdir();
    made.map_err(HostError::file("make a folder in", &std::env::temp_dir()))
}

/// A file system, under way.
#[derive(Debug)]
pub struct Initrd {
    dir: TempDir,
    cpio: PathBuf,
}

impl Initrd {
    /// Of a guest that does what a script says, and switches itself off.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn for_guest(artifacts: &Artifacts, kernel: &str, script: &str) -> Result<Self, HostError> {
        Self::new(artifacts, kernel, GUEST_MODULES, script)
    }

    pub(crate) fn new(
        artifacts: &Artifacts,
        kernel: &str,
        modules: &[&str],
        script: &str,
    ) -> Result<Self, HostError> {
        let initrd = Self { dir: folder()?, cpio: artifacts.tool("cpio") };
        initrd.copy(&artifacts.tool("busybox"), "bin/busybox")?;
        let mut load = String::new();
        for module in modules {
            if let Some(file) = artifacts.module(kernel, module) {
                initrd.copy(&file, &format!("modules/{module}.ko"))?;
                load += &format!("insmod /modules/{module}.ko || echo \"module {module} is missing\"\n");
            }
        }
        let init = format!(
            "#!/bin/busybox sh\n/bin/busybox --install -s /bin\nexport PATH=/bin\nmkdir -p /proc /sys /dev /tmp /run\n\
             mount -t proc proc /proc\nmount -t sysfs sys /sys\nmount -t devtmpfs dev /dev\nmkdir -p /dev/shm\n\
             mount -t tmpfs tmp /tmp\nmount -t tmpfs shm /dev/shm\ndmesg -n 1\nifconfig lo up\n{load}{script}\npoweroff -f\n"
        );
        initrd.write("init", &init)?;
        Ok(initrd)
    }

    pub(crate) fn place(&self, name: &str) -> Result<PathBuf, HostError> {
        let place = self.dir.path().join(name);
        let folder = place.parent().unwrap_or(self.dir.path());
        fs::create_dir_all(folder).map_err(HostError::file("make", folder))?;
        Ok(place)
    }

    /// Adds a text, which may be run.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, name: &str, content: &str) -> Result<(), HostError> {
        let place = self.place(name)?;
        fs::write(&place, content).map_err(HostError::file("write", &place))?;
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&place, executable).map_err(HostError::file("write", &place))
    }

    /// Adds a file.
    ///
    /// # Errors
    /// It cannot be copied.
    pub fn copy(&self, from: &Path, name: &str) -> Result<(), HostError> {
        fs::copy(from, self.place(name)?).map(drop).map_err(HostError::file("copy", from))
    }

    /// Adds a folder with all that is in it.
    ///
    /// # Errors
    /// It cannot be copied.
    pub(crate) fn folder(&self, from: &Path, name: &str) -> Result<(), HostError> {
        run(Command::new("cp").arg("--recursive").arg("--dereference").arg(from).arg(self.place(name)?))
            .map(drop)
    }

    /// Adds a program, without what only a debugger reads, and the libraries it wants; those in a folder `lib` beside it first.
    ///
    /// # Errors
    /// There is no such program.
    pub fn program(&self, from: &Path, name: &str) -> Result<(), HostError> {
        self.copy(from, name)?;
        let _ = run(Command::new("strip").arg("--strip-debug").arg(self.place(name)?)); // without, it is larger
        let beside = from.parent().unwrap_or(Path::new("")).join("lib");
        let libraries = run(Command::new("ldd").arg(from).env("LD_LIBRARY_PATH", &beside))?;
        let mut libraries = libraries.split_whitespace().filter(|word| word.starts_with('/')).map(Path::new);
        libraries.try_for_each(|library| self.copy(library, &place_of(library, &beside)))
    }

    /// Packs it.
    ///
    /// # Errors
    /// It cannot be packed.
    pub fn pack(&self, into: &Path) -> Result<(), HostError> {
        let file = File::create(into).map_err(HostError::file("write", into))?;
        let pack = "find . | \"$0\" --create --format=newc --quiet";
        let mut command = Command::new("sh");
        command.args(["-c", pack]).arg(&self.cpio).current_dir(self.dir.path()).stdout(file);
        run(&mut command).map(drop)
    }
}

/// Where a library is looked for: where it is here, or where all are, for one that came beside its program.
fn place_of(library: &Path, beside: &Path) -> String {
    let own = library.strip_prefix(beside).map(|name| Path::new(LIBRARIES).join(name));
    own.unwrap_or_else(|_| library.to_owned()).display().to_string().trim_start_matches('/').to_owned()
}

/// Runs a program to its end; what it said, unless that goes elsewhere.
fn run(command: &mut Command) -> Result<String, HostError> {
    let program = PathBuf::from(command.get_program());
    let output = command.stdin(Stdio::null()).output().map_err(HostError::start(&program))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(HostError::Failed {
            program: program.display().to_string(),
            output: String::from_utf8_lossy(&output.stderr).into_owned(),
        }),
    }
}
