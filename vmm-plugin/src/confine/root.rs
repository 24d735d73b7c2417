//! Root directory of a confined process: an empty directory given by the user, or an empty
//! read-only tmpfs. The tmpfs is not mounted on any path, and the kernel frees it when the process
//! ends.

use std::{fs, path::Path};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen},
};

use super::{ConfineError, Root, system_error};

/// Opens a directory as the future root. Returns an error if the directory is not empty.
pub(super) fn open_empty_root(path: &Path) -> Result<Root, ConfineError> {
    let display_name = path.display().to_string();
    let mut content = fs::read_dir(path).map_err(system_error("--chroot", format!("list {display_name}")))?;
    if content.next().is_some() {
        return Err(ConfineError::NotEmpty(path.to_owned()));
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty());
    Ok(Root {
        directory: directory.map_err(system_error("--chroot", format!("open {display_name}")))?,
        display_name,
    })
}

/// Creates a read-only tmpfs as the future root. The tmpfs is not mounted on any path, so that
/// other processes cannot add files.
pub(super) fn create_empty_root() -> Result<Root, ConfineError> {
    let create_mount = || {
        let file_system = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&file_system)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
            | MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        fsmount(&file_system, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    };
    let directory = create_mount().map_err(system_error("--chroot", "create an empty file system"))?;
    Ok(Root { directory, display_name: "an empty file system".into() })
}

/// Makes `root` the root directory and the working directory of this process.
pub(super) fn enter(root: &Root) -> Result<(), Errno> {
    rustix::process::fchdir(&root.directory)?;
    rustix::process::chroot(".")
}
