//! `host-agent doctor`: reports missing, wrong or dangerous settings of this machine, each with the
//! command that fixes it. It changes nothing. The state in the rack is reported by `tarn doctor`.

mod agent;
mod devices;
mod early_eviction;
mod encryption;
mod files;
mod kernel;
mod node;
mod soft_memory;
mod tenants;
mod tiering;

use std::{
    io,
    path::{Path, PathBuf},
};

use serde::Serialize;

use self::agent::RunningAgents;
use crate::{
    config::{Backend, Config},
    host::sysfs::Sysfs,
};

/// Fix printed when a check lacks the permission to read a file.
const RUN_AS_ROOT: &str = "run as root: `sudo host-agent doctor`";

/// Result of one check, in the JSON format of `tarn doctor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of the check, such as `kvm`.
    pub check: &'static str,
    /// Whether the check passed.
    pub ok: bool,
    /// Checked object, such as `this host`, `device 0x1` or `node 5`.
    pub subject: String,
    /// Observed state of the object.
    pub message: String,
    /// Command or advice that fixes a problem or, after a passed check, improves the setting.
    pub fix: Option<String>,
}

impl Finding {
    fn passed(check: &'static str, message: impl Into<String>) -> Self {
        Self { check, ok: true, subject: "this host".to_owned(), message: message.into(), fix: None }
    }

    fn problem(check: &'static str, message: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { ok: false, fix: Some(fix.into()), ..Self::passed(check, message) }
    }

    fn with_subject(self, subject: impl Into<String>) -> Self {
        Self { subject: subject.into(), ..self }
    }
}

/// Directories from which the checks read the state of the machine; tests use temporary ones.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Root of sysfs: `/sys`.
    pub sys: Sysfs,
    /// Root of procfs: `/proc`.
    pub proc: Sysfs,
    /// Directory of device nodes: `/dev`.
    pub dev: PathBuf,
    /// Directory of the kernel modules of every installed kernel: `/lib/modules`.
    pub modules: Sysfs,
}

impl Machine {
    /// Returns the directories of the running machine.
    pub fn this() -> Self {
        Self {
            sys: Sysfs::at("/sys"),
            proc: Sysfs::at("/proc"),
            dev: "/dev".into(),
            modules: Sysfs::at("/lib/modules"),
        }
    }
}

/// Backend with CXL memory. The backend determines which checks apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CxlBackend {
    /// Backend `dax`: slices are device-dax devices.
    Dax,
    /// Backend `memory_block`: slices are memory blocks of a NUMA node.
    Blocks,
}

/// Runs all checks that the backend in the host.toml at `path` requires.
///
/// If host.toml is invalid, only its problems and the result of the KVM check are returned.
pub fn examine_host(machine: &Machine, path: &Path) -> Vec<Finding> {
    let config = match Config::load(path) {
        Ok(config) => config,
        Err(error) => {
            let mut findings = files::invalid_config_findings(path, &error);
            findings.push(kernel::check_kvm(machine));
            return findings;
        }
    };
    let backend = match &config.backend {
        Backend::Emulated { .. } => None,
        Backend::Dax { .. } => Some(CxlBackend::Dax),
        Backend::MemoryBlock { .. } => Some(CxlBackend::Blocks),
    };
    let agents = RunningAgents::find(machine, &config.runtime_dir);
    let user = agents.user(machine);
    let mut findings = vec![files::check_config(path)];
    findings.extend(files::check_secrets(&config));
    findings.push(files::check_runtime_dir(&config.runtime_dir, user));
    findings.push(files::check_local_dir(config.backend.local_dir(), user));
    findings.push(agents.check_single_agent(&config, backend.is_some()));
    findings.push(agents.check_capabilities(machine, backend.is_some()));
    findings.push(kernel::check_kvm(machine));
    findings.push(kernel::check_huge_pages(machine));
    findings.extend(config.symbiosis.iter().flat_map(|symbiosis| tenants::check_tenants(machine, symbiosis)));
    findings.extend(config.tiering.iter().flat_map(|tiering| tiering::check_tiering(machine, tiering)));
    let evictions = config.early_eviction.iter();
    findings.extend(evictions.flat_map(|eviction| early_eviction::check_early_eviction(machine, eviction)));
    let soft_memory = config.soft_memory.iter();
    findings.extend(soft_memory.flat_map(|settings| {
        soft_memory::check_soft_memory(machine, &config, settings, agents.is_running())
    }));
    findings.extend(backend.into_iter().flat_map(|backend| check_memory(machine, &config, &agents, backend)));
    findings
}

/// Checks the CXL devices, and the kernel settings that the backend requires.
fn check_memory(
    machine: &Machine,
    config: &Config,
    agents: &RunningAgents,
    backend: CxlBackend,
) -> Vec<Finding> {
    let mut findings = vec![kernel::check_release(machine)];
    findings.extend(kernel::check_modules(machine, backend));
    findings.push(kernel::check_auto_online(machine));
    findings.push(encryption::check_memory(machine));
    let (records, recorded_slices) = files::check_records(&config.runtime_dir);
    findings.push(records);
    let (devices, nodes) = devices::check_devices(machine, backend, &recorded_slices, agents.is_running());
    findings.extend(devices);
    if backend == CxlBackend::Blocks {
        findings.push(node::check_block_size(machine));
        findings.push(node::check_page_migration(machine));
        findings.extend(nodes.iter().flat_map(|(node, regions)| node::check_node(machine, *node, regions)));
    }
    findings
}

/// Returns `problems` or, if it is empty, the finding that the check passed.
fn problems_or_passed(problems: Vec<Finding>, passed: impl FnOnce() -> Finding) -> Vec<Finding> {
    if problems.is_empty() { vec![passed()] } else { problems }
}

/// Formats findings as text, one line each, followed by a line with the fix of a problem, or with advice.
pub fn format_findings(findings: &[Finding]) -> String {
    let line = |finding: &Finding| {
        let Finding { check, ok, subject, message, fix } = finding;
        let (state, label) = if *ok { ("ok", "advice") } else { ("PROBLEM", "fix") };
        let fix = fix.as_ref().map_or_else(String::new, |fix| format!("\n        {label}: {fix}"));
        format!("{state:<7} {check:<11} {subject}: {message}{fix}\n")
    };
    findings.iter().map(line).collect()
}

/// Returns the advice to run as root if permission was denied, else `otherwise`.
fn fix_for(errno: &io::Error, otherwise: &str) -> String {
    match errno.kind() {
        io::ErrorKind::PermissionDenied => RUN_AS_ROOT.to_owned(),
        _ => otherwise.to_owned(),
    }
}

#[cfg(test)]
mod tests;
