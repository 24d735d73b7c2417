//! Bearer tokens of hosts and of roles, for loopback addresses and unix sockets. A token is a secret in a file that only
//! its owner can read; the manager keeps its hash. Over TLS the certificate identifies the caller, and tokens are unused.

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

use crate::{config::Host, role::Role};

/// A token is so many random bytes, written as hexadecimal digits.
const TOKEN_BYTES: usize = 32;
/// Permissions of anybody but the owner.
const OTHERS: u32 = 0o077;

/// SHA-256 of the token of each host and of each role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    hosts: BTreeMap<Name, [u8; 32]>,
    roles: BTreeMap<Role, [u8; 32]>,
}

/// Why there are no tokens.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The operating system refused.
    #[error("{doing} {}", path.display())]
    Io {
        /// Operation.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// Others than its owner may read it or write it.
    #[error("token {} has mode {mode:04o}: must be the owner's alone; `chmod 600` it, or delete it for a new one", path.display())]
    Open {
        /// Which file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// It is not a token.
    #[error("token {} holds no token: must be 64 digits of 0-9 a-f; delete it for a new one", path.display())]
    NotAToken {
        /// Which file.
        path: PathBuf,
    },
}

impl Tokens {
    /// Returns the tokens of these hosts and of all roles. A host's token has its hash in `rack.toml`, or else is the file
    /// `tokens/HOST.token` in the store's directory; a role's is `roles/ROLE.token`. Missing files are made.
    ///
    /// # Errors
    /// [`TokenError`] for the first file that cannot be used.
    pub fn load(store: &Path, hosts: &[Host]) -> Result<Self, TokenError> {
        make_directory(&directory(store))?;
        make_directory(&role_directory(store))?;
        let hosts = hosts.iter().map(|host| {
            let from_file = || read_or_make(&path(store, &host.name)).map(|token| hash(&token));
            Ok((host.name.clone(), host.token_sha256.map_or_else(from_file, Ok)?))
        });
        let roles = Role::ALL.map(|role| Ok((role, hash(&read_or_make(&role_path(store, role))?))));
        Ok(Self {
            hosts: hosts.collect::<Result<_, _>>()?,
            roles: roles.into_iter().collect::<Result<_, _>>()?,
        })
    }

    /// Returns whether this is the host's token, in a time that does not depend on how much of it is right.
    pub fn admits(&self, host: &Name, presented: &str) -> bool {
        self.hosts.get(host).is_some_and(|wanted| is_equal(wanted, &hash(presented)))
    }

    /// Returns whether this is the role's token, in a time that does not depend on how much of it is right.
    pub fn admits_role(&self, role: Role, presented: &str) -> bool {
        self.roles.get(&role).is_some_and(|wanted| is_equal(wanted, &hash(presented)))
    }
}

fn is_equal(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

fn make_directory(directory: &Path) -> Result<(), TokenError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(io_error("make", directory))
}

/// The folder of all tokens in the folder of a store.
pub fn directory(store: &Path) -> PathBuf {
    store.join("tokens")
}

/// The file that holds a host's token.
pub fn path(store: &Path, host: &Name) -> PathBuf {
    directory(store).join(format!("{host}.token"))
}

/// The folder of the roles' tokens in the folder of a store.
pub fn role_directory(store: &Path) -> PathBuf {
    store.join("roles")
}

/// The file that holds a role's token.
pub fn role_path(store: &Path, role: Role) -> PathBuf {
    role_directory(store).join(format!("{role}.token"))
}

/// 32 bytes from 64 lower-case hexadecimal digits.
pub fn from_hex(digits: &str) -> Option<[u8; 32]> {
    let value = |digit: &u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let pairs: &[[u8; 2]; 32] = digits.as_bytes().as_chunks().0.try_into().ok()?;
    let mut bytes = [0; 32];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = value(high)? << 4 | value(low)?;
    }
    (digits.len() == 64).then_some(bytes)
}

fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

fn io_error(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> TokenError {
    move |errno| TokenError::Io { doing, path: path.to_owned(), errno }
}

fn read_or_make(path: &Path) -> Result<String, TokenError> {
    match File::open(path) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => {
            make(path).map_err(io_error("make", path))?;
            read(path, File::open(path).map_err(io_error("open", path))?)
        }
        opened => read(path, opened.map_err(io_error("open", path))?),
    }
}

fn read(path: &Path, file: File) -> Result<String, TokenError> {
    let mode = file.metadata().map_err(io_error("ask the mode of", path))?.mode() & 0o7777;
    if mode & OTHERS != 0 {
        return Err(TokenError::Open { path: path.to_owned(), mode });
    }
    let text = io::read_to_string(file).map_err(io_error("read", path))?;
    let token = text.trim_end();
    from_hex(token).ok_or_else(|| TokenError::NotAToken { path: path.to_owned() })?;
    Ok(token.to_owned())
}

/// Whole or not at all, and durable: the host may have been given a copy when the manager comes back.
fn make(path: &Path) -> io::Result<()> {
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
    File::open(path.parent().expect("a token lies in a folder"))?.sync_all()
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
    fn a_host_is_admitted_by_its_own_token_and_no_other() {
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
    fn tokens_are_made_once_and_for_their_owner_alone() {
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
            "something was left behind"
        );
    }

    #[test]
    fn role_is_admitted_by_its_own_token_and_no_other() {
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
    fn a_hash_in_the_configuration_needs_no_file() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", Some(hash("secret")))];
        let tokens = Tokens::load(store.path(), &hosts).unwrap();
        assert!(tokens.admits(&hosts[0].name, "secret"));
        assert!(!path(store.path(), &hosts[0].name).exists());
    }

    #[test]
    fn a_token_that_others_can_read_is_refused() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", None)];
        Tokens::load(store.path(), &hosts).unwrap();
        let file = path(store.path(), &hosts[0].name);
        for mode in [0o640, 0o604, 0o620, 0o601] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            let error = Tokens::load(store.path(), &hosts).unwrap_err().to_string();
            assert!(error.contains(&format!("has mode {mode:04o}: must be the owner's alone")), "{error}");
        }
    }

    #[test]
    fn half_a_token_is_refused() {
        let store = tempfile::tempdir().unwrap();
        let hosts = [host("h0", None)];
        Tokens::load(store.path(), &hosts).unwrap();
        for half in ["", "0123", &"G".repeat(64), &"0".repeat(65), &"0".repeat(128)] {
            fs::write(path(store.path(), &hosts[0].name), half).unwrap();
            assert!(
                matches!(Tokens::load(store.path(), &hosts), Err(TokenError::NotAToken { .. })),
                "{half:?}"
            );
        }
    }
}
