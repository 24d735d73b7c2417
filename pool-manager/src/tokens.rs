//! Bearer tokens that authenticate hosts and roles on loopback addresses and unix sockets. A token
//! is a secret in a file that only its owner can read. The manager keeps only hashes of tokens in
//! memory. With TLS, certificates identify callers and tokens are not used.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
    fs::{self, DirBuilder, File},
    io::{self, Write},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use rustix::rand::GetRandomFlags;
use sha2::{Digest, Sha256};
use units::{Name, limits::TOKEN_FILE_BYTES_MAX};

use crate::{
    config::Host,
    folder_access, hex,
    role::Role,
    store::disk::{open_private_file, sync_parent_directory},
    token_paths::{host_token_directory, host_token_path, role_token_directory, role_token_path},
};

/// Number of random bytes of a token. Files contain tokens in hexadecimal.
const TOKEN_BYTES: usize = 32;

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
    #[error("cannot {operation} token {}", path.display())]
    Io {
        /// Operation, such as "open".
        operation: &'static str,
        /// File or directory of the operation.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
    /// The file does not contain a token.
    #[error("token {} is malformed: must be 64 hexadecimal digits (0-9, a-f); delete the file to create a new token", path.display())]
    Malformed {
        /// File of the token.
        path: PathBuf,
    },
    /// Two hosts or roles have the same token.
    #[error(
        "token of {second} equals the token of {first}: must be unique; delete the file of one of them to create a new token"
    )]
    Duplicate {
        /// Host or role that was loaded first.
        first: String,
        /// Other host or role.
        second: String,
    },
}

impl Tokens {
    /// Loads the tokens of `hosts` and of all roles, as [`Tokens::prepare`], and creates the
    /// missing files.
    ///
    /// # Errors
    /// [`TokenError`] for the first file that cannot be used.
    pub fn load(store: &Path, hosts: &[Host]) -> Result<Self, TokenError> {
        let (tokens, new_files) = Self::prepare(store, hosts)?;
        new_files.create()?;
        Ok(tokens)
    }

    /// Reads the tokens of `hosts` and of all roles from the store's directory, and generates the
    /// missing tokens. The file of a host is `tokens/HOST.token`, unless `rack.toml` contains the
    /// hash of its token. The file of a role is `roles/ROLE.token`. The generated tokens have no
    /// files until [`NewTokenFiles::create`] is called.
    ///
    /// # Errors
    /// [`TokenError`] for the first file that cannot be used.
    pub fn prepare(store: &Path, hosts: &[Host]) -> Result<(Self, NewTokenFiles), TokenError> {
        let (mut tokens, mut unique) = (Self::default(), UniqueTokens::default());
        let mut new_files = NewTokenFiles {
            directories: [host_token_directory(store), role_token_directory(store)],
            tokens: Vec::new(),
            has_existing: false,
        };
        for host in hosts {
            let hash = match host.token_sha256 {
                Some(hash) => hash,
                None => new_files.read_or_generate_hash(host_token_path(store, &host.name))?,
            };
            unique.add(hash, format!("host {}", host.name))?;
            tokens.hosts.insert(host.name.clone(), hash);
        }
        for role in Role::ALL {
            let hash = new_files.read_or_generate_hash(role_token_path(store, role))?;
            unique.add(hash, format!("role {role}"))?;
            tokens.roles.insert(role, hash);
        }
        Ok((tokens, new_files))
    }

    /// Returns whether `presented` is the token of the host. The comparison takes constant time.
    pub fn is_host_token(&self, host: &Name, presented: &str) -> bool {
        self.hosts.get(host).is_some_and(|expected| is_equal_hash(expected, &hash_token(presented)))
    }

    /// Returns whether `presented` is the token of the role. The comparison takes constant time.
    pub fn is_role_token(&self, role: Role, presented: &str) -> bool {
        self.roles.get(&role).is_some_and(|expected| is_equal_hash(expected, &hash_token(presented)))
    }
}

/// Hosts and roles by the hashes of their tokens. Of two callers with the same token, each could act
/// as the other.
#[derive(Default)]
struct UniqueTokens(BTreeMap<[u8; 32], String>);

impl UniqueTokens {
    fn add(&mut self, hash: [u8; 32], owner: String) -> Result<(), TokenError> {
        match self.0.entry(hash) {
            Entry::Vacant(entry) => drop(entry.insert(owner)),
            Entry::Occupied(first) => {
                return Err(TokenError::Duplicate { first: first.get().clone(), second: owner });
            }
        }
        Ok(())
    }
}

/// Generated tokens whose files do not exist yet.
pub struct NewTokenFiles {
    directories: [PathBuf; 2],
    /// Path and hexadecimal digits of each token.
    tokens: Vec<(PathBuf, String)>,
    /// Whether a file of another token exists.
    has_existing: bool,
}

