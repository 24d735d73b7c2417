//! Configuration of a host from `host.toml`. A [`Config`] is valid, but the files that it names are
//! not opened.

pub mod early_eviction;
mod folders;
pub mod soft_memory;
pub mod symbiosis;
pub mod tiering;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    path::{Path, PathBuf},
};

pub use config_file::{ConfigError, Violation};
use config_file::{Field, Section};
use tonic::transport::Uri;
use units::{
    LATENCY_RATIO_RANGE, LATENCY_RATIO_RULE, Name, Ns, UserId,
    limits::{
        ALLOWED_UIDS_MAX, MANAGERS_MAX, QOS_SAMPLE_GAP_MAX, QOS_SAMPLE_INTERVAL_DEFAULT,
        SCRUB_MIB_PER_S_DEFAULT,
    },
};

use self::{early_eviction::EarlyEviction, soft_memory::SoftMemory, symbiosis::Symbiosis, tiering::Tiering};
use crate::user::current_user;

/// Default address of the manager, on the same machine.
const MANAGER_URI_DEFAULT: &str = "unix:/run/tarn/manager.sock";
/// Name of the agent's socket in the runtime directory if `agent.socket` is not set.
const SOCKET_NAME: &str = "host-memory.sock";
/// Files and folders of the agent in the runtime directory.
const RUNTIME_FILES: [&str; 6] = ["instance", "lock", "manager-token", "rack", "shares.json", "vms"];

/// Validated configuration of a host. All paths are absolute.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Name of the host in `rack.toml`.
    pub host: Name,
    /// Addresses of the rack's managers, at least one: `http://HOST:PORT`, `https://HOST:PORT` or
    /// `unix:/PATH`.
    pub managers: Vec<String>,
    /// Runtime directory, which contains the lock and the VM records.
    pub runtime_dir: PathBuf,
    /// File of this host's token; required unless certificates identify the host.
    pub token_file: Option<PathBuf>,
    /// Path of the socket at which VMMs attach to memory.
    pub socket: PathBuf,
    /// Users who may send requests to the socket. The reservation of a VM determines which of them
    /// may use the VM.
    pub allowed_uids: BTreeSet<UserId>,
    /// Address at which metrics are served, if any.
    pub metrics_listen: Option<SocketAddr>,
    /// Interval between samples of running VMs; `None` disables sampling.
    pub sample_interval: Option<Ns>,
    /// Idle latency of the pool divided by the idle latency of local memory. `None` if the kernel's
    /// value is used.
    pub pool_latency_ratio: Option<f64>,
    /// Certificates; required if the manager is on another machine.
    pub tls: Option<Tls>,
    /// Backend that provides slices.
    pub backend: Backend,
    /// Settings of Symbiosis; `None` disables it.
    pub symbiosis: Option<Symbiosis>,
    /// Settings of fair tiering; `None` disables it.
    pub tiering: Option<Tiering>,
    /// Settings of early eviction; `None` disables it.
    pub early_eviction: Option<EarlyEviction>,
    /// Settings of soft memory; `None` disables it.
    pub soft_memory: Option<SoftMemory>,
}

/// Section `[tls]`: PEM files of the certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// Certificate of the authority that signed the manager's certificate.
    pub ca: PathBuf,
    /// Certificate of this host, which contains the host's name.
    pub certificate: PathBuf,
    /// Private key of this host's certificate.
    pub key: PathBuf,
    /// Server name that the manager's certificate must contain.
    pub server_name: String,
}

/// Backend that provides slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Slices are files of an emulated EMC.
    Emulated {
        /// Directory on tmpfs for the local memory of VMs whose VMM accepts only paths.
        local_dir: Option<PathBuf>,
    },
    /// Slices are dax devices of CXL memory.
    Dax {
        /// Directory on tmpfs for the local memory of VMs whose VMM accepts only paths.
        local_dir: Option<PathBuf>,
        /// Rate limit for all scrubs of the host together, in MiB per second.
        scrub_mib_per_s: NonZeroU32,
    },
    /// Slices are memory blocks of CXL memory on a NUMA node.
    MemoryBlock {
        /// Directory on tmpfs for the local memory of VMs whose VMM accepts only paths.
        local_dir: Option<PathBuf>,
        /// Rate limit for all scrubs of the host together, in MiB per second.
        scrub_mib_per_s: NonZeroU32,
    },
}

impl Backend {
    /// Returns the name of the backend in host.toml.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Emulated { .. } => "emulated",
            Self::Dax { .. } => "dax",
            Self::MemoryBlock { .. } => "memory_block",
        }
    }

    /// Returns the directory for local memory that is passed by path, if configured.
    pub fn local_dir(&self) -> Option<&Path> {
        let (Self::Emulated { local_dir }
        | Self::Dax { local_dir, .. }
        | Self::MemoryBlock { local_dir, .. }) = self;
        local_dir.as_deref()
    }
}

