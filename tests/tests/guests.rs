//! Tests of guests with memory from a rack. Uses a real manager, a real agent, and small guests
//! that write to their slices.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use proto::v1 as wire;
use tests::{
    rack::{Plan, Rack, programs_dir, reserve_request, vm_ref},
    small_guests::{self, can_run_small_guests},
    standalone_vm::confine_command,
};

/// Local memory of each guest, in bytes.
const LOCAL_BYTES: u64 = 64 << 20;

fn run_dir(rack: &Rack) -> PathBuf {
    rack.dir().join("run")
}

/// Guest that writes to its slices and prints in an endless loop.
struct Guest {
    process: Child,
    console: PathBuf,
}

impl Guest {
    async fn start(rack: &Rack, vm: &str, slices: u64) -> Self {
        let request = wire::ReserveRequest {
            local_bytes: LOCAL_BYTES,
            wait_ready: true,
            ..reserve_request("h0", vm, slices, vm)
        };
        rack.scheduler().await.reserve(request).await.unwrap();
        rack.scheduler().await.commit(wire::CommitRequest { target: vm_ref(vm) }).await.unwrap();
        let path = |suffix: &str| rack.dir().join(format!("{vm}.{suffix}"));
        fs::write(path("kernel"), small_guests::write_pool_memory()).unwrap();
        let console = path("console");
        let mut command = Command::new(programs_dir().join("vmm-plugin"));
        confine_command(command.arg("run"));
        let process = command
            .args(["--vm", vm, "--agent"])
            .arg(rack.host_memory_socket(0))
            .arg("--kernel")
            .arg(path("kernel"))
            .arg(format!("--serial=file={}", console.display()))
            .arg("--run-dir")
            .arg(run_dir(rack))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let guest = Self { process, console };
        guest.wait_for_progress(rack).await;
        guest
    }

    fn output_len(&self) -> usize {
        fs::read(&self.console).map_or(0, |bytes| bytes.len())
    }

    /// Waits for further output of the guest.
    async fn wait_for_progress(&self, rack: &Rack) {
        let before = self.output_len();
        rack.wait_for("the guest to make progress", async |_| self.output_len() > before + 2).await;
    }

    /// Waits for the end of the VMM. Returns its exit code and stderr.
    fn wait_for_exit(mut self) -> (Option<i32>, String) {
        let (mut stderr, status) = (String::new(), self.process.wait().unwrap());
        self.process.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        (status.code(), stderr)
    }
}

/// Kills the guest if a test fails.
impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn guest_with_revoked_slice_ends_and_reports_the_slice() {
    if !can_run_small_guests() {
        return;
    }
    let rack = Rack::start(Plan::small(2)).await;
    let guest = Guest::start(&rack, "v", 1).await;
    let owned = rack.slices().await.into_iter().find(|slice| slice.vm.as_deref() == Some("v")).unwrap();
    let release = wire::ReleaseRequest { target: vm_ref("v"), force: true, reason: "test".into() };
    rack.scheduler().await.release(release).await.unwrap();
    let (code, stderr) = guest.wait_for_exit();
    assert_eq!(code, Some(20), "{stderr}");
    assert_eq!(
        stderr,
        format!("error: VM v lost slice {} of EMC {}: the rack revoked it\n", owned.slice, owned.emc)
    );
    rack.wait_all_slices_free().await;
}