impl fmt::Debug for NewTokenFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewTokenFiles").field("directories", &self.directories).finish_non_exhaustive()
    }
}

impl NewTokenFiles {
    /// Returns whether the file of at least one token exists.
    pub fn has_existing(&self) -> bool {
        self.has_existing
    }

    /// Creates the directories of the tokens if they are missing, and the file of each token.
    ///
    /// # Errors
    /// [`TokenError::Io`] for the first directory or file that cannot be created.
    pub fn create(&self) -> Result<(), TokenError> {
        for directory in &self.directories {
            create_directory(directory)?;
        }
        for (path, digits) in &self.tokens {
            create_token(path, digits)?;
        }
        Ok(())
    }

    /// Returns the hash of the token in a file. Generates a token if the file does not exist.
    fn read_or_generate_hash(&mut self, path: PathBuf) -> Result<[u8; 32], TokenError> {
        match config_file::open_regular(&path) {
            Err(errno) if errno.kind() == io::ErrorKind::NotFound => {
                let digits = generate_token().map_err(io_error("create", &path))?;
                let hash = hash_token(&digits);
                self.tokens.push((path, digits));
                Ok(hash)
            }
            opened => {
                let file = opened.map_err(io_error("open", &path))?;
                self.has_existing = true;
                read_token(&path, file).map(|token| hash_token(&token))
            }
        }
    }
}

fn is_equal_hash(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

fn create_directory(directory: &Path) -> Result<(), TokenError> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    created.map_err(io_error("create the directory of", directory))
}

