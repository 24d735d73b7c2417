//! Reads and validates `rack.toml`, the configuration of the rack. The ledger decides whether a
//! running rack can apply a changed configuration.

use std::{
    collections::BTreeSet,
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use config_file::{Field, Section, reject_violations};
use units::{
    Bytes, Fraction, Name, Ns,
    limits::{
        COMMIT_TIMEOUT_DEFAULT, COMMIT_TIMEOUT_MAX, CORES_PER_HOST_MAX, EMCS_MAX, EMCS_PER_HOST_MAX,
        FENCE_AFTER_MAX, HOSTS_MAX, LEASE_TTL_MAX, LEASE_TTL_MIN, LOCAL_MEMORY_MIB_PER_HOST_MAX,
        ROLE_NAMES_MAX, SLICES_MAX, SLICES_PER_EMC_MAX,
    },
};

use crate::{
    device::Driver,
    fence_command::FenceCommand,
    folder_access::{self, FolderAccessError},
    forecasts::Settings,
    token_paths,
};
use directories::Directories;

mod access;
mod directories;
mod etcd;
mod fence;
mod immutable;
mod prediction;
mod usable;

pub use access::Access;
pub use config_file::{ConfigError, Violation};
pub use etcd::{Etcd, EtcdLocation, EtcdTls, EtcdUser};
pub use immutable::{ImmutableSettingChange, changed_immutable_settings};

/// Validated configuration of a rack.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Addresses and directories of the manager.
    pub manager: Manager,
    /// Time limits of hosts' leases and of automatic fencing.
    pub lease: Lease,
    /// Defaults for plans and reservations.
    pub policy: Policy,
    /// Risk limits of predictions, and retention of outcomes.
    pub prediction: Settings,
    /// Section `[qos]`.
    pub qos: Qos,
    /// Command that powers off a host whose access to an EMC cannot be revoked.
    pub fence: Option<FenceCommand>,
    /// Local users who may use the unix socket, and their roles.
    pub access: Access,
    /// TLS settings; required if `manager.listen` is not a loopback address.
    pub tls: Option<Tls>,
    /// EMCs of the rack, in the order of the file.
    pub emcs: Vec<Emc>,
    /// Hosts of the rack, in the order of the file.
    pub hosts: Vec<Host>,
}

/// Section `[manager]`. All paths of a [`Config`] are absolute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manager {
    /// Address on which the manager serves gRPC.
    pub listen: Listen,
    /// Folder of the tokens and of temporary files; also of the ledger's database if `etcd` is
    /// `None`.
    pub folder: PathBuf,
    /// Cluster of etcd that stores the ledger; `None` if `folder` contains it.
    pub etcd: Option<Etcd>,
    /// Address of the Prometheus endpoint; `None` disables it.
    pub metrics_listen: Option<SocketAddr>,
}

impl Manager {
    /// Returns the field of `rack.toml` that sets [`Self::folder`].
    pub fn folder_field(&self) -> &'static str {
        if self.etcd.is_some() { "manager.state_dir" } else { "manager.store" }
    }

    /// Returns the value of `manager.store`: a path, or an address of etcd.
    pub fn store(&self) -> String {
        match &self.etcd {
            Some(etcd) => etcd.location.to_string(),
            None => self.folder.display().to_string(),
        }
    }
}

/// Path of the unix socket if `manager.listen` is not set.
pub const DEFAULT_SOCKET_PATH: &str = "/run/tarn/manager.sock";

/// Address on which the manager serves gRPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// IP address and TCP port.
    Tcp(SocketAddr),
    /// Path of a unix socket.
    Unix(PathBuf),
}

impl Listen {
    /// Returns whether only processes of this machine can connect.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().is_loopback(),
            Self::Unix(_) => true,
        }
    }
}

