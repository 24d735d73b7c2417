//! Implements `pool-manager serve`. SIGHUP reloads the configuration, SIGTERM and SIGINT stop the
//! manager.
//!
//! Before the first request is served, the store is loaded and the configuration of the rack is
//! durable. The manager never creates a rack: the store must exist.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use pool::{
    ledger::{EmcSpec, HostSpec, RackSpec},
    manager::{Request, Settings},
};
use proto::v1::{
    admin_server::AdminServer, agent_server::AgentServer, models_server::ModelsServer,
    scheduler_server::SchedulerServer,
};
use sd_notify::NotifyState;
use service_files::{
    certificates::CertificateError, descriptors, log_limit::RejectionLog, sockets::SocketError,
};
use tokio::{
    net::{TcpListener, TcpSocket, UnixListener},
    signal::unix::{Signal, SignalKind, signal},
    sync::{Semaphore, watch},
    task::JoinHandle,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::server::NamedService;
use tonic::transport::Server;
use tower_layer::Stack;
use units::limits::{
    ACCEPT_BACKLOG, CALLS_PER_CONNECTION_MAX, RPC_MESSAGE_BYTES_MAX, SESSION_SILENCE_TIMEOUT,
};

use crate::{
    config::{Config, ConfigError, Listen, RehomePolicy, changed_immutable_settings},
    driver::{self, DriverError, Handle, InitialState},
    election::{ElectedManager, Leader, LeaderEnd, ManagerEntry},
    etcd_connection::EtcdConnectionError,
    forecasts::{self, Forecasts},
    managers::{self, Managers},
    metrics::Metrics,
    monitor::Monitor,
    records::LoadError,
    rpc::{
        Policy, ServiceContext,
        admin::Admin,
        agent::Agent,
        call_metrics::CountedService,
        connections::{self, CallCounterLayer, Connection, Listener, TlsConfig},
        identity::{AccessRules, Identity},
        models::Models,
        scheduler::Scheduler,
    },
    shares::{self, Shares},
    store::StoreError,
    store_folder::{self, OpenedStore, StoreFolderError},
    tls,
    tokens::{NewTokenFiles, TokenError, Tokens},
};

mod http;
mod standby;

/// Time limit for each step of stopping the manager.
pub const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Error that ends `pool-manager serve`.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// `rack.toml` cannot be read or is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The directory of the store cannot be used.
    #[error(transparent)]
    StoreFolder(#[from] StoreFolderError),
    /// The store cannot be opened or read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The contents of the store are invalid.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A file or an address of section `[etcd]` cannot be used.
    #[error("{}", path.display())]
    Etcd {
        /// Configuration file.
        path: PathBuf,
        /// Error that names the field and the violated rule.
        #[source]
        error: EtcdConnectionError,
    },
    /// This manager is not the leader any more. Another one may serve requests.
    #[error("stopped: another pool-manager may be the leader now")]
    NotLeader(#[source] StoreError),
    /// The folder of this manager contains no tokens, but the hosts of the rack have some.
    #[error(
        "manager.state_dir = {}: contains no tokens, but {} has hosts: without [tls], all managers of a rack must have the same state_dir, \
         which contains the tokens; if the folder is lost, stop all managers and run `pool-manager backup --config {2} --to FILE` and \
         `pool-manager restore --config {2} --from FILE --force`, which creates new tokens",
        folder.display(), ledger.display(), rack_toml.display()
    )]
    NoTokens {
        /// Folder of the manager.
        folder: PathBuf,
        /// Location of the ledger in etcd.
        ledger: PathBuf,
        /// Configuration file.
        rack_toml: PathBuf,
    },
    /// A token file cannot be read or written.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// A certificate or key cannot be used.
    #[error("{}", path.display())]
    Tls {
        /// Configuration file that names the certificate or key.
        path: PathBuf,
        /// Error that names the field and the violated rule.
        #[source]
        error: CertificateError,
    },
    /// The unix socket cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The ledger rejects the configuration of the rack.
    #[error("the ledger rejects {}", path.display())]
    Configure {
        /// Configuration file.
        path: PathBuf,
        /// Error returned by the ledger.
        #[source]
        error: DriverError,
    },
    /// A reload changes settings that require a restart.
    #[error("{0}")]
    ImmutableSetting(String),
    /// The operating system rejected an operation.
    #[error("cannot {operation} {object}")]
    Io {
        /// Operation, such as "listen on".
        operation: &'static str,
        /// Object of the operation, such as an address.
        object: String,
        /// Error of the operating system.
        #[source]
        errno: std::io::Error,
    },
}

