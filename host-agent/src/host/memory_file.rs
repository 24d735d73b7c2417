//! Operations on a file that contains memory: its allocated size, its permitted users, and opening it
//! without following links.

use std::{os::fd::OwnedFd, path::Path};

use rustix::{
    fs::{FileType, OFlags, Uid, XattrFlags, fchown, fsetxattr, fstat, fstatfs},
    io::Errno,
};
use units::{Bytes, UserId};

use super::HostError;
use crate::user::current_user;

/// Extended attribute with the access control list of a file.
const ACL_ATTRIBUTE: &str = "system.posix_acl_access";

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

/// Returns whether a file consists of shared memory: a memfd, or a file in tmpfs or hugetlbfs.
pub(super) fn is_shared_memory(file: &OwnedFd) -> bool {
    /// Magic numbers of tmpfs and hugetlbfs, from linux/magic.h.
    const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x9584_58f6];
    fstatfs(file).is_ok_and(|status| IN_MEMORY.contains(&status.f_type))
}

/// Returns the flag `O_NOFOLLOW`: open(2) then fails on a symbolic link.
pub(super) fn no_follow_flag() -> i32 {
    i32::try_from(OFlags::NOFOLLOW.bits()).expect("O_NOFOLLOW fits into i32")
}

/// Lets a user open a file for reading and writing, by an entry in the file's access control list. The
/// user does not become the owner: an owner can take leases on the file and change its mode, and so
/// delay its revocation. On a file system without access control lists, such as hugetlbfs, a file of
/// the agent's user gets the user as its owner.
///
/// # Errors
/// [`HostError::NoAcl`] if the file system has no access control lists and the file belongs to another
/// user, or [`HostError::Io`].
pub(super) fn permit_user(file: &OwnedFd, path: &Path, user: UserId) -> Result<(), HostError> {
    let owner = fstat(file).map_err(|errno| HostError::io("stat", path, errno))?.st_uid;
    if owner == user.get() {
        return Ok(());
    }
    match fsetxattr(file, ACL_ATTRIBUTE, &access_control_list(user), XattrFlags::empty()) {
        Err(Errno::OPNOTSUPP) if owner == current_user().get() => {
            fchown(file, Some(Uid::from_raw(user.get())), None)
                .map_err(|errno| HostError::io("change the owner of", path, errno))
        }
        Err(Errno::OPNOTSUPP) => Err(HostError::NoAcl { path: path.to_owned(), user, owner }),
        set => set.map_err(|errno| HostError::io("set the access control list of", path, errno)),
    }
}

/// Returns an access control list in the format of the extended attribute: the file's owner and
/// `user` may read and write, all others nothing. See acl(5) and the kernel's `posix_acl_xattr.h`.
fn access_control_list(user: UserId) -> Vec<u8> {
    const VERSION: u32 = 2;
    /// Kinds of entries.
    const OWNER: u16 = 0x01;
    const NAMED_USER: u16 = 0x02;
    const GROUP: u16 = 0x04;
    const MASK: u16 = 0x10;
    const OTHERS: u16 = 0x20;
    const READ_WRITE: u16 = 6;
    /// ID of entries that name no user.
    const NO_ID: u32 = u32::MAX;
    let entries = [
        (OWNER, READ_WRITE, NO_ID),
        (NAMED_USER, READ_WRITE, user.get()),
        (GROUP, 0, NO_ID),
        (MASK, READ_WRITE, NO_ID),
        (OTHERS, 0, NO_ID),
    ];
    let mut list = VERSION.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        list.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        list.extend(id.to_le_bytes());
    }
    list
}