impl Listen {
    /// Returns the address as a URI.
    pub fn uri(&self, has_tls: bool) -> String {
        match self {
            Self::Tcp(address) if has_tls => format!("https://{address}"),
            Self::Tcp(address) => format!("http://{address}"),
            Self::Unix(_) => self.to_string(),
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Section `[lease]`: time limits of hosts' leases and of automatic fencing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Time without contact after which a host's lease expires.
    pub ttl: Ns,
    /// Time between the expiry of a host's lease and the fencing of the host. `None` disables
    /// automatic fencing.
    pub fence_after: Option<Ns>,
}

impl Default for Lease {
    fn default() -> Self {
        Self { ttl: Ns::secs(10), fence_after: Some(Ns::secs(600)) }
    }
}

/// Section `[policy]`: defaults for plans and reservations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Fraction of a VM's memory that comes from the pool while no model is in use.
    pub pool_share: Fraction,
    /// Default time in which a reservation must be committed before it expires.
    pub commit_within: Ns,
}

impl Default for Policy {
    fn default() -> Self {
        Self { pool_share: Fraction::new(0.25).expect("a fraction"), commit_within: COMMIT_TIMEOUT_DEFAULT }
    }
}

/// Section `[qos]`: remedies for VMs that pool memory slows down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Qos {
    /// When pool memory of running VMs is moved to local memory.
    pub rehome: RehomePolicy,
}

/// When pool memory of running VMs is moved to local memory of their hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RehomePolicy {
    /// Requests of clients are rejected.
    Never,
    /// Only on request of a client.
    #[default]
    Ask,
    /// Also if pool memory slows a VM down, and its host has enough free local memory.
    Auto,
}

/// Section `[tls]`: files and role names for mutual TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// PEM file with the manager's certificate chain.
    pub certificate: PathBuf,
    /// PEM file with the manager's private key.
    pub key: PathBuf,
    /// PEM file with the certificate authority that signs client certificates.
    pub client_ca: PathBuf,
    /// Certificate names of clients with the role scheduler.
    pub schedulers: Vec<Name>,
    /// Certificate names of clients with the role admin.
    pub admins: Vec<Name>,
}

/// Section `[[emc]]`: one pool device (external memory controller).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Emc {
    /// Name of the EMC, unique in the rack.
    pub name: Name,
    /// Number of slices of 1 GiB.
    pub slices: u32,
    /// Driver that grants and revokes access to the device.
    pub driver: Driver,
    /// Path at which the driver opens the device, unique in the rack.
    pub path: PathBuf,
    /// Serial number by which hosts identify the device, unique in the rack. Set only if the driver
    /// cannot revoke access.
    pub serial: Option<String>,
}

/// Section `[[host]]`: one KVM host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Name of the host, unique in the rack.
    pub name: Name,
    /// Number of cores available for reservations.
    pub cores: u32,
    /// Local memory available for reservations.
    pub local: Bytes,
    /// Names of the attached EMCs, at least one.
    pub emcs: Vec<Name>,
    /// SHA-256 of the host's token; `None` if the manager creates and stores the token.
    pub token_sha256: Option<[u8; 32]>,
}

impl Config {
    /// Reads and validates a configuration file.
    ///
    /// # Errors
    /// [`ConfigError::Read`], or [`ConfigError::Invalid`] with all violations.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        config_file::load(path, |top, base| ConfigParser::new(base).parse_rack(top))
    }

    /// Checks that only root and the manager's user, which has the ID `manager_uid`, can write to
    /// the folder of the store and to the folders of its tokens, and that one of them owns the
    /// folder of the socket, if these folders exist. `path` is the path of the configuration file,
    /// for messages. The folders of an EMC are checked when the EMC is opened, so that the other
    /// EMCs stay usable.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with all violations.
    pub fn check_store_folders(&self, path: &Path, manager_uid: u32) -> Result<(), ConfigError> {
        let violations = find_access_violations(self.store_folders(), manager_uid);
        reject_violations(path, violations.chain(self.find_socket_violation(manager_uid)).collect())
    }

    /// Checks the folders like [`Self::check_store_folders`], and also the folders of the EMCs.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with all violations.
    pub fn check_folders(&self, path: &Path, manager_uid: u32) -> Result<(), ConfigError> {
        let emcs = self.emcs.iter().enumerate().flat_map(|(i, emc)| {
            emc.driver.folders(&emc.path).into_iter().map(move |folder| (format!("emc[{i}].path"), folder))
        });
        let violations = find_access_violations(self.store_folders().chain(emcs), manager_uid);
        reject_violations(path, violations.chain(self.find_socket_violation(manager_uid)).collect())
    }

    /// Returns the field and the path of the store's folder and of the folders of tokens in it.
    fn store_folders(&self) -> impl Iterator<Item = (String, PathBuf)> {
        let (field, folder) = (self.manager.folder_field(), &self.manager.folder);
        [folder.clone(), token_paths::host_token_directory(folder), token_paths::role_token_directory(folder)]
            .into_iter()
            .map(|folder| (field.to_owned(), folder))
    }

    /// Parses and validates the contents of a configuration file. `path` appears in messages, and
    /// its directory is the base of relative paths in `text`.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with all violations.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        config_file::parse(text, path, |top, base| ConfigParser::new(base).parse_rack(top))
    }
}

