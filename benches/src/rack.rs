//! A whole rack of real processes: one `pool-manager serve`, a `host-agent serve` per host, EMCs emulated in memory, the
//! store on a disk. Configured as any rack is; nothing is tuned for measuring.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use proto::bearer::{Bearer, ClientChannel};
use proto::v1::{
    self as wire, HostState, ReservationRef, admin_client::AdminClient, scheduler_client::SchedulerClient,
};
use tempfile::TempDir;
use tonic::Code;

use crate::{
    child::Child,
    failure::Failure,
    load::Writer,
    loopback::{connect, free_port, until},
    programs::Programs,
};

/// Where emulated EMCs and the agents' runtime folders live.
const MEMORY: &str = "/dev/shm";
/// How long a manager may take to answer at all.
const MANAGER_WITHIN: Duration = Duration::from_secs(60);
/// How long all agents together may take to be connected.
const HOSTS_WITHIN: Duration = Duration::from_secs(60);
/// How long released slices may take to be free again.
const FREE_WITHIN: Duration = Duration::from_secs(300);
/// The size of a slice.
const SLICE_BYTES: u64 = 1 << 30;
/// Client name of the benchmark.
const CLIENT: &str = "bench";

/// How big a rack.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Plan {
    /// Hosts, each with an agent of its own
    #[arg(long, default_value_t = 4)]
    pub hosts: u16,
    /// EMCs, each wired to every host
    #[arg(long, default_value_t = 4)]
    pub emcs: u16,
    /// Slices of each EMC
    #[arg(long, default_value_t = 16_384)]
    pub slices_per_emc: u32,
}

impl Plan {
    /// Slices of all EMCs.
    pub fn slices(&self) -> u32 {
        u32::from(self.emcs) * self.slices_per_emc
    }

    /// The name of the host of the `number`th reservation: one after the other, as the reservations of one host are limited.
    pub fn host_of(&self, number: u64) -> String {
        format!("h{}", number % u64::from(self.hosts))
    }

    fn rack_toml(&self, listen: &str, store: &Path, memory: &Path) -> String {
        let emcs: Vec<String> = (0..self.emcs).map(|emc| format!("emc{emc}")).collect();
        let mut text = format!(
            "[manager]\nlisten = {listen:?}\nstore = {store:?}\n[lease]\nttl_s = 10\nfence_after_s = 600\n"
        );
        for emc in &emcs {
            let path = memory.join(emc);
            let slices = self.slices_per_emc;
            let _ = write!(
                text,
                "[[emc]]\nname = {emc:?}\nslices = {slices}\ndriver = \"emulated\"\npath = {path:?}\n"
            );
        }
        for host in 0..self.hosts {
            let _ = write!(
                text,
                "[[host]]\nname = \"h{host}\"\ncores = 64\nlocal_mib = 262144\nemcs = {emcs:?}\n"
            );
        }
        text
    }
}

/// A running rack. Dropped, its processes are killed and its folders removed.
#[derive(Debug)]
pub struct Rack {
    // In this order: processes end before the folders they use are removed.
    manager: Option<Child>,
    agents: Vec<Child>,
    memory: TempDir,
    plan: Plan,
    /// Slices of reservations that are never released.
    taken: u32,
    programs: Programs,
    logs: PathBuf,
    config: PathBuf,
    listen: String,
}

impl Rack {
    /// Starts the manager and all agents, and waits until every host is up. Store, configuration and logs are in `folder`.
    ///
    /// # Errors
    /// A program does not start or does not answer.
    pub async fn start(plan: Plan, programs: &Programs, folder: &Path) -> Result<Self, Failure> {
        let memory = tempfile::Builder::new().prefix("tarn-bench-").tempdir_in(MEMORY);
        let memory = memory.map_err(Failure::file("create a folder in", MEMORY))?;
        let (store, config) = (folder.join("store"), folder.join("rack.toml"));
        let listen = format!("127.0.0.1:{}", free_port()?);
        write(&config, &plan.rack_toml(&listen, &store, memory.path()))?;
        let (programs, logs) = (programs.clone(), folder.to_owned());
        let mut rack = Self {
            manager: None,
            agents: Vec::new(),
            memory,
            plan,
            taken: 0,
            programs,
            logs,
            config,
            listen,
        };
        rack.start_manager()?;
        rack.manager_answers().await?;
        for host in 0..plan.hosts {
            let agent = rack.start_agent(&format!("h{host}"), &store)?;
            rack.agents.push(agent);
        }
        rack.hosts_are_up().await?;
        Ok(rack)
    }

    /// Opens so many connections with the role Admin.
    ///
    /// # Errors
    /// There is no token yet, or the manager does not accept one.
    pub async fn connect(&self, count: usize) -> Result<Vec<ClientChannel>, Failure> {
        connect(&self.uri(), &self.bearer()?, count).await
    }

    /// Returns the token of the role Admin, which the manager makes when it starts.
    ///
    /// # Errors
    /// It is not there yet.
    pub fn bearer(&self) -> Result<Bearer, Failure> {
        let path = self.logs.join("store/roles/admin.token");
        let token = std::fs::read_to_string(&path).map_err(Failure::file("read", &path))?;
        let wrong =
            |_| Failure::Answer { what: "read a token".to_owned(), answer: path.display().to_string() };
        Bearer::new(token.trim()).map_err(wrong)
    }

