//! Detects that an EMC's directory was renamed, deleted or hidden by a mount after its driver
//! opened it, or that other users can now change it. The driver's open file descriptors still work
//! then, but hosts open slices by path and cannot find them.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::{DeviceError, DeviceLeader, Driver};

/// Paths and identities of the files of an open device.
#[derive(Debug)]
pub struct DevicePresence {
    driver: Driver,
    path: PathBuf,
    files: Vec<(PathBuf, FileId)>,
}

/// Device and inode number of a file.
type FileId = (u64, u64);

impl DevicePresence {
    /// Records the identities of the files of the device at `path`.
    ///
    /// # Errors
    /// [`DeviceError::Vanished`] if a file is missing, or [`DeviceError::Io`].
    pub fn record(driver: Driver, path: &Path, leader: Option<&DeviceLeader>) -> Result<Self, DeviceError> {
        let identify = |name: &String| {
            let path = path.join(name);
            let id = file_id(&path)?;
            Ok((path, id))
        };
        Ok(Self {
            driver,
            path: path.to_owned(),
            files: driver
                .identifying_files(leader)
                .iter()
                .map(identify)
                .collect::<Result<_, DeviceError>>()?,
        })
    }

    /// Compares the current files with the recorded identities, and checks the access to their
    /// folders.
    ///
    /// # Errors
    /// [`DeviceError::Vanished`] if a file is missing or was replaced, [`DeviceError::LaterManager`] if a manager that was
    /// elected later has removed it,
    /// [`DeviceError::FolderAccess`] if other users can change the folders, or [`DeviceError::Io`].
    pub fn check(&self) -> Result<(), DeviceError> {
        self.files.iter().try_for_each(|(path, id)| {
            let found = file_id(path).or_else(|error| self.driver.check_superseded(path).and(Err(error)))?;
            if found == *id {
                return Ok(());
            }
            Err(DeviceError::Vanished { path: path.clone(), what: "was replaced" })
        })?;
        if self.files.is_empty() {
            return Ok(()); // the device has no folder
        }
        Ok(self.driver.check_folders(&self.path)?)
    }
}

fn file_id(path: &Path) -> Result<FileId, DeviceError> {
    match fs::metadata(path) {
        Ok(file) => Ok((file.dev(), file.ino())),
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => {
            Err(DeviceError::Vanished { path: path.to_owned(), what: "is missing" })
        }
        Err(errno) => Err(DeviceError::Io { operation: "stat", path: path.to_owned(), errno }),
    }
}
