//! A rack of real processes on this machine: one manager, agents, the command line, on sockets and directories of its
//! own. Everything ends when it is dropped; processes are only ever ended by their id.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use proto::v1::{self as wire, admin_client::AdminClient, scheduler_client::SchedulerClient};
use rustix::process::{Pid, Signal, kill_process};
use tonic::transport::{Channel, Endpoint};

/// How long anything may take before a test gives up on it. Generous: the machines are shared.
const PATIENCE: Duration = Duration::from_secs(180);
/// Between two looks at a condition.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Description of a rack.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Slices of each EMC.
    pub emcs: Vec<u32>,
    /// For each host the EMCs it is wired to, by index.
    pub hosts: Vec<Vec<usize>>,
    /// Seconds of a lease.
    pub lease_ttl_s: f64,
    /// Seconds of silence after the lease until a host is fenced, or never.
    pub fence_after_s: Option<f64>,
    /// Local memory of each host.
    pub local_mib: u64,
    /// Lines to add to rack.toml.
    pub more: String,
    /// Lines to add to the section `[agent]` of every host.toml.
    pub agents_more: String,
}

impl Plan {
    /// Two hosts, both wired to two EMCs of so many slices; short leases, no fencing.
    pub fn small(slices: u32) -> Self {
        Self {
            emcs: vec![slices, slices],
            hosts: vec![vec![0, 1], vec![0, 1]],
            lease_ttl_s: 2.0,
            fence_after_s: None,
            local_mib: 256 << 10,
            more: String::new(),
            agents_more: String::new(),
        }
    }
}

/// A rack of real processes.
#[derive(Debug)]
pub struct Rack {
    plan: Plan,
    dir: tempfile::TempDir,
    memory: tempfile::TempDir,
    manager: Option<Child>,
    agents: Vec<Option<Child>>,
}

/// Folder of the programs: `TARN_BIN_DIR`, or built once.
pub fn programs() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(ready) = std::env::var_os("TARN_BIN_DIR") {
            return ready.into();
        }
        let mut build = Command::new(env!("CARGO"));
        build.args([
            "build",
            "--quiet",
            "-p",
            "pool-manager",
            "-p",
            "host-agent",
            "-p",
            "vmm-plugin",
            "-p",
            "cli",
            "-p",
            "emulated-host",
        ]);
        assert!(build.status().expect("cargo runs").success(), "the programs do not build");
        let own = std::env::current_exe().expect("a test has a path");
        let profile =
            own.ancestors().find(|dir| dir.join("deps").is_dir() && dir.join("pool-manager").is_file());
        profile.expect("programs lie two folders above their tests").to_owned()
    })
}

impl Rack {
    /// Writes the files of a rack; starts nothing.
    pub fn new(plan: Plan) -> Self {
        let dir = tempfile::Builder::new().prefix("tarn-test-").tempdir().expect("a temporary folder");
        let memory =
            tempfile::Builder::new().prefix("tarn-test-").tempdir_in("/dev/shm").expect("a folder in memory");
        fs::set_permissions(memory.path(), fs::Permissions::from_mode(0o711)).expect("ours to set");
        let agents = plan.hosts.iter().map(|_| None).collect();
        let rack = Self { plan, dir, memory, manager: None, agents };
        rack.write_rack_toml(&rack.rack_toml());
        rack
    }

    /// Starts a rack with its manager and agents.
    pub async fn start(plan: Plan) -> Self {
        let mut rack = Self::new(plan);
        rack.start_manager().await;
        for host in 0..rack.agents.len() {
            rack.start_agent(host);
        }
        rack.wait_hosts_up().await;
        rack
    }

    /// Folder of everything but slices.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Where an EMC keeps its slices.
    pub fn emc_dir(&self, emc: usize) -> PathBuf {
        self.memory.path().join(format!("emc{emc}"))
    }