fn io_error(
    operation: &'static str,
    object: impl std::fmt::Display,
) -> impl FnOnce(std::io::Error) -> ServeError {
    let object = object.to_string();
    move |errno| ServeError::Io { operation, object, errno }
}

/// Runs the manager until SIGTERM or SIGINT.
///
/// # Errors
/// [`ServeError`] if configuration, store, tokens or sockets cannot be used. In this case, no
/// request has been served. [`ServeError::NotLeader`] if another manager may have taken over.
pub async fn serve(path: PathBuf) -> Result<(), ServeError> {
    descriptors::raise_limit();
    let config = Config::load(&path)?;
    config.check_store_folders(&path, rustix::process::geteuid().as_raw())?;
    if let Some(etcd) = config.manager.etcd.clone() {
        return standby::serve_from_etcd(&path, config, &etcd).await;
    }
    let opened = store_folder::open(&config.manager.folder, &path)?;
    let (access, new_tokens) = AccessControl::load(&path, &config)?;
    new_tokens.create()?; // must run after the store is opened: tokens without a ledger mean that the ledger is lost
    let mut signals = Signals::listen()?; // must precede the first reply: until then, a signal ends the process at once
    let mut config = config;
    serve_ledger(&path, &mut config, opened, &access, &mut signals, None).await.map(drop)
}

/// Reason for which a manager has stopped serving requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// SIGTERM or SIGINT.
    Signal,
    /// Another manager takes over on request of an operator.
    HandOver,
}

/// Serves requests from an open store until the manager stops. `leader` is set if other managers can take over. `config`
/// is replaced when `rack.toml` is reloaded.
async fn serve_ledger(
    path: &Path,
    config: &mut Config,
    opened: OpenedStore,
    access: &AccessControl,
    signals: &mut Signals,
    mut leader: Option<Leader>,
) -> Result<Stop, ServeError> {
    let OpenedStore { store, meta, records, restored } = opened;
    let metrics = Arc::new(Metrics::default());
    let mut contents = store.snapshot()?;
    let forecasts = forecasts::load(contents.as_mut())?;
    let stored = StoredState { forecasts, weights: shares::load(contents.as_mut())? };
    drop(contents);
    let (settings, fence_command) = (manager_settings(config), config.fence.clone());
    let elected = leader.as_ref().map(Leader::elected);
    let initial = InitialState { settings, fence_command, meta, records, restored, leader: elected };
    let (handle, driver) = driver::start(initial, store, Arc::clone(&metrics))
        .map_err(io_error("start", "the thread of the ledger"))?;
    let rack = LoadedRack { handle: handle.clone(), stored, metrics };
    let result = serve_rack(path, config, rack, access, signals, leader.as_mut()).await;
    handle.close();
    let driver_end = tokio::time::timeout(STOP_TIMEOUT, driver).await;
    if let Some(leader) = leader.filter(|_| !matches!(result, Err(ServeError::NotLeader(_)))) {
        leader.resign().await;
    }
    let state =
        if matches!(result, Ok(Stop::HandOver)) { "transfer: standby again" } else { "pool-manager stopped" };
    tracing::info!(durable = driver_end.is_ok(), "{state}");
    result
}

/// Loaded ledger and other contents of the store.
struct LoadedRack {
    handle: Handle,
    stored: StoredState,
    metrics: Arc<Metrics>,
}

/// Store contents that do not belong to the ledger.
struct StoredState {
    forecasts: forecasts::StoredForecasts,
    weights: shares::StoredWeights,
}

/// Authorization of calls and TLS configuration of connections.
struct AccessControl {
    identity: Arc<Identity>,
    rejections: Arc<RejectionLog>,
    tls: watch::Sender<TlsConfig>,
    tls_receiver: watch::Receiver<TlsConfig>,
}

