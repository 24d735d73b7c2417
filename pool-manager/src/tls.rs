//! Loads and checks the manager's certificate and key, and the certificate authority of clients.

use std::{
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use tokio_rustls::rustls::{
    self, RootCertStore, ServerConfig, crypto::ring, server::VerifierBuilderError,
    server::WebPkiClientVerifier,
};
use units::limits::PEM_FILE_BYTES_MAX;
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use crate::config::Tls;

/// Permission bits of users who are neither the key's owner nor in its group.
const OTHER_USERS_MODE_BITS: u32 = 0o007;

/// The manager logs a warning if a certificate expires in fewer than this number of days.
pub const EXPIRY_WARNING_DAYS: i64 = 14;

/// Error from loading the files of section `[tls]`.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("tls.{field}: cannot read {}", path.display())]
    Read {
        /// Field in section `[tls]` that names the file.
        field: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
    /// The contents or permissions of a file violate a rule.
    #[error("tls.{field}: {}: {rule}", path.display())]
    Unusable {
        /// Field in section `[tls]` that names the file.
        field: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Violated rule, or error from parsing the file.
        rule: String,
    },
}

/// TLS configuration, with properties of its certificates.
#[derive(Debug)]
pub struct LoadedTls {
    /// TLS configuration for new connections.
    pub config: Arc<ServerConfig>,
    /// DNS names and IP addresses in the manager's certificate.
    pub names: Vec<String>,
    /// Earliest expiry of the manager's certificate and the valid authority certificates, in
    /// seconds since the Unix epoch.
    pub expires_unix_s: i64,
}

impl LoadedTls {
    /// Returns the number of whole days until the first certificate expires; negative after the
    /// expiry.
    pub fn days_left(&self) -> i64 {
        (self.expires_unix_s - now_unix_s()) / (24 * 3600)
    }
}

/// Reads and checks the files of section `[tls]`.
///
/// # Errors
/// [`TlsError`] if a file is missing or not PEM, a certificate is expired or not yet valid, or the
/// key is accessible to all users or belongs to another certificate.
pub fn load(tls: &Tls) -> Result<LoadedTls, TlsError> {
    let chain = read_certificates("certificate", &tls.certificate)?;
    let key = read_key(&tls.key)?;
    let authorities = read_certificates("client_ca", &tls.client_ca)?;
    let names = alternative_names(&parse_certificate("certificate", &tls.certificate, &chain[0])?);
    let leaf = &chain[..1]; // clients verify the other certificates of the chain
    let own = select_valid_certificates("certificate", &tls.certificate, leaf)?;
    let authority = select_valid_certificates("client_ca", &tls.client_ca, &authorities)?;
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(
        build_root_store(&tls.client_ca, authority.certificates)?,
        Arc::clone(&provider),
    );
    let verifier = verifier
        .build()
        .map_err(|error: VerifierBuilderError| unusable_error("client_ca", &tls.client_ca, error))?;
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable_error("certificate", &tls.certificate, error))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key);
    let mut config = config.map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => {
            unusable_error("key", &tls.key, "must be the key of tls.certificate")
        }
        error => unusable_error("key", &tls.key, error),
    })?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(LoadedTls {
        config: Arc::new(config),
        names,
        expires_unix_s: own.expires_unix_s.min(authority.expires_unix_s),
    })
}

fn unusable_error(field: &'static str, path: &Path, rule: impl ToString) -> TlsError {
    TlsError::Unusable { field, path: path.to_owned(), rule: rule.to_string() }
}

fn read_error(field: &'static str, path: &Path) -> impl Fn(io::Error) -> TlsError {
    move |errno| TlsError::Read { field, path: path.to_owned(), errno }
}

fn read_certificates(field: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = config_file::read_file(path, PEM_FILE_BYTES_MAX).map_err(read_error(field, path))?;
    let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let parsed = parsed.map_err(|error| {
        unusable_error(field, path, format!("must contain certificates in PEM format: {error}"))
    })?;
    if parsed.is_empty() {
        return Err(unusable_error(field, path, "must have at least one certificate in PEM format"));
    }
    Ok(parsed)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let file = config_file::open_regular(path).map_err(read_error("key", path))?;
    let mode = file.metadata().map_err(read_error("key", path))?.mode();
    if mode & OTHER_USERS_MODE_BITS != 0 {
        let rule = format!(
            "has mode {:04o}: must not be accessible to all users; run `chmod o= {}`",
            mode & 0o7777,
            path.display()
        );
        return Err(unusable_error("key", path, rule));
    }
    let text = config_file::read_limited(file, PEM_FILE_BYTES_MAX).map_err(read_error("key", path))?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| {
        unusable_error("key", path, format!("must contain a private key in PEM format: {error}"))
    })
}

fn build_root_store(
    path: &Path,
    authorities: Vec<CertificateDer<'static>>,
) -> Result<Arc<RootCertStore>, TlsError> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority).map_err(|error| unusable_error("client_ca", path, error))?;
    }
    Ok(Arc::new(roots))
}

fn parse_certificate<'a>(
    field: &'static str,
    path: &Path,
    der: &'a CertificateDer<'_>,
) -> Result<X509Certificate<'a>, TlsError> {
    let parsed = X509Certificate::from_der(der);
    parsed
        .map(|(_, certificate)| certificate)
        .map_err(|error| unusable_error(field, path, format!("must be an X.509 certificate: {error}")))
}

struct ValidCertificates {
    certificates: Vec<CertificateDer<'static>>,
    expires_unix_s: i64,
}

/// Returns the certificates that are valid now, and their earliest expiry. Logs a warning for each
/// invalid certificate, such as one that was left after the rotation of an authority.
///
/// # Errors
/// [`TlsError::Unusable`] if no certificate is valid.
fn select_valid_certificates(
    field: &'static str,
    path: &Path,
    certificates: &[CertificateDer<'static>],
) -> Result<ValidCertificates, TlsError> {
    let now = now_unix_s();
    let (mut valid, mut problems) =
        (ValidCertificates { certificates: Vec::new(), expires_unix_s: i64::MAX }, Vec::new());
    for der in certificates {
        let certificate = parse_certificate(field, path, der)?;
        let validity = certificate.validity();
        if validity.not_after.timestamp() < now {
            problems.push(format!("expired on {}: renew it", validity.not_after));
        } else if validity.not_before.timestamp() > now {
            problems.push(format!("is not valid before {}", validity.not_before));
        } else {
            valid.certificates.push(der.clone());
            valid.expires_unix_s = valid.expires_unix_s.min(validity.not_after.timestamp());
        }
    }
    if valid.certificates.is_empty() {
        return Err(unusable_error(field, path, problems.join("; ")));
    }
    for problem in problems {
        tracing::warn!(field, path = %path.display(), problem, "ignoring invalid certificate");
    }
    Ok(valid)
}

fn alternative_names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let Ok(Some(parsed)) = certificate.subject_alternative_name() else { return Vec::new() };
    let name = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match bytes.len() {
            4 => <[u8; 4]>::try_from(*bytes).ok().map(|ip| std::net::Ipv4Addr::from(ip).to_string()),
            _ => <[u8; 16]>::try_from(*bytes).ok().map(|ip| std::net::Ipv6Addr::from(ip).to_string()),
        },
        _ => None,
    };
    parsed.value.general_names.iter().filter_map(name).collect()
}

fn now_unix_s() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
pub(crate) mod tests;
