//! Tests of racks with several managers, with real processes and a real cluster of etcd.

use std::{fs::Permissions, net::TcpListener, os::unix::fs::PermissionsExt as _, path::Path, time::Duration};

use etcd::{
    client::Settings,
    messages::{RangeRequest, TxnRequest, delete},
};
use pool_manager::{
    election::{self, Election, ManagerEntry},
    store::{FORMAT, Store as _, Table, Write, etcd::Cluster, meta},
};
use proto::v1 as wire;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustix::process::Signal;
use tests::{
    elected_rack::{ElectedRack, SLICES},
    environment::seed,
    etcd_cluster::{self, EtcdCluster},
    failover_load::Load,
    rack::{programs_dir, reserve_request, wait_for_line},
};
use tonic::Code;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_types::StatusExt as _;
use units::Ns;

/// Lease of managers that are not paused. It is shorter than the default, so that tests end sooner.
const LEASE_S: u64 = 2;

/// Returns the names of all VMs with a reservation.
fn vms(rack: &ElectedRack) -> Vec<String> {
    let reservations = rack.tarn_output(&["get", "reservations", "--output", "json"]);
    let reservations: serde_json::Value = serde_json::from_str(&reservations).expect("the output is JSON");
    let list = reservations["items"].as_array().or(reservations.as_array()).expect("the output has a list");
    let mut names: Vec<_> =
        list.iter().map(|item| item["vm"].as_str().expect("a reservation has a VM").to_owned()).collect();
    names.sort();
    names
}

/// Connects to the etcd of a rack.
fn cluster(rack: &ElectedRack) -> Cluster {
    let settings = Settings {
        endpoints: rack.etcd.endpoints(),
        tls: None,
        credentials: None,
        call_timeout: Duration::from_secs(1),
    };
    Cluster::new(settings, "/tarn".to_owned(), 2 << 30).expect("the addresses are valid")
}

/// Reserves slices for a VM, after the host has reported to the leader.
async fn reserve(rack: &ElectedRack, vm: &str) {
    rack.wait_for_host().await;
    rack.tarn_output(&["reserve", "--host", "h0", "--vm", vm, "--pool", "2GiB", "--wait-ready"]);
}

