//! Generation of configuration files: `rack.toml` for the manager and `host.toml` for agents.

use std::{fmt, path::PathBuf};

/// Emulated EMC (pool device) of a rack.
#[derive(Clone, Debug)]
pub struct Emc {
    /// Name of the EMC.
    pub name: String,
    /// Number of slices, each of 1 GiB.
    pub slices: u32,
    /// Directory of the slice files, preferably on a tmpfs.
    pub path: PathBuf,
}

/// Host of a rack, as listed in `rack.toml`.
#[derive(Clone, Debug)]
pub struct Host {
    /// Name of the host.
    pub name: String,
    /// Number of CPU cores available to VMs.
    pub cores: u32,
    /// Local memory available to VMs, in MiB.
    pub local_mib: u64,
    /// Names of the EMCs that the host is attached to.
    pub emcs: Vec<String>,
}

/// Content of `rack.toml`. The [`Display`](fmt::Display) output is the text of the file.
///
/// ```
/// let rack = local_rack::RackConfig {
///     listen: "unix:/run/manager.sock".to_owned(),
///     store: "store".into(),
///     state_dir: None,
///     lease_ttl_s: 2.0,
///     fence_after_s: None,
///     extra: "[policy]\npool_share = 0.5".to_owned(),
///     emcs: vec![],
///     hosts: vec![],
/// };
/// assert!(rack.to_string().contains("fence_after_s = \"never\""));
/// ```
#[derive(Clone, Debug)]
pub struct RackConfig {
    /// Listen address of the manager: `unix:PATH` or `IP:PORT`.
    pub listen: String,
    /// Directory of the store, or its address in etcd. A relative path is relative to `rack.toml`.
    pub store: PathBuf,
    /// Directory of the tokens if the store is in etcd.
    pub state_dir: Option<PathBuf>,
    /// Lease duration, in seconds.
    pub lease_ttl_s: f64,
    /// Time from the end of a lease until the host is fenced, in seconds; `None` means never.
    pub fence_after_s: Option<f64>,
    /// TOML text that follows `[lease]`: further keys of this section, then other sections.
    pub extra: String,
    /// EMCs of the rack.
    pub emcs: Vec<Emc>,
    /// Hosts of the rack.
    pub hosts: Vec<Host>,
}

impl fmt::Display for RackConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { listen, store, state_dir, lease_ttl_s, fence_after_s, extra, emcs, hosts } = self;
        let fence_after = fence_after_s.map_or_else(|| "\"never\"".to_owned(), |seconds| seconds.to_string());
        writeln!(f, "[manager]\nlisten = {listen:?}\nstore = {store:?}")?;
        if let Some(state_dir) = state_dir {
            writeln!(f, "state_dir = {state_dir:?}")?;
        }
        writeln!(f, "[lease]\nttl_s = {lease_ttl_s}\nfence_after_s = {fence_after}\n{extra}")?;
        for Emc { name, slices, path } in emcs {
            writeln!(
                f,
                "[[emc]]\nname = {name:?}\nslices = {slices}\ndriver = \"emulated\"\npath = {path:?}"
            )?;
        }
        for Host { name, cores, local_mib, emcs } in hosts {
            writeln!(
                f,
                "[[host]]\nname = {name:?}\ncores = {cores}\nlocal_mib = {local_mib}\nemcs = {emcs:?}"
            )?;
        }
        Ok(())
    }
}

/// Content of an agent's `host.toml`. The [`Display`](fmt::Display) output is the text of the file.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Name of the host.
    pub host: String,
    /// Address of the manager: `unix:PATH` or `http://IP:PORT`.
    pub manager: String,
    /// Directory of the agent's state files and socket.
    pub runtime_dir: PathBuf,
    /// File with the token that authenticates the host to the manager.
    pub token_file: PathBuf,
    /// TOML text with further keys of the section `[agent]`.
    pub extra: String,
}

impl fmt::Display for AgentConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, manager, runtime_dir, token_file, extra } = self;
        writeln!(f, "[agent]\nhost = {host:?}\nmanager = {manager:?}\nruntime_dir = {runtime_dir:?}")?;
        writeln!(f, "token_file = {token_file:?}\n{extra}\n[backend]\nkind = \"emulated\"")
    }
}