impl Config {
    /// Returns the socket of soft memory.
    pub fn soft_memory_socket(&self) -> PathBuf {
        let default = || self.runtime_dir.join(soft_memory::SOCKET_NAME);
        self.soft_memory.as_ref().map_or_else(default, |settings| settings.socket_path(&self.runtime_dir))
    }

    /// Reads and validates a configuration file.
    ///
    /// # Errors
    /// [`ConfigError::Read`], or [`ConfigError::Invalid`] with all violations.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        config_file::load(path, parse_host)
    }

    /// Parses and validates the text of a configuration file. `path` is the path of the file: it is
    /// used in messages, and relative paths in the text are relative to its directory.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with all violations; [`ConfigError::Read`] if `path` is relative
    /// and the current directory cannot be determined.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        config_file::parse(text, path, parse_host)
    }
}

fn parse_host(mut top: Section<'_>, base: &Path) -> Option<Config> {
    let has_tls = top.contains("tls");
    let agent = top.take_required("agent", Field::to_section);
    let agent = agent.and_then(|section| parse_agent(section, base, has_tls));
    let tls = top.take_section("tls").map_or(Some(None), |section| parse_tls(section, base).map(Some));
    let backend = top.take_required("backend", Field::to_section);
    let backend = backend.and_then(|section| parse_backend(section, base));
    let symbiosis = top.take_section("symbiosis");
    let symbiosis = symbiosis.map_or(Some(None), |section| symbiosis::parse(section, base).map(Some));
    let tiering = top.take_section("tiering");
    let tiering = tiering.map_or(Some(None), |section| tiering::parse(section, base).map(Some));
    let early_eviction = top.take_section("early_eviction");
    let early_eviction =
        early_eviction.map_or(Some(None), |section| early_eviction::parse(section, base).map(Some));
    let soft_memory = top.take_section("soft_memory");
    let soft_memory = soft_memory.map_or(Some(None), |section| soft_memory::parse(section, base).map(Some));
    let sections = Sections {
        agent: agent.as_ref(),
        backend: backend.as_ref(),
        symbiosis: symbiosis.as_ref().and_then(Option::as_ref),
        tiering: tiering.as_ref().and_then(Option::as_ref),
        early_eviction: early_eviction.as_ref().and_then(Option::as_ref),
        soft_memory: soft_memory.as_ref().and_then(Option::as_ref),
    };
    let is_compatible = sections.check(&top);
    top.reject_unknown_keys();
    is_compatible?;
    let agent = agent?;
    let socket = agent.socket_path();
    let Agent {
        host,
        managers,
        runtime_dir,
        token_file,
        allowed_uids,
        metrics_listen,
        sample_interval,
        pool_latency_ratio,
        ..
    } = agent;
    Some(Config {
        host,
        managers: managers.unwrap_or_else(|| vec![MANAGER_URI_DEFAULT.to_owned()]),
        token_file,
        socket,
        allowed_uids: allowed_uids.unwrap_or_else(|| BTreeSet::from([UserId::ROOT, current_user()])),
        metrics_listen,
        sample_interval: sample_interval.unwrap_or(Some(QOS_SAMPLE_INTERVAL_DEFAULT)),
        pool_latency_ratio,
        runtime_dir,
        tls: tls?,
        backend: backend?,
        symbiosis: symbiosis?,
        tiering: tiering?,
        early_eviction: early_eviction?,
        soft_memory: soft_memory?,
    })
}

/// Valid sections with rules about each other.
struct Sections<'a> {
    agent: Option<&'a Agent>,
    backend: Option<&'a Backend>,
    symbiosis: Option<&'a Symbiosis>,
    tiering: Option<&'a Tiering>,
    early_eviction: Option<&'a EarlyEviction>,
    soft_memory: Option<&'a SoftMemory>,
}

