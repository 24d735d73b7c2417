//! Folders of the demo: one in memory for the devices, one on disk for the rest. Both are removed
//! afterwards, with every process that uses them.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tempfile::TempDir;

use super::processes;
use crate::{failure::Failure, wait::until};

/// Where memory is a file system.
const MEMORY: &str = "/dev/shm";
/// How names of both folders begin.
const PREFIX: &str = "tarn-demo-";
/// How long stragglers may take to end by themselves.
const END_WITHIN: Duration = Duration::from_secs(5);

/// Both folders.
#[derive(Debug)]
pub struct Scratch {
    disk: TempDir,
    memory: TempDir,
}

impl Scratch {
    /// Makes them. Without a file system in memory the devices are sparse files on disk.
    ///
    /// # Errors
    /// A folder cannot be made.
    pub fn new() -> Result<Self, Failure> {
        let temporary = std::env::temp_dir();
        let memory = Some(Path::new(MEMORY)).filter(|memory| memory.is_dir()).unwrap_or(&temporary);
        Ok(Self { disk: folder(&temporary)?, memory: folder(memory)? })
    }

    /// Folder of the devices' memory.
    pub fn memory(&self) -> &Path {
        self.memory.path()
    }

    /// For stores, settings and logs.
    pub fn disk(&self) -> &Path {
        self.disk.path()
    }

    /// A file on disk.
    pub fn file(&self, name: &str) -> PathBuf {
        self.disk.path().join(name)
    }

    /// Folder of an agent's records and socket.
    pub fn runtime_of(&self, host: &str) -> PathBuf {
        self.disk.path().join("hosts").join(host)
    }

    /// Ends remaining processes, then removes everything.
    ///
    /// # Errors
    /// A folder cannot be removed.
    pub fn clear(self) -> Result<(), Failure> {
        let ended =
            until("the end of every process", END_WITHIN, || Ok(processes::naming(self.disk()).is_empty()));
        if ended.is_err() {
            processes::naming(self.disk()).iter().for_each(processes::Process::kill);
        }
        for folder in [self.memory, self.disk] {
            let path = folder.path().to_owned();
            folder.close().map_err(Failure::file("remove", path))?;
        }
        Ok(())
    }
}

fn folder(within: &Path) -> Result<TempDir, Failure> {
    tempfile::Builder::new()
        .prefix(PREFIX)
        .tempdir_in(within)
        .map_err(Failure::file("make a folder in", within))
}
