//! Reads and writes the file that assigns the directory of a store or EMC to a rack. The first line
//! is the UUID of the rack. In the directory of an EMC, the second line is the name of the EMC.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
};

use units::{Name, limits::RACK_UUID_FILE_BYTES_MAX};

use crate::store::disk::{open_private_file, sync_parent_directory};

/// Name of the file that contains the UUID of the rack.
pub const RACK_UUID_FILE: &str = "rack-uuid";

/// Lengths of the groups of hexadecimal digits in a UUID.
const UUID_GROUPS: [usize; 5] = [8, 4, 4, 4, 12];
/// Maximum number of characters of a damaged file in a message.
const SHOWN_CONTENT_CHARS_MAX: usize = 80;

/// Contents of a rack UUID file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RackUuidFile {
    /// Owner of the directory.
    Owner {
        /// UUID of the rack to which the directory belongs.
        rack: String,
        /// Name of the EMC. `None` in the directory of a store, or of an EMC that only earlier
        /// versions used.
        emc: Option<Name>,
    },
    /// Beginning of a file with other contents. The file shows that the directory belongs to a rack,
    /// but not to which one.
    Damaged(String),
}

/// Reads the file of a directory; `None` if the directory belongs to no rack.
///
/// # Errors
/// Returns an error if the file cannot be read, is not a regular file, or has more than
/// [`RACK_UUID_FILE_BYTES_MAX`] bytes.
pub fn read(folder: &Path) -> io::Result<Option<RackUuidFile>> {
    match config_file::read_file(&folder.join(RACK_UUID_FILE), RACK_UUID_FILE_BYTES_MAX) {
        Ok(bytes) => Ok(Some(parse(&String::from_utf8_lossy(&bytes)))),
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn parse(text: &str) -> RackUuidFile {
    let text = text.trim_end();
    parse_owner(text)
        .unwrap_or_else(|| RackUuidFile::Damaged(text.chars().take(SHOWN_CONTENT_CHARS_MAX).collect()))
}

/// Returns `None` if the text is not a UUID with or without the name of an EMC.
fn parse_owner(text: &str) -> Option<RackUuidFile> {
    let mut lines = text.split('\n');
    let rack = lines.next().filter(|line| is_uuid(line))?.to_owned();
    let emc = lines.next().map(Name::new).transpose().ok()?;
    lines.next().is_none().then_some(RackUuidFile::Owner { rack, emc })
}

fn is_uuid(text: &str) -> bool {
    let groups: Vec<&str> = text.split('-').collect();
    let is_hex = |group: &&str| group.bytes().all(|digit| digit.is_ascii_hexdigit());
    groups.iter().map(|group| group.len()).eq(UUID_GROUPS) && groups.iter().all(is_hex)
}

/// Assigns a directory to a rack, and to an EMC of the rack if it is not the store's directory. The
/// change is durable and atomic.
///
/// # Errors
/// Returns the error of the operating system if the file cannot be written. In this case, the
/// directory belongs to no rack.
pub fn write(folder: &Path, rack_uuid: &str, emc: Option<&Name>) -> io::Result<()> {
    let partial = folder.join(format!("{RACK_UUID_FILE}.partial"));
    let mut file = open_private_file(&partial)?;
    file.set_len(0)?; // a crash can leave a partial file
    writeln!(file, "{rack_uuid}")?;
    emc.map_or(Ok(()), |emc| writeln!(file, "{emc}"))?;
    file.sync_all()?;
    fs::rename(&partial, folder.join(RACK_UUID_FILE))?;
    sync_parent_directory(&partial)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::test_files::{create_fifo, run_with_timeout};

    fn failed_read_error(folder: &Path) -> String {
        let folder = folder.to_owned();
        run_with_timeout(move || read(&folder)).unwrap_err().to_string()
    }

    #[test]
    fn special_and_large_files_are_rejected_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(RACK_UUID_FILE);
        create_fifo(&file);
        assert_eq!(failed_read_error(folder.path()), "must be a regular file");
        fs::remove_file(&file).unwrap();
        symlink("/dev/zero", &file).unwrap();
        assert_eq!(failed_read_error(folder.path()), "must be a regular file");
        fs::remove_file(&file).unwrap();
        fs::write(&file, "0".repeat(RACK_UUID_FILE_BYTES_MAX + 1)).unwrap();
        let rule = format!("must have at most {RACK_UUID_FILE_BYTES_MAX} bytes");
        assert_eq!(failed_read_error(folder.path()), rule);
    }
}
