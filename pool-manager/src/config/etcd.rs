//! Store in etcd: the address in `manager.store`, and section `[etcd]`.

use std::{
    net::IpAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use config_file::{Field, Section};
use http::Uri;
use units::{Bytes, Name, Ns};

use super::Listen;

/// Beginning of `manager.store` for a store in etcd.
const SCHEME: &str = "etcd://";
/// Prefix of the keys if `manager.store` contains none.
const PREFIX_DEFAULT: &str = "/tarn";
/// Lease of a manager if `etcd.lease_s` is not set.
const LEASE_DEFAULT: Ns = Ns::secs(5);
/// Quota that etcd has by default, in MiB.
const QUOTA_MIB_DEFAULT: u64 = 2048;
/// Configurable leases of a manager. etcd rejects shorter ones.
const LEASES: RangeInclusive<Ns> = Ns::secs(2)..=Ns::secs(60);
/// Configurable quotas of etcd, in MiB; etcd recommends at most 8 GiB.
const QUOTAS_MIB: RangeInclusive<u64> = 256..=65_536;
/// Maximum number of configured members of a cluster.
const MEMBERS_MAX: usize = 9;
/// Maximum length of the prefix of a rack's keys, in bytes.
const PREFIX_BYTES_MAX: usize = 200;

/// Cluster of etcd that stores the ledger, and this manager as others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Etcd {
    /// Members of the cluster, and prefix of the keys.
    pub location: EtcdLocation,
    /// Files for TLS; `None` if all members are on this machine.
    pub tls: Option<EtcdTls>,
    /// User of etcd; `None` if etcd requires none.
    pub user: Option<EtcdUser>,
    /// Time after which another manager takes over from one that does not respond.
    pub lease: Ns,
    /// `--quota-backend-bytes` of the members.
    pub quota: Bytes,
    /// Name of this manager, unique in the rack.
    pub name: Name,
    /// Address of this manager for clients and agents: `http://…`, `https://…` or `unix:/path`.
    pub advertise: String,
}

/// Members of a cluster, and prefix of the keys of a rack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdLocation {
    /// Addresses of members, `HOST:PORT`; at least one.
    pub members: Vec<String>,
    /// Prefix of all keys, without a slash at its end.
    pub prefix: String,
}

/// Files for TLS connections to etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTls {
    /// PEM file with the certificate authority of the members.
    pub ca: PathBuf,
    /// PEM files with the client certificate of this manager and its private key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// User of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdUser {
    /// Name of the user.
    pub name: String,
    /// File with the password.
    pub password_file: PathBuf,
}

impl std::fmt::Display for EtcdLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{SCHEME}{}{}", self.members.join(","), self.prefix)
    }
}

impl Etcd {
    /// Returns the addresses of the members, as URIs.
    pub fn endpoints(&self) -> Vec<String> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        self.location.members.iter().map(|member| format!("{scheme}://{member}")).collect()
    }
}

/// Returns whether `manager.store` is an address of etcd.
pub(super) fn is_etcd(field: &Field<'_>) -> bool {
    field.as_str().is_ok_and(|text| text.starts_with(SCHEME))
}

/// Returns whether `manager.store` looks like an address, which can be a mistyped address of etcd.
pub(super) fn is_address(text: &str) -> bool {
    text.contains("://") || text.to_ascii_lowercase().starts_with("etcd:")
}

/// Parses `etcd://HOST:PORT,…/PREFIX`. Without TLS, all members must be on this machine, because everyone who can
/// change the traffic could change the owners of slices.
pub(super) fn parse_location(field: &Field<'_>, has_tls: bool) -> Result<EtcdLocation, String> {
    let text = field.as_str()?;
    let rest = text.strip_prefix(SCHEME).ok_or_else(|| format!("must begin with {SCHEME}"))?;
    let (members, prefix) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let members: Vec<String> = members.split(',').map(str::to_owned).collect();
    if members.len() > MEMBERS_MAX {
        return Err(format!("has {} members: must have at most {MEMBERS_MAX}", members.len()));
    }
    for (index, member) in members.iter().enumerate() {
        check_member(member, has_tls)?;
        if members[..index].contains(member) {
            return Err(format!("{member} is a duplicate: must be unique"));
        }
    }
    let prefix = if prefix.is_empty() { PREFIX_DEFAULT } else { prefix };
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let mut folders = prefix[1..].split('/');
    if prefix.len() > PREFIX_BYTES_MAX
        || !folders.all(|folder| !folder.is_empty() && folder.bytes().all(is_allowed))
    {
        return Err(format!(
            "prefix {prefix:?} must consist of names with a slash before each, with letters, digits, '-', '_' and '.', at most {PREFIX_BYTES_MAX} bytes"
        ));
    }
    Ok(EtcdLocation { members, prefix: prefix.to_owned() })
}

