//! Access to the manager over its unix socket, by token and by certificate, and the refusal of other callers. Against real
//! processes, some of them of another user.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

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
    rack::{Plan, Rack, programs, reserve},
    small_guests::left_out,
};
use tonic::{
    Code,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

/// A user and group without rights, as Debian has them.
const NOBODY: u32 = 65534;

/// A manager of its own, killed at the end.
struct Manager(Child);

impl Manager {
    async fn start(rack: &Rack, rack_toml: &str) -> Self {
        rack.write_rack_toml(rack_toml);
        let log = fs::File::create(rack.dir().join("manager.log")).unwrap();
        let mut command = Command::new(programs().join("pool-manager"));
        let manager =
            Self(command.args(["serve", "--config"]).arg(rack.rack_toml_path()).stderr(log).spawn().unwrap());
        rack.wait_for("the manager", async |rack| rack.logged("manager").contains("pool-manager ready"))
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

/// Folder that every user may enter, with a copy of `tarn`.
fn open_folder(rack: &Rack) -> PathBuf {
    fs::set_permissions(rack.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    let tarn = rack.dir().join("tarn");
    fs::copy(programs().join("tarn"), &tarn).unwrap();
    fs::set_permissions(&tarn, fs::Permissions::from_mode(0o755)).unwrap();
    tarn
}

/// Whether this process can become another user; reported if it cannot.
fn can_become_nobody() -> bool {
    let can = rustix::process::geteuid().is_root();
    if !can {
        left_out("callers of the manager of another user, as becoming one takes root");
    }
    can
}

/// Runs `tarn` as a user without rights. Only root can.
fn as_nobody(tarn: &Path, endpoint: &str, words: &str) -> Output {
    let mut command = Command::new(tarn);
    command.args(words.split(' ')).args(["--endpoint", endpoint]).env_remove("TARN_TOKEN_FILE");
    command.uid(NOBODY).gid(NOBODY).output().unwrap()
}

#[track_caller]
fn check_refused(output: &Output, words: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(words), "{said}");
}

#[track_caller]
fn check_done(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

const RESERVE: &str = "reserve --host h0 --vm v --pool 1GiB --request-id r1 --validate-only";

#[tokio::test]
async fn unix_socket_is_closed_to_other_users_until_rack_toml_names_them() {
    if !can_become_nobody() {
        return;
    }
    let rack = Rack::new(Plan::small(2));
    let (tarn, text) = (open_folder(&rack), rack.rack_toml());
    let manager = Manager::start(&rack, &text).await;
    check_done(&rack.tarn(&["get", "rack"]));
    check_refused(&as_nobody(&tarn, &rack.endpoint(), "get rack"), "cannot reach a pool manager");
    drop(manager);

    let group = format!("[access]\ngroup = \"{NOBODY}\"\n");
    let manager = Manager::start(&rack, &(text.clone() + &group)).await;
    check_done(&rack.tarn(&["get", "rack"]));
    check_refused(&as_nobody(&tarn, &rack.endpoint(), "get rack"), "user 65534: must be root");
    check_refused(
        &as_nobody(&tarn, &rack.endpoint(), "release v --force --reason x"),
        "user 65534: must be root",
    );
    let logged = rack.logged("manager");
    assert!(logged.contains("rejected") && logged.contains("of user 65534"), "{logged}");

    rack.write_rack_toml(&format!("{text}{group}schedulers = [\"{NOBODY}\"]\n"));
    manager.reload();
    rack.wait_for("the role", async |rack| rack.logged("manager").contains("rack.toml read again")).await;
    check_refused(&as_nobody(&tarn, &rack.endpoint(), "get rack"), "for the role admin");
    check_refused(&as_nobody(&tarn, &rack.endpoint(), RESERVE), "h0"); // admitted: no agent of the host is there
    drop(manager);

    let _manager = Manager::start(&rack, &format!("{text}{group}admins = [\"nobody\"]\n")).await;
    check_done(&as_nobody(&tarn, &rack.endpoint(), "get rack"));
    check_done(&as_nobody(&tarn, &rack.endpoint(), "cordon host h0"));
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[tokio::test]
async fn loopback_address_wants_the_token_of_a_role() {
    if !can_become_nobody() {
        return;
    }
    let rack = Rack::new(Plan::small(2));
    let tarn = open_folder(&rack);
    let listen = format!("127.0.0.1:{}", free_port());
    let _manager = Manager::start(&rack, &rack.rack_toml().replace(&rack.endpoint(), &listen)).await;
    let endpoint = format!("http://{listen}");
    for words in ["get rack", "release prod --force --reason x", RESERVE] {
        check_refused(
            &as_nobody(&tarn, &endpoint, words),
            "authorization: must be \"Bearer\" and the token of the role",
        );
    }
    let with = |token: &str, words: &str| {
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
    check_done(&with("roles/admin.token", "get rack"));
    check_refused(&with("roles/admin.token", RESERVE), "h0");
    check_refused(&with("roles/scheduler.token", "get rack"), "the token of the role admin");
    check_refused(&with("roles/scheduler.token", RESERVE), "h0");
    check_refused(&with("tokens/h0.token", "get rack"), "the token of the role admin");
    let nobodys = as_nobody(
        &tarn,
        &endpoint,
        &format!("get rack --token-file {}/store/roles/admin.token", rack.dir().display()),
    );
    check_refused(&nobodys, "Permission denied");
}

#[tokio::test]
async fn connections_without_an_admitted_request_are_limited_and_closed() {
    let rack = Rack::new(Plan::small(2));
    fs::set_permissions(rack.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    let listen = format!("127.0.0.1:{}", free_port());
    let _manager = Manager::start(&rack, &rack.rack_toml().replace(&rack.endpoint(), &listen)).await;
    let limit = units::limits::UNADMITTED_CONNECTIONS_PER_SOURCE_MAX;
    let idle: Vec<_> = (0..limit).map(|_| std::net::TcpStream::connect(&listen).unwrap()).collect();
    let began = Instant::now();
    // One more is closed at once, which reading shows; those that were accepted are closed after a while.
    let mut more = std::net::TcpStream::connect(&listen).unwrap();
    more.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let is_closed = |read: std::io::Result<usize>| match read {
        Ok(read) => read == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    };
    assert!(is_closed(more.read(&mut [0; 1])));
    assert!(
        rack.logged("manager")
            .contains("connections of this source without an admitted request are open already")
    );
    for mut stream in idle {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut settings = Vec::new();
        assert!(is_closed(stream.read_to_end(&mut settings).map(|_| 0)), "it stays open");
    }
    assert!(
        began.elapsed() >= Duration::from_secs(5),
        "the first ones were not given the time to authenticate"
    );
    let token = rack.dir().join("store/roles/admin.token");
    let mut tarn = Command::new(programs().join("tarn"));
    tarn.args(["get", "rack", "--endpoint", &format!("http://{listen}"), "--token-file"]).arg(token);
    check_done(&tarn.output().unwrap());
}

/// The answers to pings filled the server's write buffer. It stopped reading, and the idle timer was polled on reads alone.
#[tokio::test]
async fn connection_of_a_peer_that_reads_nothing_is_closed() {
    use std::io::Write as _;
    let rack = Rack::new(Plan::small(2));
    let listen = format!("127.0.0.1:{}", free_port());
    let _manager = Manager::start(&rack, &rack.rack_toml().replace(&rack.endpoint(), &listen)).await;
    let mut stream = std::net::TcpStream::connect(&listen).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap(); // and empty settings
    let pings = b"\0\0\x08\x06\0\0\0\0\0abcdefgh".repeat(1000);
    let began = Instant::now();
    let closed = loop {
        match stream.write(&pings) {
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => break error,
            _ => assert!(began.elapsed() < Duration::from_secs(120), "it stays open"),
        }
    };
    let kinds = [std::io::ErrorKind::ConnectionReset, std::io::ErrorKind::BrokenPipe];
    assert!(kinds.contains(&closed.kind()), "{closed}");
}

#[tokio::test]
async fn file_at_the_sockets_path_and_a_socket_in_use_are_left_alone() {
    let mut rack = Rack::new(Plan::small(2));
    let path = rack.dir().join("manager.sock");
    fs::write(&path, "data").unwrap();
    let (ok, said) = rack.pool_manager(&["serve"]);
    assert!(!ok && said.contains("manager.sock is not a socket"), "{said}");
    assert_eq!(fs::read(&path).unwrap(), b"data");
    fs::remove_file(&path).unwrap();
    rack.start_manager().await;
    rack.kill_manager();
    rack.start_manager().await; // the dead one's socket is replaced
    let other = Rack::new(Plan::small(2));
    other.write_rack_toml(&other.rack_toml().replace(&other.endpoint(), &rack.endpoint()));
    let (ok, said) = other.pool_manager(&["serve"]);
    assert!(!ok && said.contains("another process listens on"), "{said}");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    drop(UnixStream::connect(&path).unwrap());
}

#[tokio::test]
async fn backup_of_a_running_manager_restores_what_was_then() {
    let mut rack = Rack::start(Plan::small(2)).await;
    let mut scheduler = rack.scheduler().await;
    scheduler.reserve(reserve("h0", "before", 1, "r1")).await.unwrap();
    let file = rack.dir().join("rack.backup");
    check_done(&rack.tarn(&["backup", "--to", file.to_str().unwrap()]));
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    scheduler.reserve(reserve("h1", "after", 1, "r2")).await.unwrap();
    check_refused(&rack.tarn(&["backup", "--to", file.to_str().unwrap()]), "must not exist");
    assert!(!rack.dir().join("store/backup.outgoing").exists());
    rack.stop_manager();
    rack.kill_agent(0);
    rack.kill_agent(1);
    let (ok, said) = rack.pool_manager(&["restore", "--force", "--from", file.to_str().unwrap()]);
    assert!(ok, "{said}");
    rack.start_manager().await;
    let names: Vec<_> = rack.reservations().await.into_iter().map(|r| r.vm).collect();
    assert_eq!(names, ["before"]);
}

/// A certificate authority in a folder, with certificates for names.
struct Authority<'a> {
    folder: &'a Path,
    issuer: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
}

impl<'a> Authority<'a> {
    fn new(folder: &'a Path) -> Self {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, folder.display().to_string());
        let key = rcgen::KeyPair::generate().unwrap();
        let issuer = rcgen::CertifiedIssuer::self_signed(params, key).unwrap();
        fs::write(folder.join("ca.pem"), issuer.pem()).unwrap();
        Self { folder, issuer }
    }

    fn issue(&self, name: &str, years: (i32, i32)) {
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

/// Attempts for results that depend on the order of two ends of a connection.
const ATTEMPTS_MAX: usize = 50;
const VALID: (i32, i32) = (2020, 2500);
const EXPIRED: (i32, i32) = (2020, 2021);

/// rack.toml with an address and `[tls]`.
fn with_tls(rack: &Rack, listen: &str) -> String {
    let tls = "[tls]\ncertificate = \"manager.pem\"\nkey = \"manager.key\"\nclient_ca = \"ca.pem\"\n\
               schedulers = [\"nova\"]\nadmins = [\"ops\"]\n[[emc]]";
    rack.rack_toml().replace(&rack.endpoint(), listen).replacen("[[emc]]", tls, 1)
}

/// Connects with a certificate, or without one.
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

async fn rack_code(channel: Channel) -> Option<Code> {
    let mut admin = wire::admin_client::AdminClient::new(channel);
    admin.get_rack(wire::GetRackRequest {}).await.err().map(|status| status.code())
}

#[tokio::test]
async fn over_tls_the_certificate_decides_the_role() {
    let rack = Rack::new(Plan::small(2));
    let authority = Authority::new(rack.dir());
    ["manager", "nova", "ops", "h0"].iter().for_each(|name| authority.issue(name, VALID));
    let listen = format!("127.0.0.1:{}", free_port());
    let text = with_tls(&rack, &listen);
    let _manager = Manager::start(&rack, &text).await;
    for (name, schedules, administers) in [("nova", true, false), ("ops", true, true), ("h0", false, false)] {
        let channel = connect(rack.dir(), &listen, Some(name)).await.unwrap();
        let mut admin = wire::admin_client::AdminClient::new(channel.clone());
        let mut scheduler = wire::scheduler_client::SchedulerClient::new(channel.clone());
        let refused = Some(Code::PermissionDenied);
        assert_eq!(rack_code(channel).await, if administers { None } else { refused }, "{name}");
        let asked = scheduler.reserve(reserve("nobody", "v", 1, "r1")).await.unwrap_err().code();
        assert_eq!(asked, if schedules { Code::NotFound } else { Code::PermissionDenied }, "{name}");
        let weigh = wire::SetWeightsRequest { host: "nobody".into(), weights: Vec::new() };
        assert_eq!(scheduler.set_weights(weigh).await.unwrap_err().code(), asked, "{name}");
        let shares = admin.get_shares(wire::GetSharesRequest { host: "h0".into() }).await.unwrap_err().code();
        assert_eq!(shares, if administers { Code::NotFound } else { Code::PermissionDenied }, "{name}");
    }
    let open = text.replace("127.0.0.1", "0.0.0.0");
    let open = &open[..open.find("[tls]").unwrap()];
    rack.write_rack_toml(open);
    let (ok, said) = rack.pool_manager(&["serve", "--check-config"]);
    assert!(!ok && said.contains("tls"), "{said}");
}

/// A table of certificates: each is refused, and the log has the peer and the reason.
#[tokio::test]
async fn refused_certificates_are_logged_with_peer_and_reason() {
    let rack = Rack::new(Plan::small(2));
    let authority = Authority::new(rack.dir());
    ["manager", "ops"].iter().for_each(|name| authority.issue(name, VALID));
    authority.issue("late", EXPIRED);
    let strange = tempfile::tempdir().unwrap();
    Authority::new(strange.path()).issue("stranger", VALID);
    for name in ["stranger.pem", "stranger.key"] {
        fs::copy(strange.path().join(name), rack.dir().join(name)).unwrap();
    }
    let listen = format!("127.0.0.1:{}", free_port());
    let _manager = Manager::start(&rack, &with_tls(&rack, &listen)).await;
    let table = [
        (Some("late"), "certificate expired"),
        (Some("stranger"), "UnknownIssuer"),
        (None, "peer sent no certificates"),
    ];
    for (name, reason) in table {
        if let Ok(channel) = connect(rack.dir(), &listen, name).await {
            assert!(rack_code(channel).await.is_some(), "{name:?} was admitted");
        }
        rack.wait_for(reason, async |rack| {
            rack.logged("manager").lines().any(|line| line.contains("127.0.0.1:") && line.contains(reason))
        })
        .await;
    }
    let tarn = |name: &str| {
        let file = |end: &str| rack.dir().join(format!("{name}.{end}"));
        let mut tarn = Command::new(programs().join("tarn"));
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
    // A connection may break while the client writes, before it reads the alert.
    for (name, alert) in [("late", "CertificateExpired"), ("stranger", "UnknownCA")] {
        let mut answers = (0..ATTEMPTS_MAX).map(|_| String::from_utf8(tarn(name).stderr).unwrap());
        let last = answers.find(|said| said.contains(&format!("received fatal alert: {alert}")));
        assert!(last.is_some(), "tarn never names the alert {alert}");
    }
    let plain = Endpoint::from_shared(format!("http://{listen}")).unwrap().connect().await;
    if let Ok(channel) = plain {
        assert!(rack_code(channel).await.is_some(), "a connection without TLS was admitted");
    }
    rack.wait_for("a log line", async |rack| rack.logged("manager").contains("InvalidContentType")).await;
    assert_eq!(rack_code(connect(rack.dir(), &listen, Some("ops")).await.unwrap()).await, None);
}

#[tokio::test]
async fn certificates_are_renewed_by_a_reload_and_open_connections_stay() {
    let rack = Rack::new(Plan::small(2));
    let authority = Authority::new(rack.dir());
    ["manager", "ops"].iter().for_each(|name| authority.issue(name, VALID));
    let listen = format!("127.0.0.1:{}", free_port());
    let manager = Manager::start(&rack, &with_tls(&rack, &listen)).await;
    let open = connect(rack.dir(), &listen, Some("ops")).await.unwrap();
    assert_eq!(rack_code(open.clone()).await, None);

    fs::write(rack.dir().join("manager.key"), "not a key").unwrap();
    manager.reload();
    rack.wait_for("the refusal", async |rack| rack.logged("manager").contains("tls.key")).await;
    assert_eq!(rack_code(connect(rack.dir(), &listen, Some("ops")).await.unwrap()).await, None);

    let renewed = Authority::new(rack.dir()); // the authority is replaced, too
    ["manager", "ops"].iter().for_each(|name| renewed.issue(name, VALID));
    assert!(
        connect(rack.dir(), &listen, Some("ops")).await.is_err(),
        "the old certificate satisfies the new authority"
    );
    manager.reload();
    rack.wait_for("the reload", async |rack| rack.logged("manager").contains("rack.toml read again")).await;
    assert_eq!(rack_code(connect(rack.dir(), &listen, Some("ops")).await.unwrap()).await, None);
    assert_eq!(rack_code(open).await, None);
}

#[tokio::test]
async fn configuration_check_reads_certificates_and_keys() {
    let rack = Rack::new(Plan::small(2));
    let authority = Authority::new(rack.dir());
    authority.issue("manager", VALID);
    rack.write_rack_toml(&with_tls(&rack, "127.0.0.1:9750"));
    let check = || rack.pool_manager(&["serve", "--check-config"]);
    let (ok, said) = check();
    assert!(ok && said.contains("certificate of manager: ok"), "{said}");
    fs::set_permissions(rack.dir().join("manager.key"), fs::Permissions::from_mode(0o644)).unwrap();
    let (ok, said) = check();
    assert!(!ok && said.contains("tls.key") && said.contains("has mode 0644"), "{said}");
    authority.issue("manager", EXPIRED);
    let (ok, said) = check();
    assert!(!ok && said.contains("tls.certificate") && said.contains("expired on"), "{said}");
    fs::remove_file(rack.dir().join("manager.pem")).unwrap();
    let (ok, said) = check();
    assert!(!ok && said.contains("tls.certificate: cannot read"), "{said}");
    let public = rack.rack_toml().replacen("store =", "metrics_listen = \"0.0.0.0:9751\"\nstore =", 1);
    rack.write_rack_toml(&public);
    let (ok, said) = check();
    assert!(ok && said.contains("warning: manager.metrics_listen = 0.0.0.0:9751"), "{said}");
}