/// Value of `manager.store`.
enum Store {
    Folder(PathBuf),
    Etcd(EtcdLocation),
}

/// Parser of the configuration. It keeps the values parsed so far for rules that involve several
/// fields.
#[derive(Debug)]
struct ConfigParser<'a> {
    base: &'a Path,
    has_tls: bool,
    slices: u32,
    emcs: BTreeSet<Name>,
    serials: BTreeSet<String>,
    hosts: BTreeSet<Name>,
    directories: Directories,
    tokens: BTreeSet<[u8; 32]>,
}

impl<'a> ConfigParser<'a> {
    fn new(base: &'a Path) -> Self {
        Self {
            base,
            has_tls: false,
            slices: 0,
            emcs: BTreeSet::new(),
            serials: BTreeSet::new(),
            hosts: BTreeSet::new(),
            directories: Directories::default(),
            tokens: BTreeSet::new(),
        }
    }

    fn parse_rack(&mut self, mut top: Section<'_>) -> Option<Config> {
        self.has_tls = top.contains("tls");
        let etcd = top.take_section("etcd");
        let manager = top
            .take_required("manager", Field::to_section)
            .and_then(|section| self.parse_manager(section, etcd));
        let is_folder = manager.as_ref().is_some_and(|manager| manager.etcd.is_none());
        top.check(
            !is_folder || !top.contains("etcd"),
            "etcd",
            "requires manager.store = \"etcd://HOST:PORT\"",
        );
        let lease = top.take_section("lease").map_or(Some(Lease::default()), parse_lease);
        let policy = top.take_section("policy").map_or(Some(Policy::default()), parse_policy);
        let prediction = top
            .take_section("prediction")
            .map_or(Some(Settings::default()), prediction::parse_prediction_settings);
        let qos = top.take_section("qos").map_or(Some(Qos::default()), parse_qos);
        let fence = top
            .take_section("fence")
            .map_or(Some(None), |section| fence::parse_fence_command(section).map(Some));
        let is_unix = manager.as_ref().map(|manager| matches!(manager.listen, Listen::Unix(_)));
        let access = top
            .take_section("access")
            .map_or(Some(Access::default()), |section| access::parse_access(section, is_unix));
        let tls = top.take_section("tls").map_or(Some(None), |section| self.parse_tls(section).map(Some));
        let emcs = top.take_required_sections("emc", EMCS_MAX);
        let emcs: Vec<_> = emcs.into_iter().map(|section| self.parse_emc(section)).collect();
        let hosts = top.take_required_sections("host", HOSTS_MAX);
        let hosts: Vec<_> = hosts.into_iter().map(|section| self.parse_host(section)).collect();
        top.reject_unknown_keys();
        let (emcs, hosts) =
            (emcs.into_iter().collect::<Option<_>>()?, hosts.into_iter().collect::<Option<_>>()?);
        let (lease, policy, prediction, qos, fence) = (lease?, policy?, prediction?, qos?, fence?);
        let (manager, access, tls) = (manager?, access?, tls?);
        Some(Config { manager, lease, policy, prediction, qos, fence, access, tls, emcs, hosts })
    }

