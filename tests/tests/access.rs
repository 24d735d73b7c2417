//! Tests of access control: access to the manager through its unix socket, by token and by
//! certificate, and rejection of all other callers. Uses real processes, also of another user.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    fs,
    io::Read as _,
    os::unix::{fs::PermissionsExt as _, net::UnixStream, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Output},
    time::{Duration, Instant},
};

use proto::v1 as wire;
use rustix::process::{Pid, Signal, kill_process};
use tests::{
    rack::{Plan, Rack, programs_dir, reserve_request},
    small_guests::report_skipped,
};
use tonic::{
    Code,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

/// Id of an unprivileged user and group, which exist on Debian.
const NOBODY_ID: u32 = 65534;

/// Manager process that is killed when the value is dropped.
struct Manager(Child);

impl Manager {
    async fn start(rack: &Rack, rack_toml: &str) -> Self {
        rack.write_rack_toml(rack_toml);
        rack.create_store();
        let log = fs::File::create(rack.dir().join("manager.log")).unwrap();
        let mut command = Command::new(programs_dir().join("pool-manager"));
        let manager =
            Self(command.args(["serve", "--config"]).arg(rack.rack_toml_path()).stderr(log).spawn().unwrap());
        rack.wait_for("the manager", async |rack| rack.read_log("manager").contains("pool-manager ready"))
            .await;
        manager
    }

    fn reload(&self) {
        kill_process(Pid::from_raw(i32::try_from(self.0.id()).unwrap()).unwrap(), Signal::HUP).unwrap();
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Makes the folder of a rack accessible to every user, and copies `tarn` into this folder. Returns
/// the path of the copy.
fn make_folder_accessible(rack: &Rack) -> PathBuf {
    fs::set_permissions(rack.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    let tarn = rack.dir().join("tarn");
    fs::copy(programs_dir().join("tarn"), &tarn).unwrap();
    fs::set_permissions(&tarn, fs::Permissions::from_mode(0o755)).unwrap();
    tarn
}

/// Returns whether this process can switch to another user. If not, reports the skipped test.
fn can_switch_user() -> bool {
    let can = rustix::process::geteuid().is_root();
    if !can {
        report_skipped("callers of another user: requires root");
    }
    can
}

/// Runs `tarn` as an unprivileged user. Requires root.
fn run_tarn_as_nobody(tarn: &Path, endpoint: &str, words: &str) -> Output {
    let mut command = Command::new(tarn);
    command.args(words.split(' ')).args(["--endpoint", endpoint]).env_remove("TARN_TOKEN_FILE");
    command.uid(NOBODY_ID).gid(NOBODY_ID).output().unwrap()
}

#[track_caller]
fn assert_rejected(output: &Output, words: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains(words), "{stderr}");
}

#[track_caller]
fn assert_success(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

const RESERVE_COMMAND: &str = "reserve --host h0 --vm v --pool 1GiB --request-id r1 --validate-only";

#[tokio::test]
async fn unix_socket_rejects_users_not_named_in_rack_toml() {
    if !can_switch_user() {
        return;
    }
    let rack = Rack::new(Plan::small(2));
    let (tarn, text) = (make_folder_accessible(&rack), rack.rack_toml());
    let manager = Manager::start(&rack, &text).await;
    assert_success(&rack.tarn(&["get", "rack"]));
    assert_rejected(&run_tarn_as_nobody(&tarn, &rack.endpoint(), "get rack"), "cannot reach a pool manager");
    drop(manager);

    let group = format!("[access]\ngroup = \"{NOBODY_ID}\"\n");
    let manager = Manager::start(&rack, &(text.clone() + &group)).await;
    assert_success(&rack.tarn(&["get", "rack"]));
    assert_rejected(&run_tarn_as_nobody(&tarn, &rack.endpoint(), "get rack"), "user 65534: must be root");
    assert_rejected(
        &run_tarn_as_nobody(&tarn, &rack.endpoint(), "release v --force --reason x"),
        "user 65534: must be root",
    );
    let log = rack.read_log("manager");
    assert!(log.contains("rejected") && log.contains("of user 65534"), "{log}");

    rack.write_rack_toml(&format!("{text}{group}schedulers = [\"{NOBODY_ID}\"]\n"));
    manager.reload();
    rack.wait_for("the role", async |rack| rack.read_log("manager").contains("rack.toml reloaded")).await;
    assert_rejected(&run_tarn_as_nobody(&tarn, &rack.endpoint(), "get rack"), "with the role admin");
    assert_rejected(&run_tarn_as_nobody(&tarn, &rack.endpoint(), RESERVE_COMMAND), "h0"); // access is granted, but the host has no agent
    drop(manager);

    let _manager = Manager::start(&rack, &format!("{text}{group}admins = [\"nobody\"]\n")).await;
    assert_success(&run_tarn_as_nobody(&tarn, &rack.endpoint(), "get rack"));
    assert_success(&run_tarn_as_nobody(&tarn, &rack.endpoint(), "cordon host h0"));
}

fn find_free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[tokio::test]
async fn loopback_address_requires_role_token() {
    if !can_switch_user() {
        return;
    }
    let rack = Rack::new(Plan::small(2));
    let tarn = make_folder_accessible(&rack);
    let listen = format!("127.0.0.1:{}", find_free_port());
    let _manager = Manager::start(&rack, &rack.rack_toml().replace(&rack.endpoint(), &listen)).await;
    let endpoint = format!("http://{listen}");
    for words in ["get rack", "release prod --force --reason x", RESERVE_COMMAND] {
        assert_rejected(
            &run_tarn_as_nobody(&tarn, &endpoint, words),
            "authorization: must be \"Bearer\" and the token of the role",
        );
    }
    let run_with_token = |token: &str, words: &str| {
        let token = rack.dir().join("store").join(token);
        Command::new(&tarn)
            .args(words.split(' '))
            .arg("--endpoint")
            .arg(&endpoint)
            .arg("--token-file")
            .arg(token)
            .output()
            .unwrap()
    };
    assert_success(&run_with_token("roles/admin.token", "get rack"));
    assert_rejected(&run_with_token("roles/admin.token", RESERVE_COMMAND), "h0");
    assert_rejected(&run_with_token("roles/scheduler.token", "get rack"), "the token of the role admin");
    assert_rejected(&run_with_token("roles/scheduler.token", RESERVE_COMMAND), "h0");
    assert_rejected(&run_with_token("tokens/h0.token", "get rack"), "the token of the role admin");
    let as_other_user = run_tarn_as_nobody(
        &tarn,
        &endpoint,
        &format!("get rack --token-file {}/store/roles/admin.token", rack.dir().display()),
    );
    assert_rejected(&as_other_user, "Permission denied");
}

#[tokio::test]
async fn connections_without_authorized_request_are_limited_and_closed() {
    let rack = Rack::new(Plan::small(2));
    fs::set_permissions(rack.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    let listen = format!("127.0.0.1:{}", find_free_port());
    let _manager = Manager::start(&rack, &rack.rack_toml().replace(&rack.endpoint(), &listen)).await;
    let limit = units::limits::UNADMITTED_CONNECTIONS_PER_SOURCE_MAX;
    let start = Instant::now();
    // A connection above the limit closes the oldest one immediately, which a read detects. The other
    // connections are closed after the authentication timeout.
    let mut idle_streams: Vec<_> =
        (0..=limit).map(|_| std::net::TcpStream::connect(&listen).unwrap()).collect();
    let mut oldest = idle_streams.remove(0);
    oldest.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let is_closed = |read: std::io::Result<usize>| match read {
        Ok(read) => read == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    };
    assert!(is_closed(oldest.read_to_end(&mut Vec::new()).map(|_| 0)));
    assert!(start.elapsed() < Duration::from_secs(5), "the oldest connection was closed too late");
    assert!(
        rack.read_log("manager")
            .contains("too many connections without an authorized request: the oldest was closed")
    );
    for mut stream in idle_streams {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut settings = Vec::new();
        assert!(is_closed(stream.read_to_end(&mut settings).map(|_| 0)), "the connection stays open");
    }
    assert!(
        start.elapsed() >= Duration::from_secs(5),
        "the first connections were closed before the authentication timeout"
    );
    let token = rack.dir().join("store/roles/admin.token");
    let mut tarn = Command::new(programs_dir().join("tarn"));
    tarn.args(["get", "rack", "--endpoint", &format!("http://{listen}"), "--token-file"]).arg(token);
    assert_success(&tarn.output().unwrap());
}

/// Regression test: replies to pings filled the write buffer of the server. The server then stopped
/// reading and did not poll its idle timer, so that the connection stayed open.
#[tokio::test]
async fn connection_of_peer_that_does_not_read_is_closed() {
    use std::io::Write as _;
    let rack = Rack::new(Plan::small(2));
    let listen = format!("127.0.0.1:{}", find_free_port());
    let _manager = Manager::start(&rack, &rack.rack_toml().replace(&rack.endpoint(), &listen)).await;
    let mut stream = std::net::TcpStream::connect(&listen).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap(); // HTTP/2 preface with empty settings
    let pings = b"\0\0\x08\x06\0\0\0\0\0abcdefgh".repeat(1000);
    let start = Instant::now();
    let closed = loop {
        match stream.write(&pings) {
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => break error,
            _ => assert!(start.elapsed() < Duration::from_secs(120), "the connection stays open"),
        }
    };
    let kinds = [std::io::ErrorKind::ConnectionReset, std::io::ErrorKind::BrokenPipe];
    assert!(kinds.contains(&closed.kind()), "{closed}");
}

#[tokio::test]
async fn file_at_socket_path_and_active_socket_are_not_replaced() {
    let mut rack = Rack::new(Plan::small(2));
    let path = rack.dir().join("manager.sock");
    fs::write(&path, "data").unwrap();
    rack.create_store();
    let (ok, output) = rack.run_pool_manager(&["serve"]);
    assert!(!ok && output.contains("manager.sock is not a socket"), "{output}");
    assert_eq!(fs::read(&path).unwrap(), b"data");
    fs::remove_file(&path).unwrap();
    rack.start_manager().await;
    rack.kill_manager();
    rack.start_manager().await; // the start succeeds because the stale socket is replaced
    let other = Rack::new(Plan::small(2));
    other.write_rack_toml(&other.rack_toml().replace(&other.endpoint(), &rack.endpoint()));
    other.create_store();
    let (ok, output) = other.run_pool_manager(&["serve"]);
    assert!(!ok && output.contains("another process serves the socket"), "{output}");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    drop(UnixStream::connect(&path).unwrap());
}

#[tokio::test]
async fn backup_of_running_manager_restores_its_state() {
    let mut rack = Rack::start(Plan::small(2)).await;
    let mut scheduler = rack.scheduler().await;
    scheduler.reserve(reserve_request("h0", "before", 1, "r1")).await.unwrap();
    let file = rack.dir().join("rack.backup");
    assert_success(&rack.tarn(&["backup", "--to", file.to_str().unwrap()]));
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    scheduler.reserve(reserve_request("h1", "after", 1, "r2")).await.unwrap();
    assert_rejected(&rack.tarn(&["backup", "--to", file.to_str().unwrap()]), "must not exist");
    assert!(!rack.dir().join("store/backup.outgoing").exists());
    rack.stop_manager();
    rack.kill_agent(0);
    rack.kill_agent(1);
    let (ok, output) = rack.run_pool_manager(&["restore", "--force", "--from", file.to_str().unwrap()]);
    assert!(ok, "{output}");
    rack.start_manager().await;
    let names: Vec<_> = rack.reservations().await.into_iter().map(|r| r.vm).collect();
    assert_eq!(names, ["before"]);
}

/// Certificate authority that writes its certificates and keys to a folder.
struct CertificateAuthority<'a> {
    folder: &'a Path,
    issuer: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
}

impl<'a> CertificateAuthority<'a> {
    fn new(folder: &'a Path) -> Self {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, folder.display().to_string());
        let key = rcgen::KeyPair::generate().unwrap();
        let issuer = rcgen::CertifiedIssuer::self_signed(params, key).unwrap();
        fs::write(folder.join("ca.pem"), issuer.pem()).unwrap();
        Self { folder, issuer }
    }

    fn issue_certificate(&self, name: &str, years: (i32, i32)) {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_before = rcgen::date_time_ymd(years.0, 1, 1);
        params.not_after = rcgen::date_time_ymd(years.1, 1, 1);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(self.folder.join(format!("{name}.pem")), certificate.pem()).unwrap();
        let path = self.folder.join(format!("{name}.key"));
        fs::write(&path, key.serialize_pem()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }
}

/// Maximum number of attempts for a result that depends on the timing of a connection.
const CONNECTION_ATTEMPTS_MAX: usize = 50;
/// First and last year of a valid certificate.
const VALID_CERTIFICATE_YEARS: (i32, i32) = (2020, 2500);
/// First and last year of an expired certificate.
const EXPIRED_CERTIFICATE_YEARS: (i32, i32) = (2020, 2021);

/// Returns rack.toml with a listen address and the section `[tls]`.
fn rack_toml_with_tls(rack: &Rack, listen: &str) -> String {
    let tls = "[tls]\ncertificate = \"manager.pem\"\nkey = \"manager.key\"\nclient_ca = \"ca.pem\"\n\
               schedulers = [\"nova\"]\nadmins = [\"ops\"]\n[[emc]]";
    rack.rack_toml().replace(&rack.endpoint(), listen).replacen("[[emc]]", tls, 1)
}

/// Connects to the manager over TLS. The client presents the certificate `name`, if any.
async fn connect(
    folder: &Path,
    listen: &str,
    name: Option<&str>,
) -> Result<Channel, tonic::transport::Error> {
    let read = |name: String| fs::read(folder.join(name)).unwrap();
    let mut config = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(read("ca.pem".into())))
        .domain_name("manager");
    if let Some(name) = name {
        config =
            config.identity(Identity::from_pem(read(format!("{name}.pem")), read(format!("{name}.key"))));
    }
    Endpoint::from_shared(format!("https://{listen}")).unwrap().tls_config(config).unwrap().connect().await
}

async fn get_rack_error_code(channel: Channel) -> Option<Code> {
    let mut admin = wire::admin_client::AdminClient::new(channel);
    admin.get_rack(wire::GetRackRequest {}).await.err().map(|status| status.code())
}

#[tokio::test]
async fn tls_certificate_determines_the_role() {
    let rack = Rack::new(Plan::small(2));
    let authority = CertificateAuthority::new(rack.dir());
    ["manager", "nova", "ops", "h0"]
        .iter()
        .for_each(|name| authority.issue_certificate(name, VALID_CERTIFICATE_YEARS));
    let listen = format!("127.0.0.1:{}", find_free_port());
    let text = rack_toml_with_tls(&rack, &listen);
    let _manager = Manager::start(&rack, &text).await;
    for (name, schedules, administers) in [("nova", true, false), ("ops", true, true), ("h0", false, false)] {
        let channel = connect(rack.dir(), &listen, Some(name)).await.unwrap();
        let mut admin = wire::admin_client::AdminClient::new(channel.clone());
        let mut scheduler = wire::scheduler_client::SchedulerClient::new(channel.clone());
        let denied = Some(Code::PermissionDenied);
        assert_eq!(get_rack_error_code(channel).await, if administers { None } else { denied }, "{name}");
        let code = scheduler.reserve(reserve_request("nobody", "v", 1, "r1")).await.unwrap_err().code();
        assert_eq!(code, if schedules { Code::NotFound } else { Code::PermissionDenied }, "{name}");
        let set_weights = wire::SetWeightsRequest { host: "nobody".into(), weights: Vec::new() };
        assert_eq!(scheduler.set_weights(set_weights).await.unwrap_err().code(), code, "{name}");
        let shares = admin.get_shares(wire::GetSharesRequest { host: "h0".into() }).await.unwrap_err().code();
        assert_eq!(shares, if administers { Code::NotFound } else { Code::PermissionDenied }, "{name}");
        let request = wire::GetEvictionsRequest { host: "h0".into() };
        assert_eq!(admin.get_evictions(request).await.unwrap_err().code(), shares, "{name}");
        let request = wire::GetSoftMemoryRequest { host: "h0".into() };
        assert_eq!(admin.get_soft_memory(request).await.unwrap_err().code(), shares, "{name}");
    }
    let public = text.replace("127.0.0.1", "0.0.0.0");
    let public = &public[..public.find("[tls]").unwrap()];
    rack.write_rack_toml(public);
    let (ok, output) = rack.run_pool_manager(&["serve", "--check-config"]);
    assert!(!ok && output.contains("tls"), "{output}");
}

#[tokio::test]
async fn rejected_certificates_are_logged_with_peer_and_reason() {
    let rack = Rack::new(Plan::small(2));
    let authority = CertificateAuthority::new(rack.dir());
    ["manager", "ops"].iter().for_each(|name| authority.issue_certificate(name, VALID_CERTIFICATE_YEARS));
    authority.issue_certificate("late", EXPIRED_CERTIFICATE_YEARS);
    let other_folder = tempfile::tempdir().unwrap();
    CertificateAuthority::new(other_folder.path()).issue_certificate("stranger", VALID_CERTIFICATE_YEARS);
    for name in ["stranger.pem", "stranger.key"] {
        fs::copy(other_folder.path().join(name), rack.dir().join(name)).unwrap();
    }
    let listen = format!("127.0.0.1:{}", find_free_port());
    let _manager = Manager::start(&rack, &rack_toml_with_tls(&rack, &listen)).await;
    let table = [
        (Some("late"), "certificate expired"),
        (Some("stranger"), "UnknownIssuer"),
        (None, "peer sent no certificates"),
    ];
    for (name, reason) in table {
        if let Ok(channel) = connect(rack.dir(), &listen, name).await {
            assert!(get_rack_error_code(channel).await.is_some(), "{name:?} was admitted");
        }
        rack.wait_for(reason, async |rack| {
            rack.read_log("manager").lines().any(|line| line.contains("127.0.0.1:") && line.contains(reason))
        })
        .await;
    }
    let plain = Endpoint::from_shared(format!("http://{listen}")).unwrap().connect().await;
    if let Ok(channel) = plain {
        assert!(get_rack_error_code(channel).await.is_some(), "a connection without TLS was admitted");
    }
    rack.wait_for("a log line", async |rack| rack.read_log("manager").contains("InvalidContentType")).await;
    let tarn = |name: &str| {
        let file = |end: &str| rack.dir().join(format!("{name}.{end}"));
        let mut tarn = Command::new(programs_dir().join("tarn"));
        tarn.args([
            "get",
            "rack",
            "--endpoint",
            &format!("https://{listen}"),
            "--server-name",
            "manager",
            "--ca",
        ]);
        tarn.arg(rack.dir().join("ca.pem"))
            .arg("--cert")
            .arg(file("pem"))
            .arg("--key")
            .arg(file("key"))
            .output()
            .unwrap()
    };
    // The connection may break before the client reads the TLS alert, so the command is repeated.
    // The manager then logs no further rejections for a while.
    for (name, alert) in [("late", "CertificateExpired"), ("stranger", "UnknownCA")] {
        let mut outputs = (0..CONNECTION_ATTEMPTS_MAX).map(|_| String::from_utf8(tarn(name).stderr).unwrap());
        let last = outputs.find(|output| output.contains(&format!("received fatal alert: {alert}")));
        assert!(last.is_some(), "no output of tarn contains the alert {alert}");
    }
    assert_eq!(get_rack_error_code(connect(rack.dir(), &listen, Some("ops")).await.unwrap()).await, None);
}

#[tokio::test]
async fn reload_renews_certificates_and_keeps_connections() {
    let rack = Rack::new(Plan::small(2));
    let authority = CertificateAuthority::new(rack.dir());
    ["manager", "ops"].iter().for_each(|name| authority.issue_certificate(name, VALID_CERTIFICATE_YEARS));
    let listen = format!("127.0.0.1:{}", find_free_port());
    let manager = Manager::start(&rack, &rack_toml_with_tls(&rack, &listen)).await;
    let existing = connect(rack.dir(), &listen, Some("ops")).await.unwrap();
    assert_eq!(get_rack_error_code(existing.clone()).await, None);

    fs::write(rack.dir().join("manager.key"), "not a key").unwrap();
    manager.reload();
    rack.wait_for("the rejection", async |rack| rack.read_log("manager").contains("tls.key")).await;
    assert_eq!(get_rack_error_code(connect(rack.dir(), &listen, Some("ops")).await.unwrap()).await, None);

    let renewed = CertificateAuthority::new(rack.dir()); // also replaces the certificate of the authority
    ["manager", "ops"].iter().for_each(|name| renewed.issue_certificate(name, VALID_CERTIFICATE_YEARS));
    assert!(
        connect(rack.dir(), &listen, Some("ops")).await.is_err(),
        "the new authority accepts the old certificate"
    );
    manager.reload();
    rack.wait_for("the reload", async |rack| rack.read_log("manager").contains("rack.toml reloaded")).await;
    assert_eq!(get_rack_error_code(connect(rack.dir(), &listen, Some("ops")).await.unwrap()).await, None);
    assert_eq!(get_rack_error_code(existing).await, None);
}

#[tokio::test]
async fn configuration_check_reads_certificates_and_keys() {
    let rack = Rack::new(Plan::small(2));
    let authority = CertificateAuthority::new(rack.dir());
    authority.issue_certificate("manager", VALID_CERTIFICATE_YEARS);
    rack.write_rack_toml(&rack_toml_with_tls(&rack, "127.0.0.1:9750"));
    let check = || rack.run_pool_manager(&["serve", "--check-config"]);
    let (ok, output) = check();
    assert!(ok && output.contains("certificate of manager: ok"), "{output}");
    fs::set_permissions(rack.dir().join("manager.key"), fs::Permissions::from_mode(0o644)).unwrap();
    let (ok, output) = check();
    assert!(!ok && output.contains("tls.key") && output.contains("has mode 0644"), "{output}");
    authority.issue_certificate("manager", EXPIRED_CERTIFICATE_YEARS);
    let (ok, output) = check();
    assert!(!ok && output.contains("tls.certificate") && output.contains("expired on"), "{output}");
    fs::remove_file(rack.dir().join("manager.pem")).unwrap();
    let (ok, output) = check();
    assert!(!ok && output.contains("tls.certificate: cannot read"), "{output}");
    let public = rack.rack_toml().replacen("store =", "metrics_listen = \"0.0.0.0:9751\"\nstore =", 1);
    rack.write_rack_toml(&public);
    let (ok, output) = check();
    assert!(ok && output.contains("warning: manager.metrics_listen = 0.0.0.0:9751"), "{output}");
}
