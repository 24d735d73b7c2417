//! Directory that only the agent's user and root can change. The agent keeps memory and state only
//! in such directories: in any other directory another user could create, replace or link files
//! before the agent opens them. The parents of the directory are not checked.

use std::{
    fs::{DirBuilder, File},
    io,
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags, openat},
    io::Errno,
};
use units::UserId;

use crate::user::current_user;

/// Name of the configuration key for the directory of local memory.
pub(crate) const LOCAL_DIR_FIELD: &str = "backend.local_dir";
/// Mode of directories that other users may traverse, for example to reach a socket.
pub(crate) const TRAVERSABLE_MODE: u32 = 0o711;
/// Mode of directories that only the agent's user may read.
pub(crate) const PRIVATE_MODE: u32 = 0o700;
/// Mode bits of the write permissions of group and others.
const NON_OWNER_WRITE_MODE: u32 = 0o022;
/// Mode bits of all permissions of group and others.
pub(crate) const NON_OWNER_MODE: u32 = 0o077;
/// Mode bits of all permissions, in the mode of a file.
const MODE_MASK: u32 = 0o7777;
/// Rule for the type of a directory.
const DIRECTORY_RULE: &str = "must be a directory, and not a symbolic link";

/// Reason why a directory or a file in it cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// The operating system rejected an operation, or a file is not a regular file with one link.
    #[error("{field}: cannot {operation} {}", path.display())]
    Io {
        /// Key of the directory in host.toml, or its purpose.
        field: &'static str,
        /// Operation, such as `open`.
        operation: &'static str,
        /// File or directory of the operation.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// The directory belongs to another user. Its owner can replace all files in it.
    #[error(
        "{field}: {} belongs to user {owner}: must belong to the agent's user ({user}) or root; remove it, or choose another path",
        path.display()
    )]
    ForeignOwner {
        /// Key of the directory in host.toml, or its purpose.
        field: &'static str,
        /// Path of the directory.
        path: PathBuf,
        /// Owner of the directory.
        owner: u32,
        /// User of the agent.
        user: UserId,
    },
    /// The mode of the directory grants something to group or others.
    #[error("{field}: {} has mode {mode:04o}: must be accessible to its owner only; run `chmod 700 {}`", path.display(), path.display())]
    Accessible {
        /// Key of the directory in host.toml, or its purpose.
        field: &'static str,
        /// Path of the directory.
        path: PathBuf,
        /// Mode of the directory.
        mode: u32,
    },
    /// The mode of the directory permits group or others to create and replace files.
    #[error(
        "{field}: {} has mode {mode:04o}: group and others must not write to it; run `chmod go-w {}`, and remove files of other users from it",
        path.display(), path.display()
    )]
    Writable {
        /// Key of the directory in host.toml, or its purpose.
        field: &'static str,
        /// Path of the directory.
        path: PathBuf,
        /// Mode of the directory.
        mode: u32,
    },
}

/// Open directory that only the agent's user and root can change.
#[derive(Debug)]
pub struct ProtectedDir {
    field: &'static str,
    path: PathBuf,
    mode: u32,
    directory: OwnedFd,
}

impl ProtectedDir {
    /// Opens a directory, after creating it and its parents with `mode` unless they exist. `field`
    /// is the key of the directory in host.toml, or its purpose.
    ///
    /// # Errors
    /// [`DirError`] if the directory cannot be created or opened, or another user can change it.
    pub fn create(field: &'static str, path: &Path, mode: u32) -> Result<Self, DirError> {
        match DirBuilder::new().recursive(true).mode(mode).create(path) {
            Err(errno) if errno.kind() != io::ErrorKind::AlreadyExists => {
                Err(DirError::Io { field, operation: "create", path: path.to_owned(), errno })
            }
            _ => Self::open(field, path),
        }
    }

    /// Opens an existing directory.
    ///
    /// # Errors
    /// [`DirError`] if the directory cannot be opened, or another user can change it.
    pub fn open(field: &'static str, path: &Path) -> Result<Self, DirError> {
        Self::open_for(field, path, current_user())
    }

