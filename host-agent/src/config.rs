//! Configuration of a host from `host.toml`. A [`Config`] has been validated. Files named in it are
//! not opened here.

pub mod symbiosis;

use std::{
    collections::BTreeSet,
    fs, io,
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use tonic::transport::Uri;
use units::{Name, UserId, limits::SCRUB_MIB_PER_S_DEFAULT};

use self::symbiosis::{RawSymbiosis, Symbiosis};
use crate::user::current_user;

/// Default address of the manager, on the same machine.
const MANAGER_DEFAULT: &str = "unix:/run/tarn/manager.sock";
/// Maximum length of the path of a unix socket on Linux, in bytes.
const SOCKET_BYTES_MAX: usize = 107;

/// Validated configuration of a host. All paths are absolute.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Name of the host in `rack.toml`.
    pub host: Name,
    /// Address of the manager: `http://`, `https://` or `unix:`.
    pub manager: String,
    /// Runtime directory, which contains the lock and the VM records.
    pub runtime_dir: PathBuf,
    /// File of this host's token; required unless certificates identify the host.
    pub token_file: Option<PathBuf>,
    /// Path of the socket at which VMMs attach to memory.
    pub socket: PathBuf,
    /// Users who may send requests to the socket. The reservation of each VM determines its user.
    pub allowed_uids: BTreeSet<UserId>,
    /// Address at which metrics are served, if any.
    pub metrics_listen: Option<SocketAddr>,
    /// Certificates; required if the manager is on another machine.
    pub tls: Option<Tls>,
    /// Backend that provides slices.
    pub backend: Backend,
    /// Settings of Symbiosis; `None` disables it.
    pub symbiosis: Option<Symbiosis>,
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
        /// Directory on tmpfs for local memory of VMMs that take only paths.
        local_dir: Option<PathBuf>,
    },
    /// Slices are dax devices of CXL memory.
    Dax {
        /// Directory on tmpfs for local memory of VMMs that take only paths.
        local_dir: Option<PathBuf>,
        /// Limit of all scrubs of the host together, in MiB per second.
        scrub_mib_per_s: NonZeroU32,
    },
    /// Slices are memory blocks of CXL memory on a NUMA node.
    MemoryBlock {
        /// Directory on tmpfs for local memory of VMMs that take only paths.
        local_dir: Option<PathBuf>,
        /// Limit of all scrubs of the host together, in MiB per second.
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
}

/// Contents of host.toml before validation. Unknown keys are errors.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConfig {
    agent: RawAgent,
    tls: Option<RawTls>,
    backend: RawBackend,
    symbiosis: Option<RawSymbiosis>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAgent {
    host: String,
    manager: Option<String>,
    runtime_dir: PathBuf,
    token_file: Option<PathBuf>,
    socket: Option<PathBuf>,
    allowed_uids: Option<Vec<u32>>,
    metrics_listen: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTls {
    ca: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
    server_name: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawBackend {
    kind: String,
    local_dir: Option<PathBuf>,
    scrub_mib_per_s: Option<u32>,
}

/// Error of a configuration file.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// The file is not TOML, or a key is unknown, missing or of another type.
    #[error("{}", path.display())]
    Toml {
        /// Path of the file.
        path: PathBuf,
        /// Error with line and key.
        #[source]
        cause: Box<toml::de::Error>,
    },
    /// A value violates its rule.
    #[error("{}: {field} = {value:?}: {rule}", path.display())]
    Value {
        /// Path of the file.
        path: PathBuf,
        /// Key of the value, with its section.
        field: &'static str,
        /// Invalid value.
        value: String,
        /// Violated rule.
        rule: String,
    },
}

/// Value that violates a rule, with its key.
#[derive(Debug)]
struct InvalidValue {
    field: &'static str,
    value: String,
    rule: String,
}

fn invalid(field: &'static str, value: impl ToString, rule: impl ToString) -> InvalidValue {
    InvalidValue { field, value: value.to_string(), rule: rule.to_string() }
}

impl Config {
    /// Reads and validates a configuration file.
    ///
    /// # Errors
    /// [`ConfigError`] with the first error found.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path);
        let text = text.map_err(|errno| ConfigError::Read { path: path.to_owned(), errno })?;
        Self::parse(&text, path)
    }

    /// Parses and validates the text of a configuration file. `path` is the path of the file: it is
    /// used in messages, and relative paths in the text are relative to its directory.
    ///
    /// # Errors
    /// [`ConfigError`] with the first error found.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let raw = toml::from_str::<RawConfig>(text);
        let raw = raw.map_err(|cause| ConfigError::Toml { path: path.to_owned(), cause: Box::new(cause) })?;
        let absolute =
            std::path::absolute(path).map_err(|errno| ConfigError::Read { path: path.to_owned(), errno })?;
        check(raw, absolute.parent().unwrap_or(&absolute)).map_err(|InvalidValue { field, value, rule }| {
            ConfigError::Value { path: path.to_owned(), field, value, rule }
        })
    }
}

