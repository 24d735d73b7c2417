//! Agents that are not what they claim, die, stop or return; and VMs that outlive them. Against
//! real processes.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

use std::process::Child;

use proto::v1::{self as wire, from_agent::Message as Up, to_agent::Message as Down};
use rustix::process::Signal;
use tests::{
    rack::{Plan, Rack, by_vm, reserve},
    scripted_agent::{Session, hello, token},
};
use tonic::{Code, Status};

/// A scripted agent, for messages that a real one never sends.
struct Impostor(Session);

async fn connect(rack: &Rack, token: &str, hello: wire::Hello) -> Result<Impostor, Status> {
    Session::connect(rack, token, hello).await.map(Impostor)
}

impl Impostor {
    async fn claims(&mut self, slice: u32, epoch: u64) -> Status {
        let have = wire::ObservedState {
            instance: u64::MAX,
            online: vec![wire::SliceEpoch { slice, epoch }],
            ..Default::default()
        };
        self.0.says.send(wire::FromAgent { message: Some(Up::Observed(have)) }).await.unwrap();
        loop {
            match self.0.hears.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("the session ended without a reason"),
                Err(status) => return status,
            }
        }
    }
}

#[tokio::test]
async fn an_agent_without_its_hosts_token_is_not_let_in() {
    let mut rack = Rack::new(Plan::small(4));
    rack.start_manager().await;
    let h1 = token(&rack, "h1");
    for (token, host) in [("", "h0"), ("guess", "h0"), (h1.as_str(), "h0")] {
        let status = connect(&rack, token, hello(host)).await.err().expect("an impostor was let in");
        assert_eq!(status.code(), Code::PermissionDenied, "{status:?}");
        assert!(status.message().contains("h0"), "{status:?}");
    }
    let stranger = connect(&rack, &h1, hello("h9")).await.err().unwrap();
    assert_eq!(stranger.code(), Code::PermissionDenied, "{stranger:?}");
    let old = wire::Hello { protocol_version: 99, ..hello("h1") };
    let status = connect(&rack, &h1, old).await.err().unwrap();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("protocol_version: 99"), "{status:?}");
    let foreign = wire::Hello { rack_uuid: "another".into(), ..hello("h1") };
    let status = connect(&rack, &h1, foreign).await.err().unwrap();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    let mut right = connect(&rack, &h1, hello("h1")).await.unwrap();
    assert!(matches!(right.0.hears.message().await.unwrap().unwrap().message, Some(Down::Welcome(_))));
}

#[tokio::test]
async fn an_agent_that_claims_what_it_was_never_given_is_cut_off() {
    let mut rack = Rack::new(Plan { hosts: vec![vec![0], vec![0, 1]], ..Plan::small(4) });
    rack.start_manager().await;
    rack.start_agent(1);
    rack.wait_hosts_up().await;
    let mine = reserve("h1", "v", 1, "r1");
    let ready = wire::ReserveRequest { wait_ready: true, ..mine };
    let others = rack.scheduler().await.reserve(ready).await.unwrap().into_inner().slices[0];
    let before = rack.slices().await;
    let token = token(&rack, "h0");
    let not_wired = 7;
    for (slice, epoch) in [(0, 7), (others, 1), (others, 0), (not_wired, 1), (999, 1)] {
        let mut impostor = connect(&rack, &token, hello("h0")).await.unwrap();
        let status = impostor.claims(slice, epoch).await;
        assert_eq!(status.code(), Code::PermissionDenied, "slice {slice} epoch {epoch}: {status:?}");
        assert!(status.message().contains(&format!("slice {slice} epoch {epoch}")), "{status:?}");
    }
    assert_eq!(rack.slices().await, before, "a lie changed the ledger");
}

/// Reserves slices for a VM, starts its stand-in and commits.
async fn running_vm(rack: &Rack, host: usize, vm: &str, slices: u64) -> Child {
    let request = reserve(&format!("h{host}"), vm, slices, &format!("r-{vm}"));
    let mut scheduler = rack.scheduler().await;
    scheduler.reserve(wire::ReserveRequest { wait_ready: true, ..request }).await.unwrap();
    let mut child = rack.start_vm(host, vm);
    assert_eq!(dirty(&mut child), "[]", "a slice did not arrive as zeros");
    scheduler.commit(wire::CommitRequest { target: by_vm(vm) }).await.unwrap();
    child
}

/// Returns the stand-in's findings of slices that were not zeroed; waits until it has written its
/// own pattern.
fn dirty(child: &mut Child) -> String {
    use std::io::{BufRead, BufReader};
    let mut line = String::new();
    let mut said = BufReader::new(child.stdout.as_mut().unwrap());
    said.read_line(&mut line).unwrap();
    let said: serde_json::Value =
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("not JSON: {line:?}"));
    said["dirty"].to_string()
}

/// Ends a stand-in in good order: it looks once more whether its memory is as it left it.
fn ends_well(mut child: Child) -> bool {
    drop(child.stdin.take());
    child.wait().unwrap().success()
}

#[tokio::test]
async fn a_vm_outlives_its_agent_and_its_manager() {
    let mut rack = Rack::start(Plan::small(4)).await;
    let vm = running_vm(&rack, 0, "v", 3).await;
    rack.kill_agent(0);
    rack.kill_manager();
    rack.start_manager().await;
    rack.start_agent(0);
    rack.wait_hosts_up().await;
    let slices = rack.slices().await;
    let online =
        slices.iter().filter(|s| s.vm.as_deref() == Some("v") && s.state() == wire::SliceState::Online);
    assert_eq!(online.count(), 3, "{slices:?}");
    assert!(ends_well(vm), "the VM's memory was touched by somebody else");
    rack.wait_all_free().await; // its process is gone, so its memory comes back
}

