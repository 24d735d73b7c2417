//! Paths of the files that `cargo xtask` downloads: QEMU, Debian kernels and a few tools.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::HostError;

/// Environment variable with the path of the artifacts directory.
pub const ARTIFACTS_ENV: &str = "TARN_GUESTS";
/// Kernel versions that guests can boot.
pub const KERNELS: [&str; 2] = ["6.1", "6.12"];

/// Directory of the downloaded artifacts, in which all required files exist.
#[derive(Clone, Debug)]
pub struct Artifacts {
    dir: PathBuf,
}

impl Artifacts {
    /// Opens an artifacts directory and checks that all required files exist.
    ///
    /// # Errors
    /// [`HostError::Missing`] naming the first missing file.
    pub fn open(dir: &Path) -> Result<Self, HostError> {
        let artifacts = Self { dir: dir.to_owned() };
        let kernels = KERNELS.map(|name| artifacts.kernel_path(name));
        let tools = ["busybox", "cpio", "iasl", "lz4"].map(|name| artifacts.tool_path(name));
        match kernels.into_iter().chain(tools).chain([artifacts.qemu_path()]).find(|file| !file.exists()) {
            Some(missing) => Err(HostError::Missing(missing)),
            None => Ok(artifacts),
        }
    }

    /// Opens the directory named by [`ARTIFACTS_ENV`], or by default `target/guests`, where `cargo
    /// xtask` stores the artifacts.
    ///
    /// # Errors
    /// The errors of [`Artifacts::open`].
    pub fn locate() -> Result<Self, HostError> {
        let dir = std::env::var_os(ARTIFACTS_ENV).map(PathBuf::from);
        Self::open(&dir.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests")))
    }

    /// Returns the path of the kernel with this version, which is one of [`KERNELS`].
    pub fn kernel_path(&self, name: &str) -> PathBuf {
        self.dir.join(name).join("vmlinuz")
    }

    /// Returns the path of a kernel module, or `None` if the module is built into this kernel.
    pub fn module_path(&self, kernel: &str, module: &str) -> Option<PathBuf> {
        let file = self.dir.join(kernel).join("modules").join(format!("{module}.ko"));
        file.exists().then_some(file)
    }

    /// Returns the path of QEMU's executable.
    pub fn qemu_path(&self) -> PathBuf {
        self.qemu_folder().join("qemu-system-x86_64")
    }

    /// Returns the directory of QEMU with its libraries and firmware. The directory can be copied
    /// to any path.
    pub(crate) fn qemu_folder(&self) -> PathBuf {
        self.dir.join("qemu")
    }

    /// Returns a command that starts Debian's `nbd-server` with the libraries of QEMU. The server is killed when
    /// the calling thread ends.
    pub(crate) fn nbd_server_command(&self) -> Command {
        let libraries = self.qemu_folder().join("lib");
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(libraries.join("ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(libraries).arg(self.tool_path("nbd-server"));
        command
    }

    /// Returns the path of a tool: `busybox`, `cpio`, `iasl` or `lz4`.
    pub fn tool_path(&self, name: &str) -> PathBuf {
        self.dir.join("tools").join(name)
    }
}
