//! Moves of pool memory to local memory in a rack of real processes with small guests: by hand,
//! automatically, and with processes that are killed at any time.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::time::Duration;

use proto::v1::{self as wire, RehomeState};
use rustix::process::{Pid, Signal, kill_process};
use tests::{
    pool_guest::PoolGuest,
    rack::{Plan, Rack, reserve_request, vm_ref},
    small_guests::{can_run_small_guests, count_in_large_page, sweep_pool_memory},
};
use tonic::Code;
use units::limits::VMM_RESPONSE_TIMEOUT;

const GIB: u64 = 1 << 30;

/// Delays after which a process is killed, from the start of a move.
const KILL_DELAYS_MS: [u64; 5] = [0, 5, 30, 150, 600];

async fn reservation(rack: &Rack, vm: &str) -> wire::Reservation {
    let request = wire::GetReservationRequest { target: vm_ref(vm) };
    rack.admin().await.get_reservation(request).await.unwrap().into_inner()
}

async fn rehome(rack: &Rack, vm: &str) -> Result<wire::Rehome, tonic::Status> {
    let request = wire::RehomeVmRequest { target: vm_ref(vm), cancel: false };
    let reservation = rack.scheduler().await.rehome_vm(request).await?.into_inner();
    Ok(reservation.rehome.unwrap())
}

/// Returns the state of the latest move of a VM.
async fn state(rack: &Rack, vm: &str) -> RehomeState {
    reservation(rack, vm).await.rehome.unwrap_or_default().state()
}

async fn free_local(rack: &Rack) -> u64 {
    rack.hosts().await[0].free_local_bytes
}

async fn wait_running(rack: &Rack, vm: &str) {
    rack.wait_for("the process of the VM", async |rack| reservation(rack, vm).await.process_running).await;
}

async fn wait_for_progress(rack: &Rack, guest: &PoolGuest) {
    let before = guest.console().len();
    rack.wait_for("output of the guest", async |_| guest.console().len() > before + 2).await;
    assert!(!guest.console().contains('!'), "the guest has read an unexpected value");
}

#[tokio::test]
async fn operator_moves_pool_memory_and_slices_return() {
    if !can_run_small_guests() {
        return;
    }
    let mut rack = Rack::start(Plan::small(2)).await;
    let guest = PoolGuest::start(&rack, "v", count_in_large_page()).await;
    wait_running(&rack, "v").await;
    wait_for_progress(&rack, &guest).await;
    let free = free_local(&rack).await;
    let moved = rack.tarn(&["rehome", "v", "--wait", "-o", "json"]);
    assert!(moved.status.success(), "{moved:?}");
    let printed: serde_json::Value = serde_json::from_slice(&moved.stdout).unwrap();
    assert_eq!((&printed["rehome"]["state"], &printed["pool_bytes"]), (&"done".into(), &0.into()));
    assert_eq!(printed["local_bytes"], GIB + (64 << 20));
    assert_eq!(free_local(&rack).await, free - GIB);
    rack.wait_all_slices_free().await;
    assert!(!guest.maps_slice());
    wait_for_progress(&rack, &guest).await;
    let again = rack.tarn(&["rehome", "v"]);
    let note = String::from_utf8(again.stderr).unwrap();
    assert!(again.status.success() && note.contains("vm v already uses only local memory"), "{note}");
    let explained = String::from_utf8(rack.tarn(&["explain", "vm", "v"]).stdout).unwrap();
    assert!(explained.contains("rehomed") && explained.contains("1 slice freed"), "{explained}");
    // A restarted agent still knows the VM and its memory, and a restarted manager the reservation.
    rack.kill_agent(0);
    rack.kill_manager();
    rack.start_manager().await;
    rack.start_agent(0);
    rack.wait_hosts_up().await;
    assert_eq!(
        (reservation(&rack, "v").await.local_bytes, state(&rack, "v").await),
        (GIB + (64 << 20), RehomeState::Done)
    );
    wait_for_progress(&rack, &guest).await;
    drop(guest);
    rack.wait_for("the memory to be free", async |rack| free_local(rack).await == free + (64 << 20)).await;
    rack.wait_all_slices_free().await;
}

