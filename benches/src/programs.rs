//! Programs under test, found or built by [`program_dir`].

use std::{
    env,
    path::{Path, PathBuf},
};

use local_rack::program_dir;

use crate::failure::Failure;

/// Programs of the services.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `pool-manager`.
    pub pool_manager: PathBuf,
    /// `host-agent`.
    pub host_agent: PathBuf,
}

impl Programs {
    /// Finds or builds the programs.
    ///
    /// # Errors
    /// Cargo fails.
    pub fn find_or_build() -> Result<Self, Failure> {
        let folder = program_dir(&["pool-manager", "host-agent"])?;
        Ok(Self { pool_manager: folder.join("pool-manager"), host_agent: folder.join("host-agent") })
    }
}

/// Finds or builds the VMM.
///
/// # Errors
/// Cargo fails.
pub fn vmm_plugin() -> Result<PathBuf, Failure> {
    Ok(program_dir(&["vmm-plugin"])?.join("vmm-plugin"))
}

/// Finds or builds the programs of a rack of emulated hosts.
///
/// # Errors
/// Cargo fails.
pub fn rack_programs() -> Result<emulated_host::rack::Programs, Failure> {
    let folder = program_dir(&["pool-manager", "host-agent", "cli", "emulated-host"])?;
    Ok(emulated_host::rack::Programs {
        manager: folder.join("pool-manager"),
        agent: folder.join("host-agent"),
        tarn: folder.join("tarn"),
        power_off: folder.join("power-off-host"),
    })
}

/// Returns cargo's target folder, which contains this benchmark as `PROFILE/deps/NAME`.
///
/// # Errors
/// The kernel does not report the path of this program.
pub fn target_folder() -> Result<PathBuf, Failure> {
    let test_program = env::current_exe().map_err(Failure::file("find", "/proc/self/exe"))?;
    Ok(test_program.ancestors().nth(3).unwrap_or(Path::new("/")).to_owned())
}
