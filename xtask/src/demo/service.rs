//! Processes of the rack: a manager, and an agent for each host, with their logs. When dropped, all
//! are killed by their pid and waited for.

use std::{
    collections::BTreeMap,
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use super::{processes, rack::Rack, scratch::Scratch, write};
use crate::{failure::Failure, step::step, wait::wait_until};

/// Time limit for a process to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Rounds of killing the processes of a host; each kills those started during the previous one.
const KILL_ROUNDS_MAX: usize = 100;
/// Lines of a log that are printed.
const LOG_LINES_SHOWN: usize = 15;

/// Programs of the rack.
#[derive(Debug)]
pub struct Programs {
    /// `pool-manager`.
    pub manager: PathBuf,
    /// `host-agent`.
    pub agent: PathBuf,
    /// `tarn`.
    pub tarn: PathBuf,
    /// `vmm-plugin`.
    pub vmm: PathBuf,
    /// `xtask`, as built with the others: the running file may have been replaced.
    pub xtask: PathBuf,
}

/// Returns a command for a program, without colours in its log and without the user's environment
/// variables for another rack.
pub fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    let names = env::vars_os().map(|(name, _)| name);
    command.env("NO_COLOR", "1");
    names.filter(|name| name.to_string_lossy().starts_with(ENV_PREFIX)).for_each(|name| {
        command.env_remove(name);
    });
    command
}

/// Prefix of environment variables of Tarn.
const ENV_PREFIX: &str = "TARN_";

/// Running process. It is killed when dropped.
#[derive(Debug)]
pub struct Service {
    process: Child,
    log: PathBuf,
    exit_status: Option<ExitStatus>,
}

impl Service {
    /// Starts a process in its own process group, so that Ctrl-C reaches only the demo, which then
    /// stops it in order.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(command: &mut Command, log: PathBuf) -> Result<Self, Failure> {
        use std::os::unix::process::CommandExt;
        let stdout =
            File::options().create(true).append(true).open(&log).map_err(Failure::file("open", &log))?;
        let stderr = stdout.try_clone().map_err(Failure::file("share", &log))?;
        let program = command.get_program().display().to_string();
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).process_group(0);
        let process = command.spawn().map_err(Failure::start(program))?;
        Ok(Self { process, log, exit_status: None })
    }

    /// Returns the exit status, or `None` while the process runs.
    ///
    /// # Errors
    /// The process cannot be waited for.
    pub fn exit_status(&mut self) -> Result<Option<ExitStatus>, Failure> {
        if self.exit_status.is_none() {
            self.exit_status = self.process.try_wait().map_err(Failure::start("waiting for a process"))?;
        }
        Ok(self.exit_status)
    }

    /// Sends SIGTERM.
    pub fn terminate(&mut self) {
        if self.exit_status.is_none()
            && let Some(pid) = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw)
        {
            // The process was not waited for, so the pid is not reused, even if it ended meanwhile.
            let _ = kill_process(pid, Signal::TERM);
        }
    }

    /// Returns the last lines of the log.
    pub fn log_tail(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_else(|error| format!("({error})"));
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Both fail only if the process has ended and was waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Processes of the rack.
#[derive(Debug)]
pub struct Services<'a> {
    programs: &'a Programs,
    rack: &'a Rack,
    scratch: &'a Scratch,
    /// Processes by name: `pool-manager`, or the host's name.
    running: BTreeMap<String, Service>,
}

/// Name of the manager process. No host of the demo has this name.
const MANAGER: &str = "pool-manager";

impl<'a> Services<'a> {
    /// Returns an empty set of processes.
    pub fn new(programs: &'a Programs, rack: &'a Rack, scratch: &'a Scratch) -> Self {
        Self { programs, rack, scratch, running: BTreeMap::new() }
    }

    /// Creates the store of the rack.
    ///
    /// # Errors
    /// `pool-manager init` fails.
    pub fn init_rack(&self) -> Result<(), Failure> {
        let mut init = command(&self.programs.manager);
        step("pool-manager init", init.args(["init", "--config"]).arg(&self.rack.file))
    }

