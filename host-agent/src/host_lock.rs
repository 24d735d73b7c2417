//! Locks of the host name, by which a second agent of the same host does not start on this machine.
//! An agent locks one file for its host and each address of a manager, and one file for its host
//! and its credential: the token, or the public key of its certificate. The second lock also
//! excludes agents that write the address of the manager in another way.
//!
//! The locks cannot exclude an agent that runs as another user with a copy of the credential, an
//! agent with another `/run` or `/tmp`, for example in a container, or an agent of a user who had
//! no runtime folder when the other agent started. The manager detects these.

use std::{
    collections::BTreeSet,
    env,
    fs::{self, File},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};
use units::{Name, UserId};

use crate::{
    protected_dir::{DirError, NON_OWNER_MODE, PRIVATE_MODE, ProtectedDir, TRAVERSABLE_MODE},
    runtime_dir::{RuntimeDirError, lock_file},
    secrets::Secrets,
    user::current_user,
};

/// Directory of the lock files of agents that run as root.
const ROOT_FOLDER: &str = "/run/tarn-agent/hosts";
/// Folder in which systemd creates a runtime folder for each user with a session.
const USER_RUNTIME_FOLDERS: &str = "/run/user";
/// Environment variable with the path of the user's runtime folder.
const RUNTIME_FOLDER_VARIABLE: &str = "XDG_RUNTIME_DIR";
/// Purpose of the directory, in errors.
const FOLDER_PURPOSE: &str = "directory of the agents' locks";

/// Reason why the host name cannot be locked.
#[derive(Debug, thiserror::Error)]
pub enum HostLockError {
    /// A lock file cannot be used, or another user can change its directory.
    #[error(transparent)]
    Dir(#[from] RuntimeDirError),
    /// The directory in `/tmp` cannot be used. Every local user can create it first.
    #[error(
        "cannot keep the agent's locks in {}, which every local user can create: remove it as root, or give the agent a runtime \
         folder that only its user can access, with `loginctl enable-linger` or XDG_RUNTIME_DIR",
        path.display()
    )]
    TemporaryDir {
        /// Path of the directory.
        path: PathBuf,
        /// Cause.
        #[source]
        error: DirError,
    },
    /// Another agent with the same host name runs on this machine.
    #[error("another host-agent runs as host {host} on this machine: it has locked {}", path.display())]
    InUse {
        /// Name of the host.
        host: Name,
        /// Lock file of the host.
        path: PathBuf,
    },
}

/// Locks of a host name, which are held until this value is dropped.
#[derive(Debug)]
pub struct HostLock {
    _files: Vec<File>,
}

impl HostLock {
    /// Locks a host name for the user of this process.
    ///
    /// # Errors
    /// [`HostLockError::InUse`] if another agent of this host runs, [`HostLockError::TemporaryDir`]
    /// or [`HostLockError::Dir`].
    pub fn acquire(host: &Name, managers: &[String], secrets: &Secrets) -> Result<Self, HostLockError> {
        let folder = create_lock_folder(current_user())?;
        Self::acquire_in(&folder, host, managers, secrets)
    }

    fn acquire_in(
        folder: &ProtectedDir,
        host: &Name,
        managers: &[String],
        secrets: &Secrets,
    ) -> Result<Self, HostLockError> {
        let lock = |name: String| {
            let in_use = || HostLockError::InUse { host: host.clone(), path: folder.path().join(&name) };
            lock_file(folder, &name)?.ok_or_else(in_use)
        };
        let credentials =
            [("token", secrets.token.as_deref().map(str::as_bytes)), ("key", secrets.public_key.as_deref())];
        let credentials =
            credentials.into_iter().filter_map(|(kind, value)| Some(lock_name(host, kind, value?)));
        let addresses: BTreeSet<String> = managers.iter().map(|manager| normalize_address(manager)).collect();
        let names =
            addresses.iter().map(|address| lock_name(host, "manager", address.as_bytes())).chain(credentials);
        Ok(Self { _files: names.map(lock).collect::<Result<_, _>>()? })
    }
}

/// Creates or opens the directory of the lock files of agents of `user`.
///
/// # Errors
/// [`HostLockError::TemporaryDir`] or [`HostLockError::Dir`] if another user can change the
/// directory, or it cannot be created.
fn create_lock_folder(user: UserId) -> Result<ProtectedDir, HostLockError> {
    let configured = env::var_os(RUNTIME_FOLDER_VARIABLE).map(PathBuf::from);
    let (path, mode) = if user == UserId::ROOT {
        (PathBuf::from(ROOT_FOLDER), TRAVERSABLE_MODE)
    } else if let Some(runtime) = runtime_folder(user, configured) {
        (runtime.join("tarn-agent"), PRIVATE_MODE)
    } else {
        return create_temporary_folder(format!("/tmp/tarn-agent-{user}").as_ref());
    };
    Ok(ProtectedDir::create(FOLDER_PURPOSE, &path, mode).map_err(RuntimeDirError::from)?)
}