fn check_member(member: &str, has_tls: bool) -> Result<(), String> {
    let rule = || "must be etcd://HOST:PORT,HOST:PORT/PREFIX".to_owned();
    let uri: Uri = format!("http://{member}").parse().map_err(|_| rule())?;
    let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(rule)?;
    if member.contains('@') {
        return Err("must not contain a user name or a password: use etcd.user and etcd.password_file".into());
    }
    if uri.port_u16().is_none_or(|port| port == 0) {
        return Err(format!("member {member:?} must have a port from 1 to 65535"));
    }
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    let is_local = host == "localhost" || address.is_ok_and(|address| address.is_loopback());
    let rule = || format!("member {member:?} must be on this machine, because there is no etcd.ca");
    (is_local || has_tls).then_some(()).ok_or_else(rule)
}

/// Parses section `[etcd]`, which may be missing. `listen` is the address of the manager, if it is valid.
pub(super) fn parse_etcd(
    mut section: Section<'_>,
    base: &Path,
    location: EtcdLocation,
    listen: Option<&Listen>,
    has_tls: bool,
) -> Option<Etcd> {
    let tls = parse_tls(&mut section, base);
    let user = parse_user(&mut section, base);
    let lease = section.take_optional("lease_s", |field| field.to_duration(LEASES));
    let quota = section.take_optional("quota_mib", |field| field.to_integer(QUOTAS_MIB));
    let name = section.take_optional("name", Field::to_name);
    let name = name.and_then(|name| {
        let machine = rustix::system::uname();
        let name = name.or_else(|| Name::new(&machine.nodename().to_string_lossy()).ok());
        section.check(name.is_some(), "name", "is missing: the name of this machine cannot be used")?;
        name
    });
    let advertise = section.take_optional("advertise", |field| parse_advertise(field, has_tls));
    let advertise = advertise.and_then(|advertise| {
        let advertise = advertise.or_else(|| default_advertise(listen?, has_tls));
        let rule = "is missing: clients cannot connect to manager.listen";
        section.check(advertise.is_some() || listen.is_none(), "advertise", rule)?;
        advertise
    });
    section.reject_unknown_keys();
    let (lease, quota) = (lease?.unwrap_or(LEASE_DEFAULT), Bytes::mib(quota?.unwrap_or(QUOTA_MIB_DEFAULT)));
    Some(Etcd { location, tls: tls?, user: user?, lease, quota, name: name?, advertise: advertise? })
}

fn parse_tls(section: &mut Section<'_>, base: &Path) -> Option<Option<EtcdTls>> {
    let ca = section.take_optional("ca", |field| field.to_path(base));
    let certificate = section.take_optional("certificate", |field| field.to_path(base));
    let key = section.take_optional("key", |field| field.to_path(base));
    let (ca, certificate, key) = (ca?, certificate?, key?);
    section.check(
        certificate.is_some() == key.is_some(),
        "certificate",
        "requires key, and key requires it",
    )?;
    section.check(
        ca.is_some() || certificate.is_none(),
        "ca",
        "is missing: certificate and key require it",
    )?;
    Some(ca.map(|ca| EtcdTls { ca, identity: certificate.zip(key) }))
}

fn parse_user(section: &mut Section<'_>, base: &Path) -> Option<Option<EtcdUser>> {
    let name = section.take_optional("user", |field| match field.as_str()? {
        "" => Err("must not be empty".to_owned()),
        name => Ok(name.to_owned()),
    });
    let password_file = section.take_optional("password_file", |field| field.to_path(base));
    let (name, password_file) = (name?, password_file?);
    let is_complete = name.is_some() == password_file.is_some();
    section.check(is_complete, "user", "requires password_file, and password_file requires it")?;
    Some(name.zip(password_file).map(|(name, password_file)| EtcdUser { name, password_file }))
}

fn parse_advertise(field: &Field<'_>, has_tls: bool) -> Result<String, String> {
    let text = field.as_str()?;
    let scheme = if has_tls { "https" } else { "http" };
    let uri = text.parse::<Uri>().ok().filter(|uri| uri.scheme_str() == Some(scheme));
    let is_address = uri.is_some_and(|uri| {
        let has_path = !matches!(uri.path(), "" | "/") || uri.query().is_some();
        uri.port_u16().is_some_and(|port| port != 0) && !has_path && !text.contains('@')
    });
    if is_address || (!has_tls && text.starts_with("unix:/")) {
        return Ok(text.to_owned());
    }
    Err(match has_tls {
        true => "must be https://HOST:PORT".to_owned(),
        false => "must be http://HOST:PORT or unix:/PATH, because there is no [tls]".to_owned(),
    })
}

/// Returns the address of a listening manager; `None` for the address that stands for all addresses of the machine.
fn default_advertise(listen: &Listen, has_tls: bool) -> Option<String> {
    match listen {
        Listen::Tcp(address) if address.ip().is_unspecified() => None,
        _ => Some(listen.uri(has_tls)),
    }
}