impl Sections<'_> {
    /// Reports all violations.
    fn check(&self, top: &Section<'_>) -> Option<()> {
        let tiering = self.tiering.map_or(Some(()), |tiering| self.check_tiering(tiering, top));
        let eviction =
            self.early_eviction.map_or(Some(()), |eviction| self.check_early_eviction(eviction, top));
        let sockets = self.agent.zip(self.soft_memory);
        let sockets_differ = sockets.is_none_or(|(agent, soft_memory)| {
            agent.socket_path() != soft_memory.socket_path(&agent.runtime_dir)
        });
        let rule = "must be another path than agent.socket";
        tiering.and(eviction).and(top.check(sockets_differ, "soft_memory.socket", rule))
    }

    fn check_tiering(&self, tiering: &Tiering, top: &Section<'_>) -> Option<()> {
        let is_same = self.symbiosis.is_none_or(|symbiosis| symbiosis.cgroups == tiering.cgroups);
        let rule = "must have the same cgroups as [symbiosis], whose shares are the protections";
        let is_same = top.check(is_same, "tiering", rule);
        let is_complete = self.backend.is_none_or(|backend| {
            matches!(backend, Backend::MemoryBlock { .. }) == tiering.reservation.is_some()
        });
        let rule =
            "requires the key reservation with the backend memory_block, and must not have it with others";
        is_same.and(top.check(is_complete, "tiering", rule))
    }

    fn check_early_eviction(&self, eviction: &EarlyEviction, top: &Section<'_>) -> Option<()> {
        let overlap =
            |other: &Path| other.starts_with(&eviction.cgroups) || eviction.cgroups.starts_with(other);
        let has_own_cgroups = !self.tiering.is_some_and(|tiering| overlap(&tiering.cgroups));
        let rule = "must have other cgroups than [tiering], because both write memory.reclaim";
        let has_own_cgroups = top.check(has_own_cgroups, "early_eviction", rule);
        let other_device = self
            .symbiosis
            .filter(|symbiosis| overlap(&symbiosis.cgroups) && symbiosis.remote != eviction.device)
            .map(|symbiosis| symbiosis.remote.display());
        let has_same_device = other_device.map_or(Some(()), |remote| {
            let rule = format!(
                "device = \"{}\" must be symbiosis.remote ({remote}), because both have the same tenants",
                eviction.device.display()
            );
            top.check(false, "early_eviction", &rule)
        });
        has_own_cgroups.and(has_same_device)
    }
}

/// Section `[agent]`. Omitted keys are `None`.
struct Agent {
    host: Name,
    managers: Option<Vec<String>>,
    runtime_dir: PathBuf,
    token_file: Option<PathBuf>,
    socket: Option<PathBuf>,
    allowed_uids: Option<BTreeSet<UserId>>,
    metrics_listen: Option<SocketAddr>,
    sample_interval: Option<Option<Ns>>,
    pool_latency_ratio: Option<f64>,
}

impl Agent {
    /// Returns the socket at which VMMs attach to memory.
    fn socket_path(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| self.runtime_dir.join(SOCKET_NAME))
    }
}

fn parse_agent(mut section: Section<'_>, base: &Path, has_tls: bool) -> Option<Agent> {
    let host = section.take_required("host", Field::to_name);
    let managers = section.take_optional("manager", |field| parse_managers(field.as_str()?, has_tls));
    let rule = "is missing: [tls] requires https://HOST:PORT";
    section.check(!has_tls || managers != Some(None), "manager", rule);
    let has_socket = section.contains("socket");
    let runtime_dir = section.take_required("runtime_dir", |field| {
        let directory = field.to_path(base)?;
        if !has_socket {
            config_file::check_socket_path_length(&directory.join(SOCKET_NAME))
                .map_err(|rule| format!("{SOCKET_NAME} in it {rule}"))?;
        }
        Ok(directory)
    });
    let token_file = section.take_optional("token_file", |field| field.to_path(base));
    section.check(has_tls || token_file != Some(None), "token_file", "is missing: required without [tls]");
    let socket = section.take_optional("socket", |field| {
        let socket = config_file::to_socket_path(base, field.as_str()?)?;
        runtime_dir.as_deref().map_or(Ok(()), |directory| check_socket_place(&socket, directory))?;
        Ok(socket)
    });
    let allowed_uids = parse_allowed_uids(&mut section);
    let metrics_listen = section.take_optional("metrics_listen", parse_metrics_listen);
    let sample_interval = section.take_optional("sample_interval_s", parse_sample_interval);
    let pool_latency_ratio = section.take_optional("pool_latency_ratio", |field| {
        field
            .to_number()
            .ok()
            .filter(|ratio| LATENCY_RATIO_RANGE.contains(ratio))
            .ok_or_else(|| LATENCY_RATIO_RULE.to_owned())
    });
    section.reject_unknown_keys();
    Some(Agent {
        host: host?,
        managers: managers?,
        runtime_dir: runtime_dir?,
        token_file: token_file?,
        socket: socket?,
        allowed_uids: allowed_uids?,
        metrics_listen: metrics_listen?,
        sample_interval: sample_interval?,
        pool_latency_ratio: pool_latency_ratio?,
    })
}

