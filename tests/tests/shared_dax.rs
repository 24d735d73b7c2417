//! A device that several hosts see, without a fence: a host keeps its slices until it releases them
//! or has certainly stopped. The manager, its record and the fence command are real; the hosts are
//! scripted.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

use proto::v1::{self as wire, HostState};
use tests::{
    rack::{Plan, Rack, by_vm, reserve},
    scripted_agent::{Obedient, SERIAL, SLICES},
};

/// Two hosts on one such device; one that is silent is fenced soon.
async fn rack(fence: &str) -> Rack {
    let plan = Plan {
        emcs: vec![4],
        hosts: vec![vec![0], vec![0]],
        lease_ttl_s: 1.0,
        fence_after_s: Some(1.0),
        more: fence.to_owned(),
        ..Plan::small(SLICES)
    };
    let mut rack = Rack::new(plan);
    let shared = format!("driver = \"shared-dax\"\nserial = {SERIAL:?}");
    rack.write_rack_toml(&rack.rack_toml().replace("driver = \"emulated\"", &shared));
    rack.start_manager().await;
    wait_emc_up(&rack).await;
    rack
}

/// Until its record has been compared with the ledger.
async fn wait_emc_up(rack: &Rack) {
    rack.wait_for("the device to be up", async |rack| {
        let emcs = rack.admin().await.list_emcs(wire::ListEmcsRequest {}).await.unwrap().into_inner().emcs;
        emcs[0].state() == wire::EmcState::Up
    })
    .await;
}

/// A host with a VM's slice of such a device, and the host's agent.
async fn host_with_slice(rack: &Rack, host: &str) -> Obedient {
    let agent = Obedient::start(rack, host, "boot 1").await;
    reserve_ready(rack, host).await;
    agent
}

async fn reserve_ready(rack: &Rack, host: &str) {
    let vm = format!("vm-of-{host}");
    let request = wire::ReserveRequest { wait_ready: true, ..reserve(host, &vm, 1, &vm) };
    rack.scheduler().await.reserve(request).await.unwrap();
    rack.scheduler().await.commit(wire::CommitRequest { target: by_vm(&vm) }).await.unwrap();
}

async fn h0(rack: &Rack) -> wire::Host {
    rack.hosts().await.into_iter().find(|host| host.host == "h0").unwrap()
}

async fn wait_not_fenced(rack: &Rack, why: &str) {
    rack.wait_for("an attempt to fence h0", async |rack| h0(rack).await.fence_error.is_some()).await;
    let host = h0(rack).await;
    assert_eq!((host.state(), host.slices), (HostState::Fencing, 1));
    assert!(host.fence_error().contains(why), "{host:?}");
    let slices = rack.slices().await;
    assert_eq!(slices[0].host.as_deref(), Some("h0"), "{slices:?}");
    assert_eq!(slices[0].reason(), "its host is to be cut off, and may still reach it");
}

fn told(rack: &Rack, args: &[&str]) -> String {
    String::from_utf8(rack.tarn(args).stdout).unwrap()
}

#[tokio::test]
async fn a_silent_host_is_stopped_by_the_operators_command_and_its_slices_go_on() {
    let stops = tempfile::tempdir().unwrap();
    let list = stops.path().join("stopped");
    let script = format!("[fence]\ncommand = [\"sh\", \"-c\", \"echo {{host}} >> {}\"]", list.display());
    let mut rack = rack(&script).await;
    let other = Obedient::start(&rack, "h1", "boot 1").await;
    let agent = host_with_slice(&rack, "h0").await;
    assert_eq!(agent.handles(), ["cxl:0x1a:0".to_owned()].into());
    drop((agent, other));
    rack.kill_manager(); // its grants are recorded
    rack.start_manager().await;
    let _other = Obedient::start(&rack, "h1", "boot 1").await;
    rack.wait_all_free().await;
    assert_eq!(std::fs::read_to_string(list).unwrap(), "h0\n");
    rack.wait_for("h0 to be fenced", async |rack| h0(rack).await.state() == HostState::Fenced).await;
    let slices = rack.slices().await;
    assert_eq!(slices[0].receipt.as_ref().unwrap().scrubber, "h1", "{slices:?}");
}

#[tokio::test]
async fn a_host_that_could_not_be_stopped_keeps_its_slices_until_an_operator_vouches() {
    let rack = rack("[fence]\ncommand = [\"false\", \"{host}\"]").await;
    let _other = Obedient::start(&rack, "h1", "boot 1").await;
    drop(host_with_slice(&rack, "h0").await);
    wait_not_fenced(&rack, "`false h0` ended with exit status: 1").await;
    reserve_ready(&rack, "h1").await;
    let doctor = told(&rack, &["doctor"]);
    assert!(doctor.contains("tarn fence h0 --confirm-powered-off"), "{doctor}");
    let alarms = told(&rack, &["get", "alarms"]);
    assert!(alarms.contains("HOST_NOT_FENCED"), "{alarms}");
    assert!(rack.tarn(&["fence", "h0", "--confirm-powered-off"]).status.success());
    rack.wait_for("h0 to be fenced", async |rack| h0(rack).await.state() == HostState::Fenced).await;
    rack.wait_for("the slice of h0 to be free", async |rack| {
        rack.slices().await[0].state() == wire::SliceState::Free
    })
    .await;
}

#[tokio::test]
async fn a_host_that_returns_restarted_has_let_go_of_what_a_command_that_hangs_could_not_take() {
    let rack = rack("[fence]\ncommand = [\"sh\", \"-c\", \"sleep 600; true {host}\"]\nwithin_s = 1").await;
    let _other = Obedient::start(&rack, "h1", "boot 1").await;
    drop(host_with_slice(&rack, "h0").await);
    rack.wait_for("h0 to be fencing", async |rack| h0(rack).await.state() == HostState::Fencing).await;
    reserve_ready(&rack, "h1").await; // while the command hangs
    wait_not_fenced(&rack, "took longer than 1s and was killed").await;
    let _returned = Obedient::start(&rack, "h0", "boot 2").await;
    rack.wait_for("h0 to be up again", async |rack| h0(rack).await.state() == HostState::Up).await;
    rack.wait_for("the slice of h0 to be free", async |rack| {
        rack.slices().await[0].state() == wire::SliceState::Free
    })
    .await;
}

#[tokio::test]
async fn without_a_command_a_host_keeps_its_slices_until_its_agent_shows_that_nothing_is_left() {
    let rack = rack("").await;
    drop(host_with_slice(&rack, "h0").await);
    wait_not_fenced(&rack, "rack.toml has no [fence] command").await;
    let _same = Obedient::start(&rack, "h0", "boot 1").await;
    rack.wait_for("h0 to be up again", async |rack| h0(rack).await.state() == HostState::Up).await;
    rack.wait_all_free().await;
}
