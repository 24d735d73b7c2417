//! Tests of `tarn replay`: placement like a best-fit scheduler, restarts of the manager, and
//! reports of violated guarantees.
#![allow(missing_docs, clippy::unwrap_used, reason = "test crate")]

mod agent;
mod rack;

use std::{fs, path::Path, process::Stdio};

use rack::{Fault, Rack, is_active};
use serde_json::Value;
use tokio::process::Command;

/// Exit code, JSON report and stderr of a replay.
#[derive(Debug)]
struct ReplayOutput {
    code: i32,
    report: Value,
    stderr: String,
}

/// Replays a trace on a rack. The rows have the columns `vm_id,arrive_s,depart_s,cores,mem_gb`.
async fn replay(rack: &Rack, rows: &str, options: &[&str]) -> ReplayOutput {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.csv");
    fs::write(&trace, format!("vm_id,arrive_s,depart_s,cores,mem_gb\n{rows}")).unwrap();
    tarn(rack, trace.to_str().unwrap(), options).await
}

async fn tarn(rack: &Rack, trace: &str, options: &[&str]) -> ReplayOutput {
    let endpoint = rack.serve().await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_tarn"));
    command.env_clear().stdin(Stdio::null()).args(["--endpoint", &endpoint, "-o", "json", "replay", trace]);
    let output = command.args(options).output().await.unwrap();
    ReplayOutput {
        code: output.status.code().expect("not killed"),
        report: serde_json::from_slice(&output.stdout).unwrap_or_default(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

impl ReplayOutput {
    fn number(&self, pointer: &str) -> i64 {
        let number = self.report.pointer(pointer).and_then(Value::as_i64);
        number.unwrap_or_else(|| panic!("no number {pointer} in {self:?}"))
    }

    /// Returns the numbers of requested, placed, rejected and lost VMs.
    fn vms(&self) -> [i64; 4] {
        ["/vms/requested", "/vms/placed", "/vms/rejected", "/vms/lost"].map(|number| self.number(number))
    }
}

/// Returns a rack of two hosts, each with 4 cores and 4 GiB, and four slices.
fn small_rack() -> Rack {
    Rack::new(4, 4, 4)
}

#[tokio::test]
async fn vms_are_placed_by_best_fit() {
    // VMs a and b fill one host, c fills the other host with two slices, and d is rejected because
    // no cores are free. VM e is placed after the departure of a and b.
    let rows = "a,0,10,2,2\nb,0,10,2,2\nc,1,,4,6\nd,2,20,1,1\ne,10,,4,6\n";
    let output = replay(&small_rack(), rows, &["--settle", "0"]).await;
    assert_eq!((output.code, output.vms()), (0, [5, 4, 1, 0]), "{output:?}");
    assert_eq!(output.number("/slices/capacity"), 4);
    assert_eq!(output.number("/slices/peak_in_use"), 4);
    assert_eq!(output.number("/audit/acknowledged_lost"), 0);
    assert!(output.report.pointer("/reserve_ms/p99").unwrap().is_f64());
}

#[tokio::test]
async fn audit_values_without_a_check_are_null_with_a_reason() {
    let output = replay(&small_rack(), "a,0,10,2,6\n", &[]).await;
    assert!(output.report.pointer("/audit/double_owned").unwrap().is_null());
    assert!(output.report.pointer("/audit/granted_dirty").unwrap().is_null());
    for message in ["double_owned is unknown", "granted_dirty is unknown", "not on this machine"] {
        assert!(output.stderr.contains(message), "{message}: {output:?}");
    }
}

#[tokio::test]
async fn replay_releases_all_vms_at_the_end() {
    let rack = small_rack();
    let output = replay(&rack, "a,0,,2,6\nb,,,1,1\nc,0,5,1,1\n", &[]).await;
    assert_eq!((output.code, output.vms()), (0, [3, 3, 0, 0]));
    assert!(rack.state().reservations.values().all(|r| !is_active(r)));
    assert_eq!(rack.state().reservations.len(), 3);
}

#[tokio::test]
async fn slices_granted_to_another_host_count_as_moved() {
    // VM v fills one host and uses all slices, x fills the other host. After the departure of v, y
    // fills the host of v. After the departure of x, w gets all slices on the host of x.
    let rows = "v,0,10,4,8\nx,0,20,4,4\ny,11,,4,4\nw,21,,4,8\n";
    let output = replay(&small_rack(), rows, &[]).await;
    assert_eq!((output.vms(), output.number("/slices/moved_between_hosts")), ([4, 4, 0, 0], 4), "{output:?}");
}

#[tokio::test]
async fn vm_waits_for_draining_slices_unless_settle_time_is_zero() {
    let rows = "a,0,10,4,8\nb,11,,4,8\n";
    let with_wait = replay(&small_rack(), rows, &[]).await;
    assert_eq!(with_wait.vms(), [2, 2, 0, 0], "{with_wait:?}");
    let without_wait = replay(&small_rack(), rows, &["--settle", "0"]).await;
    assert_eq!(without_wait.vms(), [2, 1, 1, 0], "{without_wait:?}");
}

#[tokio::test]
async fn calls_interrupted_by_a_restart_are_executed_once() {
    let rows: String = (0..40).map(|n| format!("v{n},{n},{},1,2\n", n + 6)).collect();
    let uninterrupted = replay(&small_rack(), &rows, &[]).await;
    for after in [1, 7, 20, 33] {
        let rack = small_rack().with_fault(Fault::Unavailable, after);
        let output = replay(&rack, &rows, &["--max-clients", "4"]).await;
        assert_eq!(
            (output.code, output.vms()),
            (0, uninterrupted.vms()),
            "unavailable after {after} calls: {output:?}"
        );
        assert_eq!(output.number("/audit/acknowledged_lost"), 0, "{output:?}");
        assert_eq!(rack.state().fault, Fault::None, "the fault was not injected");
        assert_eq!(rack.state().reservations.len(), 40, "each of the 40 VMs is reserved once");
    }
}

#[tokio::test]
async fn reservation_lost_by_restart_is_reported_as_lost() {
    let rows: String = (0..8).map(|n| format!("v{n},{n},,1,1\n")).collect();
    let output =
        replay(&small_rack().with_fault(Fault::LosesReservation, 5), &rows, &["--max-clients", "1"]).await;
    assert_eq!((output.code, output.number("/audit/acknowledged_lost")), (1, 1), "{output:?}");
    assert!(output.stderr.contains("violations of guarantees were found"), "{output:?}");
}

#[tokio::test]
async fn vm_rejected_by_best_host_is_placed_on_next_best() {
    let rack = small_rack().with_fault(Fault::HostRejects, 0);
    let output = replay(&rack, "a,0,,2,2\nb,0,,2,2\nc,0,,1,1\n", &[]).await;
    assert_eq!(output.vms(), [3, 2, 1, 0], "{output:?}");
    assert!(rack.state().reservations.values().all(|r| r.host == "b"));
}

#[tokio::test]
async fn malformed_row_prevents_replay_unless_lenient() {
    let (rack, rows) = (small_rack(), "a,0,,1,1\nb,0,,none,1\nc,0,,1,1\n");
    let strict = replay(&rack, rows, &[]).await;
    assert_eq!(strict.code, 1);
    assert!(strict.stderr.contains("line 3: cores = \\\"none\\\": must be"), "{strict:?}");
    assert!(rack.state().reservations.is_empty());
    let lenient = replay(&rack, rows, &["--lenient"]).await;
    assert_eq!((lenient.code, lenient.vms()), (0, [2, 2, 0, 0]), "{lenient:?}");
    assert!(lenient.stderr.contains("1 malformed rows skipped; first: line 3"), "{lenient:?}");
}

#[tokio::test]
async fn generated_vms_need_no_trace() {
    let output = tarn(&small_rack(), "generated:50", &["--seed", "3", "--limit", "40"]).await;
    let [requested, placed, rejected, lost] = output.vms();
    assert_eq!((output.code, requested, placed + rejected, lost), (0, 40, 40, 0), "{output:?}");
    assert!(placed > 0);
}

#[tokio::test]
async fn report_and_replies_are_written_to_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let options = ["--json", &path("report"), "--log", &path("log")];
    let output = replay(&small_rack(), "a,0,5,2,6\n", &options).await;
    let written: Value = serde_json::from_str(&fs::read_to_string(path("report")).unwrap()).unwrap();
    assert_eq!(written, output.report);
    let log = fs::read_to_string(path("log")).unwrap();
    let actions = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["action"].clone());
    assert_eq!(actions.collect::<Vec<_>>(), ["reserve", "ready", "commit", "release"]);
}

#[tokio::test]
async fn manager_address_is_read_from_rack_toml() {
    let (rack, folder) = (small_rack(), tempfile::tempdir().unwrap());
    let endpoint = rack.serve().await;
    let file = folder.path().join("rack.toml");
    let listen = endpoint.strip_prefix("http://").unwrap();
    fs::write(&file, format!("[manager]\nlisten = \"{listen}\"\nstore = \"x\"\n")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tarn"));
    command.env_clear().args(["replay", "generated:3", "--rack"]).arg(&file);
    let output = command.output().await.unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("VMS PLACED:"));
}

/// Replays a trace on a rack whose agent and EMC are on this machine, so that slices are checked.
async fn replay_on_this_machine(rows: &str, fault: agent::Fault) -> ReplayOutput {
    let folder = tempfile::tempdir().unwrap();
    let (emc, socket) = (folder.path().join("emc"), folder.path().join("socket"));
    fs::create_dir(&emc).unwrap();
    let rack = small_rack().with_local_device(&emc, &socket);
    agent::serve(&socket, &emc, rack.clone(), fault);
    // The process that has this file open counts as the manager of the EMC.
    let _lock = fs::File::create(emc.join("lock")).unwrap();
    let output = replay(&rack, rows, &[]).await;
    assert!(!is_mapped_by_a_process(&emc), "a test VMM still runs after the replay");
    output
}

/// Returns whether another process maps a file of the EMC.
fn is_mapped_by_a_process(emc: &Path) -> bool {
    let own = std::process::id().to_string();
    let processes = fs::read_dir("/proc").unwrap().flatten().filter(|entry| *entry.file_name() != *own);
    let maps = processes.filter_map(|entry| fs::read_to_string(entry.path().join("maps")).ok());
    let path = emc.to_str().unwrap();
    maps.into_iter().any(|maps| maps.contains(path))
}

#[tokio::test]
async fn test_vmms_read_all_slices_before_use() {
    let output = replay_on_this_machine("a,0,10,4,8\nb,0,,2,4\n", agent::Fault::None).await;
    assert_eq!((output.code, output.vms()), (0, [2, 2, 0, 0]), "{output:?}");
    assert_eq!(output.number("/audit/slices_read"), 4);
    assert_eq!((output.number("/audit/granted_dirty"), output.number("/audit/double_owned")), (0, 0));
}

#[tokio::test]
async fn unscrubbed_slice_is_reported_as_granted_dirty() {
    let output = replay_on_this_machine("a,0,10,4,8\n", agent::Fault::Dirty).await;
    assert_eq!((output.code, output.number("/audit/granted_dirty")), (1, 4), "{output:?}");
}

#[tokio::test]
async fn access_through_superseded_grant_is_reported_as_double_owned() {
    let output = replay_on_this_machine("a,0,,4,6\n", agent::Fault::Stale).await;
    assert_eq!((output.code, output.number("/audit/double_owned")), (1, 2), "{output:?}");
}

#[tokio::test]
async fn vm_rejected_by_agent_counts_as_rejected_with_a_reason() {
    let output = replay_on_this_machine("a,0,,4,6\n", agent::Fault::Rejects).await;
    assert_eq!(output.vms(), [1, 0, 1, 0], "{output:?}");
    assert!(output.stderr.contains("not yet (VM_NOT_READY)"), "{output:?}");
}
