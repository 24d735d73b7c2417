//! Processes of the rack: a manager and one agent per host, with their logs. Dropping [`Services`]
//! kills all processes and waits for their end.

use std::{
    collections::BTreeMap,
    env,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use local_rack::{AgentConfig, Process};
use rustix::process::Signal;

use super::{processes, rack::Rack, scratch::ScratchFolders, write_file};
use crate::{failure::Failure, step::run_step, wait::wait_until};

/// Time limit for a process to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of rounds to kill the processes of a host. A round kills the processes that were
/// started during the previous round.
const KILL_ROUNDS_MAX: usize = 100;

/// Paths of the programs of the rack.
#[derive(Debug)]
pub struct Programs {
    /// Path of `pool-manager`.
    pub manager: PathBuf,
    /// Path of `host-agent`.
    pub agent: PathBuf,
    /// Path of `tarn`.
    pub tarn: PathBuf,
    /// Path of `vmm-plugin`.
    pub vmm: PathBuf,
    /// Path of `xtask`, built together with the other programs. The file of the running `xtask` may
    /// have been replaced.
    pub xtask: PathBuf,
}

/// Returns a command for a program, without colours in its log. Removes environment variables of
/// the user that refer to another rack.
pub fn new_command(program: &Path) -> Command {
    let mut command = Command::new(program);
    let names = env::vars_os().map(|(name, _)| name);
    command.env("NO_COLOR", "1");
    names.filter(|name| name.to_string_lossy().starts_with(ENV_PREFIX)).for_each(|name| {
        command.env_remove(name);
    });
    command
}

/// Prefix of environment variables that Tarn programs read.
const ENV_PREFIX: &str = "TARN_";

/// Starts a process in its own process group. Ctrl-C then reaches only the demo, which stops the
/// processes in order.
///
/// # Errors
/// Returns an error if the process does not start.
pub fn start(name: &str, command: &mut Command, log: PathBuf) -> Result<Process, Failure> {
    Ok(Process::start(name, command.process_group(0), log)?)
}

/// Running processes of the rack.
#[derive(Debug)]
pub struct Services<'a> {
    programs: &'a Programs,
    rack: &'a Rack,
    scratch: &'a ScratchFolders,
    /// Processes by name: `pool-manager` for the manager, the name of the host for an agent.
    running: BTreeMap<String, Process>,
}

/// Name of the manager process. No host of the demo has this name.
const MANAGER: &str = "pool-manager";

impl<'a> Services<'a> {
    /// Returns an empty set of processes.
    pub fn new(programs: &'a Programs, rack: &'a Rack, scratch: &'a ScratchFolders) -> Self {
        Self { programs, rack, scratch, running: BTreeMap::new() }
    }

    /// Creates the store of the rack.
    ///
    /// # Errors
    /// Returns an error if `pool-manager init` fails.
    pub fn init_rack(&self) -> Result<(), Failure> {
        let mut init = new_command(&self.programs.manager);
        run_step("pool-manager init", init.args(["init", "--config"]).arg(&self.rack.file))
    }

    /// Starts the manager.
    ///
    /// # Errors
    /// Returns an error if the manager does not start.
    pub fn start_manager(&mut self) -> Result<(), Failure> {
        self.start(MANAGER, &self.programs.manager, &self.rack.file)
    }

    /// Kills the manager process.
    pub fn kill_manager(&mut self) {
        self.running.remove(MANAGER);
    }

    /// Writes the configuration of a host's agent, and starts the agent.
    ///
    /// # Errors
    /// Returns an error if the agent does not start or its configuration cannot be written.
    pub fn start_agent(&mut self, host: &str) -> Result<(), Failure> {
        let runtime = self.scratch.runtime_dir(host);
        let token = self.scratch.file("store").join("tokens").join(format!("{host}.token"));
        let (file, uri) = (self.scratch.file(&format!("{host}.toml")), self.rack.uri());
        let config = AgentConfig {
            host: host.to_owned(),
            manager: uri,
            runtime_dir: runtime,
            token_file: token,
            extra: String::new(),
        };
        write_file(&file, &config.to_string())?;
        self.start(host, &self.programs.agent, &file)
    }

    /// Kills the agent and all VMs of a host. Returns the number of killed VMs.
    ///
    /// # Errors
    /// Returns an error if new processes are still found after [`KILL_ROUNDS_MAX`] rounds.
    pub fn cut_power(&mut self, host: &str) -> Result<usize, Failure> {
        self.running.remove(host);
        let mut killed = 0;
        for _ in 0..KILL_ROUNDS_MAX {
            let vms = processes::find_by_argument_in(&self.scratch.runtime_dir(host));
            if vms.is_empty() {
                return Ok(killed);
            }
            vms.iter().for_each(processes::Process::kill);
            killed += vms.len();
            vms.iter().for_each(processes::Process::wait);
        }
        Err(Failure::BadResult(format!(
            "host {host} still has processes after {KILL_ROUNDS_MAX} rounds of SIGKILL"
        )))
    }

    /// Checks that all processes are running.
    ///
    /// # Errors
    /// Returns [`Failure::Step`] with the name of a process that has ended.
    pub fn check_running(&mut self) -> Result<(), Failure> {
        for (name, service) in &mut self.running {
            if let Some(status) = service.exit_status()? {
                return Err(Failure::Step { step: name.clone(), status });
            }
        }
        Ok(())
    }

    /// Prints the last log lines of processes that have ended.
    pub fn print_log_tails(&mut self) {
        for (name, service) in &mut self.running {
            if !matches!(service.exit_status(), Ok(None)) {
                eprintln!("\nlast log lines of {name}:\n{}", service.log_tail());
            }
        }
    }

    /// Stops all processes. Agents are stopped first, so that the manager observes their
    /// disconnect.
    ///
    /// # Errors
    /// Returns an error if a process does not end in time or exits with a failure. All processes
    /// are killed in either case.
    pub fn stop(mut self) -> Result<(), Failure> {
        let manager = self.running.remove(MANAGER);
        let agents = std::mem::take(&mut self.running);
        stop_all(agents.into_values().collect())?;
        stop_all(manager.into_iter().collect())
    }

    fn start(&mut self, name: &str, program: &Path, config: &Path) -> Result<(), Failure> {
        let mut command = new_command(program);
        command.args(["serve", "--config"]).arg(config);
        let process = start(name, &mut command, self.scratch.file(&format!("{name}.log")))?;
        self.running.insert(name.to_owned(), process);
        Ok(())
    }
}

fn stop_all(mut processes: Vec<Process>) -> Result<(), Failure> {
    processes.iter().for_each(|process| process.signal(Signal::TERM));
    wait_until("the processes of the rack to end", STOP_TIMEOUT, || {
        processes.iter_mut().try_fold(true, |all, process| Ok(all && process.exit_status()?.is_some()))
    })?;
    for process in &mut processes {
        if let Some(status) = process.exit_status()?.filter(|status| !status.success()) {
            let (log, tail) = (process.log().display(), process.log_tail());
            return Err(Failure::BadResult(format!(
                "a process failed: {status}; last lines of {log}:\n{tail}"
            )));
        }
    }
    Ok(())
}
