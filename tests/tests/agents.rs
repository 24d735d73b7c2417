//! Tests of agents that send false reports, are killed, are stopped or return, and of VMs that
//! continue without their agent. Uses real processes.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::process::Child;

use proto::v1::{self as wire, from_agent::Message as Up, to_agent::Message as Down};
use rustix::process::Signal;
use tests::{
    rack::{Plan, Rack, reserve_request, vm_ref},
    scripted_agent::{Session, hello_message, read_token},
};
use tonic::{Code, Status};

/// Session in which a test sends messages that a real agent never sends.
struct RawAgent(Session);

async fn connect(rack: &Rack, token: &str, hello: wire::Hello) -> Result<RawAgent, Status> {
    Session::connect(rack, token, hello).await.map(RawAgent)
}

impl RawAgent {
    async fn report_online(&mut self, slice: u32, epoch: u64) -> Status {
        let observed = wire::ObservedState {
            instance: u64::MAX,
            online: vec![wire::SliceEpoch { slice, epoch }],
            ..Default::default()
        };
        self.0.outgoing.send(wire::FromAgent { message: Some(Up::Observed(observed)) }).await.unwrap();
        loop {
            match self.0.incoming.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("the session ended without a reason"),
                Err(status) => return status,
            }
        }
    }
}

#[tokio::test]
async fn agent_without_token_of_its_host_is_rejected() {
    let mut rack = Rack::new(Plan::small(4));
    rack.start_manager().await;
    let h1 = read_token(&rack, "h1");
    for (token, host) in [("", "h0"), ("guess", "h0"), (h1.as_str(), "h0")] {
        let status =
            connect(&rack, token, hello_message(host)).await.err().expect("an invalid session was accepted");
        assert_eq!(status.code(), Code::PermissionDenied, "{status:?}");
        assert!(status.message().contains("h0"), "{status:?}");
    }
    let status_of_other = connect(&rack, &h1, hello_message("h9")).await.err().unwrap();
    assert_eq!(status_of_other.code(), Code::PermissionDenied, "{status_of_other:?}");
    let old = wire::Hello { protocol_version: 99, ..hello_message("h1") };
    let status = connect(&rack, &h1, old).await.err().unwrap();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("protocol_version: 99"), "{status:?}");
    let foreign = wire::Hello { rack_uuid: "another".into(), ..hello_message("h1") };
    let status = connect(&rack, &h1, foreign).await.err().unwrap();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    let mut valid = connect(&rack, &h1, hello_message("h1")).await.unwrap();
    assert!(matches!(valid.0.incoming.message().await.unwrap().unwrap().message, Some(Down::Welcome(_))));
}

#[tokio::test]
async fn agent_that_reports_slices_of_other_hosts_is_disconnected() {
    let mut rack = Rack::new(Plan { hosts: vec![vec![0], vec![0, 1]], ..Plan::small(4) });
    rack.start_manager().await;
    rack.start_agent(1);
    rack.wait_hosts_up().await;
    let request = reserve_request("h1", "v", 1, "r1");
    let ready = wire::ReserveRequest { wait_ready: true, ..request };
    let slice_of_other = rack.scheduler().await.reserve(ready).await.unwrap().into_inner().slices[0];
    let before = rack.slices().await;
    let token = read_token(&rack, "h0");
    let unreachable = 7;
    for (slice, epoch) in [(0, 7), (slice_of_other, 1), (slice_of_other, 0), (unreachable, 1), (999, 1)] {
        let mut agent = connect(&rack, &token, hello_message("h0")).await.unwrap();
        let status = agent.report_online(slice, epoch).await;
        assert_eq!(status.code(), Code::PermissionDenied, "slice {slice} epoch {epoch}: {status:?}");
        assert!(status.message().contains(&format!("slice {slice} epoch {epoch}")), "{status:?}");
    }
    assert_eq!(rack.slices().await, before, "a false report changed the ledger");
}

/// Reserves slices for a VM, starts its test VMM and commits the reservation.
async fn start_running_vm(rack: &Rack, host: usize, vm: &str, slices: u64) -> Child {
    let request = reserve_request(&format!("h{host}"), vm, slices, &format!("r-{vm}"));
    let mut scheduler = rack.scheduler().await;
    scheduler.reserve(wire::ReserveRequest { wait_ready: true, ..request }).await.unwrap();
    let mut child = rack.start_vm(host, vm);
    assert_eq!(read_dirty_slices(&mut child), "[]", "a slice was not zeroed");
    scheduler.commit(wire::CommitRequest { target: vm_ref(vm) }).await.unwrap();
    child
}

