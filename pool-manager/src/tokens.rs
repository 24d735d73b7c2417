//! Bearer tokens that authenticate hosts and roles on loopback addresses and unix sockets. A token
//! is a secret in a file that only its owner can read. The manager keeps only hashes of tokens in
//! memory. With TLS, certificates identify callers and tokens are not used.

use std::{
    collections::BTreeMap,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::rand::GetRandomFlags;
use sha2::{Digest, Sha256};
use units::Name;

use crate::{config::Host, hex, role::Role};

/// Number of random bytes of a token. Files contain tokens in hexadecimal.
const TOKEN_BYTES: usize = 32;
/// Permission bits of all users except the owner.
const GROUP_AND_OTHERS: u32 = 0o077;

/// SHA-256 hashes of the tokens of all hosts and roles.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    hosts: BTreeMap<Name, [u8; 32]>,
    roles: BTreeMap<Role, [u8; 32]>,
}

/// Error of a file with a token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The operating system rejected an operation.
    #[error("cannot {doing} {}", path.display())]
    Io {
        /// Operation, such as "open".
        doing: &'static str,
        /// File or directory of the operation.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
    /// Users other than the owner can access the file.
    #[error("token {} has mode {mode:04o}: must be accessible to its owner only; run `chmod 600` on it, or delete it to create a new token", path.display())]
    Permissions {
        /// File of the token.
        path: PathBuf,
        /// Mode of the file.
        mode: u32,
    },
    /// The file does not contain a token.
    #[error("token {} is malformed: must be 64 hexadecimal digits (0-9, a-f); delete the file to create a new token", path.display())]
    Malformed {
        /// File of the token.
        path: PathBuf,
    },
}

impl Tokens {
    /// Loads the tokens of `hosts` and of all roles from the store's directory. The file of a host
    /// is `tokens/HOST.token`, unless `rack.toml` contains the hash of its token. The file of a
    /// role is `roles/ROLE.token`. Missing files are created.
    ///
    /// # Errors
    /// [`TokenError`] for the first file that cannot be used.
    pub fn load(store: &Path, hosts: &[Host]) -> Result<Self, TokenError> {
        create_directory(&directory(store))?;
        create_directory(&role_directory(store))?;
        let hosts = hosts.iter().map(|host| {
            let from_file = || read_or_create(&path(store, &host.name)).map(|token| hash(&token));
            Ok((host.name.clone(), host.token_sha256.map_or_else(from_file, Ok)?))
        });
        let roles = Role::ALL.map(|role| Ok((role, hash(&read_or_create(&role_path(store, role))?))));
        Ok(Self {
            hosts: hosts.collect::<Result<_, _>>()?,
            roles: roles.into_iter().collect::<Result<_, _>>()?,
        })
    }

    /// Returns whether `presented` is the token of the host. The comparison takes constant time.
    pub fn admits(&self, host: &Name, presented: &str) -> bool {
        self.hosts.get(host).is_some_and(|expected| is_equal(expected, &hash(presented)))
    }

    /// Returns whether `presented` is the token of the role. The comparison takes constant time.
    pub fn admits_role(&self, role: Role, presented: &str) -> bool {
        self.roles.get(&role).is_some_and(|expected| is_equal(expected, &hash(presented)))
    }
}

fn is_equal(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

fn create_directory(directory: &Path) -> Result<(), TokenError> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    created.map_err(io_error("create", directory))
}

/// Returns the directory of the hosts' tokens. `store` is the directory of the store.
pub fn directory(store: &Path) -> PathBuf {
    store.join("tokens")
}

/// Returns the path of the file with a host's token.
pub fn path(store: &Path, host: &Name) -> PathBuf {
    directory(store).join(format!("{host}.token"))
}

/// Returns the directory of the roles' tokens. `store` is the directory of the store.
pub fn role_directory(store: &Path) -> PathBuf {
    store.join("roles")
}

/// Returns the path of the file with a role's token.
pub fn role_path(store: &Path, role: Role) -> PathBuf {
    role_directory(store).join(format!("{role}.token"))
}

fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

fn io_error(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> TokenError {
    move |errno| TokenError::Io { doing, path: path.to_owned(), errno }
}

fn read_or_create(path: &Path) -> Result<String, TokenError> {
    match File::open(path) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => {
            create(path).map_err(io_error("create", path))?;
            read(path, File::open(path).map_err(io_error("open", path))?)
        }
        opened => read(path, opened.map_err(io_error("open", path))?),
    }
}

