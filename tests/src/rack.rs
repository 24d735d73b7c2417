//! Rack of real processes on this machine: one manager, agents and the command line, with separate
//! sockets and folders. Dropping the rack kills all its processes.

use std::{
    fs::{self, DirBuilder, File},
    io::{BufRead as _, BufReader},
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use local_rack::{AgentConfig, Emc, Host, Process, RackConfig};
use proto::v1::{self as wire, admin_client::AdminClient, scheduler_client::SchedulerClient};
use rustix::process::{Pid, Signal, kill_process};
use tonic::transport::{Channel, Endpoint};

/// Time limit of every wait. It is high because test machines are shared.
const WAIT_TIMEOUT: Duration = Duration::from_secs(180);
/// Interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Size and configuration of a rack.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Number of slices of each EMC.
    pub emcs: Vec<u32>,
    /// Indexes of the EMCs that each host is connected to.
    pub hosts: Vec<Vec<usize>>,
    /// Duration of a lease in seconds.
    pub lease_ttl_s: f64,
    /// Seconds from the end of a lease until the host is fenced, or `None` if hosts are not fenced.
    pub fence_after_s: Option<f64>,
    /// Local memory of each host, in MiB.
    pub local_mib: u64,
    /// Additional lines in rack.toml.
    pub rack_toml_extra: String,
    /// Additional lines in the section `[agent]` of every host.toml.
    pub agent_toml_extra: String,
}

impl Plan {
    /// Returns a plan of two hosts and two EMCs with `slices` slices each. Leases are short, and
    /// hosts are not fenced.
    pub fn small(slices: u32) -> Self {
        Self {
            emcs: vec![slices, slices],
            hosts: vec![vec![0, 1], vec![0, 1]],
            lease_ttl_s: 2.0,
            fence_after_s: None,
            local_mib: 256 << 10,
            rack_toml_extra: String::new(),
            agent_toml_extra: String::new(),
        }
    }
}

/// Rack of real processes. Dropping the value kills all processes.
#[derive(Debug)]
pub struct Rack {
    plan: Plan,
    // Fields are dropped in this order: agents end first, then the manager, then the folders are
    // removed.
    agents: Vec<Option<Process>>,
    manager: Option<Process>,
    dir: tempfile::TempDir,
    memory: tempfile::TempDir,
}

fn agent_program() -> PathBuf {
    programs_dir().join("host-agent")
}

/// Returns the folder of the programs, which is `TARN_BIN_DIR` if set. Otherwise, the programs are
/// built once.
pub fn programs_dir() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let packages = ["pool-manager", "host-agent", "vmm-plugin", "cli", "emulated-host"];
        local_rack::program_dir(&packages).expect("the programs are built")
    })
}

impl Rack {
    /// Writes the configuration files of a rack without starting processes.
    pub fn new(plan: Plan) -> Self {
        let dir =
            tempfile::Builder::new().prefix("tarn-test-").tempdir().expect("a temporary folder is created");
        let memory = tempfile::Builder::new()
            .prefix("tarn-test-")
            .tempdir_in("/dev/shm")
            .expect("a folder in memory is created");
        fs::set_permissions(memory.path(), fs::Permissions::from_mode(0o711))
            .expect("the folder is writable");
        let agents = plan.hosts.iter().map(|_| None).collect();
        let rack = Self { plan, dir, memory, manager: None, agents };
        rack.write_rack_toml(&rack.rack_toml());
        rack
    }

    /// Starts the manager and all agents of a rack, and waits until all hosts are up.
    pub async fn start(plan: Plan) -> Self {
        let mut rack = Self::new(plan);
        rack.start_manager().await;
        for host in 0..rack.agents.len() {
            rack.start_agent(host);
        }
        rack.wait_hosts_up().await;
        rack
    }

    /// Returns the folder of all files except the memory of slices.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the folder with the memory of an EMC.
    pub fn emc_dir(&self, emc: usize) -> PathBuf {
        self.memory.path().join(format!("emc{emc}"))
    }

    /// Returns the path of rack.toml.
    pub fn rack_toml_path(&self) -> PathBuf {
        self.dir.path().join("rack.toml")
    }

