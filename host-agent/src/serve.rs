//! `host-agent serve`: starts an agent from host.toml, and stops it on SIGTERM or SIGINT. Guests keep running after the
//! agent has stopped.
//!
//! The runtime directory is locked, and the records of VMs are loaded, before the agent connects to the manager or
//! listens on its sockets.

use std::{
    io,
    net::SocketAddr,
    num::{NonZeroU32, NonZeroU64},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use pool::agent::Agent;
use sd_notify::NotifyState;
use service_files::{descriptors, sockets::SocketError};
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    task::{JoinHandle, JoinSet},
};
use units::{InstanceId, Name, Ns};

use crate::{
    component_thread::ComponentThread,
    config::{Backend, Config, ConfigError},
    driver::{Driver, DriverInputs, Handle},
    early_eviction::{self, CycleRunner},
    eviction_report,
    fair_tiering::{self, KernelRoots, StepRunner},
    host::{
        Host, HostError,
        cxl::{CxlError, CxlMemory, Device},
        dax::Dax,
        emulated::Emulated,
        memory_block::MemoryBlock,
        process::{self, ProcessError},
        ranges::CxlSlices,
        sysfs::Sysfs,
    },
    host_lock::{HostLock, HostLockError},
    host_memory::{self, HostMemoryServer},
    manager_token::ManagerToken,
    metrics::Metrics,
    protected_dir::{DirError, LOCAL_DIR_FIELD, ProtectedDir, TRAVERSABLE_MODE},
    records::{Records, RecordsError},
    report_slot::ReportSlot,
    runtime_dir::{RUNTIME_DIR_FIELD, RuntimeDir, RuntimeDirError},
    sampling::{self, SamplingInputs},
    secrets::{SecretsError, read_secrets},
    session::{self, AgentIdentity},
    session_channel::SessionEvent,
    shares::SharesState,
    soft_memory::{self, SoftMemoryServer},
    soft_memory_report,
    symbiosis::{self, KernelPaths},
    tenant_profiles::TenantProfiles,
    tiering_report::Report,
    usage,
    usage_table::UsageTable,
    user::current_user,
};

/// Maximum number of session events that wait for the driver. Further messages of the manager wait in the network.
const SESSION_EVENTS_QUEUED_MAX: usize = 4;
/// Interval at which the slices that tenants may use are counted.
const SLICES_COUNT_INTERVAL: Duration = Duration::from_secs(1);
/// Root of sysfs.
const SYS: &str = "/sys";
/// Root of procfs.
const PROC: &str = "/proc";
/// File with the list of active swap devices.
const SWAPS_FILE: &str = "/proc/swaps";
/// Bytes per MiB.
const MIB: NonZeroU64 = NonZeroU64::new(1 << 20).expect("1 MiB is not zero");

