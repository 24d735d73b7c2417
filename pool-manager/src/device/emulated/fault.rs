//! Fault injection. Tests use it to check that audits detect errors. A file `fault` in the device's
//! directory selects the fault. The fault is in effect from the next batch of calls until the file
//! is removed:
//!
//! - `ignore-revoke`: revocations succeed, but the old owner keeps access to the memory.
//! - `keep-bytes`: every later owner of a slice can read the first bytes of the first owner.
//! - `forget-grant`: each read of the device's contents removes the grant with the lowest slice.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use units::limits::FAULT_FILE_BYTES_MAX;

use super::DeviceError;

/// Number of bytes at the start of a slice that the fault `keep-bytes` retains.
const RETAINED_BYTES: usize = 4096;

/// Fault that the driver of an emulated EMC injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Revocations succeed without an effect (`ignore-revoke`).
    IgnoreRevoke,
    /// Slices are not zeroed between owners (`keep-bytes`).
    KeepBytes,
    /// The device loses grants (`forget-grant`).
    ForgetGrant,
}

impl Fault {
    fn parse(word: &str) -> Option<Self> {
        match word.trim() {
            "ignore-revoke" => Some(Self::IgnoreRevoke),
            "keep-bytes" => Some(Self::KeepBytes),
            "forget-grant" => Some(Self::ForgetGrant),
            _ => None,
        }
    }
}

/// Injected fault of one device, read from its file `fault`.
#[derive(Debug)]
pub(super) struct InjectedFault {
    path: PathBuf,
    modified: Option<SystemTime>,
    fault: Option<Fault>,
    retained: HashMap<u32, Vec<u8>>,
}

impl InjectedFault {
    /// Reads the fault file of the device in `directory`, if there is one.
    ///
    /// # Errors
    /// [`DeviceError::Mismatch`] if the file names an unknown fault.
    pub(super) fn new(directory: &Path) -> Result<Self, DeviceError> {
        let path = directory.join("fault");
        let mut faults = Self { path, modified: None, fault: None, retained: HashMap::new() };
        faults
            .read()
            .map_err(|problem| DeviceError::Mismatch { path: directory.to_owned(), what: problem })?;
        Ok(faults)
    }

    pub(super) fn current(&self) -> Option<Fault> {
        self.fault
    }

    /// Reads the fault file again if its modification time changed.
    pub(super) fn reload_fault(&mut self) {
        if let Err(problem) = self.read() {
            tracing::error!(path = %self.path.display(), problem, "invalid fault file");
        }
    }

    fn read(&mut self) -> Result<(), String> {
        let modified = fs::metadata(&self.path).and_then(|file| file.modified()).ok();
        if modified == self.modified {
            return Ok(());
        }
        (self.modified, self.fault) = (modified, None);
        if modified.is_none() {
            tracing::warn!(path = %self.path.display(), "fault injection ended");
            return Ok(());
        }
        let contents = config_file::read_file(&self.path, FAULT_FILE_BYTES_MAX);
        let contents = contents.map_err(|errno| format!("cannot read its fault file: {errno}"))?;
        let word = String::from_utf8_lossy(&contents);
        let rule = "must be ignore-revoke, keep-bytes or forget-grant";
        let fault = Fault::parse(&word).ok_or_else(|| format!("its fault file contains {word:?}: {rule}"))?;
        self.fault = Some(fault);
        tracing::error!(path = %self.path.display(), ?fault, "fault injected");
        Ok(())
    }

    /// Saves the first bytes of a slice, unless all of them are zero or bytes of this slice were
    /// saved before.
    pub(super) fn retain_bytes_before_revoke(&mut self, slice: u32, file: &File) {
        let mut bytes = vec![0; RETAINED_BYTES];
        if self.fault == Some(Fault::KeepBytes)
            && file.read_exact_at(&mut bytes, 0).is_ok()
            && bytes.iter().any(|byte| *byte != 0)
        {
            self.retained.entry(slice).or_insert(bytes);
        }
    }

    pub(super) fn restore_bytes_after_grant(&self, slice: u32, file: &File) {
        if self.fault == Some(Fault::KeepBytes)
            && let Some(bytes) = self.retained.get(&slice)
        {
            let wrote: io::Result<()> = file.write_all_at(bytes, 0);
            tracing::error!(slice, error = ?wrote.err(), "injected fault: granted a slice with old bytes");
        }
    }
}
