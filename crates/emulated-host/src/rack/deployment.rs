//! A complete rack: emulated hosts with agents, and a pool manager on this machine, all with mTLS
//! certificates. Callers control the rack through `tarn`.

use std::{
    fs,
    net::TcpListener,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{
    certificates,
    config_files::{self, MANAGER_NAME, OPERATOR_NAME},
    host::open_log,
    hosts::{Hosts, check_not_running},
    plan::{Plan, RackPlan},
};
use crate::{Artifacts, HostError};

/// Maximum time for all agents to connect after the hosts have booted.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval between queries of the host states.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Name of the manager's folder and of the manager's log.
const MANAGER_FOLDER: &str = "manager";
/// Shell script that starts the agent, and restarts the agent when it ends. The agent writes to a
/// pipe instead of a terminal, so its log has no colors.
const AGENT_SCRIPT: &str = "
while :; do
  host-agent serve --config /etc/tarn/$HOST.toml
  echo \"the agent ended with exit status $?\"
  sleep 0.2
done 2>&1 | cat > /dev/ttyS3 &
";

/// Running rack. Dropping the value stops all processes and removes all files except the logs.
#[derive(Debug)]
pub struct Rack {
    plan: RackPlan,
    port: u16,
    manager: Option<Child>,
    hosts: Hosts,
}

impl Rack {
    /// Starts a rack in a directory and waits until all hosts are up. The rack ends when the
    /// calling thread ends. Calls `should_continue` regularly, and cancels the start if
    /// `should_continue` returns `false`.
    ///
    /// # Errors
    /// [`HostError`] if a program is missing or fails, a host does not come up, or the start is
    /// cancelled.
    pub fn start(
        artifacts: &Artifacts,
        plan: RackPlan,
        folder: &Path,
        should_continue: impl Fn() -> bool,
    ) -> Result<Self, HostError> {
        fs::create_dir_all(folder).map_err(HostError::file_error("create", folder))?;
        let folder = folder.canonicalize().map_err(HostError::file_error("resolve", folder))?;
        check_not_running(&folder, &plan.hosts)?;
        let port = free_port()?;
        let hosts = write_config(&plan, &folder, port)?;
        let hosts = Hosts::prepare(artifacts, &hosts, &folder)?;
        let mut rack = Self { plan, port, manager: None, hosts };
        rack.hosts.power_on()?; // hosts boot while the manager starts
        rack.create_store()?;
        rack.start_manager()?;
        rack.hosts.wait_until_up(&should_continue)?;
        rack.wait_hosts_up(&should_continue)?;
        rack.enable_fencing()?;
        Ok(rack)
    }

    /// Returns the configuration of the rack.
    pub fn plan(&self) -> &RackPlan {
        &self.plan
    }

    /// Enables fencing, which is disabled while the hosts boot and their agents are not connected.
    fn enable_fencing(&self) -> Result<(), HostError> {
        let file = self.manager_path("rack.toml");
        let text = config_files::rack_toml(&self.plan, self.port, self.hosts.folder());
        fs::write(&file, text).map_err(HostError::file_error("write", &file))?;
        let id = self.manager.as_ref().and_then(|manager| i32::try_from(manager.id()).ok());
        let Some(manager) = id.and_then(Pid::from_raw) else { return Ok(()) };
        kill_process(manager, Signal::HUP)
            .map_err(|errno| HostError::file_error("signal", &file)(errno.into()))
    }

    /// Returns the hosts of the rack.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Returns the hosts of the rack, so that the caller can switch their power.
    pub fn hosts_mut(&mut self) -> &mut Hosts {
        &mut self.hosts
    }

    /// Returns the URI of the manager's gRPC endpoint.
    pub fn endpoint(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Returns the directory of the certificates. It contains `ca.pem`, and the client certificate
    /// `operator.pem` with its key `operator.key`. The client certificate has the scheduler and
    /// admin roles. The server name in the certificate of the manager is `pool-manager`.
    pub fn certificates_dir(&self) -> PathBuf {
        self.manager_path("certificates")
    }

    /// Returns a command that runs `tarn` with these arguments and the credentials of the operator.
    pub fn tarn_command(&self, arguments: &[&str]) -> Command {
        let mut tarn = Command::new(self.manager_path("tarn"));
        tarn.args(arguments).stdin(Stdio::null());
        tarn
    }

    /// Returns the path of a script that runs `tarn` with the credentials of the operator.
    pub fn tarn_script(&self) -> PathBuf {
        self.manager_path("tarn")
    }

    /// Creates the store of the rack.
    fn create_store(&self) -> Result<(), HostError> {
        let program = &self.plan.programs.manager;
        let mut init = Command::new(program);
        let init = init.args(["init", "--config"]).arg(self.manager_path("rack.toml")).output();
        let output = init.map_err(HostError::start_error(program))?;
        if output.status.success() {
            return Ok(());
        }
        let output = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(HostError::Failed { program: "pool-manager init".to_owned(), output })
    }

    /// Starts the manager, which must not be running.
    ///
    /// # Errors
    /// [`HostError::Start`] if the program cannot be started.
    pub fn start_manager(&mut self) -> Result<(), HostError> {
        let log = self.hosts.folder().join("logs").join(MANAGER_FOLDER);
        let mut manager = Command::new("setpriv");
        manager.args(["--pdeathsig", "KILL"]).arg(&self.plan.programs.manager);
        manager.args(["serve", "--config"]).arg(self.manager_path("rack.toml")).process_group(0);
        manager.stdin(Stdio::null()).stdout(Stdio::null()).stderr(open_log(&log)?);
        self.manager = Some(manager.spawn().map_err(HostError::start_error(&self.plan.programs.manager))?);
        Ok(())
    }

    /// Kills the manager and waits until its process has ended.
    pub fn kill_manager(&mut self) {
        if let Some(mut manager) = self.manager.take() {
            // `kill` and `wait` fail only if the manager has ended.
            let _ = manager.kill();
            let _ = manager.wait();
        }
    }

    /// Returns the log of the manager, or an empty string if the log cannot be read.
    pub fn manager_log(&self) -> String {
        fs::read_to_string(self.hosts.folder().join("logs").join(MANAGER_FOLDER)).unwrap_or_default()
    }

    /// Waits until the manager reports every host as up.
    ///
    /// # Errors
    /// [`HostError::Failed`] on timeout or if the manager ends, or [`HostError::Interrupted`] if
    /// `should_continue` returns `false`.
    pub fn wait_hosts_up(&mut self, should_continue: impl Fn() -> bool) -> Result<(), HostError> {
        let deadline = Instant::now() + BOOT_TIMEOUT;
        while self.count_hosts_up()? < self.hosts.as_slice().len() {
            if !should_continue() {
                return Err(HostError::Interrupted);
            }
            if self.manager.as_mut().is_none_or(|manager| !matches!(manager.try_wait(), Ok(None))) {
                return Err(HostError::Failed {
                    program: "pool-manager".to_owned(),
                    output: self.manager_log(),
                });
            }
            if Instant::now() > deadline {
                return Err(HostError::Failed { program: "an agent".to_owned(), output: self.agent_logs() });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns the number of hosts that are up, or 0 if the manager does not reply.
    fn count_hosts_up(&self) -> Result<usize, HostError> {
        let tarn_output = self.tarn_command(&["get", "hosts", "-o", "json"]).output();
        let json = tarn_output.map_err(HostError::start_error(&self.plan.programs.tarn))?.stdout;
        let hosts: Vec<Value> = serde_json::from_slice(&json).unwrap_or_default();
        Ok(hosts.iter().filter(|host| host["state"] == "up").count())
    }

    fn agent_logs(&self) -> String {
        self.hosts.as_slice().iter().map(|host| format!("{}:\n{}", host.name(), host.agent_log())).collect()
    }

    fn manager_path(&self, name: &str) -> PathBuf {
        self.hosts.folder().join(MANAGER_FOLDER).join(name)
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        self.kill_manager();
        let _ = fs::remove_dir_all(self.manager_path("")); // remaining files are harmless
    }
}

fn free_port() -> Result<u16, HostError> {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    Ok(free.map_err(HostError::file_error("find a free port on", Path::new("127.0.0.1")))?.port())
}

/// Writes all certificates and configuration files. Returns the plan of the hosts, with agents
/// added.
fn write_config(plan: &RackPlan, folder: &Path, port: u16) -> Result<Plan, HostError> {
    let manager_dir = folder.join(MANAGER_FOLDER);
    let _ = fs::remove_dir_all(&manager_dir); // may exist if an earlier rack was killed
    let _ = fs::remove_file(folder.join("logs").join(MANAGER_FOLDER));
    let certificates = manager_dir.join("certificates");
    fs::create_dir_all(&certificates).map_err(HostError::file_error("create", &certificates))?;
    let mut hosts = plan.hosts.clone();
    let names = hosts.names();
    let all: Vec<&str> = names.iter().map(String::as_str).chain([MANAGER_NAME, OPERATOR_NAME]).collect();
    match &plan.certificates {
        Some(from) => certificates::copy(from, &certificates, &all)?,
        None => certificates::write(&certificates, &all)?,
    }
    let write_file = |name: &str, text: String| {
        fs::write(manager_dir.join(name), text).map_err(HostError::file_error("write", &manager_dir))
    };
    let without_fencing = RackPlan { fence_after_s: None, ..plan.clone() };
    write_file("rack.toml", config_files::rack_toml(&without_fencing, port, folder))?;
    write_file("tarn", wrapper_script(&plan.programs.tarn, &certificates, port))?;
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(manager_dir.join("tarn"), executable)
        .map_err(HostError::file_error("write", &manager_dir))?;
    hosts.files.push((certificates.join("ca.pem"), "etc/tarn/ca.pem".to_owned()));
    for host in &names {
        write_file(&format!("{host}.toml"), config_files::host_toml(plan, port, host))?;
        hosts.files.push((manager_dir.join(format!("{host}.toml")), format!("etc/tarn/{host}.toml")));
        let host_files = ["pem", "key"].map(|kind| format!("{host}.{kind}"));
        hosts.files.extend(host_files.map(|name| (certificates.join(&name), format!("etc/tarn/{name}"))));
    }
    hosts.programs.push(plan.programs.agent.clone());
    hosts.script.push_str(AGENT_SCRIPT);
    Ok(hosts)
}

/// Returns a shell script that runs `tarn` with the endpoint and the credentials of this rack.
fn wrapper_script(program: &Path, certificates: &Path, port: u16) -> String {
    format!(
        "#!/bin/sh\nexport TARN_ENDPOINT=https://127.0.0.1:{port} TARN_SERVER_NAME={MANAGER_NAME}\n\
         export TARN_CA={0:?}/ca.pem TARN_CERT={0:?}/{OPERATOR_NAME}.pem TARN_KEY={0:?}/{OPERATOR_NAME}.key\nexec {program:?} \"$@\"\n",
        certificates
    )
}