/// Reason why the agent did not start, or ended unexpectedly.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// host.toml is missing or invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The token or a certificate cannot be used.
    #[error(transparent)]
    Secrets(#[from] SecretsError),
    /// The runtime directory cannot be used.
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    /// `local_dir` cannot be used, or another user can change a directory of the agent.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The host name cannot be locked.
    #[error(transparent)]
    HostLock(#[from] HostLockError),
    /// The VM records cannot be loaded.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// The boot id of this machine cannot be read.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The slices of this machine cannot be listed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The agent cannot listen on its socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// This machine has no CXL memory device.
    #[error(transparent)]
    Cxl(#[from] CxlError),
    /// The operating system rejected an operation.
    #[error("cannot {operation} {object}")]
    Io {
        /// Operation, such as `listen on`.
        operation: &'static str,
        /// Object of the operation, such as a path or an address.
        object: String,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// The task of the driver ended.
    #[error("the driver ended unexpectedly")]
    DriverEnded,
}

fn io_error(operation: &'static str, object: impl std::fmt::Display) -> impl FnOnce(io::Error) -> ServeError {
    let object = object.to_string();
    move |errno| ServeError::Io { operation, object, errno }
}

/// Checks host.toml, and the files, directories and sockets named in it, without starting an agent.
///
/// # Errors
/// [`ServeError::Config`], [`ServeError::Secrets`], [`ServeError::Dir`] or [`ServeError::Socket`].
pub fn check_config(path: &Path) -> Result<(), ServeError> {
    let config = Config::load(path)?;
    config.check_folders(path)?;
    read_secrets(&config)?;
    check_existing_dir(RUNTIME_DIR_FIELD, &config.runtime_dir)?;
    check_existing_dir(RUNTIME_DIR_FIELD, &Records::directory(&config.runtime_dir))?;
    host_memory::socket_path(&config.socket).exists()?;
    if config.soft_memory.is_some() {
        soft_memory::socket_path(&config.soft_memory_socket()).exists()?;
    }
    Ok(config.backend.local_dir().map_or(Ok(()), |dir| check_existing_dir(LOCAL_DIR_FIELD, dir))?)
}

/// Checks a directory unless it is missing: the agent creates it.
fn check_existing_dir(field: &'static str, path: &Path) -> Result<(), DirError> {
    match ProtectedDir::open(field, path) {
        Err(DirError::Io { errno, .. }) if errno.kind() == io::ErrorKind::NotFound => Ok(()),
        opened => opened.map(drop),
    }
}

/// Runs an agent until SIGTERM or SIGINT.
///
/// # Errors
/// The agent cannot start, for example because host.toml or a record is invalid; or
/// [`ServeError::DriverEnded`].
pub async fn serve(path: &Path) -> Result<(), ServeError> {
    let config = Config::load(path)?;
    config.check_socket_folders(path)?;
    let secrets = read_secrets(&config)?;
    let _host_lock = HostLock::acquire(&config.host, &config.managers, &secrets)?;
    let token = secrets.token;
    descriptors::raise_limit();
    let PreparedAgent { inputs, session_events, boot_id, instance, manager_token } = prepare_agent(&config)?;
    // Until here, a signal ends the process immediately, even if a system call waits.
    let signals = (listen_for_signal(SignalKind::terminate())?, listen_for_signal(SignalKind::interrupt())?);
    let (metrics, devices) = (Arc::clone(&inputs.metrics), inputs.host.devices());
    let host_calls = Arc::clone(&inputs.host);
    let (driver, handle, reports) =
        Driver::new(inputs).map_err(io_error("start threads for", "host calls"))?;
    let sampling = config.sample_interval.map(|interval| SamplingInputs {
        interval,
        driver: handle.clone(),
        host: Arc::clone(&host_calls),
        usage: Arc::clone(&reports.usage),
        outbox: Arc::clone(&reports.samples),
        metrics: Arc::clone(&metrics),
        sys: SYS,
        runtime_dir: config.runtime_dir.clone(),
        boot_id: boot_id.clone(),
        damon_user: damon_user(&config),
        pool_latency_ratio: config.pool_latency_ratio,
    });
    if sampling.is_none() && damon_user(&config).is_none() {
        sampling::stop_damon_of_earlier_agent(Path::new(SYS), &config.runtime_dir, &boot_id);
    }
    let shares = Arc::new(SharesState::default());
    let profiles = (config.symbiosis.is_some() && config.tiering.is_some()).then(Arc::default);
    let sharing = start_symbiosis(&config, Arc::clone(&metrics), Arc::clone(&shares), profiles.clone());
    let tiering = start_tiering(
        &config,
        &handle,
        Arc::clone(&metrics),
        Arc::clone(&shares),
        profiles,
        Arc::clone(&reports.tiering),
    );
    let eviction = start_early_eviction(&config, Arc::clone(&metrics), Arc::clone(&reports.evictions));
    let soft_memory = listen_for_soft_memory(&config, &handle, &metrics, Arc::clone(&reports.soft_memory))?;
    let host_memory = HostMemoryServer::listen(&config.socket, config.allowed_uids.clone())?;
    if let Some(address) = config.metrics_listen {
        let usage = Arc::clone(&reports.usage);
        serve_metrics(address, metrics, handle.clone(), Arc::clone(&host_calls), usage).await?;
    }
    let (managers, host, socket, tls) = (config.managers, config.host, config.socket, config.tls);
    tracing::info!(%host, managers = managers.join(","), socket = %socket.display(), "host-agent ready");
    let identity = AgentIdentity { managers, host, token, tls, boot_id, instance, socket, devices };
    let mut driver = tokio::spawn(driver.run());
    let mut tasks = JoinSet::new();
    if let Some(server) = soft_memory {
        tasks.spawn(server.serve());
    }
    tasks.spawn(host_memory.serve(handle.clone()));
    tasks.spawn(usage::measure_periodically(handle.clone(), host_calls, Arc::clone(&reports.usage)));
    if let Some(inputs) = sampling {
        tasks.spawn(sampling::sample_periodically(inputs));
    }
    tasks.spawn(session::run_sessions(identity, manager_token, reports, shares, session_events));
    tasks.spawn(watchdog(handle));
    notify(&[NotifyState::Ready]);

    let result = wait_for_stop_signal(signals, &mut driver).await;
    stop(&driver, tasks, [sharing, tiering, eviction]).await;
    result
}

/// Stops the driver, all tasks and the threads of components.
async fn stop<T>(driver: &JoinHandle<T>, mut tasks: JoinSet<()>, components: [Option<ComponentThread>; 3]) {
    notify(&[NotifyState::Stopping]);
    driver.abort();
    // Closes the sockets. Threads that the tasks have started end, too.
    tasks.shutdown().await;
    drop(components);
    tracing::info!("host-agent stopped, guests keep running");
}

/// Starts Symbiosis, if it is configured.
fn start_symbiosis(
    config: &Config,
    metrics: Arc<Metrics>,
    shares: Arc<SharesState>,
    profiles: Option<Arc<TenantProfiles>>,
) -> Option<ComponentThread> {
    let sharing = config.symbiosis.clone()?;
    tracing::info!(cgroups = %sharing.cgroups.display(), epoch = %sharing.epoch, "starting Symbiosis");
    let kernel = KernelPaths { sys: SYS.into(), swaps: SWAPS_FILE.into() };
    let runtime_dir = config.runtime_dir.clone();
    Some(
        symbiosis::EpochRunner { config: sharing, runtime_dir, kernel, state: shares, profiles, metrics }
            .start(),
    )
}

/// Starts fair tiering, if it is configured.
fn start_tiering(
    config: &Config,
    driver: &Handle,
    metrics: Arc<Metrics>,
    shares: Arc<SharesState>,
    profiles: Option<Arc<TenantProfiles>>,
    reports: Arc<ReportSlot<Report>>,
) -> Option<ComponentThread> {
    let tiering = config.tiering.clone()?;
    tracing::info!(cgroups = %tiering.cgroups.display(), step = %tiering.step, "starting fair tiering");
    let slices = tiering.reservation.clone().map(|reservation| start_count_of_slices(driver, reservation, 0));
    let inputs = fair_tiering::Inputs {
        config: tiering,
        runtime_dir: config.runtime_dir.clone(),
        slices,
        kernel: KernelRoots { sys: SYS.into(), proc: PROC.into() },
        shares,
        profiles,
        reports,
    };
    Some(StepRunner { inputs, metrics }.start())
}

/// Starts early eviction, if it is configured.
fn start_early_eviction(
    config: &Config,
    metrics: Arc<Metrics>,
    reports: Arc<ReportSlot<eviction_report::Report>>,
) -> Option<ComponentThread> {
    let eviction = config.early_eviction.clone()?;
    let (cgroups, device) = (eviction.cgroups.display(), eviction.device.display());
    tracing::info!(%cgroups, %device, "starting early eviction");
    let (runtime_dir, sys, proc) = (config.runtime_dir.clone(), SYS.into(), PROC.into());
    let inputs = early_eviction::Inputs { config: eviction, runtime_dir, sys, proc };
    Some(CycleRunner { inputs, metrics, reports }.start())
}

/// Listens for clients of soft memory, if it is configured.
fn listen_for_soft_memory(
    config: &Config,
    driver: &Handle,
    metrics: &Arc<Metrics>,
    reports: Arc<ReportSlot<soft_memory_report::Report>>,
) -> Result<Option<SoftMemoryServer>, ServeError> {
    let Some(settings) = config.soft_memory.clone() else { return Ok(None) };
    if settings.reservation.is_some() && !matches!(config.backend, Backend::MemoryBlock { .. }) {
        tracing::warn!(
            backend = config.backend.name(),
            "soft_memory.reservation adds no memory with this backend"
        );
    }
    let slices = settings
        .reservation
        .clone()
        .map(|reservation| start_count_of_slices(driver, reservation, soft_memory::SLICES_UNKNOWN));
    let inputs = soft_memory::Inputs {
        allowed_uids: settings.users(&config.allowed_uids).clone(),
        config: settings,
        slices,
        proc: Sysfs::at(PROC),
        reports,
        metrics: Arc::clone(metrics),
    };
    let socket = config.soft_memory_socket();
    tracing::info!(socket = %socket.display(), size = %inputs.config.size, "starting soft memory");
    Ok(Some(SoftMemoryServer::listen(&socket, inputs)?))
}

/// Starts to count the online slices of a reservation. The number is `initial` until the manager has sent the desired
/// state.
fn start_count_of_slices(driver: &Handle, reservation: Name, initial: u64) -> Arc<AtomicU64> {
    let slices = Arc::new(AtomicU64::new(initial));
    tokio::spawn(count_slices(driver.clone(), reservation, Arc::clone(&slices)));
    slices
}

/// Updates the number of online slices of a reservation until the agent stops.
async fn count_slices(driver: Handle, reservation: Name, slices: Arc<AtomicU64>) {
    let mut ticks = tokio::time::interval(SLICES_COUNT_INTERVAL);
    loop {
        ticks.tick().await;
        let reservation = reservation.clone();
        let count = driver.inspect(move |agent| {
            agent.has_desired_state().then(|| agent.unattached_slice_count(&reservation))
        });
        match count.await {
            Ok(Some(count)) => slices.store(count as u64, Ordering::Relaxed),
            Ok(None) => {}
            Err(_) => return,
        }
    }
}

/// Returns the function that uses DAMON, so that VMs cannot be sampled by DAMON.
fn damon_user(config: &Config) -> Option<&'static str> {
    match (&config.symbiosis, &config.tiering) {
        (_, Some(_)) => Some("fair tiering uses DAMON"),
        (Some(_), None) => Some("Symbiosis uses DAMON"),
        (None, None) => None,
    }
}

/// Objects of an agent that has not yet connected to the manager or listened on its socket.
struct PreparedAgent {
    inputs: DriverInputs,
    session_events: mpsc::Sender<SessionEvent>,
    boot_id: String,
    instance: InstanceId,
    manager_token: ManagerToken,
}

fn prepare_agent(config: &Config) -> Result<PreparedAgent, ServeError> {
    let runtime_dir = RuntimeDir::lock(&config.runtime_dir)?;
    let boot_id = process::boot_id()?;
    let records = Records::open(runtime_dir.path(), &boot_id)?;
    let vms = records.load()?;
    let alive = vms.iter().filter(|adopted| adopted.is_alive).count();
    tracing::info!(vms = vms.len(), alive, "loaded records of VMs");
    let (rack, manager_token) = (runtime_dir.rack()?, ManagerToken::load(&runtime_dir)?);
    let instance = runtime_dir.next_instance()?;
    let host = create_host(&config.backend)?;
    let orphans = host.present_slices()?;
    if !orphans.is_empty() {
        tracing::info!(slices = orphans.len(), "found open slices of an earlier agent");
    }
    vms.iter().filter(|adopted| adopted.is_alive).for_each(|adopted| host.adopt_running_vm(&adopted.record));
    let mut agent = Agent::new(Ns::ZERO, instance, rack, vms, orphans);
    agent.set_default_user(current_user());
    for device in host.devices().iter().filter(|device| device.problem.is_some()) {
        tracing::warn!(
            serial = device.serial,
            "cannot check the slices of a device, so this host is never reported as clean"
        );
        agent.assume_undetected_orphans();
    }
    let (sender, session_events) = mpsc::channel(SESSION_EVENTS_QUEUED_MAX);
    let metrics = Arc::new(Metrics::new(&config.host, config.backend.name()));
    let inputs = DriverInputs { agent, host, records, runtime_dir, metrics, session_events };
    Ok(PreparedAgent { inputs, session_events: sender, boot_id, instance, manager_token })
}

fn create_host(backend: &Backend) -> Result<Arc<dyn Host>, ServeError> {
    if let Some(dir) = backend.local_dir() {
        ProtectedDir::create(LOCAL_DIR_FIELD, dir, TRAVERSABLE_MODE)?;
    }
    match backend {
        Backend::Emulated { local_dir } => Ok(Arc::new(Emulated::new(local_dir.clone()))),
        Backend::Dax { local_dir, scrub_mib_per_s } => {
            Ok(Arc::new(Dax::new(discover_cxl_slices(*scrub_mib_per_s)?, local_dir.clone())))
        }
        Backend::MemoryBlock { local_dir, scrub_mib_per_s } => {
            let ranges = discover_cxl_slices(*scrub_mib_per_s)?;
            Ok(Arc::new(MemoryBlock::new(Sysfs::at(SYS), ranges, local_dir.clone())))
        }
    }
}

/// Finds the CXL memory of this machine, and logs each device. Skips unusable devices.
fn discover_cxl_slices(scrub_mib_per_s: NonZeroU32) -> Result<CxlSlices, ServeError> {
    let cxl = CxlMemory::discover_devices(&Sysfs::at(SYS))?;
    for Device { name, serial, slices, .. } in &cxl.devices {
        match slices {
            Ok(slices) => {
                let region = slices.region();
                let (count, align, node) = (slices.count(), slices.align(), slices.node());
                tracing::info!(name, serial, region = region.name, count, %align, node, "using CXL memory device");
            }
            Err(problem) => {
                tracing::error!(
                    name,
                    serial,
                    problem = units::chain(problem),
                    "cannot use CXL memory device"
                );
            }
        }
    }
    Ok(CxlSlices::new(cxl, NonZeroU64::from(scrub_mib_per_s).saturating_mul(MIB)))
}

fn listen_for_signal(kind: SignalKind) -> Result<Signal, ServeError> {
    signal(kind).map_err(io_error("listen for", "signals"))
}

async fn wait_for_stop_signal(
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
        tracing::debug!(%error, "cannot notify the service manager");
    }
}

/// Notifies the service manager periodically that the driver responds, if its watchdog is enabled.
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

/// Serves metrics over HTTP at `address`.
async fn serve_metrics(
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

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::fs::PermissionsExt as _,
    };

    use units::UserId;

    use super::*;
    use crate::skipped::report_skipped;

    fn check_error(host_toml: &Path) -> String {
        units::chain(&check_config(host_toml).unwrap_err())
    }

    /// Writes host.toml and a token. `lines` are additional lines of the section `[agent]`.
    fn write_config(dir: &Path, runtime_dir: &str, lines: &str) -> std::path::PathBuf {
        let (host_toml, token) = (dir.join("host.toml"), dir.join("token"));
        let text = format!(
            "[agent]\nhost = \"h0\"\nruntime_dir = \"{runtime_dir}\"\ntoken_file = \"token\"\n{lines}\n\
             [backend]\nkind = \"emulated\"\nlocal_dir = \"local\"\n"
        );
        fs::write(&host_toml, text).unwrap();
        fs::write(&token, "secret").unwrap();
        fs::set_permissions(&token, Permissions::from_mode(0o600)).unwrap();
        host_toml
    }

    #[test]
    fn config_check_rejects_unusable_folders_with_their_fields() {
        let dir = tempfile::tempdir().unwrap();
        let error = |runtime_dir, lines| check_error(&write_config(dir.path(), runtime_dir, lines));
        check_config(&write_config(dir.path(), "a/run", "")).unwrap();
        check_config(&write_config(dir.path(), "a/run", "socket = \"a/agent.sock\"")).unwrap();
        check_config(&write_config(dir.path(), "a/run", "socket = \"agent.sock\"")).unwrap();
        for (runtime_dir, field) in
            [("/proc/tarn", "agent.runtime_dir = /proc/tarn: is on"), ("/sys/x", "agent.socket = /sys/x")]
        {
            let error = error(runtime_dir, "");
            assert!(error.contains(field) && error.contains("is on a file system of type"), "{error}");
        }
        let path = dir.path().join("missing");
        let soft_memory = "[soft_memory]\nsize_mib = 1\nsocket = \"missing/agent.sock\"";
        for (field, lines) in
            [("agent.socket", "socket = \"missing/agent.sock\""), ("soft_memory.socket", soft_memory)]
        {
            let missing = error("run", lines);
            let rule = format!(
                "{field} = {}/agent.sock: the folder {} does not exist: ",
                path.display(),
                path.display()
            );
            assert!(missing.contains(&rule), "{missing}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "a folder was created");
    }

    #[test]
    fn socket_folder_of_another_user_is_rejected() {
        if current_user() != UserId::ROOT {
            return report_skipped("socket folder of another user: only root can change an owner");
        }
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("sockets");
        fs::create_dir(&folder).unwrap();
        std::os::unix::fs::chown(&folder, Some(65534), None).unwrap();
        let soft_memory = "[soft_memory]\nsize_mib = 1\nsocket = \"sockets/soft.sock\"";
        for (field, lines) in
            [("agent.socket", "socket = \"sockets/agent.sock\""), ("soft_memory.socket", soft_memory)]
        {
            let host_toml = write_config(dir.path(), "run", lines);
            let config = Config::load(&host_toml).unwrap();
            let serve_error = config.check_socket_folders(&host_toml).unwrap_err().to_string();
            for error in [check_error(&host_toml), serve_error] {
                let rule = "belongs to user 65534: must belong to root or to the user of the service (0)";
                assert!(error.contains(&format!("{field} = ")) && error.contains(rule), "{error}");
            }
        }
    }

    #[test]
    fn config_check_rejects_folders_and_sockets_that_serve_rejects() {
        let dir = tempfile::tempdir().unwrap();
        let host_toml = write_config(dir.path(), "run", "socket = \"a.sock\"");
        check_config(&host_toml).unwrap();

        let vms = dir.path().join("run/vms");
        fs::create_dir_all(&vms).unwrap();
        check_config(&host_toml).unwrap();
        fs::set_permissions(&vms, Permissions::from_mode(0o777)).unwrap();
        let error = check_error(&host_toml);
        assert!(error.starts_with("agent.runtime_dir: ") && error.contains("vms has mode 0777"), "{error}");
        fs::remove_dir(&vms).unwrap();
        fs::write(&vms, "").unwrap();
        assert!(check_error(&host_toml).contains("vms: must be a directory"), "{}", check_error(&host_toml));
        fs::remove_file(&vms).unwrap();

        let socket = dir.path().join("a.sock");
        fs::create_dir(&socket).unwrap();
        let expected = format!("agent.socket: {} is not a socket", socket.display());
        assert!(check_error(&host_toml).starts_with(&expected), "{}", check_error(&host_toml));
        fs::remove_dir(&socket).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        check_config(&host_toml).unwrap();
    }
}