    fn parse_manager(&mut self, mut section: Section<'_>, etcd: Option<Section<'_>>) -> Option<Manager> {
        let listen = section.take_optional("listen", |field| self.parse_listen(field));
        section.check(
            !self.has_tls || listen != Some(None),
            "listen",
            "is missing: [tls] requires an IP address and a port",
        );
        let listen = listen.map(|listen| listen.unwrap_or_else(|| Listen::Unix(DEFAULT_SOCKET_PATH.into())));
        let has_etcd_tls = etcd.as_ref().is_some_and(|etcd| etcd.contains("ca"));
        let store = section.take_required("store", |field| match etcd::is_etcd(field) {
            true => etcd::parse_location(field, has_etcd_tls).map(Store::Etcd),
            false if field.as_str().is_ok_and(etcd::is_address) => {
                Err("must be a folder or etcd://HOST:PORT,HOST:PORT/PREFIX".to_owned())
            }
            false => self.parse_directory(field).map(Store::Folder),
        });
        let store = match store {
            Some(store) => self.parse_folder(&mut section, store),
            None => section.take_optional("state_dir", |field| field.to_path(self.base)).and(None),
        };
        let metrics_listen = section.take_optional("metrics_listen", |field| match &listen {
            Some(Listen::Tcp(listen)) if parse_address(field)? == *listen => {
                Err("must differ from manager.listen".to_owned())
            }
            _ => parse_address(field),
        });
        let etcd = match &store {
            Some((_, Some(location))) => {
                let rule = "is missing: manager.store requires it";
                section.check(etcd.is_some(), "etcd", rule);
                etcd.and_then(|etcd| {
                    etcd::parse_etcd(etcd, self.base, location.clone(), listen.as_ref(), self.has_tls)
                })
                .map(Some)
            }
            _ => Some(None),
        };
        section.reject_unknown_keys();
        let (folder, _) = store?;
        Some(Manager { listen: listen?, folder, etcd: etcd?, metrics_listen: metrics_listen? })
    }

    /// Returns the folder of the manager, and the location of the store in etcd.
    fn parse_folder(
        &mut self,
        section: &mut Section<'_>,
        store: Store,
    ) -> Option<(PathBuf, Option<EtcdLocation>)> {
        match store {
            Store::Etcd(location) => {
                let folder = section.take_required("state_dir", |field| self.parse_directory(field))?;
                Some((folder, Some(location)))
            }
            Store::Folder(folder) => {
                let rule = "requires manager.store = \"etcd://HOST:PORT\"; manager.store is the folder of the tokens";
                section.take_optional("state_dir", |_| Err::<(), _>(rule.to_owned()))?;
                Some((folder, None))
            }
        }
    }

    fn parse_listen(&self, field: &Field<'_>) -> Result<Listen, String> {
        if let Some(path) = field.as_str()?.strip_prefix("unix:") {
            if self.has_tls {
                return Err(
                    "must be an IP address and a port because of [tls]; callers of a unix socket are identified by their user"
                        .into(),
                );
            }
            return config_file::to_socket_path(self.base, path).map(Listen::Unix);
        }
        let listen = Listen::Tcp(parse_address(field)?);
        let allowed = listen.is_local() || self.has_tls;
        allowed
            .then_some(listen)
            .ok_or_else(|| "must be a loopback address or unix:/path, because there is no [tls]".to_owned())
    }

    fn parse_tls(&self, mut section: Section<'_>) -> Option<Tls> {
        let certificate = section.take_required("certificate", |field| field.to_path(self.base));
        let key = section.take_required("key", |field| field.to_path(self.base));
        let client_ca = section.take_required("client_ca", |field| field.to_path(self.base));
        let schedulers = section.take_list("schedulers", ROLE_NAMES_MAX, Field::to_name);
        let admins = section.take_list("admins", ROLE_NAMES_MAX, Field::to_name);
        section.reject_unknown_keys();
        Some(Tls {
            certificate: certificate?,
            key: key?,
            client_ca: client_ca?,
            schedulers: schedulers?,
            admins: admins?,
        })
    }

