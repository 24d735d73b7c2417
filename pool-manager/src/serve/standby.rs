//! Manager whose ledger is in etcd: waits as a standby until it is elected, and then serves requests as the leader.

use std::{
    convert::Infallible,
    future::{self, Ready},
    marker::PhantomData,
    path::Path,
    task::{Context, Poll},
    time::Duration,
};

use pool::{
    ledger::{Ledger, When},
    record::Meta,
    rejection::Rejection,
};
use proto::v1::{
    admin_server::AdminServer, agent_server::AgentServer, models_server::ModelsServer,
    scheduler_server::SchedulerServer,
};
use sd_notify::NotifyState;
use tokio::{sync::watch, task::JoinHandle};
use tonic::{
    Status,
    body::Body,
    codegen::{Service, http},
    server::NamedService,
};
use tonic_health::ServingStatus;
use units::{HostId, UnixMs};

use super::{
    AccessControl, ServeError, Signals, Stop, TlsConfig, load_changed, load_tls_config, log_rejected_reload,
    notify_systemd, now_unix_ms, run_watchdog, serve_ledger, server_builder, start_server, to_rack_spec,
};
use crate::{
    config::{Config, Etcd, Listen},
    driver::DriverError,
    election::{Election, Leader, ManagerEntry},
    etcd_connection,
    records::{self, LoadError, StoreContents},
    rpc::{admin::Admin, agent::Agent, models::Models, scheduler::Scheduler, status::not_leader_status},
    store::etcd::Cluster,
    store_folder::{EtcdManager, OpenedStore},
    tokens::Tokens,
};

/// Time in which clients of a standby must close their connections.
const STANDBY_STOP_TIMEOUT: Duration = Duration::from_millis(200);
/// Delay between two attempts to reach etcd at the start.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Runs the manager as a standby, and as the leader once it is elected. After a hand-over, it is a standby again.
pub(super) async fn serve_from_etcd(path: &Path, config: Config, etcd: &Etcd) -> Result<(), ServeError> {
    let in_file = |error| ServeError::Etcd { path: path.to_owned(), error };
    let cluster = etcd_connection::connect(etcd).map_err(in_file)?;
    let entry = ManagerEntry::new(etcd.name.to_string(), etcd.advertise.clone(), now_unix_ms());
    let election = Election::new(cluster, &entry, etcd.lease);
    let mut config = config;
    let mut signals = Signals::listen()?; // must precede the first reply: until then, a signal ends the process at once
    loop {
        // systemd expects these notifications until the ledger is loaded.
        let watchdog = AbortOnDrop(tokio::spawn(run_watchdog(|| true)));
        let Some(leader) = wait_as_standby(path, &mut config, &election, &mut signals).await? else {
            return Ok(());
        };
        let (opened, access) = match prepare_leader(path, &config, &leader).await {
            Ok(prepared) => prepared,
            Err(error) => {
                leader.resign().await; // another manager may be able to load the ledger
                return Err(error);
            }
        };
        drop(watchdog);
        match serve_ledger(path, &mut config, opened, &access, &mut signals, Some(leader)).await? {
            Stop::Signal => return Ok(()),
            Stop::HandOver => {} // the manager is a standby again
        }
    }
}

/// Opens the ledger and prepares the identification of clients. Only the leader creates tokens, so that managers can
/// share the folder.
async fn prepare_leader(
    path: &Path,
    config: &Config,
    leader: &Leader,
) -> Result<(OpenedStore, AccessControl), ServeError> {
    let opened = open_store(path, config, leader).await?;
    check_tokens(path, config, &leader.elected().location(), &opened.meta)?;
    let (access, new_tokens) = AccessControl::load(path, config)?;
    new_tokens.create()?; // must run after the store is opened: tokens without a ledger mean that the ledger is lost
    Ok((opened, access))
}

/// Task that is aborted when the value is dropped.
struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Rejects calls until this manager is elected. Returns `None` if the manager must stop.
async fn wait_as_standby(
    path: &Path,
    config: &mut Config,
    election: &Election,
    signals: &mut Signals,
) -> Result<Option<Leader>, ServeError> {
    let (access, _) = AccessControl::load(path, config)?;
    let server = StandbyServer::start(config, &access, election.leader()).await?;
    notify_systemd(&[NotifyState::Ready, NotifyState::Status("standby")]);
    let started_with = config.clone();
    let mut campaign = election.campaign();
    let elected = async {
        wait_until_checked(path, &started_with, election.cluster()).await?;
        Ok(election.win(&mut campaign).await?)
    };
    let elected = wait_for_election(path, config, &access, election.cluster(), signals, elected).await;
    server.stop().await;
    if !matches!(elected, Ok(Some(_))) {
        election.withdraw(campaign).await;
    }
    elected
}

