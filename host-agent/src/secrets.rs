//! Files that identify this host to the manager: its token, or its certificate and key. A token or
//! key that is open to other users is rejected.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::config::{Config, Tls};

/// Permission bits of all users except the owner.
const OTHERS_MODE: u32 = 0o077;
/// Maximum length of a token.
const TOKEN_BYTES_MAX: usize = 1024;
/// Permission bits of users other than a key's owner and group.
const WORLD_MODE: u32 = 0o007;

/// Error returned by [`read_secrets`].
#[derive(Debug, thiserror::Error)]
pub enum SecretsError {
    /// The token cannot be read.
    #[error("read {}", path.display())]
    Read {
        /// File.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// Other users may read the token.
    #[error("token {} has mode {mode:04o}: must be readable by its owner only; `chmod 600` it", path.display())]
    TokenOpen {
        /// File.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A certificate or its key.
    #[error(transparent)]
    Tls(#[from] TlsFileError),
    /// The file contains no token.
    #[error("token {} must be 1 to {TOKEN_BYTES_MAX} printable characters", path.display())]
    NotAToken {
        /// File.
        path: PathBuf,
    },
}

/// Error returned by [`read_tls`].
#[derive(Debug, thiserror::Error)]
pub enum TlsFileError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// File.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// Every user may read or write the private key.
    #[error("key {} has mode {mode:04o}: must not be open to every user; `chmod o= {}`", path.display(), path.display())]
    OpenKey {
        /// File.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
}

/// Reads the files of `[tls]`.
///
/// # Errors
/// [`TlsFileError`] if one cannot be read, or the key is open to every user.
pub fn read_tls(tls: &Tls) -> Result<ClientTlsConfig, TlsFileError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |errno| TlsFileError::Read { path, errno }
    };
    let read = |path: &Path| fs::read(path).map_err(failed(path));
    let mode = fs::metadata(&tls.key).map_err(failed(&tls.key))?.mode() & 0o7777;
    if mode & WORLD_MODE != 0 {
        return Err(TlsFileError::OpenKey { path: tls.key.clone(), mode });
    }
    Ok(ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(read(&tls.ca)?))
        .identity(Identity::from_pem(read(&tls.certificate)?, read(&tls.key)?))
        .domain_name(&tls.server_name))
}

/// Reads the files that identify this host. Returns the token, if there is one.
///
/// # Errors
/// [`SecretsError`] if a file cannot be read, is open to other users, or contains no token.
pub fn read_secrets(config: &Config) -> Result<Option<String>, SecretsError> {
    let token = config.token_file.as_deref().map(read_token).transpose()?;
    config.tls.as_ref().map(read_tls).transpose()?; // read again at each connection
    Ok(token)
}

fn read_token(path: &Path) -> Result<String, SecretsError> {
    let failed = |errno| SecretsError::Read { path: path.to_owned(), errno };
    let metadata = fs::metadata(path).map_err(failed)?;
    let mode = metadata.mode() & 0o7777;
    if mode & OTHERS_MODE != 0 {
        return Err(SecretsError::TokenOpen { path: path.to_owned(), mode });
    }
    let token = fs::read_to_string(path).map_err(failed)?.trim().to_owned();
    let well_formed =
        (1..=TOKEN_BYTES_MAX).contains(&token.len()) && token.bytes().all(|b| b.is_ascii_graphic());
    if well_formed { Ok(token) } else { Err(SecretsError::NotAToken { path: path.to_owned() }) }
}