    fn parse_emc(&mut self, mut section: Section<'_>) -> Option<Emc> {
        let name = section.take_required("name", |field| check_unique(field.to_name()?, &mut self.emcs));
        let slices = section.take_required("slices", |field| self.parse_slices(field));
        let driver = section.take_required("driver", parse_driver);
        let path = section.take_required("path", |field| self.parse_directory(field));
        let serial = match driver {
            Some(driver) if !driver.can_revoke() => {
                section.take_required("serial", |field| self.parse_serial(field)).map(Some)
            }
            Some(driver) => {
                section.take_optional("serial", |_| Err(fence::describe_disallowed_serial(driver)))
            }
            None => section.take_optional("serial", |field| self.parse_serial(field)),
        };
        section.reject_unknown_keys();
        Some(Emc { name: name?, slices: slices?, driver: driver?, path: path?, serial: serial? })
    }

    fn parse_serial(&mut self, field: &Field<'_>) -> Result<String, String> {
        check_unique(fence::parse_serial_number(field)?, &mut self.serials)
    }

    fn parse_slices(&mut self, field: &Field<'_>) -> Result<u32, String> {
        let slices = field.to_integer(1..=SLICES_PER_EMC_MAX)?;
        self.slices = self.slices.saturating_add(slices);
        let sum = self.slices;
        let rule = || format!("all EMCs together have at least {sum} slices: must have at most {SLICES_MAX}");
        (sum <= SLICES_MAX).then_some(slices).ok_or_else(rule)
    }

    fn parse_directory(&mut self, field: &Field<'_>) -> Result<PathBuf, String> {
        let path = field.to_path(self.base)?;
        self.directories.add(field.field_path(), &path)?;
        Ok(path)
    }

    fn parse_host(&mut self, mut section: Section<'_>) -> Option<Host> {
        let name = section.take_required("name", |field| check_unique(field.to_name()?, &mut self.hosts));
        let cores = section.take_required("cores", |field| field.to_integer(1..=CORES_PER_HOST_MAX));
        let local =
            section.take_required("local_mib", |field| field.to_integer(1..=LOCAL_MEMORY_MIB_PER_HOST_MAX));
        let emcs = self.parse_attached_emcs(&mut section);
        let token = section.take_optional("token_sha256", |field| {
            check_unique(parse_token_sha256(field)?, &mut self.tokens)
        });
        section.reject_unknown_keys();
        Some(Host {
            name: name?,
            cores: cores?,
            local: Bytes::mib(local?),
            emcs: emcs?,
            token_sha256: token?,
        })
    }

    fn parse_attached_emcs(&self, section: &mut Section<'_>) -> Option<Vec<Name>> {
        let mut attached = BTreeSet::new();
        let emcs = section.take_list("emcs", EMCS_PER_HOST_MAX, |field| {
            let emc = check_unique(field.to_name()?, &mut attached)?;
            let choices = || self.emcs.iter().map(Name::as_str).collect::<Vec<_>>().join(", ");
            if self.emcs.contains(&emc) {
                Ok(emc)
            } else {
                Err(format!("no such EMC; must be one of {}", choices()))
            }
        })?;
        section.check(!emcs.is_empty(), "emcs", "must name at least one EMC")?;
        Some(emcs)
    }
}

fn parse_lease(mut section: Section<'_>) -> Option<Lease> {
    let ttl = section.take_optional("ttl_s", |field| field.to_duration(LEASE_TTL_MIN..=LEASE_TTL_MAX));
    let fence_after = section.take_optional("fence_after_s", |field| match field.as_str() {
        Ok("never") => Ok(None),
        _ => field
            .to_duration(Ns::ZERO..=FENCE_AFTER_MAX)
            .map(Some)
            .map_err(|rule| format!("{rule}, or \"never\"")),
    });
    let lease = ttl.zip(fence_after).and_then(|(ttl, fence_after)| check_lease(&section, ttl, fence_after));
    section.reject_unknown_keys();
    lease
}

