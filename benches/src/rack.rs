//! Rack of real processes with default settings: one `pool-manager serve`, and one `host-agent
//! serve` per host. EMCs are emulated in memory. The store of the manager is on a disk.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use local_rack::{AgentConfig, Emc, Host, Process, ProcessError, RackConfig};
use proto::bearer::{Bearer, ClientChannel};
use proto::v1::{
    self as wire, HostState, ReservationRef, admin_client::AdminClient, scheduler_client::SchedulerClient,
};
use tempfile::TempDir;
use tonic::Code;

use crate::{
    failure::Failure,
    load::Writer,
    loopback::{connect, free_port, wait_until},
    process,
    programs::Programs,
};

/// Folder in memory for emulated EMCs and for the runtime folders of the agents.
const MEMORY_DIR: &str = "/dev/shm";
/// Maximum time from the start of the manager to its first reply.
const MANAGER_READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time until the agents of all hosts are connected.
const HOSTS_UP_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time from the release of slices until they are free.
const SLICES_FREE_TIMEOUT: Duration = Duration::from_secs(300);
/// Size of a slice in bytes.
const SLICE_BYTES: u64 = 1 << 30;
/// Client name that the benchmark sends in its requests.
const CLIENT_NAME: &str = "bench";

/// Numbers of hosts, EMCs and slices of a rack.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Plan {
    /// Number of hosts, each with an agent
    #[arg(long, default_value_t = 4)]
    pub hosts: u16,
    /// Number of EMCs, each connected to all hosts
    #[arg(long, default_value_t = 4)]
    pub emcs: u16,
    /// Number of slices of each EMC
    #[arg(long, default_value_t = 16_384)]
    pub slices_per_emc: u32,
}

impl Plan {
    /// Returns the total number of slices of all EMCs.
    pub fn slices(&self) -> u32 {
        u32::from(self.emcs) * self.slices_per_emc
    }

    /// Returns the host name for reservation `number`. Assigns hosts round robin, because the
    /// number of reservations per host is limited.
    pub fn host_of(&self, number: u64) -> String {
        format!("h{}", number % u64::from(self.hosts))
    }

    fn config(&self, listen: &str, store: &Path, memory: &Path) -> RackConfig {
        let names: Vec<String> = (0..self.emcs).map(|emc| format!("emc{emc}")).collect();
        let emc =
            |name: &String| Emc { name: name.clone(), slices: self.slices_per_emc, path: memory.join(name) };
        let host =
            |host| Host { name: format!("h{host}"), cores: 64, local_mib: 256 << 10, emcs: names.clone() };
        RackConfig {
            listen: listen.to_owned(),
            store: store.to_owned(),
            state_dir: None,
            lease_ttl_s: 10.0,
            fence_after_s: Some(600.0),
            extra: String::new(),
            emcs: names.iter().map(emc).collect(),
            hosts: (0..self.hosts).map(host).collect(),
        }
    }
}

/// Running rack. Dropping the value kills the processes of the rack and removes its folders.
#[derive(Debug)]
pub struct Rack {
    // Fields are dropped in their order, so that the processes end before their folders are
    // removed.
    manager: Option<Process>,
    agents: Vec<Process>,
    memory: TempDir,
    plan: Plan,
    /// Number of slices in the reservations of [`Rack::reserve_and_keep`], which are never
    /// released.
    kept_slices: u32,
    programs: Programs,
    logs: PathBuf,
    config_file: PathBuf,
    listen: String,
}

impl Rack {
    /// Starts the manager and all agents, and waits until every host is up. Places the store, the
    /// configuration and the logs in `folder`.
    ///
    /// # Errors
    /// [`Failure`] if a program does not start or does not reply.
    pub async fn start(plan: Plan, programs: &Programs, folder: &Path) -> Result<Self, Failure> {
        Self::start_with(plan, programs, folder, |config| config).await
    }

    /// Starts a rack like [`Self::start`] whose ledger is in the etcd at `uri`.
    ///
    /// # Errors
    /// [`Failure`] if a program does not start or does not reply.
    pub async fn start_in_etcd(
        plan: Plan,
        programs: &Programs,
        folder: &Path,
        uri: &str,
    ) -> Result<Self, Failure> {
        let store = uri.replace("http://", "etcd://");
        Self::start_with(plan, programs, folder, |config| RackConfig {
            state_dir: Some(config.store),
            store: store.into(),
            extra: "[etcd]\nname = \"bench\"".to_owned(),
            ..config
        })
        .await
    }

