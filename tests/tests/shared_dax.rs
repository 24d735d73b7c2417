//! Tests of a device that several hosts share. The device cannot fence a host. A host must keep its
//! slices until the host releases the slices or is powered off. The manager and the fence command
//! are real; the agents of the hosts are scripted.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use proto::v1::{self as wire, HostState};
use tests::{
    rack::{Plan, Rack, reserve_request, vm_ref},
    scripted_agent::{DEVICE_SERIAL, DEVICE_SLICES, ScriptedAgent},
};

/// Starts a rack of two hosts that share one device. A silent host is fenced after about two
/// seconds.
async fn start_rack(fence: &str) -> Rack {
    let plan = Plan {
        emcs: vec![4],
        hosts: vec![vec![0], vec![0]],
        lease_ttl_s: 1.0,
        fence_after_s: Some(1.0),
        rack_toml_extra: fence.to_owned(),
        ..Plan::small(DEVICE_SLICES)
    };
    let mut rack = Rack::new(plan);
    let shared = format!("driver = \"shared-dax\"\nserial = {DEVICE_SERIAL:?}");
    rack.write_rack_toml(&rack.rack_toml().replace("driver = \"emulated\"", &shared));
    rack.start_manager().await;
    wait_emc_up(&rack).await;
    rack
}

/// Waits until the device is up. The manager has then compared the record of the device with the
/// ledger.
async fn wait_emc_up(rack: &Rack) {
    rack.wait_for("the device to be up", async |rack| {
        let emcs = rack.admin().await.list_emcs(wire::ListEmcsRequest {}).await.unwrap().into_inner().emcs;
        emcs[0].state() == wire::EmcState::Up
    })
    .await;
}

/// Starts the agent of a host and reserves a slice for a VM on this host.
async fn connect_host_with_slice(rack: &Rack, host: &str) -> ScriptedAgent {
    let agent = ScriptedAgent::start(rack, host, "boot 1").await;
    reserve_until_ready(rack, host).await;
    agent
}

async fn reserve_until_ready(rack: &Rack, host: &str) {
    let vm = format!("vm-of-{host}");
    let request = wire::ReserveRequest { wait_ready: true, ..reserve_request(host, &vm, 1, &vm) };
    rack.scheduler().await.reserve(request).await.unwrap();
    rack.scheduler().await.commit(wire::CommitRequest { target: vm_ref(&vm) }).await.unwrap();
}

async fn get_h0(rack: &Rack) -> wire::Host {
    rack.hosts().await.into_iter().find(|host| host.host == "h0").unwrap()
}

async fn wait_for_fence_failure(rack: &Rack, reason: &str) {
    rack.wait_for("an attempt to fence h0", async |rack| get_h0(rack).await.fence_error.is_some()).await;
    let host = get_h0(rack).await;
    assert_eq!((host.state(), host.slices), (HostState::Fencing, 1));
    assert!(host.fence_error().contains(reason), "{host:?}");
    let slices = rack.slices().await;
    assert_eq!(slices[0].host.as_deref(), Some("h0"), "{slices:?}");
    assert_eq!(
        slices[0].reason(),
        "access of the host is being revoked; the host may still access the slice"
    );
}

fn tarn_output(rack: &Rack, args: &[&str]) -> String {
    String::from_utf8(rack.tarn(args).stdout).unwrap()
}

#[tokio::test]
async fn silent_host_is_fenced_by_command_and_slices_are_reused() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("stopped");
    let script = format!("[fence]\ncommand = [\"sh\", \"-c\", \"echo {{host}} >> {}\"]", list.display());
    let mut rack = start_rack(&script).await;
    let other = ScriptedAgent::start(&rack, "h1", "boot 1").await;
    let agent = connect_host_with_slice(&rack, "h0").await;
    assert_eq!(agent.handles(), ["cxl:0x1a:0".to_owned()].into());
    drop((agent, other));
    rack.kill_manager(); // the grant must survive a restart of the manager
    rack.start_manager().await;
    let _other = ScriptedAgent::start(&rack, "h1", "boot 1").await;
    rack.wait_all_slices_free().await;
    assert_eq!(std::fs::read_to_string(list).unwrap(), "h0\n");
    rack.wait_for("h0 to be fenced", async |rack| get_h0(rack).await.state() == HostState::Fenced).await;
    let slices = rack.slices().await;
    assert_eq!(slices[0].receipt.as_ref().unwrap().scrubber, "h1", "{slices:?}");
}

#[tokio::test]
async fn unfenced_host_keeps_slices_until_operator_confirms_power_off() {
    let rack = start_rack("[fence]\ncommand = [\"false\", \"{host}\"]").await;
    let _other = ScriptedAgent::start(&rack, "h1", "boot 1").await;
    drop(connect_host_with_slice(&rack, "h0").await);
    wait_for_fence_failure(&rack, "`false h0` ended with exit status: 1").await;
    reserve_until_ready(&rack, "h1").await;
    let doctor = tarn_output(&rack, &["doctor"]);
    assert!(doctor.contains("tarn fence h0 --confirm-powered-off"), "{doctor}");
    let alarms = tarn_output(&rack, &["get", "alarms"]);
    assert!(alarms.contains("HOST_NOT_FENCED"), "{alarms}");
    assert!(rack.tarn(&["fence", "h0", "--confirm-powered-off"]).status.success());
    rack.wait_for("h0 to be fenced", async |rack| get_h0(rack).await.state() == HostState::Fenced).await;
    rack.wait_for("the slice of h0 to be free", async |rack| {
        rack.slices().await[0].state() == wire::SliceState::Free
    })
    .await;
}

#[tokio::test]
async fn slices_of_rebooted_host_are_freed_after_fence_timeout() {
    let rack =
        start_rack("[fence]\ncommand = [\"sh\", \"-c\", \"sleep 600; true {host}\"]\nwithin_s = 1").await;
    let _other = ScriptedAgent::start(&rack, "h1", "boot 1").await;
    drop(connect_host_with_slice(&rack, "h0").await);
    rack.wait_for("h0 to be fencing", async |rack| get_h0(rack).await.state() == HostState::Fencing).await;
    reserve_until_ready(&rack, "h1").await; // must succeed while the fence command hangs
    wait_for_fence_failure(&rack, "took longer than 1s and was killed").await;
    let _returned = ScriptedAgent::start(&rack, "h0", "boot 2").await;
    rack.wait_for("h0 to be up again", async |rack| get_h0(rack).await.state() == HostState::Up).await;
    rack.wait_for("the slice of h0 to be free", async |rack| {
        rack.slices().await[0].state() == wire::SliceState::Free
    })
    .await;
}

#[tokio::test]
async fn host_without_fence_command_keeps_slices_until_it_reports() {
    let rack = start_rack("").await;
    drop(connect_host_with_slice(&rack, "h0").await);
    wait_for_fence_failure(&rack, "rack.toml has no [fence] command").await;
    let _same = ScriptedAgent::start(&rack, "h0", "boot 1").await;
    rack.wait_for("h0 to be up again", async |rack| get_h0(rack).await.state() == HostState::Up).await;
    rack.wait_all_slices_free().await;
}
