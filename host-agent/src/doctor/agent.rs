//! Agents of a machine: exactly one runs, with the required capabilities.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
};

use rustix::fs::{major, minor};

use super::{Finding, Machine, RUN_AS_ROOT};
use crate::{config::Config, host::sysfs::Sysfs};

/// Capabilities required by an agent of CXL memory, from linux/capability.h, as in its unit.
const REQUIRED_CAPABILITIES: [(u32, &str); 7] = [
    (0, "CAP_CHOWN"),
    (1, "CAP_DAC_OVERRIDE"),
    (3, "CAP_FOWNER"),
    (5, "CAP_KILL"),
    (19, "CAP_SYS_PTRACE"),
    (21, "CAP_SYS_ADMIN"),
    (23, "CAP_SYS_NICE"),
];

/// Agents of this machine.
pub(super) struct Agents {
    /// Process that locked the directory in host.toml.
    ours: Option<u32>,
    /// All others.
    others: Vec<u32>,
}

impl Agents {
    /// Reads the agents from the kernel.
    pub(super) fn find(machine: &Machine, runtime_dir: &Path) -> Self {
        let ours = lock_holder(&machine.proc, &runtime_dir.join("lock"));
        let mut others = agent_processes(&machine.proc);
        others.retain(|pid| Some(*pid) != ours);
        Self { ours, others }
    }

    pub(super) fn is_running(&self) -> bool {
        self.ours.is_some()
    }

    /// Agents of emulated devices do not conflict.
    pub(super) fn single_agent(&self, config: &Config, uses_cxl: bool) -> Finding {
        if uses_cxl && !self.others.is_empty() {
            let message =
                format!("processes {:?} are host-agents too, and would use the same memory", self.others);
            return Finding::problem(
                "agent",
                message,
                "a host needs exactly one agent: stop the others (`kill PID`)",
            );
        }
        let Some(pid) = self.ours else {
            let message = format!("no agent has locked {}", config.runtime_dir.display());
            return Finding::problem(
                "agent",
                message,
                "`systemctl start host-agent`; if it fails again: `journalctl -u host-agent`",
            );
        };
        if fs::metadata(&config.socket).is_ok_and(|socket| socket.file_type().is_socket()) {
            return Finding::passed("agent", format!("process {pid} is the only agent, and listens"));
        }
        let message =
            format!("process {pid} has no socket {}: VMs receive no memory", config.socket.display());
        Finding::problem("agent", message, "`systemctl restart host-agent`: guests keep running")
    }

    /// Checks the capabilities of the agent or, without one, of the caller.
    pub(super) fn capabilities(&self, machine: &Machine, uses_cxl: bool) -> Finding {
        if !uses_cxl {
            return Finding::passed("rights", "emulated devices require no capabilities");
        }
        let (whose, folder) = match self.ours {
            Some(pid) => (format!("the agent, process {pid},"), pid.to_string()),
            None => ("the caller, as no agent runs,".to_owned(), "self".to_owned()),
        };
        let (message, fix) = match missing_capabilities(&machine.proc, &folder) {
            Err(error) => (format!("capabilities of {whose} unknown: {error}"), RUN_AS_ROOT),
            Ok(missing_capabilities) if !missing_capabilities.is_empty() && self.ours.is_none() => {
                (format!("{whose} lacks {}", missing_capabilities.join(" ")), RUN_AS_ROOT)
            }
            Ok(missing_capabilities) if !missing_capabilities.is_empty() => (
                format!("{whose} lacks {}", missing_capabilities.join(" ")),
                "run it as host-agent.service does: as root, with these in CapabilityBoundingSet= (`systemctl edit host-agent`)",
            ),
            Ok(_) if is_read_only(&machine.proc, &folder) => (
                format!("{whose} cannot write to /sys"),
                "no ProtectKernelTunables= in its unit (`systemctl edit host-agent`); a container must be privileged",
            ),
            Ok(_) => return Finding::passed("rights", format!("{whose} has all required capabilities")),
        };
        Finding::problem("rights", message, fix)
    }
}

/// Returns the process that locked a file: `1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE 0 EOF`.
fn lock_holder(proc: &Sysfs, lock: &Path) -> Option<u32> {
    let file = fs::metadata(lock).ok()?;
    let id = format!("{:02x}:{:02x}:{}", major(file.dev()), minor(file.dev()), file.ino());
    let locks = proc.text("locks").ok()?;
    let mut holders = locks.lines().filter_map(|line| match *line.split_whitespace().collect::<Vec<_>>() {
        [_, "FLOCK", _, "WRITE", pid, of, ..] if of == id => pid.parse().ok(),
        _ => None,
    });
    holders.next()
}

/// Returns every process `host-agent serve`. A process that ends meanwhile is skipped.
fn agent_processes(proc: &Sysfs) -> Vec<u32> {
    let all = proc.numbered("", "").unwrap_or_default();
    let is_one = |pid: &String| {
        let words = proc.text(format!("{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&str> = words.split('\0').collect();
        words[0].ends_with("host-agent") && words.contains(&"serve") && !words.contains(&"--check-config")
    };
    all.iter().filter(|pid| is_one(pid)).filter_map(|pid| pid.parse().ok()).collect()
}

fn missing_capabilities(proc: &Sysfs, folder: &str) -> Result<Vec<&'static str>, String> {
    let status = proc.text(format!("{folder}/status")).map_err(|error| units::chain(&error))?;
    let has = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let has =
        has.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).ok_or("no CapEff in status")?;
    Ok(REQUIRED_CAPABILITIES.iter().filter(|(bit, _)| has >> bit & 1 == 0).map(|(_, name)| *name).collect())
}

/// Returns whether a process sees /sys read-only.
fn is_read_only(proc: &Sysfs, folder: &str) -> bool {
    let mounts = proc.text(format!("{folder}/mounts")).unwrap_or_default();
    let mut mounts = mounts.lines().rev().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let options = mounts.find(|words| words.get(1) == Some(&"/sys")).and_then(|words| words.get(3).copied());
    options.is_some_and(|options| options.split(',').any(|option| option == "ro"))
}