    async fn start_with(
        plan: Plan,
        programs: &Programs,
        folder: &Path,
        change: impl FnOnce(RackConfig) -> RackConfig,
    ) -> Result<Self, Failure> {
        let memory = tempfile::Builder::new().prefix("tarn-bench-").tempdir_in(MEMORY_DIR);
        let memory = memory.map_err(Failure::file_error("create a folder in", MEMORY_DIR))?;
        let (store, config) = (folder.join("store"), folder.join("rack.toml"));
        let listen = format!("127.0.0.1:{}", free_port()?);
        write_file(&config, &change(plan.config(&listen, &store, memory.path())).to_string())?;
        let (programs, logs) = (programs.clone(), folder.to_owned());
        let mut rack = Self {
            manager: None,
            agents: Vec::new(),
            memory,
            plan,
            kept_slices: 0,
            programs,
            logs,
            config_file: config,
            listen,
        };
        rack.create_store()?;
        rack.start_manager()?;
        rack.wait_manager_ready().await?;
        for host in 0..plan.hosts {
            let agent = rack.start_agent(&format!("h{host}"), &store)?;
            rack.agents.push(agent);
        }
        rack.wait_hosts_up().await?;
        Ok(rack)
    }

    /// Opens `count` connections to the manager with the token of the role Admin.
    ///
    /// # Errors
    /// [`Failure`] if the token does not exist yet, or if the manager rejects a connection.
    pub async fn connect(&self, count: usize) -> Result<Vec<ClientChannel>, Failure> {
        connect(&self.uri(), &self.bearer()?, count).await
    }

    /// Reads the token of the role Admin, which `pool-manager init` creates.
    ///
    /// # Errors
    /// [`Failure`] if the token does not exist yet.
    pub fn bearer(&self) -> Result<Bearer, Failure> {
        let path = self.logs.join("store/roles/admin.token");
        let token = std::fs::read_to_string(&path).map_err(Failure::file_error("read", &path))?;
        let failure = |_| Failure::UnexpectedReply {
            subject: "read a token".to_owned(),
            reply: path.display().to_string(),
        };
        Bearer::new(token.trim()).map_err(failure)
    }

    /// Returns the URI to which clients of the manager connect.
    pub fn uri(&self) -> String {
        format!("http://{}", self.listen)
    }

    fn create_store(&self) -> Result<(), Failure> {
        let mut command = Command::new(&self.programs.pool_manager);
        let mut init =
            self.start_process("init", command.args(["init", "--config"]).arg(&self.config_file))?;
        let status = init.wait()?;
        if status.success() {
            return Ok(());
        }
        Err(ProcessError::Ended { name: "pool-manager init".to_owned(), status, log: init.log_tail() }.into())
    }

    /// Starts the manager without waiting for its first reply.
    ///
    /// # Errors
    /// [`Failure`] if the program cannot be started.
    pub fn start_manager(&mut self) -> Result<(), Failure> {
        let mut command = Command::new(&self.programs.pool_manager);
        command.args(["serve", "--config"]).arg(&self.config_file);
        self.manager = Some(self.start_process("pool-manager", &mut command)?);
        Ok(())
    }

    /// Removes the process of the manager from the rack and returns it, so that the caller can stop
    /// or kill it.
    pub fn take_manager(&mut self) -> Option<Process> {
        self.manager.take()
    }

    /// Waits until the manager replies, and returns its description of the rack.
    ///
    /// # Errors
    /// [`Failure`] if the manager has ended, or if it does not reply within 60 s.
    pub async fn wait_manager_ready(&mut self) -> Result<wire::Rack, Failure> {
        let uri = self.uri();
        wait_until("a reply from the manager", MANAGER_READY_TIMEOUT, async || {
            self.check_running()?;
            let bearer = self.bearer()?;
            Ok(query_rack(&uri, &bearer).await.map_err(|failure| failure.error_chain()))
        })
        .await
    }

    /// Waits until the agents of all hosts are connected.
    ///
    /// # Errors
    /// [`Failure`] if an agent is not connected within 60 s.
    pub async fn wait_hosts_up(&mut self) -> Result<(), Failure> {
        wait_until("agents of all hosts", HOSTS_UP_TIMEOUT, async || {
            self.check_running()?;
            let mut admin = AdminClient::new(self.connect(1).await?.swap_remove(0));
            let hosts = admin
                .list_hosts(wire::ListHostsRequest {})
                .await
                .map_err(Failure::rejection("list hosts"))?;
            let hosts = hosts.into_inner().hosts;
            let up = hosts.iter().filter(|host| host.state() == HostState::Up).count();
            Ok(if up == hosts.len() { Ok(()) } else { Err(format!("{up} of {} up", hosts.len())) })
        })
        .await
    }