    /// Where rack.toml is.
    pub fn rack_toml_path(&self) -> PathBuf {
        self.dir.path().join("rack.toml")
    }

    /// The address for `--endpoint`.
    pub fn endpoint(&self) -> String {
        format!("unix:{}", self.dir.path().join("manager.sock").display())
    }

    /// Where a host's agent hands out memory.
    pub fn host_memory(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("h{host}")).join("host-memory.sock")
    }

    /// rack.toml as the plan has it.
    pub fn rack_toml(&self) -> String {
        use std::fmt::Write as _;
        let fence = self.plan.fence_after_s.map_or("\"never\"".to_owned(), |s| s.to_string());
        let mut text = format!(
            "[manager]\nlisten = \"{}\"\nstore = \"store\"\n[lease]\nttl_s = {}\nfence_after_s = {fence}\n{}\n",
            self.endpoint(),
            self.plan.lease_ttl_s,
            self.plan.more,
        );
        for (emc, slices) in self.plan.emcs.iter().enumerate() {
            let path = self.emc_dir(emc);
            write!(
                text,
                "[[emc]]\nname = \"emc{emc}\"\nslices = {slices}\ndriver = \"emulated\"\npath = {path:?}\n"
            )
            .expect("text grows");
        }
        for (host, wires) in self.plan.hosts.iter().enumerate() {
            let wires: Vec<_> = wires.iter().map(|emc| format!("emc{emc}")).collect();
            write!(
                text,
                "[[host]]\nname = \"h{host}\"\ncores = 64\nlocal_mib = {}\nemcs = {wires:?}\n",
                self.plan.local_mib
            )
            .expect("text grows");
        }
        text
    }

    /// Replaces rack.toml.
    pub fn write_rack_toml(&self, text: &str) {
        fs::write(self.rack_toml_path(), text).expect("the folder is ours");
    }

    fn log(&self, name: &str) -> Stdio {
        let path = self.dir.path().join(format!("{name}.log"));
        fs::OpenOptions::new().create(true).append(true).open(path).expect("the folder is ours").into()
    }

    /// Returns the log of a process: "manager" or "h0".
    pub fn logged(&self, name: &str) -> String {
        fs::read_to_string(self.dir.path().join(format!("{name}.log"))).unwrap_or_default()
    }

    /// Starts the manager and waits until it answers.
    pub async fn start_manager(&mut self) {
        let child = Command::new(programs().join("pool-manager"))
            .args(["serve", "--config"])
            .arg(self.rack_toml_path())
            .stderr(self.log("manager"))
            .stdout(Stdio::null())
            .stdin(Stdio::null())
            .spawn();
        self.manager = Some(child.expect("the manager starts"));
        let began = Instant::now();
        while self.try_admin().await.is_none() {
            let ended = self.manager.as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "the manager ended: {}", self.logged("manager"));
            assert!(began.elapsed() < PATIENCE, "the manager does not answer: {}", self.logged("manager"));
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn try_admin(&self) -> Option<wire::Rack> {
        let channel = Endpoint::from_shared(self.endpoint()).ok()?.connect().await.ok()?;
        Some(AdminClient::new(channel).get_rack(wire::GetRackRequest {}).await.ok()?.into_inner())
    }

    /// The manager's process id.
    pub fn manager_pid(&self) -> u32 {
        self.manager.as_ref().expect("it was started").id()
    }

    /// Ends the manager at once, as a crash does.
    pub fn kill_manager(&mut self) {
        self.manager.take().into_iter().for_each(end);
    }

    /// Asks the manager to end, and waits until it has.
    pub fn stop_manager(&mut self) {
        let mut child = self.manager.take().expect("it was started");
        signal(&child, Signal::TERM);
        let status = child.wait().expect("it is our child");
        assert!(status.success(), "the manager ended with {status}: {}", self.logged("manager"));
    }

    /// Sends the manager a signal.
    pub fn signal_manager(&self, what: Signal) {
        signal(self.manager.as_ref().expect("it was started"), what);
    }

    /// Starts a host's agent.
    pub fn start_agent(&mut self, host: usize) {
        let dir = self.dir.path().join(format!("h{host}"));
        self.agents[host] = Some(self.spawn_agent(host, &dir, &self.token_file(host)));
    }

    /// Starts another agent for a host, with a runtime directory of its own. The caller ends it.
    pub fn start_second_agent(&self, host: usize, token_file: &Path) -> Child {
        self.spawn_agent(host, &self.dir.path().join(format!("h{host}-second")), token_file)
    }

    /// The file with a host's token.
    pub fn token_file(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("store/tokens/h{host}.token"))
    }

    fn spawn_agent(&self, host: usize, dir: &Path, token: &Path) -> Child {
        fs::create_dir_all(dir).expect("the folder is ours");
        let text = format!(
            "[agent]\nhost = \"h{host}\"\nmanager = \"{}\"\nruntime_dir = {dir:?}\ntoken_file = {token:?}\n\
             {}\n[backend]\nkind = \"emulated\"\n",
            self.endpoint(),
            self.plan.agents_more,
        );
        let config = dir.join("host.toml");
        fs::write(&config, text).expect("the folder is ours");
        let log = dir.file_name().expect("a folder has a name").to_string_lossy().into_owned();
        let child = Command::new(programs().join("host-agent"))
            .args(["serve", "--config"])
            .arg(config)
            .stderr(self.log(&log))
            .stdout(Stdio::null())
            .stdin(Stdio::null())
            .spawn();
        child.expect("an agent starts")
    }

    /// Ends a host's agent at once, as a crash does.
    pub fn kill_agent(&mut self, host: usize) {
        self.agents[host].take().into_iter().for_each(end);
    }

    /// Sends a host's agent a signal.
    pub fn signal_agent(&self, host: usize, what: Signal) {
        signal(self.agents[host].as_ref().expect("it was started"), what);
    }

    /// Waits until every started agent is connected.
    pub async fn wait_hosts_up(&self) {
        let started: Vec<String> = (0..self.agents.len())
            .filter(|host| self.agents[*host].is_some())
            .map(|host| format!("h{host}"))
            .collect();
        self.wait_for("all hosts to be up", async |rack| {
            let hosts = rack.hosts().await;
            started
                .iter()
                .all(|name| hosts.iter().any(|h| h.host == *name && h.state() == wire::HostState::Up))
        })
        .await;
    }

    /// Waits until a condition holds; looks again and again, and gives up after a long while.
    pub async fn wait_for(&self, what: &str, holds: impl AsyncFn(&Self) -> bool) {
        let began = Instant::now();
        while !holds(self).await {
            let logs = || {
                ["manager", "h0", "h1"].map(|name| format!("--- {name}\n{}", self.logged(name))).join("\n")
            };
            assert!(began.elapsed() < PATIENCE, "waited too long for {what}\n{}", logs());
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn channel(&self) -> Channel {
        let endpoint = Endpoint::from_shared(self.endpoint()).expect("a valid address");
        endpoint.connect().await.expect("the manager listens")
    }

    /// A scheduler's way in.
    pub async fn scheduler(&self) -> SchedulerClient<Channel> {
        SchedulerClient::new(self.channel().await)
    }

    /// An operator's way in.
    pub async fn admin(&self) -> AdminClient<Channel> {
        AdminClient::new(self.channel().await)
    }

    /// Anybody's way in.
    pub async fn any_client(&self) -> Channel {
        self.channel().await
    }

    /// All hosts, as an operator sees them.
    pub async fn hosts(&self) -> Vec<wire::Host> {
        let listed = self.admin().await.list_hosts(wire::ListHostsRequest {}).await;
        listed.expect("the manager answers").into_inner().hosts
    }

    /// All slices, as an operator sees them.
    pub async fn slices(&self) -> Vec<wire::Slice> {
        let listed = self.admin().await.list_slices(wire::ListSlicesRequest::default()).await;
        listed.expect("the manager answers").into_inner().slices
    }

    /// Active reservations, as an operator sees them.
    pub async fn reservations(&self) -> Vec<wire::Reservation> {
        let listed = self.admin().await.list_reservations(wire::ListReservationsRequest::default()).await;
        listed.expect("the manager answers").into_inner().reservations
    }

    /// Waits until every slice is free.
    pub async fn wait_all_free(&self) {
        self.wait_for("all slices to be free", async |rack| {
            rack.slices().await.iter().all(|slice| slice.state() == wire::SliceState::Free)
        })
        .await;
    }

    /// Runs `tarn` against this rack.
    pub fn tarn(&self, args: &[&str]) -> Output {
        let mut command = Command::new(programs().join("tarn"));
        command.args(args).arg("--endpoint").arg(self.endpoint()).stdin(Stdio::null());
        command.output().expect("tarn runs")
    }

    /// Runs a command of `pool-manager` that should end, with this rack's configuration; whether it succeeded, and its output.
    pub fn pool_manager(&self, args: &[&str]) -> (bool, String) {
        let (command, rest) = args.split_first().expect("a command");
        let mut run = Command::new(programs().join("pool-manager"));
        run.arg(command).arg("--config").arg(self.rack_toml_path()).args(rest);
        let run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut run = run.expect("pool-manager starts");
        let began = Instant::now();
        while run.try_wait().expect("it is our child").is_none() {
            if began.elapsed() > PATIENCE {
                run.kill().expect("it is our child");
                panic!("it does not end: {:?}", run.wait_with_output());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        let output = run.wait_with_output().expect("it is our child");
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.success(), said.concat())
    }

    /// Starts a VM's stand-in: a process that fetches its memory from a host's agent, checks that it is zero, writes to
    /// it, and lives until its standard input ends.
    pub fn start_vm(&self, host: usize, vm: &str) -> Child {
        let child = Command::new(programs().join("tarn"))
            .args(["stand-in-vm", "--socket"])
            .arg(self.host_memory(host))
            .args(["--vm", vm])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(self.log(&format!("vm-{vm}")))
            .spawn();
        child.expect("a stand-in starts")
    }
}

/// Waits for a line on a process's standard output.
pub fn wait_for_line(child: &mut Child) {
    let mut line = String::new();
    let stdout = child.stdout.as_mut().expect("a pipe was asked for");
    BufReader::new(stdout).read_line(&mut line).expect("it speaks UTF-8");
    assert!(!line.is_empty(), "it ended without a word");
}

/// Sends a process a signal.
pub fn signal(child: &Child, what: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("a process id")).expect("not zero");
    kill_process(pid, what).expect("our child");
}

fn end(mut child: Child) {
    let _ = child.kill(); // it may have ended by itself
    let _ = child.wait();
}

impl Drop for Rack {
    fn drop(&mut self) {
        self.agents.iter_mut().filter_map(Option::take).for_each(end);
        self.kill_manager();
    }
}

/// Returns a request for slices with default values.
pub fn reserve(host: &str, vm: &str, slices: u64, request_id: &str) -> wire::ReserveRequest {
    wire::ReserveRequest {
        request_id: request_id.into(),
        host: host.into(),
        vm: vm.into(),
        pool_bytes: slices << 30,
        ..Default::default()
    }
}

/// Names a reservation by its VM.
pub fn by_vm(vm: &str) -> Option<wire::ReservationRef> {
    Some(wire::ReservationRef { reservation: String::new(), vm: vm.into() })
}

/// Names a reservation by its id.
pub fn by_id(id: &str) -> Option<wire::ReservationRef> {
    Some(wire::ReservationRef { reservation: id.into(), vm: String::new() })
}
