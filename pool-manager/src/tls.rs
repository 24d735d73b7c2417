//! Loads and checks the manager's certificate and key, and the certificate authority of clients.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use rustls_pki_types::CertificateDer;
use service_files::certificates::{self, CertificateError, PemFile, ValidCertificates};
use tokio_rustls::rustls::{ServerConfig, server::WebPkiClientVerifier};
use x509_parser::prelude::{GeneralName, X509Certificate};

use crate::config::Tls;

/// The manager logs a warning if a certificate expires in fewer than this number of days.
pub const EXPIRY_WARNING_DAYS: i64 = 14;

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
/// [`CertificateError`] if a file is missing or not PEM, a certificate is expired or not yet valid,
/// or the key is accessible to all users or belongs to another certificate.
pub fn load(tls: &Tls) -> Result<LoadedTls, CertificateError> {
    let certificate = PemFile { field: "tls.certificate", path: &tls.certificate };
    let key_file = PemFile { field: "tls.key", path: &tls.key };
    let client_ca = PemFile { field: "tls.client_ca", path: &tls.client_ca };
    let chain = certificate.parse_certificates(&certificate.read()?)?;
    let key = key_file.parse_key(&key_file.read_key()?)?;
    let authorities = client_ca.parse_certificates(&client_ca.read()?)?;
    let names = alternative_names(&certificate.parse_certificate(&chain[0])?);
    let own = select_valid(certificate, &chain[..1])?; // clients verify the other certificates of the chain
    let authority = select_valid(client_ca, &authorities)?;
    let roots = client_ca.trust(authority.certificates)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, certificates::provider());
    let verifier = verifier.build().map_err(|error| client_ca.unusable(error))?;
    let config = ServerConfig::builder_with_provider(certificates::provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| certificate.unusable(error))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key);
    let mut config = config.map_err(|error| key_file.key_error(certificate, error))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(LoadedTls {
        config: Arc::new(config),
        names,
        expires_unix_s: own.expires_unix_s.min(authority.expires_unix_s),
    })
}

/// Returns the valid certificates of a file, and logs a warning for each other certificate.
fn select_valid(
    file: PemFile<'_>,
    certificates: &[CertificateDer<'static>],
) -> Result<ValidCertificates, CertificateError> {
    let (valid, problems) = file.select_valid(certificates)?;
    for problem in problems {
        tracing::warn!(field = file.field, path = %file.path.display(), problem, "ignoring invalid certificate");
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
