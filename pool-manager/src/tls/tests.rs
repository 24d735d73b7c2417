//! Tests of valid and invalid files in section `[tls]`.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};

use super::*;
use crate::test_files::{create_fifo, run_with_timeout};

/// Writes the files of section `[tls]`: a client authority, and key and certificate for
/// `manager.rack`. The certificate is valid from year `from` to year `to`.
pub(crate) fn write_files(folder: &Path, from: i32, to: i32) -> Tls {
    let mut authority = CertificateParams::new([]).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let mut leaf = CertificateParams::new(["manager.rack".to_owned(), "10.0.0.1".to_owned()]).unwrap();
    (leaf.not_before, leaf.not_after) = (date_time_ymd(from, 1, 1), date_time_ymd(to, 1, 1));
    let key = KeyPair::generate().unwrap();
    let leaf = leaf.signed_by(&key, &authority).unwrap();
    let path = |name: &str| folder.join(name);
    fs::write(path("manager.pem"), leaf.pem()).unwrap();
    fs::write(path("manager.key"), key.serialize_pem()).unwrap();
    fs::write(path("clients.pem"), authority.pem()).unwrap();
    fs::set_permissions(path("manager.key"), fs::Permissions::from_mode(0o640)).unwrap();
    let (schedulers, admins) = (Vec::new(), Vec::new());
    let (certificate, key, client_ca) = (path("manager.pem"), path("manager.key"), path("clients.pem"));
    Tls { certificate, key, client_ca, schedulers, admins }
}

#[track_caller]
fn check_rejected(tls: &Tls, field: &str, rule: &str) {
    let error = load(tls).unwrap_err().to_string();
    assert!(error.starts_with(&format!("tls.{field}: ")) && error.contains(rule), "{error}");
}

#[test]
fn valid_files_are_loaded_with_names_and_expiry() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = load(&write_files(folder.path(), 2020, 2500)).unwrap();
    assert_eq!(loaded.names, ["manager.rack", "10.0.0.1"]);
    assert!(loaded.days_left() > 365 * 100);
    assert_eq!(loaded.config.alpn_protocols, [b"h2"]);
}

#[test]
fn expired_and_future_certificates_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    check_rejected(&write_files(folder.path(), 2020, 2021), "certificate", "expired on Jan  1 00:00:00 2021");
    check_rejected(&write_files(folder.path(), 2400, 2500), "certificate", "is not valid before");
}

#[test]
fn key_accessible_to_all_users_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let tls = write_files(folder.path(), 2020, 2500);
    for mode in [0o644, 0o604, 0o602, 0o777] {
        fs::set_permissions(&tls.key, fs::Permissions::from_mode(mode)).unwrap();
        check_rejected(&tls, "key", &format!("has mode {mode:04o}: must not be accessible to all users"));
    }
}

#[test]
fn fifo_in_place_of_a_file_is_rejected_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let tls = write_files(folder.path(), 2020, 2500);
    let fifo = folder.path().join("fifo");
    create_fifo(&fifo);
    let rejected = [
        ("certificate", Tls { certificate: fifo.clone(), ..tls.clone() }),
        ("key", Tls { key: fifo.clone(), ..tls.clone() }),
        ("client_ca", Tls { client_ca: fifo.clone(), ..tls }),
    ];
    for (field, tls) in rejected {
        let error = units::chain(&run_with_timeout(move || load(&tls)).unwrap_err());
        assert_eq!(error, format!("tls.{field}: cannot read {}: must be a regular file", fifo.display()));
    }
}

#[test]
fn missing_and_wrong_files_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let tls = write_files(folder.path(), 2020, 2500);
    let swapped = Tls { certificate: tls.key.clone(), ..tls.clone() };
    check_rejected(&swapped, "certificate", "must contain at least one certificate");
    check_rejected(&Tls { key: tls.certificate.clone(), ..tls.clone() }, "key", "has mode");
    let other = tempfile::tempdir().unwrap();
    let other = write_files(other.path(), 2020, 2500);
    check_rejected(&Tls { key: other.key, ..tls.clone() }, "key", "must be the key of tls.certificate");
    let missing = folder.path().join("missing");
    check_rejected(&Tls { client_ca: missing, ..tls }, "client_ca", "cannot read");
}
