//! Controls the power, CPU and network link of an emulated host of a rack, and runs commands in the
//! host.

use std::{
    fs::{self, File},
    io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command},
    time::{Duration, Instant},
};

use serde_json::json;

use super::{
    control::{self, CommandOutput},
    power::Power,
    qmp,
};
use crate::HostError;

/// Maximum time for a host to boot. The value is large because emulation is slow on a busy machine.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
/// Default timeout of a command in a host.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of one attempt to run a command in a booting host.
const BOOT_PROBE_TIMEOUT: Duration = Duration::from_millis(500);
/// Interval between attempts to run a command in a booting host.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Host of a rack. Dropping the value powers the host off, unless another process started the host.
#[derive(Debug)]
pub struct RackHost {
    name: String,
    folder: PathBuf,
    power: Power,
    process: Option<Child>,
}

impl RackHost {
    /// Prepares a host in the directory of a rack. `start` is the command line of QEMU.
    ///
    /// # Errors
    /// [`HostError`] if a file cannot be written or the host is running.
    pub(super) fn prepare(folder: &Path, name: &str, start: &[String]) -> Result<Self, HostError> {
        let power = Power::from_folder(folder, name);
        drop(power.lock_pid_file()?);
        let host = Self { name: name.to_owned(), folder: folder.to_owned(), power, process: None };
        let text = serde_json::to_string(start).expect("arguments are JSON");
        fs::write(host.file_path("start"), text)
            .map_err(HostError::file_error("write", &host.file_path("start")))?;
        Ok(host)
    }

    /// Opens a host of a rack that another process has prepared or started.
    ///
    /// # Errors
    /// [`HostError::File`] if the directory has no such host.
    pub fn find(folder: &Path, name: &str) -> Result<Self, HostError> {
        let power = Power::open(folder, name)?;
        let folder = folder.canonicalize().map_err(HostError::file_error("resolve", folder))?;
        Ok(Self { name: name.to_owned(), folder, power, process: None })
    }

    /// Returns the host's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Powers the host on. The host is killed when the calling thread ends.
    ///
    /// # Errors
    /// [`HostError`] if the host is on or QEMU cannot be started.
    pub fn power_on(&mut self) -> Result<(), HostError> {
        let mut qemu = Command::new("setpriv");
        qemu.args(["--pdeathsig", "KILL"]);
        let process = self.start(qemu)?;
        self.process = Some(process);
        Ok(())
    }

    /// Powers the host on so that it continues to run when this process ends.
    ///
    /// # Errors
    /// The errors of [`RackHost::power_on`].
    pub fn power_on_detached(&self) -> Result<(), HostError> {
        self.start(Command::new("env")).map(drop)
    }

    fn start(&self, mut qemu: Command) -> Result<Child, HostError> {
        // The lock must be taken before the command line is read, because a rack that ends first
        // removes the command lines and then powers its hosts off.
        let lock = self.power.lock_pid_file()?;
        qemu.args(self.read_command_line()?).current_dir(&self.folder).process_group(0);
        let log = self.log_path("qemu");
        qemu.stdin(lock).stdout(open_log(&log)?).stderr(open_log(&log)?);
        let process = qemu.spawn().map_err(HostError::start_error(Path::new("QEMU")))?;
        self.power.write_pid(process.id())?;
        Ok(process)
    }

    /// Reads the command line of QEMU from the rack's directory.
    fn read_command_line(&self) -> Result<Vec<String>, HostError> {
        let file = self.file_path("start");
        let arguments = fs::read_to_string(&file).and_then(|text| Ok(serde_json::from_str(&text)?));
        arguments.map_err(HostError::file_error("read", &file))
    }

    /// Waits until the host can run commands.
    ///
    /// # Errors
    /// [`HostError::Power`] on timeout or if QEMU has ended.
    pub fn wait_until_up(&self) -> Result<(), HostError> {
        self.wait_until_up_while(|| true)
    }

