//! File that names the rack to which a folder belongs: the folder of a store or of an EMC.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
};

use crate::store::disk::{private, sync_parent};

/// File name.
pub const RACK_UUID_FILE: &str = "rack-uuid";

/// Reads the rack of a folder, if it belongs to one.
///
/// # Errors
/// The file cannot be read.
pub fn read(folder: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(folder.join(RACK_UUID_FILE)) {
        Ok(text) => Ok(Some(text.trim_end().to_owned())),
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Assigns a folder to a rack, durably and atomically.
///
/// # Errors
/// The file cannot be written; the folder belongs to no rack then.
pub fn write(folder: &Path, rack_uuid: &str) -> io::Result<()> {
    let partial = folder.join(format!("{RACK_UUID_FILE}.partial"));
    let mut file = private().create(true).truncate(true).open(&partial)?;
    writeln!(file, "{rack_uuid}")?;
    file.sync_all()?;
    fs::rename(&partial, folder.join(RACK_UUID_FILE))?;
    sync_parent(&partial)
}
