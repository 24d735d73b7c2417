//! `host-agent doctor`: looks at this machine as an experienced operator would, says what is missing, wrong or dangerous and which
//! command mends it. It mends nothing itself, and looking changes nothing. What the rack thinks of the machine is `tarn doctor`'s.

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
use super::sysfs::Sysfs;
use crate::config::{Backend, Config};

/// What helps whoever may not look.
const AS_ROOT: &str = "look as root: `sudo host-agent doctor`";

/// One thing that was looked at, in the shape of `tarn doctor`'s.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked for.
    pub check: &'static str,
    /// Whether it is as it should be.
    pub ok: bool,
    /// What it is about.
    pub subject: String,
    /// What was found.
    pub what: String,
    /// What mends it, or should be seen to some day.
    pub mend: Option<String>,
}

impl Finding {
    fn good(check: &'static str, what: impl Into<String>) -> Self {
        Self { check, ok: true, subject: "this host".to_owned(), what: what.into(), mend: None }
    }

    fn bad(check: &'static str, what: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { ok: false, mend: Some(mend.into()), ..Self::good(check, what) }
    }

    fn of(self, subject: impl Into<String>) -> Self {
        Self { subject: subject.into(), ..self }
    }
}

/// Where a machine shows what it is.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Its /sys.
    pub sys: Sysfs,
    /// Its /proc.
    pub proc: Sysfs,
    /// Its /dev.
    pub dev: PathBuf,
    /// The folder of each kernel's modules.
    pub modules: Sysfs,
}

impl Machine {
    /// The one that this runs on.
    pub fn this() -> Self {
        Self {
            sys: Sysfs::at("/sys"),
            proc: Sysfs::at("/proc"),
            dev: "/dev".into(),
            modules: Sysfs::at("/lib/modules"),
        }
    }
}

/// What is made of a machine's CXL memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// Ranges of device-dax.
    Dax,
    /// Memory of a node.
    Blocks,
}

/// Looks at a machine that is to be what this host.toml says.
pub fn examine(machine: &Machine, path: &Path) -> Vec<Finding> {
    let config = match Config::load(path) {
        Ok(config) => config,
        Err(error) => return vec![files::not_a_config(path, &error), kernel::kvm(machine)],
    };
    let (used, local_dir) = match &config.backend {
        Backend::Emulated { local_dir } => (None, local_dir),
        Backend::Dax { local_dir, .. } => (Some(Use::Dax), local_dir),
        Backend::MemoryBlock { local_dir, .. } => (Some(Use::Blocks), local_dir),
    };
    let mut found = vec![files::config(path)];
    found.extend(files::secrets(&config));
    found.push(files::local_dir(local_dir.as_deref()));
    let agents = Agents::find(machine, &config.runtime_dir);
    found.push(agents.alone(&config, used.is_some()));
    found.push(agents.rights(machine, used.is_some()));
    found.push(kernel::kvm(machine));
    found.push(kernel::huge_pages(machine));
    found.extend(config.symbiosis.iter().flat_map(|symbiosis| tenants::all(machine, symbiosis)));
    found.extend(used.into_iter().flat_map(|used| memory(machine, &config, &agents, used)));
    found
}

/// CXL memory, and all that it wants of the machine.
fn memory(machine: &Machine, config: &Config, agents: &Agents, used: Use) -> Vec<Finding> {
    let mut found = vec![kernel::release(machine)];
    found.extend(kernel::modules(machine, used));
    found.push(kernel::onlining(machine));
    found.push(encryption::of_memory(machine));
    let (records, places) = files::records(&config.runtime_dir);
    found.push(records);
    let (devices, nodes) = devices::all(machine, used, &places, agents.is_running());
    found.extend(devices);
    if used == Use::Blocks {
        found.push(node::block_size(machine));
        found.push(node::movers(machine));
        found.extend(nodes.iter().flat_map(|(node, regions)| node::all(machine, *node, regions)));
    }
    found
}

/// What is wrong, or that nothing is.
fn each(wrong: Vec<Finding>, good: impl FnOnce() -> Finding) -> Vec<Finding> {
    if wrong.is_empty() { vec![good()] } else { wrong }
}

/// For people.
pub fn text(findings: &[Finding]) -> String {
    let line = |finding: &Finding| {
        let Finding { check, ok, subject, what, mend } = finding;
        let state = if *ok { "ok" } else { "WRONG" };
        let mend = mend.as_ref().map_or_else(String::new, |mend| format!("\n       mend: {mend}"));
        format!("{state:<6} {check:<10} {subject}: {what}{mend}\n")
    };
    findings.iter().map(line).collect()
}

/// What mends what could not be looked at.
fn not_seen(errno: &io::Error, otherwise: &str) -> String {
    match errno.kind() {
        io::ErrorKind::PermissionDenied => AS_ROOT.to_owned(),
        _ => otherwise.to_owned(),
    }
}

#[cfg(test)]
mod tests;
