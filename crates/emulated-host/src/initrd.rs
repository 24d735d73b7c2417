//! Builds an initrd: busybox, kernel modules, and an init that runs one script.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use tempfile::TempDir;

use crate::{Artifacts, HostError};

/// Kernel modules of a guest, in load order. A kernel may have some built in.
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

/// Library directory of the dynamic linker.
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// Creates a temporary directory with this project's prefix.
pub(crate) fn folder() -> Result<TempDir, HostError> {
    let made = tempfile::Builder::new().prefix("tarn-host-").tempdir();
    made.map_err(HostError::file("create a directory in", &std::env::temp_dir()))
}

/// An initrd under construction.
#[derive(Debug)]
pub struct Initrd {
    dir: TempDir,
    cpio: PathBuf,
}

impl Initrd {
    /// Creates the initrd of a guest that runs a script and powers off.
    ///
    /// # Errors
    /// [`HostError`] naming the failed file or program.
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

    pub(crate) fn path(&self, name: &str) -> Result<PathBuf, HostError> {
        let path = self.dir.path().join(name);
        let folder = path.parent().unwrap_or(self.dir.path());
        fs::create_dir_all(folder).map_err(HostError::file("create", folder))?;
        Ok(path)
    }

    /// Adds an executable file with this content.
    ///
    /// # Errors
    /// [`HostError::File`] if it cannot be written.
    pub fn write(&self, name: &str, content: &str) -> Result<(), HostError> {
        let path = self.path(name)?;
        fs::write(&path, content).map_err(HostError::file("write", &path))?;
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&path, executable).map_err(HostError::file("write", &path))
    }

    /// Adds a copy of a file.
    ///
    /// # Errors
    /// [`HostError::File`] if it cannot be copied.
    pub fn copy(&self, from: &Path, name: &str) -> Result<(), HostError> {
        fs::copy(from, self.path(name)?).map(drop).map_err(HostError::file("copy", from))
    }

    /// Adds a copy of a directory.
    ///
    /// # Errors
    /// [`HostError::Failed`] if it cannot be copied.
    pub(crate) fn folder(&self, from: &Path, name: &str) -> Result<(), HostError> {
        run(Command::new("cp").arg("--recursive").arg("--dereference").arg(from).arg(self.path(name)?))
            .map(drop)
    }

    /// Adds a program without debug information, and its libraries. Libraries in `lib` beside the
    /// program take precedence.
    ///
    /// # Errors
    /// [`HostError`] if the program or a library cannot be copied.
    pub fn program(&self, from: &Path, name: &str) -> Result<(), HostError> {
        self.copy(from, name)?;
        let _ = run(Command::new("strip").arg("--strip-debug").arg(self.path(name)?)); // if strip fails, the file is only larger
        let beside = from.parent().unwrap_or(Path::new("")).join("lib");
        let libraries = run(Command::new("ldd").arg(from).env("LD_LIBRARY_PATH", &beside))?;
        let mut libraries = libraries.split_whitespace().filter(|word| word.starts_with('/')).map(Path::new);
        libraries.try_for_each(|library| self.copy(library, &library_path(library, &beside)))
    }

    /// Packs the initrd as a cpio archive.
    ///
    /// # Errors
    /// [`HostError`] if the archive cannot be written.
    pub fn pack(&self, into: &Path) -> Result<(), HostError> {
        let file = File::create(into).map_err(HostError::file("write", into))?;
        let pack = "find . | \"$0\" --create --format=newc --quiet";
        let mut command = Command::new("sh");
        command.args(["-c", pack]).arg(&self.cpio).current_dir(self.dir.path()).stdout(file);
        run(&mut command).map(drop)
    }
}

/// Returns a library's path in the initrd: the same path, or the library directory if it comes from
/// beside the program.
fn library_path(library: &Path, beside: &Path) -> String {
    let own = library.strip_prefix(beside).map(|name| Path::new(LIBRARIES).join(name));
    own.unwrap_or_else(|_| library.to_owned()).display().to_string().trim_start_matches('/').to_owned()
}

/// Runs a program to its end and returns its standard output.
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
