//! Locks of the host name, by which a second agent of the same host does not start on this machine.
//! An agent locks one file for its host and the address of its manager, and one file for its host
//! and its credential: the token, or the public key of its certificate. The second lock also
//! excludes agents that write the address of the manager in another way.
//!
//! The locks cannot exclude an agent that runs as another user with a copy of the credential, or an
//! agent with another `/run` or `/tmp`, for example in a container. The manager detects these.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};
use units::{Name, UserId};

use crate::{
    protected_dir::{ProtectedDir, TRAVERSABLE_MODE},
    runtime_dir::{RuntimeDirError, lock_file},
    secrets::Secrets,
    user::current_user,
};

/// Directory of the lock files of agents that run as root.
const ROOT_FOLDER: &str = "/run/tarn-agent/hosts";
/// Purpose of the directory, in errors.
const FOLDER_PURPOSE: &str = "directory of the agents' locks";

/// Reason why the host name cannot be locked.
#[derive(Debug, thiserror::Error)]
pub enum HostLockError {
    /// A lock file cannot be used, or another user can change its directory.
    #[error(transparent)]
    Dir(#[from] RuntimeDirError),
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
    /// [`HostLockError::InUse`] if another agent of this host runs, or [`HostLockError::Dir`].
    pub fn acquire(host: &Name, manager: &str, secrets: &Secrets) -> Result<Self, HostLockError> {
        let folder = match current_user() {
            UserId::ROOT => PathBuf::from(ROOT_FOLDER),
            user => PathBuf::from(format!("/tmp/tarn-agent-{user}")),
        };
        Self::acquire_in(&folder, host, manager, secrets)
    }

    fn acquire_in(
        folder: &Path,
        host: &Name,
        manager: &str,
        secrets: &Secrets,
    ) -> Result<Self, HostLockError> {
        let folder = ProtectedDir::create(FOLDER_PURPOSE, folder, TRAVERSABLE_MODE);
        let folder = folder.map_err(RuntimeDirError::from)?;
        let lock = |name: String| {
            let in_use = || HostLockError::InUse { host: host.clone(), path: folder.path().join(&name) };
            lock_file(&folder, &name)?.ok_or_else(in_use)
        };
        let address = normalize_address(manager);
        let credentials = [
            ("manager", Some(address.as_bytes())),
            ("token", secrets.token.as_deref().map(str::as_bytes)),
            ("key", secrets.public_key.as_deref()),
        ];
        let names = credentials.into_iter().filter_map(|(kind, value)| Some(lock_name(host, kind, value?)));
        Ok(Self { _files: names.map(lock).collect::<Result<_, _>>()? })
    }
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
    use std::os::unix::{fs::symlink, net::UnixListener};

    use super::*;

    const ADDRESS: &str = "http://127.0.0.1:9750";

    fn token(token: &str) -> Secrets {
        Secrets { token: Some(token.to_owned()), public_key: None }
    }

    fn certificate(public_key: &[u8]) -> Secrets {
        Secrets { token: None, public_key: Some(public_key.to_owned()) }
    }

    fn acquire(dir: &Path, host: &str, manager: &str, secrets: &Secrets) -> Result<HostLock, HostLockError> {
        HostLock::acquire_in(dir, &Name::new(host).unwrap(), manager, secrets)
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
