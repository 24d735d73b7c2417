//! Tests of the monitor of running VMs: samples, verdicts, and migration requests because of
//! slowdowns. Uses a real manager, with scripted agents or with a real agent and small guests.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{cell::RefCell, collections::BTreeSet, fmt::Write as _};

use proto::v1::{self as wire, MigrationKind, MigrationState, MonitoringVerdict};
use tests::{
    pool_guest::PoolGuest,
    rack::{Plan, Rack, reserve_request, vm_ref},
    scripted_agent::ScriptedAgent,
    small_guests::{self, can_run_small_guests},
};
use tonic::{Code, Streaming};
use units::{COUNTER_NAMES, limits::QOS_SAMPLE_INTERVAL_MIN};

const GIB: u64 = 1 << 30;

/// Starts a manager, and scripted agents for both hosts.
async fn start_rack() -> (Rack, [ScriptedAgent; 2]) {
    let mut rack = Rack::new(Plan::small(4));
    rack.start_manager().await;
    let agents = start_agents(&rack).await;
    (rack, agents)
}

async fn start_agents(rack: &Rack) -> [ScriptedAgent; 2] {
    let agents =
        [ScriptedAgent::start(rack, "h0", "boot").await, ScriptedAgent::start(rack, "h1", "boot").await];
    let all_up =
        async |rack: &Rack| rack.hosts().await.iter().all(|host| host.state() == wire::HostState::Up);
    rack.wait_for("both hosts to be up", all_up).await;
    agents
}

/// Reserves slices and local memory for a VM, and commits the reservation. Returns its ID.
async fn start_vm(rack: &Rack, host: &str, vm: &str, slices: u64) -> String {
    let request = wire::ReserveRequest {
        local_bytes: GIB,
        cores: 2,
        wait_ready: true,
        ..reserve_request(host, vm, slices, vm)
    };
    let reservation = rack.scheduler().await.reserve(request).await.unwrap().into_inner().reservation;
    rack.scheduler().await.commit(wire::CommitRequest { target: vm_ref(vm) }).await.unwrap();
    reservation
}

/// Returns a sample in which the VM accessed this number of 200 sampled pages.
fn sample(reservation: &str, accessed_pages: u32) -> wire::VmSample {
    let source = wire::AccessedPagesSource::Vmm.into();
    wire::VmSample {
        reservation: reservation.into(),
        interval_ms: 1000,
        accessed: Some(wire::AccessedPages { source, sampled_pages: 200, accessed_pages }),
        counter_problem: "none here".into(),
        ..Default::default()
    }
}

async fn watch(rack: &Rack) -> Streaming<wire::Migration> {
    let mut scheduler = rack.scheduler().await;
    scheduler.watch_migrations(wire::WatchMigrationsRequest {}).await.unwrap().into_inner()
}

async fn migrations(rack: &Rack) -> Vec<wire::Migration> {
    let listed = rack.admin().await.list_migrations(wire::ListMigrationsRequest::default()).await;
    listed.unwrap().into_inner().migrations
}

async fn monitoring(rack: &Rack, vm: &str) -> Option<wire::Monitoring> {
    let request = wire::GetReservationRequest { target: vm_ref(vm) };
    rack.admin().await.get_reservation(request).await.unwrap().into_inner().monitoring
}

/// Sends the samples repeatedly until there is a migration request. Samples that follow too soon are
/// dropped by the manager.
async fn send_until_requested(rack: &Rack, agent: &ScriptedAgent, samples: Vec<wire::VmSample>) {
    let has_request = async |rack: &Rack| {
        agent.send_samples(samples.clone()).await;
        !migrations(rack).await.is_empty()
    };
    rack.wait_for("a migration request", has_request).await;
}

