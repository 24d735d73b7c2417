//! Checks the owner and mode of the manager's folders and files. A user who can write to a folder
//! can replace or delete the manager's files in it.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

/// Permission bits that let the group or other users write to a folder.
const WRITABLE_MODE_BITS: u32 = 0o022;

/// Permission bits of all users except the owner.
const GROUP_AND_OTHERS_MODE_BITS: u32 = 0o077;

/// Error of a folder that other users can change.
#[derive(Debug, thiserror::Error)]
pub enum FolderAccessError {
    /// The owner or mode of the folder violates a rule.
    #[error("{}: {rule}", path.display())]
    Violation {
        /// Path of the folder.
        path: PathBuf,
        /// Current owner or mode, and the violated rule.
        rule: String,
    },
    /// The operating system does not report owner and mode of the folder.
    #[error("cannot get the owner and mode of {}", path.display())]
    Io {
        /// Path of the folder.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
}

/// Checks that only root and the manager's user, which has the ID `manager_uid`, can write to a
/// folder. A missing folder is no error, because the manager creates it. Follows symbolic links.
///
/// # Errors
/// [`FolderAccessError`] if another user owns the folder, group or others can write to it, or owner
/// and mode cannot be determined.
pub fn check(path: &Path, manager_uid: u32) -> Result<(), FolderAccessError> {
    let metadata = match fs::metadata(path) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata.map_err(|errno| FolderAccessError::Io { path: path.to_owned(), errno })?,
    };
    let rule = if metadata.is_dir() {
        find_violation(path, metadata.uid(), metadata.mode(), manager_uid)
    } else {
        Some("must be a folder".to_owned())
    };
    rule.map_or(Ok(()), |rule| Err(FolderAccessError::Violation { path: path.to_owned(), rule }))
}

/// Returns the rule that a folder of user `owner` violates.
fn find_violation(path: &Path, owner: u32, mode: u32, manager_uid: u32) -> Option<String> {
    if owner != 0 && owner != manager_uid {
        return Some(format!(
            "belongs to user {owner}: must belong to root or to the manager's user ({manager_uid}), because its owner can \
             replace the files in it"
        ));
    }
    (mode & WRITABLE_MODE_BITS != 0).then(|| {
        format!(
            "has mode {:04o}: must not be writable by group or others; run `chmod go-w {}`",
            mode & 0o7777,
            path.display()
        )
    })
}

/// Checks that only root and the manager's user can access an open file. Root often opens the files
/// of a manager that runs as another user; this user owns their folder. `path` is the path of the
/// file.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] with the violated rule, or another error of the operating
/// system.
pub(crate) fn check_private_file(file: &File, path: &Path) -> io::Result<()> {
    let metadata = file.metadata()?;
    let own = rustix::process::geteuid().as_raw();
    let folder_owner = path.parent().and_then(|folder| fs::metadata(folder).ok()).map(|folder| folder.uid());
    let allowed = [0, own, folder_owner.unwrap_or(own)];
    let rule = find_file_violation(path, metadata.uid(), metadata.mode(), allowed);
    rule.map_or(Ok(()), |rule| Err(io::Error::new(io::ErrorKind::PermissionDenied, rule)))
}

/// Returns the rule that a file of user `owner` violates.
fn find_file_violation(path: &Path, owner: u32, mode: u32, allowed_owners: [u32; 3]) -> Option<String> {
    if !allowed_owners.contains(&owner) {
        return Some(format!("belongs to user {owner}: must belong to root or to the manager's user"));
    }
    (mode & GROUP_AND_OTHERS_MODE_BITS != 0).then(|| {
        format!(
            "has mode {:04o}: must be accessible to its owner only; run `chmod 600 {}`",
            mode & 0o7777,
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn own_uid() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    #[test]
    fn folder_of_another_user_is_rejected() {
        let path = Path::new("/emc");
        for (owner, own) in [(0, 0), (0, 7), (7, 7)] {
            assert_eq!(find_violation(path, owner, 0o40755, own), None);
        }
        for (owner, own) in [(7, 0), (8, 7)] {
            let rule = find_violation(path, owner, 0o40700, own).unwrap();
            let expected =
                format!("belongs to user {owner}: must belong to root or to the manager's user ({own})");
            assert!(rule.starts_with(&expected), "{rule}");
        }
    }

    #[test]
    fn file_of_another_user_is_rejected() {
        let path = Path::new("/store/ledger.redb");
        for owner in [0, 7, 8] {
            assert_eq!(find_file_violation(path, owner, 0o10_0600, [0, 7, 8]), None);
        }
        let rule = find_file_violation(path, 9, 0o10_0600, [0, 7, 8]).unwrap();
        assert_eq!(rule, "belongs to user 9: must belong to root or to the manager's user");
    }

    #[test]
    fn file_accessible_to_group_or_others_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.redb");
        let file = File::create(&path).unwrap();
        let set_mode = |mode| file.set_permissions(fs::Permissions::from_mode(mode)).unwrap();
        for mode in [0o600, 0o400, 0o700] {
            set_mode(mode);
            check_private_file(&file, &path).unwrap();
        }
        for mode in [0o640, 0o604, 0o620, 0o601] {
            set_mode(mode);
            let expected = format!(
                "has mode {mode:04o}: must be accessible to its owner only; run `chmod 600 {}`",
                path.display()
            );
            assert_eq!(check_private_file(&file, &path).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn folder_writable_by_group_or_others_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let set_mode = |mode| fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).unwrap();
        for mode in [0o700, 0o711, 0o755] {
            set_mode(mode);
            check(folder.path(), own_uid()).unwrap();
        }
        for mode in [0o720, 0o702, 0o775, 0o1777] {
            set_mode(mode);
            let path = folder.path().display();
            let expected = format!(
                "{path}: has mode {mode:04o}: must not be writable by group or others; run `chmod go-w {path}`"
            );
            assert_eq!(check(folder.path(), own_uid()).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn missing_folder_is_allowed_and_a_file_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        check(&file, own_uid()).unwrap();
        fs::write(&file, "").unwrap();
        assert_eq!(
            check(&file, own_uid()).unwrap_err().to_string(),
            format!("{}: must be a folder", file.display())
        );
    }
}
