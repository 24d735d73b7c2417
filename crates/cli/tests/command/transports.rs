//! Tests of connections over a Unix socket and mutual TLS, and of reconnection after a restart of
//! the manager.

use std::{fs, net::SocketAddr, path::Path};

use clap::Parser as _;
use cli::{Cli, Connection, Exit};
use proto::v1::GetRackRequest;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;
use tokio::{
    net::{TcpListener, UnixListener},
    sync::oneshot,
    task::JoinHandle,
};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

use crate::rack::{Rack, command, tarn};

#[tokio::test(flavor = "multi_thread")]
async fn manager_is_reached_over_unix_socket() {
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

/// Creates a certificate authority, and for each name a certificate and a key. Writes all of them
/// as PEM files.
fn create_certificates(folder: &Path, names: &[&str]) {
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
async fn mutual_tls_requires_certificates_and_the_expected_name() {
    let folder = TempDir::new().unwrap();
    create_certificates(folder.path(), &["manager", "operator"]);
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
    let manager = format!("--endpoint https://127.0.0.1:{port} --ca {at}/ca.pem --server-name manager");
    let ran = tarn(&format!("{manager} --cert {at}/operator.pem --key {at}/operator.key get rack")).await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let ran = tarn(&format!("{manager} get rack")).await;
    assert_eq!(ran.code, 6, "without a client certificate: {}", ran.stderr);
    let other = format!("--endpoint https://127.0.0.1:{port} --ca {at}/ca.pem --server-name other");
    let ran = tarn(&format!("{other} --cert {at}/operator.pem --key {at}/operator.key get rack")).await;
    assert_eq!(ran.code, 6, "the manager's certificate has another name: {}", ran.stderr);
    let ran = tarn(&format!("{manager} --cert {at}/operator.pem get rack")).await;
    assert_eq!(ran.code, 2, "a certificate without its key: {}", ran.stderr);
}

/// Starts a manager. Returns its address, a channel that stops it, and its task.
async fn start_manager_at(at: SocketAddr) -> (SocketAddr, oneshot::Sender<()>, JoinHandle<()>) {
    let listener = TcpListener::bind(at).await.unwrap();
    let at = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let (scheduler, admin) = Rack::default().services();
    let router = Server::builder().add_service(scheduler).add_service(admin);
    let serving = router.serve_with_incoming_shutdown(TcpListenerStream::new(listener), async {
        let _ = stopped.await;
    });
    (at, stop, tokio::spawn(async { serving.await.unwrap() }))
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_survives_a_restart_of_the_manager() {
    let (at, stop, stopped) = start_manager_at("127.0.0.1:0".parse().unwrap()).await;
    let arguments = ["tarn".to_owned(), "--endpoint".to_owned(), format!("http://{at}"), "doctor".to_owned()];
    let manager = Connection::open(&Cli::parse_from(arguments).global).await.unwrap();
    manager.call(manager.admin().get_rack(GetRackRequest {})).await.unwrap();
    stop.send(()).unwrap();
    stopped.await.unwrap();
    let refused = manager.call(manager.admin().get_rack(GetRackRequest {})).await.unwrap_err();
    assert_eq!(refused.exit(), Exit::Unavailable, "{refused}");
    let (_, stop, stopped) = start_manager_at(at).await;
    manager.call(manager.admin().get_rack(GetRackRequest {})).await.unwrap();
    let another = manager.open_new_connection().await.unwrap();
    another.call(another.admin().get_rack(GetRackRequest {})).await.unwrap();
    drop((manager, another));
    stop.send(()).unwrap();
    stopped.await.unwrap();
}