/// Checks that `fence_after` is at least `ttl`. A rejected agent retries only once per `ttl`, and
/// its host must not be fenced before the retry.
fn check_lease(section: &Section<'_>, ttl: Option<Ns>, fence_after: Option<Option<Ns>>) -> Option<Lease> {
    let default = Lease::default();
    let lease =
        Lease { ttl: ttl.unwrap_or(default.ttl), fence_after: fence_after.unwrap_or(default.fence_after) };
    let Some(after) = lease.fence_after else { return Some(lease) };
    let shown = |is_default, value: Ns| {
        format!("{}{}", if is_default { "default " } else { "" }, value.as_duration().as_secs_f64())
    };
    let (ttl, after) = (shown(ttl.is_none(), lease.ttl), shown(fence_after.is_none(), after));
    let (key, rule) = match fence_after {
        Some(_) => ("fence_after_s", format!("must not be shorter than lease.ttl_s ({ttl})")),
        None => ("ttl_s", format!("must not be longer than lease.fence_after_s ({after})")),
    };
    section.check(lease.fence_after >= Some(lease.ttl), key, &rule)?;
    Some(lease)
}

fn parse_policy(mut section: Section<'_>) -> Option<Policy> {
    let default = Policy::default();
    let pool_share = section.take_optional("pool_share", prediction::parse_fraction);
    let within =
        section.take_optional("commit_within_s", |field| field.to_duration(Ns::ms(1)..=COMMIT_TIMEOUT_MAX));
    section.reject_unknown_keys();
    Some(Policy {
        pool_share: pool_share?.unwrap_or(default.pool_share),
        commit_within: within?.unwrap_or(default.commit_within),
    })
}

fn parse_qos(mut section: Section<'_>) -> Option<Qos> {
    let rehome = section.take_optional("rehome", |field| match field.as_str()? {
        "never" => Ok(RehomePolicy::Never),
        "ask" => Ok(RehomePolicy::Ask),
        "auto" => Ok(RehomePolicy::Auto),
        _ => Err("must be \"never\", \"ask\" or \"auto\"".to_owned()),
    });
    section.reject_unknown_keys();
    Some(Qos { rehome: rehome?.unwrap_or_default() })
}

fn check_unique<T: Ord + Clone>(value: T, seen: &mut BTreeSet<T>) -> Result<T, String> {
    if seen.insert(value.clone()) { Ok(value) } else { Err("is a duplicate: must be unique".to_owned()) }
}

fn parse_address(field: &Field<'_>) -> Result<SocketAddr, String> {
    let rule = || "must be an IP address and a port, such as 127.0.0.1:9750".to_owned();
    let address: SocketAddr = field.as_str()?.parse().map_err(|_| rule())?;
    let rule = || "must have a port from 1 to 65535, because clients cannot find another port".to_owned();
    (address.port() != 0).then_some(address).ok_or_else(rule)
}

fn parse_driver(field: &Field<'_>) -> Result<Driver, String> {
    let choices = || Driver::ALL.map(Driver::name).join(", ");
    Driver::from_name(field.as_str()?).ok_or_else(|| format!("no such driver; must be one of {}", choices()))
}

fn parse_token_sha256(field: &Field<'_>) -> Result<[u8; 32], String> {
    crate::hex::parse_sha256(field.as_str()?)
        .ok_or_else(|| "must be 64 hexadecimal digits (0-9, a-f)".to_owned())
}

/// Returns the folders, given as field and path, to which users other than root and the manager's
/// user can write.
fn find_access_violations(
    folders: impl Iterator<Item = (String, PathBuf)>,
    manager_uid: u32,
) -> impl Iterator<Item = Violation> {
    folders.filter_map(move |(field, folder)| match folder_access::check(&folder, manager_uid) {
        Err(FolderAccessError::Violation { rule, .. }) => Some(Violation::of_path(field, &folder, rule)),
        _ => None, // opening the store or EMC reports an error of the operating system
    })
}

#[cfg(test)]
mod tests;