    /// Opens an existing directory of an agent that runs as `user`.
    ///
    /// # Errors
    /// [`DirError`] if the directory cannot be opened, or a user other than `user` and root can
    /// change it.
    pub fn open_for(field: &'static str, path: &Path, user: UserId) -> Result<Self, DirError> {
        // Without a trailing `/`, which would make the kernel follow a symbolic link.
        let path = &path.components().collect::<PathBuf>();
        let io_error = |errno| DirError::Io { field, operation: "open", path: path.to_owned(), errno };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOTDIR | Errno::LOOP => {
                io_error(io::Error::new(io::ErrorKind::NotADirectory, DIRECTORY_RULE))
            }
            errno => io_error(errno.into()),
        })?;
        let metadata = File::from(directory.try_clone().map_err(io_error)?).metadata().map_err(io_error)?;
        let (owner, mode) = (metadata.uid(), metadata.mode() & MODE_MASK);
        if ![user.get(), UserId::ROOT.get()].contains(&owner) {
            return Err(DirError::ForeignOwner { field, path: path.to_owned(), owner, user });
        }
        if mode & NON_OWNER_WRITE_MODE != 0 {
            return Err(DirError::Writable { field, path: path.to_owned(), mode });
        }
        Ok(Self { field, path: path.to_owned(), mode, directory })
    }

    /// Returns the directory if its mode grants nothing to group and others.
    ///
    /// # Errors
    /// [`DirError::Accessible`].
    pub fn require_private(self) -> Result<Self, DirError> {
        let Self { field, mode, .. } = self;
        if mode & NON_OWNER_MODE == 0 {
            Ok(self)
        } else {
            Err(DirError::Accessible { field, path: self.path, mode })
        }
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a file of the directory for reading and writing. Creates the file with mode 0600 if it
    /// does not exist. Never waits, and follows no symbolic link.
    ///
    /// # Errors
    /// [`DirError::Io`]; its kind is [`io::ErrorKind::InvalidInput`] if the existing file is not a
    /// regular file with one link.
    pub fn open_or_create_file(&self, name: &str) -> Result<File, DirError> {
        let error = |operation| {
            move |errno| DirError::Io { field: self.field, operation, path: self.path.join(name), errno }
        };
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let create = flags | OFlags::CREATE | OFlags::EXCL;
        match openat(&self.directory, name, create, Mode::RUSR | Mode::WUSR) {
            Ok(file) => Ok(file.into()),
            Err(Errno::EXIST) => self.open_file(name, flags).map_err(error("open")),
            Err(errno) => Err(error("create")(errno.into())),
        }
    }

    fn open_file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let opened = openat(&self.directory, name, flags, Mode::empty());
        check_single_link(opened.map(File::from).map_err(|errno| match errno {
            Errno::LOOP | Errno::ISDIR | Errno::NXIO => config_file::not_regular_error(),
            errno => errno.into(),
        })?)
    }
}

/// Returns the file if it is a regular file with one link.
fn check_single_link(file: File) -> io::Result<File> {
    let file = config_file::check_regular(file)?;
    let links = file.metadata()?.nlink();
    if links != 1 {
        let rule = format!("has {links} links: must have one");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, rule));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::fs::{PermissionsExt as _, chown, symlink},
    };

    use super::*;
    use crate::skipped::report_skipped;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn open_error(path: &Path) -> String {
        units::chain(&ProtectedDir::open("backend.local_dir", path).unwrap_err())
    }

    #[test]
    fn created_directory_and_file_have_restricted_modes() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a/local");
        let dir = ProtectedDir::create("backend.local_dir", &path, TRAVERSABLE_MODE).unwrap();
        let file = dir.open_or_create_file("r-1.local").unwrap();
        assert_eq!(file.metadata().unwrap().mode() & MODE_MASK, 0o600);
        assert_eq!(fs::metadata(&path).unwrap().mode() & MODE_MASK & !TRAVERSABLE_MODE, 0);
        dir.open_or_create_file("r-1.local").unwrap();
    }

    #[test]
    fn directory_writable_by_others_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        for mode in [0o755, 0o711, 0o700] {
            set_mode(dir.path(), mode);
            ProtectedDir::open("backend.local_dir", dir.path()).unwrap();
        }
        for mode in [0o777, 0o1777, 0o775, 0o720, 0o702] {
            set_mode(dir.path(), mode);
            let error = open_error(dir.path());
            let rule =
                format!("has mode {mode:04o}: group and others must not write to it; run `chmod go-w ");
            assert!(error.starts_with("backend.local_dir: ") && error.contains(&rule), "{error}");
        }
    }

    #[test]
    fn directory_of_another_user_is_rejected() {
        if current_user() != UserId::ROOT {
            return report_skipped("directory of another user: only root can change an owner");
        }
        let dir = tempfile::tempdir().unwrap();
        chown(dir.path(), Some(65534), None).unwrap();
        let error = open_error(dir.path());
        assert!(
            error.contains("belongs to user 65534: must belong to the agent's user (0) or root"),
            "{error}"
        );
        let nobody = UserId::new(65534).unwrap();
        ProtectedDir::open_for("backend.local_dir", dir.path(), nobody).unwrap();
    }

    #[test]
    fn link_or_file_in_place_of_the_directory_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let (link, file) = (dir.path().join("link"), dir.path().join("file"));
        let dangling = dir.path().join("dangling");
        symlink(dir.path(), &link).unwrap();
        symlink(dir.path().join("missing"), &dangling).unwrap();
        fs::write(&file, "").unwrap();
        for path in [link.join(""), link.join("."), link, dangling, file] {
            let error = ProtectedDir::create("backend.local_dir", &path, TRAVERSABLE_MODE).unwrap_err();
            let error = units::chain(&error);
            assert!(error.ends_with(DIRECTORY_RULE), "{error}");
        }
    }

    #[test]
    fn existing_file_must_be_regular_with_one_link() {
        let parent = tempfile::tempdir().unwrap();
        let dir = ProtectedDir::open("agent.runtime_dir", parent.path()).unwrap();
        let path = |name: &str| parent.path().join(name);
        rustix::fs::mkfifoat(rustix::fs::CWD, path("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
        symlink("/dev/zero", path("link")).unwrap();
        symlink(path("missing"), path("dangling")).unwrap();
        fs::create_dir(path("directory")).unwrap();
        for name in ["fifo", "link", "dangling", "directory"] {
            let error = units::chain(&dir.open_or_create_file(name).unwrap_err());
            assert!(error.ends_with(&format!("{name}: must be a regular file")), "{error}");
        }
        fs::write(path("file"), "").unwrap();
        fs::hard_link(path("file"), path("second")).unwrap();
        let error = units::chain(&dir.open_or_create_file("file").unwrap_err());
        assert!(error.ends_with("has 2 links: must have one"), "{error}");
    }
}
