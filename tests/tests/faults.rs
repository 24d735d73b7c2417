//! Tests that the audit of `tarn replay` detects faults of devices: ignored revocations, old data
//! and lost grants.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    fs,
    process::{Child, Command, Stdio},
};

use proto::v1 as wire;
use rustix::process::Signal;
use tests::rack::{Plan, Rack, programs_dir, reserve_request, send_signal, vm_ref, wait_for_line};

/// Injects a fault into an emulated EMC.
fn inject_fault(rack: &Rack, emc: usize, fault: &str) {
    fs::write(rack.emc_dir(emc).join("fault"), fault).unwrap();
}

/// Starts a replay of a trace with these rows.
fn start_replay(rack: &Rack, rows: &str) -> Child {
    let trace = rack.dir().join("trace.csv");
    fs::write(&trace, format!("vm_id,arrive_s,depart_s,cores,mem_gb\n{rows}")).unwrap();
    let mut command = Command::new(programs_dir().join("tarn"));
    let out = fs::File::create(rack.dir().join("report.json")).unwrap();
    command
        .args(["replay", "-o", "json", "--endpoint", &rack.endpoint(), "--log"])
        .arg(rack.dir().join("replay.log"));
    command.arg(trace).stdin(Stdio::null()).stdout(out).stderr(Stdio::null()).spawn().unwrap()
}

/// Waits for the end of a replay and returns one count of its audit. The replay must fail if and
/// only if an audit count is not 0.
fn wait_for_audit_count(rack: &Rack, mut replay: Child, name: &str) -> u64 {
    let status = replay.wait().unwrap();
    let text = fs::read_to_string(rack.dir().join("report.json")).unwrap();
    let report: serde_json::Value =
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("not a report: {text:?}"));
    let counts = &report["audit"];
    let all = ["double_owned", "granted_dirty", "acknowledged_lost"].map(|name| counts[name].as_u64());
    assert_eq!(status.success(), all.iter().flatten().sum::<u64>() == 0, "{report}");
    counts[name].as_u64().unwrap_or_else(|| panic!("{name} was not audited: {report}"))
}

/// Returns trace rows of VMs that run one after another. Each VM has 3 GiB of memory.
fn sequential_vm_rows(from: u64, vms: u64) -> String {
    (0..vms).map(|n| format!("{},{},{},1,3\n", from + n, 10 * n + 1, 10 * n + 9)).collect()
}

fn plan_with_little_memory(slices: u32) -> Plan {
    Plan { local_mib: 512, ..Plan::small(slices) }
}

#[tokio::test]
async fn audit_of_healthy_rack_is_clean() {
    let rack = Rack::start(plan_with_little_memory(4)).await;
    let replay = start_replay(&rack, &sequential_vm_rows(0, 20));
    assert_eq!(wait_for_audit_count(&rack, replay, "granted_dirty"), 0);
}

#[tokio::test]
async fn audit_detects_data_kept_by_device() {
    let rack = Rack::start(plan_with_little_memory(4)).await;
    (0..2).for_each(|emc| inject_fault(&rack, emc, "keep-bytes"));
    let replay = start_replay(&rack, &sequential_vm_rows(0, 20));
    assert!(wait_for_audit_count(&rack, replay, "granted_dirty") > 0);
}

#[tokio::test]
async fn audit_detects_slice_reachable_by_two_hosts() {
    let rack =
        Rack::start(Plan { lease_ttl_s: 0.5, fence_after_s: Some(0.5), ..plan_with_little_memory(4) }).await;
    let mut scheduler = rack.scheduler().await;
    scheduler
        .reserve(wire::ReserveRequest { wait_ready: true, ..reserve_request("h0", "old", 4, "r1") })
        .await
        .unwrap();
    let mut old = rack.start_vm(0, "old");
    wait_for_line(&mut old);
    scheduler.commit(wire::CommitRequest { target: vm_ref("old") }).await.unwrap();
    (0..2).for_each(|emc| inject_fault(&rack, emc, "ignore-revoke"));
    rack.signal_agent(0, Signal::STOP);
    rack.wait_all_slices_free().await; // the manager relies on the faulty reply of the device
    let replay = start_replay(&rack, &sequential_vm_rows(0, 20));
    let count = wait_for_audit_count(&rack, replay, "double_owned");
    rack.signal_agent(0, Signal::CONT);
    old.kill().unwrap();
    old.wait().unwrap();
    assert!(count > 0);
}

#[tokio::test]
async fn audit_detects_reservation_lost_by_device() {
    let mut rack = Rack::start(plan_with_little_memory(4)).await;
    // The fault loses the grants of the lowest slices of an EMC. The first VM does not depart and
    // has these slices.
    let replay = start_replay(&rack, &format!("0,0,,1,3\n{}", sequential_vm_rows(1, 30)));
    rack.wait_for("the VM that stays", async |rack| {
        let stays = |r: &wire::Reservation| r.vm.starts_with("vm2.");
        rack.reservations().await.iter().any(|r| stays(r) && r.state() == wire::ReservationState::Committed)
    })
    .await;
    // The replay is stopped until the device has lost the grants.
    send_signal(&replay, Signal::STOP);
    rack.kill_manager();
    (0..2).for_each(|emc| inject_fault(&rack, emc, "forget-grant"));
    rack.start_manager().await;
    send_signal(&replay, Signal::CONT);
    assert!(wait_for_audit_count(&rack, replay, "acknowledged_lost") > 0);
}

/// Waits until an alarm with this reason is raised.
async fn wait_for_alarm(rack: &Rack, reason: &str) {
    rack.wait_for(reason, async |rack| {
        let response = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
        response.alarms.iter().any(|alarm| alarm.reason == reason)
    })
    .await;
}

#[tokio::test]
async fn failed_grant_quarantines_only_its_slice_until_repaired() {
    let rack = Rack::start(Plan::small(2)).await;
    // A directory with the name of a grant file makes the first grant to h0 fail.
    let blocked = [0, 1].map(|emc| rack.emc_dir(emc).join("slices/00000.1.h0"));
    blocked.iter().for_each(|path| fs::create_dir(path).unwrap());
    let mut scheduler = rack.scheduler().await;
    scheduler.reserve(reserve_request("h0", "hit", 1, "r1")).await.unwrap();
    wait_for_alarm(&rack, "SLICE_FAILING").await;
    let other = wire::ReserveRequest { wait_ready: true, ..reserve_request("h1", "other", 3, "r2") };
    scheduler.reserve(other).await.unwrap();
    wait_for_alarm(&rack, "SLICE_QUARANTINED").await;
    let hit = rack.reservations().await.into_iter().find(|reservation| reservation.vm == "hit").unwrap();
    assert_eq!(hit.state(), wire::ReservationState::Broken, "{hit:?}");

    let quarantined = |slice: &&wire::Slice| slice.state() == wire::SliceState::Quarantined;
    let slice = rack.slices().await.iter().find(quarantined).unwrap().slice.to_string();
    blocked.iter().for_each(|path| fs::remove_dir(path).unwrap());
    for vm in ["hit", "other"] {
        let release = wire::ReleaseRequest { target: vm_ref(vm), ..Default::default() };
        scheduler.release(release).await.unwrap();
    }
    let uncordoned = rack.tarn(&["uncordon", "slice", &slice]);
    assert!(uncordoned.status.success(), "{uncordoned:?}");
    rack.wait_all_slices_free().await;
}