/// Returns the runtime folder of a user that only this user can access: the folder that systemd
/// creates, or else the folder `configured`. All agents of the user prefer the same folder.
fn runtime_folder(user: UserId, configured: Option<PathBuf>) -> Option<PathBuf> {
    let standard = Path::new(USER_RUNTIME_FOLDERS).join(user.to_string());
    [Some(standard), configured].into_iter().flatten().find(|folder| is_private_folder(folder, user))
}

fn is_private_folder(path: &Path, user: UserId) -> bool {
    let is_private = |metadata: fs::Metadata| {
        metadata.is_dir() && metadata.uid() == user.get() && metadata.mode() & NON_OWNER_MODE == 0
    };
    path.is_absolute() && fs::symlink_metadata(path).is_ok_and(is_private)
}

/// Creates or opens a directory in `/tmp`.
///
/// # Errors
/// [`HostLockError::TemporaryDir`] if another user created the directory or can access it.
fn create_temporary_folder(path: &Path) -> Result<ProtectedDir, HostLockError> {
    let folder = ProtectedDir::create(FOLDER_PURPOSE, path, PRIVATE_MODE);
    folder
        .and_then(ProtectedDir::require_private)
        .map_err(|error| HostLockError::TemporaryDir { path: path.to_owned(), error })
}

/// Returns the address of a manager in a form that is equal for different paths of the same unix
/// socket and for different letter cases.
fn normalize_address(manager: &str) -> String {
    match manager.strip_prefix("unix:").map(Path::new) {
        None => manager.trim_end_matches('/').to_ascii_lowercase(),
        Some(socket) => format!("unix:{}", canonical_socket(socket).display()),
    }
}

/// Returns the path of a socket without symbolic links. If the socket does not exist yet, only the
/// path of its directory is resolved.
fn canonical_socket(socket: &Path) -> PathBuf {
    let in_directory = || {
        let directory = fs::canonicalize(socket.parent()?).ok()?;
        Some(directory.join(socket.file_name()?))
    };
    fs::canonicalize(socket).ok().or_else(in_directory).unwrap_or_else(|| socket.to_owned())
}

/// Returns the name of a lock file. It contains the SHA-256 of the host name and the value, so that
/// its length is limited and it does not reveal a token. Each part is preceded by its length, so
/// that different parts have different hashes.
fn lock_name(host: &Name, kind: &str, value: &[u8]) -> String {
    let mut hash = Sha256::new();
    for part in [b"tarn host lock", host.as_str().as_bytes(), kind.as_bytes(), value] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    let digits: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{host}@{kind}-{digits}")
}

#[cfg(test)]
mod tests {
    use std::{
        fs::Permissions,
        os::unix::{
            fs::{PermissionsExt as _, chown, symlink},
            net::UnixListener,
        },
    };

    use super::*;
    use crate::skipped::report_skipped;

    const ADDRESS: &str = "http://127.0.0.1:9750";

    fn token(token: &str) -> Secrets {
        Secrets { token: Some(token.to_owned()), public_key: None }
    }

    fn certificate(public_key: &[u8]) -> Secrets {
        Secrets { token: None, public_key: Some(public_key.to_owned()) }
    }