/// Waits until the test VMM has checked its slices and written its pattern. Returns the list of
/// slices that were not zeroed, as JSON.
fn read_dirty_slices(child: &mut Child) -> String {
    use std::io::{BufRead, BufReader};
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.as_mut().unwrap());
    stdout.read_line(&mut line).unwrap();
    let report: serde_json::Value =
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("not JSON: {line:?}"));
    report["dirty"].to_string()
}

/// Ends a test VMM, which checks its memory again. Returns whether the memory is unchanged.
fn vm_ends_with_intact_memory(mut child: Child) -> bool {
    drop(child.stdin.take());
    child.wait().unwrap().success()
}

#[tokio::test]
async fn vm_outlives_agent_and_manager() {
    let mut rack = Rack::start(Plan::small(4)).await;
    let vm = start_running_vm(&rack, 0, "v", 3).await;
    rack.kill_agent(0);
    rack.kill_manager();
    rack.start_manager().await;
    rack.start_agent(0);
    rack.wait_hosts_up().await;
    let slices = rack.slices().await;
    let online =
        slices.iter().filter(|s| s.vm.as_deref() == Some("v") && s.state() == wire::SliceState::Online);
    assert_eq!(online.count(), 3, "{slices:?}");
    assert!(vm_ends_with_intact_memory(vm), "the memory of the VM was changed by another process");
    rack.wait_all_slices_free().await; // the slices are released because the VM process has ended
}

#[tokio::test]
async fn memory_of_dead_vm_process_is_freed() {
    let rack = Rack::start(Plan::small(4)).await;
    let mut vm = start_running_vm(&rack, 0, "v", 2).await;
    vm.kill().unwrap();
    vm.wait().unwrap();
    rack.wait_all_slices_free().await;
    assert!(rack.reservations().await.is_empty());
}

#[tokio::test]
async fn running_vm_keeps_memory_until_end_or_forced_release() {
    let rack = Rack::start(Plan::small(4)).await;
    let first = start_running_vm(&rack, 0, "first", 1).await;
    let release = |vm, force| wire::ReleaseRequest { target: vm_ref(vm), force, reason: "test".into() };
    rack.scheduler().await.release(release("first", false)).await.unwrap();
    let draining = |slices: Vec<wire::Slice>| slices.iter().any(|s| s.state() == wire::SliceState::Draining);
    assert!(draining(rack.slices().await), "the slice must be draining until the VM ends");
    assert!(vm_ends_with_intact_memory(first));
    rack.wait_all_slices_free().await;

    let mut second = start_running_vm(&rack, 0, "second", 1).await;
    rack.scheduler().await.release(release("second", true)).await.unwrap();
    rack.wait_all_slices_free().await;
    drop(second.stdin.take());
    assert!(!second.wait().unwrap().success(), "the VM still has revoked memory");
}

