//! Checks, without changes, whether a service can create a folder and files in it.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Access, AtFlags, CWD, FsWord, StatVfsMountFlags, accessat, statfs, statvfs},
    io::Errno,
};

/// Mode bits of all permissions, in the mode of a file.
const MODE_MASK: u32 = 0o7777;
/// Permission of group and others to create, rename and remove files of a folder.
const NON_OWNER_WRITE_MODE: u32 = 0o022;
/// In a folder with this bit, only the owner of a file can rename and remove it.
const STICKY_MODE: u32 = 0o1000;
/// Types of file systems that contain interfaces of the kernel, by magic number (statfs(2)).
/// Services cannot create files on them.
const KERNEL_FILE_SYSTEMS: [(FsWord, &str); 12] = [
    (0x9fa0, "proc"),
    (0x6265_6572, "sysfs"),
    (0x0027_e0eb, "cgroup"),
    (0x6367_7270, "cgroup2"),
    (0x6462_6720, "debugfs"),
    (0x7472_6163, "tracefs"),
    (0x7363_6673, "securityfs"),
    (0xf97c_ff8c, "selinuxfs"),
    (0x6265_6570, "configfs"),
    (0xcafe_4a11, "bpf"),
    (0xde5e_81e4, "efivarfs"),
    (0x1cd1, "devpts"),
];

/// Checks that the file system of a folder can store files. If `is_own_process` is set, also checks
/// that this process can create files in the folder. If the folder does not exist, checks the first
/// existing parent, in which the folder would be created.
///
/// # Errors
/// The violated rule.
pub fn check_usable(folder: &Path, is_own_process: bool) -> Result<(), String> {
    let existing = find_existing(folder)?;
    let place = if existing == folder { String::new() } else { format!(" {}", existing.display()) };
    let unusable = |errno: Errno| format!("cannot use the folder{place}: {}", io::Error::from(errno));
    let magic = statfs(&existing).map_err(unusable)?.f_type;
    if let Some((_, name)) = KERNEL_FILE_SYSTEMS.iter().find(|(known, _)| *known == magic) {
        return Err(format!("is on a file system of type {name}: must be on one that can store files"));
    }
    if statvfs(&existing).map_err(unusable)?.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Err("is on a read-only file system: must be writable".to_owned());
    }
    if is_own_process {
        let access = Access::WRITE_OK | Access::EXEC_OK;
        accessat(CWD, &existing, access, AtFlags::EACCESS).map_err(unusable)?;
    }
    Ok(())
}

/// Returns the first of `folder` and its parents that exists.
///
/// # Errors
/// The violated rule if this is not a folder, or cannot be inspected.
fn find_existing(folder: &Path) -> Result<PathBuf, String> {
    for path in folder.ancestors() {
        let is_missing = match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => return Ok(path.to_owned()),
            Ok(_) if path == folder => return Err("must be a folder".to_owned()),
            Ok(_) => return Err(format!("is below {}, which is not a folder", path.display())),
            Err(errno) if is_absent(&errno) => fs::symlink_metadata(path).is_err(),
            Err(errno) => return Err(format!("cannot inspect {}: {errno}", path.display())),
        };
        if !is_missing {
            return Err(format!("{} is a symbolic link to a missing folder", path.display()));
        }
    }
    Err("must be an absolute path".to_owned())
}

fn is_absent(errno: &io::Error) -> bool {
    matches!(errno.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Checks that no unprivileged user other than that of the service, which has the ID `uid`, can replace a socket in
/// its folder: the folder belongs to root or to the user of the service, and group and others cannot write to it, or
/// it has the sticky bit. A missing folder is no error.
///
/// # Errors
/// The violated rule.
pub fn check_socket_folder(folder: &Path, uid: u32) -> Result<(), String> {
    let (owner, mode) = match fs::metadata(folder) {
        Err(errno) if is_absent(&errno) => return Ok(()),
        Err(errno) => return Err(format!("cannot inspect {}: {errno}", folder.display())),
        Ok(metadata) => (metadata.uid(), metadata.mode() & MODE_MASK),
    };
    let folder = folder.display();
    if ![0, uid].contains(&owner) {
        return Err(format!(
            "the folder {folder} belongs to user {owner}: must belong to root or to the user of the service ({uid}), \
             because its owner can replace the socket"
        ));
    }
    if mode & NON_OWNER_WRITE_MODE != 0 && mode & STICKY_MODE == 0 {
        return Err(format!(
            "the folder {folder} has mode {mode:04o}: group and others must not write to it without the sticky bit, \
             because they can replace the socket; run `chmod go-w {folder}`"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

    use super::*;

    #[test]
    fn missing_folder_can_be_created_in_an_existing_one() {
        let folder = tempfile::tempdir().unwrap();
        check_usable(folder.path(), true).unwrap();
        check_usable(&folder.path().join("a/b"), true).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn folder_on_a_kernel_file_system_is_rejected() {
        for (path, name) in [("/proc", "proc"), ("/proc/self/tarn/store", "proc"), ("/sys/kernel/x", "sysfs")]
        {
            for is_own_process in [true, false] {
                let rule = check_usable(path.as_ref(), is_own_process).unwrap_err();
                let expected =
                    format!("is on a file system of type {name}: must be on one that can store files");
                assert_eq!(rule, expected);
            }
        }
    }

    #[test]
    fn file_or_dangling_link_in_place_of_a_folder_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "").unwrap();
        symlink("missing", &link).unwrap();
        let rule = |path: &Path| check_usable(path, true).unwrap_err();
        assert_eq!(rule(&file), "must be a folder");
        assert_eq!(rule(&file.join("a/b")), format!("is below {}, which is not a folder", file.display()));
        let expected = format!("{} is a symbolic link to a missing folder", link.display());
        assert_eq!((rule(&link), rule(&link.join("a"))), (expected.clone(), expected));
    }

    #[test]
    fn folder_in_which_the_user_cannot_create_files_is_rejected() {
        if rustix::process::geteuid().is_root() {
            return eprintln!(
                "SKIPPED: a folder without write permission, because root can write to all folders"
            );
        }
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o500)).unwrap();
        let rule = check_usable(folder.path(), true).unwrap_err();
        assert!(rule.starts_with("cannot use the folder: Permission denied"), "{rule}");
        let rule = check_usable(&folder.path().join("a"), true).unwrap_err();
        assert!(rule.starts_with(&format!("cannot use the folder {}: ", folder.path().display())), "{rule}");
        check_usable(folder.path(), false).unwrap();
    }

    #[test]
    fn socket_folder_that_others_can_write_is_rejected_without_sticky_bit() {
        let folder = tempfile::tempdir().unwrap();
        let own = rustix::process::geteuid().as_raw();
        let check = |mode| {
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).unwrap();
            check_socket_folder(folder.path(), own)
        };
        for mode in [0o700, 0o755, 0o1777, 0o1775] {
            check(mode).unwrap();
        }
        for mode in [0o777, 0o775, 0o702] {
            let rule = check(mode).unwrap_err();
            assert!(
                rule.contains(&format!("has mode {mode:04o}: group and others must not write")),
                "{rule}"
            );
        }
    }

    #[test]
    fn socket_folder_of_another_user_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let own = rustix::process::geteuid().as_raw();
        check_socket_folder(folder.path(), own).unwrap();
        check_socket_folder(&folder.path().join("missing"), own).unwrap();
        if own == 0 {
            chown(folder.path(), Some(65534), None).unwrap();
        }
        let rule = check_socket_folder(folder.path(), own + 1).unwrap_err();
        assert!(rule.contains("must belong to root or to the user of the service"), "{rule}");
    }
}
