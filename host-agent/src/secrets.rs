//! Files that identify this host to the manager: its token, or its certificate and private key.
//! The mode of the token file must grant nothing to group and others, and the mode of the key file
//! nothing to others. The owner of these files is not checked.

use std::{
    fs::File,
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use tonic::transport::{Certificate, ClientTlsConfig, Identity};
use units::limits::{PEM_FILE_BYTES_MAX, TOKEN_FILE_BYTES_MAX};

use crate::config::{Config, Tls};

/// Name of the configuration key for the token file.
pub(crate) const TOKEN_FIELD: &str = "agent.token_file";
/// Name of the configuration key for the file of the private key.
pub(crate) const KEY_FIELD: &str = "tls.key";
/// Name of the configuration key for the certificate of the authority.
pub(crate) const CA_FIELD: &str = "tls.ca";
/// Name of the configuration key for the host's certificate.
pub(crate) const CERTIFICATE_FIELD: &str = "tls.certificate";
/// Mode bits of all permissions, in the mode of a file.
pub(crate) const MODE_MASK: u32 = 0o7777;
/// Mode bits that the token file must not have: all permissions of group and others.
pub(crate) const NON_OWNER_MODE: u32 = 0o077;
/// Maximum length of a token, in bytes.
const TOKEN_BYTES_MAX: usize = 1024;
/// Mode bits that the file of the private key must not have: all permissions of others. The group
/// may have access.
pub(crate) const WORLD_MODE: u32 = 0o007;

/// Error of a file that identifies this host.
#[derive(Debug, thiserror::Error)]
pub enum SecretsError {
    /// A file cannot be read.
    #[error("{field}: cannot read {}", path.display())]
    Read {
        /// Key of the file in host.toml.
        field: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// The path of a file is a directory.
    #[error("{field}: {} is a directory: must be a file", path.display())]
    Directory {
        /// Key of the file in host.toml.
        field: &'static str,
        /// Path of the directory.
        path: PathBuf,
    },
    /// The mode of the token file grants permissions to group or others.
    #[error("{TOKEN_FIELD}: {} has mode {mode:04o}: only its owner may access it; run `chmod 600 {}`", path.display(), path.display())]
    TokenAccessible {
        /// File of the token.
        path: PathBuf,
        /// Mode of the file.
        mode: u32,
    },
    /// The mode of the key file grants permissions to others.
    #[error("{KEY_FIELD}: {} has mode {mode:04o}: other users must not access it; run `chmod o= {}`", path.display(), path.display())]
    KeyAccessible {
        /// File of the key.
        path: PathBuf,
        /// Mode of the file.
        mode: u32,
    },
    /// The file does not contain a valid token.
    #[error("{TOKEN_FIELD}: {} must consist of 1 to {TOKEN_BYTES_MAX} printable characters", path.display())]
    NotAToken {
        /// File of the token.
        path: PathBuf,
    },
}

/// Reads and checks the files that identify this host. Returns the token, if one is configured.
///
/// # Errors
/// [`SecretsError`] if a file cannot be read, the mode of the token file or of the key file grants
/// too many permissions, or the token file contains no valid token.
pub fn read_secrets(config: &Config) -> Result<Option<String>, SecretsError> {
    let token = config.token_file.as_deref().map(read_token).transpose()?;
    config.tls.as_ref().map(read_tls).transpose()?; // only a check: each connection reads them again
    Ok(token)
}

/// Reads the files of `[tls]`, and returns the configuration of the TLS client.
///
/// # Errors
/// [`SecretsError`] if a file cannot be read, or the mode of the key file grants permissions to
/// others.
pub fn read_tls(tls: &Tls) -> Result<ClientTlsConfig, SecretsError> {
    let (key, mode) = read_file(KEY_FIELD, &tls.key, PEM_FILE_BYTES_MAX)?;
    if mode & WORLD_MODE != 0 {
        return Err(SecretsError::KeyAccessible { path: tls.key.clone(), mode });
    }
    let (ca, _) = read_file(CA_FIELD, &tls.ca, PEM_FILE_BYTES_MAX)?;
    let (certificate, _) = read_file(CERTIFICATE_FIELD, &tls.certificate, PEM_FILE_BYTES_MAX)?;
    Ok(ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(ca))
        .identity(Identity::from_pem(certificate, key))
        .domain_name(&tls.server_name))
}

fn read_token(path: &Path) -> Result<String, SecretsError> {
    let (contents, mode) = read_file(TOKEN_FIELD, path, TOKEN_FILE_BYTES_MAX)?;
    if mode & NON_OWNER_MODE != 0 {
        return Err(SecretsError::TokenAccessible { path: path.to_owned(), mode });
    }
    let token = String::from_utf8_lossy(&contents).trim().to_owned();
    let well_formed =
        (1..=TOKEN_BYTES_MAX).contains(&token.len()) && token.bytes().all(|b| b.is_ascii_graphic());
    if well_formed { Ok(token) } else { Err(SecretsError::NotAToken { path: path.to_owned() }) }
}

/// Returns the contents and the mode of a file of at most `max` bytes.
fn read_file(field: &'static str, path: &Path, max: usize) -> Result<(Vec<u8>, u32), SecretsError> {
    let failed = |errno| SecretsError::Read { field, path: path.to_owned(), errno };
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_dir() {
        return Err(SecretsError::Directory { field, path: path.to_owned() });
    }
    let contents = config_file::read_limited(file, max).map_err(failed)?;
    Ok((contents, metadata.mode() & MODE_MASK))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn config(dir: &Path, has_tls: bool) -> Config {
        let (agent, tls) = if has_tls {
            let tls =
                "[tls]\nca = \"ca\"\ncertificate = \"certificate\"\nkey = \"key\"\nserver_name = \"m\"\n";
            ("manager = \"https://10.0.0.1:9750\"", tls)
        } else {
            ("token_file = \"token\"", "")
        };
        let text = format!(
            "[agent]\nhost = \"h0\"\nruntime_dir = \"run\"\n{agent}\n{tls}[backend]\nkind = \"emulated\"\n"
        );
        Config::parse(&text, &dir.join("host.toml")).unwrap()
    }

    #[track_caller]
    fn assert_rejected(config: &Config, start: &str, end: &str) {
        let error = units::chain(&read_secrets(config).unwrap_err());
        assert!(error.starts_with(start) && error.contains(end), "{error}");
    }

    #[test]
    fn unusable_token_is_an_error_with_its_field() {
        let dir = tempfile::tempdir().unwrap();
        let (config, token) = (config(dir.path(), false), dir.path().join("token"));
        assert_rejected(&config, "agent.token_file: cannot read ", "token: No such file");
        fs::create_dir(&token).unwrap();
        assert_rejected(&config, "agent.token_file: ", "token is a directory: must be a file");
        fs::remove_dir(&token).unwrap();
        fs::write(&token, "two words").unwrap();
        set_mode(&token, 0o640);
        assert_rejected(&config, "agent.token_file: ", "token has mode 0640");
        set_mode(&token, 0o600);
        assert_rejected(&config, "agent.token_file: ", "printable characters");
        fs::write(&token, "secret\n").unwrap();
        assert_eq!(read_secrets(&config).unwrap().as_deref(), Some("secret"));
    }

    #[test]
    fn unusable_tls_file_is_an_error_with_its_field() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), true);
        for name in ["ca", "certificate", "key"] {
            fs::write(dir.path().join(name), "PEM").unwrap();
        }
        set_mode(&dir.path().join("key"), 0o600);
        assert_eq!(read_secrets(&config).unwrap(), None);
        set_mode(&dir.path().join("key"), 0o660);
        assert_eq!(read_secrets(&config).unwrap(), None);
        set_mode(&dir.path().join("key"), 0o604);
        assert_rejected(
            &config,
            "tls.key: ",
            "key has mode 0604: other users must not access it; run `chmod o= ",
        );
        for name in ["key", "certificate", "ca"] {
            let path = dir.path().join(name);
            fs::remove_file(&path).unwrap();
            assert_rejected(&config, &format!("tls.{name}: cannot read "), "No such file");
            fs::create_dir(&path).unwrap();
            assert_rejected(&config, &format!("tls.{name}: "), "is a directory: must be a file");
            fs::remove_dir(&path).unwrap();
            fs::write(&path, "PEM").unwrap();
            set_mode(&path, 0o600);
        }
    }

    fn set_mode(path: &Path, mode: u32) {
        use std::os::unix::fs::PermissionsExt as _;
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
}
