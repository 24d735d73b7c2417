//! Restoring the manager's store from a backup while guests run: each running guest keeps its memory, also if the backup
//! does not contain it, and while devices are down. Against real processes.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Child,
    time::Duration,
};

use proto::v1 as wire;
use tests::rack::{Plan, Rack, by_vm, reserve, wait_for_line};
use tonic::Code;

/// Many rounds of the manager's upkeep, and more than a lease.
const A_WHILE: Duration = Duration::from_secs(5);

async fn reserved(rack: &Rack, vm: &str, host: &str, slices: u64, request: &str) {
    let ask = wire::ReserveRequest { wait_ready: true, ..reserve(host, vm, slices, request) };
    rack.scheduler().await.reserve(ask).await.unwrap();
    rack.scheduler().await.commit(wire::CommitRequest { target: by_vm(vm) }).await.unwrap();
}

async fn started(rack: &Rack, vm: &'static str, host: usize, slices: u64, request: &str) -> Child {
    reserved(rack, vm, &format!("h{host}"), slices, request).await;
    let mut guest = rack.start_vm(host, vm);
    wait_for_line(&mut guest);
    guest
}

/// Ends a guest, which finds its memory as it wrote it.
fn ended(mut guest: Child) {
    drop(guest.stdin.take());
    assert!(guest.wait().unwrap().success(), "its memory changed");
}

/// Stops the manager and copies its store.
fn backed_up(rack: &mut Rack) -> PathBuf {
    rack.stop_manager();
    let copy = rack.dir().join("copy");
    let (ok, said) = rack.pool_manager(&["backup", "--to", copy.to_str().unwrap()]);
    assert!(ok, "{said}");
    copy
}

fn restored(rack: &Rack, copy: &Path) {
    let (ok, said) = rack.pool_manager(&["restore", "--from", copy.to_str().unwrap(), "--force"]);
    assert!(ok, "{said}");
}

async fn count(rack: &Rack, state: wire::SliceState) -> usize {
    rack.slices().await.iter().filter(|slice| slice.state() == state).count()
}

async fn slices_of(rack: &Rack, vm: &str) -> usize {
    rack.slices().await.iter().filter(|slice| slice.vm.as_deref() == Some(vm)).count()
}

async fn alarms(rack: &Rack) -> Vec<String> {
    let rack = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
    rack.alarms.into_iter().map(|alarm| alarm.reason).collect()
}

#[tokio::test]
async fn a_restored_store_believes_nothing_until_the_hosts_have_reported() {
    let mut rack = Rack::start(Plan::small(3)).await;
    let vm = |name: &'static str, host: &'static str, slices| wire::ReserveRequest {
        wait_ready: true,
        ..reserve(host, name, slices, name)
    };
    rack.scheduler().await.reserve(vm("before", "h0", 1)).await.unwrap();
    rack.stop_manager();
    let copy = rack.dir().join("copy");
    let (ok, said) = rack.pool_manager(&["backup", "--to", copy.to_str().unwrap()]);
    assert!(ok, "{said}");

    // A VM that the backup has never heard of, and one that ends after it was made.
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    rack.scheduler().await.reserve(vm("after", "h1", 2)).await.unwrap();
    let mut running = rack.start_vm(1, "after");
    wait_for_line(&mut running);
    rack.scheduler()
        .await
        .release(wire::ReleaseRequest { target: by_vm("before"), ..Default::default() })
        .await
        .unwrap();
    rack.wait_for("the slice to be free", async |rack| {
        rack.slices().await.iter().filter(|s| s.state() == wire::SliceState::Free).count() == 4
    })
    .await;
    let orders = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
    rack.stop_manager();

    let (ok, said) = rack.pool_manager(&["restore", "--from", copy.to_str().unwrap()]);
    assert!(!ok && said.contains("--force"), "{said}");
    let (ok, said) = rack.pool_manager(&["restore", "--from", copy.to_str().unwrap(), "--force"]);
    assert!(ok, "{said}");
    rack.kill_agent(0);
    rack.start_manager().await;
    rack.wait_for("the report of one host", async |rack| {
        rack.hosts().await[1].state() == wire::HostState::Up
    })
    .await;
    let restored = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
    assert!(restored.generation > orders.generation, "orders of the forgotten future must stay older");
    let free =
        |slices: Vec<wire::Slice>| slices.iter().filter(|s| s.state() == wire::SliceState::Free).count();
    assert_eq!(free(rack.slices().await), 0, "a host has not reported, so nothing is known to be free");

    rack.start_agent(0);
    rack.wait_for("what nobody claims to be free", async |rack| free(rack.slices().await) == 4).await;
    let kept = rack.slices().await.iter().filter(|s| s.vm.as_deref() == Some("after")).count();
    assert_eq!(kept, 2, "a VM that was running keeps its memory");
    drop(running.stdin.take());
    assert!(running.wait().unwrap().success(), "and nobody wrote into it");
}

