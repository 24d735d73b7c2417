//! Checks of the certificates and the private key in section `[tls]`.

use std::{path::Path, sync::Arc};

use rustls_pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject as _};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, crypto::ring};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::{CA_FIELD, CERTIFICATE_FIELD, KEY_FIELD, SecretsError};
use crate::config::Tls;

/// Contents of the files of section `[tls]`, in PEM format.
pub(super) struct PemFiles {
    pub(super) ca: Vec<u8>,
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
}

/// Checks that the host's certificate and at least one certificate of the authority are valid now,
/// and that the key belongs to the host's certificate. Returns all certificates of the authority,
/// sorted.
///
/// # Errors
/// [`SecretsError::Unusable`].
pub(super) fn check(tls: &Tls, files: &PemFiles) -> Result<Vec<CertificateDer<'static>>, SecretsError> {
    let chain = parse_certificates(CERTIFICATE_FIELD, &tls.certificate, &files.certificate)?;
    let mut authorities = parse_certificates(CA_FIELD, &tls.ca, &files.ca)?;
    check_validity(CERTIFICATE_FIELD, &tls.certificate, &chain[..1])?;
    check_validity(CA_FIELD, &tls.ca, &authorities)?;
    let key = PrivateKeyDer::from_pem_slice(&files.key).map_err(|error| {
        unusable(KEY_FIELD, &tls.key, format!("must contain a private key in PEM format: {error}"))
    })?;
    let mut roots = RootCertStore::empty();
    for authority in &authorities {
        roots.add(authority.clone()).map_err(|error| unusable(CA_FIELD, &tls.ca, error))?;
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(CERTIFICATE_FIELD, &tls.certificate, error))?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key);
    config.map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => {
            unusable(KEY_FIELD, &tls.key, format!("must be the key of {CERTIFICATE_FIELD}"))
        }
        error => unusable(KEY_FIELD, &tls.key, error),
    })?;
    authorities.sort_by(|a, b| a.as_ref().cmp(b.as_ref()));
    Ok(authorities)
}

fn unusable(field: &'static str, path: &Path, rule: impl ToString) -> SecretsError {
    SecretsError::Unusable { field, path: path.to_owned(), rule: rule.to_string() }
}

fn parse_certificates(
    field: &'static str,
    path: &Path,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, SecretsError> {
    let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match parsed {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(unusable(field, path, "must contain at least one certificate in PEM format")),
        Err(error) => Err(unusable(field, path, format!("must contain certificates in PEM format: {error}"))),
    }
}

/// Checks that at least one certificate is valid now. Others may remain from the rotation of an
/// authority.
fn check_validity(
    field: &'static str,
    path: &Path,
    certificates: &[CertificateDer<'_>],
) -> Result<(), SecretsError> {
    let now = i64::try_from(UnixTime::now().as_secs()).unwrap_or(i64::MAX);
    let mut problems = Vec::new();
    for der in certificates {
        let (_, certificate) = X509Certificate::from_der(der)
            .map_err(|error| unusable(field, path, format!("must be an X.509 certificate: {error}")))?;
        let validity = certificate.validity();
        if validity.not_after.timestamp() < now {
            problems.push(format!("expired on {}: renew it", validity.not_after));
        } else if validity.not_before.timestamp() > now {
            problems.push(format!("is not valid before {}", validity.not_before));
        }
    }
    if problems.len() < certificates.len() { Ok(()) } else { Err(unusable(field, path, problems.join("; "))) }
}
