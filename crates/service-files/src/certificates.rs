//! Reads and checks the PEM files of a section `[tls]`. The services identify each file by its field
//! of the configuration file, such as `tls.key`.

use std::{
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls_pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject as _};
use tokio_rustls::rustls::{self, RootCertStore, crypto::ring};
use units::limits::PEM_FILE_BYTES_MAX;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// Mode bits that the file of a private key must not have: all permissions of others. The group may
/// have access.
pub const WORLD_MODE: u32 = 0o007;

/// Error of a file of section `[tls]`.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The file cannot be read.
    #[error("{field}: cannot read {}", path.display())]
    Read {
        /// Field of the configuration file.
        field: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
    /// The contents or permissions of the file violate a rule.
    #[error("{field}: {}: {rule}", path.display())]
    Unusable {
        /// Field of the configuration file.
        field: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Violated rule.
        rule: String,
    },
}

/// File of section `[tls]`.
#[derive(Clone, Copy, Debug)]
pub struct PemFile<'a> {
    /// Field of the configuration file, for messages.
    pub field: &'static str,
    /// Path of the file.
    pub path: &'a Path,
}

/// Certificates that are valid now, at least one.
#[derive(Debug)]
pub struct ValidCertificates {
    /// The valid certificates.
    pub certificates: Vec<CertificateDer<'static>>,
    /// Earliest expiry, in seconds since the Unix epoch.
    pub expires_unix_s: i64,
}

impl PemFile<'_> {
    /// Reads a file of at most [`PEM_FILE_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// [`CertificateError::Read`].
    pub fn read(self) -> Result<Vec<u8>, CertificateError> {
        config_file::read_file(self.path, PEM_FILE_BYTES_MAX).map_err(|errno| self.read_error(errno))
    }

    /// Reads a file with a private key.
    ///
    /// # Errors
    /// [`CertificateError::Read`], or [`CertificateError::Unusable`] if the mode of the file grants
    /// permissions to others.
    pub fn read_key(self) -> Result<Vec<u8>, CertificateError> {
        let file = config_file::open_regular(self.path).map_err(|errno| self.read_error(errno))?;
        let mode = file.metadata().map_err(|errno| self.read_error(errno))?.mode();
        if mode & WORLD_MODE != 0 {
            let (mode, path) = (mode & 0o7777, self.path.display());
            let rule =
                format!("has mode {mode:04o}: must not be accessible to all users; run `chmod o= {path}`");
            return Err(self.unusable(rule));
        }
        config_file::read_limited(file, PEM_FILE_BYTES_MAX).map_err(|errno| self.read_error(errno))
    }

    /// Parses the private key of a file.
    ///
    /// # Errors
    /// [`CertificateError::Unusable`].
    pub fn parse_key(self, pem: &[u8]) -> Result<PrivateKeyDer<'static>, CertificateError> {
        PrivateKeyDer::from_pem_slice(pem)
            .map_err(|error| self.unusable(format!("must contain a private key in PEM format: {error}")))
    }

    /// Parses the certificates of a file, at least one.
    ///
    /// # Errors
    /// [`CertificateError::Unusable`].
    pub fn parse_certificates(self, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
        let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
        match parsed {
            Ok(certificates) if !certificates.is_empty() => Ok(certificates),
            Ok(_) => Err(self.unusable("must contain at least one certificate in PEM format")),
            Err(error) => Err(self.unusable(format!("must contain certificates in PEM format: {error}"))),
        }
    }

    /// Parses a certificate of the file.
    ///
    /// # Errors
    /// [`CertificateError::Unusable`].
    pub fn parse_certificate<'c>(
        self,
        der: &'c CertificateDer<'_>,
    ) -> Result<X509Certificate<'c>, CertificateError> {
        let parsed = X509Certificate::from_der(der);
        parsed
            .map(|(_, certificate)| certificate)
            .map_err(|error| self.unusable(format!("must be an X.509 certificate: {error}")))
    }

    /// Returns the certificates of the file that are valid now, and a description of each other
    /// certificate, such as one that was left after the rotation of an authority.
    ///
    /// # Errors
    /// [`CertificateError::Unusable`] if no certificate is valid.
    pub fn select_valid(
        self,
        certificates: &[CertificateDer<'static>],
    ) -> Result<(ValidCertificates, Vec<String>), CertificateError> {
        let now = i64::try_from(UnixTime::now().as_secs()).unwrap_or(i64::MAX);
        let (mut valid, mut problems) =
            (ValidCertificates { certificates: Vec::new(), expires_unix_s: i64::MAX }, Vec::new());
        for der in certificates {
            let certificate = self.parse_certificate(der)?;
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
            Err(self.unusable(problems.join("; ")))
        } else {
            Ok((valid, problems))
        }
    }

    /// Returns a store of the file's certificates, as trusted authorities.
    ///
    /// # Errors
    /// [`CertificateError::Unusable`].
    pub fn trust(
        self,
        authorities: Vec<CertificateDer<'static>>,
    ) -> Result<Arc<RootCertStore>, CertificateError> {
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority).map_err(|error| self.unusable(error))?;
        }
        Ok(Arc::new(roots))
    }

    /// Converts an error of a TLS configuration with the key of this file and the certificate of
    /// `certificate`.
    pub fn key_error(self, certificate: PemFile<'_>, error: rustls::Error) -> CertificateError {
        match error {
            rustls::Error::InconsistentKeys(_) => {
                self.unusable(format!("must be the key of {}", certificate.field))
            }
            error => self.unusable(error),
        }
    }

    /// Returns the error for a violated rule.
    pub fn unusable(self, rule: impl ToString) -> CertificateError {
        CertificateError::Unusable { field: self.field, path: self.path.to_owned(), rule: rule.to_string() }
    }

    fn read_error(self, errno: io::Error) -> CertificateError {
        CertificateError::Read { field: self.field, path: self.path.to_owned(), errno }
    }
}

/// Returns the provider of cryptography of the services.
pub fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(ring::default_provider())
}
