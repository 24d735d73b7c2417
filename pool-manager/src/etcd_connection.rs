//! Connection to the etcd of `rack.toml`.

use std::{
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use ::etcd::client::{Credentials, Settings};
use service_files::{
    certificates::{CertificateError, PemFile},
    client_certificates::{ClientFiles, ClientIdentity, ClientPem},
};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::{
    config::{Etcd, EtcdTls},
    store::{StoreError, etcd::Cluster},
};

/// Parts of the lease in which one member must answer a call, so that another member can renew the lease.
const CALLS_PER_LEASE: u32 = 5;
/// Maximum length of the file of a password, in bytes.
const PASSWORD_BYTES_MAX: usize = 1024;
/// Mode bits that the file of the password must not have: all permissions of group and others.
const NON_OWNER_MODE: u32 = 0o077;

/// Error of a file of section `[etcd]`, or of a connection.
#[derive(Debug, thiserror::Error)]
pub enum EtcdConnectionError {
    /// A certificate or key cannot be used.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// The file of the password cannot be read.
    #[error("etcd.password_file: cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
    /// The mode or the contents of the file of the password violate a rule.
    #[error("etcd.password_file: {} {rule}", path.display())]
    Password {
        /// Path of the file.
        path: PathBuf,
        /// Violated rule.
        rule: String,
    },
    /// An address cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Reads the files of section `[etcd]`, and prepares the connection.
///
/// # Errors
/// [`EtcdConnectionError`] if a file or an address cannot be used. Does not detect an etcd that does not respond.
pub fn connect(etcd: &Etcd) -> Result<Cluster, EtcdConnectionError> {
    let tls = etcd.tls.as_ref().map(read_tls).transpose()?;
    let credentials = etcd.user.as_ref().map(|user| {
        let password = read_password(&user.password_file)?;
        Ok::<_, EtcdConnectionError>(Credentials { user: user.name.clone(), password })
    });
    let settings = Settings {
        endpoints: etcd.endpoints(),
        tls,
        credentials: credentials.transpose()?,
        call_timeout: etcd.lease.as_duration() / CALLS_PER_LEASE,
    };
    Ok(Cluster::new(settings, etcd.location.prefix.clone(), etcd.quota.get())?)
}

fn read_tls(tls: &EtcdTls) -> Result<ClientTlsConfig, CertificateError> {
    let ca = PemFile { field: "etcd.ca", path: &tls.ca };
    let identity = tls.identity.as_ref().map(|(certificate, key)| {
        let certificate = PemFile { field: "etcd.certificate", path: certificate };
        (certificate, PemFile { field: "etcd.key", path: key })
    });
    let ClientPem { ca, identity } = ClientFiles { ca, identity }.read()?;
    let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca));
    if let Some(ClientIdentity { certificate, key, .. }) = identity {
        config = config.identity(Identity::from_pem(certificate, key));
    }
    Ok(config)
}

fn read_password(path: &Path) -> Result<String, EtcdConnectionError> {
    let failed = |errno| EtcdConnectionError::Read { path: path.to_owned(), errno };
    let unusable = |rule| EtcdConnectionError::Password { path: path.to_owned(), rule };
    let file = config_file::open_regular(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.mode() & 0o7777;
    if mode & NON_OWNER_MODE != 0 {
        let rule =
            format!("has mode {mode:04o}: only its owner may access it; run `chmod 600 {}`", path.display());
        return Err(unusable(rule));
    }
    let contents = config_file::read_limited(file, PASSWORD_BYTES_MAX).map_err(failed)?;
    let password = String::from_utf8(contents).map_err(|_| unusable("must be UTF-8".to_owned()))?;
    match password.trim_end_matches(['\r', '\n']) {
        "" => Err(unusable("must contain the password".to_owned())),
        password => Ok(password.to_owned()),
    }
}
