//! Checks that exactly one agent runs on this machine, and that it has the required permissions.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
};

use rustix::fs::{major, minor};

use units::UserId;

use super::{Finding, Machine, RUN_AS_ROOT};
use crate::{config::Config, host::sysfs::Sysfs, user::current_user};

/// Numbers (linux/capability.h) and names of the capabilities that an agent with CXL memory
/// requires, as in host-agent.service.
const REQUIRED_CAPABILITIES: [(u32, &str); 7] = [
    (0, "CAP_CHOWN"),
    (1, "CAP_DAC_OVERRIDE"),
    (3, "CAP_FOWNER"),
    (5, "CAP_KILL"),
    (19, "CAP_SYS_PTRACE"),
    (21, "CAP_SYS_ADMIN"),
    (23, "CAP_SYS_NICE"),
];

/// Process identifiers of the agents that run on this machine.
pub(super) struct RunningAgents {
    /// PID of the agent that locked the `runtime_dir` of host.toml, if any.
    ours: Option<u32>,
    /// PIDs of all other agents.
    others: Vec<u32>,
}

impl RunningAgents {
    /// Finds the agents in /proc.
    pub(super) fn find(machine: &Machine, runtime_dir: &Path) -> Self {
        let ours = lock_holder(&machine.proc, &runtime_dir.join("lock"));
        let mut others = agent_processes(&machine.proc);
        others.retain(|pid| Some(*pid) != ours);
        Self { ours, others }
    }

    pub(super) fn is_running(&self) -> bool {
        self.ours.is_some()
    }

    /// Returns the effective user of the agent, or of this process if no agent runs.
    pub(super) fn user(&self, machine: &Machine) -> UserId {
        let running = self.ours.and_then(|pid| effective_user(&machine.proc, pid));
        running.unwrap_or_else(current_user)
    }

    /// Checks that one agent runs and listens on the agent socket. Several agents conflict only if
    /// they use CXL memory.
    pub(super) fn check_single_agent(&self, config: &Config, uses_cxl: bool) -> Finding {
        if uses_cxl && !self.others.is_empty() {
            let message =
                format!("processes {:?} are also host-agents, and use the same CXL memory", self.others);
            return Finding::problem(
                "agent",
                message,
                "run one agent per host: stop the other agents (`kill PID`)",
            );
        }
        let Some(pid) = self.ours else {
            let message = format!("no agent has locked {}", config.runtime_dir.display());
            return Finding::problem(
                "agent",
                message,
                "`systemctl start host-agent`; if it fails, read the log: `journalctl -u host-agent`",
            );
        };
        if fs::metadata(&config.socket).is_ok_and(|socket| socket.file_type().is_socket()) {
            return Finding::passed(
                "agent",
                format!("process {pid} is the only agent and listens on the agent socket"),
            );
        }
        let message =
            format!("process {pid} does not listen on {}: VMs cannot get memory", config.socket.display());
        Finding::problem("agent", message, "`systemctl restart host-agent`: guests keep running")
    }

    /// Checks the capabilities of the agent and its write access to /sys. If no agent runs, the
    /// process that runs the doctor is checked instead.
    pub(super) fn check_capabilities(&self, machine: &Machine, uses_cxl: bool) -> Finding {
        if !uses_cxl {
            return Finding::passed("permissions", "emulated devices require no capabilities");
        }
        let (process, folder) = match self.ours {
            Some(pid) => (format!("the agent (process {pid})"), pid.to_string()),
            None => ("this process (no agent runs)".to_owned(), "self".to_owned()),
        };
        let (message, fix) = match missing_capabilities(&machine.proc, &folder) {
            Err(error) => (format!("cannot read the capabilities of {process}: {error}"), RUN_AS_ROOT),
            Ok(missing_capabilities) if !missing_capabilities.is_empty() && self.ours.is_none() => {
                (format!("{process} lacks {}", missing_capabilities.join(" ")), RUN_AS_ROOT)
            }
            Ok(missing_capabilities) if !missing_capabilities.is_empty() => (
                format!("{process} lacks {}", missing_capabilities.join(" ")),
                "run the agent as root, with these capabilities in CapabilityBoundingSet= (`systemctl edit host-agent`)",
            ),
            Ok(_) if is_sys_read_only(&machine.proc, &folder) => (
                format!("{process} cannot write to /sys"),
                "remove ProtectKernelTunables= from its unit (`systemctl edit host-agent`); a container must be privileged",
            ),
            Ok(_) => {
                return Finding::passed("permissions", format!("{process} has all required capabilities"));
            }
        };
        Finding::problem("permissions", message, fix)
    }
}

/// Returns the process that holds the `flock` of a file, from /proc/locks with lines such as
/// `1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE 0 EOF`.
fn lock_holder(proc: &Sysfs, lock: &Path) -> Option<u32> {
    let file = fs::metadata(lock).ok()?;
    let id = format!("{:02x}:{:02x}:{}", major(file.dev()), minor(file.dev()), file.ino());
    let locks = proc.text("locks").ok()?;
    let mut holders = locks.lines().filter_map(|line| match *line.split_whitespace().collect::<Vec<_>>() {
        [_, "FLOCK", _, "WRITE", pid, locked, ..] if locked == id => pid.parse().ok(),
        _ => None,
    });
    holders.next()
}

/// Returns the identifiers of all processes that run `host-agent serve`. Processes that end during
/// the search are skipped.
fn agent_processes(proc: &Sysfs) -> Vec<u32> {
    let all = proc.numbered_names("", "").unwrap_or_default();
    let is_agent = |pid: &String| {
        let args = proc.text(format!("{pid}/cmdline")).unwrap_or_default();
        let args: Vec<&str> = args.split('\0').collect();
        args[0].ends_with("host-agent") && args.contains(&"serve") && !args.contains(&"--check-config")
    };
    all.iter().filter(|pid| is_agent(pid)).filter_map(|pid| pid.parse().ok()).collect()
}

/// Returns the effective user of a process: the second number of the line `Uid:` in its status.
fn effective_user(proc: &Sysfs, pid: u32) -> Option<UserId> {
    let status = proc.text(format!("{pid}/status")).ok()?;
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    UserId::new(uids.split_whitespace().nth(1)?.parse().ok()?).ok()
}

fn missing_capabilities(proc: &Sysfs, folder: &str) -> Result<Vec<&'static str>, String> {
    let status = proc.text(format!("{folder}/status")).map_err(|error| units::chain(&error))?;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective
        .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
        .ok_or("no CapEff in status")?;
    let missing = REQUIRED_CAPABILITIES.iter().filter(|(bit, _)| effective >> bit & 1 == 0);
    Ok(missing.map(|(_, name)| *name).collect())
}

/// Returns whether /sys is mounted read-only for a process. If several file systems are mounted on
/// /sys, the last one counts.
fn is_sys_read_only(proc: &Sysfs, folder: &str) -> bool {
    let mounts = proc.text(format!("{folder}/mounts")).unwrap_or_default();
    let mut mounts = mounts.lines().rev().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let options = mounts.find(|words| words.get(1) == Some(&"/sys")).and_then(|words| words.get(3).copied());
    options.is_some_and(|options| options.split(',').any(|option| option == "ro"))
}