impl AccessControl {
    /// Reads tokens and certificates. Also returns the files of new tokens, which the caller must
    /// create.
    fn load(path: &Path, config: &Config) -> Result<(Self, NewTokenFiles), ServeError> {
        let rejections = Arc::new(RejectionLog::default());
        let (rules, new_tokens) = prepare_rules(config)?;
        let identity = Arc::new(Identity::new(rules, Arc::clone(&rejections)));
        let (tls, tls_receiver) = watch::channel(load_tls_config(path, config)?);
        Ok((Self { identity, rejections, tls, tls_receiver }, new_tokens))
    }

    fn accept(&self, listener: Listener) -> ReceiverStream<std::io::Result<Connection>> {
        connections::accept(listener, self.tls_receiver.clone(), Arc::clone(&self.rejections))
    }
}

/// Serves requests until the manager stops.
async fn serve_rack(
    path: &Path,
    config: &mut Config,
    rack: LoadedRack,
    access: &AccessControl,
    signals: &mut Signals,
    leader: Option<&mut Leader>,
) -> Result<Stop, ServeError> {
    let LoadedRack { handle, stored, metrics } = rack;
    let elected = leader.as_ref().map(|leader| leader.elected());
    configure(path, &handle, config).await?;
    let (policy, policy_receiver) = watch::channel(rpc_policy(config));
    let (rehome, rehome_receiver) = watch::channel(config.qos.rehome);
    let (settings, settings_receiver) = watch::channel(config.prediction);
    let forecasts = Forecasts::new(stored.forecasts, handle.clone(), Arc::clone(&metrics), settings_receiver);
    let forecasts = Arc::new(forecasts);
    let shares = Arc::new(Shares::new(stored.weights, handle.clone()));
    remove_departed_hosts(&shares).await;
    let mut tasks = vec![tokio::spawn(Arc::clone(&forecasts).run_outcome_log())];
    let (stop, stopping) = watch::channel(false);
    let monitor = Monitor::start(forecasts.clone(), handle.clone(), metrics.clone(), rehome_receiver.clone());
    let shared = ServiceContext {
        driver: handle.clone(),
        forecasts: Arc::clone(&forecasts),
        shares: Arc::clone(&shares),
        monitor,
        rehome: rehome_receiver,
        identity: Arc::clone(&access.identity),
        metrics: Arc::clone(&metrics),
        policy: policy_receiver,
        stopping: stopping.clone(),
        managers: rack_managers(config, elected.clone()),
        folder: config.manager.folder.as_path().into(),
        backups: Arc::new(Semaphore::new(1)),
        started_unix_ms: now_unix_ms(),
    };
    let announcement = elected.clone();
    if let Some((elected, etcd)) = elected.zip(config.manager.etcd.as_ref()) {
        let lease = etcd.lease.as_duration();
        tasks.push(tokio::spawn(managers::observe(elected, handle.clone(), Arc::clone(&metrics), lease)));
    }
    let server = start_server(build_router(shared.clone()).await, config, access, stopping.clone())?;
    if let Some(address) = config.manager.metrics_listen {
        tasks.push(http::start(address, shared, stopping).await?);
    }
    tasks.extend(announcement.map(|elected| tokio::spawn(elected.announce_serving())));
    tracing::info!(listen = %config.manager.listen, store = config.manager.store(), "pool-manager ready");
    notify_systemd(&[NotifyState::Ready, NotifyState::Status("serving requests")]);
    tasks.push(tokio::spawn(run_watchdog(ledger_progress(handle.clone()))));
    let targets = ReloadTargets { policy, rehome, settings, shares };
    let result = tokio::select! {
        () = reload_until_stopped(path, config, &handle, access, &targets, signals) => Ok(Stop::Signal),
        end = wait_for_end(leader) => match end {
            LeaderEnd::HandOver => Ok(Stop::HandOver),
            LeaderEnd::Lost(cause) => Err(ServeError::NotLeader(cause)),
        },
    };

    stop_services(&result, &stop, server, tasks).await;
    if result.is_ok() {
        forecasts.flush().await; // writes the last queued outcomes
    }
    result
}