    /// Reserves slices on all hosts, and waits until they are online. These slices are never
    /// released.
    ///
    /// # Errors
    /// [`Failure`] if a reservation is rejected or is not ready in time.
    pub async fn reserve_and_keep(&mut self, channel: &ClientChannel, slices: u32) -> Result<(), Failure> {
        let mut scheduler = SchedulerClient::new(channel.clone());
        while self.kept_slices < slices {
            let (vm, slice_count) = (
                self.kept_slices / SLICES_PER_KEPT_RESERVATION,
                SLICES_PER_KEPT_RESERVATION.min(slices - self.kept_slices),
            );
            let request = wire::ReserveRequest {
                request_id: format!("taken-{vm}"),
                host: self.plan.host_of(u64::from(vm)),
                vm: format!("taken-{vm}"),
                pool_bytes: u64::from(slice_count) * SLICE_BYTES,
                commit_within_ms: COMMIT_TIMEOUT_MS,
                wait_ready: true,
                client: CLIENT_NAME.to_owned(),
                ..Default::default()
            };
            scheduler.reserve(request).await.map_err(Failure::rejection("reserve slices"))?;
            self.check_running()?;
            self.kept_slices += slice_count;
        }
        Ok(())
    }

    /// Releases the given reservations concurrently. Waits until all slices are free, except the
    /// slices of [`Rack::reserve_and_keep`].
    ///
    /// # Errors
    /// [`Failure`] if a release is rejected, or if a slice is not free within 300 s.
    pub async fn release_all_and_wait(
        &mut self,
        channels: &[ClientChannel],
        reserved: Vec<String>,
    ) -> Result<(), Failure> {
        let mut queues = vec![Vec::new(); CONCURRENT_RELEASES_MAX];
        reserved.into_iter().enumerate().for_each(|(n, id)| queues[n % CONCURRENT_RELEASES_MAX].push(id));
        let mut releasing = tokio::task::JoinSet::new();
        for (n, queue) in queues.into_iter().enumerate() {
            releasing.spawn(release_all(SchedulerClient::new(channels[n % channels.len()].clone()), queue));
        }
        while let Some(result) = releasing.join_next().await {
            result.expect("a release does not panic and is not cancelled")?;
        }
        self.wait_all_slices_free().await
    }

    async fn wait_all_slices_free(&mut self) -> Result<(), Failure> {
        let mut admin = AdminClient::new(self.connect(1).await?.swap_remove(0));
        let all = self.plan.slices() - self.kept_slices;
        wait_until("all slices to be free", SLICES_FREE_TIMEOUT, async || {
            self.check_running()?;
            let rack =
                admin.get_rack(wire::GetRackRequest {}).await.map_err(Failure::rejection("get the rack"))?;
            let rack = rack.into_inner();
            let seen = format!("{} of {all} free, alarms: {:?}", rack.slices_free, rack.alarms);
            Ok(if rack.slices_free == all { Ok(()) } else { Err(seen) })
        })
        .await
    }

    /// Checks that the manager and all agents are running.
    ///
    /// # Errors
    /// [`Failure`] if the manager or an agent has ended.
    pub fn check_running(&mut self) -> Result<(), Failure> {
        self.manager.iter_mut().chain(&mut self.agents).try_for_each(Process::check_running)?;
        Ok(())
    }

    /// Returns the CPU time of the manager, and the total CPU time of all agents.
    pub fn cpu_times(&self) -> (Duration, Duration) {
        let manager = self.manager.as_ref().map(process::cpu_time).unwrap_or_default();
        (manager, self.agents.iter().map(process::cpu_time).sum())
    }

    fn start_agent(&self, host: &str, store: &Path) -> Result<Process, Failure> {
        let (config, runtime) = (self.logs.join(format!("{host}.toml")), self.memory.path().join(host));
        let token = store.join("tokens").join(format!("{host}.token"));
        let text = AgentConfig {
            host: host.to_owned(),
            manager: self.uri(),
            runtime_dir: runtime,
            token_file: token,
            extra: String::new(),
        };
        write_file(&config, &text.to_string())?;
        let mut command = Command::new(&self.programs.host_agent);
        self.start_process(host, command.args(["serve", "--config"]).arg(&config))
    }

    fn start_process(&self, name: &str, command: &mut Command) -> Result<Process, Failure> {
        Ok(Process::start(name, command, self.logs.join(format!("{name}.log")))?)
    }
}

