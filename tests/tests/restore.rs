//! Tests of restoring the store of the manager from a backup while guests run. Each running guest
//! must keep its memory, even if the backup does not contain the VM or a device is down. Uses real
//! processes.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Child,
};

use proto::v1 as wire;
use tests::rack::{Plan, Rack, reserve_request, vm_ref, wait_for_line};
use tonic::Code;

/// Local memory of each VM, in bytes.
const LOCAL_BYTES: u64 = 64 << 20;

async fn reserve_and_commit(rack: &Rack, vm: &str, host: &str, slices: u64, request: &str) {
    let reserve = wire::ReserveRequest {
        wait_ready: true,
        local_bytes: LOCAL_BYTES,
        ..reserve_request(host, vm, slices, request)
    };
    rack.scheduler().await.reserve(reserve).await.unwrap();
    rack.scheduler().await.commit(wire::CommitRequest { target: vm_ref(vm) }).await.unwrap();
}

async fn start_guest(rack: &Rack, vm: &'static str, host: usize, slices: u64, request: &str) -> Child {
    reserve_and_commit(rack, vm, &format!("h{host}"), slices, request).await;
    let mut guest = rack.start_vm(host, vm);
    wait_for_line(&mut guest);
    guest
}

/// Ends a guest. The guest checks that its memory is unchanged.
fn end_guest(mut guest: Child) {
    drop(guest.stdin.take());
    assert!(guest.wait().unwrap().success(), "the memory of the guest changed");
}

/// Stops the manager and backs up its store. Returns the path of the backup.
fn back_up(rack: &mut Rack) -> PathBuf {
    rack.stop_manager();
    let backup = rack.dir().join("copy");
    let (ok, output) = rack.run_pool_manager(&["backup", "--to", backup.to_str().unwrap()]);
    assert!(ok, "{output}");
    backup
}

fn restore(rack: &Rack, backup: &Path) {
    let (ok, output) = rack.run_pool_manager(&["restore", "--from", backup.to_str().unwrap(), "--force"]);
    assert!(ok, "{output}");
}

async fn count_slices(rack: &Rack, state: wire::SliceState) -> usize {
    rack.slices().await.iter().filter(|slice| slice.state() == state).count()
}

async fn count_slices_of(rack: &Rack, vm: &str) -> usize {
    rack.slices().await.iter().filter(|slice| slice.vm.as_deref() == Some(vm)).count()
}

/// Returns the messages of all RESTORE_PENDING alarms.
async fn pending_messages(rack: &Rack) -> Vec<String> {
    let rack = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
    let alarms = rack.alarms.into_iter().filter(|alarm| alarm.reason == "RESTORE_PENDING");
    alarms.map(|alarm| alarm.message).collect()
}

async fn wait_for_end_of_restore(rack: &Rack) {
    rack.wait_for("the restore to end", async |rack| pending_messages(rack).await.is_empty()).await;
}

#[tokio::test]
async fn restored_store_frees_nothing_before_all_hosts_reported() {
    let mut rack = Rack::start(Plan::small(3)).await;
    reserve_and_commit(&rack, "before", "h0", 1, "r1").await;
    let backup = back_up(&mut rack);

    // After the backup, one VM starts and one VM ends. The backup is thus wrong about both VMs.
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    let running = start_guest(&rack, "after", 1, 2, "r2").await;
    let release = wire::ReleaseRequest { target: vm_ref("before"), ..Default::default() };
    rack.scheduler().await.release(release).await.unwrap();
    rack.wait_for("the slice to be free", async |rack| count_slices(rack, wire::SliceState::Free).await == 4)
        .await;
    let before = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
    rack.stop_manager();

    let (ok, output) = rack.run_pool_manager(&["restore", "--from", backup.to_str().unwrap()]);
    assert!(!ok && output.contains("--force"), "{output}");
    restore(&rack, &backup);
    rack.kill_agent(0);
    rack.start_manager().await;
    rack.wait_for("the report of one host", async |rack| {
        rack.hosts().await[1].state() == wire::HostState::Up
    })
    .await;
    let after = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
    assert!(after.generation > before.generation, "the restore must raise the generation");
    let free = count_slices(&rack, wire::SliceState::Free).await;
    assert_eq!(free, 0, "no slice must be free before all hosts have reported");

    rack.start_agent(0);
    rack.wait_for("unclaimed slices to be free", async |rack| {
        count_slices(rack, wire::SliceState::Free).await == 4
    })
    .await;
    assert_eq!(count_slices_of(&rack, "after").await, 2, "a running VM must keep its memory");
    end_guest(running);
}

/// Makes an emulated EMC unavailable to its driver. Existing mappings remain valid.
fn disable_emc(emc: &Path) {
    fs::rename(emc, emc.with_extension("away")).unwrap();
    fs::write(emc, "not a directory").unwrap();
}