    /// Where clients connect.
    pub fn uri(&self) -> String {
        format!("http://{}", self.listen)
    }

    /// Starts the manager's program and returns at once.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start_manager(&mut self) -> Result<(), Failure> {
        let mut command = Command::new(&self.programs.pool_manager);
        command.args(["serve", "--config"]).arg(&self.config);
        self.manager = Some(Child::start("pool-manager", &mut command, &self.logs)?);
        Ok(())
    }

    /// Takes the manager's process out, to stop or to kill it.
    pub fn take_manager(&mut self) -> Option<Child> {
        self.manager.take()
    }

    /// Waits until the manager answers.
    ///
    /// # Errors
    /// It ended, or does not answer in time.
    pub async fn manager_answers(&mut self) -> Result<wire::Rack, Failure> {
        let uri = self.uri();
        until("an answer from the manager", MANAGER_WITHIN, async || {
            self.still_runs()?;
            let bearer = match self.bearer() {
                Ok(bearer) => bearer,
                Err(failure) => return Ok(Err(failure.story())), // made before it answers
            };
            Ok(look(&uri, &bearer).await.map_err(|failure| failure.story()))
        })
        .await
    }

    /// Waits until every host's agent is connected.
    ///
    /// # Errors
    /// One is not, in time.
    pub async fn hosts_are_up(&mut self) -> Result<(), Failure> {
        until("agents of all hosts", HOSTS_WITHIN, async || {
            self.still_runs()?;
            let mut admin = AdminClient::new(self.connect(1).await?.swap_remove(0));
            let hosts =
                admin.list_hosts(wire::ListHostsRequest {}).await.map_err(Failure::refused("list hosts"))?;
            let hosts = hosts.into_inner().hosts;
            let up = hosts.iter().filter(|host| host.state() == HostState::Up).count();
            Ok(if up == hosts.len() { Ok(()) } else { Err(format!("{up} of {} up", hosts.len())) })
        })
        .await
    }

    /// Reserves slices on all hosts that are never released, and waits until they are online.
    ///
    /// # Errors
    /// A reservation is refused, or not ready in time.
    pub async fn take(&mut self, channel: &ClientChannel, slices: u32) -> Result<(), Failure> {
        let mut scheduler = SchedulerClient::new(channel.clone());
        while self.taken < slices {
            let (vm, wanted) = (self.taken / TAKEN_AT_ONCE, TAKEN_AT_ONCE.min(slices - self.taken));
            let asked = wire::ReserveRequest {
                request_id: format!("taken-{vm}"),
                host: self.plan.host_of(u64::from(vm)),
                vm: format!("taken-{vm}"),
                pool_bytes: u64::from(wanted) * SLICE_BYTES,
                commit_within_ms: COMMIT_WITHIN_MS,
                wait_ready: true,
                client: CLIENT.to_owned(),
                ..Default::default()
            };
            scheduler.reserve(asked).await.map_err(Failure::refused("reserve slices to be kept"))?;
            self.still_runs()?;
            self.taken += wanted;
        }
        Ok(())
    }

    /// Releases these reservations, as many at a time as there are channels, and waits until every slice is free that was
    /// not taken for good.
    ///
    /// # Errors
    /// A release is refused, or a slice is not free in time.
    pub async fn give_back(
        &mut self,
        channels: &[ClientChannel],
        reserved: Vec<String>,
    ) -> Result<(), Failure> {
        let mut queues = vec![Vec::new(); RELEASES_AT_ONCE];
        reserved.into_iter().enumerate().for_each(|(n, id)| queues[n % RELEASES_AT_ONCE].push(id));
        let mut releasing = tokio::task::JoinSet::new();
        for (n, queue) in queues.into_iter().enumerate() {
            releasing.spawn(release_all(SchedulerClient::new(channels[n % channels.len()].clone()), queue));
        }
        while let Some(done) = releasing.join_next().await {
            done.expect("a release does not panic and is not cancelled")?;
        }
        self.all_free().await
    }

    async fn all_free(&mut self) -> Result<(), Failure> {
        let mut admin = AdminClient::new(self.connect(1).await?.swap_remove(0));
        let all = self.plan.slices() - self.taken;
        until("every slice free again", FREE_WITHIN, async || {
            self.still_runs()?;
            let rack = admin
                .get_rack(wire::GetRackRequest {})
                .await
                .map_err(Failure::refused("look at the rack"))?;
            let rack = rack.into_inner();
            let seen = format!("{} of {all} free, alarms: {:?}", rack.slices_free, rack.alarms);
            Ok(if rack.slices_free == all { Ok(()) } else { Err(seen) })
        })
        .await
    }

    /// Says which process is gone, if one is.
    ///
    /// # Errors
    /// The manager or an agent has ended.
    pub fn still_runs(&mut self) -> Result<(), Failure> {
        self.manager.iter_mut().chain(&mut self.agents).try_for_each(Child::still_runs)
    }

    /// Processor time so far of the manager, and of all agents together.
    pub fn cpu(&self) -> (Duration, Duration) {
        let manager = self.manager.as_ref().map(Child::cpu).unwrap_or_default();
        (manager, self.agents.iter().map(Child::cpu).sum())
    }

    fn start_agent(&self, host: &str, store: &Path) -> Result<Child, Failure> {
        let (config, runtime) = (self.logs.join(format!("{host}.toml")), self.memory.path().join(host));
        let token = store.join("tokens").join(format!("{host}.token"));
        let uri = self.uri();
        let text = format!(
            "[agent]\nhost = {host:?}\nmanager = {uri:?}\nruntime_dir = {runtime:?}\ntoken_file = {token:?}\n\
             [backend]\nkind = \"emulated\"\n"
        );
        write(&config, &text)?;
        let mut command = Command::new(&self.programs.host_agent);
        Child::start(host, command.args(["serve", "--config"]).arg(&config), &self.logs)
    }
}