/// Runs a `tarn` command and returns its output. The command must succeed.
fn tarn(rack: &Rack, command: &str) -> String {
    let output = rack.tarn(&command.split(' ').collect::<Vec<_>>());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Regression test: cores and local memory of a released VM were free immediately, while the
/// process of the VM still used them.
#[tokio::test]
async fn released_vm_uses_cores_and_memory_until_process_ends() {
    let mut rack = Rack::start(Plan::small(4)).await;
    let whole = rack.hosts().await.remove(0);
    let request = wire::ReserveRequest {
        wait_ready: true,
        cores: whole.cores,
        local_bytes: 1 << 30,
        ..reserve_request("h0", "v", 1, "r-v")
    };
    let mut scheduler = rack.scheduler().await;
    scheduler.reserve(request).await.unwrap();
    let mut vm = rack.start_vm(0, "v");
    assert_eq!(read_dirty_slices(&mut vm), "[]");
    let is_running = async |rack: &Rack| rack.reservations().await.iter().any(|r| r.process_running);
    rack.wait_for("the process of the VM", is_running).await;

    let released = rack.tarn(&["release", "v"]);
    let warning = String::from_utf8(released.stderr).unwrap();
    assert!(warning.contains("warning: the process of VM v still runs on host h0"), "{warning}");
    let assert_in_use = async |rack: &Rack| {
        let host = rack.hosts().await.remove(0);
        assert_eq!(host.free_cores, 0);
        assert_eq!(host.free_local_bytes, host.local_bytes - (1 << 30));
    };
    assert_in_use(&rack).await;
    let next = wire::ReserveRequest { cores: 1, ..reserve_request("h0", "w", 1, "r-w") };
    let status = rack.scheduler().await.reserve(next.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert!(tarn(&rack, "get reservations").contains("released, running"));
    assert!(tarn(&rack, "describe vm v").contains("running"));
    assert!(tarn(&rack, "explain vm v").contains("its process still runs"));

    rack.kill_agent(0);
    rack.kill_manager();
    rack.start_manager().await;
    assert_in_use(&rack).await; // before the first report of the agent
    rack.start_agent(0);
    rack.wait_hosts_up().await;
    assert_in_use(&rack).await;

    assert!(vm_ends_with_intact_memory(vm));
    rack.wait_for("free cores", async |rack| rack.hosts().await[0].free_cores == whole.cores).await;
    assert_eq!(rack.hosts().await[0].free_local_bytes, whole.local_bytes);
    rack.scheduler().await.reserve(next).await.unwrap();
}

#[tokio::test]
async fn dead_host_is_fenced_and_its_slices_are_scrubbed() {
    let mut rack = Rack::start(Plan { lease_ttl_s: 0.5, fence_after_s: Some(0.5), ..Plan::small(2) }).await;
    let mut lost = start_running_vm(&rack, 0, "lost", 2).await;
    rack.kill_agent(0);
    rack.wait_all_slices_free().await;
    let hosts = rack.hosts().await;
    assert_eq!(hosts[0].state(), wire::HostState::Fenced);
    for vm in ["a", "b"] {
        let vm = start_running_vm(&rack, 1, vm, 2).await;
        assert!(vm_ends_with_intact_memory(vm));
    }
    drop(lost.stdin.take());
    assert!(!lost.wait().unwrap().success(), "the VM of a fenced host still has its memory");
    rack.start_agent(0);
    rack.wait_hosts_up().await; // the host is up after its agent has reported that it has no slices
}

async fn alarm_reasons(rack: &Rack) -> Vec<String> {
    let response = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
    response.alarms.into_iter().map(|alarm| alarm.reason).collect()
}

/// Regression test: a second agent with a copy of the token started on the same machine.
#[tokio::test]
async fn second_agent_on_same_machine_does_not_start() {
    let rack = Rack::start(Plan::small(2)).await;
    let mut second = rack.start_second_agent(0, false);
    assert_eq!(second.wait().unwrap().code(), Some(1));
    let log = rack.read_log("h0-second");
    assert!(log.contains("another host-agent runs as host h0 on this machine"), "{log}");
}

/// Regression test: a second agent with a copy of the token replaced the connected agent. The first
/// agent was then rejected, and a VM that was released meanwhile no longer counted as running.
#[tokio::test]
async fn second_agent_does_not_replace_the_connected_agent() {
    let rack = Rack::start(Plan { lease_ttl_s: 1.0, fence_after_s: Some(2.0), ..Plan::small(2) }).await;
    let vm = start_running_vm(&rack, 0, "v", 2).await;
    let second = rack.start_second_agent(0, true);
    rack.wait_for("a contested host", async |rack| alarm_reasons(rack).await == ["HOST_CONTESTED"]).await;
    tarn(&rack, "release v");
    assert!(tarn(&rack, "get reservations").contains("released, running"));
    assert_eq!(rack.hosts().await[0].state(), wire::HostState::Up);
    assert_eq!(alarm_reasons(&rack).await, ["HOST_CONTESTED"], "the host keeps its agent");
    second.kill();
    rack.wait_for("no alarm", async |rack| alarm_reasons(rack).await.is_empty()).await;
    let log = rack.read_log("manager");
    assert!(log.contains("another agent represents host h0") && !log.contains("fence"), "{log}");
    let log = rack.read_log("h0-second");
    assert!(log.contains("another agent represents this host"), "{log}");
    assert!(!log.contains("connected to the manager"), "a rejected agent is not connected: {log}");
    assert!(vm_ends_with_intact_memory(vm), "the VM must keep its memory");
}

#[tokio::test]
async fn silent_host_keeps_slices_without_fencing() {
    let rack = Rack::start(Plan { lease_ttl_s: 0.5, ..Plan::small(2) }).await;
    let vm = start_running_vm(&rack, 0, "v", 2).await;
    rack.signal_agent(0, Signal::STOP);
    rack.wait_for("the host to be unknown", async |rack| {
        rack.hosts().await[0].state() == wire::HostState::Unknown
    })
    .await;
    let owned = rack.slices().await.iter().filter(|s| s.host.as_deref() == Some("h0")).count();
    assert_eq!(owned, 2, "a silent host must keep its slices");
    let second_request =
        rack.scheduler().await.reserve(reserve_request("h0", "w", 1, "r2")).await.unwrap_err();
    assert!(second_request.message().contains("unknown"), "{second_request:?}");
    let rack_view = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
    assert!(rack_view.alarms.iter().any(|a| a.reason == "HOST_UNKNOWN"), "{:?}", rack_view.alarms);
    rack.signal_agent(0, Signal::CONT);
    rack.wait_hosts_up().await;
    assert!(vm_ends_with_intact_memory(vm), "the VM must keep its memory");
}