fn enable_emc(emc: &Path) {
    fs::remove_file(emc).unwrap();
    fs::rename(emc.with_extension("away"), emc).unwrap();
}

/// VM "both" has slices of both EMCs. VM "one" has a slice only of the EMC that is down. The backup
/// contains neither VM.
#[tokio::test]
async fn guests_keep_memory_if_store_is_restored_while_emc_is_down() {
    let mut rack = Rack::start(Plan::small(2)).await;
    let backup = back_up(&mut rack);
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    let both = start_guest(&rack, "both", 0, 3, "r1").await;
    let one = start_guest(&rack, "one", 1, 1, "r2").await;
    let slices = rack.slices().await;
    let down = slices.iter().find(|slice| slice.vm.as_deref() == Some("one")).unwrap();
    let down = usize::from(down.emc == "emc1");
    rack.stop_manager();

    disable_emc(&rack.emc_dir(down));
    restore(&rack, &backup);
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    rack.wait_for("both hosts to wait only for the EMC", async |rack| {
        let messages = pending_messages(rack).await;
        messages.len() == 2 && messages.iter().all(|message| message.contains("has not been compared"))
    })
    .await;
    assert_eq!(
        count_slices(&rack, wire::SliceState::Free).await,
        0,
        "no slice must be free before both EMCs are compared"
    );
    let request = reserve_request("h1", "new", 1, "r3");
    let status = rack.scheduler().await.reserve(request.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "the host has not reported: {status:?}");

    enable_emc(&rack.emc_dir(down));
    rack.wait_for("both VMs to be adopted", async |rack| {
        count_slices_of(rack, "both").await == 3 && count_slices_of(rack, "one").await == 1
    })
    .await;
    wait_for_end_of_restore(&rack).await;
    assert_eq!(count_slices(&rack, wire::SliceState::Online).await, 4, "{:?}", rack.slices().await);
    let hosts = rack.hosts().await;
    let local = hosts.iter().map(|host| host.local_bytes - host.free_local_bytes);
    assert_eq!(local.collect::<Vec<_>>(), [LOCAL_BYTES; 2], "the local memory of adopted VMs must be in use");
    let full = rack.scheduler().await.reserve(request).await.unwrap_err();
    assert_eq!(full.code(), Code::ResourceExhausted, "{full:?}");
    end_guest(both);
    end_guest(one);
    rack.wait_all_slices_free().await;
}

/// A released VM still runs when a VM with the same name starts on another host. The backup is
/// older than both events.
#[tokio::test]
async fn guests_with_same_vm_name_keep_memory_after_restore() {
    let mut rack = Rack::start(Plan::small(2)).await;
    let old = start_guest(&rack, "vm", 0, 1, "r1").await;
    let backup = back_up(&mut rack);
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    let release = wire::ReleaseRequest { target: vm_ref("vm"), ..Default::default() };
    rack.scheduler().await.release(release).await.unwrap();
    let new = start_guest(&rack, "vm", 1, 2, "r2").await;
    rack.stop_manager();

    restore(&rack, &backup);
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    rack.wait_for("the reports of both hosts", async |rack| {
        count_slices(rack, wire::SliceState::Quarantined).await == 0
            && count_slices(rack, wire::SliceState::Free).await == 1
    })
    .await;
    wait_for_end_of_restore(&rack).await;
    assert_eq!(count_slices(&rack, wire::SliceState::Free).await, 1, "{:?}", rack.slices().await);
    end_guest(old);
    end_guest(new);
}

/// An EMC was added after the backup. After the restore, the id of this EMC must not be assigned
/// again.
#[tokio::test]
async fn rack_additions_are_rejected_until_restore_completes() {
    let mut rack = Rack::start(Plan::small(2)).await;
    let backup = back_up(&mut rack);
    let old = rack.rack_toml();
    let emc2 = rack.dir().join("emc2");
    let with_emc2 =
        format!("{old}[[emc]]\nname = \"emc2\"\nslices = 3\ndriver = \"emulated\"\npath = {emc2:?}\n");
    rack.write_rack_toml(&with_emc2);
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    rack.stop_manager();

    restore(&rack, &backup);
    let (ok, output) = rack.run_pool_manager(&["serve"]);
    assert!(!ok && output.contains("emc emc2 is not in the restored ledger"), "{output}");
    rack.write_rack_toml(&old);
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    rack.wait_for("the slices of the backup to be free", async |rack| {
        count_slices(rack, wire::SliceState::Free).await == 4
    })
    .await;
    rack.write_rack_toml(&with_emc2);
    rack.signal_manager(rustix::process::Signal::HUP);
    rack.wait_for("the new EMC", async |rack| count_slices(rack, wire::SliceState::Free).await == 7).await;
}
