//! File with the highest epoch of each slice. One manager at a time writes it.
//!
//! If managers are elected, the file's name ends with the fencing token of the manager, `epochs.GENERATION.ELECTION`.
//! A manager copies the file of an earlier one, and removes the earlier file. So an earlier manager that does not
//! notice the election, for example because it was paused, writes to a file that is not used any more, and finds at
//! its next call that its file is missing.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use units::FencingToken;

use super::{DeviceError, EPOCH_ENTRY_BYTES, EpochHistory, io_error};
use crate::store::disk::open_private_file;

/// Name of the file, without a fencing token.
const FILE: &str = "epochs";

/// Returns the name of the file of the manager with a fencing token, or of the only manager.
pub(crate) fn file_name(token: Option<FencingToken>) -> String {
    token.map_or_else(|| FILE.to_owned(), |token| format!("{FILE}.{token}"))
}

/// Open file with its contents.
#[derive(Debug)]
pub(super) struct EpochsFile {
    path: PathBuf,
    file: File,
    pub(super) history: Vec<EpochHistory>,
    /// Lock of the directory. It is exclusive if no manager can be elected, otherwise shared by the elected managers,
    /// whose fencing tokens decide.
    _lock: File,
}

impl EpochsFile {
    /// Opens the file of a device with `slices` slices, or creates it. Takes over the file of an earlier manager.
    ///
    /// # Errors
    /// [`DeviceError::InUse`], [`DeviceError::LaterManager`] if a manager with a higher token has opened the device,
    /// [`DeviceError::Mismatch`] if the device has more slices, or [`DeviceError::Io`].
    pub(super) fn open(
        directory: &Path,
        slices: u32,
        token: Option<FencingToken>,
    ) -> Result<Self, DeviceError> {
        let lock = lock_directory(directory, token.is_some())?;
        let path = directory.join(file_name(token));
        let others = find_others(directory, token)?;
        let file = match (others.last(), path.exists()) {
            (Some(latest), false) => take_over(&directory.join(file_name(*latest)), &path)?,
            _ => open_private_file(&path).map_err(io_error("open", &path))?,
        };
        // The file of this manager exists, so a later manager finds it. If the later manager looked for it before,
        // this manager finds the file of the later one.
        for other in find_others(directory, token)? {
            match fs::remove_file(directory.join(file_name(other))) {
                Err(errno) if errno.kind() != io::ErrorKind::NotFound => {
                    return Err(io_error("remove", &directory.join(file_name(other)))(errno));
                }
                _ => {}
            }
        }
        let history = read(&file, &path, directory, slices)?;
        Ok(Self { path, file, history, _lock: lock })
    }

    /// Changes the entry of a slice.
    pub(super) fn write(&mut self, slice: u32, history: EpochHistory) -> Result<(), DeviceError> {
        if self.history[slice as usize] != history {
            let at = u64::from(slice) * EPOCH_ENTRY_BYTES;
            let wrote = self.file.write_all_at(&history.to_entry().to_le_bytes(), at);
            wrote.map_err(io_error("write", &self.path))?;
            self.history[slice as usize] = history;
        }
        Ok(())
    }
}

/// Checks that no manager with a higher token has opened the device whose file of epochs has this path. Such a manager
/// removes the file.
///
/// # Errors
/// [`DeviceError::LaterManager`], or [`DeviceError::Io`].
pub(crate) fn check_latest(path: &Path) -> Result<(), DeviceError> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let token = name.strip_prefix(FILE).and_then(|suffix| suffix.strip_prefix('.')?.parse().ok());
    match (token, path.parent()) {
        (Some(token), Some(directory)) => find_others(directory, Some(token)).map(drop),
        _ => Ok(()),
    }
}

/// Returns the tokens of the files of other managers, in ascending order; `None` stands for a file without a token.
///
/// # Errors
/// [`DeviceError::LaterManager`] if one of them is higher than `token`.
fn find_others(
    directory: &Path,
    token: Option<FencingToken>,
) -> Result<Vec<Option<FencingToken>>, DeviceError> {
    let mut others = Vec::new();
    for entry in fs::read_dir(directory).map_err(io_error("list", directory))? {
        let name = entry.map_err(io_error("list", directory))?.file_name();
        let other = match name.to_str().and_then(|name| name.strip_prefix(FILE)) {
            Some("") => None,
            Some(suffix) => match suffix.strip_prefix('.').and_then(|text| text.parse().ok()) {
                Some(other) => Some(other),
                None => continue,
            },
            None => continue,
        };
        others.push(other);
    }
    others.retain(|other| *other != token);
    others.sort_unstable();
    match (token, others.last()) {
        (Some(token), Some(Some(later))) if *later > token => {
            Err(DeviceError::LaterManager { path: directory.to_owned(), token, later: *later })
        }
        _ => Ok(others),
    }
}

/// Copies the file of an earlier manager, and opens the copy, which appears atomically.
fn take_over(earlier: &Path, path: &Path) -> Result<File, DeviceError> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let contents = fs::read(earlier).map_err(io_error("read", earlier))?; // fails if a later manager took it over
    let copy = open_private_file(&partial).map_err(io_error("create", &partial))?;
    copy.set_len(0).and_then(|()| copy.write_all_at(&contents, 0)).map_err(io_error("write", &partial))?;
    fs::rename(&partial, path).map_err(io_error("rename", &partial))?;
    Ok(copy)
}

fn lock_directory(directory: &Path, is_shared: bool) -> Result<File, DeviceError> {
    let path = directory.join("lock");
    let lock = open_private_file(&path).map_err(io_error("open", &path))?;
    let locked = if is_shared { lock.try_lock_shared() } else { lock.try_lock() };
    match locked {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(DeviceError::InUse { path: directory.to_owned() }),
        Err(TryLockError::Error(errno)) => Err(io_error("lock", &path)(errno)),
    }
}

fn read(file: &File, path: &Path, directory: &Path, slices: u32) -> Result<Vec<EpochHistory>, DeviceError> {
    let expected = u64::from(slices) * EPOCH_ENTRY_BYTES;
    let len = file.metadata().map_err(io_error("get the length of", path))?.len();
    if len > expected || !len.is_multiple_of(EPOCH_ENTRY_BYTES) {
        let what = format!(
            "its file epochs has {len} bytes: must be a multiple of {EPOCH_ENTRY_BYTES}, at most {expected} for {slices} slices"
        );
        return Err(DeviceError::Mismatch { path: directory.to_owned(), what });
    }
    file.set_len(expected).map_err(io_error("set the size of", path))?;
    let mut bytes = vec![0; slices as usize * 8];
    file.read_exact_at(&mut bytes, 0).map_err(io_error("read", path))?;
    let entries = bytes.as_chunks::<8>().0;
    Ok(entries.iter().map(|entry| EpochHistory::from_entry(u64::from_le_bytes(*entry))).collect())
}
