//! The file that names the rack which a folder belongs to: the folder of a store or of an EMC.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
};

use crate::store::disk::{private, sync_parent};

/// The name of the file.
pub const MARK: &str = "rack-uuid";

/// Reads the uuid of the rack that a folder belongs to, if it belongs to one.
///
/// # Errors
/// The file cannot be read.
pub fn read(folder: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(folder.join(MARK)) {
        Ok(text) => Ok(Some(text.trim_end().to_owned())),
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Makes a folder a rack's, durably and in one step.
///
/// # Errors
/// The file cannot be written; the folder belongs to no rack then.
pub fn write(folder: &Path, rack_uuid: &str) -> io::Result<()> {
    let partial = folder.join(format!("{MARK}.partial"));
    let mut file = private().create(true).truncate(true).open(&partial)?;
    writeln!(file, "{rack_uuid}")?;
    file.sync_all()?;
    fs::rename(&partial, folder.join(MARK))?;
    sync_parent(&partial)
}