/// Stops the gRPC server and all tasks. Requests are completed unless another manager may be the leader.
async fn stop_services(
    result: &Result<Stop, ServeError>,
    stop: &watch::Sender<bool>,
    server: JoinHandle<()>,
    tasks: Vec<JoinHandle<()>>,
) {
    if matches!(result, Ok(Stop::HandOver)) {
        tracing::info!("transfer: completing requests");
    } else {
        tracing::info!("pool-manager stopping");
        notify_systemd(&[NotifyState::Stopping]);
    }
    let _ = stop.send(true); // fails only if the servers have ended
    if result.is_ok() {
        wait_for_server_end(server).await;
    } else {
        server.abort(); // clients must not wait for this manager
    }
    tasks.iter().for_each(JoinHandle::abort);
}

/// Returns the managers of the rack: this one, or those in etcd.
fn rack_managers(config: &Config, elected: Option<ElectedManager>) -> Managers {
    elected.map_or_else(
        || {
            let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
            let address = config.manager.listen.uri(config.tls.is_some());
            Managers::Only(ManagerEntry::new(machine, address, now_unix_ms()))
        },
        Managers::Elected,
    )
}

/// Waits until the leader must stop; forever if there are no other managers.
async fn wait_for_end(leader: Option<&mut Leader>) -> LeaderEnd {
    match leader {
        Some(leader) => leader.wait_for_end().await,
        None => std::future::pending().await,
    }
}

/// Starts the gRPC server with the services of a router.
fn start_server(
    router: Router,
    config: &Config,
    access: &AccessControl,
    stopping: watch::Receiver<bool>,
) -> Result<JoinHandle<()>, ServeError> {
    let incoming = access.accept(listen(config)?);
    Ok(tokio::spawn(async move {
        let stopped = wait_until_stopping(stopping);
        if let Err(error) = router.serve_with_incoming_shutdown(incoming, stopped).await {
            tracing::error!(error = units::chain(&error), "gRPC server ended");
        }
    }))
}

async fn wait_for_server_end(server: tokio::task::JoinHandle<()>) {
    let ended = tokio::time::timeout(STOP_TIMEOUT, server).await;
    if ended.is_err() {
        tracing::warn!(waited = ?STOP_TIMEOUT, "aborting connections: clients or agents did not close them");
    }
}

fn notify_systemd(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "cannot notify the service manager");
    }
}

fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn manager_settings(config: &Config) -> Settings {
    Settings { lease_ttl: config.lease.ttl, fence_after: config.lease.fence_after }
}

fn rpc_policy(config: &Config) -> Policy {
    Policy {
        pool_share: config.policy.pool_share,
        commit_within: config.policy.commit_within,
        lease_ttl: config.lease.ttl,
    }
}

/// Returns the rules of the configuration, and the files of new tokens, which the caller must
/// create.
fn prepare_rules(config: &Config) -> Result<(AccessRules, NewTokenFiles), TokenError> {
    let (tokens, new_tokens) = Tokens::prepare(&config.manager.folder, &config.hosts)?;
    let certificate_names = config.tls.as_ref().map(|tls| (tls.schedulers.clone(), tls.admins.clone()));
    Ok((AccessRules { tokens, access: config.access.clone(), certificate_names }, new_tokens))
}

fn to_rack_spec(config: &Config) -> RackSpec {
    let emc = |e: &crate::config::Emc| EmcSpec {
        name: e.name.clone(),
        slices: e.slices,
        driver: e.driver.name().into(),
        path: e.path.display().to_string(),
        serial: e.serial.clone(),
    };
    let host = |h: &crate::config::Host| HostSpec {
        name: h.name.clone(),
        cores: h.cores,
        local: h.local,
        emcs: h.emcs.clone(),
    };
    RackSpec { emcs: config.emcs.iter().map(emc).collect(), hosts: config.hosts.iter().map(host).collect() }
}

async fn configure(path: &Path, handle: &Handle, config: &Config) -> Result<(), ServeError> {
    let rejected = |error| ServeError::Configure { path: path.to_owned(), error };
    handle.request(Request::Configure(to_rack_spec(config))).await.map_err(rejected)?;
    handle.apply_settings(manager_settings(config), config.fence.clone()).map_err(rejected)
}

