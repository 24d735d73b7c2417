//! Fault injection, so that audits can be shown to fail. One word in the file `fault` of the
//! device's directory, in effect from the next call while the file exists:
//!
//! - `ignore-revoke`: reports a revocation, and leaves the old owner its memory.
//! - `keep-bytes`: every later owner of a slice finds the first bytes of its first owner.
//! - `forget-grant`: omits its lowest grant whenever its contents are requested.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use super::DeviceError;

/// Number of bytes of a slice that `keep-bytes` keeps.
const RETAINED_BYTES: usize = 4096;

/// Fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `ignore-revoke`
    IgnoreRevoke,
    /// `keep-bytes`
    KeepBytes,
    /// `forget-grant`
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

/// Current fault of the device.
#[derive(Debug)]
pub(super) struct Faults {
    path: PathBuf,
    modified: Option<SystemTime>,
    fault: Option<Fault>,
    retained: HashMap<u32, Vec<u8>>,
}

impl Faults {
    /// # Errors
    /// The file contains an unknown word.
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

    /// Reads the file if it changed; otherwise one `stat`.
    pub(super) fn refresh(&mut self) {
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
        let word = fs::read_to_string(&self.path).map_err(|errno| format!("read its fault: {errno}"))?;
        let rule = "must be ignore-revoke, keep-bytes or forget-grant";
        let fault = Fault::parse(&word).ok_or_else(|| format!("its fault is {word:?}: {rule}"))?;
        self.fault = Some(fault);
        tracing::error!(path = %self.path.display(), ?fault, "fault injected");
        Ok(())
    }

    /// Retains the first non-zero bytes of a slice, also after scrubs.
    pub(super) fn before_revoke(&mut self, slice: u32, file: &File) {
        let mut bytes = vec![0; RETAINED_BYTES];
        if self.fault == Some(Fault::KeepBytes)
            && file.read_exact_at(&mut bytes, 0).is_ok()
            && bytes.iter().any(|byte| *byte != 0)
        {
            self.retained.entry(slice).or_insert(bytes);
        }
    }

    pub(super) fn after_grant(&self, slice: u32, file: &File) {
        if self.fault == Some(Fault::KeepBytes)
            && let Some(bytes) = self.retained.get(&slice)
        {
            let wrote: io::Result<()> = file.write_all_at(bytes, 0);
            tracing::error!(slice, error = ?wrote.err(), "granted with old bytes");
        }
    }
}