/// Checks that the socket is not the runtime directory or one of the agent's own files in it.
fn check_socket_place(socket: &Path, runtime_dir: &Path) -> Result<(), String> {
    let Ok(place) = socket.strip_prefix(runtime_dir) else { return Ok(()) };
    if place.as_os_str().is_empty() || RUNTIME_FILES.iter().any(|own| place.starts_with(own)) {
        return Err(format!("must not be runtime_dir, or {} in it", RUNTIME_FILES.join(", ")));
    }
    Ok(())
}

fn parse_tls(mut section: Section<'_>, base: &Path) -> Option<Tls> {
    let ca = section.take_required("ca", |field| field.to_path(base));
    let certificate = section.take_required("certificate", |field| field.to_path(base));
    let key = section.take_required("key", |field| field.to_path(base));
    let server_name = section.take_required("server_name", |field| match field.as_str()? {
        "" => Err("must be the name in the manager's certificate".to_owned()),
        name => Ok(name.to_owned()),
    });
    section.reject_unknown_keys();
    Some(Tls { ca: ca?, certificate: certificate?, key: key?, server_name: server_name? })
}

/// Parses the addresses of the managers, which are separated by commas.
fn parse_managers(managers: &str, has_tls: bool) -> Result<Vec<String>, String> {
    let managers: Vec<&str> = managers.split(',').collect();
    if managers.len() > MANAGERS_MAX {
        return Err(format!("has {} addresses: must have at most {MANAGERS_MAX}", managers.len()));
    }
    if let Some(repeated) = (1..managers.len()).find(|index| managers[..*index].contains(&managers[*index])) {
        return Err(format!("{} is a duplicate: must be unique", managers[repeated]));
    }
    managers.into_iter().map(|manager| parse_manager(manager, has_tls)).collect()
}

/// Checks the address of a manager. Without TLS the token is sent in plain text, so the manager
/// must be on this machine.
fn parse_manager(manager: &str, has_tls: bool) -> Result<String, String> {
    let rule = if let Some(path) = manager.strip_prefix("unix:") {
        if path.starts_with('/') && !has_tls {
            config_file::to_socket_path(Path::new("/"), path)?;
            return Ok(manager.to_owned());
        }
        "must be unix: and an absolute path, without [tls]"
    } else {
        match check_uri(manager, has_tls) {
            Ok(()) => return Ok(manager.to_owned()),
            Err(rule) => rule,
        }
    };
    Err(rule.to_owned())
}

fn check_uri(manager: &str, has_tls: bool) -> Result<(), &'static str> {
    let uri = manager.parse::<Uri>().map_err(|_| "must be http://, https:// or unix:")?;
    let rule = "must be http://HOST:PORT, https://HOST:PORT or unix:/PATH";
    let (Some(host), Some(scheme)) = (uri.host(), uri.scheme_str()) else { return Err(rule) };
    let has_path = !matches!(uri.path(), "" | "/") || uri.query().is_some();
    if uri.port().is_none() || has_path {
        return Err(rule);
    }
    if uri.port_u16() == Some(0) {
        return Err("must have a port from 1 to 65535");
    }
    if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(
            "must not contain a user name or a password: the agent identifies itself by agent.token_file or [tls]",
        );
    }
    match (scheme, has_tls) {
        ("http", false) if is_loopback(host) => Ok(()),
        ("http", false) => Err("must be on this machine, or use https:// with [tls]"),
        ("https", true) => Ok(()),
        ("https", false) => Err("requires [tls]"),
        ("http", true) => Err("must be https:// with [tls]"),
        _ => Err("must be http://, https:// or unix:"),
    }
}

fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn parse_allowed_uids(section: &mut Section<'_>) -> Option<Option<BTreeSet<UserId>>> {
    let uids = section.take_list("allowed_uids", ALLOWED_UIDS_MAX, |field| {
        let uid = field.to_integer(0..=u32::MAX - 1)?;
        UserId::new(uid).map_err(|error| error.to_string())
    })?;
    let is_present = section.contains("allowed_uids");
    section.check(!is_present || !uids.is_empty(), "allowed_uids", "must not be empty")?;
    Some(is_present.then(|| BTreeSet::from_iter(uids)))
}

fn parse_metrics_listen(field: &Field<'_>) -> Result<SocketAddr, String> {
    field.as_str()?.parse().map_err(|_| "must be ADDRESS:PORT, such as 127.0.0.1:9752".to_owned())
}

