//! Builds an initrd with busybox, kernel modules, and an init script that runs one given script.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use tempfile::TempDir;

use crate::{Artifacts, HostError};

/// Kernel modules of a guest, in load order. Modules that are built into the kernel are skipped.
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

/// Directory in which the dynamic linker searches for libraries.
const LIBRARY_DIR: &str = "/usr/lib/x86_64-linux-gnu";

/// Creates a temporary directory whose name starts with `tarn-host-`.
pub(crate) fn create_temp_dir() -> Result<TempDir, HostError> {
    let folder = tempfile::Builder::new().prefix("tarn-host-").tempdir();
    folder.map_err(HostError::file_error("create a directory in", &std::env::temp_dir()))
}

/// Initrd that is being built in a temporary directory.
#[derive(Debug)]
pub struct Initrd {
    dir: TempDir,
    cpio: PathBuf,
}

impl Initrd {
    /// Creates the initrd of a guest that runs a shell script and then powers off.
    ///
    /// # Errors
    /// [`HostError`] that names the file or program that failed.
    pub fn for_guest(artifacts: &Artifacts, kernel: &str, script: &str) -> Result<Self, HostError> {
        Self::new(artifacts, kernel, GUEST_MODULES, script)
    }

    pub(crate) fn new(
        artifacts: &Artifacts,
        kernel: &str,
        modules: &[&str],
        script: &str,
    ) -> Result<Self, HostError> {
        let initrd = Self { dir: create_temp_dir()?, cpio: artifacts.tool_path("cpio") };
        initrd.add_file_copy(&artifacts.tool_path("busybox"), "bin/busybox")?;
        let mut load_modules = String::new();
        for module in modules {
            if let Some(file) = artifacts.module_path(kernel, module) {
                initrd.add_file_copy(&file, &format!("modules/{module}.ko"))?;
                load_modules +=
                    &format!("insmod /modules/{module}.ko || echo \"module {module} is missing\"\n");
            }
        }
        let init = format!(
            "#!/bin/busybox sh\n/bin/busybox --install -s /bin\nexport PATH=/bin\nmkdir -p /proc /sys /dev /tmp /run\n\
             mount -t proc proc /proc\nmount -t sysfs sys /sys\nmount -t devtmpfs dev /dev\nmkdir -p /dev/shm\n\
             mount -t tmpfs tmp /tmp\nmount -t tmpfs shm /dev/shm\ndmesg -n 1\nifconfig lo up\n{load_modules}{script}\npoweroff -f\n"
        );
        initrd.add_file("init", &init)?;
        Ok(initrd)
    }

    /// Creates the parent directory of a file in the initrd, and returns the path of the file.
    pub(crate) fn prepare_path(&self, name: &str) -> Result<PathBuf, HostError> {
        let path = self.dir.path().join(name);
        let folder = path.parent().unwrap_or(self.dir.path());
        fs::create_dir_all(folder).map_err(HostError::file_error("create", folder))?;
        Ok(path)
    }

    /// Adds an executable file with this content, at the path `name` in the initrd.
    ///
    /// # Errors
    /// [`HostError::File`] if the file cannot be written.
    pub fn add_file(&self, name: &str, content: &str) -> Result<(), HostError> {
        let path = self.prepare_path(name)?;
        fs::write(&path, content).map_err(HostError::file_error("write", &path))?;
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&path, executable).map_err(HostError::file_error("write", &path))
    }

    /// Adds a copy of a file, at the path `name` in the initrd.
    ///
    /// # Errors
    /// [`HostError::File`] if the file cannot be copied.
    pub fn add_file_copy(&self, from: &Path, name: &str) -> Result<(), HostError> {
        fs::copy(from, self.prepare_path(name)?).map(drop).map_err(HostError::file_error("copy", from))
    }

    /// Adds a copy of a directory, at the path `name` in the initrd.
    ///
    /// # Errors
    /// [`HostError::Failed`] if the directory cannot be copied.
    fn add_folder(&self, from: &Path, name: &str) -> Result<(), HostError> {
        run(Command::new("cp")
            .arg("--recursive")
            .arg("--dereference")
            .arg(from)
            .arg(self.prepare_path(name)?))
        .map(drop)
    }

    /// Adds QEMU with its libraries and firmware. Its program is in PATH.
    ///
    /// # Errors
    /// [`HostError`] if the directory cannot be copied.
    pub(crate) fn add_qemu(&self, artifacts: &Artifacts) -> Result<(), HostError> {
        self.add_folder(&artifacts.qemu_folder(), "qemu")?;
        self.add_file("bin/qemu-system-x86_64", "#!/bin/sh\nexec /qemu/qemu-system-x86_64 \"$@\"\n")
    }

    /// Adds a program without debug information, and the libraries that it needs. Prefers libraries
    /// in the directory `lib` beside the program.
    ///
    /// # Errors
    /// [`HostError`] if the program or a library cannot be copied.
    pub fn add_program(&self, from: &Path, name: &str) -> Result<(), HostError> {
        self.add_file_copy(from, name)?;
        // If strip fails, the file is only larger.
        let _ = run(Command::new("strip").arg("--strip-debug").arg(self.prepare_path(name)?));
        let sibling_lib = from.parent().unwrap_or(Path::new("")).join("lib");
        let libraries = run(Command::new("ldd").arg(from).env("LD_LIBRARY_PATH", &sibling_lib))?;
        let mut libraries = libraries.split_whitespace().filter(|word| word.starts_with('/')).map(Path::new);
        libraries.try_for_each(|library| self.add_file_copy(library, &library_path(library, &sibling_lib)))
    }

    /// Writes the initrd to the file `into` as a cpio archive.
    ///
    /// # Errors
    /// [`HostError`] if the archive cannot be written.
    pub fn pack(&self, into: &Path) -> Result<(), HostError> {
        let file = File::create(into).map_err(HostError::file_error("write", into))?;
        let pack = "find . | \"$0\" --create --format=newc --quiet";
        let mut command = Command::new("sh");
        command.args(["-c", pack]).arg(&self.cpio).current_dir(self.dir.path()).stdout(file);
        run(&mut command).map(drop)
    }
}

/// Returns the path of a library in the initrd. Libraries from the directory `sibling_lib` are
/// placed in [`LIBRARY_DIR`]. All other libraries keep their path.
fn library_path(library: &Path, sibling_lib: &Path) -> String {
    let private = library.strip_prefix(sibling_lib).map(|name| Path::new(LIBRARY_DIR).join(name));
    private.unwrap_or_else(|_| library.to_owned()).display().to_string().trim_start_matches('/').to_owned()
}

/// Runs a program, waits until it ends, and returns its standard output.
fn run(command: &mut Command) -> Result<String, HostError> {
    let program = PathBuf::from(command.get_program());
    let output = command.stdin(Stdio::null()).output().map_err(HostError::start_error(&program))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(HostError::Failed {
            program: program.display().to_string(),
            output: String::from_utf8_lossy(&output.stderr).into_owned(),
        }),
    }
}