/// The driver of an emulated EMC cannot open it any more; mappings of processes stay.
fn take_away(emc: &Path) {
    fs::rename(emc, emc.with_extension("away")).unwrap();
    fs::write(emc, "not a directory").unwrap();
}

fn bring_back(emc: &Path) {
    fs::remove_file(emc).unwrap();
    fs::rename(emc.with_extension("away"), emc).unwrap();
}

/// One VM has slices of both EMCs, another only of the one that is down; the backup knows neither.
#[tokio::test]
async fn guests_keep_their_memory_when_a_store_is_restored_while_an_emc_is_down() {
    let mut rack = Rack::start(Plan::small(2)).await;
    let copy = backed_up(&mut rack);
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    let both = started(&rack, "both", 0, 3, "r1").await;
    let one = started(&rack, "one", 1, 1, "r2").await;
    let slices = rack.slices().await;
    let down = slices.iter().find(|slice| slice.vm.as_deref() == Some("one")).unwrap();
    let down = usize::from(down.emc == "emc1");
    rack.stop_manager();

    take_away(&rack.emc_dir(down));
    restored(&rack, &copy);
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    rack.wait_for("the alarm of the restore", async |rack| {
        alarms(rack).await.contains(&"RESTORE_PENDING".to_owned())
    })
    .await;
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(count(&rack, wire::SliceState::Free).await, 0, "an EMC has not been compared");
    let taken = reserve("h1", "new", 1, "r3");
    let refused = rack.scheduler().await.reserve(taken.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "the host has not reported: {refused:?}");

    bring_back(&rack.emc_dir(down));
    rack.wait_for("both VMs to be adopted", async |rack| {
        slices_of(rack, "both").await == 3 && slices_of(rack, "one").await == 1
    })
    .await;
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(count(&rack, wire::SliceState::Online).await, 4, "{:?}", rack.slices().await);
    assert!(!alarms(&rack).await.contains(&"RESTORE_PENDING".to_owned()));
    rack.scheduler().await.reserve(taken).await.unwrap_err();
    ended(both);
    ended(one);
    rack.wait_all_free().await;
}

/// A VM was released and its guest still runs when a VM of the same name starts on another host; the backup is older.
#[tokio::test]
async fn both_guests_of_one_vm_name_keep_their_memory_after_a_restore() {
    let mut rack = Rack::start(Plan::small(2)).await;
    let old = started(&rack, "vm", 0, 1, "r1").await;
    let copy = backed_up(&mut rack);
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    let release = wire::ReleaseRequest { target: by_vm("vm"), ..Default::default() };
    rack.scheduler().await.release(release).await.unwrap();
    let new = started(&rack, "vm", 1, 2, "r2").await;
    rack.stop_manager();

    restored(&rack, &copy);
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    rack.wait_for("the reports of both hosts", async |rack| {
        count(rack, wire::SliceState::Quarantined).await == 0
            && count(rack, wire::SliceState::Free).await == 1
    })
    .await;
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(count(&rack, wire::SliceState::Free).await, 1, "{:?}", rack.slices().await);
    ended(old);
    ended(new);
}

/// The backup is older than an EMC and a host: their numbers might be given to others.
#[tokio::test]
async fn rack_that_grew_since_its_backup_starts_with_the_rack_toml_of_the_backup_first() {
    let mut rack = Rack::start(Plan::small(2)).await;
    let copy = backed_up(&mut rack);
    let old = rack.rack_toml();
    let emc2 = rack.dir().join("emc2");
    let grown =
        format!("{old}[[emc]]\nname = \"emc2\"\nslices = 3\ndriver = \"emulated\"\npath = {emc2:?}\n");
    rack.write_rack_toml(&grown);
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    rack.stop_manager();

    restored(&rack, &copy);
    let (ok, said) = rack.pool_manager(&["serve"]);
    assert!(!ok && said.contains("emc emc2 is not in the restored ledger"), "{said}");
    rack.write_rack_toml(&old);
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    rack.wait_for("the slices of the backup to be free", async |rack| {
        count(rack, wire::SliceState::Free).await == 4
    })
    .await;
    rack.write_rack_toml(&grown);
    rack.signal_manager(rustix::process::Signal::HUP);
    rack.wait_for("the new EMC", async |rack| count(rack, wire::SliceState::Free).await == 7).await;
}