/// Parses the interval between samples of VMs; `None` disables sampling.
fn parse_sample_interval(field: &Field<'_>) -> Result<Option<Ns>, String> {
    if matches!(field.as_str(), Ok("never")) {
        return Ok(None);
    }
    // The interval that a VMM measures is longer than this interval if a host is busy.
    let max = QOS_SAMPLE_GAP_MAX.as_ms() / 2000;
    let seconds = field.to_integer(2..=max).map_err(|_| format!("must be \"never\" or from 2 to {max}"))?;
    Ok(Some(Ns::secs(seconds)))
}

/// Value of `backend.kind`.
#[derive(Clone, Copy)]
enum BackendKind {
    Emulated,
    Dax,
    MemoryBlock,
}

fn parse_backend(mut section: Section<'_>, base: &Path) -> Option<Backend> {
    let kind = section.take_required("kind", parse_backend_kind);
    let local_dir = section.take_optional("local_dir", |field| field.to_path(base));
    let scrub_rate = section.take_optional("scrub_mib_per_s", |field| match kind {
        Some(BackendKind::Emulated) => {
            Err("must not be set for an emulated EMC, whose slices are created zeroed".to_owned())
        }
        _ => field.to_integer(1..=u32::MAX),
    });
    section.reject_unknown_keys();
    let (kind, local_dir, scrub_rate) = (kind?, local_dir?, scrub_rate?.unwrap_or(SCRUB_MIB_PER_S_DEFAULT));
    let scrub_mib_per_s = NonZeroU32::new(scrub_rate).expect("a valid scrub rate is not zero");
    Some(match kind {
        BackendKind::Emulated => Backend::Emulated { local_dir },
        BackendKind::Dax => Backend::Dax { local_dir, scrub_mib_per_s },
        BackendKind::MemoryBlock => Backend::MemoryBlock { local_dir, scrub_mib_per_s },
    })
}