#[tokio::test]
async fn slowed_down_guest_is_moved_automatically() {
    if !can_run_small_guests() {
        return;
    }
    let rack_toml_extra = "[qos]\nrehome = \"auto\"\n".to_owned();
    let agent_toml_extra = "sample_interval_s = 3\n".to_owned();
    let rack = Rack::start(Plan { rack_toml_extra, agent_toml_extra, ..Plan::small(2) }).await;
    let guest = PoolGuest::start(&rack, "busy", sweep_pool_memory()).await;
    let is_moved = async |rack: &Rack| {
        assert_ne!(state(rack, "busy").await, RehomeState::Failed, "{:?}", reservation(rack, "busy").await);
        state(rack, "busy").await == RehomeState::Done
    };
    rack.wait_for("the move of the guest", is_moved).await;
    rack.wait_all_slices_free().await;
    let requests = rack.admin().await.list_migrations(wire::ListMigrationsRequest::default()).await.unwrap();
    assert_eq!(requests.into_inner().migrations, [], "the request of a moved VM remains");
    wait_for_progress(&rack, &guest).await;
}

#[tokio::test]
async fn impossible_move_is_rejected_and_books_nothing() {
    let mut rack = Rack::start(Plan { local_mib: 2048, ..Plan::small(4) }).await;
    let reserve = |vm: &str, pinned| wire::ReserveRequest {
        wait_ready: true,
        pinned,
        ..reserve_request("h0", vm, 1, vm)
    };
    for (vm, pinned) in [("pinned", true), ("other-vmm", false)] {
        rack.scheduler().await.reserve(reserve(vm, pinned)).await.unwrap();
    }
    let check = async |rack: &Rack, vm: &str, code: Code, message: &str| {
        let status = rehome(rack, vm).await.unwrap_err();
        assert!(status.code() == code && status.message().contains(message), "{vm}: {status:?}");
    };
    check(&rack, "pinned", Code::FailedPrecondition, "it is pinned").await;
    check(&rack, "other-vmm", Code::FailedPrecondition, "it does not run").await;
    check(&rack, "unknown", Code::NotFound, "vm unknown").await;
    let mut vm = rack.start_vm(0, "other-vmm");
    wait_running(&rack, "other-vmm").await;
    let free = free_local(&rack).await;
    assert_eq!(rehome(&rack, "other-vmm").await.unwrap().state(), RehomeState::Copying);
    rack.wait_for("the end of the move", async |rack| state(rack, "other-vmm").await == RehomeState::Failed)
        .await;
    let failed = reservation(&rack, "other-vmm").await.rehome.unwrap();
    assert_eq!(failed.reason, "the VMM has no control socket");
    assert_eq!(free_local(&rack).await, free);
    let large =
        wire::ReserveRequest { local_bytes: 3 * GIB / 2, ..reserve_request("h0", "large", 0, "large") };
    rack.scheduler().await.reserve(large).await.unwrap();
    check(&rack, "other-vmm", Code::ResourceExhausted, "512MiB of local memory free, 1GiB needed").await;
    rack.write_rack_toml(&rack.rack_toml().replacen("[[emc]]", "[qos]\nrehome = \"never\"\n\n[[emc]]", 1));
    rack.stop_manager();
    rack.start_manager().await;
    check(&rack, "other-vmm", Code::FailedPrecondition, "qos.rehome is \"never\"").await;
    drop(vm.stdin.take());
    vm.wait().unwrap();
}

