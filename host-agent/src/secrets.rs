//! Files that identify this host to the manager: its token, or its certificate and private key.
//! The mode of the token file must grant nothing to group and others, and the mode of the key file
//! nothing to others. The owner of these files is not checked.

use std::{
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use service_files::{
    certificates::{CertificateError, PemFile},
    client_certificates::{ClientFiles, ClientIdentity, ClientPem},
};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};
use units::limits::TOKEN_FILE_BYTES_MAX;

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

/// Error of a file that identifies this host.
#[derive(Debug, thiserror::Error)]
pub enum SecretsError {
    /// The file of the token cannot be read.
    #[error("{TOKEN_FIELD}: cannot read {}", path.display())]
    Read {
        /// File of the token.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// The mode of the token file grants permissions to group or others.
    #[error("{TOKEN_FIELD}: {} has mode {mode:04o}: only its owner may access it; run `chmod 600 {}`", path.display(), path.display())]
    TokenAccessible {
        /// File of the token.
        path: PathBuf,
        /// Mode of the file.
        mode: u32,
    },
    /// A certificate or the private key cannot be used.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// The file does not contain a valid token.
    #[error("{TOKEN_FIELD}: {} must consist of 1 to {TOKEN_BYTES_MAX} printable characters", path.display())]
    NotAToken {
        /// File of the token.
        path: PathBuf,
    },
}

/// Credentials of this host.
#[derive(Clone)]
pub struct Secrets {
    /// Token, if one is configured.
    pub token: Option<String>,
    /// Public key of the host's certificate (SubjectPublicKeyInfo in DER); `None` without TLS.
    pub public_key: Option<Vec<u8>>,
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secrets")
    }
}

/// Reads and checks the files that identify this host.
///
/// # Errors
/// [`SecretsError`] if a file cannot be read, the mode of the token file or of the key file grants
/// too many permissions, the token file contains no valid token, a certificate is not valid, or the
/// key does not belong to the certificate.
pub fn read_secrets(config: &Config) -> Result<Secrets, SecretsError> {
    let token = config.token_file.as_deref().map(read_token).transpose()?;
    // Each connection reads the files of TLS again.
    let checked_tls = config.tls.as_ref().map(read_checked_tls).transpose()?;
    let public_key = checked_tls.and_then(|pem| pem.identity).map(|identity| identity.public_key);
    Ok(Secrets { token, public_key })
}

/// Reads and checks the files of `[tls]`, and returns the configuration of the TLS client.
///
/// # Errors
/// [`CertificateError`].
pub fn read_tls(tls: &Tls) -> Result<ClientTlsConfig, CertificateError> {
    let ClientPem { ca, identity } = read_checked_tls(tls)?;
    let mut config =
        ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).domain_name(&tls.server_name);
    if let Some(ClientIdentity { certificate, key, .. }) = identity {
        config = config.identity(Identity::from_pem(certificate, key));
    }
    Ok(config)
}

fn read_checked_tls(tls: &Tls) -> Result<ClientPem, CertificateError> {
    let certificate = PemFile { field: CERTIFICATE_FIELD, path: &tls.certificate };
    let key = PemFile { field: KEY_FIELD, path: &tls.key };
    ClientFiles { ca: PemFile { field: CA_FIELD, path: &tls.ca }, identity: Some((certificate, key)) }.read()
}

