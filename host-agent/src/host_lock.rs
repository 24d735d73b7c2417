//! Locks of the host name, by which a second agent of the same host does not start on this machine.
//! An agent locks one file for its host and the address of its manager, and one file for its host
//! and each of its credentials. The second lock also excludes agents that write the address of the
//! manager in another way.
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
        let names =
            [address_lock_name(host, manager)].into_iter().chain(credential_lock_names(host, secrets));
        Ok(Self { _files: names.map(lock).collect::<Result<_, _>>()? })
    }
}

/// Returns the name of the lock file for the manager's address. Different paths of the same unix
/// socket and different letter cases of an address result in the same name.
fn address_lock_name(host: &Name, manager: &str) -> String {
    let manager = match manager.strip_prefix("unix:").map(Path::new) {
        None => manager.trim_end_matches('/').to_ascii_lowercase(),
        Some(socket) => format!("unix:{}", canonical_socket(socket).display()),
    };
    format!("{host}@{}", manager.replace('%', "%25").replace('/', "%2F"))
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

/// Returns the names of the lock files for the token and for the manager's authority. The names
/// contain hashes, so that they do not reveal the token.
fn credential_lock_names(host: &Name, secrets: &Secrets) -> impl Iterator<Item = String> {
    let name = move |kind: &str, parts: &[&[u8]]| format!("{host}@{kind}-{}", digest(host, kind, parts));
    let token = secrets.token.as_ref().map(|token| name("token", &[token.as_bytes()]));
    let authority = secrets.authorities.as_ref().map(|certificates| {
        let certificates: Vec<_> = certificates.iter().map(AsRef::as_ref).collect();
        name("ca", &certificates)
    });
    token.into_iter().chain(authority)
}

/// Returns the SHA-256 of a host name and a credential, in hexadecimal. Each part is preceded by its
/// length, so that different parts have different hashes.
fn digest(host: &Name, kind: &str, parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in [b"tarn host lock", host.as_str().as_bytes(), kind.as_bytes()].iter().chain(parts) {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixListener};

    use super::*;

    fn host() -> Name {
        Name::new("h0").unwrap()
    }

    fn secrets(token: &str) -> Secrets {
        Secrets { token: Some(token.to_owned()), authorities: None }
    }

    #[test]
    fn lock_name_does_not_depend_on_the_spelling_of_the_manager() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manager.sock").display().to_string();
        let name = address_lock_name(&host(), &format!("unix:{path}"));
        assert!(!name.contains('/') && name.starts_with("h0@unix:"), "{name}");
        let other = path.replace("/manager.sock", "/./manager.sock");
        assert_eq!(address_lock_name(&host(), &format!("unix:{other}")), name);
        assert_eq!(address_lock_name(&host(), "https://Rack:1/"), "h0@https:%2F%2Frack:1");
        let name_of = |manager: &str| address_lock_name(&host(), manager);
        assert_ne!(name_of("unix:/missing/a-b"), name_of("unix:/missing/a/b"));
    }

    #[test]
    fn link_to_the_socket_has_the_lock_name_of_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, link) = (dir.path().join("manager.sock"), dir.path().join("link.sock"));
        let _listener = UnixListener::bind(&socket).unwrap();
        symlink(&socket, &link).unwrap();
        let name = |path: &Path| address_lock_name(&host(), &format!("unix:{}", path.display()));
        assert_eq!(name(&socket), name(&link));
    }

    #[test]
    fn agent_with_the_same_token_and_another_address_is_excluded() {
        let dir = tempfile::tempdir().unwrap();
        let acquire = |host: &str, manager: &str, token: &str| {
            HostLock::acquire_in(dir.path(), &Name::new(host).unwrap(), manager, &secrets(token))
        };
        let first = acquire("h0", "http://127.0.0.1:9750", "secret").unwrap();
        let error = acquire("h0", "http://localhost:9750", "secret").unwrap_err();
        assert!(matches!(error, HostLockError::InUse { .. }), "{error:?}");
        assert!(!error.to_string().contains("secret"), "{error}");
        let error = acquire("h0", "http://127.0.0.1:9750", "other").unwrap_err();
        assert!(matches!(error, HostLockError::InUse { .. }), "{error:?}");
        acquire("h0", "http://127.0.0.1:9751", "other").unwrap();
        acquire("h1", "http://127.0.0.1:9750", "secret").unwrap();
        drop(first);
        acquire("h0", "http://localhost:9750", "secret").unwrap();
    }

    #[test]
    fn credential_locks_depend_on_host_and_credential() {
        let name = |host: &str, secrets: &Secrets| {
            let names: Vec<_> = credential_lock_names(&Name::new(host).unwrap(), secrets).collect();
            assert!(names.iter().all(|name| name.starts_with(host)), "{names:?}");
            names.concat().replacen(host, "", 1)
        };
        let authority = |der: &[&[u8]]| Secrets {
            token: None,
            authorities: Some(der.iter().map(|der| der.to_vec().into()).collect()),
        };
        let all = [
            name("h0", &secrets("a")),
            name("h1", &secrets("a")),
            name("h0", &secrets("b")),
            name("h0", &authority(&[b"a"])),
            name("h0", &authority(&[b"a", b"b"])),
            name("h0", &authority(&[b"ab"])),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len(), "{all:?}");
    }
}
