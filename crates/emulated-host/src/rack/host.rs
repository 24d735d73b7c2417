//! One host of a rack: switched on and off, paused, cut from the network, and told to run commands. Why it is, is the caller's.

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

/// How long a host may take to boot on a busy machine.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a command may take unless told otherwise.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a host that boots is listened to in one piece.
const BOOT_PROBE_TIMEOUT: Duration = Duration::from_millis(500);
/// Between two attempts to reach a host that has just been switched on.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A host of a rack. Dropped, it has no power; one that was only found stays as it is.
#[derive(Debug)]
pub struct RackHost {
    name: String,
    folder: PathBuf,
    power: Power,
    process: Option<Child>,
}

impl RackHost {
    /// One that is being prepared in a folder.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(super) fn prepare(folder: &Path, name: &str, start: &[String]) -> Result<Self, HostError> {
        let power = Power::in_folder(folder, name);
        drop(power.claim()?);
        let host = Self { name: name.to_owned(), folder: folder.to_owned(), power, process: None };
        let text = serde_json::to_string(start).expect("arguments are JSON");
        fs::write(host.file("start"), text).map_err(HostError::file("write", &host.file("start")))?;
        Ok(host)
    }

    /// One that somebody else has started, or prepared, in a rack's folder.
    ///
    /// # Errors
    /// There never was such a host.
    pub fn find(folder: &Path, name: &str) -> Result<Self, HostError> {
        let power = Power::of(folder, name)?;
        let folder = folder.canonicalize().map_err(HostError::file("find", folder))?;
        Ok(Self { name: name.to_owned(), folder, power, process: None })
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Switches it on. It ends with the thread that does so.
    ///
    /// # Errors
    /// It is on, or QEMU does not start.
    pub fn power_on(&mut self) -> Result<(), HostError> {
        let mut qemu = Command::new("setpriv");
        qemu.args(["--pdeathsig", "KILL"]);
        let process = self.start(qemu)?;
        self.process = Some(process);
        Ok(())
    }

    /// Switches it on for whoever has its rack: it stays on when this process ends.
    ///
    /// # Errors
    /// As [`RackHost::power_on`].
    pub fn power_on_detached(&self) -> Result<(), HostError> {
        self.start(Command::new("env")).map(drop)
    }

    fn start(&self, mut qemu: Command) -> Result<Child, HostError> {
        let lock = self.power.claim()?; // first: a rack that ends takes away what starts its hosts, and then their power
        qemu.args(self.arguments()?).current_dir(&self.folder).process_group(0);
        let log = self.log_file("qemu");
        qemu.stdin(lock).stdout(open_log(&log)?).stderr(open_log(&log)?);
        let process = qemu.spawn().map_err(HostError::start(Path::new("QEMU")))?;
        self.power.write_pid(process.id())?;
        Ok(process)
    }

    /// What it is started with.
    fn arguments(&self) -> Result<Vec<String>, HostError> {
        let file = self.file("start");
        let arguments = fs::read_to_string(&file).and_then(|text| Ok(serde_json::from_str(&text)?));
        arguments.map_err(HostError::file("read", &file))
    }

    /// Waits until it answers.
    ///
    /// # Errors
    /// It does not, or QEMU has ended.
    pub fn wait_up(&self) -> Result<(), HostError> {
        self.wait_up_while(|| true)
    }

    pub(super) fn wait_up_while(&self, is_wanted: impl Fn() -> bool) -> Result<(), HostError> {
        let deadline = Instant::now() + BOOT_TIMEOUT;
        loop {
            match control::run(&self.file("control"), "true", BOOT_PROBE_TIMEOUT) {
                Ok(_) => return Ok(()),
                Err(_) if !is_wanted() => return Err(HostError::Interrupted),
                Err(_) if !self.power.is_on()? => return Err(self.failed("it ended", self.read_log("qemu"))),
                Err(_) if Instant::now() > deadline => {
                    return Err(self.failed("it is not up", self.console()));
                }
                Err(_) => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }

    /// Runs a command of a shell in it, for a minute at most.
    ///
    /// # Errors
    /// It does not answer in time; the command goes on.
    pub fn run(&self, command: &str) -> Result<CommandOutput, HostError> {
        self.run_within(command, REPLY_TIMEOUT)
    }

    /// Runs a command of a shell in it.
    ///
    /// # Errors
    /// It does not answer in time; the command goes on.
    pub fn run_within(&self, command: &str, within: Duration) -> Result<CommandOutput, HostError> {
        control::run(&self.file("control"), command, within).map_err(|errno| match errno.kind() {
            io::ErrorKind::TimedOut => HostError::NoReply { host: self.name.clone(), within },
            _ => HostError::file("reach a host by", &self.file("control"))(errno),
        })
    }

    /// Stops its processor; its network, its clock and its devices stand still, too.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn pause(&self) -> Result<(), HostError> {
        qmp::execute(&self.file("qmp"), "stop", json!({}))
    }

    /// Lets its processor go on.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn resume(&self) -> Result<(), HostError> {
        qmp::execute(&self.file("qmp"), "cont", json!({}))
    }

    /// Connects it to its network, or cuts it off.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn set_link(&self, up: bool) -> Result<(), HostError> {
        qmp::execute(&self.file("qmp"), "set_link", json!({"name": "net0", "up": up}))
    }

    /// Cuts its power; when it returns, its process is gone.
    ///
    /// # Errors
    /// The process is still there.
    pub fn power_off(&mut self) -> Result<(), HostError> {
        self.power.off()?;
        if let Some(mut process) = self.process.take() {
            let _ = process.wait(); // it is gone already
        }
        Ok(())
    }

    /// Cuts its power, switches it on again and waits until it answers. Devices keep their bytes.
    ///
    /// # Errors
    /// As [`RackHost::power_off`], [`RackHost::power_on`] and [`RackHost::wait_up`].
    pub fn reboot(&mut self) -> Result<(), HostError> {
        self.power_off()?;
        self.power_on()?;
        self.wait_up()
    }

    /// Whether its process is there.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn is_on(&self) -> Result<bool, HostError> {
        self.power.is_on()
    }

    /// All that its kernel and its first process have said.
    pub fn console(&self) -> String {
        self.read_log("console")
    }

    /// All that was written to its fourth serial line, `/dev/ttyS3`.
    pub fn agent_log(&self) -> String {
        self.read_log("agent")
    }

    /// Where its shell is, for a terminal.
    pub fn shell(&self) -> PathBuf {
        self.file("shell")
    }

    fn read_log(&self, kind: &str) -> String {
        fs::read(self.log_file(kind))
            .map(|output| String::from_utf8_lossy(&output).into_owned())
            .unwrap_or_default()
    }

    fn file(&self, kind: &str) -> PathBuf {
        self.folder.join(format!("{}.{kind}", self.name))
    }

    fn log_file(&self, kind: &str) -> PathBuf {
        self.folder.join("logs").join(format!("{}.{kind}", self.name))
    }

    fn failed(&self, what: &str, output: String) -> HostError {
        HostError::Power { host: self.name.clone(), why: format!("{what}:\n{output}") }
    }
}

/// A log to go on with.
pub(super) fn open_log(log: &Path) -> Result<File, HostError> {
    File::options().create(true).append(true).open(log).map_err(HostError::file("open", log))
}

impl Drop for RackHost {
    fn drop(&mut self) {
        if self.process.is_some() {
            let _ = self.power_off(); // nobody is left to be told
        }
    }
}
