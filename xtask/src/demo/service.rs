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
use crate::{failure::Failure, step::step, wait::until};

/// How long a process may take to end once asked to.
const END_WITHIN: Duration = Duration::from_secs(10);
/// Searches for processes of a powered-off host; each ends the processes started during the
/// previous one.
const DARK_LOOKS_MAX: usize = 100;
/// How many lines of a log are worth reading.
const LOG_LINES_SHOWN: usize = 15;

/// The programs the rack is made of.
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
    /// This program, as it was built with the others: the file it was started from may have been replaced.
    pub own: PathBuf,
}

/// One of them, about to start. It does not hear of the person's own rack, and its log has no colours.
pub fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    let settings = env::vars_os().map(|(name, _)| name);
    command.env("NO_COLOR", "1");
    settings.filter(|name| name.to_string_lossy().starts_with(SETTING)).for_each(|name| {
        command.env_remove(name);
    });
    command
}

/// How settings of Tarn's programs begin.
const SETTING: &str = "TARN_";

/// One running process. Dropped, it is killed.
#[derive(Debug)]
pub struct Service {
    process: Child,
    log: PathBuf,
    ended: Option<ExitStatus>,
}

impl Service {
    /// Starts it in a process group of its own, so that Ctrl-C reaches only the demo, which ends it in order.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(command: &mut Command, log: PathBuf) -> Result<Self, Failure> {
        use std::os::unix::process::CommandExt;
        let out =
            File::options().create(true).append(true).open(&log).map_err(Failure::file("open", &log))?;
        let err = out.try_clone().map_err(Failure::file("share", &log))?;
        let program = command.get_program().display().to_string();
        command.stdin(Stdio::null()).stdout(out).stderr(err).process_group(0);
        let process = command.spawn().map_err(Failure::start(program))?;
        Ok(Self { process, log, ended: None })
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>, Failure> {
        if self.ended.is_none() {
            self.ended = self.process.try_wait().map_err(Failure::start("waiting for a process"))?;
        }
        Ok(self.ended)
    }

    /// Asks it to end.
    pub fn ask_to_end(&mut self) {
        if self.ended.is_none()
            && let Some(pid) = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw)
        {
            // It was not waited for, so the pid is its own, even if it ended meanwhile.
            let _ = kill_process(pid, Signal::TERM);
        }
    }

    /// The end of its log.
    pub fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_else(|error| format!("({error})"));
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Both fail only if it has ended and was waited for: then there is nothing left to do.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// All of the rack's processes.
#[derive(Debug)]
pub struct Services<'a> {
    programs: &'a Programs,
    rack: &'a Rack,
    scratch: &'a Scratch,
    /// Processes by name: `pool-manager`, or the host's name.
    running: BTreeMap<String, Service>,
}

/// Name of the manager; no host has it, because host names are file names.
const MANAGER: &str = "pool-manager";

impl<'a> Services<'a> {
    /// None yet.
    pub fn new(programs: &'a Programs, rack: &'a Rack, scratch: &'a Scratch) -> Self {
        Self { programs, rack, scratch, running: BTreeMap::new() }
    }

    /// Makes the rack's store.
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

    /// Ends the manager as a crash would.
    pub fn kill_manager(&mut self) {
        self.running.remove(MANAGER);
    }

    /// Starts a host's agent.
    ///
    /// # Errors
    /// It does not start, or its settings cannot be written.
    pub fn start_agent(&mut self, host: &str) -> Result<(), Failure> {
        let runtime = self.scratch.runtime_of(host);
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
    /// New ones keep coming.
    pub fn cut_power(&mut self, host: &str) -> Result<usize, Failure> {
        self.running.remove(host);
        let mut ended = 0;
        for _ in 0..DARK_LOOKS_MAX {
            let vms = processes::naming(&self.scratch.runtime_of(host));
            if vms.is_empty() {
                return Ok(ended);
            }
            vms.iter().for_each(processes::Process::kill);
            ended += vms.len();
            vms.iter().for_each(processes::Process::wait);
        }
        Err(Failure::Result(format!("processes of {host} do not end")))
    }

    /// Returns the process that ended unexpectedly.
    ///
    /// # Errors
    /// One has.
    pub fn still_run(&mut self) -> Result<(), Failure> {
        for (name, service) in &mut self.running {
            if let Some(status) = service.ended()? {
                return Err(Failure::Step { step: name.clone(), status });
            }
        }
        Ok(())
    }

    /// Returns the last output of processes that ended unexpectedly; empty if all are running.
    pub fn print_last_words(&mut self) {
        for (name, service) in &mut self.running {
            if !matches!(service.ended(), Ok(None)) {
                eprintln!("\n{name} said last:\n{}", service.last_words());
            }
        }
    }

    /// Asks all to end and waits until they have: agents first, so that the manager hears them go.
    ///
    /// # Errors
    /// One does not end in time, or not well. All are gone in any case.
    pub fn stop(mut self) -> Result<(), Failure> {
        let manager = self.running.remove(MANAGER);
        let agents = std::mem::take(&mut self.running);
        end_all(agents.into_values().collect())?;
        end_all(manager.into_iter().collect())
    }

    fn start(&mut self, name: &str, program: &Path, settings: &Path) -> Result<(), Failure> {
        let mut command = command(program);
        command.args(["serve", "--config"]).arg(settings);
        let service = Service::start(&mut command, self.scratch.file(&format!("{name}.log")))?;
        self.running.insert(name.to_owned(), service);
        Ok(())
    }
}

fn end_all(mut services: Vec<Service>) -> Result<(), Failure> {
    services.iter_mut().for_each(Service::ask_to_end);
    until("the end of the rack's processes", END_WITHIN, || {
        services.iter_mut().try_fold(true, |all, service| Ok(all && service.ended()?.is_some()))
    })?;
    let bad = services.iter().find_map(|service| {
        let status = service.ended.filter(|status| !status.success())?;
        let (log, words) = (service.log.display(), service.last_words());
        Some(Failure::Result(format!("a process did not end well: {status}; its log {log} ends:\n{words}")))
    });
    bad.map_or(Ok(()), Err)
}
