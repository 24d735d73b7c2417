//! Guests with a rack's memory: a real manager, a real agent, and guests of a few instructions that
//! write their slices.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use proto::v1 as wire;
use tests::{
    place::confine,
    rack::{Plan, Rack, by_vm, programs, reserve},
    small_guests::{self, can_run},
};

const LOCAL: u64 = 64 << 20;

fn run_dir(rack: &Rack) -> PathBuf {
    rack.dir().join("run")
}

/// Guest that writes its slices, prints repeatedly, and never ends by itself.
struct Guest {
    process: Child,
    console: PathBuf,
}

impl Guest {
    async fn start(rack: &Rack, vm: &str, slices: u64) -> Self {
        let request =
            wire::ReserveRequest { local_bytes: LOCAL, wait_ready: true, ..reserve("h0", vm, slices, vm) };
        rack.scheduler().await.reserve(request).await.unwrap();
        rack.scheduler().await.commit(wire::CommitRequest { target: by_vm(vm) }).await.unwrap();
        let place = |what: &str| rack.dir().join(format!("{vm}.{what}"));
        fs::write(place("kernel"), small_guests::touch()).unwrap();
        let console = place("console");
        let mut command = Command::new(programs().join("vmm-plugin"));
        confine(command.arg("run"));
        let process = command
            .args(["--vm", vm, "--agent"])
            .arg(rack.host_memory(0))
            .arg("--kernel")
            .arg(place("kernel"))
            .arg(format!("--serial=file={}", console.display()))
            .arg("--run-dir")
            .arg(run_dir(rack))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let guest = Self { process, console };
        guest.goes_on(rack).await;
        guest
    }

    fn said(&self) -> usize {
        fs::read(&self.console).map_or(0, |said| said.len())
    }

    /// Waits until the guest has done something more.
    async fn goes_on(&self, rack: &Rack) {
        let before = self.said();
        rack.wait_for("the guest to go on", async |_| self.said() > before + 2).await;
    }

    /// Returns its exit status and the VMM's output.
    fn end(mut self) -> (Option<i32>, String) {
        let (mut said, ended) = (String::new(), self.process.wait().unwrap());
        self.process.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (ended.code(), said)
    }
}

/// A test that fails leaves no guest behind.
impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn a_guest_whose_slice_is_taken_away_ends_at_once_and_says_which() {
    if !can_run() {
        return;
    }
    let rack = Rack::start(Plan::small(2)).await;
    let guest = Guest::start(&rack, "v", 1).await;
    let owned = rack.slices().await.into_iter().find(|slice| slice.vm.as_deref() == Some("v")).unwrap();
    let release = wire::ReleaseRequest { target: by_vm("v"), force: true, reason: "test".into() };
    rack.scheduler().await.release(release).await.unwrap();
    let (code, said) = guest.end();
    assert_eq!(code, Some(20), "{said}");
    assert_eq!(
        said,
        format!("error: VM v lost slice {} of EMC {}: the rack revoked it\n", owned.slice, owned.emc)
    );
    rack.wait_all_free().await;
}

/// Bytes of pool memory that a guest has touched, as its host's agent shows it.
fn shown(metrics: SocketAddr, vm: &str) -> Option<u64> {
    let mut agent = TcpStream::connect(metrics).ok()?;
    agent.write_all(b"GET /metrics HTTP/1.1\r\nHost: h0\r\nConnection: close\r\n\r\n").ok()?;
    let mut said = String::new();
    agent.read_to_string(&mut said).ok()?;
    let line =
        format!("tarn_vm_touched_bytes{{host=\"h0\",backend=\"emulated\",vm=\"{vm}\",memory=\"pool\"}} ");
    said.lines().find_map(|told| told.strip_prefix(&line)?.parse().ok())
}

#[tokio::test]
async fn an_agent_shows_what_a_guest_touched_and_so_does_the_next_one() {
    if !can_run() {
        return;
    }
    let metrics = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let agents_more = format!("metrics_listen = \"{metrics}\"");
    let mut rack = Rack::start(Plan { hosts: vec![vec![0]], agents_more, ..Plan::small(2) }).await;
    let mut guest = Guest::start(&rack, "v", 1).await;
    let is_shown = async |_: &Rack| shown(metrics, "v").is_some_and(|bytes| bytes > 0);
    rack.wait_for("the agent to show what was touched", is_shown).await;
    rack.kill_agent(0);
    assert_eq!(shown(metrics, "v"), None);
    guest.goes_on(&rack).await;
    rack.start_agent(0);
    rack.wait_for("the next agent to show what was touched", is_shown).await;
    guest.process.kill().unwrap();
    assert_eq!(guest.end().1, "", "an agent that is away is nothing to talk of");
}

async fn outcomes(rack: &Rack) -> Vec<wire::Outcome> {
    let mut models = wire::models_client::ModelsClient::new(rack.any_client().await);
    models.list_outcomes(wire::ListOutcomesRequest::default()).await.unwrap().into_inner().outcomes
}

