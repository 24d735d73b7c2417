//! Rack with several managers, whose ledger is in a cluster of etcd, and one agent. All are processes on this machine.
//! Dropping the rack kills them.

use std::{
    fs::{self, DirBuilder, Permissions},
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use local_rack::{AgentConfig, Emc, Host, Process, RackConfig};
use proto::v1::{
    admin_client::AdminClient, scheduler_client::SchedulerClient, scheduler_server::SERVICE_NAME,
};
use rustix::process::Signal;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{
    etcd_cluster::EtcdCluster,
    rack::{programs_dir, start_test_vmm},
};

/// Time limit of every wait. It is high because test machines are shared.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Time in which a running manager answers a health check.
const HEALTH_TIMEOUT: Duration = Duration::from_millis(500);
/// Interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Rack of real processes.
#[derive(Debug)]
pub struct ElectedRack {
    // Fields are dropped in this order: the agent and the managers end before etcd and the folders.
    agent: Option<Process>,
    managers: Vec<Option<Process>>,
    /// Cluster that stores the ledger.
    pub etcd: EtcdCluster,
    lease_s: u64,
    dir: tempfile::TempDir,
    memory: tempfile::TempDir,
}

/// Number of slices of the rack's EMC.
pub const SLICES: u32 = 64;

impl ElectedRack {
    /// Starts a cluster of `members`, writes the configuration of `managers` managers, and creates the rack.
    pub fn new(members: usize, managers: usize, lease_s: u64) -> Self {
        let rack = Self::prepare(EtcdCluster::start(members, &[]), managers, lease_s);
        let (ok, output) = rack.run_pool_manager(0, &["init"]);
        assert!(ok, "{output}");
        rack
    }

    /// Writes the configuration of `managers` managers, and creates no rack.
    pub fn prepare(etcd: EtcdCluster, managers: usize, lease_s: u64) -> Self {
        let temporary = || tempfile::Builder::new().prefix("tarn-test-").to_owned();
        let rack = Self {
            agent: None,
            managers: (0..managers).map(|_| None).collect(),
            etcd,
            lease_s,
            dir: temporary().tempdir().expect("a temporary folder is created"),
            memory: temporary().tempdir_in("/dev/shm").expect("a folder in memory is created"),
        };
        fs::set_permissions(rack.memory.path(), Permissions::from_mode(0o711))
            .expect("the folder is writable");
        for manager in 0..managers {
            rack.write_config(manager, &rack.etcd_store("/tarn"), "");
        }
        rack
    }

    /// Starts a rack with its managers and its agent, and waits until the host is up.
    pub async fn start(members: usize, managers: usize, lease_s: u64) -> Self {
        let mut rack = Self::new(members, managers, lease_s);
        (0..managers).for_each(|manager| rack.start_manager(manager));
        rack.wait_for_leader().await;
        rack.start_agent();
        rack.wait_for_host().await;
        rack
    }

    /// Returns `manager.store` for a prefix in this cluster.
    pub fn etcd_store(&self, prefix: &str) -> String {
        let members: Vec<_> = self
            .etcd
            .endpoints()
            .iter()
            .map(|uri| uri.split_once("://").expect("a URI has a scheme").1.to_owned())
            .collect();
        format!("etcd://{}{prefix}", members.join(","))
    }

    /// Returns the folder of all files except the memory of slices.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the path of the configuration of a manager.
    pub fn config_path(&self, manager: usize) -> PathBuf {
        self.dir.path().join(format!("m{manager}.toml"))
    }

    /// Writes the configuration of a manager, with further lines in section `[etcd]` if `store` is in etcd.
    pub fn write_config(&self, manager: usize, store: &str, etcd: &str) {
        let is_in_etcd = store.starts_with("etcd:");
        let etcd = format!("[etcd]\nname = \"m{manager}\"\nlease_s = {}\n{etcd}", self.lease_s);
        let config = RackConfig {
            listen: self.uri(manager),
            store: store.into(),
            state_dir: is_in_etcd.then(|| "state".into()),
            lease_ttl_s: 10.0,
            fence_after_s: None,
            extra: if is_in_etcd { etcd } else { String::new() },
            emcs: vec![Emc { name: "emc0".into(), slices: SLICES, path: self.memory.path().join("emc0") }],
            hosts: vec![Host {
                name: "h0".into(),
                cores: 64,
                local_mib: 256 << 10,
                emcs: vec!["emc0".into()],
            }],
        };
        fs::write(self.config_path(manager), config.to_string()).expect("the folder is writable");
    }

    /// Returns the address of a manager.
    pub fn uri(&self, manager: usize) -> String {
        format!("unix:{}", self.dir.path().join(format!("m{manager}.sock")).display())
    }

    /// Returns the addresses of all managers for `--endpoint`.
    pub fn endpoint(&self) -> String {
        (0..self.managers.len()).map(|manager| self.uri(manager)).collect::<Vec<_>>().join(",")
    }

    /// Starts a manager, which becomes a standby or the leader.
    pub fn start_manager(&mut self, manager: usize) {
        let mut command = Command::new(programs_dir().join("pool-manager"));
        command.args(["serve", "--config"]).arg(self.config_path(manager));
        let (name, log) = (format!("m{manager}"), self.dir.path().join(format!("m{manager}.log")));
        self.managers[manager] = Some(Process::start(&name, &mut command, log).expect("the manager starts"));
    }

    /// Kills a manager, if it runs.
    pub fn kill_manager(&mut self, manager: usize) {
        self.managers[manager] = None;
    }

    /// Sends a signal to a running manager.
    pub fn signal_manager(&self, manager: usize, signal: Signal) {
        self.managers[manager].as_ref().expect("the manager runs").signal(signal);
    }

    /// Pauses a running manager, and waits until none of its threads runs.
    pub fn pause_manager(&self, manager: usize) {
        self.signal_manager(manager, Signal::STOP);
        let process = self.managers[manager].as_ref().expect("the manager runs");
        let tasks = PathBuf::from(format!("/proc/{}/task", process.pid()));
        let is_stopped = |task: std::io::Result<fs::DirEntry>| {
            let stat = fs::read_to_string(task.expect("the folder is readable").path().join("stat"));
            // The state follows the name of the thread in parentheses.
            stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
        };
        let start = Instant::now();
        while !fs::read_dir(&tasks).expect("the process exists").all(is_stopped) {
            assert!(start.elapsed() < WAIT_TIMEOUT, "the manager does not stop");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until a manager has ended, and returns whether it was successful.
    pub fn wait_for_end(&mut self, manager: usize) -> bool {
        let mut process = self.managers[manager].take().expect("the manager was started");
        process.wait().expect("the process is a child").success()
    }

    /// Returns the names of the files of all grants of the EMC.
    pub fn slice_files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.memory.path().join("emc0/slices")).expect("the EMC exists");
        let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("the folder is readable").file_name();
        entries.map(|entry| name(entry).into_string().expect("the name is ASCII")).collect()
    }

    /// Returns the log of a process, such as "m0".
    pub fn read_log(&self, name: &str) -> String {
        fs::read_to_string(self.dir.path().join(format!("{name}.log"))).unwrap_or_default()
    }

    /// Starts the agent of the host.
    pub fn start_agent(&mut self) {
        let dir = self.dir.path().join("h0");
        // The mode does not depend on the umask: agents reject folders that their group can write.
        DirBuilder::new().recursive(true).mode(0o755).create(&dir).expect("the folder is writable");
        let config = AgentConfig {
            host: "h0".into(),
            manager: self.endpoint(),
            runtime_dir: dir.clone(),
            token_file: self.dir.path().join("state/tokens/h0.token"),
            extra: String::new(),
        };
        let path = dir.join("host.toml");
        fs::write(&path, config.to_string()).expect("the folder is writable");
        let mut command = Command::new(programs_dir().join("host-agent"));
        command.args(["serve", "--config"]).arg(path);
        let log = self.dir.path().join("h0.log");
        self.agent = Some(Process::start("h0", &mut command, log).expect("the agent starts"));
    }

    /// Starts a test VMM for a VM on the host, see [`crate::rack::Rack::start_vm`].
    pub fn start_vm(&self, vm: &str) -> Child {
        let socket = self.dir.path().join("h0/host-memory.sock");
        start_test_vmm(&socket, vm, &self.dir.path().join(format!("vm-{vm}.log")))
    }

    /// Kills the agent of the host.
    pub fn kill_agent(&mut self) {
        self.agent = None;
    }

    /// Returns the manager that is the leader, if there is one.
    pub async fn leader(&self) -> Option<usize> {
        for (manager, process) in self.managers.iter().enumerate() {
            let check = async {
                let channel = self.try_connect(manager).await?;
                let request = HealthCheckRequest { service: SERVICE_NAME.to_owned() };
                let status = HealthClient::new(channel).check(request).await.ok()?.into_inner().status();
                (status == ServingStatus::Serving).then_some(())
            };
            if process.is_some() && tokio::time::timeout(HEALTH_TIMEOUT, check).await.ok().flatten().is_some()
            {
                return Some(manager);
            }
        }
        None
    }

    /// Waits until a manager is the leader, and returns it.
    pub async fn wait_for_leader(&self) -> usize {
        self.wait_for_leader_after(None).await
    }

    /// Waits until another manager than `earlier` is the leader, and returns it.
    pub async fn wait_for_leader_after(&self, earlier: Option<usize>) -> usize {
        let mut leader = None;
        self.wait_for("a leader", async || {
            leader = self.leader().await.filter(|leader| Some(*leader) != earlier);
            leader.is_some()
        })
        .await;
        leader.expect("was awaited")
    }

    /// Waits until the host is up at the leader.
    pub async fn wait_for_host(&self) {
        self.wait_for("the host to be up", async || {
            let output = self.tarn(&["get", "hosts", "--output", "json"]);
            String::from_utf8_lossy(&output.stdout).contains("\"state\": \"up\"")
        })
        .await;
    }

    /// Waits until a condition holds. `what` completes "waiting for".
    ///
    /// # Panics
    /// Panics with the logs of all processes if the condition does not hold in time.
    pub async fn wait_for(&self, what: &str, mut condition: impl AsyncFnMut() -> bool) {
        let start = Instant::now();
        while !condition().await {
            assert!(start.elapsed() < WAIT_TIMEOUT, "timed out waiting for {what}\n{}", self.logs());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns the ends of the logs of all processes.
    pub fn logs(&self) -> String {
        let names = (0..self.managers.len()).map(|manager| format!("m{manager}")).chain(["h0".to_owned()]);
        let tail = |name: String| {
            let log = self.read_log(&name);
            let start = log.len().saturating_sub(4096);
            format!("--- {name}\n{}", String::from_utf8_lossy(&log.as_bytes()[start..]))
        };
        names.map(tail).collect::<Vec<_>>().join("\n")
    }

    async fn try_connect(&self, manager: usize) -> Option<Channel> {
        Endpoint::from_shared(self.uri(manager)).ok()?.connect().await.ok()
    }

    /// Connects to a manager.
    pub async fn connect(&self, manager: usize) -> Channel {
        self.try_connect(manager).await.expect("the manager listens")
    }

    /// Returns a client of the Scheduler service of a manager.
    pub async fn scheduler(&self, manager: usize) -> SchedulerClient<Channel> {
        SchedulerClient::new(self.connect(manager).await)
    }

    /// Returns a client of the Admin service of a manager.
    pub async fn admin(&self, manager: usize) -> AdminClient<Channel> {
        AdminClient::new(self.connect(manager).await)
    }

    /// Runs `tarn` with the addresses of all managers.
    pub fn tarn(&self, args: &[&str]) -> Output {
        let mut command = Command::new(programs_dir().join("tarn"));
        command.args(args).arg("--endpoint").arg(self.endpoint()).stdin(Stdio::null());
        command.output().expect("tarn runs")
    }

    /// Runs `tarn`, which must be successful, and returns its output.
    pub fn tarn_output(&self, args: &[&str]) -> String {
        let output = self.tarn(args);
        assert!(output.status.success(), "{args:?}: {output:?}\n{}", self.logs());
        String::from_utf8(output.stdout).expect("the output is UTF-8")
    }

    /// Runs a command of `pool-manager` with the configuration of a manager. Returns whether it was successful, and
    /// its output.
    pub fn run_pool_manager(&self, manager: usize, args: &[&str]) -> (bool, String) {
        let (command, rest) = args.split_first().expect("the arguments contain a command");
        let mut run = Command::new(programs_dir().join("pool-manager"));
        run.arg(command).arg("--config").arg(self.config_path(manager)).args(rest);
        let output = run.stdin(Stdio::null()).output().expect("pool-manager runs");
        let texts = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.success(), texts.concat())
    }
}
