//! Configuration files: `rack.toml` of the manager, `host.toml` of an agent.

use std::{fmt, path::PathBuf};

/// Emulated EMC of a rack.
#[derive(Clone, Debug)]
pub struct Emc {
    /// Its name.
    pub name: String,
    /// Number of slices of 1 GiB.
    pub slices: u32,
    /// Directory of its slices, best on a file system in memory.
    pub path: PathBuf,
}

/// Host of a rack.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// CPU cores.
    pub cores: u32,
    /// Local memory, in MiB.
    pub local_mib: u64,
    /// Names of the EMCs that it reaches.
    pub emcs: Vec<String>,
}

/// Content of `rack.toml`; its text is the [`Display`](fmt::Display) output.
///
/// ```
/// let rack = local_rack::RackConfig {
///     listen: "unix:/run/manager.sock".to_owned(),
///     store: "store".into(),
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
    /// Address of the manager: `unix:PATH` or `IP:PORT`.
    pub listen: String,
    /// Directory of the store; relative to the file.
    pub store: PathBuf,
    /// Lease duration, in seconds.
    pub lease_ttl_s: f64,
    /// Silence after the lease before a host is fenced, in seconds; `None` means never.
    pub fence_after_s: Option<f64>,
    /// Text after the section `[lease]`: more keys of it, and other sections.
    pub extra: String,
    /// All EMCs.
    pub emcs: Vec<Emc>,
    /// All hosts.
    pub hosts: Vec<Host>,
}

impl fmt::Display for RackConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { listen, store, lease_ttl_s, fence_after_s, extra, emcs, hosts } = self;
        let fence_after = fence_after_s.map_or_else(|| "\"never\"".to_owned(), |seconds| seconds.to_string());
        writeln!(f, "[manager]\nlisten = {listen:?}\nstore = {store:?}")?;
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

/// Content of an agent's `host.toml`; its text is the [`Display`](fmt::Display) output.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Name of the host.
    pub host: String,
    /// Address of the manager: `unix:PATH` or `http://IP:PORT`.
    pub manager: String,
    /// Directory of the agent's records and socket.
    pub runtime_dir: PathBuf,
    /// File of the host's token.
    pub token_file: PathBuf,
    /// More keys of the section `[agent]`.
    pub extra: String,
}

impl fmt::Display for AgentConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, manager, runtime_dir, token_file, extra } = self;
        writeln!(f, "[agent]\nhost = {host:?}\nmanager = {manager:?}\nruntime_dir = {runtime_dir:?}")?;
        writeln!(f, "token_file = {token_file:?}\n{extra}\n[backend]\nkind = \"emulated\"")
    }
}
