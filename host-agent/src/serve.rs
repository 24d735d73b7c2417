//! `host-agent serve`: starts an agent from host.toml, and stops it on SIGTERM or SIGINT. Guests
//! keep running.
//!
//! The order matters: the directory is locked and its VMs are loaded before the agent connects or
//! listens.

use std::{
    fs::{DirBuilder, File, TryLockError},
    io,
    net::SocketAddr,
    num::{NonZeroU32, NonZeroU64},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use pool::agent::Agent;
use rustix::process::{Resource, getrlimit, setrlimit};
use sd_notify::NotifyState;
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    task::JoinHandle,
};
use units::{InstanceId, Name, Ns};

use crate::{
    config::{Backend, Config, ConfigError},
    driver::{Driver, DriverInputs, Handle},
    host::{
        Host, HostError,
        cxl::{CxlError, CxlMemory, Device},
        dax::Dax,
        emulated::Emulated,
        memory_block::MemoryBlock,
        process::{self, ProcessError},
        ranges::Ranges,
        sysfs::Sysfs,
    },
    host_memory::{HostMemory, ListenError},
    metrics::Metrics,
    records::{Records, RecordsError},
    runtime_dir::{RuntimeDir, RuntimeDirError},
    secrets::{SecretsError, read_secrets},
    session::{self, AgentIdentity},
    session_channel::SessionEvent,
    shares::SharesState,
    symbiosis::{self, KernelPaths, SymbiosisThread},
    usage,
    usage_table::UsageTable,
    user::current_user,
};

/// Events of the session that the driver has not processed yet; further ones wait in the network.
const SESSION_EVENTS_QUEUED_MAX: usize = 4;
/// Folder of the kernel's devices.
const SYS: &str = "/sys";
/// List of swap devices.
const SWAPS: &str = "/proc/swaps";
/// Bytes per MiB.
const MIB: NonZeroU64 = NonZeroU64::new(1 << 20).expect("it is not zero");