/// Slices of one reservation that is never released.
const TAKEN_AT_ONCE: u32 = 500;
/// Such a reservation is not committed, and lasts as long as an uncommitted one may.
const COMMIT_WITHIN_MS: u64 = 24 * 3600 * 1000;

/// Releases asked for at the same time.
const RELEASES_AT_ONCE: usize = 64;

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(Failure::file("write", path))
}

/// Asks a manager for its rack and its hosts, over a new connection.
///
/// # Errors
/// It does not answer.
pub async fn look(uri: &str, bearer: &Bearer) -> Result<wire::Rack, Failure> {
    let mut admin = AdminClient::new(connect(uri, bearer, 1).await?.swap_remove(0));
    let rack = admin.get_rack(wire::GetRackRequest {}).await.map_err(Failure::refused("look at the rack"))?;
    admin.list_hosts(wire::ListHostsRequest {}).await.map_err(Failure::refused("list hosts"))?;
    Ok(rack.into_inner())
}

async fn release_all(
    mut scheduler: SchedulerClient<ClientChannel>,
    reservations: Vec<String>,
) -> Result<(), Failure> {
    for reservation in reservations {
        let target = Some(ReservationRef { reservation, ..Default::default() });
        let asked = wire::ReleaseRequest { target, ..Default::default() };
        scheduler.release(asked).await.map_err(Failure::refused("release a reservation"))?;
    }
    Ok(())
}

/// Reserves slices for VMs of all hosts in turn, each VM and each request new.
#[derive(Clone, Debug)]
pub struct Reserver {
    scheduler: SchedulerClient<ClientChannel>,
    plan: Plan,
    round: String,
    slices: u64,
    wait_ready: bool,
    /// Reservations that were not released yet.
    pub reserved: Vec<String>,
}

impl Reserver {
    /// A client on this connection that asks for one slice at a time; `round` makes its names unique.
    pub fn new(channel: ClientChannel, plan: Plan, round: &str) -> Self {
        let scheduler = SchedulerClient::new(channel);
        Self { scheduler, plan, round: round.to_owned(), slices: 1, wait_ready: false, reserved: Vec::new() }
    }

    /// Wants its answers only when the slices can be used.
    #[must_use]
    pub fn waiting_until_ready(self) -> Self {
        Self { wait_ready: true, ..self }
    }

    /// Asks for so many slices at a time.
    #[must_use]
    pub fn of_slices(self, slices: u64) -> Self {
        Self { slices, ..self }
    }
}

impl Writer for Reserver {
    async fn write(&mut self, number: u64) -> Result<(), Failure> {
        let name = format!("{}-{number}", self.round);
        let asked = wire::ReserveRequest {
            request_id: name.clone(),
            host: self.plan.host_of(number),
            vm: name,
            pool_bytes: self.slices * SLICE_BYTES,
            wait_ready: self.wait_ready,
            client: CLIENT.to_owned(),
            ..Default::default()
        };
        let given =
            self.scheduler.reserve(asked).await.map_err(Failure::refused("reserve a slice"))?.into_inner();
        if given.slices.len() as u64 != self.slices {
            return Err(Failure::Answer { what: "reserve a slice".to_owned(), answer: format!("{given:?}") });
        }
        self.reserved.push(given.reservation);
        Ok(())
    }
}

/// Asks for reservations that are refused before the ledger sees them: the call alone is measured.
#[derive(Clone, Debug)]
pub struct Refused(SchedulerClient<ClientChannel>);

impl Refused {
    /// A client on this connection.
    pub fn new(channel: ClientChannel) -> Self {
        Self(SchedulerClient::new(channel))
    }
}

impl Writer for Refused {
    async fn write(&mut self, _: u64) -> Result<(), Failure> {
        let asked = wire::ReserveRequest { client: CLIENT.to_owned(), ..Default::default() };
        match self.0.reserve(asked).await {
            Err(refused) if refused.code() == Code::InvalidArgument => Ok(()),
            other => {
                Err(Failure::Answer { what: "refuse a reservation".to_owned(), answer: format!("{other:?}") })
            }
        }
    }
}
