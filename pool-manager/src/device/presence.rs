//! Detects whether an EMC's directory is still the one that its driver opened. Calls through the
//! driver's descriptors succeed on a directory that was renamed, deleted or hidden by a mount,
//! while hosts open slices by path and find nothing.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::{DeviceError, Driver};

/// Identity of each file of an open device.
#[derive(Debug)]
pub struct Presence {
    files: Vec<(PathBuf, FileId)>,
}

/// Device and inode number of a file.
type FileId = (u64, u64);

impl Presence {
    /// Records the files of the device at `path`.
    ///
    /// # Errors
    /// [`DeviceError::Vanished`] if one is missing, or [`DeviceError::Io`].
    pub fn of(driver: Driver, path: &Path) -> Result<Self, DeviceError> {
        let identify = |name: &&str| {
            let path = path.join(name);
            let id = file_id(&path)?;
            Ok((path, id))
        };
        Ok(Self { files: driver.files().iter().map(identify).collect::<Result<_, DeviceError>>()? })
    }

    /// Compares the files with the recorded ones.
    ///
    /// # Errors
    /// [`DeviceError::Vanished`] if one is missing or was replaced, or [`DeviceError::Io`].
    pub fn check(&self) -> Result<(), DeviceError> {
        self.files.iter().try_for_each(|(path, id)| {
            if file_id(path)? == *id {
                return Ok(());
            }
            Err(DeviceError::Vanished { path: path.clone(), what: "was replaced" })
        })
    }
}

fn file_id(path: &Path) -> Result<FileId, DeviceError> {
    match fs::metadata(path) {
        Ok(file) => Ok((file.dev(), file.ino())),
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => {
            Err(DeviceError::Vanished { path: path.to_owned(), what: "is missing" })
        }
        Err(errno) => Err(DeviceError::Io { doing: "look at", path: path.to_owned(), errno }),
    }
}