fn read_token(path: &Path) -> Result<String, SecretsError> {
    let failed = |errno| SecretsError::Read { path: path.to_owned(), errno };
    let file = config_file::open_regular(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.mode() & MODE_MASK;
    let contents = config_file::read_limited(file, TOKEN_FILE_BYTES_MAX).map_err(failed)?;
    if mode & NON_OWNER_MODE != 0 {
        return Err(SecretsError::TokenAccessible { path: path.to_owned(), mode });
    }
    let token = String::from_utf8_lossy(&contents).trim().to_owned();
    let well_formed =
        (1..=TOKEN_BYTES_MAX).contains(&token.len()) && token.bytes().all(|b| b.is_ascii_graphic());
    if well_formed { Ok(token) } else { Err(SecretsError::NotAToken { path: path.to_owned() }) }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;

    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, PublicKeyData as _,
        date_time_ymd,
    };

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
        assert_rejected(&config, "agent.token_file: cannot read ", "token: must be a regular file");
        fs::remove_dir(&token).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &token, mode).unwrap();
        assert_rejected(&config, "agent.token_file: cannot read ", "token: must be a regular file");
        fs::remove_file(&token).unwrap();
        fs::write(&token, "two words").unwrap();
        set_mode(&token, 0o640);
        assert_rejected(&config, "agent.token_file: ", "token has mode 0640");
        set_mode(&token, 0o600);
        assert_rejected(&config, "agent.token_file: ", "printable characters");
        fs::write(&token, "secret\n").unwrap();
        let secrets = read_secrets(&config).unwrap();
        assert_eq!(secrets.token.as_deref(), Some("secret"));
        assert!(secrets.public_key.is_none() && !format!("{secrets:?}").contains("secret"));
    }

    /// Writes the files of `[tls]`: an authority, and key and certificate of host `h0`. The
    /// certificate is valid from year `from` to year `to`.
    pub(crate) fn write_tls_files(tls: &Tls, from: i32, to: i32) {
        let mut authority = CertificateParams::new([]).unwrap();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
        let mut leaf = CertificateParams::new(["h0".to_owned()]).unwrap();
        (leaf.not_before, leaf.not_after) = (date_time_ymd(from, 1, 1), date_time_ymd(to, 1, 1));
        let key = KeyPair::generate().unwrap();
        fs::write(&tls.certificate, leaf.signed_by(&key, &authority).unwrap().pem()).unwrap();
        fs::write(&tls.key, key.serialize_pem()).unwrap();
        fs::write(&tls.ca, authority.pem()).unwrap();
        set_mode(&tls.key, 0o600);
    }

    #[test]
    fn unusable_tls_file_is_an_error_with_its_field() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), true);
        write_tls_files(config.tls.as_ref().unwrap(), 2020, 2500);
        let secrets = read_secrets(&config).unwrap();
        assert!(secrets.token.is_none() && secrets.public_key.is_some());
        set_mode(&dir.path().join("key"), 0o660);
        read_secrets(&config).unwrap();
        set_mode(&dir.path().join("key"), 0o604);
        assert_rejected(
            &config,
            "tls.key: ",
            "key: has mode 0604: must not be accessible to all users; run `chmod o= ",
        );
        set_mode(&dir.path().join("key"), 0o600);
        for name in ["key", "certificate", "ca"] {
            let path = dir.path().join(name);
            let contents = fs::read(&path).unwrap();
            fs::remove_file(&path).unwrap();
            assert_rejected(&config, &format!("tls.{name}: cannot read "), "No such file");
            fs::create_dir(&path).unwrap();
            assert_rejected(&config, &format!("tls.{name}: cannot read "), "must be a regular file");
            fs::remove_dir(&path).unwrap();
            fs::write(&path, contents).unwrap();
            set_mode(&path, 0o600);
        }
    }

    #[test]
    fn renewed_certificate_has_the_public_key_of_its_private_key() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), true);
        let tls = config.tls.as_ref().unwrap();
        let public_key = |to| {
            write_tls_files(tls, 2020, to);
            read_secrets(&config).unwrap().public_key.unwrap()
        };
        let first = public_key(2500);
        let key = KeyPair::from_pem(&fs::read_to_string(&tls.key).unwrap()).unwrap();
        assert_eq!(first, key.subject_public_key_info());
        assert_ne!(public_key(2400), first);
    }

    #[test]
    fn invalid_contents_of_tls_files_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), true);
        write_tls_files(config.tls.as_ref().unwrap(), 2020, 2500);
        for (name, rule) in [
            ("key", "must contain a private key in PEM format"),
            ("certificate", "must contain at least one certificate in PEM format"),
            ("ca", "must contain at least one certificate in PEM format"),
        ] {
            let path = dir.path().join(name);
            let contents = fs::read(&path).unwrap();
            fs::write(&path, "junk").unwrap();
            assert_rejected(&config, &format!("tls.{name}: "), rule);
            fs::write(&path, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
            assert!(read_secrets(&config).is_err(), "{name}");
            fs::write(&path, contents).unwrap();
        }
        fs::write(dir.path().join("key"), KeyPair::generate().unwrap().serialize_pem()).unwrap();
        assert_rejected(&config, "tls.key: ", "must be the key of tls.certificate");
    }

    #[test]
    fn expired_and_future_certificates_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), true);
        write_tls_files(config.tls.as_ref().unwrap(), 2020, 2021);
        assert_rejected(&config, "tls.certificate: ", "expired on Jan  1 00:00:00 2021");
        write_tls_files(config.tls.as_ref().unwrap(), 2400, 2500);
        assert_rejected(&config, "tls.certificate: ", "is not valid before");
        let tls = config.tls.as_ref().unwrap();
        assert!(read_tls(tls).is_err());
    }

    fn set_mode(path: &Path, mode: u32) {
        use std::os::unix::fs::PermissionsExt as _;
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
}