/// Signals that control the manager.
struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Starts to listen. Signals are queued until they are received.
    fn listen() -> Result<Self, ServeError> {
        let on = |kind| signal(kind).map_err(io_error("listen for", "signals"));
        let (hangup, terminate) = (on(SignalKind::hangup())?, on(SignalKind::terminate())?);
        Ok(Self { hangup, terminate, interrupt: on(SignalKind::interrupt())? })
    }
}

/// Recipients of the settings that a reload can change.
struct ReloadTargets {
    policy: watch::Sender<Policy>,
    rehome: watch::Sender<RehomePolicy>,
    settings: watch::Sender<forecasts::Settings>,
    shares: Arc<Shares>,
}

/// Deletes the weights of hosts that were removed from the rack. A failure is only logged, because
/// the next start or reload tries again.
async fn remove_departed_hosts(shares: &Shares) {
    if let Err(error) = shares.remove_departed_hosts().await {
        tracing::warn!(error = units::chain(&error), "cannot delete weights of removed hosts");
    }
}

/// Reloads `rack.toml` on SIGHUP; a rejected file changes nothing. Returns on SIGTERM or SIGINT.
async fn reload_until_stopped(
    path: &std::path::Path,
    config: &mut Config,
    handle: &Handle,
    access: &AccessControl,
    targets: &ReloadTargets,
    signals: &mut Signals,
) {
    let Signals { hangup, terminate, interrupt } = signals;
    loop {
        tokio::select! {
            _ = hangup.recv() => match reload(path, config, handle, access).await {
                Ok(new) => {
                    tracing::info!(path = %path.display(), "rack.toml reloaded");
                    targets.policy.send_replace(rpc_policy(&new));
                    targets.rehome.send_replace(new.qos.rehome);
                    targets.settings.send_replace(new.prediction);
                    remove_departed_hosts(&targets.shares).await;
                    *config = new;
                }
                Err(error) => log_rejected_reload(path, &error),
            },
            _ = terminate.recv() => return,
            _ = interrupt.recv() => return,
        }
    }
}

fn log_rejected_reload(path: &Path, error: &ServeError) {
    let error = units::chain(error);
    tracing::error!(path = %path.display(), error, "cannot reload rack.toml, keeping the previous configuration");
}

/// Loads `rack.toml`, and rejects changes that require a restart.
fn load_changed(path: &Path, old: &Config) -> Result<Config, ServeError> {
    let new = Config::load(path)?;
    new.check_store_folders(path, rustix::process::geteuid().as_raw())?;
    let changes: Vec<String> =
        changed_immutable_settings(old, &new).iter().map(ToString::to_string).collect();
    if changes.is_empty() { Ok(new) } else { Err(ServeError::ImmutableSetting(changes.join("; "))) }
}

/// Loads and applies `rack.toml`. Creates new tokens only after the ledger has accepted the change.
/// If a token cannot be created, the change stays in effect, and the next reload tries again.
///
/// # Errors
/// [`ServeError`] if the file is rejected, or if a token or certificate cannot be read. In this
/// case, nothing is changed.
async fn reload(
    path: &std::path::Path,
    old: &Config,
    handle: &Handle,
    access: &AccessControl,
) -> Result<Config, ServeError> {
    let new = load_changed(path, old)?;
    let ((rules, new_tokens), tls) = (prepare_rules(&new)?, load_tls_config(path, &new)?);
    configure(path, handle, &new).await?;
    if let Err(error) = new_tokens.create() {
        tracing::error!(
            error = units::chain(&error),
            "cannot create new tokens, the next reload tries again"
        );
    }
    access.identity.replace(rules);
    access.tls.send_replace(tls);
    Ok(new)
}

/// gRPC router with the layer that counts open calls.
type Router = tonic::transport::server::Router<Stack<CallCounterLayer, tower_layer::Identity>>;

/// Returns a gRPC server without services.
fn server_builder() -> Server<Stack<CallCounterLayer, tower_layer::Identity>> {
    Server::builder()
        .max_concurrent_streams(CALLS_PER_CONNECTION_MAX)
        .http2_keepalive_interval(Some(SESSION_SILENCE_TIMEOUT.as_duration())) // closes connections of clients that do not respond
        .http2_keepalive_timeout(Some(SESSION_SILENCE_TIMEOUT.as_duration()))
        .layer(CallCounterLayer)
}

