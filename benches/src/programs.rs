//! Programs under test, found or built by [`program_dir`].

use std::{
    env,
    path::{Path, PathBuf},
};

use local_rack::program_dir;

use crate::failure::Failure;

/// Paths of the service programs.
#[derive(Clone, Debug)]
pub struct Programs {
    /// Path of `pool-manager`.
    pub pool_manager: PathBuf,
    /// Path of `host-agent`.
    pub host_agent: PathBuf,
}

impl Programs {
    /// Returns the paths of the programs. Builds them with cargo if necessary.
    ///
    /// # Errors
    /// [`Failure`] if cargo fails.
    pub fn find_or_build() -> Result<Self, Failure> {
        let folder = program_dir(&["pool-manager", "host-agent"])?;
        Ok(Self { pool_manager: folder.join("pool-manager"), host_agent: folder.join("host-agent") })
    }
}

/// Returns the path of `vmm-plugin`. Builds it with cargo if necessary.
///
/// # Errors
/// [`Failure`] if cargo fails.
pub fn vmm_plugin() -> Result<PathBuf, Failure> {
    Ok(program_dir(&["vmm-plugin"])?.join("vmm-plugin"))
}

/// Returns the paths of the programs for a rack of emulated hosts. Builds them with cargo if
/// necessary.
///
/// # Errors
/// [`Failure`] if cargo fails.
pub fn rack_programs() -> Result<emulated_host::rack::Programs, Failure> {
    let folder = program_dir(&["pool-manager", "host-agent", "cli", "emulated-host"])?;
    Ok(emulated_host::rack::Programs {
        manager: folder.join("pool-manager"),
        agent: folder.join("host-agent"),
        tarn: folder.join("tarn"),
        power_off: folder.join("power-off-host"),
    })
}

/// Returns the path of cargo's target folder, which contains this program as `PROFILE/deps/NAME`.
///
/// # Errors
/// [`Failure`] if the kernel does not report the path of this program.
pub fn target_folder() -> Result<PathBuf, Failure> {
    let test_program = env::current_exe().map_err(Failure::file_error("find", "/proc/self/exe"))?;
    Ok(test_program.ancestors().nth(3).unwrap_or(Path::new("/")).to_owned())
}