#[tokio::test]
async fn a_vm_whose_process_dies_gives_its_memory_back() {
    let rack = Rack::start(Plan::small(4)).await;
    let mut vm = running_vm(&rack, 0, "v", 2).await;
    vm.kill().unwrap();
    vm.wait().unwrap();
    rack.wait_all_free().await;
    assert!(rack.reservations().await.is_empty());
}

#[tokio::test]
async fn a_running_vm_keeps_its_memory_until_it_ends_unless_forced() {
    let rack = Rack::start(Plan::small(4)).await;
    let first = running_vm(&rack, 0, "first", 1).await;
    let release = |vm, force| wire::ReleaseRequest { target: by_vm(vm), force, reason: "test".into() };
    rack.scheduler().await.release(release("first", false)).await.unwrap();
    let draining = |slices: Vec<wire::Slice>| slices.iter().any(|s| s.state() == wire::SliceState::Draining);
    assert!(draining(rack.slices().await), "it waits for the VM to end");
    assert!(ends_well(first));
    rack.wait_all_free().await;

    let mut second = running_vm(&rack, 0, "second", 1).await;
    rack.scheduler().await.release(release("second", true)).await.unwrap();
    rack.wait_all_free().await;
    drop(second.stdin.take());
    assert!(!second.wait().unwrap().success(), "memory that was taken away is not there any more");
}

#[tokio::test]
async fn a_host_that_dies_is_fenced_and_its_slices_reach_others_as_zeros() {
    let mut rack = Rack::start(Plan { lease_ttl_s: 0.5, fence_after_s: Some(0.5), ..Plan::small(2) }).await;
    let mut lost = running_vm(&rack, 0, "lost", 2).await;
    rack.kill_agent(0);
    rack.wait_all_free().await;
    let hosts = rack.hosts().await;
    assert_eq!(hosts[0].state(), wire::HostState::Fenced);
    for vm in ["a", "b"] {
        let vm = running_vm(&rack, 1, vm, 2).await;
        assert!(ends_well(vm));
    }
    drop(lost.stdin.take());
    assert!(!lost.wait().unwrap().success(), "a fenced host's VM has lost its memory");
    rack.start_agent(0);
    rack.wait_hosts_up().await; // with nothing left it has proved itself clean
}

async fn alarms(rack: &Rack) -> Vec<String> {
    let seen = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
    seen.alarms.into_iter().map(|alarm| alarm.reason).collect()
}

#[tokio::test]
async fn second_agent_on_a_machine_with_the_hosts_token_does_not_start() {
    let rack = Rack::start(Plan::small(2)).await;
    let mut second = rack.start_second_agent(0, &rack.token_file(0));
    assert_eq!(second.wait().unwrap().code(), Some(1));
    let logged = rack.logged("h0-second");
    assert!(logged.contains("another host-agent runs as host h0 on this machine"), "{logged}");
}

/// A second agent ran for a moment with a copy of the token. The first was sent away for ever, its host was fenced, and its VM
/// lost its memory.
#[tokio::test]
async fn second_agent_that_ends_leaves_the_host_and_its_vm_to_the_first() {
    let rack = Rack::start(Plan { lease_ttl_s: 1.0, fence_after_s: Some(2.0), ..Plan::small(2) }).await;
    let vm = running_vm(&rack, 0, "v", 2).await;
    let copy = rack.dir().join("copy.token");
    std::fs::copy(rack.token_file(0), &copy).unwrap();
    let mut second = rack.start_second_agent(0, &copy);
    rack.wait_for("a contested host", async |rack| alarms(rack).await == ["HOST_CONTESTED"]).await;
    second.kill().unwrap();
    second.wait().unwrap();
    rack.wait_for("the host to be silent", async |rack| rack.hosts().await[0].state() != wire::HostState::Up)
        .await;
    rack.wait_hosts_up().await;
    assert!(alarms(&rack).await.is_empty());
    assert!(!rack.logged("manager").contains("fence"), "{}", rack.logged("manager"));
    assert!(ends_well(vm), "the VM never noticed");
}

#[tokio::test]
async fn a_silent_host_keeps_its_slices_while_nobody_fences_it() {
    let rack = Rack::start(Plan { lease_ttl_s: 0.5, ..Plan::small(2) }).await;
    let vm = running_vm(&rack, 0, "v", 2).await;
    rack.signal_agent(0, Signal::STOP);
    rack.wait_for("the host to be unknown", async |rack| {
        rack.hosts().await[0].state() == wire::HostState::Unknown
    })
    .await;
    let owned = rack.slices().await.iter().filter(|s| s.host.as_deref() == Some("h0")).count();
    assert_eq!(owned, 2, "silence frees nothing");
    let more = rack.scheduler().await.reserve(reserve("h0", "w", 1, "r2")).await.unwrap_err();
    assert!(more.message().contains("unknown"), "{more:?}");
    let rack_view = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
    assert!(rack_view.alarms.iter().any(|a| a.reason == "HOST_UNKNOWN"), "{:?}", rack_view.alarms);
    rack.signal_agent(0, Signal::CONT);
    rack.wait_hosts_up().await;
    assert!(ends_well(vm), "the VM never noticed");
}
