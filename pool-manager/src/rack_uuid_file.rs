//! Reads and writes the file that assigns the directory of a store or EMC to a rack.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
};

use crate::store::disk::{private_file_options, sync_parent_directory};

/// Name of the file that contains the UUID of the rack.
pub const RACK_UUID_FILE: &str = "rack-uuid";

/// Lengths of the groups of hexadecimal digits in a UUID.
const UUID_GROUPS: [usize; 5] = [8, 4, 4, 4, 12];
/// Maximum number of characters of a damaged file in a message.
const SHOWN_CONTENT_CHARS_MAX: usize = 80;

/// Contents of a rack UUID file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RackUuidFile {
    /// UUID of the rack to which the directory belongs.
    Uuid(String),
    /// Beginning of a file that does not contain a UUID. The file shows that the directory belongs
    /// to a rack, but not to which one.
    Damaged(String),
}

/// Reads the file of a directory; `None` if the directory belongs to no rack.
///
/// # Errors
/// Returns the error of the operating system if the file cannot be read.
pub fn read(folder: &Path) -> io::Result<Option<RackUuidFile>> {
    match fs::read(folder.join(RACK_UUID_FILE)) {
        Ok(bytes) => Ok(Some(parse(&String::from_utf8_lossy(&bytes)))),
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn parse(text: &str) -> RackUuidFile {
    let text = text.trim_end();
    if is_uuid(text) {
        RackUuidFile::Uuid(text.to_owned())
    } else {
        RackUuidFile::Damaged(text.chars().take(SHOWN_CONTENT_CHARS_MAX).collect())
    }
}

fn is_uuid(text: &str) -> bool {
    let groups: Vec<&str> = text.split('-').collect();
    let is_hex = |group: &&str| group.bytes().all(|digit| digit.is_ascii_hexdigit());
    groups.iter().map(|group| group.len()).eq(UUID_GROUPS) && groups.iter().all(is_hex)
}

/// Assigns a directory to a rack, durably and atomically.
///
/// # Errors
/// Returns the error of the operating system if the file cannot be written. In this case, the
/// directory belongs to no rack.
pub fn write(folder: &Path, rack_uuid: &str) -> io::Result<()> {
    let partial = folder.join(format!("{RACK_UUID_FILE}.partial"));
    let mut file = private_file_options().create(true).truncate(true).open(&partial)?;
    writeln!(file, "{rack_uuid}")?;
    file.sync_all()?;
    fs::rename(&partial, folder.join(RACK_UUID_FILE))?;
    sync_parent_directory(&partial)
}
