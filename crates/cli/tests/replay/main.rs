//! `tarn replay`: a trace is replayed as by a best-fit scheduler, across restarts of the manager,
//! and every violated guarantee of the rack is reported.
#![allow(missing_docs, clippy::unwrap_used, reason = "this crate is a test through and through")]

mod agent;
mod rack;

use std::{fs, path::Path, process::Stdio};

use rack::{Fault, Rack, is_active};
use serde_json::Value;
use tokio::process::Command;

/// Result of a replay.
#[derive(Debug)]
struct Ran {
    code: i32,
    report: Value,
    stderr: String,
}

/// Replays rows of `vm_id,arrive_s,depart_s,cores,mem_gb` on a rack.
async fn replay(rack: &Rack, rows: &str, options: &[&str]) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.csv");
    fs::write(&trace, format!("vm_id,arrive_s,depart_s,cores,mem_gb\n{rows}")).unwrap();
    tarn(rack, trace.to_str().unwrap(), options).await
}

async fn tarn(rack: &Rack, trace: &str, options: &[&str]) -> Ran {
    let endpoint = rack.serve().await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_tarn"));
    command.env_clear().stdin(Stdio::null()).args(["--endpoint", &endpoint, "-o", "json", "replay", trace]);
    let output = command.args(options).output().await.unwrap();
    Ran {
        code: output.status.code().expect("not killed"),
        report: serde_json::from_slice(&output.stdout).unwrap_or_default(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

impl Ran {
    fn at(&self, pointer: &str) -> i64 {
        let number = self.report.pointer(pointer).and_then(Value::as_i64);
        number.unwrap_or_else(|| panic!("no number {pointer} in {self:?}"))
    }

    /// Requested, placed, rejected, lost.
    fn vms(&self) -> [i64; 4] {
        ["/vms/requested", "/vms/placed", "/vms/rejected", "/vms/lost"].map(|number| self.at(number))
    }
}

/// Two hosts of 4 cores and 4 GiB, four slices.
fn small() -> Rack {
    Rack::new(4, 4, 4)
}

#[tokio::test]
async fn a_trace_is_placed_as_a_best_fit_scheduler_would() {
    // a and b fill one host, c takes the other with two slices, d finds no cores, e comes when a and b have left.
    let rows = "a,0,10,2,2\nb,0,10,2,2\nc,1,,4,6\nd,2,20,1,1\ne,10,,4,6\n";
    let ran = replay(&small(), rows, &["--settle", "0"]).await;
    assert_eq!((ran.code, ran.vms()), (0, [5, 4, 1, 0]), "{ran:?}");
    assert_eq!(ran.at("/slices/capacity"), 4);
    assert_eq!(ran.at("/slices/peak_in_use"), 4);
    assert_eq!(ran.at("/audit/acknowledged_lost"), 0);
    assert!(ran.report.pointer("/reserve_ms/p99").unwrap().is_f64());
}

#[tokio::test]
async fn what_could_not_be_looked_at_is_null_and_said_aloud() {
    let ran = replay(&small(), "a,0,10,2,6\n", &[]).await;
    assert!(ran.report.pointer("/audit/double_owned").unwrap().is_null());
    assert!(ran.report.pointer("/audit/granted_dirty").unwrap().is_null());
    for said in ["double_owned was not found out", "granted_dirty was not found out", "not on this machine"] {
        assert!(ran.stderr.contains(said), "{said}: {ran:?}");
    }
}

#[tokio::test]
async fn a_replay_leaves_the_rack_as_it_was() {
    let rack = small();
    let ran = replay(&rack, "a,0,,2,6\nb,,,1,1\nc,0,5,1,1\n", &[]).await;
    assert_eq!((ran.code, ran.vms()), (0, [3, 3, 0, 0]));
    assert!(rack.state().reservations.values().all(|r| !is_active(r)));
    assert_eq!(rack.state().reservations.len(), 3);
}

#[tokio::test]
async fn slices_that_go_to_another_host_have_moved() {
    // x keeps one host while v has the other and all slices; then y keeps that one, and w gets the slices where x was.
    let rows = "v,0,10,4,8\nx,0,20,4,4\ny,11,,4,4\nw,21,,4,8\n";
    let ran = replay(&small(), rows, &[]).await;
    assert_eq!((ran.vms(), ran.at("/slices/moved_between_hosts")), ([4, 4, 0, 0], 4), "{ran:?}");
}

#[tokio::test]
async fn a_vm_waits_for_slices_on_their_way_back_and_only_if_it_may() {
    let rows = "a,0,10,4,8\nb,11,,4,8\n";
    let patient = replay(&small(), rows, &[]).await;
    assert_eq!(patient.vms(), [2, 2, 0, 0], "{patient:?}");
    let hasty = replay(&small(), rows, &["--settle", "0"]).await;
    assert_eq!(hasty.vms(), [2, 1, 1, 0], "{hasty:?}");
}

#[tokio::test]
async fn a_manager_that_goes_away_in_the_middle_is_asked_again_and_nothing_is_done_twice() {
    let rows: String = (0..40).map(|n| format!("v{n},{n},{},1,2\n", n + 6)).collect();
    let calm = replay(&small(), &rows, &[]).await;
    for after in [1, 7, 20, 33] {
        let rack = small().with(Fault::Away, after);
        let ran = replay(&rack, &rows, &["--max-clients", "4"]).await;
        assert_eq!((ran.code, ran.vms()), (0, calm.vms()), "away after {after} calls: {ran:?}");
        assert_eq!(ran.at("/audit/acknowledged_lost"), 0, "{ran:?}");
        assert_eq!(rack.state().fault, Fault::None, "it never went away");
        assert_eq!(rack.state().reservations.len(), 40, "done once each");
    }
}

#[tokio::test]
async fn a_reservation_that_a_restart_forgets_is_acknowledged_and_lost() {
    let rows: String = (0..8).map(|n| format!("v{n},{n},,1,1\n")).collect();
    let ran = replay(&small().with(Fault::Forgetful, 5), &rows, &["--max-clients", "1"]).await;
    assert_eq!((ran.code, ran.at("/audit/acknowledged_lost")), (1, 1), "{ran:?}");
    assert!(ran.stderr.contains("promises were seen broken"), "{ran:?}");
}

#[tokio::test]
async fn a_host_that_refuses_is_passed_over_for_the_next_best() {
    let rack = small().with(Fault::HostRefuses, 0);
    let ran = replay(&rack, "a,0,,2,2\nb,0,,2,2\nc,0,,1,1\n", &[]).await;
    assert_eq!(ran.vms(), [3, 2, 1, 0], "{ran:?}");
    assert!(rack.state().reservations.values().all(|r| r.host == "b"));
}

#[tokio::test]
async fn a_malformed_row_ends_the_replay_before_it_begins_unless_it_may_be_left_out() {
    let (rack, rows) = (small(), "a,0,,1,1\nb,0,,none,1\nc,0,,1,1\n");
    let strict = replay(&rack, rows, &[]).await;
    assert_eq!(strict.code, 1);
    assert!(strict.stderr.contains("line 3: cores = \\\"none\\\": must be"), "{strict:?}");
    assert!(rack.state().reservations.is_empty());
    let lenient = replay(&rack, rows, &["--lenient"]).await;
    assert_eq!((lenient.code, lenient.vms()), (0, [2, 2, 0, 0]), "{lenient:?}");
    assert!(lenient.stderr.contains("1 malformed rows left out; the first: line 3"), "{lenient:?}");
}

#[tokio::test]
async fn generated_vms_need_no_trace() {
    let ran = tarn(&small(), "generated:50", &["--seed", "3", "--limit", "40"]).await;
    let [requested, placed, rejected, lost] = ran.vms();
    assert_eq!((ran.code, requested, placed + rejected, lost), (0, 40, 40, 0), "{ran:?}");
    assert!(placed > 0);
}

#[tokio::test]
async fn the_report_goes_to_a_file_and_every_reply_to_a_log() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let options = ["--json", &path("report"), "--log", &path("log")];
    let ran = replay(&small(), "a,0,5,2,6\n", &options).await;
    let written: Value = serde_json::from_str(&fs::read_to_string(path("report")).unwrap()).unwrap();
    assert_eq!(written, ran.report);
    let log = fs::read_to_string(path("log")).unwrap();
    let actions = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["action"].clone());
    assert_eq!(actions.collect::<Vec<_>>(), ["reserve", "ready", "commit", "release"]);
}

#[tokio::test]
async fn a_rack_toml_says_where_the_manager_is() {
    let (rack, folder) = (small(), tempfile::tempdir().unwrap());
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

/// A replay of rows against a rack whose agent and EMC are on this machine.
async fn replay_here(rows: &str, fault: agent::Fault) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let (emc, socket) = (folder.path().join("emc"), folder.path().join("socket"));
    fs::create_dir(&emc).unwrap();
    let rack = small().on(&emc, &socket);
    agent::serve(&socket, &emc, rack.clone(), fault);
    // This process runs the manager of the EMC.
    let _lock = fs::File::create(emc.join("lock")).unwrap();
    let ran = replay(&rack, rows, &[]).await;
    assert!(!processes_hold(&emc), "a stand-in outlived its replay");
    ran
}

/// Whether a process other than this one has a file of the EMC.
fn processes_hold(emc: &Path) -> bool {
    let own = std::process::id().to_string();
    let processes = fs::read_dir("/proc").unwrap().flatten().filter(|entry| *entry.file_name() != *own);
    let maps = processes.filter_map(|entry| fs::read_to_string(entry.path().join("maps")).ok());
    let path = emc.to_str().unwrap();
    maps.into_iter().any(|maps| maps.contains(path))
}

#[tokio::test]
async fn every_new_owner_looks_through_its_slices_before_it_uses_them() {
    let ran = replay_here("a,0,10,4,8\nb,0,,2,4\n", agent::Fault::None).await;
    assert_eq!((ran.code, ran.vms()), (0, [2, 2, 0, 0]), "{ran:?}");
    assert_eq!(ran.at("/audit/slices_read"), 4);
    assert_eq!((ran.at("/audit/granted_dirty"), ran.at("/audit/double_owned")), (0, 0));
}

#[tokio::test]
async fn a_slice_that_was_not_scrubbed_is_granted_dirty() {
    let ran = replay_here("a,0,10,4,8\n", agent::Fault::Dirty).await;
    assert_eq!((ran.code, ran.at("/audit/granted_dirty")), (1, 4), "{ran:?}");
}

#[tokio::test]
async fn a_grant_that_is_over_and_still_within_reach_is_double_owned() {
    let ran = replay_here("a,0,,4,6\n", agent::Fault::Stale).await;
    assert_eq!((ran.code, ran.at("/audit/double_owned")), (1, 2), "{ran:?}");
}

#[tokio::test]
async fn a_vm_whose_memory_is_refused_is_turned_away_and_why_is_said() {
    let ran = replay_here("a,0,,4,6\n", agent::Fault::Refuses).await;
    assert_eq!(ran.vms(), [1, 0, 1, 0], "{ran:?}");
    assert!(ran.stderr.contains("not yet (VM_NOT_READY)"), "{ran:?}");
}
