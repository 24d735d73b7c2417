//! Reads and checks the PEM files of a TLS client.

use std::fmt;

use tokio_rustls::rustls::ClientConfig;

use crate::certificates::{self, CertificateError, PemFile};

/// Files of a TLS client.
#[derive(Clone, Copy, Debug)]
pub struct ClientFiles<'a> {
    /// Certificates of the authorities that sign the servers' certificates.
    pub ca: PemFile<'a>,
    /// Certificate of the client, and its private key; `None` if servers require no certificate.
    pub identity: Option<(PemFile<'a>, PemFile<'a>)>,
}

/// Checked contents of the files, in PEM format.
#[derive(Debug)]
pub struct ClientPem {
    /// Certificates of the authorities.
    pub ca: Vec<u8>,
    /// Identity of the client.
    pub identity: Option<ClientIdentity>,
}

/// Certificate and key of a client.
pub struct ClientIdentity {
    /// Certificate, in PEM format.
    pub certificate: Vec<u8>,
    /// Private key, in PEM format.
    pub key: Vec<u8>,
    /// Public key of the certificate (SubjectPublicKeyInfo in DER).
    pub public_key: Vec<u8>,
}

impl fmt::Debug for ClientIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientIdentity") // the key is a secret
    }
}

impl ClientFiles<'_> {
    /// Reads the files. Checks that the client's certificate and at least one certificate of the
    /// authorities are valid now, and that the key belongs to the client's certificate.
    ///
    /// # Errors
    /// [`CertificateError`].
    pub fn read(self) -> Result<ClientPem, CertificateError> {
        let identity = self.identity.map(|(certificate, key)| read_identity(certificate, key)).transpose()?;
        let ca = self.ca.read()?;
        let authorities = self.ca.parse_certificates(&ca)?;
        self.ca.select_valid(&authorities)?;
        let builder = ClientConfig::builder_with_provider(certificates::provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| self.ca.unusable(error))?
            .with_root_certificates(self.ca.trust(authorities)?);
        if let (Some(pem), Some((certificate, key))) = (&identity, self.identity) {
            let chain = certificate.parse_certificates(&pem.certificate)?;
            let checked = builder.with_client_auth_cert(chain, key.parse_key(&pem.key)?);
            checked.map_err(|error| key.key_error(certificate, error))?;
        }
        Ok(ClientPem { ca, identity })
    }
}

fn read_identity(certificate: PemFile<'_>, key: PemFile<'_>) -> Result<ClientIdentity, CertificateError> {
    let (key, pem) = (key.read_key()?, certificate.read()?);
    let chain = certificate.parse_certificates(&pem)?;
    let public_key = certificate.parse_certificate(&chain[0])?.public_key().raw.to_owned();
    certificate.select_valid(&chain[..1])?;
    Ok(ClientIdentity { certificate: pem, key, public_key })
}