fn parse_backend_kind(field: &Field<'_>) -> Result<BackendKind, String> {
    match field.as_str()? {
        "emulated" => Ok(BackendKind::Emulated),
        "dax" => Ok(BackendKind::Dax),
        "memory_block" => Ok(BackendKind::MemoryBlock),
        _ => Err("must be emulated, dax or memory_block".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL_CONFIG: &str = r#"
        [agent]
        host = "h0"
        runtime_dir = "run"
        token_file = "/etc/tarn/h0.token"
        [backend]
        kind = "emulated"
    "#;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("/etc/tarn/host.toml")).map_err(|error| units::chain(&error))
    }

    #[track_caller]
    fn assert_rejected(from: &str, to: &str, message: &str) {
        assert!(MINIMAL_CONFIG.contains(from), "MINIMAL_CONFIG does not contain {from:?}");
        let error = parse(&MINIMAL_CONFIG.replacen(from, to, 1)).unwrap_err();
        assert!(error.starts_with("/etc/tarn/host.toml") && error.contains(message), "{error}");
    }

    #[test]
    fn config_path_without_directory_is_accepted() {
        let config = Config::parse(MINIMAL_CONFIG, Path::new("host.toml")).unwrap();
        assert_eq!(config.runtime_dir, std::env::current_dir().unwrap().join("run"));
    }

    #[test]
    fn omitted_keys_have_defaults_and_paths_are_relative() {
        let config = parse(MINIMAL_CONFIG).unwrap();
        assert_eq!(config.managers, ["unix:/run/tarn/manager.sock"]);
        assert_eq!(config.runtime_dir, Path::new("/etc/tarn/run"));
        assert_eq!(config.socket, Path::new("/etc/tarn/run/host-memory.sock"));
        assert_eq!(config.allowed_uids, BTreeSet::from([UserId::ROOT, current_user()]));
        assert_eq!(config.backend, Backend::Emulated { local_dir: None });
    }

    #[test]
    fn example_config_is_valid() {
        let config = parse(include_str!("../host.example.toml")).unwrap();
        assert_eq!(config.host.as_str(), "h0");
    }

    /// Returns the keys that the parser accepts in a section, and those in the example, both sorted. The
    /// parser lists its keys in the error about an unknown one.
    fn accepted_and_example_keys(example: &str, section: &str) -> [Vec<String>; 2] {
        let unknown = match section {
            "" => "unknown = 1\n".to_owned(),
            section => format!("[{section}]\nunknown = 1\n"),
        };
        let error = Config::parse(&unknown, Path::new("/etc/tarn/host.toml")).unwrap_err().to_string();
        let list = error.lines().find_map(|line| line.split_once("unknown: unknown key; must be one of "));
        let accepted = list.unwrap_or_else(|| panic!("[{section}]: {error}")).1.split(", ");
        let mut accepted: Vec<String> = accepted.map(str::to_owned).collect();
        let table: toml::Table = example.parse().unwrap();
        let path = section.split('.').filter(|name| !name.is_empty());
        let table = path.fold(&table, |table, name| table[name].as_table().unwrap());
        let mut keys: Vec<String> = table.keys().cloned().collect();
        accepted.sort();
        keys.sort();
        [accepted, keys]
    }

    #[test]
    fn example_config_names_every_section_and_key() {
        let example = include_str!("../host.example.toml");
        let is_setting = |text: &str| {
            let name =
                |text: &str| !text.is_empty() && text.chars().all(|c| c == '_' || c.is_ascii_lowercase());
            text.starts_with('[') || text.split_once(" = ").is_some_and(|(key, _)| name(key))
        };
        let uncommented = |line: &str| match line.strip_prefix("# ") {
            Some(setting) if is_setting(setting) => format!("{setting}\n"),
            _ => format!("{line}\n"),
        };
        let example: String = example.lines().map(uncommented).collect();
        let [sections, named] = accepted_and_example_keys(&example, "");
        assert_eq!(sections, named);
        let tenants = ["symbiosis.tenants.database", "tiering.tenants.database"].map(str::to_owned);
        for section in sections.into_iter().chain(tenants) {
            let [accepted, named] = accepted_and_example_keys(&example, &section);
            assert_eq!(accepted, named, "[{section}]");
        }
    }

    #[test]
    fn scrub_rate_has_a_default() {
        let dax = |rest: &str| {
            let text = MINIMAL_CONFIG.replacen("kind = \"emulated\"", &format!("kind = \"dax\"\n{rest}"), 1);
            parse(&text).map(|config| config.backend)
        };
        let at = |scrub_rate| Backend::Dax {
            local_dir: None,
            scrub_mib_per_s: NonZeroU32::new(scrub_rate).unwrap(),
        };
        assert_eq!(dax("").unwrap(), at(2048));
        assert_eq!(dax("scrub_mib_per_s = 100").unwrap(), at(100));
        let error = dax("scrub_mib_per_s = 0").unwrap_err();
        assert!(error.contains("backend.scrub_mib_per_s = 0: must be a whole number from 1"), "{error}");
        assert_rejected(
            "kind = \"emulated\"",
            "kind = \"emulated\"\nscrub_mib_per_s = 9",
            "backend.scrub_mib_per_s = 9: must not be set for an emulated EMC",
        );
    }

    #[test]
    fn sockets_of_the_agent_must_differ() {
        let message = "soft_memory.socket: must be another path than agent.socket";
        for (agent_socket, socket) in [
            ("run/other.sock", "socket = \"run/other.sock\""),
            ("run/soft-memory.sock", ""),
            ("run/host-memory.sock", "socket = \"run/host-memory.sock\""),
        ] {
            let agent = format!("host = \"h0\"\nsocket = \"{agent_socket}\"");
            let text = MINIMAL_CONFIG.replacen("host = \"h0\"", &agent, 1);
            let error = parse(&format!("{text}\n[soft_memory]\nsize_mib = 1\n{socket}")).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn unknown_missing_or_mistyped_key_is_rejected_by_name() {
        assert_rejected(
            "runtime_dir",
            "runtime_dirs",
            "line 4: agent.runtime_dirs: unknown key; must be one of ",
        );
        assert_rejected("runtime_dir", "runtime_dirs", "line 2: agent.runtime_dir: is missing");
        assert_rejected("[backend]", "[backends]", "line 6: backends: unknown key");
        assert_rejected("[backend]", "[backends]", "host.toml: backend: is missing");
        assert_rejected("host = \"h0\"", "", "agent.host: is missing");
        assert_rejected("host = \"h0\"", "host = 7", "line 3: agent.host = 7: must be a string in quotes");
        assert_rejected("[backend]", "tls = 7\n[backend]", "agent.tls: unknown key");
        assert_rejected("[backend]", "[tls\n[backend]", "line 6: invalid TOML: ");
    }

    #[test]
    fn invalid_value_is_an_error_with_field_value_and_rule() {
        assert_rejected("\"h0\"", "\"../h0\"", "agent.host = \"../h0\": \"../h0\" is not a name");
        assert_rejected(
            "\"emulated\"",
            "\"cxl\"",
            "backend.kind = \"cxl\": must be emulated, dax or memory_block",
        );
        assert_rejected(
            "host = \"h0\"",
            "host = \"h0\"\nallowed_uids = []",
            "agent.allowed_uids = []: must not be empty",
        );
        assert_rejected(
            "host = \"h0\"",
            "host = \"h0\"\nallowed_uids = [0, 4294967295]",
            "agent.allowed_uids[1] = 4294967295: must be a whole number from 0 to 4294967294",
        );
        assert_rejected(
            "host = \"h0\"",
            "host = \"h0\"\npool_latency_ratio = 0",
            "agent.pool_latency_ratio = 0: must be a number from 0.01 to 1000",
        );
        assert_rejected(
            "host = \"h0\"",
            "host = \"h0\"\npool_latency_ratio = \"2\"",
            "agent.pool_latency_ratio = \"2\": must be a number from 0.01 to 1000",
        );
        assert_rejected(
            "host = \"h0\"",
            "host = \"h0\"\nmetrics_listen = \"9752\"",
            "agent.metrics_listen = \"9752\": must be ADDRESS:PORT",
        );
        assert_rejected("token_file", "# token_file", "agent.token_file: is missing");
    }

    #[test]
    fn all_violations_are_reported_by_line() {
        let text = r#"
            [agent]
            hots = "h0"
            manager = "h0:9750"
            runtime_dir = ""
            [tls]
            ca = ""
            server_name = ""
            [backend]
            kind = 7
            [symbiosis]
            memory_mib = 0
        "#;
        let error = parse(text).unwrap_err();
        let lines: Vec<_> = error.lines().collect();
        for expected in [
            "line 2: agent.host: is missing",
            "line 3: agent.hots: unknown key; must be one of ",
            "line 4: agent.manager = \"h0:9750\": must be ",
            "line 5: agent.runtime_dir = \"\": must not be an empty path",
            "line 6: tls.certificate: is missing",
            "line 6: tls.key: is missing",
            "line 7: tls.ca = \"\": must not be an empty path",
            "line 8: tls.server_name = \"\": must be the name in the manager's certificate",
            "line 10: backend.kind = 7: must be a string in quotes",
            "line 11: symbiosis.cgroups: is missing",
            "line 12: symbiosis.memory_mib = 0: must be a whole number from 1 to ",
        ] {
            let prefix = format!("/etc/tarn/host.toml: {expected}");
            assert!(lines.iter().any(|line| line.starts_with(&prefix)), "no {expected:?} in\n{error}");
        }
    }

    #[test]
    fn empty_path_is_rejected() {
        assert_rejected("\"run\"", "\"\"", "agent.runtime_dir = \"\": must not be an empty path");
        assert_rejected(
            "\"/etc/tarn/h0.token\"",
            "\"\"",
            "agent.token_file = \"\": must not be an empty path",
        );
        let rest = "socket = \"\"\n[backend]\nlocal_dir = \"\"";
        assert_rejected("[backend]", rest, "agent.socket = \"\": must not be an empty path");
        assert_rejected("[backend]", rest, "backend.local_dir = \"\": must not be an empty path");
    }

    #[test]
    fn socket_path_length_is_limited() {
        let long = "x".repeat(120);
        let rule = "must have at most 107 bytes";
        let error = parse(&MINIMAL_CONFIG.replace("\"run\"", &format!("\"{long}\""))).unwrap_err();
        assert!(error.contains("agent.runtime_dir = ") && error.contains(rule), "{error}");
        let with_socket =
            |path: &str| MINIMAL_CONFIG.replace("\"run\"", &format!("\"{long}\"\nsocket = \"{path}\""));
        assert_eq!(parse(&with_socket("/run/a.sock")).unwrap().socket, Path::new("/run/a.sock"));
        let error = parse(&with_socket(&long)).unwrap_err();
        assert!(error.contains("agent.socket = ") && error.contains(rule), "{error}");
        let manager = |bytes: usize| {
            let path = format!("/{}", "x".repeat(bytes - 1));
            parse(&MINIMAL_CONFIG.replace("[agent]", &format!("[agent]\nmanager = \"unix:{path}\"")))
        };
        assert!(manager(107).is_ok());
        let error = manager(108).unwrap_err();
        assert!(error.contains("agent.manager = ") && error.contains(rule), "{error}");
    }

    #[test]
    fn address_that_no_socket_can_have_is_rejected() {
        for (key, value, rule) in [
            ("manager", "http://127.0.0.1:0", "must have a port from 1 to 65535"),
            ("manager", "unix:/", "must end with the name of a file"),
            ("manager", "unix:/run/tarn/", "must end with the name of a file"),
            ("manager", "unix:/run/..", "must end with the name of a file"),
            ("socket", "/", "must end with the name of a file"),
            ("socket", "run/", "must end with the name of a file"),
            (
                "socket",
                "run",
                "must not be runtime_dir, or instance, lock, manager-token, rack, shares.json, vms in it",
            ),
            ("socket", "run/lock", "must not be runtime_dir, or"),
            ("socket", "run/vms/s", "must not be runtime_dir, or"),
            ("socket", "@x", "every local user can connect to an abstract socket"),
        ] {
            let text = MINIMAL_CONFIG.replace("[agent]", &format!("[agent]\n{key} = \"{value}\""));
            let error = parse(&text).unwrap_err();
            assert!(error.contains(&format!("line 3: agent.{key} = {value:?}: ")), "{error}");
            assert!(error.contains(rule), "{error}");
        }
    }

    #[test]
    fn token_is_sent_unencrypted_only_to_loopback() {
        let manager = |uri: &str| MINIMAL_CONFIG.replace("[agent]", &format!("[agent]\nmanager = \"{uri}\""));
        for good in ["http://127.0.0.1:1", "http://[::1]:1", "http://localhost:9750", "unix:/run/tarn.sock"] {
            assert_eq!(parse(&manager(good)).unwrap().managers, [good]);
        }
        let remote_or_malformed =
            ["http://10.0.0.1:1", "https://10.0.0.1:1", "ftp://127.0.0.1:1", "unix:tarn.sock", "h0:9750", ""];
        let without_port = ["http://localhost", "http://localhost:", "http://[::1]", "https://h/x"];
        let with_path = ["http://localhost:1/x", "http://localhost:1?x", "http://localhost:1/?x"];
        for bad in remote_or_malformed.into_iter().chain(without_port).chain(with_path) {
            let error = parse(&manager(bad)).unwrap_err();
            assert!(error.contains(&format!("agent.manager = {bad:?}")), "{error}");
        }
    }

    #[test]
    fn several_managers_are_separated_by_commas() {
        let manager = |uri: &str| MINIMAL_CONFIG.replace("[agent]", &format!("[agent]\nmanager = \"{uri}\""));
        let managers = ["http://127.0.0.1:1", "unix:/run/b.sock"];
        assert_eq!(parse(&manager(&managers.join(","))).unwrap().managers, managers);
        for (bad, rule) in [
            ("http://127.0.0.1:1,", "must be "),
            ("http://127.0.0.1:1,http://10.0.0.1:1", "must be on this machine"),
            ("unix:/a,unix:/a", "unix:/a is a duplicate: must be unique"),
            (&vec!["unix:/a"; 17].join(","), "has 17 addresses: must have at most 16"),
        ] {
            let error = parse(&manager(bad)).unwrap_err();
            assert!(error.contains("agent.manager = ") && error.contains(rule), "{error}");
        }
    }

    #[test]
    fn manager_with_user_info_is_rejected() {
        for bad in ["http://user:pw@127.0.0.1:1", "http://user@localhost:1", "http://@127.0.0.1:1"] {
            let error = parse(&MINIMAL_CONFIG.replace("[agent]", &format!("[agent]\nmanager = \"{bad}\"")));
            let error = error.unwrap_err();
            assert!(error.contains("agent.manager = ") && error.contains("must "), "{error}");
        }
        let error =
            parse(&MINIMAL_CONFIG.replace("[agent]", "[agent]\nmanager = \"http://u:p@127.0.0.1:1\""));
        assert!(error.unwrap_err().contains("must not contain a user name or a password"));
    }

    #[test]
    fn remote_manager_requires_tls() {
        let tls =
            "[tls]\nca = \"ca.pem\"\ncertificate = \"h0.pem\"\nkey = \"h0.key\"\nserver_name = \"manager\"";
        let with_tls = |uri: &str| {
            let agent = MINIMAL_CONFIG.replace("[agent]", &format!("[agent]\nmanager = \"{uri}\""));
            agent.replace("[backend]", &format!("{tls}\n[backend]"))
        };
        let config = parse(&with_tls("https://10.0.0.1:9750")).unwrap();
        assert_eq!(config.tls.unwrap().ca, Path::new("/etc/tarn/ca.pem"));
        for bad in ["https://h", "https://h/x", "https://h:1/x", "https://h:1?x"] {
            let error = parse(&with_tls(bad)).unwrap_err();
            assert!(
                error.contains(&format!("agent.manager = {bad:?}: must be http://HOST:PORT, ")),
                "{error}"
            );
        }
        assert_eq!(parse(&with_tls("https://h:1/")).unwrap().managers, ["https://h:1/"]);
        assert!(parse(&with_tls("http://127.0.0.1:9750")).unwrap_err().contains("must be https://"));
        assert!(parse(&with_tls("unix:/run/tarn.sock")).unwrap_err().contains("without [tls]"));
        let unset = MINIMAL_CONFIG.replace("[backend]", &format!("{tls}\n[backend]"));
        assert!(parse(&unset).unwrap_err().contains("agent.manager: is missing: [tls] requires https://"));
    }
}