    /// Returns the address of the manager for `--endpoint`.
    pub fn endpoint(&self) -> String {
        format!("unix:{}", self.dir.path().join("manager.sock").display())
    }

    /// Returns the path of the socket on which the agent of a host provides memory to VMs.
    pub fn host_memory_socket(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("h{host}")).join("host-memory.sock")
    }

    /// Returns the text of rack.toml for the plan of this rack.
    pub fn rack_toml(&self) -> String {
        let Plan { emcs, hosts, lease_ttl_s, fence_after_s, local_mib, rack_toml_extra, .. } = &self.plan;
        let emc = |(emc, slices): (usize, &u32)| Emc {
            name: format!("emc{emc}"),
            slices: *slices,
            path: self.emc_dir(emc),
        };
        let host = |(host, emcs): (usize, &Vec<usize>)| Host {
            name: format!("h{host}"),
            cores: 64,
            local_mib: *local_mib,
            emcs: emcs.iter().map(|emc| format!("emc{emc}")).collect(),
        };
        let config = RackConfig {
            listen: self.endpoint(),
            store: "store".into(),
            state_dir: None,
            lease_ttl_s: *lease_ttl_s,
            fence_after_s: *fence_after_s,
            extra: rack_toml_extra.clone(),
            emcs: emcs.iter().enumerate().map(emc).collect(),
            hosts: hosts.iter().enumerate().map(host).collect(),
        };
        config.to_string()
    }

    /// Replaces the file rack.toml.
    pub fn write_rack_toml(&self, text: &str) {
        fs::write(self.rack_toml_path(), text).expect("the folder is writable");
    }

    fn log_path(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.log"))
    }

    /// Returns the log of a process, such as "manager" or "h0".
    pub fn read_log(&self, name: &str) -> String {
        fs::read_to_string(self.log_path(name)).unwrap_or_default()
    }

    /// Creates the store of the rack with `pool-manager init`, unless it exists.
    pub fn create_store(&self) {
        if !self.dir.path().join("store/ledger.redb").exists() {
            let (ok, output) = self.run_pool_manager(&["init"]);
            assert!(ok, "{output}");
        }
    }

    /// Starts the manager and waits until the manager replies to a request. Creates the store
    /// before the first start.
    pub async fn start_manager(&mut self) {
        self.create_store();
        let mut command = Command::new(programs_dir().join("pool-manager"));
        command.args(["serve", "--config"]).arg(self.rack_toml_path());
        self.manager = Some(self.start_process("manager", &mut command));
        let start = Instant::now();
        while self.try_get_rack().await.is_none() {
            self.manager
                .as_mut()
                .expect("the manager was started")
                .check_running()
                .expect("the manager runs");
            assert!(
                start.elapsed() < WAIT_TIMEOUT,
                "the manager does not reply: {}",
                self.read_log("manager")
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn try_get_rack(&self) -> Option<wire::Rack> {
        let channel = Endpoint::from_shared(self.endpoint()).ok()?.connect().await.ok()?;
        Some(AdminClient::new(channel).get_rack(wire::GetRackRequest {}).await.ok()?.into_inner())
    }

    /// Returns the process id of the manager.
    pub fn manager_pid(&self) -> u32 {
        self.manager.as_ref().expect("the process was started").pid()
    }

    /// Kills the manager process.
    pub fn kill_manager(&mut self) {
        self.manager = None;
    }

    /// Stops the manager with SIGTERM and waits for a successful exit.
    pub fn stop_manager(&mut self) {
        let mut manager = self.manager.take().expect("the process was started");
        manager.signal(Signal::TERM);
        let status = manager.wait().expect("the process is a child");
        assert!(status.success(), "the manager ended with {status}: {}", self.read_log("manager"));
    }

    /// Sends a signal to the manager.
    pub fn signal_manager(&self, signal: Signal) {
        self.manager.as_ref().expect("the process was started").signal(signal);
    }

    /// Starts the agent of a host.
    pub fn start_agent(&mut self, host: usize) {
        let dir = self.dir.path().join(format!("h{host}"));
        self.agents[host] = Some(self.spawn_agent(host, &dir, &mut Command::new(agent_program())));
    }

    /// Starts the agent of a host through another program, to whose command line the agent's is added.
    pub fn start_agent_through(&mut self, host: usize, launcher: &mut Command) {
        let dir = self.dir.path().join(format!("h{host}"));
        self.agents[host] = Some(self.spawn_agent(host, &dir, launcher.arg(agent_program())));
    }

    /// Starts a second agent for a host, with a separate runtime directory and a copy of the token.
    /// With `private_run`, the agent has its own `/run`, so that it cannot detect the lock of the
    /// first agent. Dropping the returned process kills the agent.
    pub fn start_second_agent(&self, host: usize, private_run: bool) -> Process {
        let dir = self.dir.path().join(format!("h{host}-second"));
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--mount", "sh", "-c"]);
        unshare.arg("mount -t tmpfs none /run && exec \"$0\" \"$@\"").arg(agent_program());
        let mut agent = Command::new(agent_program());
        self.spawn_agent(host, &dir, if private_run { &mut unshare } else { &mut agent })
    }

    /// Returns the path of the token file of a host.
    pub fn token_file(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("store/tokens/h{host}.token"))
    }

    /// Starts an agent with a configuration and a copy of the host's token in `dir`. `program` is the
    /// command without the arguments of the agent.
    fn spawn_agent(&self, host: usize, dir: &Path, program: &mut Command) -> Process {
        // The mode does not depend on the umask: agents reject folders that their group can write.
        DirBuilder::new().recursive(true).mode(0o755).create(dir).expect("the folder is writable");
        let token = dir.join("token");
        fs::copy(self.token_file(host), &token).expect("the manager created the token");
        let text = AgentConfig {
            host: format!("h{host}"),
            manager: self.endpoint(),
            runtime_dir: dir.to_owned(),
            token_file: token,
            extra: self.plan.agent_toml_extra.clone(),
        };
        let config = dir.join("host.toml");
        fs::write(&config, text.to_string()).expect("the folder is writable");
        let name = dir.file_name().expect("a folder has a name").to_string_lossy();
        self.start_process(&name, program.args(["serve", "--config"]).arg(config))
    }

    fn start_process(&self, name: &str, command: &mut Command) -> Process {
        Process::start(name, command, self.log_path(name)).expect("the process starts")
    }

    /// Changes the lines that the next started agents have at the end of their configuration.
    pub fn set_agent_toml_extra(&mut self, lines: &str) {
        self.plan.agent_toml_extra = lines.to_owned();
    }

    /// Kills the agent of a host.
    pub fn kill_agent(&mut self, host: usize) {
        self.agents[host] = None;
    }

    /// Sends a signal to the agent of a host.
    pub fn signal_agent(&self, host: usize, signal: Signal) {
        self.agents[host].as_ref().expect("the process was started").signal(signal);
    }

    /// Waits until the hosts of all started agents are up.
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

    /// Waits until a condition holds. Fails with the logs after [`WAIT_TIMEOUT`].
    pub async fn wait_for(&self, event: &str, condition: impl AsyncFn(&Self) -> bool) {
        let start = Instant::now();
        while !condition(self).await {
            let logs = || {
                ["manager", "h0", "h1"].map(|name| format!("--- {name}\n{}", self.read_log(name))).join("\n")
            };
            assert!(start.elapsed() < WAIT_TIMEOUT, "timed out waiting for {event}\n{}", logs());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn channel(&self) -> Channel {
        let endpoint = Endpoint::from_shared(self.endpoint()).expect("the endpoint is a valid address");
        endpoint.connect().await.expect("the manager listens")
    }

    /// Returns a client of the Scheduler service.
    pub async fn scheduler(&self) -> SchedulerClient<Channel> {
        SchedulerClient::new(self.channel().await)
    }

    /// Returns a client of the Admin service.
    pub async fn admin(&self) -> AdminClient<Channel> {
        AdminClient::new(self.channel().await)
    }

    /// Opens a new connection to the manager.
    pub async fn open_channel(&self) -> Channel {
        self.channel().await
    }

    /// Returns all hosts of the rack.
    pub async fn hosts(&self) -> Vec<wire::Host> {
        let response = self.admin().await.list_hosts(wire::ListHostsRequest {}).await;
        response.expect("the manager replies").into_inner().hosts
    }

    /// Returns all slices of the rack.
    pub async fn slices(&self) -> Vec<wire::Slice> {
        let response = self.admin().await.list_slices(wire::ListSlicesRequest::default()).await;
        response.expect("the manager replies").into_inner().slices
    }

    /// Returns all active reservations.
    pub async fn reservations(&self) -> Vec<wire::Reservation> {
        let response = self.admin().await.list_reservations(wire::ListReservationsRequest::default()).await;
        response.expect("the manager replies").into_inner().reservations
    }

    /// Waits until every slice is free.
    pub async fn wait_all_slices_free(&self) {
        self.wait_for("all slices to be free", async |rack| {
            rack.slices().await.iter().all(|slice| slice.state() == wire::SliceState::Free)
        })
        .await;
    }

    /// Runs `tarn` with the endpoint of this rack.
    pub fn tarn(&self, args: &[&str]) -> Output {
        let mut command = Command::new(programs_dir().join("tarn"));
        command.args(args).arg("--endpoint").arg(self.endpoint()).stdin(Stdio::null());
        command.output().expect("tarn runs")
    }

    /// Runs a command of `pool-manager` with the configuration of this rack. Returns whether the
    /// command succeeded, and its stdout and stderr.
    pub fn run_pool_manager(&self, args: &[&str]) -> (bool, String) {
        let (command, rest) = args.split_first().expect("the arguments contain a command");
        let mut run = Command::new(programs_dir().join("pool-manager"));
        run.arg(command).arg("--config").arg(self.rack_toml_path()).args(rest);
        let run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut run = run.expect("pool-manager starts");
        let start = Instant::now();
        while run.try_wait().expect("the process is a child").is_none() {
            if start.elapsed() > WAIT_TIMEOUT {
                run.kill().expect("the process is a child");
                panic!("pool-manager does not end: {:?}", run.wait_with_output());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let output = run.wait_with_output().expect("the process is a child");
        let texts = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.success(), texts.concat())
    }

    /// Starts a test VMM for a VM. The process gets memory from the agent of a host, checks that
    /// the memory is zero, writes to the memory, and runs until the end of its stdin.
    pub fn start_vm(&self, host: usize, vm: &str) -> Child {
        start_test_vmm(&self.host_memory_socket(host), vm, &self.log_path(&format!("vm-{vm}")))
    }
}

/// Starts a test VMM, see [`Rack::start_vm`], at the socket of an agent.
pub fn start_test_vmm(socket: &Path, vm: &str, log: &Path) -> Child {
    let log = File::options().create(true).append(true).open(log).expect("the folder is writable");
    let mut command = Command::new(programs_dir().join("tarn"));
    command.args(["test-vmm", "--socket"]).arg(socket).args(["--vm", vm]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
    command.spawn().expect("the test VMM starts")
}

/// Waits for a line on the stdout of a process.
pub fn wait_for_line(child: &mut Child) {
    let mut line = String::new();
    let stdout = child.stdout.as_mut().expect("stdout is a pipe");
    BufReader::new(stdout).read_line(&mut line).expect("the output is UTF-8");
    assert!(!line.is_empty(), "the process ended without output");
}

/// Sends a signal to a process.
pub fn send_signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("a process id fits i32"))
        .expect("a process id is not zero");
    kill_process(pid, signal).expect("the process is a child");
}

/// Returns a reserve request for slices, with default values in all other fields.
pub fn reserve_request(host: &str, vm: &str, slices: u64, request_id: &str) -> wire::ReserveRequest {
    wire::ReserveRequest {
        request_id: request_id.into(),
        host: host.into(),
        vm: vm.into(),
        pool_bytes: slices << 30,
        ..Default::default()
    }
}

/// Returns a reference to the reservation of a VM, by the name of the VM.
pub fn vm_ref(vm: &str) -> Option<wire::ReservationRef> {
    Some(wire::ReservationRef { reservation: String::new(), vm: vm.into() })
}

/// Returns a reference to a reservation by id.
pub fn reservation_ref(id: &str) -> Option<wire::ReservationRef> {
    Some(wire::ReservationRef { reservation: id.into(), vm: String::new() })
}