/// Reason why the agent did not start, or failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// host.toml.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Token or certificate.
    #[error(transparent)]
    Secrets(#[from] SecretsError),
    /// The agent's directory.
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    /// Records of VMs.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// Boot id of this machine.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Slices of this machine.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The CXL memory.
    #[error(transparent)]
    Cxl(#[from] CxlError),
    /// The operating system rejected an operation.
    #[error("{doing} {place}")]
    Io {
        /// Operation.
        doing: &'static str,
        /// Object.
        place: String,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// Another agent of this host runs on this machine.
    #[error("another host-agent runs as host {host} on this machine: it has locked {}", path.display())]
    HostInUse {
        /// Host.
        host: Name,
        /// Its token, or the key of its certificate.
        path: PathBuf,
    },
    /// The driver task ended.
    #[error("the driver ended unexpectedly")]
    DriverEnded,
}

fn io_error(doing: &'static str, place: impl std::fmt::Display) -> impl FnOnce(io::Error) -> ServeError {
    let place = place.to_string();
    move |errno| ServeError::Io { doing, place, errno }
}

/// Reads and checks host.toml and the files it names; starts nothing.
///
/// # Errors
/// The configuration or a file in it is invalid.
pub fn check_config(path: &Path) -> Result<(), ServeError> {
    let config = Config::load(path)?;
    read_secrets(&config)?;
    Ok(())
}

/// Runs until a signal ends it.
///
/// # Errors
/// Configuration, records or sockets are invalid; nothing has been started then.
pub async fn serve(path: &Path) -> Result<(), ServeError> {
    let config = Config::load(path)?;
    let token = read_secrets(&config)?;
    let _identity_lock = lock_identity(&config)?;
    let signals = (listen_for(SignalKind::terminate())?, listen_for(SignalKind::interrupt())?);
    raise_descriptor_limit();
    let PreparedAgent { inputs, session_events, boot_id, instance } = prepare(&config)?;
    let (metrics, devices) = (Arc::clone(&inputs.metrics), inputs.host.devices());
    let host_calls = Arc::clone(&inputs.host);
    let (driver, handle, reports) =
        Driver::new(inputs).map_err(io_error("start threads for", "host calls"))?;
    let shares = Arc::new(SharesState::default());
    let sharing = start_symbiosis(&config, Arc::clone(&metrics), Arc::clone(&shares));
    let host_memory = HostMemory::listen(&config.socket, config.allowed_uids.clone())?;
    if let Some(address) = config.metrics_listen {
        let usage = Arc::clone(&reports.usage);
        export(address, metrics, handle.clone(), Arc::clone(&host_calls), usage).await?;
    }
    let (manager, host, socket, tls) = (config.manager, config.host, config.socket, config.tls);
    tracing::info!(%host, manager, socket = %socket.display(), "host-agent ready");
    let identity = AgentIdentity { manager, host, token, tls, boot_id, instance, socket, devices };
    let mut driver = tokio::spawn(driver.run());
    tokio::spawn(host_memory.serve(handle.clone()));
    tokio::spawn(usage::measure_periodically(handle.clone(), host_calls, Arc::clone(&reports.usage)));
    tokio::spawn(session::run_sessions(identity, reports, shares, session_events));
    tokio::spawn(watchdog(handle));
    notify(&[NotifyState::Ready]);

    let result = wait_for_stop(signals, &mut driver).await;
    notify(&[NotifyState::Stopping]);
    driver.abort();
    drop(sharing);
    tracing::info!("host-agent stopped, guests run on");
    result
}

/// Starts Symbiosis, if it is configured.
fn start_symbiosis(
    config: &Config,
    metrics: Arc<Metrics>,
    shares: Arc<SharesState>,
) -> Option<SymbiosisThread> {
    let sharing = config.symbiosis.clone()?;
    tracing::info!(cgroups = %sharing.cgroups.display(), epoch = %sharing.epoch, "Symbiosis starts");
    let kernel = KernelPaths { sys: SYS.into(), swaps: SWAPS.into() };
    let runtime_dir = config.runtime_dir.clone();
    Some(symbiosis::EpochRunner { config: sharing, runtime_dir, kernel, state: shares, metrics }.start())
}

/// State of an agent before it connects or listens.
struct PreparedAgent {
    inputs: DriverInputs,
    session_events: mpsc::Sender<SessionEvent>,
    boot_id: String,
    instance: InstanceId,
}

fn prepare(config: &Config) -> Result<PreparedAgent, ServeError> {
    let runtime_dir = RuntimeDir::lock(&config.runtime_dir)?;
    let boot_id = process::boot_id()?;
    let records = Records::open(runtime_dir.path(), &boot_id)?;
    let vms = records.load()?;
    let alive = vms.iter().filter(|adopted| adopted.is_alive).count();
    tracing::info!(vms = vms.len(), alive, "records of VMs loaded");
    let (rack, instance) = (runtime_dir.rack()?, runtime_dir.next_instance()?);
    let host = host(&config.backend)?;
    let orphans = host.present_slices()?;
    if !orphans.is_empty() {
        tracing::info!(slices = orphans.len(), "slices of an earlier agent are present");
    }
    vms.iter().filter(|adopted| adopted.is_alive).for_each(|adopted| host.adopt(&adopted.record));
    let mut agent = Agent::new(Ns::ZERO, instance, rack, vms, orphans);
    agent.set_user(current_user());
    for device in host.devices().iter().filter(|device| device.problem.is_some()) {
        tracing::warn!(
            serial = device.serial,
            "device unusable: its slices are not checked, so this host is never reported clean"
        );
        agent.set_hidden_remains();
    }
    let (sender, session_events) = mpsc::channel(SESSION_EVENTS_QUEUED_MAX);
    let metrics = Arc::new(Metrics::new(&config.host, config.backend.name()));
    let inputs = DriverInputs { agent, host, records, runtime_dir, metrics, session_events };
    Ok(PreparedAgent { inputs, session_events: sender, boot_id, instance })
}

fn host(backend: &Backend) -> Result<Arc<dyn Host>, ServeError> {
    match backend {
        Backend::Emulated { local_dir } => {
            make_local_dir(local_dir.as_deref())?;
            Ok(Arc::new(Emulated::new(local_dir.clone())))
        }
        Backend::Dax { local_dir, scrub_mib_per_s } => {
            make_local_dir(local_dir.as_deref())?;
            Ok(Arc::new(Dax::new(ranges(*scrub_mib_per_s)?, local_dir.clone())))
        }
        Backend::MemoryBlock { local_dir, scrub_mib_per_s } => {
            make_local_dir(local_dir.as_deref())?;
            let ranges = ranges(*scrub_mib_per_s)?;
            Ok(Arc::new(MemoryBlock::new(Sysfs::at(SYS), ranges, local_dir.clone())))
        }
    }
}

fn make_local_dir(local_dir: Option<&Path>) -> Result<(), ServeError> {
    let Some(directory) = local_dir else { return Ok(()) };
    let made = DirBuilder::new().recursive(true).mode(0o711).create(directory);
    made.map_err(io_error("make", directory.display()))
}

/// Reports unusable devices and uses the others.
fn ranges(scrub_mib_per_s: NonZeroU32) -> Result<Ranges, ServeError> {
    let cxl = CxlMemory::discover(&Sysfs::at(SYS))?;
    for Device { name, serial, slices, .. } in &cxl.devices {
        match slices {
            Ok(slices) => {
                let region = slices.region();
                let (count, align, node) = (slices.count(), slices.align(), slices.node());
                tracing::info!(name, serial, region = region.name, count, %align, node, "CXL memory");
            }
            Err(problem) => {
                tracing::error!(name, serial, problem = units::chain(problem), "CXL memory not used");
            }
        }
    }
    Ok(Ranges::new(cxl, NonZeroU64::from(scrub_mib_per_s).saturating_mul(MIB)))
}

/// Locks the file that identifies this host, its token or the key of its certificate, until the
/// result is dropped: one agent per host and machine, also if another one has its own runtime
/// directory.
fn lock_identity(config: &Config) -> Result<Option<File>, ServeError> {
    let key = config.tls.as_ref().map(|tls| &tls.key);
    let Some(path) = config.token_file.as_ref().or(key) else { return Ok(None) };
    let file = File::open(path).map_err(io_error("open", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => {
            Err(ServeError::HostInUse { host: config.host.clone(), path: path.clone() })
        }
        Err(TryLockError::Error(errno)) => Err(io_error("lock", path.display())(errno)),
    }
}

/// Each slice needs a descriptor, so the limit is raised to the maximum.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "descriptor limit not raised");
    }
}

fn listen_for(kind: SignalKind) -> Result<Signal, ServeError> {
    signal(kind).map_err(io_error("listen for", "signals"))
}

async fn wait_for_stop(
    (mut terminate, mut interrupt): (Signal, Signal),
    driver: &mut JoinHandle<()>,
) -> Result<(), ServeError> {
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        _ = driver => Err(ServeError::DriverEnded),
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "no service manager to notify");
    }
}