    pub(super) fn wait_until_up_while(&self, should_continue: impl Fn() -> bool) -> Result<(), HostError> {
        let deadline = Instant::now() + BOOT_TIMEOUT;
        loop {
            match control::run(&self.file_path("control"), "true", BOOT_PROBE_TIMEOUT) {
                Ok(_) => return Ok(()),
                Err(_) if !should_continue() => return Err(HostError::Interrupted),
                Err(_) if !self.power.is_powered_on()? => {
                    return Err(self.power_error("QEMU ended during boot", self.read_log("qemu")));
                }
                Err(_) if Instant::now() > deadline => {
                    return Err(self.power_error("the host did not boot in time", self.console()));
                }
                Err(_) => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }

    /// Runs a shell command in the host, with a timeout of one minute.
    ///
    /// # Errors
    /// [`HostError::NoReply`] on timeout. The command then continues in the host.
    pub fn run(&self, command: &str) -> Result<CommandOutput, HostError> {
        self.run_with_timeout(command, REPLY_TIMEOUT)
    }

    /// Runs a shell command in the host, with this timeout.
    ///
    /// # Errors
    /// [`HostError::NoReply`] on timeout. The command then continues in the host.
    pub fn run_with_timeout(&self, command: &str, within: Duration) -> Result<CommandOutput, HostError> {
        control::run(&self.file_path("control"), command, within).map_err(|errno| match errno.kind() {
            io::ErrorKind::TimedOut => HostError::NoReply { host: self.name.clone(), within },
            _ => HostError::file_error("connect to a host at", &self.file_path("control"))(errno),
        })
    }

    /// Pauses the CPU of the host. The network, clock and devices of the host also stop.
    ///
    /// # Errors
    /// [`HostError`] if QEMU does not reply.
    pub fn pause(&self) -> Result<(), HostError> {
        qmp::execute(&self.file_path("qmp"), "stop", json!({}))
    }

    /// Resumes a paused host.
    ///
    /// # Errors
    /// [`HostError`] if QEMU does not reply.
    pub fn resume(&self) -> Result<(), HostError> {
        qmp::execute(&self.file_path("qmp"), "cont", json!({}))
    }

    /// Connects the network link of the host if `up`, and disconnects the link otherwise.
    ///
    /// # Errors
    /// [`HostError`] if QEMU does not reply.
    pub fn set_link(&self, up: bool) -> Result<(), HostError> {
        qmp::execute(&self.file_path("qmp"), "set_link", json!({"name": "net0", "up": up}))
    }

    /// Powers the host off, and waits until its QEMU process has ended.
    ///
    /// # Errors
    /// [`HostError::Power`] if the process does not end.
    pub fn power_off(&mut self) -> Result<(), HostError> {
        self.power.switch_off()?;
        if let Some(mut process) = self.process.take() {
            let _ = process.wait(); // reaps the process, which has ended
        }
        Ok(())
    }

    /// Powers the host off and on, and waits until the host is up. Shared devices and drives keep
    /// their content.
    ///
    /// # Errors
    /// The errors of [`RackHost::power_off`], [`RackHost::power_on`] and [`RackHost::wait_until_up`].
    pub fn reboot(&mut self) -> Result<(), HostError> {
        self.power_off()?;
        self.power_on()?;
        self.wait_until_up()
    }

    /// Returns whether the QEMU process of the host is running.
    ///
    /// # Errors
    /// [`HostError::File`] if the lock of the process cannot be tested.
    pub fn is_powered_on(&self) -> Result<bool, HostError> {
        self.power.is_powered_on()
    }

    /// Returns the console output of the host, or an empty string if the log cannot be read.
    pub fn console(&self) -> String {
        self.read_log("console")
    }

    /// Returns the log of the agent, which the agent writes to the host's fourth serial line,
    /// `/dev/ttyS3`.
    pub fn agent_log(&self) -> String {
        self.read_log("agent")
    }

    /// Returns the path of the socket of the host's shell.
    pub fn shell_socket(&self) -> PathBuf {
        self.file_path("shell")
    }

    fn read_log(&self, kind: &str) -> String {
        fs::read(self.log_path(kind))
            .map(|output| String::from_utf8_lossy(&output).into_owned())
            .unwrap_or_default()
    }

    fn file_path(&self, kind: &str) -> PathBuf {
        self.folder.join(format!("{}.{kind}", self.name))
    }

    fn log_path(&self, kind: &str) -> PathBuf {
        self.folder.join("logs").join(format!("{}.{kind}", self.name))
    }

    fn power_error(&self, reason: &str, output: String) -> HostError {
        HostError::Power { host: self.name.clone(), reason: format!("{reason}:\n{output}") }
    }
}

/// Opens a log file for appending, and creates the file if it does not exist.
pub(super) fn open_log(log: &Path) -> Result<File, HostError> {
    File::options().create(true).append(true).open(log).map_err(HostError::file_error("open", log))
}

impl Drop for RackHost {
    fn drop(&mut self) {
        if self.process.is_some() {
            let _ = self.power_off(); // errors cannot be returned from drop
        }
    }
}