/// Returns the bytes of pool memory that a guest has touched, from the metrics of the agent.
/// Returns `None` if the agent does not report this metric.
fn touched_bytes(metrics: SocketAddr, vm: &str) -> Option<u64> {
    let mut agent = TcpStream::connect(metrics).ok()?;
    agent.write_all(b"GET /metrics HTTP/1.1\r\nHost: h0\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    agent.read_to_string(&mut text).ok()?;
    let line =
        format!("tarn_vm_touched_bytes{{host=\"h0\",backend=\"emulated\",vm=\"{vm}\",memory=\"pool\"}} ");
    text.lines().find_map(|candidate| candidate.strip_prefix(&line)?.parse().ok())
}

#[tokio::test]
async fn agent_reports_touched_memory_also_after_restart() {
    if !can_run_small_guests() {
        return;
    }
    let metrics = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let agent_toml_extra = format!("metrics_listen = \"{metrics}\"");
    let mut rack = Rack::start(Plan { hosts: vec![vec![0]], agent_toml_extra, ..Plan::small(2) }).await;
    let mut guest = Guest::start(&rack, "v", 1).await;
    let has_touched_bytes = async |_: &Rack| touched_bytes(metrics, "v").is_some_and(|bytes| bytes > 0);
    rack.wait_for("the agent to report touched memory", has_touched_bytes).await;
    rack.kill_agent(0);
    assert_eq!(touched_bytes(metrics, "v"), None);
    guest.wait_for_progress(&rack).await;
    rack.start_agent(0);
    rack.wait_for("the restarted agent to report touched memory", has_touched_bytes).await;
    guest.process.kill().unwrap();
    assert_eq!(guest.wait_for_exit().1, "", "the VMM must not report an error while the agent is missing");
}

async fn list_outcomes(rack: &Rack) -> Vec<wire::Outcome> {
    let mut models = wire::models_client::ModelsClient::new(rack.open_channel().await);
    models.list_outcomes(wire::ListOutcomesRequest::default()).await.unwrap().into_inner().outcomes
}

#[tokio::test]
async fn touched_memory_of_guest_becomes_its_outcome() {
    if !can_run_small_guests() {
        return;
    }
    let metrics = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let agent_toml_extra = format!("metrics_listen = \"{metrics}\"");
    let rack = Rack::start(Plan { hosts: vec![vec![0]], agent_toml_extra, ..Plan::small(2) }).await;
    let plan = wire::PlanVmRequest {
        vm: "v".into(),
        cores: 1,
        memory_bytes: 1 << 30,
        profile: Some(wire::VmProfile { key: "customer".into(), ..Default::default() }),
        ..Default::default()
    };
    rack.scheduler().await.plan_vm(plan).await.unwrap();
    let mut guest = Guest::start(&rack, "v", 1).await;
    let has_touched_bytes = async |_: &Rack| touched_bytes(metrics, "v").is_some_and(|bytes| bytes > 0);
    rack.wait_for("the agent to report touched memory", has_touched_bytes).await;
    guest.process.kill().unwrap();
    guest.wait_for_exit();
    rack.wait_all_slices_free().await;
    rack.wait_for("the outcome to be stored", async |rack| !list_outcomes(rack).await.is_empty()).await;
    let [outcome] = &list_outcomes(&rack).await[..] else { panic!("expected one outcome") };
    assert_eq!((outcome.vm.as_str(), outcome.profile.as_ref().unwrap().key.as_str()), ("v", "customer"));
    assert!(outcome.requested_bytes > 1 << 30, "must include the slice and local memory");
    assert!(
        (1..1 << 30).contains(&outcome.peak_bytes),
        "must be the touched part of the memory: {outcome:?}"
    );
    assert!(outcome.started_unix_ms > 0 && outcome.ended_unix_ms > outcome.started_unix_ms);
}

#[tokio::test]
async fn guest_outlives_services_and_frees_slices_when_killed() {
    if !can_run_small_guests() {
        return;
    }
    let mut rack = Rack::start(Plan::small(2)).await;
    let mut guest = Guest::start(&rack, "v", 2).await;
    rack.kill_manager();
    rack.kill_agent(0);
    guest.wait_for_progress(&rack).await;
    rack.start_manager().await;
    rack.start_agent(0);
    rack.wait_hosts_up().await;
    guest.wait_for_progress(&rack).await;
    let owned =
        rack.slices().await.into_iter().filter(|slice| slice.state() == wire::SliceState::Online).count();
    assert_eq!(owned, 2, "the new agent must adopt the guest");
    guest.process.kill().unwrap();
    guest.wait_for_exit();
    rack.wait_all_slices_free().await;
    assert!(rack.reservations().await.is_empty());
}

/// Runs a reserved VM with this kernel and these options. Returns the exit code and stderr of the
/// VMM.
fn run_reserved_vm(rack: &Rack, kernel: &Path, options: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(programs_dir().join("vmm-plugin"));
    command.arg("run");
    if !options.contains(&"--uid") {
        confine_command(&mut command);
    }
    command.args(["--vm", "v", "--agent"]).arg(rack.host_memory_socket(0)).arg("--kernel").arg(kernel);
    let serial = if options.contains(&"--serial") { &[][..] } else { &["--serial", "null"] };
    command.args(serial).args(options).arg("--run-dir").arg(run_dir(rack));
    let output = command.stdin(Stdio::null()).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[tokio::test]
async fn vm_that_fails_before_attach_keeps_its_reservation() {
    if !can_run_small_guests() {
        return;
    }
    let rack = Rack::start(Plan::small(2)).await;
    let request = wire::ReserveRequest {
        local_bytes: LOCAL_BYTES,
        wait_ready: true,
        ..reserve_request("h0", "v", 1, "v")
    };
    rack.scheduler().await.reserve(request).await.unwrap();
    rack.scheduler().await.commit(wire::CommitRequest { target: vm_ref("v") }).await.unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = rack.dir().join(name);
        fs::write(&path, content).unwrap();
        path
    };
    let (kernel, text) = (file("kernel", &small_guests::print_hello()), file("text", b"no kernel"));
    let large = file("large", &[]);
    fs::File::options().write(true).open(&large).unwrap().set_len(LOCAL_BYTES).unwrap();
    let assert_rejected = |kernel: &Path, options: &[&str], expected: &str| {
        let (code, stderr) = run_reserved_vm(&rack, kernel, options);
        assert!(code == Some(1) && stderr.contains(expected), "{options:?}: {code:?}: {stderr}");
    };
    assert_rejected(Path::new("/nowhere"), &[], "kernel: cannot read /nowhere");
    assert_rejected(&text, &[], "must be a bzImage");
    assert_rejected(&kernel, &["--initrd", "/nowhere"], "initrd: cannot read /nowhere");
    assert_rejected(&kernel, &["--initrd", large.to_str().unwrap()], "initrd: 67108864 bytes do not fit");
    assert_rejected(&kernel, &["--disk", "path=/nowhere"], "disk: cannot open /nowhere");
    assert_rejected(&kernel, &["--serial", "file=/nowhere/console"], "serial: cannot write /nowhere/console");
    assert_rejected(&kernel, &["--memory", "size=65MiB"], "memory: the nodes have 65MiB in total");
    assert_rejected(&kernel, &["--pool", "emc=other"], "pool: emc=other: the VM has no slice of that EMC");
    assert_rejected(&kernel, &["--cmdline", &"x".repeat(3000)], "cmdline: 3000 bytes: must be at most 2047");
    assert_rejected(
        &kernel,
        &["--uid", "65534", "--gid", "65534", "--chroot", "/"],
        "chroot: / is not empty",
    );
    assert_eq!(
        run_reserved_vm(&rack, &kernel, &[]),
        (Some(0), String::new()),
        "a valid run must succeed after rejected runs"
    );
    rack.wait_all_slices_free().await;
}

#[tokio::test]
async fn unreserved_vm_is_rejected_before_start() {
    if !can_run_small_guests() {
        return;
    }
    let rack = Rack::start(Plan::small(1)).await;
    // Before its first desired state, the agent would return NO_DESIRED_STATE.
    let request = wire::ReserveRequest { wait_ready: true, ..reserve_request("h0", "other", 1, "other") };
    rack.scheduler().await.reserve(request).await.unwrap();
    let kernel = rack.dir().join("kernel");
    fs::write(&kernel, small_guests::print_hello()).unwrap();
    let mut command = Command::new(programs_dir().join("vmm-plugin"));
    confine_command(command.arg("run"));
    command.args(["--vm", "nobody", "--agent"]).arg(rack.host_memory_socket(0)).arg("--kernel").arg(kernel);
    command.arg("--run-dir").arg(run_dir(&rack));
    let output = command.stdin(Stdio::null()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.starts_with("error: cannot get the memory of VM nobody from the agent at ")
            && stderr.contains("(VM_UNKNOWN)"),
        "{stderr}"
    );
}