    /// Starts the manager.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_manager(&mut self) -> Result<(), Failure> {
        self.start(MANAGER, &self.programs.manager, &self.rack.file)
    }

    /// Kills the manager.
    pub fn kill_manager(&mut self) {
        self.running.remove(MANAGER);
    }

    /// Starts a host's agent.
    ///
    /// # Errors
    /// It does not start, or its settings cannot be written.
    pub fn start_agent(&mut self, host: &str) -> Result<(), Failure> {
        let runtime = self.scratch.runtime_dir(host);
        fs::create_dir_all(&runtime).map_err(Failure::file("create", &runtime))?;
        let token = self.scratch.file("store").join("tokens").join(format!("{host}.token"));
        let (file, uri) = (self.scratch.file(&format!("{host}.toml")), self.rack.uri());
        let text = format!(
            "[agent]\nhost = {host:?}\nmanager = {uri:?}\nruntime_dir = {runtime:?}\ntoken_file = {token:?}\n\
             [backend]\nkind = \"emulated\"\n"
        );
        write(&file, &text)?;
        self.start(host, &self.programs.agent, &file)
    }

    /// Kills a host's agent and its VMs, and returns the number of VMs.
    ///
    /// # Errors
    /// New processes keep starting.
    pub fn cut_power(&mut self, host: &str) -> Result<usize, Failure> {
        self.running.remove(host);
        let mut exit_status = 0;
        for _ in 0..KILL_ROUNDS_MAX {
            let vms = processes::with_argument_in(&self.scratch.runtime_dir(host));
            if vms.is_empty() {
                return Ok(exit_status);
            }
            vms.iter().for_each(processes::Process::kill);
            exit_status += vms.len();
            vms.iter().for_each(processes::Process::wait);
        }
        Err(Failure::Result(format!("processes of {host} do not end")))
    }

    /// Checks that all processes are running.
    ///
    /// # Errors
    /// [`Failure::Step`] with a process that ended.
    pub fn check_running(&mut self) -> Result<(), Failure> {
        for (name, service) in &mut self.running {
            if let Some(status) = service.exit_status()? {
                return Err(Failure::Step { step: name.clone(), status });
            }
        }
        Ok(())
    }

    /// Prints the last log lines of processes that ended unexpectedly.
    pub fn print_log_tails(&mut self) {
        for (name, service) in &mut self.running {
            if !matches!(service.exit_status(), Ok(None)) {
                eprintln!("\nlast log lines of {name}:\n{}", service.log_tail());
            }
        }
    }

    /// Stops all processes: agents first, so that the manager sees them disconnect.
    ///
    /// # Errors
    /// A process does not end in time, or fails. All are killed in any case.
    pub fn stop(mut self) -> Result<(), Failure> {
        let manager = self.running.remove(MANAGER);
        let agents = std::mem::take(&mut self.running);
        stop_all(agents.into_values().collect())?;
        stop_all(manager.into_iter().collect())
    }

    fn start(&mut self, name: &str, program: &Path, config: &Path) -> Result<(), Failure> {
        let mut command = command(program);
        command.args(["serve", "--config"]).arg(config);
        let service = Service::start(&mut command, self.scratch.file(&format!("{name}.log")))?;
        self.running.insert(name.to_owned(), service);
        Ok(())
    }
}

fn stop_all(mut services: Vec<Service>) -> Result<(), Failure> {
    services.iter_mut().for_each(Service::terminate);
    wait_until("the processes of the rack to end", STOP_TIMEOUT, || {
        services.iter_mut().try_fold(true, |all, service| Ok(all && service.exit_status()?.is_some()))
    })?;
    let failure = services.iter().find_map(|service| {
        let status = service.exit_status.filter(|status| !status.success())?;
        let (log, tail) = (service.log.display(), service.log_tail());
        Some(Failure::Result(format!("a process failed: {status}; last lines of {log}:\n{tail}")))
    });
    failure.map_or(Ok(()), Err)
}