async fn build_router(shared: ServiceContext) -> Router {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<SchedulerServer<Scheduler>>().await;
    health.set_serving::<AdminServer<Admin>>().await;
    health.set_serving::<AgentServer<Agent>>().await;
    health.set_serving::<ModelsServer<Models>>().await;
    // Version 1alpha is for clients such as those of Python, which do not use version 1.
    let reflection_builder = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::v1::MANAGER_FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET) // types of error details
            .with_service_name(<SchedulerServer<Scheduler> as NamedService>::NAME)
            .with_service_name(<AdminServer<Admin> as NamedService>::NAME)
            .with_service_name(<ModelsServer<Models> as NamedService>::NAME)
            .with_service_name(<AgentServer<Agent> as NamedService>::NAME)
            .with_service_name("grpc.health.v1.Health")
    };
    let reflection = reflection_builder().build_v1().expect("the file descriptor sets are valid");
    let reflection_v1alpha =
        reflection_builder().build_v1alpha().expect("the file descriptor sets are valid");
    let rpc = Arc::clone(&shared.metrics.rpc);
    let scheduler =
        SchedulerServer::new(Scheduler(shared.clone())).max_decoding_message_size(RPC_MESSAGE_BYTES_MAX);
    let admin = AdminServer::new(Admin(shared.clone())).max_decoding_message_size(RPC_MESSAGE_BYTES_MAX);
    let models = ModelsServer::new(Models(shared.clone())).max_decoding_message_size(RPC_MESSAGE_BYTES_MAX);
    let agent = AgentServer::new(Agent(shared)).max_decoding_message_size(RPC_MESSAGE_BYTES_MAX);
    server_builder()
        .add_service(reflection)
        .add_service(reflection_v1alpha)
        .add_service(CountedService::new(scheduler, &rpc))
        .add_service(CountedService::new(admin, &rpc))
        .add_service(CountedService::new(models, &rpc))
        .add_service(CountedService::new(agent, &rpc))
        .add_service(health_service)
}

fn load_tls_config(path: &Path, config: &Config) -> Result<TlsConfig, ServeError> {
    let Some(tls) = &config.tls else { return Ok(None) };
    let loaded = tls::load(tls).map_err(|error| ServeError::Tls { path: path.to_owned(), error })?;
    let days_left = loaded.days_left();
    if days_left < tls::EXPIRY_WARNING_DAYS {
        tracing::warn!(certificate = %tls.certificate.display(), days_left, "a certificate expires soon");
    }
    Ok(Some(loaded.config))
}

fn listen_on_address(address: std::net::SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?; // connections of the previous process may still be closing
    socket.bind(address)?;
    socket.listen(ACCEPT_BACKLOG)
}

fn listen(config: &Config) -> Result<Listener, ServeError> {
    match &config.manager.listen {
        Listen::Tcp(address) => {
            let failed = io_error("listen on", format!("manager.listen {address}"));
            Ok(Listener::Tcp(listen_on_address(*address).map_err(failed)?))
        }
        Listen::Unix(path) => {
            let listener = connections::bind(path, config.access.group)?;
            Ok(Listener::Unix(
                UnixListener::from_std(listener).map_err(io_error("listen on", path.display()))?,
            ))
        }
    }
}

async fn wait_until_stopping(mut stopping: watch::Receiver<bool>) {
    drop(stopping.wait_for(|stop| *stop).await);
}

/// Sends watchdog notifications to systemd, if it requires them, while `makes_progress` returns
/// `true`. Otherwise, systemd restarts the manager.
async fn run_watchdog(mut makes_progress: impl FnMut() -> bool) {
    let Some(within) = sd_notify::watchdog_enabled() else { return };
    let mut tick = tokio::time::interval(within / 4);
    loop {
        tick.tick().await;
        if makes_progress() {
            notify_systemd(&[NotifyState::Watchdog]);
        }
    }
}

/// Returns whether the ledger's thread has made progress since the last call. It does not if a write
/// hangs.
fn ledger_progress(handle: Handle) -> impl FnMut() -> bool {
    let mut last = None;
    move || {
        let iterations = Some(handle.wake_and_count_iterations());
        std::mem::replace(&mut last, iterations) != iterations
    }
}

#[cfg(test)]
mod tests;