#[tokio::test]
async fn what_a_guest_touched_is_what_forecasts_learn_of_its_vm() {
    if !can_run() {
        return;
    }
    let metrics = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let agents_more = format!("metrics_listen = \"{metrics}\"");
    let rack = Rack::start(Plan { hosts: vec![vec![0]], agents_more, ..Plan::small(2) }).await;
    let plan = wire::PlanVmRequest {
        vm: "v".into(),
        cores: 1,
        memory_bytes: 1 << 30,
        profile: Some(wire::VmProfile { key: "customer".into(), ..Default::default() }),
        ..Default::default()
    };
    rack.scheduler().await.plan_vm(plan).await.unwrap();
    let mut guest = Guest::start(&rack, "v", 1).await;
    let is_shown = async |_: &Rack| shown(metrics, "v").is_some_and(|bytes| bytes > 0);
    rack.wait_for("the agent to be told what was touched", is_shown).await;
    guest.process.kill().unwrap();
    guest.end();
    rack.wait_all_free().await;
    rack.wait_for("the outcome to be kept", async |rack| !outcomes(rack).await.is_empty()).await;
    let [outcome] = &outcomes(&rack).await[..] else { panic!("one VM ended") };
    assert_eq!((outcome.vm.as_str(), outcome.profile.as_ref().unwrap().key.as_str()), ("v", "customer"));
    assert!(outcome.requested_bytes > 1 << 30, "its slice and its local memory");
    assert!((1..1 << 30).contains(&outcome.peak_bytes), "it touched some: {outcome:?}");
    assert!(outcome.started_unix_ms > 0 && outcome.ended_unix_ms > outcome.started_unix_ms);
}

#[tokio::test]
async fn a_guest_outlives_its_manager_and_its_agent_and_gives_everything_back_when_killed() {
    if !can_run() {
        return;
    }
    let mut rack = Rack::start(Plan::small(2)).await;
    let mut guest = Guest::start(&rack, "v", 2).await;
    rack.kill_manager();
    rack.kill_agent(0);
    guest.goes_on(&rack).await;
    rack.start_manager().await;
    rack.start_agent(0);
    rack.wait_hosts_up().await;
    guest.goes_on(&rack).await;
    let owned =
        rack.slices().await.into_iter().filter(|slice| slice.state() == wire::SliceState::Online).count();
    assert_eq!(owned, 2, "the new agent has found the guest again");
    guest.process.kill().unwrap();
    guest.end();
    rack.wait_all_free().await;
    assert!(rack.reservations().await.is_empty());
}

/// Runs a VM that is reserved, with these options beside its kernel.
fn run_reserved(rack: &Rack, kernel: &Path, options: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(programs().join("vmm-plugin"));
    command.arg("run");
    if !options.contains(&"--uid") {
        confine(&mut command);
    }
    command.args(["--vm", "v", "--agent"]).arg(rack.host_memory(0)).arg("--kernel").arg(kernel);
    let serial = if options.contains(&"--serial") { &[][..] } else { &["--serial", "null"] };
    command.args(serial).args(options).arg("--run-dir").arg(run_dir(rack));
    let ran = command.stdin(Stdio::null()).output().unwrap();
    (ran.status.code(), String::from_utf8_lossy(&ran.stderr).into_owned())
}

#[tokio::test]
async fn a_run_that_fails_before_it_attached_leaves_its_reservation() {
    if !can_run() {
        return;
    }
    let rack = Rack::start(Plan::small(2)).await;
    let request = wire::ReserveRequest { local_bytes: LOCAL, wait_ready: true, ..reserve("h0", "v", 1, "v") };
    rack.scheduler().await.reserve(request).await.unwrap();
    rack.scheduler().await.commit(wire::CommitRequest { target: by_vm("v") }).await.unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = rack.dir().join(name);
        fs::write(&path, content).unwrap();
        path
    };
    let (kernel, text) = (file("kernel", &small_guests::hello()), file("text", b"no kernel"));
    let large = file("large", &[]);
    fs::File::options().write(true).open(&large).unwrap().set_len(LOCAL).unwrap();
    let refused = |kernel: &Path, options: &[&str], expected: &str| {
        let (code, said) = run_reserved(&rack, kernel, options);
        assert!(code == Some(1) && said.contains(expected), "{options:?}: {code:?}: {said}");
    };
    refused(Path::new("/nowhere"), &[], "kernel: cannot read /nowhere");
    refused(&text, &[], "must be a bzImage");
    refused(&kernel, &["--initrd", "/nowhere"], "initrd: cannot read /nowhere");
    refused(&kernel, &["--initrd", large.to_str().unwrap()], "initrd: 67108864 bytes do not fit");
    refused(&kernel, &["--disk", "path=/nowhere"], "disk: cannot open /nowhere");
    refused(&kernel, &["--serial", "file=/nowhere/console"], "serial: cannot write /nowhere/console");
    refused(&kernel, &["--memory", "size=65MiB"], "memory: the nodes have 65MiB in total");
    refused(&kernel, &["--pool", "emc=other"], "pool: emc=other: the VM has no slice of that EMC");
    refused(&kernel, &["--cmdline", &"x".repeat(3000)], "cmdline: 3000 bytes are too long");
    refused(&kernel, &["--uid", "65534", "--gid", "65534", "--chroot", "/"], "chroot: / is not empty");
    assert_eq!(run_reserved(&rack, &kernel, &[]), (Some(0), String::new()), "it can be tried again");
    rack.wait_all_free().await;
}

#[tokio::test]
async fn a_vm_that_was_never_reserved_is_refused_before_anything_starts() {
    if !can_run() {
        return;
    }
    let rack = Rack::start(Plan::small(1)).await;
    let kernel = rack.dir().join("kernel");
    fs::write(&kernel, small_guests::hello()).unwrap();
    let mut command = Command::new(programs().join("vmm-plugin"));
    confine(command.arg("run"));
    command.args(["--vm", "nobody", "--agent"]).arg(rack.host_memory(0)).arg("--kernel").arg(kernel);
    command.arg("--run-dir").arg(run_dir(&rack));
    let ran = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert_eq!(ran.status.code(), Some(1), "{said}");
    assert!(
        said.starts_with("error: no memory for VM nobody through ") && said.contains("(VM_UNKNOWN)"),
        "{said}"
    );
}
