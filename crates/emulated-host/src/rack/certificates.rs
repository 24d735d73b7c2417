//! Certificates of a rack: one CA and one key pair per name. rack.toml assigns roles to names.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::HostError;

/// Writes `ca.pem`, and `NAME.pem` and `NAME.key` for each name, readable by the owner only.
///
/// # Errors
/// [`HostError::File`] if a file cannot be written.
pub(super) fn write(folder: &Path, names: &[&str]) -> Result<(), HostError> {
    let made = make(names)
        .map_err(|wrong| HostError::file("create certificates in", folder)(io::Error::other(wrong)))?;
    made.iter().try_for_each(|(name, pem)| {
        let file = folder.join(name);
        let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file);
        opened.and_then(|mut file| file.write_all(pem.as_bytes())).map_err(HostError::file("write", &file))
    })
}

/// Copies such certificates and keys from a folder.
///
/// # Errors
/// [`HostError::File`] if a file is missing or cannot be written.
pub(super) fn copy(from: &Path, folder: &Path, names: &[&str]) -> Result<(), HostError> {
    let of_names = names.iter().flat_map(|name| ["pem", "key"].map(|kind| format!("{name}.{kind}")));
    std::iter::once("ca.pem".to_owned()).chain(of_names).try_for_each(|name| {
        let file = from.join(&name);
        fs::copy(&file, folder.join(&name)).map(drop).map_err(HostError::file("copy", &file))
    })
}

fn make(names: &[&str]) -> Result<Vec<(String, String)>, rcgen::Error> {
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let mut files = vec![("ca.pem".to_owned(), authority.pem())];
    for name in names {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec![(*name).to_owned()])?.signed_by(&key, &authority)?;
        files.push((format!("{name}.pem"), certificate.pem()));
        files.push((format!("{name}.key"), key.serialize_pem()));
    }
    Ok(files)
}
