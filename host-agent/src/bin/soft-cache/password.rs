//! Password of the server, read from a file that only its owner can access.

use std::{
    fmt, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};
use units::limits::SOFT_CACHE_PASSWORD_BYTES_MAX;

/// Mode bits that the file must not have: all permissions of group and others.
const NON_OWNER_MODE: u32 = 0o077;

/// Error of the file with the password.
#[derive(Debug, thiserror::Error)]
pub enum PasswordError {
    /// The file cannot be read.
    #[error("--password-file: cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// The mode of the file grants permissions to group or others.
    #[error("--password-file: {} has mode {mode:04o}: only its owner may access it; run `chmod 600 {}`", path.display(), path.display())]
    Accessible {
        /// Path of the file.
        path: PathBuf,
        /// Mode of the file.
        mode: u32,
    },
    /// The file contains no password.
    #[error("--password-file: {} must contain 1 to {SOFT_CACHE_PASSWORD_BYTES_MAX} printable characters without spaces", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
    },
}

/// Hash of a password.
#[derive(Clone, PartialEq, Eq)]
pub struct Password([u8; 32]);

impl Password {
    /// Reads a password from a file. Spaces and line ends around the password are ignored.
    ///
    /// # Errors
    /// [`PasswordError`].
    pub fn read(path: &Path) -> Result<Self, PasswordError> {
        let failed = |errno| PasswordError::Read { path: path.to_owned(), errno };
        let file = config_file::open_regular(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.mode() & 0o7777;
        if mode & NON_OWNER_MODE != 0 {
            return Err(PasswordError::Accessible { path: path.to_owned(), mode });
        }
        let contents = config_file::read_limited(file, SOFT_CACHE_PASSWORD_BYTES_MAX + 2).map_err(failed)?;
        let password = contents.trim_ascii();
        let is_printable = password.iter().all(u8::is_ascii_graphic);
        if password.is_empty() || password.len() > SOFT_CACHE_PASSWORD_BYTES_MAX || !is_printable {
            return Err(PasswordError::Malformed { path: path.to_owned() });
        }
        Ok(Self::new(password))
    }

    fn new(password: &[u8]) -> Self {
        Self(Sha256::digest(password).into())
    }

    /// Returns whether this is the password. The time depends on hashes, which a client cannot choose freely.
    pub fn matches(&self, password: &[u8]) -> bool {
        *self == Self::new(password)
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password")
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    #[test]
    fn password_is_read_from_a_private_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("password");
        let read = || Password::read(&path).map_err(|error| units::chain(&error));
        assert!(read().unwrap_err().ends_with("No such file or directory (os error 2)"));
        fs::write(&path, "secret\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(read().unwrap_err().contains("has mode 0640: only its owner may access it"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let password = read().unwrap();
        assert!(password.matches(b"secret") && !password.matches(b"secret\n") && !password.matches(b""));
        for malformed in ["", " \n", "two words", &"x".repeat(1025)] {
            fs::write(&path, malformed).unwrap();
            assert!(read().is_err(), "{malformed:?}");
        }
    }
}