fn check(raw: RawConfig, base: &Path) -> Result<Config, InvalidValue> {
    let agent = raw.agent;
    let host = Name::new(&agent.host).map_err(|error| invalid("agent.host", &agent.host, error))?;
    let tls = raw.tls.map(|tls| check_tls(tls, base)).transpose()?;
    let manager = agent.manager.unwrap_or_else(|| MANAGER_DEFAULT.to_owned());
    check_manager(&manager, tls.is_some())?;
    if tls.is_none() && agent.token_file.is_none() {
        return Err(invalid("agent.token_file", "", "must be set if there is no [tls]"));
    }
    let runtime_dir = base.join(agent.runtime_dir);
    let socket = agent.socket.map_or_else(|| runtime_dir.join("host-memory.sock"), |path| base.join(path));
    check_socket(&socket)?;
    Ok(Config {
        host,
        manager,
        token_file: agent.token_file.map(|path| base.join(path)),
        socket,
        allowed_uids: allowed_uids(agent.allowed_uids)?,
        metrics_listen: agent.metrics_listen.map(|text| check_metrics(&text)).transpose()?,
        runtime_dir,
        tls,
        backend: check_backend(raw.backend, base)?,
        symbiosis: raw.symbiosis.map(|raw| symbiosis::check(raw, base)).transpose()?,
    })
}

fn check_tls(raw: RawTls, base: &Path) -> Result<Tls, InvalidValue> {
    if raw.server_name.is_empty() {
        return Err(invalid("tls.server_name", "", "must be the name in the manager's certificate"));
    }
    let (ca, certificate, key) = (base.join(raw.ca), base.join(raw.certificate), base.join(raw.key));
    Ok(Tls { ca, certificate, key, server_name: raw.server_name })
}

/// Checks the address of the manager. Without TLS the token is sent in plain text, so the manager
/// must be on this machine.
fn check_manager(manager: &str, has_tls: bool) -> Result<(), InvalidValue> {
    let violation = |rule: &str| Err(invalid("agent.manager", manager, rule));
    if let Some(path) = manager.strip_prefix("unix:") {
        let rule = "must be unix: and an absolute path, without [tls]";
        return if path.starts_with('/') && !has_tls { Ok(()) } else { violation(rule) };
    }
    let Ok(uri) = manager.parse::<Uri>() else { return violation("must be http://, https:// or unix:") };
    let (Some(host), Some(scheme)) = (uri.host(), uri.scheme_str()) else {
        return violation("must be http://HOST:PORT, https://HOST:PORT or unix:/PATH");
    };
    match (scheme, has_tls) {
        ("http", false) if is_loopback(host) => Ok(()),
        ("http", false) => violation("must be on this machine, or use https:// with [tls]"),
        ("https", true) => Ok(()),
        ("https", false) => violation("requires [tls]"),
        ("http", true) => violation("must be https:// with [tls]"),
        _ => violation("must be http://, https:// or unix:"),
    }
}

fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn check_socket(socket: &Path) -> Result<(), InvalidValue> {
    let bytes = socket.as_os_str().len();
    let rule = format!("must be at most {SOCKET_BYTES_MAX} bytes long, is {bytes}");
    if bytes <= SOCKET_BYTES_MAX { Ok(()) } else { Err(invalid("agent.socket", socket.display(), rule)) }
}

fn allowed_uids(uids: Option<Vec<u32>>) -> Result<BTreeSet<UserId>, InvalidValue> {
    match uids {
        None => Ok(BTreeSet::from([UserId::ROOT, current_user()])),
        Some(uids) if uids.is_empty() => Err(invalid("agent.allowed_uids", "[]", "must not be empty")),
        Some(uids) => {
            let rule = format!("must be at most {}", u32::MAX - 1);
            let user = |uid| UserId::new(uid).map_err(|_| invalid("agent.allowed_uids", uid, &rule));
            uids.into_iter().map(user).collect()
        }
    }
}

fn check_metrics(text: &str) -> Result<SocketAddr, InvalidValue> {
    text.parse()
        .map_err(|_| invalid("agent.metrics_listen", text, "must be ADDRESS:PORT, such as 127.0.0.1:9752"))
}

fn check_backend(raw: RawBackend, base: &Path) -> Result<Backend, InvalidValue> {
    let local_dir = raw.local_dir.map(|path| base.join(path));
    match (&*raw.kind, raw.scrub_mib_per_s) {
        ("emulated", None) => Ok(Backend::Emulated { local_dir }),
        ("emulated", Some(speed)) => Err(invalid(
            "backend.scrub_mib_per_s",
            speed,
            "must not be set for an emulated EMC, whose slices are created zeroed",
        )),
        ("dax", speed) => Ok(Backend::Dax { local_dir, scrub_mib_per_s: check_speed(speed)? }),
        ("memory_block", speed) => {
            Ok(Backend::MemoryBlock { local_dir, scrub_mib_per_s: check_speed(speed)? })
        }
        (other, _) => Err(invalid("backend.kind", other, "must be emulated, dax or memory_block")),
    }
}