async fn resolve(
    rack: &Rack,
    vm: &str,
    id: &str,
    state: MigrationState,
) -> Result<wire::Migration, tonic::Status> {
    let request = wire::ResolveMigrationRequest {
        vm: vm.into(),
        state: state.into(),
        answer: "because".into(),
        id: id.into(),
    };
    rack.scheduler().await.resolve_migration(request).await.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn slowed_down_vm_has_a_request_that_survives_a_restart() {
    let (mut rack, agents) = start_rack().await;
    let slow = start_vm(&rack, "h0", "slow", 2).await;
    let idle = start_vm(&rack, "h0", "idle", 1).await;
    let mut watched = watch(&rack).await;
    send_until_requested(&rack, &agents[0], vec![sample(&slow, 190), sample(&idle, 1)]).await;
    let request = watched.message().await.unwrap().unwrap();
    assert_eq!(
        (request.vm.as_str(), request.kind(), request.state()),
        ("slow", MigrationKind::Slowdown, MigrationState::Open)
    );
    let slowdown = request.slowdown.clone().unwrap();
    assert!(slowdown.severity > 1.0 && slowdown.samples >= 3 && slowdown.loss.is_none(), "{slowdown:?}");
    assert_eq!((slowdown.needed_local_bytes, slowdown.hosts), (2 * GIB, vec!["h0".into(), "h1".into()]));
    let verdict = monitoring(&rack, "slow").await.unwrap();
    assert_eq!(verdict.verdict(), MonitoringVerdict::Migrate);
    assert!(verdict.accessed_share_low.unwrap() < 0.95 && verdict.accessed_share_high.unwrap() > 0.95);
    assert_eq!(monitoring(&rack, "idle").await.unwrap().verdict(), MonitoringVerdict::Fine);
    let listed = String::from_utf8(rack.tarn(&["get", "vms"]).stdout).unwrap();
    let line = |vm: &str| listed.lines().find(|line| line.starts_with(vm)).unwrap_or_default().to_owned();
    assert!(line("slow").contains("migrate") && line("slow").contains("95.0 %"), "{listed}");
    assert!(line("idle").contains("fine") && line("idle").contains("0.5 %"), "{listed}");
    let explained = String::from_utf8(rack.tarn(&["explain", "vm", "slow"]).stdout).unwrap();
    assert!(explained.contains("the VM accesses much of its pool memory (severity 1.8"), "{explained}");

    rack.kill_manager();
    rack.start_manager().await;
    let again = watch(&rack).await.message().await.unwrap().unwrap();
    assert_eq!((&again.id, again.state()), (&request.id, MigrationState::Open));
    // A restarted manager requests the same migration no second time.
    let agents = start_agents(&rack).await;
    let is_judged = async |rack: &Rack| {
        agents[0].send_samples(vec![sample(&slow, 190)]).await;
        monitoring(rack, "slow").await.is_some_and(|m| m.verdict() == MonitoringVerdict::Migrate)
    };
    rack.wait_for("the verdict of the restarted manager", is_judged).await;
    assert_eq!(migrations(&rack).await.iter().map(|m| &m.id).collect::<Vec<_>>(), [&request.id]);
}

#[tokio::test]
async fn request_is_resolved_by_its_id_and_ends_with_its_vm() {
    let (rack, agents) = start_rack().await;
    let slow = start_vm(&rack, "h0", "slow", 2).await;
    start_vm(&rack, "h0", "other", 1).await;
    send_until_requested(&rack, &agents[0], vec![sample(&slow, 190)]).await;
    let id = migrations(&rack).await[0].id.clone();
    for (vm, wrong, code) in [
        ("slow", "m-99", Code::NotFound),
        ("other", id.as_str(), Code::NotFound),
        ("slow", "x", Code::InvalidArgument),
    ] {
        let status = resolve(&rack, vm, wrong, MigrationState::Accepted).await.unwrap_err();
        assert_eq!(status.code(), code, "{vm} {wrong}: {status:?}");
    }
    assert_eq!(resolve(&rack, "slow", "", MigrationState::Declined).await.unwrap().id, id);
    assert!(rack.tarn(&["drain", "host", "h0"]).status.success());
    let status = resolve(&rack, "slow", "", MigrationState::Accepted).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert!(status.message().contains(&id), "{status:?}");
    let accepted = resolve(&rack, "slow", &id, MigrationState::Accepted).await.unwrap();
    assert_eq!((accepted.kind(), accepted.state()), (MigrationKind::Slowdown, MigrationState::Accepted));
    let mut watched = watch(&rack).await;
    let target = vm_ref("slow");
    rack.scheduler().await.release(wire::ReleaseRequest { target, ..Default::default() }).await.unwrap();
    let mut withdrawn = 0;
    while withdrawn < 2 {
        let message = watched.message().await.unwrap().unwrap();
        withdrawn += i32::from(message.vm == "slow" && message.state() == MigrationState::Withdrawn);
    }
    assert!(migrations(&rack).await.iter().all(|m| m.vm == "other"), "requests of an ended VM remain");
}

#[tokio::test]
async fn most_harmed_vms_use_the_budget() {
    let (rack, agents) = start_rack().await;
    let mild = start_vm(&rack, "h0", "mild", 1).await;
    let harmed = start_vm(&rack, "h0", "harmed", 1).await;
    // X is 2 % by default, so a rack with two VMs may request one migration per hour.
    let samples = vec![sample(&mild, 130), sample(&harmed, 200)];
    send_until_requested(&rack, &agents[0], samples.clone()).await;
    let is_judged = async |rack: &Rack| {
        agents[0].send_samples(samples.clone()).await;
        monitoring(rack, "mild").await.is_some_and(|m| m.verdict() == MonitoringVerdict::Migrate)
    };
    rack.wait_for("the verdict about the other VM", is_judged).await;
    rack.scheduler()
        .await
        .release(wire::ReleaseRequest { target: vm_ref("harmed"), ..Default::default() })
        .await
        .unwrap();
    let requested: Vec<String> = migrations(&rack).await.into_iter().map(|m| m.vm).collect();
    assert_eq!(requested, [""; 0], "the budget of the hour is used up");
    let explained = String::from_utf8(rack.tarn(&["explain", "vm", "harmed"]).stdout).unwrap();
    assert!(explained.contains("request-migration"), "{explained}");
}

/// Returns labelled runs with pool memory. It slows a program down by 20 % if and only if the program is
/// DRAM-bound for more than half of its cycles.
fn labelled_runs() -> String {
    let mut table = format!("program,slowdown,pool_load_share,latency_ratio,{}\n", COUNTER_NAMES.join(","));
    for program in 0..200 {
        let dram_bound = f64::from(program % 20) / 20.0;
        let slowdown = if dram_bound > 0.5 { 0.2 } else { 0.0 };
        let pool_load_share = if program < 100 { 1.0 } else { 0.5 };
        let counters = vec![dram_bound.to_string(); COUNTER_NAMES.len()].join(",");
        writeln!(table, "p{program},{slowdown},{pool_load_share},2.5,{counters}").unwrap();
    }
    table
}

/// Returns a sample with counters, of which the DRAM-bound fraction of cycles is this.
fn sample_with_counters(reservation: &str, accessed_pages: u32, dram_bound: f64) -> wire::VmSample {
    wire::VmSample {
        counters: COUNTER_NAMES.map(|name| (name.to_owned(), dram_bound)).into(),
        counter_problem: String::new(),
        pool_load_share: Some(0.5),
        latency_ratio: Some(2.5),
        steal_share: Some(0.25),
        ..sample(reservation, accessed_pages)
    }
}

#[tokio::test]
async fn counters_decide_if_a_loss_model_serves() {
    let (mut rack, _agents_before) = start_rack().await;
    let labels = rack.dir().join("labels.csv");
    std::fs::write(&labels, labelled_runs()).unwrap();
    let trained = rack.tarn(&["train", "loss", "--labels", labels.to_str().unwrap(), "-o", "json"]);
    let trained: serde_json::Value = serde_json::from_slice(&trained.stdout).unwrap();
    assert_eq!((&trained["kind"], &trained["modelled"]), (&"loss".into(), &false.into()), "{trained}");
    assert!(trained["loss_accuracy"]["flagged_harmed"].as_f64().unwrap() > 0.9, "{trained}");
    assert!(rack.tarn(&["promote", "loss", "1"]).status.success());
    rack.kill_manager();
    rack.start_manager().await; // loads the promoted model
    let agents = start_agents(&rack).await;
    let harmed = start_vm(&rack, "h0", "harmed", 1).await;
    let insensitive = start_vm(&rack, "h0", "insensitive", 1).await;
    let samples = vec![sample_with_counters(&harmed, 60, 0.9), sample_with_counters(&insensitive, 190, 0.1)];
    send_until_requested(&rack, &agents[0], samples.clone()).await;
    let requests = migrations(&rack).await;
    assert_eq!(requests.iter().map(|request| request.vm.as_str()).collect::<Vec<_>>(), ["harmed"]);
    assert!(requests[0].slowdown.as_ref().unwrap().loss.unwrap() > 0.05, "{requests:?}");
    let verdict = monitoring(&rack, "harmed").await.unwrap();
    assert_eq!(verdict.loss_model, "loss/1");
    assert_eq!((verdict.counter_source.as_str(), verdict.steal_share), ("perf", Some(0.25)));
    let verdict = monitoring(&rack, "insensitive").await.unwrap();
    assert_eq!(verdict.verdict(), MonitoringVerdict::Fine, "{verdict:?}");
    assert!(verdict.loss.unwrap() < 0.05 && verdict.samples >= 3, "{verdict:?}");

    // Without a model, the accesses decide.
    let rolled_back = String::from_utf8(rack.tarn(&["rollback", "loss"]).stdout).unwrap();
    assert!(rolled_back.contains("judged by the accesses to their pool memory alone"), "{rolled_back}");
    let is_judged = async |rack: &Rack| {
        agents[0].send_samples(samples.clone()).await;
        let verdict = monitoring(rack, "insensitive").await.unwrap();
        verdict.verdict() == MonitoringVerdict::Migrate
            && verdict.loss.is_none()
            && verdict.loss_model.is_empty()
    };
    rack.wait_for("the verdict from accesses", is_judged).await;
}

/// The scripted agents need a thread of their own while `tarn` waits for the move.
#[tokio::test(flavor = "multi_thread")]
async fn loss_that_a_move_has_measured_becomes_training_data() {
    let (mut rack, agents) = start_rack().await;
    let vm = start_vm(&rack, "h0", "moved", 1).await;
    agents[0].run_vms();
    let times = RefCell::new(BTreeSet::new());
    // A measurement requires six samples. The manager drops those that follow too soon.
    let is_sampled = async |rack: &Rack| {
        agents[0].send_samples(vec![sample_with_counters(&vm, 190, 0.8)]).await;
        let accepted = monitoring(rack, "moved").await.map(|monitoring| monitoring.sampled_unix_ms);
        times.borrow_mut().extend(accepted);
        times.borrow().len() >= 6
    };
    rack.wait_for("enough samples", is_sampled).await;
    let rehomed = rack.tarn(&["rehome", "moved", "--wait"]);
    assert!(rehomed.status.success(), "{}", String::from_utf8_lossy(&rehomed.stderr));
    let export =
        |rack: &Rack| String::from_utf8(rack.tarn(&["telemetry", "export", "--moves"]).stdout).unwrap();
    let is_measured = async |rack: &Rack| {
        agents[0].send_samples(vec![sample_with_counters(&vm, 0, 1.0)]).await;
        export(rack).lines().count() == 2
    };
    // All counters were 0.8 before the move, also the instructions per cycle, and 1.0 afterwards.
    rack.wait_for("the measured loss", is_measured).await;
    assert_eq!(monitoring(&rack, "moved").await, None, "a moved VM is not judged");
    let explained = String::from_utf8(rack.tarn(&["explain", "vm", "moved"]).stdout).unwrap();
    assert!(explained.contains("measure-loss") && explained.contains("by 25.0 %"), "{explained}");

    rack.kill_manager();
    rack.start_manager().await;
    let exported = export(&rack);
    let row: Vec<&str> = exported.lines().nth(1).unwrap().split(',').collect();
    assert_eq!((row[0], &row[2..4], row.len()), ("moved", &["0.5", "2.5"][..], 4 + COUNTER_NAMES.len()));
    assert!((row[1].parse::<f64>().unwrap() - 0.25).abs() < 1e-6, "{exported}");
    let labels = rack.dir().join("labels.csv");
    // The exported moves are labels for another rack, too.
    let exported_rows = exported.lines().skip(1).map(|line| format!("{line}\n")).collect::<String>();
    std::fs::write(&labels, labelled_runs() + &exported_rows).unwrap();
    let trained = rack.tarn(&["train", "loss", "--labels", labels.to_str().unwrap(), "-o", "json"]);
    let trained: serde_json::Value = serde_json::from_slice(&trained.stdout).unwrap();
    assert_eq!((&trained["rows"], &trained["measured_moves"]), (&202.into(), &1.into()), "{trained}");
    // The move of this rack was selected by its estimate, and does not count for the accuracy.
    assert_eq!(
        (&trained["pdm"], &trained["loss_accuracy"]["runs"]),
        (&0.05.into(), &201.into()),
        "{trained}"
    );
    let options = ["--labels", labels.to_str().unwrap(), "--without-moves", "-o", "json"];
    let without = rack.tarn(&[&["train", "loss"][..], &options].concat());
    let without: serde_json::Value = serde_json::from_slice(&without.stdout).unwrap();
    assert_eq!((&without["rows"], &without["measured_moves"]), (&201.into(), &0.into()), "{without}");
}

/// The first sample after a failed move covers a part of the move, whose copy slows the VM down.
#[tokio::test(flavor = "multi_thread")]
async fn first_sample_after_a_failed_move_is_not_judged() {
    let (rack, agents) = start_rack().await;
    let vm = start_vm(&rack, "h0", "v", 1).await;
    agents[0].run_vms();
    agents[0].fail_moves();
    agents[0].send_samples(vec![sample(&vm, 10)]).await;
    rack.wait_for("the first sample", async |rack| monitoring(rack, "v").await.is_some()).await;
    // The manager rejects the move until the agent has reported the process of the VM.
    let has_failed = async |rack: &Rack| {
        let moved = rack.tarn(&["rehome", "v", "--wait"]);
        String::from_utf8_lossy(&moved.stderr).contains("the test fails moves")
    };
    rack.wait_for("the failed move", has_failed).await;
    // Otherwise, the manager could drop the next sample because it follows too soon.
    tokio::time::sleep(2 * QOS_SAMPLE_INTERVAL_MIN.as_duration()).await;
    // If the first sample were judged, the second would be dropped, because it follows too soon.
    agents[0].send_samples(vec![sample(&vm, 200)]).await;
    agents[0].send_samples(vec![sample(&vm, 20)]).await;
    let share =
        async |rack: &Rack| monitoring(rack, "v").await.and_then(|monitoring| monitoring.accessed_share);
    rack.wait_for("the second sample", async |rack| share(rack).await == Some(0.1)).await;
}

#[tokio::test]
async fn invalid_samples_are_dropped_and_leave_the_session_open() {
    let (rack, agents) = start_rack().await;
    let vm = start_vm(&rack, "h0", "v", 1).await;
    start_vm(&rack, "h0", "local", 0).await;
    let invalid = vec![
        wire::VmSample { counters: [("ipc".to_owned(), f64::NAN)].into(), ..sample(&vm, 1) },
        sample(&vm, 201),
        wire::VmSample { interval_ms: u64::MAX, ..sample(&vm, 1) },
        sample("r-99", 1),
        sample("", 1),
        wire::VmSample::default(),
    ];
    agents[0].send_samples(invalid).await;
    agents[1].send_samples(vec![sample(&vm, 200)]).await; // another host's VM
    let is_logged = async |rack: &Rack| {
        let log = rack.read_log("manager");
        let dropped = |reason: &str| {
            log.lines().filter(|line| line.contains("dropped a sample") && line.contains(reason)).count()
        };
        dropped("invalid") >= 5 && dropped("unknown_vm") >= 2
    };
    rack.wait_for("the manager to drop all samples", is_logged).await;
    assert_eq!(monitoring(&rack, "v").await, None);
    agents[0].send_samples(vec![sample(&vm, 20)]).await;
    rack.wait_for("a valid sample of the same session", async |rack| monitoring(rack, "v").await.is_some())
        .await;
    assert!(rack.hosts().await.iter().all(|host| host.state() == wire::HostState::Up));
}

#[tokio::test]
async fn guest_that_uses_its_pool_memory_is_detected() {
    if !can_run_small_guests() {
        return;
    }
    let agent_toml_extra = "sample_interval_s = 3\n".to_owned();
    let mut rack = Rack::start(Plan { agent_toml_extra, ..Plan::small(4) }).await;
    let _busy = PoolGuest::start(&rack, "busy", small_guests::sweep_pool_memory()).await;
    // This guest accesses one page of 2 MiB.
    let _calm = PoolGuest::start(&rack, "calm", small_guests::write_pool_memory()).await;
    let is_requested = async |rack: &Rack| !migrations(rack).await.is_empty();
    rack.wait_for("a migration request", is_requested).await;
    let requests = migrations(&rack).await;
    assert_eq!(requests.iter().map(|m| m.vm.as_str()).collect::<Vec<_>>(), ["busy"], "{requests:?}");
    let calm = monitoring(&rack, "calm").await.unwrap();
    assert_eq!((calm.verdict(), calm.access_source.as_str()), (MonitoringVerdict::Fine, "vmm"), "{calm:?}");
    assert!(calm.accessed_share.unwrap() < 0.05, "{calm:?}");
    // A restarted agent finds the control sockets in its records.
    rack.kill_agent(0);
    let before = monitoring(&rack, "busy").await.unwrap().sampled_unix_ms;
    rack.start_agent(0);
    let is_sampled = async |rack: &Rack| {
        let busy = monitoring(rack, "busy").await.unwrap();
        busy.sampled_unix_ms > before && busy.accessed_share.is_some_and(|share| share > 0.5)
    };
    rack.wait_for("a sample of the restarted agent", is_sampled).await;
}

#[tokio::test]
async fn vmm_without_control_socket_has_samples() {
    let agent_toml_extra = "sample_interval_s = 2\n".to_owned();
    let rack = Rack::start(Plan { agent_toml_extra, ..Plan::small(4) }).await;
    let request = wire::ReserveRequest { wait_ready: true, ..reserve_request("h0", "v", 1, "v") };
    rack.scheduler().await.reserve(request).await.unwrap();
    let mut vm = rack.start_vm(0, "v");
    let is_sampled = async |rack: &Rack| monitoring(rack, "v").await.is_some();
    rack.wait_for("a sample of the VM", is_sampled).await;
    let monitoring = monitoring(&rack, "v").await.unwrap();
    // DAMON samples the accesses, unless the kernel has no DAMON or another program uses it.
    let problem = &monitoring.access_problem;
    let is_explained = problem.contains("uses DAMON") || problem.contains("kdamonds");
    assert!(monitoring.access_source == "damon" || is_explained, "{monitoring:?}");
    assert_eq!(monitoring.access_source == "damon", problem.is_empty(), "{monitoring:?}");
    drop(vm.stdin.take());
    vm.wait().unwrap();
}