/// Waits until all slices are free, except for those of one reservation.
async fn wait_for_free_slices(rack: &ElectedRack) {
    let mut admin = rack.admin(0).await;
    rack.wait_for("all other slices to be free", async || {
        let slices = admin.list_slices(wire::ListSlicesRequest::default()).await;
        let slices = slices.expect("the manager replies").into_inner().slices;
        slices.iter().filter(|slice| slice.state() == wire::SliceState::Free).count() + 2 == SLICES as usize
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn standby_takes_over_from_a_killed_leader() {
    let mut rack = ElectedRack::start(1, 2, LEASE_S).await;
    let first = rack.wait_for_leader().await;
    let second = 1 - first;
    reserve(&rack, "a").await;
    rack.kill_manager(first);
    assert_eq!(rack.wait_for_leader().await, second);
    reserve(&rack, "b").await;
    assert_eq!(vms(&rack), ["a", "b"]);
    rack.start_manager(first);
    rack.kill_manager(second);
    assert_eq!(rack.wait_for_leader().await, first);
    reserve(&rack, "c").await;
    assert_eq!(vms(&rack), ["a", "b", "c"]);
    rack.tarn_output(&["release", "a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn standby_names_the_leader_and_is_alive_but_not_ready() {
    let rack = ElectedRack::start(1, 2, LEASE_S).await;
    let leader = rack.wait_for_leader().await;
    let standby = 1 - leader;
    let status = rack.scheduler(standby).await.reserve(reserve_request("h0", "a", 1, "r")).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    let info = status.get_details_error_info().expect("the status has a reason");
    assert_eq!(
        (info.reason.as_str(), info.metadata["leader"].as_str()),
        ("NOT_LEADER", rack.uri(leader).as_str())
    );
    let status = rack.admin(standby).await.get_rack(wire::GetRackRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    let mut health = HealthClient::new(rack.connect(standby).await);
    for (service, expected) in
        [("", ServingStatus::Serving), ("tarn.v1.Scheduler", ServingStatus::NotServing)]
    {
        let checked = health.check(HealthCheckRequest { service: service.into() }).await.unwrap();
        assert_eq!(checked.into_inner().status(), expected, "{service}");
    }
}

/// The paused manager does not notice that another one was elected until it continues.
#[tokio::test(flavor = "multi_thread")]
async fn paused_leader_changes_nothing_when_it_continues() {
    let mut rack = ElectedRack::start(1, 2, LEASE_S).await;
    let first = rack.wait_for_leader().await;
    reserve(&rack, "a").await;
    let mut scheduler = rack.scheduler(first).await;
    let mut admin = rack.admin(first).await;
    rack.pause_manager(first);
    // These requests wait in the socket of the paused manager.
    let release = tokio::spawn(async move {
        scheduler
            .release(wire::ReleaseRequest { target: tests::rack::vm_ref("a"), ..Default::default() })
            .await
    });
    let list =
        tokio::spawn(async move { admin.list_reservations(wire::ListReservationsRequest::default()).await });
    rack.wait_for_leader_after(Some(first)).await;
    reserve(&rack, "b").await;
    rack.signal_manager(first, Signal::CONT);
    assert!(!rack.wait_for_end(first), "the manager ended without an error");
    assert!(release.await.unwrap().is_err(), "the earlier leader released a reservation");
    if let Ok(reservations) = list.await.unwrap() {
        panic!("the earlier leader answered a read: {reservations:?}");
    }
    assert_eq!(vms(&rack), ["a", "b"]);
    let log = rack.read_log(&format!("m{first}"));
    assert!(log.contains("another pool-manager may be the leader now"), "{log}");
    reserve(&rack, "c").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_leader_hands_over_at_once() {
    let mut rack = ElectedRack::start(1, 2, 30).await;
    let first = rack.wait_for_leader().await;
    reserve(&rack, "a").await;
    rack.signal_manager(first, Signal::TERM);
    assert!(rack.wait_for_end(first), "the manager failed\n{}", rack.logs());
    let managers = election::list(&cluster(&rack)).await.expect("etcd replies");
    let names: Vec<_> = managers.into_iter().map(|(manager, _)| manager.name).collect();
    assert_eq!(names, [format!("m{}", 1 - first)], "the lease of the stopped manager has not ended");
    assert_eq!(rack.wait_for_leader().await, 1 - first);
    assert_eq!(vms(&rack), ["a"]);
}

/// Clients call the managers during two transfers.
#[tokio::test(flavor = "multi_thread")]
async fn transfer_loses_no_acknowledged_call() {
    let rack = ElectedRack::start(1, 2, LEASE_S).await;
    let first = rack.wait_for_leader().await;
    let (ok, output) = rack.run_pool_manager(0, &["transfer", "--to", "other"]);
    assert!(!ok && output.contains("manager \"other\" does not run; running managers: m0, m1"), "{output}");
    let (ok, output) = rack.run_pool_manager(0, &["transfer", "--to", &format!("m{first}")]);
    assert!(!ok && output.contains(&format!("m{first} is already the leader")), "{output}");
    let load = Load::start(&rack, 2, 4, seed());
    for transfer in 1..=2 {
        let next = (first + transfer) % 2;
        let (ok, output) = rack.run_pool_manager(0, &["transfer"]);
        assert!(ok && output.contains(&format!("m{next} at ")), "{output}\n{}", rack.logs());
        load.wait_for_calls(10); // at the new leader
    }
    let history = load.stop();
    assert_eq!(history.check(), Vec::<String>::new());
    let managers = rack.tarn_output(&["get", "managers"]);
    let roles: Vec<_> = managers.lines().skip(1).map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(
        roles,
        if first == 0 { [Some("leader"), Some("standby")] } else { [Some("standby"), Some("leader")] }
    );
}

/// The binary `failover` does the same more often.
#[tokio::test(flavor = "multi_thread")]
async fn calls_during_faults_are_linearizable() {
    let mut rack = ElectedRack::start(3, 2, LEASE_S).await;
    let load = Load::start(&rack, 2, 4, seed());
    for fault in 0..4 {
        let leader = rack.wait_for_leader().await;
        load.wait_for_calls(4);
        match fault % 2 {
            0 => rack.kill_manager(leader),
            _ => rack.signal_manager(leader, Signal::STOP),
        }
        let member = fault % 3;
        rack.etcd.kill(member);
        rack.wait_for_leader_after(Some(leader)).await;
        if fault % 2 == 1 {
            rack.signal_manager(leader, Signal::CONT);
            assert!(!rack.wait_for_end(leader));
        }
        rack.etcd.restart(member);
        rack.start_manager(leader);
    }
    let history = load.stop();
    let (reservations, lists) = history.counts();
    assert!(reservations > 10 && lists > 4, "{reservations} reservations, {lists} lists");
    assert_eq!(history.check(), Vec::<String>::new());
}

/// Returns the commands of the walk-through in the documentation.
fn walk_through() -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/high-availability.md");
    let text = std::fs::read_to_string(page).expect("the page is readable");
    let (_, section) = text.split_once("## Walk-through").expect("the page has the section");
    let blocks = section.split("```bash\n").skip(1);
    blocks.map(|block| block.split("```").next().expect("a block ends")).collect()
}

/// Returns two different prefixes of three free ports each, which end with 0, 1 and 2.
fn free_ports() -> [u16; 2] {
    let is_free = |prefix: &u16| {
        let listeners: Vec<_> =
            (0..3).map(|digit| TcpListener::bind(("127.0.0.1", prefix * 10 + digit))).collect();
        listeners.iter().all(Result::is_ok)
    };
    let start = 1100 + u16::try_from(std::process::id() % 1000).expect("a remainder");
    let mut free = (start..3200).filter(is_free);
    [free.next(), free.next()].map(|prefix| prefix.expect("ports are free"))
}

#[test]
fn walk_through_of_the_documentation_works() {
    let dir = tempfile::tempdir().expect("a temporary folder is created");
    // The ports consist of four digits and the number of the member.
    let [clients, peers] = free_ports();
    let script =
        walk_through().replace(":2379", &format!(":{clients}")).replace(":2380", &format!(":{peers}"));
    let path = std::env::var("PATH").expect("PATH is set");
    let etcd = etcd_cluster::program();
    let etcd = etcd.parent().expect("the program is in a folder").display();
    let output = std::process::Command::new("bash")
        .arg("-euo")
        .arg("pipefail")
        .arg("-c")
        .arg(format!("trap 'kill $(jobs -p) 2> kill.log || true' EXIT\n{script}"))
        .env("PATH", format!("{}:{etcd}:{path}", programs_dir().display()))
        .env("RUST_BACKTRACE", "0")
        .current_dir(dir.path())
        .output()
        .expect("bash runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    let leaders: Vec<_> =
        stdout.lines().filter(|line| line.contains(" leader ")).map(|line| &line[..1]).collect();
    assert!(matches!(leaders[..], [first, second, third] if first != second && first == third), "{stdout}");
    let transferred = stdout.lines().find(|line| line.contains("is now the leader"));
    assert!(transferred.is_some_and(|line| line.starts_with(leaders[0])), "{stdout}");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_standby_raises_an_alarm() {
    let mut rack = ElectedRack::start(1, 2, LEASE_S).await;
    let first = rack.wait_for_leader().await;
    rack.kill_manager(1 - first);
    let wait_for_alarm = async |rack: &ElectedRack, expected: bool| {
        let is_expected = || rack.tarn_output(&["get", "alarms"]).contains("NO_STANDBY") == expected;
        rack.wait_for("the alarm to change", async || is_expected()).await;
    };
    wait_for_alarm(&rack, true).await;
    rack.start_manager(1 - first);
    wait_for_alarm(&rack, false).await;
}

/// Waits until `tarn get managers` lists both managers.
async fn wait_for_both(rack: &ElectedRack) {
    rack.wait_for("both managers to be listed", async || {
        let managers = rack.tarn_output(&["get", "managers"]);
        ["m0", "m1"].iter().all(|name| managers.contains(name))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn manager_that_could_not_take_over_does_not_become_a_standby() {
    let mut rack = ElectedRack::start(1, 2, LEASE_S).await;
    let leader = rack.wait_for_leader().await;
    let standby = 1 - leader;
    reserve(&rack, "a").await;
    rack.signal_manager(standby, Signal::TERM);
    assert!(rack.wait_for_end(standby));
    let path = rack.config_path(standby);
    let config = std::fs::read_to_string(&path).expect("the configuration is readable");
    let other_host = config.replace("name = \"h0\"", "name = \"h9\"");
    let cases = [
        (config.replace("\"state\"", "\"fresh\""), "all managers of a rack must have the same state_dir"),
        (other_host.clone(), "host h0 cannot be removed"),
    ];
    for (changed, expected) in cases {
        std::fs::write(&path, changed).unwrap();
        let (ok, output) = rack.run_pool_manager(standby, &["serve"]);
        assert!(!ok && output.contains(expected), "{output}");
    }
    let has_folder = |name: &str| rack.dir().join("fresh").join(name).exists();
    assert!(!has_folder("tokens") && !has_folder("roles"), "the manager has created tokens");
    std::fs::write(&path, &config).unwrap();
    rack.start_manager(standby);
    wait_for_both(&rack).await;
    std::fs::write(&path, &other_host).unwrap();
    rack.signal_manager(standby, Signal::HUP);
    let log = format!("m{standby}");
    rack.wait_for("the rejected reload", async || rack.read_log(&log).contains("host h0 cannot be removed"))
        .await;
    let (ok, output) = rack.run_pool_manager(leader, &["transfer"]);
    assert!(ok, "the standby keeps its earlier configuration: {output}\n{}", rack.logs());
}

#[tokio::test(flavor = "multi_thread")]
async fn transfer_to_a_paused_standby_ends_before_its_time_limit() {
    let rack = ElectedRack::start(1, 2, 5).await; // the transfer begins before the lease of the standby ends
    let leader = rack.wait_for_leader().await;
    let standby = 1 - leader;
    wait_for_both(&rack).await;
    rack.pause_manager(standby);
    let (ok, output) = rack.run_pool_manager(leader, &["transfer", "--to", &format!("m{standby}")]);
    let problems = [format!("m{leader} leads"), format!("m{standby} does not run any more")];
    assert!(!ok && problems.iter().any(|problem| output.contains(problem)), "{output}");
    rack.signal_manager(standby, Signal::CONT);
    assert_eq!(rack.wait_for_leader().await, leader);
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_entry_of_the_leader_is_created_again() {
    let rack = ElectedRack::start(1, 2, LEASE_S).await;
    let leader = rack.wait_for_leader().await;
    let cluster = cluster(&rack);
    let key = format!("/tarn/managers/m{leader}").into_bytes();
    let read_revision = async || {
        let (client, request) =
            (cluster.client().clone(), RangeRequest { key: key.clone(), ..RangeRequest::default() });
        let found = cluster.spawn(async move { client.range(request).await }).await.unwrap().unwrap();
        found.kvs.first().map(|entry| entry.create_revision)
    };
    let first = read_revision().await.expect("the leader has an entry");
    let (client, request) = (
        cluster.client().clone(),
        TxnRequest { success: vec![delete(key.clone())], ..TxnRequest::default() },
    );
    cluster.spawn(async move { client.txn(request).await }).await.unwrap().unwrap();
    rack.wait_for("another entry of the leader", async || {
        read_revision().await.is_some_and(|revision| revision != first)
    })
    .await;
    wait_for_both(&rack).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn store_moves_to_etcd_and_back() {
    let mut rack = ElectedRack::new(1, 1, LEASE_S);
    let etcd = rack.etcd_store("/tarn");
    let moved = rack.etcd_store("/racks/moved");
    rack.start_manager(0);
    rack.wait_for_leader().await;
    rack.start_agent();
    reserve(&rack, "a").await;
    let mut vm = rack.start_vm("a");
    wait_for_line(&mut vm);
    let folder = rack.dir().join("state").display().to_string();
    for (step, store) in [moved.as_str(), folder.as_str(), etcd.as_str()].into_iter().enumerate() {
        rack.signal_manager(0, Signal::TERM);
        assert!(rack.wait_for_end(0));
        let backup = rack.dir().join(format!("backup-{step}")).display().to_string();
        let (ok, output) = rack.run_pool_manager(0, &["backup", "--to", &backup]);
        assert!(ok, "{output}");
        rack.write_config(0, store, "");
        let (ok, output) = rack.run_pool_manager(0, &["restore", "--from", &backup]);
        assert_eq!(ok, store != etcd, "a store with a rack must be replaced only with --force: {output}");
        if !ok {
            assert!(output.contains("is an existing store: use --force"), "{output}");
            let (ok, output) = rack.run_pool_manager(0, &["restore", "--force", "--from", &backup]);
            assert!(ok && output.contains("the previous store is now "), "{output}");
        }
        let (ok, output) = rack.run_pool_manager(0, &["check"]);
        assert!(ok, "{output}");
        rack.start_manager(0);
        rack.wait_for_leader().await;
        rack.wait_for_host().await;
        assert_eq!(vms(&rack), ["a"]);
        wait_for_free_slices(&rack).await; // slices are quarantined until the host has reported
        reserve(&rack, &format!("after-{step}")).await;
        rack.tarn_output(&["release", &format!("after-{step}")]);
    }
    assert!(vm.try_wait().unwrap().is_none(), "the VM ended");
    vm.kill().unwrap();
    vm.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_stores_in_etcd_are_rejected() {
    let rack = ElectedRack::new(1, 2, LEASE_S);
    let start_error = |manager: usize| {
        let (ok, output) = rack.run_pool_manager(manager, &["serve"]);
        assert!(!ok, "the manager started: {output}");
        output
    };
    let (ok, output) = rack.run_pool_manager(0, &["init"]);
    assert!(!ok && output.contains("already contains rack"), "{output}");

    rack.write_config(1, &rack.etcd_store("/empty"), "");
    let output = start_error(1);
    assert!(output.contains("contains no rack, but its directory belongs to a rack"), "{output}");
    let (ok, output) = rack.run_pool_manager(1, &["init"]);
    assert!(!ok && output.contains("restore a backup"), "{output}");

    let config =
        std::fs::read_to_string(rack.config_path(1)).unwrap().replace("\"state\"", "\"other-state\"");
    std::fs::write(rack.config_path(1), &config).unwrap();
    let (ok, backup) = rack.run_pool_manager(1, &["backup", "--to", "empty-backup"]);
    assert!(!ok, "{backup}");
    for output in [start_error(1), backup] {
        let expected = "no store at etcd:/empty: it contains no rack: correct manager.store";
        assert!(output.contains(expected), "{output}");
    }
    let nested = config.replace("/empty", "/tarn/emc/x");
    std::fs::write(rack.config_path(1), &nested).unwrap();
    let (ok, output) = rack.run_pool_manager(1, &["init"]);
    assert!(
        !ok && output.contains("the prefix of store etcd:/tarn/emc/x is in use: key /tarn/head"),
        "{output}"
    );
    std::fs::write(rack.config_path(1), &config).unwrap();
    let (ok, output) = rack.run_pool_manager(1, &["init"]);
    assert!(ok, "{output}");
    let outer = config.replace("/empty\"", "/\"");
    std::fs::write(rack.config_path(1), outer).unwrap();
    assert!(start_error(1).contains("manager.store = "), "a prefix must have a name");

    // The folder belongs to the rack with prefix /empty.
    let other = config.replace("/empty", "/tarn");
    std::fs::write(rack.config_path(1), other).unwrap();
    let output = start_error(1);
    assert!(
        output.contains("other-state/rack-uuid contains rack ") && output.contains("the rack of etcd:/tarn"),
        "{output}"
    );
}

/// Writes `ca.pem`, and `server` and `client` certificates with their keys, for addresses on this machine.
fn write_certificates(folder: &Path) {
    let mut authority = CertificateParams::new([]).expect("the parameters are valid");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().expect("a key is generated"));
    let authority = authority.expect("the authority is created");
    let write =
        |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("the folder is writable");
    write("ca.pem", &authority.pem());
    for name in ["server", "client"] {
        let key = KeyPair::generate().expect("a key is generated");
        let certificate = CertificateParams::new(["127.0.0.1".to_owned()]).expect("the parameters are valid");
        let certificate = certificate.signed_by(&key, &authority).expect("the certificate is created");
        write(&format!("{name}.pem"), &certificate.pem());
        write(&format!("{name}.key"), &key.serialize_pem());
        std::fs::set_permissions(folder.join(format!("{name}.key")), Permissions::from_mode(0o600))
            .expect("the file exists");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_identifies_managers_by_certificates() {
    let [known, unknown] = [0, 1].map(|_| tempfile::tempdir().expect("a temporary folder is created"));
    [&known, &unknown].iter().for_each(|folder| write_certificates(folder.path()));
    let mut rack = ElectedRack::prepare(EtcdCluster::start_with_tls(known.path()), 1, LEASE_S);
    let store = rack.etcd_store("/tarn");
    let files = |ca: &tempfile::TempDir, client: &tempfile::TempDir| {
        let file = |folder: &tempfile::TempDir, name: &str| folder.path().join(name).display().to_string();
        let (ca, certificate) = (file(ca, "ca.pem"), file(client, "client.pem"));
        format!("ca = {ca:?}\ncertificate = {certificate:?}\nkey = {:?}", file(client, "client.key"))
    };
    for (ca, client) in [(&known, &unknown), (&unknown, &known)] {
        rack.write_config(0, &store, &files(ca, client));
        let (ok, output) = rack.run_pool_manager(0, &["init"]);
        assert!(!ok && output.contains("no etcd member answered: https://127.0.0.1:"), "{output}");
    }
    rack.write_config(0, &store, &files(&known, &known));
    let (ok, output) = rack.run_pool_manager(0, &["init"]);
    assert!(ok, "{output}");
    rack.start_manager(0);
    rack.wait_for_leader().await;
    rack.start_agent();
    reserve(&rack, "a").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_identifies_managers_by_passwords() {
    let mut rack = ElectedRack::prepare(EtcdCluster::start(1, &[]), 2, LEASE_S);
    // In base64: the keys that begin with "/tarn/", from "/tarn/" to "/tarn0".
    let permission =
        r#"{"name": "tarn", "perm": {"permType": "READWRITE", "key": "L3Rhcm4v", "range_end": "L3Rhcm4w"}}"#;
    for (path, body) in [
        ("/v3/auth/user/add", r#"{"name": "root", "password": "for-root"}"#),
        ("/v3/auth/role/add", r#"{"name": "root"}"#),
        ("/v3/auth/user/grant", r#"{"user": "root", "role": "root"}"#),
        ("/v3/auth/user/add", r#"{"name": "tarn", "password": "for-tarn"}"#),
        ("/v3/auth/role/add", r#"{"name": "tarn"}"#),
        ("/v3/auth/user/grant", r#"{"user": "tarn", "role": "tarn"}"#),
        ("/v3/auth/role/grant", permission),
        ("/v3/auth/enable", "{}"),
    ] {
        rack.etcd.call_json(path, body);
    }
    let (store, password) = (rack.etcd_store("/tarn"), rack.dir().join("password"));
    let init_error = |settings: &str, store: &str| {
        rack.write_config(0, store, settings);
        let (ok, output) = rack.run_pool_manager(0, &["init"]);
        assert!(!ok, "{settings}: {output}");
        output
    };
    let settings = format!("user = \"tarn\"\npassword_file = {password:?}");
    assert!(init_error("", &store).contains("etcd denies access"));
    assert!(init_error(&settings, &store).contains("etcd.password_file: cannot read"));
    std::fs::write(&password, "for-tarn\n").expect("the folder is writable");
    let set_mode =
        |mode| std::fs::set_permissions(&password, Permissions::from_mode(mode)).expect("the file exists");
    set_mode(0o644);
    assert!(init_error(&settings, &store).contains("has mode 0644: only its owner may access it"));
    set_mode(0o600);
    std::fs::write(&password, "wrong").expect("the folder is writable");
    assert!(init_error(&settings, &store).contains("etcd denies access"));
    std::fs::write(&password, "for-tarn\n").expect("the folder is writable");
    assert!(init_error(&settings, &rack.etcd_store("/other")).contains("etcd denies access"));
    (0..2).for_each(|manager| rack.write_config(manager, &store, &settings));
    let (ok, output) = rack.run_pool_manager(0, &["init"]);
    assert!(ok, "{output}");
    (0..2).for_each(|manager| rack.start_manager(manager));
    let first = rack.wait_for_leader().await;
    rack.start_agent();
    reserve(&rack, "a").await;
    rack.kill_manager(first);
    rack.wait_for_leader().await;
    reserve(&rack, "b").await;
    assert_eq!(vms(&rack), ["a", "b"]);
}

/// An upgraded manager has changed the format of the ledger, and an older one is started.
#[tokio::test(flavor = "multi_thread")]
async fn manager_of_an_earlier_version_does_not_join() {
    let rack = ElectedRack::new(1, 1, LEASE_S);
    let entry = ManagerEntry {
        name: "upgraded".to_owned(),
        address: "unix:/upgraded".to_owned(),
        version: "99.0.0".to_owned(),
        started_unix_ms: 0,
        is_serving: Some(false),
    };
    let election = Election::new(cluster(&rack), &entry, Ns::secs(LEASE_S));
    let leader = election.win(&mut election.campaign()).await.expect("etcd accepts the manager");
    let mut store = leader.elected().open_store().expect("the store is readable");
    store.commit(&[Write::number(Table::Meta, meta::FORMAT, FORMAT + 1)]).expect("the manager is the leader");
    for command in ["serve", "check"] {
        let (ok, output) = rack.run_pool_manager(0, &[command]);
        let rule = format!("has format {}: must be at most {FORMAT}; use the newer pool-manager", FORMAT + 1);
        assert!(!ok && output.contains(&rule), "{output}");
    }
    let (ok, output) = rack.run_pool_manager(0, &["init"]);
    assert!(!ok && output.contains("is in use by the pool-manager upgraded at unix:/upgraded"), "{output}");
}