/// Waits until the latest move has ended, and checks that the reservation, the host's free memory and
/// the process agree.
async fn check_end(rack: &Rack, guest: &PoolGuest, free: u64) -> RehomeState {
    let has_ended = async |rack: &Rack| {
        rack.hosts().await[0].state() == wire::HostState::Up
            && matches!(state(rack, "v").await, RehomeState::Done | RehomeState::Failed)
    };
    rack.wait_for("the end of the move", has_ended).await;
    let state = state(rack, "v").await;
    let is_done = state == RehomeState::Done;
    assert_eq!(free_local(rack).await, free - u64::from(is_done) * GIB);
    assert_eq!(guest.maps_slice(), !is_done);
    wait_for_progress(rack, guest).await;
    state
}

#[tokio::test]
async fn move_survives_kills_of_agent_and_manager() {
    if !can_run_small_guests() {
        return;
    }
    let mut rack = Rack::start(Plan::small(2)).await;
    let mut guest = PoolGuest::start(&rack, "v", sweep_pool_memory()).await;
    wait_running(&rack, "v").await;
    let mut free = free_local(&rack).await;
    for (number, delay) in KILL_DELAYS_MS.into_iter().enumerate() {
        // An attempt soon after a failed one is rejected.
        rack.wait_for("a permitted attempt", async |rack| rehome(rack, "v").await.is_ok()).await;
        tokio::time::sleep(Duration::from_millis(delay)).await;
        rack.kill_agent(0);
        if number % 2 == 1 {
            rack.kill_manager();
            rack.start_manager().await;
        }
        rack.start_agent(0);
        if check_end(&rack, &guest, free).await == RehomeState::Done {
            rack.wait_all_slices_free().await;
            drop(guest);
            let is_ended = async |rack: &Rack| free_local(rack).await == free + (64 << 20);
            rack.wait_for("the end of the VM", is_ended).await;
            let target = vm_ref("v");
            let _ =
                rack.scheduler().await.release(wire::ReleaseRequest { target, ..Default::default() }).await;
            guest = PoolGuest::start_as(&rack, "v", &format!("v{number}"), sweep_pool_memory()).await;
            wait_running(&rack, "v").await;
            free = free_local(&rack).await;
        }
    }
}

#[tokio::test]
async fn cancelled_move_keeps_its_memory_until_the_vmm_replies() {
    if !can_run_small_guests() {
        return;
    }
    let rack = Rack::start(Plan::small(2)).await;
    let guest = PoolGuest::start(&rack, "v", sweep_pool_memory()).await;
    wait_running(&rack, "v").await;
    let free = free_local(&rack).await;
    let cancel = || rack.tarn(&["rehome", "v", "--cancel"]);
    assert!(cancel().status.success(), "no move is in progress");
    let pid = Pid::from_child(&guest.process);
    kill_process(pid, Signal::STOP).unwrap();
    assert_eq!(rehome(&rack, "v").await.unwrap().state(), RehomeState::Copying);
    assert!(cancel().status.success());
    // The agent's calls fail after some seconds. Only the VMM knows the result.
    tokio::time::sleep(VMM_RESPONSE_TIMEOUT.as_duration() + Duration::from_secs(1)).await;
    assert_eq!(state(&rack, "v").await, RehomeState::Cancelling);
    assert_eq!(free_local(&rack).await, free - GIB);
    kill_process(pid, Signal::CONT).unwrap();
    check_end(&rack, &guest, free).await;
}

#[tokio::test]
async fn end_of_the_vmm_during_a_move_frees_all_memory() {
    if !can_run_small_guests() {
        return;
    }
    let rack = Rack::start(Plan::small(2)).await;
    let free = free_local(&rack).await;
    for delay in KILL_DELAYS_MS {
        let request = format!("v{delay}");
        let guest = PoolGuest::start_as(&rack, "v", &request, sweep_pool_memory()).await;
        wait_running(&rack, "v").await;
        rehome(&rack, "v").await.unwrap();
        tokio::time::sleep(Duration::from_millis(delay)).await;
        drop(guest);
        rack.wait_for("all local memory to be free", async |rack| free_local(rack).await == free).await;
        rack.wait_all_slices_free().await;
    }
}