fn read(path: &Path, file: File) -> Result<String, TokenError> {
    let mode = file.metadata().map_err(io_error("get the mode of", path))?.mode() & 0o7777;
    if mode & GROUP_AND_OTHERS != 0 {
        return Err(TokenError::Permissions { path: path.to_owned(), mode });
    }
    let text = io::read_to_string(file).map_err(io_error("read", path))?;
    let token = text.trim_end();
    hex::parse_sha256(token).ok_or_else(|| TokenError::Malformed { path: path.to_owned() })?;
    Ok(token.to_owned())
}

/// Creates a file with a new token, atomically and durably. Otherwise a crash could lose a token
/// that was already copied to its host.
fn create(path: &Path) -> io::Result<()> {
    let partial = path.with_extension("token.partial");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    let mut bytes = [0; TOKEN_BYTES];
    let read = rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())?;
    if read != TOKEN_BYTES {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    writeln!(file, "{digits}")?;
    file.sync_all()?;
    fs::rename(&partial, path)?;
    File::open(path.parent().expect("the path of a token has a parent directory"))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use units::Bytes;

    use super::*;

    fn host(name: &str, token_sha256: Option<[u8; 32]>) -> Host {
        let name = Name::new(name).unwrap();
        Host { name, cores: 1, local: Bytes::mib(1), emcs: vec![], token_sha256 }
    }

    #[test]
    fn host_is_admitted_by_its_own_token_only() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", None), host("h1", None)];
        let tokens = Tokens::load(store.path(), &hosts).unwrap();
        let token = |name: &Name| fs::read_to_string(path(store.path(), name)).unwrap().trim_end().to_owned();
        for this in &hosts {
            for other in &hosts {
                assert_eq!(tokens.admits(&this.name, &token(&other.name)), this == other);
            }
            assert!(!tokens.admits(&this.name, ""));
        }
        assert!(!tokens.admits(&Name::new("h2").unwrap(), &token(&hosts[0].name)));
    }

    #[test]
    fn token_files_are_created_once_with_private_modes() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", None)];
        let first = Tokens::load(store.path(), &hosts).unwrap();
        assert_eq!(Tokens::load(store.path(), &hosts).unwrap(), first);
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&path(store.path(), &hosts[0].name)), 0o600);
        assert_eq!(mode(&store.path().join("tokens")), 0o700);
        assert_eq!(
            fs::read_dir(store.path().join("tokens")).unwrap().count(),
            1,
            "a temporary file was left"
        );
    }

    #[test]
    fn role_is_admitted_by_its_own_token_only() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("admin", None)];
        let tokens = Tokens::load(store.path(), &hosts).unwrap();
        let read = |path: PathBuf| fs::read_to_string(path).unwrap().trim_end().to_owned();
        let of_role = |role| read(role_path(store.path(), role));
        for role in Role::ALL {
            for other in Role::ALL {
                assert_eq!(tokens.admits_role(role, &of_role(other)), role == other);
            }
            assert!(!tokens.admits_role(role, ""));
            assert!(!tokens.admits_role(role, &read(path(store.path(), &hosts[0].name))));
            assert!(!tokens.admits(&hosts[0].name, &of_role(role)));
            let mode = fs::metadata(role_path(store.path(), role)).unwrap().mode() & 0o777;
            assert_eq!(mode, 0o600);
        }
        assert_eq!(Tokens::load(store.path(), &hosts).unwrap(), tokens);
    }

    #[test]
    fn host_with_configured_hash_needs_no_token_file() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", Some(hash("secret")))];
        let tokens = Tokens::load(store.path(), &hosts).unwrap();
        assert!(tokens.admits(&hosts[0].name, "secret"));
        assert!(!path(store.path(), &hosts[0].name).exists());
    }

    #[test]
    fn token_accessible_to_others_is_rejected() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", None)];
        Tokens::load(store.path(), &hosts).unwrap();
        let file = path(store.path(), &hosts[0].name);
        for mode in [0o640, 0o604, 0o620, 0o601] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            let error = Tokens::load(store.path(), &hosts).unwrap_err().to_string();
            assert!(
                error.contains(&format!("has mode {mode:04o}: must be accessible to its owner only")),
                "{error}"
            );
        }
    }

    #[test]
    fn malformed_token_is_rejected() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", None)];
        Tokens::load(store.path(), &hosts).unwrap();
        for content in ["", "0123", &"G".repeat(64), &"0".repeat(65), &"0".repeat(128)] {
            fs::write(path(store.path(), &hosts[0].name), content).unwrap();
            assert!(
                matches!(Tokens::load(store.path(), &hosts), Err(TokenError::Malformed { .. })),
                "{content:?}"
            );
        }
    }
}
