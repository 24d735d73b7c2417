//! An audit that cannot fail proves nothing: with a device that ignores a revocation, keeps old
//! data or forgets a grant, `tarn replay` must report it.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

use std::{
    fs,
    process::{Child, Command, Stdio},
};

use proto::v1 as wire;
use rustix::process::Signal;
use tests::rack::{Plan, Rack, by_vm, programs, reserve, signal, wait_for_line};

/// From now on an EMC lies in this way.
fn breaks(rack: &Rack, emc: usize, fault: &str) {
    fs::write(rack.emc_dir(emc).join("fault"), fault).unwrap();
}

/// A replay of VMs that need slices, running.
fn replay(rack: &Rack, rows: &str) -> Child {
    let trace = rack.dir().join("trace.csv");
    fs::write(&trace, format!("vm_id,arrive_s,depart_s,cores,mem_gb\n{rows}")).unwrap();
    let mut run = Command::new(programs().join("tarn"));
    let out = fs::File::create(rack.dir().join("report.json")).unwrap();
    run.args(["replay", "-o", "json", "--endpoint", &rack.endpoint(), "--log"])
        .arg(rack.dir().join("replay.log"));
    run.arg(trace).stdin(Stdio::null()).stdout(out).stderr(Stdio::null()).spawn().unwrap()
}

/// One number of the replay's audit; it also must have ended with a failure exactly if any is not 0.
fn audit(rack: &Rack, mut replay: Child, number: &str) -> u64 {
    let status = replay.wait().unwrap();
    let text = fs::read_to_string(rack.dir().join("report.json")).unwrap();
    let report: serde_json::Value =
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("not a report: {text:?}"));
    let audit = &report["audit"];
    let all = ["double_owned", "granted_dirty", "acknowledged_lost"].map(|number| audit[number].as_u64());
    assert_eq!(status.success(), all.iter().flatten().sum::<u64>() == 0, "{report}");
    audit[number].as_u64().unwrap_or_else(|| panic!("{number} was not audited: {report}"))
}

/// So many VMs that come and go one after the other, each with three slices.
fn churn(from: u64, vms: u64) -> String {
    (0..vms).map(|n| format!("{},{},{},1,3\n", from + n, 10 * n + 1, 10 * n + 9)).collect()
}

fn poor_in_memory(slices: u32) -> Plan {
    Plan { local_mib: 512, ..Plan::small(slices) }
}

#[tokio::test]
async fn the_audit_of_a_sound_rack_is_clean() {
    let rack = Rack::start(poor_in_memory(4)).await;
    let run = replay(&rack, &churn(0, 20));
    assert_eq!(audit(&rack, run, "granted_dirty"), 0);
}

#[tokio::test]
async fn bytes_that_a_device_keeps_are_found() {
    let rack = Rack::start(poor_in_memory(4)).await;
    (0..2).for_each(|emc| breaks(&rack, emc, "keep-bytes"));
    let run = replay(&rack, &churn(0, 20));
    assert!(audit(&rack, run, "granted_dirty") > 0);
}

#[tokio::test]
async fn a_slice_that_two_hosts_reach_is_found() {
    let rack = Rack::start(Plan { lease_ttl_s: 0.5, fence_after_s: Some(0.5), ..poor_in_memory(4) }).await;
    let mut scheduler = rack.scheduler().await;
    scheduler
        .reserve(wire::ReserveRequest { wait_ready: true, ..reserve("h0", "old", 4, "r1") })
        .await
        .unwrap();
    let mut old = rack.start_vm(0, "old");
    wait_for_line(&mut old);
    scheduler.commit(wire::CommitRequest { target: by_vm("old") }).await.unwrap();
    (0..2).for_each(|emc| breaks(&rack, emc, "ignore-revoke"));
    rack.signal_agent(0, Signal::STOP);
    rack.wait_all_free().await; // the ledger believes the device, as it must
    let run = replay(&rack, &churn(0, 20));
    let found = audit(&rack, run, "double_owned");
    rack.signal_agent(0, Signal::CONT);
    old.kill().unwrap();
    old.wait().unwrap();
    assert!(found > 0);
}

#[tokio::test]
async fn a_reservation_that_a_device_forgot_is_found() {
    let mut rack = Rack::start(poor_in_memory(4)).await;
    // The first VM stays, so its slices are the lowest of its EMC, which the fault forgets.
    let run = replay(&rack, &format!("0,0,,1,3\n{}", churn(1, 30)));
    rack.wait_for("the VM that stays", async |rack| {
        let stays = |r: &wire::Reservation| r.vm.starts_with("vm2.");
        rack.reservations().await.iter().any(|r| stays(r) && r.state() == wire::ReservationState::Committed)
    })
    .await;
    // The load must last until the device has forgotten.
    signal(&run, Signal::STOP);
    rack.kill_manager();
    (0..2).for_each(|emc| breaks(&rack, emc, "forget-grant"));
    rack.start_manager().await;
    signal(&run, Signal::CONT);
    assert!(audit(&rack, run, "acknowledged_lost") > 0);
}

/// Waits for an alarm.
async fn alarm(rack: &Rack, reason: &str) {
    rack.wait_for(reason, async |rack| {
        let seen = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
        seen.alarms.iter().any(|alarm| alarm.reason == reason)
    })
    .await;
}

#[tokio::test]
async fn slice_that_its_device_cannot_grant_fails_alone_and_returns_when_mended() {
    let rack = Rack::start(Plan::small(2)).await;
    // Directories where the first grants of each EMC to h0 are to be files.
    let blocked = [0, 1].map(|emc| rack.emc_dir(emc).join("slices/00000.1.h0"));
    blocked.iter().for_each(|path| fs::create_dir(path).unwrap());
    let mut scheduler = rack.scheduler().await;
    scheduler.reserve(reserve("h0", "hit", 1, "r1")).await.unwrap();
    alarm(&rack, "SLICE_FAILING").await;
    let other = wire::ReserveRequest { wait_ready: true, ..reserve("h1", "other", 3, "r2") };
    scheduler.reserve(other).await.unwrap();
    alarm(&rack, "SLICE_QUARANTINED").await;
    let hit = rack.reservations().await.into_iter().find(|reservation| reservation.vm == "hit").unwrap();
    assert_eq!(hit.state(), wire::ReservationState::Broken, "{hit:?}");

    let quarantined = |slice: &&wire::Slice| slice.state() == wire::SliceState::Quarantined;
    let slice = rack.slices().await.iter().find(quarantined).unwrap().slice.to_string();
    blocked.iter().for_each(|path| fs::remove_dir(path).unwrap());
    for vm in ["hit", "other"] {
        let release = wire::ReleaseRequest { target: by_vm(vm), ..Default::default() };
        scheduler.release(release).await.unwrap();
    }
    let uncordoned = rack.tarn(&["uncordon", "slice", &slice]);
    assert!(uncordoned.status.success(), "{uncordoned:?}");
    rack.wait_all_free().await;
}