/// Number of slices in each reservation of [`Rack::reserve_and_keep`].
const SLICES_PER_KEPT_RESERVATION: u32 = 500;
/// Commit deadline of the reservations of [`Rack::reserve_and_keep`], in milliseconds. These
/// reservations are never committed, so the deadline is the longest permitted one, 24 hours.
const COMMIT_TIMEOUT_MS: u64 = 24 * 3600 * 1000;

/// Maximum number of concurrent releases.
const CONCURRENT_RELEASES_MAX: usize = 64;

fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(Failure::file_error("write", path))
}

/// Queries a manager for its rack and its hosts, over a new connection. Returns the rack.
///
/// # Errors
/// [`Failure`] if the manager does not reply.
pub async fn query_rack(uri: &str, bearer: &Bearer) -> Result<wire::Rack, Failure> {
    let mut admin = AdminClient::new(connect(uri, bearer, 1).await?.swap_remove(0));
    let rack = admin.get_rack(wire::GetRackRequest {}).await.map_err(Failure::rejection("get the rack"))?;
    admin.list_hosts(wire::ListHostsRequest {}).await.map_err(Failure::rejection("list hosts"))?;
    Ok(rack.into_inner())
}

async fn release_all(
    mut scheduler: SchedulerClient<ClientChannel>,
    reservations: Vec<String>,
) -> Result<(), Failure> {
    for reservation in reservations {
        let target = Some(ReservationRef { reservation, ..Default::default() });
        let request = wire::ReleaseRequest { target, ..Default::default() };
        scheduler.release(request).await.map_err(Failure::rejection("release a reservation"))?;
    }
    Ok(())
}

/// Client that reserves slices for new VMs on all hosts in turn.
#[derive(Clone, Debug)]
pub struct Reserver {
    scheduler: SchedulerClient<ClientChannel>,
    plan: Plan,
    round: String,
    slices: u64,
    wait_ready: bool,
    /// IDs of the reservations that this client has made.
    pub reserved: Vec<String>,
}

impl Reserver {
    /// Returns a client that sends requests over `channel`, one slice per request. `round` makes
    /// its VM names and request ids unique.
    pub fn new(channel: ClientChannel, plan: Plan, round: &str) -> Self {
        let scheduler = SchedulerClient::new(channel);
        Self { scheduler, plan, round: round.to_owned(), slices: 1, wait_ready: false, reserved: Vec::new() }
    }

    /// Makes the manager reply only when the reserved slices are online.
    #[must_use]
    pub fn wait_ready(self) -> Self {
        Self { wait_ready: true, ..self }
    }

    /// Sets the number of slices per reservation.
    #[must_use]
    pub fn with_slices(self, slices: u64) -> Self {
        Self { slices, ..self }
    }
}

impl Writer for Reserver {
    async fn write(&mut self, number: u64) -> Result<(), Failure> {
        let name = format!("{}-{number}", self.round);
        let request = wire::ReserveRequest {
            request_id: name.clone(),
            host: self.plan.host_of(number),
            vm: name,
            pool_bytes: self.slices * SLICE_BYTES,
            wait_ready: self.wait_ready,
            client: CLIENT_NAME.to_owned(),
            ..Default::default()
        };
        let reply = self
            .scheduler
            .reserve(request)
            .await
            .map_err(Failure::rejection("reserve a slice"))?
            .into_inner();
        if reply.slices.len() as u64 != self.slices {
            return Err(Failure::UnexpectedReply {
                subject: "reserve a slice".to_owned(),
                reply: format!("{reply:?}"),
            });
        }
        self.reserved.push(reply.reservation);
        Ok(())
    }
}

/// Client that sends invalid reservations. The manager rejects an invalid reservation before it
/// reaches the ledger, so the latency is the cost of a call without the decision.
#[derive(Clone, Debug)]
pub struct InvalidReserver(SchedulerClient<ClientChannel>);

impl InvalidReserver {
    /// Returns a client that sends requests over `channel`.
    pub fn new(channel: ClientChannel) -> Self {
        Self(SchedulerClient::new(channel))
    }
}

impl Writer for InvalidReserver {
    async fn write(&mut self, _: u64) -> Result<(), Failure> {
        let request = wire::ReserveRequest { client: CLIENT_NAME.to_owned(), ..Default::default() };
        match self.0.reserve(request).await {
            Err(status) if status.code() == Code::InvalidArgument => Ok(()),
            other => Err(Failure::UnexpectedReply {
                subject: "send an invalid reservation".to_owned(),
                reply: format!("{other:?}"),
            }),
        }
    }
}