/// Waits until this manager is elected, and reloads `rack.toml` on SIGHUP. Returns `None` on SIGTERM or SIGINT.
async fn wait_for_election(
    path: &Path,
    config: &mut Config,
    access: &AccessControl,
    cluster: &Cluster,
    signals: &mut Signals,
    elected: impl Future<Output = Result<Leader, ServeError>>,
) -> Result<Option<Leader>, ServeError> {
    let mut elected = std::pin::pin!(elected);
    let mut reload = None; // runs beside the election, which must renew the lease
    loop {
        tokio::select! {
            elected = &mut elected => {
                if reload.is_some() {
                    tracing::warn!("elected during a reload of rack.toml, which has no effect: reload it again");
                }
                return elected.map(Some);
            }
            _ = signals.hangup.recv() => reload = Some(Box::pin(load_for_takeover(path, config.clone(), cluster))),
            loaded = async { reload.as_mut().expect("the branch requires a reload").await }, if reload.is_some() => {
                reload = None;
                match loaded {
                    Ok((new, tls)) => {
                        access.tls.send_replace(tls);
                        *config = new;
                        tracing::info!(path = %path.display(), "rack.toml reloaded");
                    }
                    Err(error) => log_rejected_reload(path, &error),
                }
            }
            _ = signals.terminate.recv() => return Ok(None),
            _ = signals.interrupt.recv() => return Ok(None),
        }
    }
}

/// Loads a changed `rack.toml`, which is used when this manager is elected, and the certificates. If the check of the
/// ledger is not possible at the moment, the file is accepted, so that new certificates are used.
async fn load_for_takeover(
    path: &Path,
    earlier: Config,
    cluster: &Cluster,
) -> Result<(Config, TlsConfig), ServeError> {
    let new = load_changed(path, &earlier)?;
    super::prepare_rules(&new)?;
    let tls = load_tls_config(path, &new)?;
    match check_takeover(path, &new, cluster).await {
        Err(error) if is_temporary(&error) => {
            tracing::warn!(error = units::chain(&error), "rack.toml is not checked against the ledger");
        }
        checked => checked?,
    }
    Ok((new, tls))
}

/// Returns whether a check can have another result later, without a change of `rack.toml`.
fn is_temporary(error: &ServeError) -> bool {
    match error {
        ServeError::Store(error) | ServeError::Load(LoadError::Store(error)) => error.is_temporary(),
        ServeError::Configure { error: DriverError::Rejection(Rejection::RestorePending { .. }), .. } => true,
        _ => false,
    }
}

/// Checks that this manager can take over, before it takes part in the election. Waits while etcd cannot be reached.
async fn wait_until_checked(path: &Path, config: &Config, cluster: &Cluster) -> Result<(), ServeError> {
    let mut is_logged = false;
    loop {
        match check_takeover(path, config, cluster).await {
            Err(ServeError::Store(error) | ServeError::Load(LoadError::Store(error)))
                if error.is_temporary() =>
            {
                if !std::mem::replace(&mut is_logged, true) {
                    tracing::warn!(error = units::chain(&error), "waiting for etcd");
                }
                tokio::time::sleep(RETRY_DELAY).await;
            }
            result => return result,
        }
    }
}

/// Checks what would prevent this manager from taking over: another rack in etcd, a folder without the rack's tokens or
/// without write access, and a `rack.toml` that the ledger rejects.
async fn check_takeover(path: &Path, config: &Config, cluster: &Cluster) -> Result<(), ServeError> {
    let (rack_toml, config, cluster) = (path.to_owned(), config.clone(), cluster.clone());
    let check = move || {
        let StoreContents { meta, records, restored } = records::load(cluster.read()?.as_mut())?;
        let meta = etcd_manager(&rack_toml, &config, &cluster.location()).prepare_folder(meta)?;
        check_tokens(&rack_toml, &config, &cluster.location(), &meta)?;
        let when = When { now: meta.rack_time, wall: UnixMs(now_unix_ms()) };
        let mut ledger = Ledger::load(meta, records);
        if restored {
            let restore = ledger.decide_restore();
            ledger.apply(restore);
        }
        let decided = ledger.decide_configuration(when, &to_rack_spec(&config));
        decided
            .map(drop)
            .map_err(|rejection| ServeError::Configure { path: rack_toml, error: rejection.into() })
    };
    tokio::task::spawn_blocking(check).await.expect("reading the store does not panic")
}

