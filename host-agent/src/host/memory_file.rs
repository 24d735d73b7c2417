//! Operations on a file that contains memory: its allocated size, its owner, and opening it without
//! following links.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::fs::{FileType, OFlags, Uid, fchown, fstat};
use units::{Bytes, UserId};

use super::HostError;

/// Returns how much of a file is backed by pages, in memory or swapped out. `None` for a device,
/// whose memory always exists.
pub(super) fn allocated_bytes(file: &OwnedFd) -> Option<Bytes> {
    /// Unit of `st_blocks`, in bytes.
    const BLOCK: u64 = 512;
    let status = fstat(file).ok()?;
    let is_file = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile;
    let blocks = u64::try_from(status.st_blocks).ok().filter(|_| is_file)?;
    Some(Bytes::new(blocks * BLOCK))
}

/// Returns the flag `O_NOFOLLOW`: open(2) then fails on a symbolic link.
pub(super) fn no_follow_flag() -> i32 {
    i32::try_from(OFlags::NOFOLLOW.bits()).expect("O_NOFOLLOW fits into i32")
}

/// Changes the owner of a file, so that this user can open it.
pub(super) fn change_owner(file: &OwnedFd, path: &Path, user: UserId) -> Result<(), HostError> {
    let owner = fstat(file).map_err(|errno| HostError::io("stat", path, errno))?.st_uid;
    if owner == user.get() {
        return Ok(());
    }
    fchown(file.as_fd(), Some(Uid::from_raw(user.get())), None)
        .map_err(|errno| HostError::io("change the owner of", path, errno))
}