/// Notifies the service manager, if any, that the driver responds.
async fn watchdog(driver: Handle) {
    let Some(timeout) = sd_notify::watchdog_enabled() else { return };
    let mut interval = tokio::time::interval(timeout / 3);
    loop {
        interval.tick().await;
        if driver.inspect(|_| ()).await.is_ok() {
            notify(&[NotifyState::Watchdog]);
        }
    }
}

/// Serves metrics over HTTP.
async fn export(
    address: SocketAddr,
    metrics: Arc<Metrics>,
    driver: Handle,
    host: Arc<dyn Host>,
    usage: Arc<UsageTable>,
) -> Result<(), ServeError> {
    let listener = TcpListener::bind(address).await.map_err(io_error("listen on", address))?;
    let show = move || {
        let (metrics, driver, host) = (Arc::clone(&metrics), driver.clone(), Arc::clone(&host));
        let usage = Arc::clone(&usage);
        async move {
            let gauges = Arc::clone(&metrics);
            let observed = driver.inspect(move |agent| gauges.observe(agent, &usage.all())).await;
            observed.map_err(|error| error.to_string())?;
            metrics.observe_host(host.counters());
            let page = metrics.text().map_err(|error| error.to_string())?;
            Ok::<_, String>(([(axum::http::header::CONTENT_TYPE, exposition::CONTENT_TYPE)], page))
        }
    };
    let app = axum::Router::new().route("/metrics", axum::routing::get(show));
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, app).await {
            tracing::error!(error = units::chain(&error), "metrics server ended");
        }
    });
    Ok(())
}
