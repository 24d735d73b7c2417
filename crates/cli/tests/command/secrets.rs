//! Ways to a manager other than loopback TCP: a unix socket, and TLS with certificates on both sides.

use std::{fs, path::Path};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

use crate::rack::{Rack, command, tarn};

#[tokio::test(flavor = "multi_thread")]
async fn a_manager_on_a_unix_socket_is_reached() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("tarn.sock");
    let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
    let (scheduler, admin) = Rack::default().services();
    tokio::spawn(Server::builder().add_service(scheduler).add_service(admin).serve_with_incoming(incoming));
    let output = command("get rack")
        .env("TARN_ENDPOINT", format!("unix:{}", socket.display()))
        .output()
        .await
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Writes `ca.pem`, and for each name a certificate and a key.
fn certify(folder: &Path, names: &[&str]) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    fs::write(folder.join("ca.pem"), ca.pem()).unwrap();
    for name in names {
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(vec![(*name).to_owned()]).unwrap().signed_by(&key, &ca).unwrap();
        fs::write(folder.join(format!("{name}.pem")), certificate.pem()).unwrap();
        fs::write(folder.join(format!("{name}.key")), key.serialize_pem()).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manager_behind_mutual_tls_lets_in_only_whom_it_knows() {
    let folder = TempDir::new().unwrap();
    certify(folder.path(), &["manager", "operator"]);
    let read = |name: &str| fs::read(folder.path().join(name)).unwrap();
    let tls = ServerTlsConfig::new()
        .identity(Identity::from_pem(read("manager.pem"), read("manager.key")))
        .client_ca_root(Certificate::from_pem(read("ca.pem")));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (scheduler, admin) = Rack::default().services();
    let serving = Server::builder().tls_config(tls).unwrap().add_service(scheduler).add_service(admin);
    tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));

    let at = folder.path().display();
    let known = format!("--endpoint https://127.0.0.1:{port} --ca {at}/ca.pem --server-name manager");
    let ran = tarn(&format!("{known} --cert {at}/operator.pem --key {at}/operator.key get rack")).await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let ran = tarn(&format!("{known} get rack")).await;
    assert_eq!(ran.code, 6, "without a certificate: {}", ran.stderr);
    let stranger = format!("--endpoint https://127.0.0.1:{port} --ca {at}/ca.pem --server-name other");
    let ran = tarn(&format!("{stranger} --cert {at}/operator.pem --key {at}/operator.key get rack")).await;
    assert_eq!(ran.code, 6, "a manager of another name: {}", ran.stderr);
    let ran = tarn(&format!("{known} --cert {at}/operator.pem get rack")).await;
    assert_eq!(ran.code, 2, "half an identity: {}", ran.stderr);
}
