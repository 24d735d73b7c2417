//! Temporary folders of the demo: a folder on a tmpfs for the devices, and a folder on disk for
//! other files. At the end, both folders are removed and processes that still use them are killed.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tempfile::TempDir;

use super::processes;
use crate::{failure::Failure, wait::wait_until};

/// Mount point of a tmpfs.
const TMPFS_FOLDER: &str = "/dev/shm";
/// Prefix of the names of both folders.
const SCRATCH_PREFIX: &str = "tarn-demo-";
/// Time limit for remaining processes to end before they are killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Temporary folders of the demo.
#[derive(Debug)]
pub struct ScratchFolders {
    disk: TempDir,
    memory: TempDir,
}

impl ScratchFolders {
    /// Creates both folders. If there is no tmpfs, devices are sparse files on disk.
    ///
    /// # Errors
    /// Returns an error if a folder cannot be created.
    pub fn new() -> Result<Self, Failure> {
        let temporary = std::env::temp_dir();
        let memory = Some(Path::new(TMPFS_FOLDER)).filter(|memory| memory.is_dir()).unwrap_or(&temporary);
        Ok(Self { disk: create_temp_folder(&temporary)?, memory: create_temp_folder(memory)? })
    }

    /// Returns the folder for the memory of devices.
    pub fn memory_dir(&self) -> &Path {
        self.memory.path()
    }

    /// Returns the folder for stores, configuration files and logs.
    pub fn disk_dir(&self) -> &Path {
        self.disk.path()
    }

    /// Returns the path of a file in the folder on disk.
    pub fn file(&self, name: &str) -> PathBuf {
        self.disk.path().join(name)
    }

    /// Returns the runtime directory of an agent, which contains its records and socket.
    pub fn runtime_dir(&self, host: &str) -> PathBuf {
        self.disk.path().join("hosts").join(host)
    }

    /// Waits for processes that use the folders, kills the remaining ones, and removes both
    /// folders.
    ///
    /// # Errors
    /// Returns an error if a folder cannot be removed.
    pub fn remove(self) -> Result<(), Failure> {
        let ended = wait_until("all processes to end", STOP_TIMEOUT, || {
            Ok(processes::find_by_argument_in(self.disk_dir()).is_empty())
        });
        if ended.is_err() {
            processes::find_by_argument_in(self.disk_dir()).iter().for_each(processes::Process::kill);
        }
        for folder in [self.memory, self.disk] {
            let path = folder.path().to_owned();
            folder.close().map_err(Failure::file_error("remove", path))?;
        }
        Ok(())
    }
}

fn create_temp_folder(parent: &Path) -> Result<TempDir, Failure> {
    tempfile::Builder::new()
        .prefix(SCRATCH_PREFIX)
        .tempdir_in(parent)
        .map_err(Failure::file_error("create a folder in", parent))
}
