//! Reads and writes the file that assigns the directory of a store or EMC to a rack.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
};

use crate::store::disk::{private, sync_parent};

/// Name of the file that contains the UUID of the rack.
pub const RACK_UUID_FILE: &str = "rack-uuid";

/// Returns the UUID of the rack to which a directory belongs; `None` if it belongs to no rack.
///
/// # Errors
/// Returns the error of the operating system if the file cannot be read.
pub fn read(folder: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(folder.join(RACK_UUID_FILE)) {
        Ok(text) => Ok(Some(text.trim_end().to_owned())),
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Assigns a directory to a rack, durably and atomically.
///
/// # Errors
/// Returns the error of the operating system if the file cannot be written. In this case, the
/// directory belongs to no rack.
pub fn write(folder: &Path, rack_uuid: &str) -> io::Result<()> {
    let partial = folder.join(format!("{RACK_UUID_FILE}.partial"));
    let mut file = private().create(true).truncate(true).open(&partial)?;
    writeln!(file, "{rack_uuid}")?;
    file.sync_all()?;
    fs::rename(&partial, folder.join(RACK_UUID_FILE))?;
    sync_parent(&partial)
}