fn check_speed(mib_per_s: Option<u32>) -> Result<NonZeroU32, InvalidValue> {
    let speed = mib_per_s.unwrap_or(SCRUB_MIB_PER_S_DEFAULT);
    NonZeroU32::new(speed).ok_or_else(|| invalid("backend.scrub_mib_per_s", speed, "must be at least 1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = r#"
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
        assert!(MINIMAL.contains(from), "MINIMAL does not contain {from:?}");
        let error = parse(&MINIMAL.replacen(from, to, 1)).unwrap_err();
        assert!(error.starts_with("/etc/tarn/host.toml") && error.contains(message), "{error}");
    }

    #[test]
    fn config_path_without_directory_is_accepted() {
        let config = Config::parse(MINIMAL, Path::new("host.toml")).unwrap();
        assert_eq!(config.runtime_dir, std::env::current_dir().unwrap().join("run"));
    }

    #[test]
    fn omitted_keys_have_defaults_and_paths_are_relative() {
        let config = parse(MINIMAL).unwrap();
        assert_eq!(config.manager, "unix:/run/tarn/manager.sock");
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

    #[test]
    fn scrub_speed_has_a_default() {
        let dax = |rest: &str| {
            let text = MINIMAL.replacen("kind = \"emulated\"", &format!("kind = \"dax\"\n{rest}"), 1);
            parse(&text).map(|config| config.backend)
        };
        let at = |speed| Backend::Dax { local_dir: None, scrub_mib_per_s: NonZeroU32::new(speed).unwrap() };
        assert_eq!(dax("").unwrap(), at(2048));
        assert_eq!(dax("scrub_mib_per_s = 100").unwrap(), at(100));
        let error = dax("scrub_mib_per_s = 0").unwrap_err();
        assert!(error.contains("backend.scrub_mib_per_s = \"0\": must be at least 1"), "{error}");
        assert_rejected(
            "kind = \"emulated\"",
            "kind = \"emulated\"\nscrub_mib_per_s = 9",
            "must not be set for an emulated EMC",
        );
    }

    #[test]
    fn unknown_missing_or_mistyped_key_is_rejected_by_name() {
        assert_rejected("runtime_dir", "runtime_dirs", "unknown field `runtime_dirs`");
        assert_rejected("[backend]", "[backends]", "unknown field `backends`");
        assert_rejected("host = \"h0\"", "", "missing field `host`");
        assert_rejected("host = \"h0\"", "host = 7", "expected a string");
    }

    #[test]
    fn invalid_value_is_an_error_with_field_value_and_rule() {
        assert_rejected("\"h0\"", "\"../h0\"", "agent.host = \"../h0\": \"../h0\" is not a name");
        assert_rejected(
            "\"emulated\"",
            "\"cxl\"",
            "backend.kind = \"cxl\": must be emulated, dax or memory_block",
        );
        assert_rejected("\"run\"", &format!("\"{}\"", "x".repeat(120)), "agent.socket");
        assert_rejected(
            "host = \"h0\"",
            "host = \"h0\"\nallowed_uids = []",
            "agent.allowed_uids = \"[]\": must not be empty",
        );
        assert_rejected(
            "host = \"h0\"",
            "host = \"h0\"\nallowed_uids = [4294967295]",
            "agent.allowed_uids = \"4294967295\": must be at most 4294967294",
        );
        assert_rejected(
            "host = \"h0\"",
            "host = \"h0\"\nmetrics_listen = \"9752\"",
            "agent.metrics_listen = \"9752\"",
        );
        assert_rejected("token_file", "# token_file", "agent.token_file");
    }

    #[test]
    fn token_is_sent_unencrypted_only_to_loopback() {
        let manager = |uri: &str| MINIMAL.replace("[agent]", &format!("[agent]\nmanager = \"{uri}\""));
        for good in ["http://127.0.0.1:1", "http://[::1]:1", "http://localhost:9750", "unix:/run/tarn.sock"] {
            assert_eq!(parse(&manager(good)).unwrap().manager, good);
        }
        for bad in
            ["http://10.0.0.1:1", "https://10.0.0.1:1", "ftp://127.0.0.1:1", "unix:tarn.sock", "h0:9750", ""]
        {
            let error = parse(&manager(bad)).unwrap_err();
            assert!(error.contains(&format!("agent.manager = {bad:?}")), "{error}");
        }
    }

    #[test]
    fn remote_manager_requires_tls() {
        let tls =
            "[tls]\nca = \"ca.pem\"\ncertificate = \"h0.pem\"\nkey = \"h0.key\"\nserver_name = \"manager\"";
        let with_tls = |uri: &str| {
            let agent = MINIMAL.replace("[agent]", &format!("[agent]\nmanager = \"{uri}\""));
            agent.replace("[backend]", &format!("{tls}\n[backend]"))
        };
        let config = parse(&with_tls("https://10.0.0.1:9750")).unwrap();
        assert_eq!(config.tls.unwrap().ca, Path::new("/etc/tarn/ca.pem"));
        assert!(parse(&with_tls("http://127.0.0.1:9750")).unwrap_err().contains("must be https://"));
        assert!(parse(&with_tls("unix:/run/tarn.sock")).unwrap_err().contains("without [tls]"));
    }
}