/// Checks that the folder contains tokens if the rack has hosts that need some. Otherwise, this manager would create
/// other tokens, and reject the agents of all hosts.
fn check_tokens(rack_toml: &Path, config: &Config, ledger: &Path, meta: &Meta) -> Result<(), ServeError> {
    let folder = &config.manager.folder;
    let has_clients = matches!(config.manager.listen, Listen::Tcp(_));
    let needs_tokens = has_clients || config.hosts.iter().any(|host| host.token_sha256.is_none());
    if config.tls.is_some() || meta.next_host == HostId(0) || !needs_tokens {
        return Ok(());
    }
    let (_, new_tokens) = Tokens::prepare(folder, &config.hosts)?;
    if new_tokens.has_existing() {
        return Ok(());
    }
    let (folder, ledger, rack_toml) = (folder.clone(), ledger.to_owned(), rack_toml.to_owned());
    Err(ServeError::NoTokens { folder, ledger, rack_toml })
}

fn etcd_manager<'a>(rack_toml: &'a Path, config: &'a Config, ledger: &'a Path) -> EtcdManager<'a> {
    EtcdManager { ledger, folder: &config.manager.folder, rack_toml }
}

/// Opens the store as the leader, and loads the ledger.
async fn open_store(path: &Path, config: &Config, leader: &Leader) -> Result<OpenedStore, ServeError> {
    let (path, config, elected) = (path.to_owned(), config.clone(), leader.elected());
    let open = move || {
        let store = elected.open_store()?;
        etcd_manager(&path, &config, &elected.location()).load(Box::new(store))
    };
    Ok(tokio::task::spawn_blocking(open).await.expect("loading the ledger does not panic")?)
}

/// gRPC and HTTP servers of a standby. The gRPC server rejects all calls except health checks.
struct StandbyServer {
    stop: watch::Sender<bool>,
    server: JoinHandle<()>,
    exporter: Option<JoinHandle<()>>,
}

impl StandbyServer {
    async fn start(
        config: &Config,
        access: &AccessControl,
        leader: watch::Receiver<Option<ManagerEntry>>,
    ) -> Result<Self, ServeError> {
        // The process works, but its services do not serve requests.
        let (health, health_service) = tonic_health::server::health_reporter();
        for service in [
            <SchedulerServer<Scheduler> as NamedService>::NAME,
            <AdminServer<Admin> as NamedService>::NAME,
            <AgentServer<Agent> as NamedService>::NAME,
            <ModelsServer<Models> as NamedService>::NAME,
        ] {
            health.set_service_status(service, ServingStatus::NotServing).await;
        }
        let router = server_builder()
            .add_service(Rejecting::<SchedulerServer<Scheduler>>::new(&leader))
            .add_service(Rejecting::<AdminServer<Admin>>::new(&leader))
            .add_service(Rejecting::<AgentServer<Agent>>::new(&leader))
            .add_service(Rejecting::<ModelsServer<Models>>::new(&leader))
            .add_service(health_service);
        let (stop, stopping) = watch::channel(false);
        let server = start_server(router, config, access, stopping.clone())?;
        let exporter = match config.manager.metrics_listen {
            Some(address) => Some(super::http::start_standby(address, stopping).await?),
            None => None,
        };
        Ok(Self { stop, server, exporter })
    }

    /// Closes the socket and all connections. Waits only shortly for clients, because a standby has no calls to complete.
    async fn stop(mut self) {
        let _ = self.stop.send(true); // fails only if the server has ended
        if tokio::time::timeout(STANDBY_STOP_TIMEOUT, &mut self.server).await.is_err() {
            self.server.abort();
        }
        if let Some(exporter) = self.exporter {
            exporter.abort();
            let _ = exporter.await; // the address must be free for the leader's server
        }
    }
}

/// Service in place of `S` that rejects all calls with the address of the leader.
struct Rejecting<S> {
    leader: watch::Receiver<Option<ManagerEntry>>,
    service: PhantomData<fn() -> S>,
}

impl<S> Rejecting<S> {
    fn new(leader: &watch::Receiver<Option<ManagerEntry>>) -> Self {
        Self { leader: leader.clone(), service: PhantomData }
    }

    fn status(&self) -> Status {
        match &*self.leader.borrow() {
            Some(ManagerEntry { name, address, .. }) => {
                let message = format!("this manager is a standby: the leader is {name} at {address}");
                not_leader_status(Some(address), message)
            }
            None => {
                let message =
                    "this manager is a standby, and there is no leader at the moment: try again later";
                not_leader_status(None, message.to_owned())
            }
        }
    }
}

impl<S> Clone for Rejecting<S> {
    fn clone(&self) -> Self {
        Self { leader: self.leader.clone(), service: PhantomData }
    }
}

impl<S: NamedService> NamedService for Rejecting<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Rejecting<S> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _request: http::Request<Body>) -> Self::Future {
        future::ready(Ok(self.status().into_http()))
    }
}