fn hash_token(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

fn io_error(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> TokenError {
    move |errno| TokenError::Io { operation, path: path.to_owned(), errno }
}

fn read_token(path: &Path, file: File) -> Result<String, TokenError> {
    folder_access::check_private_file(&file, path).map_err(io_error("use", path))?;
    let contents = config_file::read_limited(file, TOKEN_FILE_BYTES_MAX).map_err(io_error("read", path))?;
    let text = String::from_utf8_lossy(&contents);
    let token = text.trim_end();
    hex::parse_sha256(token).ok_or_else(|| TokenError::Malformed { path: path.to_owned() })?;
    Ok(token.to_owned())
}

/// Returns the hexadecimal digits of a new token from random numbers of the kernel.
fn generate_token() -> io::Result<String> {
    let mut bytes = [0; TOKEN_BYTES];
    let read = rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())?;
    if read != TOKEN_BYTES {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Creates the file of a new token, atomically and durably. Otherwise a crash could lose a token
/// that was already copied to its host.
fn create_token(path: &Path, digits: &str) -> Result<(), TokenError> {
    let partial = path.with_extension("token.partial");
    write_partial_token(&partial, digits).map_err(io_error("create", &partial))?;
    fs::rename(&partial, path).map_err(io_error("create", path))?;
    sync_parent_directory(path).map_err(io_error("sync the directory of", path))
}

fn write_partial_token(partial: &Path, digits: &str) -> io::Result<()> {
    let mut file = open_private_file(partial)?;
    file.set_len(0)?; // a crash can leave a partial token
    writeln!(file, "{digits}")?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use units::Bytes;

    use super::*;
    use crate::test_files::{create_fifo, run_with_timeout};

    fn host(name: &str, token_sha256: Option<[u8; 32]>) -> Host {
        let name = Name::new(name).unwrap();
        Host { name, cores: 1, local: Bytes::mib(1), emcs: vec![], token_sha256 }
    }

    #[test]
    fn host_is_admitted_by_its_own_token_only() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", None), host("h1", None)];
        let tokens = Tokens::load(store.path(), &hosts).unwrap();
        let token = |name: &Name| {
            fs::read_to_string(host_token_path(store.path(), name)).unwrap().trim_end().to_owned()
        };
        for this in &hosts {
            for other in &hosts {
                assert_eq!(tokens.is_host_token(&this.name, &token(&other.name)), this == other);
            }
            assert!(!tokens.is_host_token(&this.name, ""));
        }
        assert!(!tokens.is_host_token(&Name::new("h2").unwrap(), &token(&hosts[0].name)));
    }

    #[test]
    fn token_files_are_created_once_with_private_modes() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", None)];
        let first = Tokens::load(store.path(), &hosts).unwrap();
        assert_eq!(Tokens::load(store.path(), &hosts).unwrap(), first);
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&host_token_path(store.path(), &hosts[0].name)), 0o600);
        assert_eq!(mode(&store.path().join("tokens")), 0o700);
        assert_eq!(
            fs::read_dir(store.path().join("tokens")).unwrap().count(),
            1,
            "a temporary file was left"
        );
    }

    #[test]
    fn prepared_tokens_have_no_files_until_they_are_created() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", None)];
        let (tokens, new_files) = Tokens::prepare(store.path(), &hosts).unwrap();
        assert_eq!(fs::read_dir(store.path()).unwrap().count(), 0);
        new_files.create().unwrap();
        assert_eq!(Tokens::load(store.path(), &hosts).unwrap(), tokens);
    }

    #[test]
    fn role_is_admitted_by_its_own_token_only() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("admin", None)];
        let tokens = Tokens::load(store.path(), &hosts).unwrap();
        let read = |path: PathBuf| fs::read_to_string(path).unwrap().trim_end().to_owned();
        let of_role = |role| read(role_token_path(store.path(), role));
        for role in Role::ALL {
            for other in Role::ALL {
                assert_eq!(tokens.is_role_token(role, &of_role(other)), role == other);
            }
            assert!(!tokens.is_role_token(role, ""));
            assert!(!tokens.is_role_token(role, &read(host_token_path(store.path(), &hosts[0].name))));
            assert!(!tokens.is_host_token(&hosts[0].name, &of_role(role)));
            let mode = fs::metadata(role_token_path(store.path(), role)).unwrap().mode() & 0o777;
            assert_eq!(mode, 0o600);
        }
        assert_eq!(Tokens::load(store.path(), &hosts).unwrap(), tokens);
    }

    #[test]
    fn host_with_configured_hash_needs_no_token_file() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", Some(hash_token("secret")))];
        let tokens = Tokens::load(store.path(), &hosts).unwrap();
        assert!(tokens.is_host_token(&hosts[0].name, "secret"));
        assert!(!host_token_path(store.path(), &hosts[0].name).exists());
    }

    #[test]
    fn token_accessible_to_others_is_rejected() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", None)];
        Tokens::load(store.path(), &hosts).unwrap();
        let file = host_token_path(store.path(), &hosts[0].name);
        for mode in [0o640, 0o604, 0o620, 0o601] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            let error = units::chain(&Tokens::load(store.path(), &hosts).unwrap_err());
            assert!(
                error.contains(&format!("has mode {mode:04o}: must be accessible to its owner only")),
                "{error}"
            );
        }
    }

    #[test]
    fn token_of_two_hosts_or_roles_is_rejected() {
        let hosts = [host("h0", None), host("h1", None), host("h2", Some(hash_token(&"2".repeat(64))))];
        let cases = [
            (["tokens/h0", "tokens/h1"], "1", "token of host h1 equals the token of host h0: must be unique"),
            (["roles/scheduler", "roles/admin"], "1", "equals the token of role"),
            (
                ["tokens/h1", "roles/admin"],
                "1",
                "token of role admin equals the token of host h1: must be unique",
            ),
            (["tokens/h1", "tokens/h1"], "2", "token of host h2 equals the token of host h1: must be unique"),
        ];
        for (files, digit, expected) in cases {
            let store = tempfile::tempdir().unwrap();
            Tokens::load(store.path(), &hosts).unwrap();
            for file in files {
                fs::write(store.path().join(format!("{file}.token")), digit.repeat(64)).unwrap();
            }
            let error = Tokens::load(store.path(), &hosts).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn token_that_is_no_regular_file_is_rejected() {
        for create in [create_fifo, |path: &Path| fs::create_dir(path).unwrap()] {
            let store = tempfile::tempdir().unwrap();
            let hosts = [host("h0", None)];
            let file = host_token_path(store.path(), &hosts[0].name);
            fs::create_dir(host_token_directory(store.path())).unwrap();
            create(&file);
            let path = store.path().to_owned();
            let error = run_with_timeout(move || Tokens::load(&path, &hosts)).unwrap_err();
            let expected = format!("cannot open token {}: must be a regular file", file.display());
            assert_eq!(units::chain(&error), expected);
        }
    }

    #[test]
    fn error_of_a_new_token_names_the_partial_file() {
        let store = tempfile::tempdir().unwrap();
        let partial = host_token_directory(store.path()).join("h0.token.partial");
        fs::create_dir_all(&partial).unwrap();
        let error = Tokens::load(store.path(), &[host("h0", None)]).unwrap_err();
        let expected = format!("cannot create token {}: Is a directory", partial.display());
        assert!(units::chain(&error).starts_with(&expected), "{}", units::chain(&error));
    }

    #[test]
    fn malformed_token_is_rejected() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", None)];
        Tokens::load(store.path(), &hosts).unwrap();
        for content in ["", "0123", &"G".repeat(64), &"0".repeat(65), &"0".repeat(128)] {
            fs::write(host_token_path(store.path(), &hosts[0].name), content).unwrap();
            assert!(
                matches!(Tokens::load(store.path(), &hosts), Err(TokenError::Malformed { .. })),
                "{content:?}"
            );
        }
    }
}
