//! Where QEMU, Debian's kernels and a few tools lie once they were fetched: which file is which, and no more.

use std::path::{Path, PathBuf};

use crate::HostError;

/// The environment variable that names the folder to programs.
pub const ARTIFACTS_ENV: &str = "TARN_GUESTS";
/// The kernels that guests can have.
pub const KERNELS: [&str; 2] = ["6.1", "6.12"];

/// A folder with all that emulated hosts are made of.
#[derive(Clone, Debug)]
pub struct Artifacts {
    dir: PathBuf,
}

impl Artifacts {
    /// What lies in a folder that `cargo xtask` has filled.
    ///
    /// # Errors
    /// Something is not there.
    pub fn open(dir: &Path) -> Result<Self, HostError> {
        let artifacts = Self { dir: dir.to_owned() };
        let kernels = KERNELS.map(|name| artifacts.kernel(name));
        let tools = ["busybox", "cpio", "iasl", "lz4"].map(|name| artifacts.tool(name));
        match kernels.into_iter().chain(tools).chain([artifacts.qemu()]).find(|file| !file.exists()) {
            Some(missing) => Err(HostError::Missing(missing)),
            None => Ok(artifacts),
        }
    }

    /// Where [`ARTIFACTS_ENV`] says, or where `cargo xtask` puts it.
    ///
    /// # Errors
    /// Something is not there.
    pub fn locate() -> Result<Self, HostError> {
        let dir = std::env::var_os(ARTIFACTS_ENV).map(PathBuf::from);
        Self::open(&dir.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests")))
    }

    /// A kernel that guests can have, one of [`KERNELS`].
    pub fn kernel(&self, name: &str) -> PathBuf {
        self.dir.join(name).join("vmlinuz")
    }

    /// A module of a kernel, if that has it not built in.
    pub fn module(&self, kernel: &str, module: &str) -> Option<PathBuf> {
        let file = self.dir.join(kernel).join("modules").join(format!("{module}.ko"));
        file.exists().then_some(file)
    }

    /// QEMU.
    pub fn qemu(&self) -> PathBuf {
        self.qemu_folder().join("qemu-system-x86_64")
    }

    /// QEMU with its libraries and firmware, which runs wherever the folder lies.
    pub(crate) fn qemu_folder(&self) -> PathBuf {
        self.dir.join("qemu")
    }

    /// One of `busybox`, `cpio`, `iasl`, `lz4`.
    pub fn tool(&self, name: &str) -> PathBuf {
        self.dir.join("tools").join(name)
    }
}
