//! Where QEMU, Debian's kernels and a few tools lie once they were fetched: which file is which, and no more.

use std::path::{Path, PathBuf};

use crate::HostError;

/// The environment variable that names the folder to programs.
pub const PLACE: &str = "TARN_GUESTS";
/// The kernels that guests can have.
pub const KERNELS: [&str; 2] = ["6.1", "6.12"];

/// A folder with all that emulated hosts are made of.
#[derive(Clone, Debug)]
pub struct Bed {
    place: PathBuf,
}

impl Bed {
    /// What lies in a folder that `cargo xtask` has filled.
    ///
    /// # Errors
    /// Something is not there.
    pub fn at(place: &Path) -> Result<Self, HostError> {
        let bed = Self { place: place.to_owned() };
        let kernels = KERNELS.map(|name| bed.kernel(name));
        let tools = ["busybox", "cpio", "iasl", "lz4"].map(|name| bed.tool(name));
        match kernels.into_iter().chain(tools).chain([bed.qemu()]).find(|file| !file.exists()) {
            Some(missing) => Err(HostError::Missing(missing)),
            None => Ok(bed),
        }
    }

    /// Where [`PLACE`] says, or where `cargo xtask` puts it.
    ///
    /// # Errors
    /// Something is not there.
    pub fn find() -> Result<Self, HostError> {
        let place = std::env::var_os(PLACE).map(PathBuf::from);
        Self::at(&place.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests")))
    }

    /// A kernel that guests can have, one of [`KERNELS`].
    pub fn kernel(&self, name: &str) -> PathBuf {
        self.place.join(name).join("vmlinuz")
    }

    /// A module of a kernel, if that has it not built in.
    pub fn module(&self, kernel: &str, module: &str) -> Option<PathBuf> {
        let file = self.place.join(kernel).join("modules").join(format!("{module}.ko"));
        file.exists().then_some(file)
    }

    /// QEMU.
    pub fn qemu(&self) -> PathBuf {
        self.qemu_folder().join("qemu-system-x86_64")
    }

    /// QEMU with its libraries and firmware, which runs wherever the folder lies.
    pub(crate) fn qemu_folder(&self) -> PathBuf {
        self.place.join("qemu")
    }

    /// One of `busybox`, `cpio`, `iasl`, `lz4`.
    pub fn tool(&self, name: &str) -> PathBuf {
        self.place.join("tools").join(name)
    }
}