    fn acquire(dir: &Path, host: &str, manager: &str, secrets: &Secrets) -> Result<HostLock, HostLockError> {
        let dir = ProtectedDir::create(FOLDER_PURPOSE, dir, TRAVERSABLE_MODE).unwrap();
        HostLock::acquire_in(&dir, &Name::new(host).unwrap(), &[manager.to_owned()], secrets)
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn runtime_folder_must_be_private_to_the_user() {
        let dir = tempfile::tempdir().unwrap();
        let (own, link) = (dir.path().join("own"), dir.path().join("link"));
        fs::create_dir(&own).unwrap();
        symlink(&own, &link).unwrap();
        let user = UserId::new(fs::metadata(&own).unwrap().uid()).unwrap();
        let other = UserId::new(4_000_000_000).unwrap(); // has no folder in /run/user
        set_mode(&own, 0o700);
        assert!(is_private_folder(&own, user));
        assert!(!is_private_folder(&own, other) && !is_private_folder(&link, user));
        assert_eq!(runtime_folder(other, Some(own.clone())), None);
        for mode in [0o711, 0o750] {
            set_mode(&own, mode);
            assert!(!is_private_folder(&own, user), "mode {mode:o}");
        }
        assert_eq!(runtime_folder(other, Some("relative".into())), None);
        if user == UserId::ROOT {
            set_mode(&own, 0o700);
            chown(&own, Some(other.get()), None).unwrap();
            assert_eq!(runtime_folder(other, Some(own.clone())), Some(own));
        } else {
            report_skipped("a runtime folder of another user: only root can change an owner");
        }
    }

    #[test]
    fn temporary_folder_of_another_user_is_rejected_with_remedies() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("tarn-agent-1000");
        drop(create_temporary_folder(&folder).unwrap());
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o7777, 0o700);
        drop(create_temporary_folder(&folder).unwrap());
        let error = || units::chain(&create_temporary_folder(&folder).unwrap_err());
        let remedies = |error: &str| error.contains("remove it as root") && error.contains("XDG_RUNTIME_DIR");
        set_mode(&folder, 0o711);
        let message = error();
        assert!(remedies(&message) && message.contains("must be accessible to its owner only"), "{message}");
        set_mode(&folder, 0o700);
        if current_user() == UserId::ROOT {
            chown(&folder, Some(65534), None).unwrap();
            let message = error();
            assert!(remedies(&message) && message.contains("belongs to user 65534"), "{message}");
        }
        fs::remove_dir(&folder).unwrap();
        symlink(dir.path(), &folder).unwrap();
        let message = error();
        assert!(remedies(&message) && message.contains("not a symbolic link"), "{message}");
    }

    #[test]
    fn spelling_of_an_address_does_not_change_its_normal_form() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manager.sock").display().to_string();
        let address = normalize_address(&format!("unix:{path}"));
        let other = path.replace("/manager.sock", "/./manager.sock");
        assert_eq!(normalize_address(&format!("unix:{other}")), address);
        assert_eq!(normalize_address("https://Rack:1/"), "https://rack:1");
        assert_ne!(normalize_address("unix:/missing/a-b"), normalize_address("unix:/missing/a/b"));
    }

    #[test]
    fn link_to_the_socket_has_the_address_of_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, link) = (dir.path().join("manager.sock"), dir.path().join("link.sock"));
        let _listener = UnixListener::bind(&socket).unwrap();
        symlink(&socket, &link).unwrap();
        let address = |path: &Path| normalize_address(&format!("unix:{}", path.display()));
        assert_eq!(address(&socket), address(&link));
    }

    #[test]
    fn agent_with_the_same_credential_and_another_address_is_excluded() {
        let other_address = "http://localhost:9750";
        for (own, other) in
            [(token("secret"), token("other")), (certificate(b"secret"), certificate(b"other"))]
        {
            let dir = tempfile::tempdir().unwrap();
            let first = acquire(dir.path(), "h0", ADDRESS, &own).unwrap();
            let error = acquire(dir.path(), "h0", other_address, &own).unwrap_err();
            assert!(matches!(error, HostLockError::InUse { .. }), "{error:?}");
            assert!(!error.to_string().contains("secret"), "{error}");
            let error = acquire(dir.path(), "h0", ADDRESS, &other).unwrap_err();
            assert!(matches!(error, HostLockError::InUse { .. }), "{error:?}");
            acquire(dir.path(), "h0", other_address, &other).unwrap();
            acquire(dir.path(), "h1", ADDRESS, &own).unwrap();
            drop(first);
            acquire(dir.path(), "h0", other_address, &own).unwrap();
        }
    }

    /// Regression test: the lock file of a long address had a name of more than 255 bytes.
    #[test]
    fn long_address_can_be_locked() {
        let dir = tempfile::tempdir().unwrap();
        for manager in [format!("https://{}:9750", "a.".repeat(120)), format!("unix:/{}", "%".repeat(106))] {
            let host = "h".repeat(units::limits::NAME_BYTES_MAX);
            let _lock = acquire(dir.path(), &host, &manager, &token("secret")).unwrap();
        }
    }

    #[test]
    fn lock_name_depends_on_host_kind_and_value() {
        let name = |host: &str, kind: &str, value: &[u8]| {
            let name = lock_name(&Name::new(host).unwrap(), kind, value);
            assert!(name.starts_with(&format!("{host}@{kind}-")), "{name}");
            name.rsplit('-').next().unwrap().to_owned()
        };
        let all = [
            name("h0", "token", b"a"),
            name("h1", "token", b"a"),
            name("h0", "key", b"a"),
            name("h0", "token", b"b"),
            name("h0", "tokena", b""),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len(), "{all:?}");
    }
}
