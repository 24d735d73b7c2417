//! Paths of the fetched artifacts: QEMU, Debian's kernels and a few tools. `cargo xtask` fetches
//! them.

use std::path::{Path, PathBuf};

use crate::HostError;

/// Environment variable with the artifacts' directory.
pub const ARTIFACTS_ENV: &str = "TARN_GUESTS";
/// Kernel versions available to guests.
pub const KERNELS: [&str; 2] = ["6.1", "6.12"];

/// Directory of the artifacts.
#[derive(Clone, Debug)]
pub struct Artifacts {
    dir: PathBuf,
}

impl Artifacts {
    /// Opens a directory that `cargo xtask` has filled.
    ///
    /// # Errors
    /// [`HostError::Missing`] naming the first missing file.
    pub fn open(dir: &Path) -> Result<Self, HostError> {
        let artifacts = Self { dir: dir.to_owned() };
        let kernels = KERNELS.map(|name| artifacts.kernel(name));
        let tools = ["busybox", "cpio", "iasl", "lz4"].map(|name| artifacts.tool(name));
        match kernels.into_iter().chain(tools).chain([artifacts.qemu()]).find(|file| !file.exists()) {
            Some(missing) => Err(HostError::Missing(missing)),
            None => Ok(artifacts),
        }
    }

    /// Opens the directory in [`ARTIFACTS_ENV`], or the one that `cargo xtask` fills.
    ///
    /// # Errors
    /// As [`Artifacts::open`].
    pub fn locate() -> Result<Self, HostError> {
        let dir = std::env::var_os(ARTIFACTS_ENV).map(PathBuf::from);
        Self::open(&dir.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests")))
    }

    /// Returns the path of a kernel, one of [`KERNELS`].
    pub fn kernel(&self, name: &str) -> PathBuf {
        self.dir.join(name).join("vmlinuz")
    }

    /// Returns the path of a kernel's module; `None` if it is built in.
    pub fn module(&self, kernel: &str, module: &str) -> Option<PathBuf> {
        let file = self.dir.join(kernel).join("modules").join(format!("{module}.ko"));
        file.exists().then_some(file)
    }

    /// Returns the path of QEMU's executable.
    pub fn qemu(&self) -> PathBuf {
        self.qemu_folder().join("qemu-system-x86_64")
    }

    /// Returns QEMU's directory with libraries and firmware, which is relocatable.
    pub(crate) fn qemu_folder(&self) -> PathBuf {
        self.dir.join("qemu")
    }

    /// Returns the path of a tool: `busybox`, `cpio`, `iasl` or `lz4`.
    pub fn tool(&self, name: &str) -> PathBuf {
        self.dir.join("tools").join(name)
    }
}
