//! Files that identify this host to the manager: its token, or its certificate and private key. A
//! token or key that other users can access is rejected.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::config::{Config, Tls};

/// Mode bits of all permissions of users other than the owner.
const OTHERS_MODE: u32 = 0o077;
/// Maximum length of a token, in bytes.
const TOKEN_BYTES_MAX: usize = 1024;
/// Mode bits of all permissions of users other than the owner and the group.
const WORLD_MODE: u32 = 0o007;

/// Error returned by [`read_secrets`].
#[derive(Debug, thiserror::Error)]
pub enum SecretsError {
    /// The token cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// File of the token.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// Other users can access the token.
    #[error("token {} has mode {mode:04o}: only its owner may access it; run `chmod 600 {}`", path.display(), path.display())]
    TokenOpen {
        /// File of the token.
        path: PathBuf,
        /// Mode of the file.
        mode: u32,
    },
    /// A certificate or its key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsFileError),
    /// The file does not contain a valid token.
    #[error("token {} must consist of 1 to {TOKEN_BYTES_MAX} printable characters", path.display())]
    NotAToken {
        /// File of the token.
        path: PathBuf,
    },
}

/// Error returned by [`read_tls`].
#[derive(Debug, thiserror::Error)]
pub enum TlsFileError {
    /// A file of `[tls]` cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// All users can access the private key.
    #[error("key {} has mode {mode:04o}: other users must not access it; run `chmod o= {}`", path.display(), path.display())]
    OpenKey {
        /// File of the key.
        path: PathBuf,
        /// Mode of the file.
        mode: u32,
    },
}

/// Reads the files of `[tls]`, and returns the configuration of the TLS client.
///
/// # Errors
/// [`TlsFileError`] if a file cannot be read, or all users can access the key.
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

/// Reads and checks the files that identify this host. Returns the token, if one is configured.
///
/// # Errors
/// [`SecretsError`] if a file cannot be read, can be accessed by other users, or contains no valid
/// token.
pub fn read_secrets(config: &Config) -> Result<Option<String>, SecretsError> {
    let token = config.token_file.as_deref().map(read_token).transpose()?;
    config.tls.as_ref().map(read_tls).transpose()?; // only a check: each connection reads them again
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
