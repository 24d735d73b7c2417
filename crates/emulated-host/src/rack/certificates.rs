//! Creates the certificates of a rack: one CA, and one certificate and key per name. rack.toml
//! assigns roles to the names.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use crate::HostError;

/// Writes `ca.pem`, and `NAME.pem` and `NAME.key` for each name. Only the owner can read the files.
///
/// # Errors
/// [`HostError::File`] if a file cannot be written.
pub(super) fn write(folder: &Path, names: &[&str]) -> Result<(), HostError> {
    let files = generate_certificates(names)
        .map_err(|error| HostError::file_error("create certificates in", folder)(io::Error::other(error)))?;
    files.iter().try_for_each(|(name, pem)| {
        let file = folder.join(name);
        let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file);
        opened
            .and_then(|mut file| file.write_all(pem.as_bytes()))
            .map_err(HostError::file_error("write", &file))
    })
}

/// Copies `ca.pem`, and `NAME.pem` and `NAME.key` for each name, from another folder.
///
/// # Errors
/// [`HostError::File`] if a file is missing or cannot be written.
pub(super) fn copy(from: &Path, folder: &Path, names: &[&str]) -> Result<(), HostError> {
    let file_names = names.iter().flat_map(|name| ["pem", "key"].map(|kind| format!("{name}.{kind}")));
    std::iter::once("ca.pem".to_owned()).chain(file_names).try_for_each(|name| {
        let file = from.join(&name);
        fs::copy(&file, folder.join(&name)).map(drop).map_err(HostError::file_error("copy", &file))
    })
}

/// Generates a CA, and a certificate and a key for each name. Returns the name and the content of
/// each file.
fn generate_certificates(names: &[&str]) -> Result<Vec<(String, String)>, rcgen::Error> {
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.distinguished_name.push(DnType::CommonName, "Tarn rack CA");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let mut files = vec![("ca.pem".to_owned(), authority.pem())];
    for name in names {
        let key = KeyPair::generate()?;
        let mut certificate = CertificateParams::new(vec![(*name).to_owned()])?;
        // Some TLS libraries take a certificate with the name of its issuer for self-signed.
        certificate.distinguished_name.push(DnType::CommonName, *name);
        let certificate = certificate.signed_by(&key, &authority)?;
        files.push((format!("{name}.pem"), certificate.pem()));
        files.push((format!("{name}.key"), key.serialize_pem()));
    }
    Ok(files)
}
