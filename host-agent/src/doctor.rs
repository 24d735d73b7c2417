//! `host-agent doctor`: reports missing, wrong or dangerous settings of this machine, each with the
//! command that fixes it. It changes nothing. The state in the rack is reported by `tarn doctor`.

mod agent;
mod devices;
mod encryption;
mod files;
mod kernel;
mod node;
mod tenants;

use std::{
    io,
    path::{Path, PathBuf},
};

use serde::Serialize;

use self::agent::Agents;
use crate::{
    config::{Backend, Config},
    host::sysfs::Sysfs,
};

/// Hint for a check without permission.
const RUN_AS_ROOT: &str = "run as root: `sudo host-agent doctor`";

/// Result of a check, in the format of `tarn doctor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Check.
    pub check: &'static str,
    /// Whether it passed.
    pub ok: bool,
    /// Subject.
    pub subject: String,
    /// Finding.
    pub message: String,
    /// Command that fixes it, or advice.
    pub fix: Option<String>,
}

impl Finding {
    fn passed(check: &'static str, message: impl Into<String>) -> Self {
        Self { check, ok: true, subject: "this host".to_owned(), message: message.into(), fix: None }
    }

    fn problem(check: &'static str, message: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { ok: false, fix: Some(fix.into()), ..Self::passed(check, message) }
    }

    fn of(self, subject: impl Into<String>) -> Self {
        Self { subject: subject.into(), ..self }
    }
}

/// Locations of machine information.
#[derive(Clone, Debug)]
pub struct Machine {
    /// /sys.
    pub sys: Sysfs,
    /// /proc.
    pub proc: Sysfs,
    /// /dev.
    pub dev: PathBuf,
    /// Folder of kernel modules.
    pub modules: Sysfs,
}

impl Machine {
    /// Returns the running machine.
    pub fn this() -> Self {
        Self {
            sys: Sysfs::at("/sys"),
            proc: Sysfs::at("/proc"),
            dev: "/dev".into(),
            modules: Sysfs::at("/lib/modules"),
        }
    }
}

/// Use of a machine's CXL memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryUse {
    /// Device-dax ranges.
    Dax,
    /// Memory of a node.
    Blocks,
}

/// Checks a machine against a host.toml.
pub fn examine(machine: &Machine, path: &Path) -> Vec<Finding> {
    let config = match Config::load(path) {
        Ok(config) => config,
        Err(error) => return vec![files::invalid_config(path, &error), kernel::kvm(machine)],
    };
    let (used, local_dir) = match &config.backend {
        Backend::Emulated { local_dir } => (None, local_dir),
        Backend::Dax { local_dir, .. } => (Some(MemoryUse::Dax), local_dir),
        Backend::MemoryBlock { local_dir, .. } => (Some(MemoryUse::Blocks), local_dir),
    };
    let mut findings = vec![files::config(path)];
    findings.extend(files::secrets(&config));
    findings.push(files::local_dir(local_dir.as_deref()));
    let agents = Agents::find(machine, &config.runtime_dir);
    findings.push(agents.single_agent(&config, used.is_some()));
    findings.push(agents.capabilities(machine, used.is_some()));
    findings.push(kernel::kvm(machine));
    findings.push(kernel::huge_pages(machine));
    findings.extend(config.symbiosis.iter().flat_map(|symbiosis| tenants::all(machine, symbiosis)));
    findings.extend(used.into_iter().flat_map(|used| memory(machine, &config, &agents, used)));
    findings
}

/// Checks CXL memory and its requirements.
fn memory(machine: &Machine, config: &Config, agents: &Agents, used: MemoryUse) -> Vec<Finding> {
    let mut findings = vec![kernel::release(machine)];
    findings.extend(kernel::modules(machine, used));
    findings.push(kernel::check_auto_online(machine));
    findings.push(encryption::of_memory(machine));
    let (records, places) = files::records(&config.runtime_dir);
    findings.push(records);
    let (devices, nodes) = devices::all(machine, used, &places, agents.is_running());
    findings.extend(devices);
    if used == MemoryUse::Blocks {
        findings.push(node::block_size(machine));
        findings.push(node::page_migration(machine));
        findings.extend(nodes.iter().flat_map(|(node, regions)| node::all(machine, *node, regions)));
    }
    findings
}

/// Returns the failed checks, or that there is none.
fn problems_or(problems: Vec<Finding>, passed: impl FnOnce() -> Finding) -> Vec<Finding> {
    if problems.is_empty() { vec![passed()] } else { problems }
}

/// Formats the result as text.
pub fn text(findings: &[Finding]) -> String {
    let line = |finding: &Finding| {
        let Finding { check, ok, subject, message, fix } = finding;
        let state = if *ok { "ok" } else { "PROBLEM" };
        let fix = fix.as_ref().map_or_else(String::new, |fix| format!("\n        fix: {fix}"));
        format!("{state:<7} {check:<10} {subject}: {message}{fix}\n")
    };
    findings.iter().map(line).collect()
}

/// Returns the hint for a check without permission.
fn fix_for(errno: &io::Error, otherwise: &str) -> String {
    match errno.kind() {
        io::ErrorKind::PermissionDenied => RUN_AS_ROOT.to_owned(),
        _ => otherwise.to_owned(),
    }
}

#[cfg(test)]
mod tests;
