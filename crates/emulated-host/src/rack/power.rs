//! Whether a host has power, and taking it away for certain. QEMU inherits a lock on the host's pid file as its standard input, so
//! the kernel says when the process, and with it every way to the host's memory, is gone: no pid that is used again can fool it.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde_json::json;

use super::qmp;
use crate::HostError;

/// How long QEMU may take to end: it has gigabytes to give back.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How often it is ended; from the second time on it is killed.
const ATTEMPTS_MAX: usize = 6;
/// How long others who look at the lock may hold it, all together.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);
/// Between two looks at the lock.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The power switch of one host.
#[derive(Clone, Debug)]
pub struct Power {
    host: String,
    pid: PathBuf,
    qmp: PathBuf,
}

impl Power {
    /// That of a host in a rack's folder.
    ///
    /// # Errors
    /// There never was such a host.
    pub fn of(folder: &Path, host: &str) -> Result<Self, HostError> {
        let folder = folder.canonicalize().map_err(HostError::file("find", folder))?;
        let power = Self::in_folder(&folder, host);
        File::open(&power.pid).map(|_| power.clone()).map_err(HostError::file("open", &power.pid))
    }

    pub(super) fn in_folder(folder: &Path, host: &str) -> Self {
        let file = |kind| folder.join(format!("{host}.{kind}"));
        Self { host: host.to_owned(), pid: file("pid"), qmp: file("qmp") }
    }

    /// Whether the host's process is there.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn is_on(&self) -> Result<bool, HostError> {
        let file = File::open(&self.pid).map_err(HostError::file("open", &self.pid))?;
        // Whoever looks at the same time may do so, too.
        Ok(!self.try_lock(&file, FlockOperation::NonBlockingLockShared)?)
    }

    /// Cuts it, and returns when the process is certainly gone; if it was, at once.
    ///
    /// # Errors
    /// The process is still there.
    pub fn off(&self) -> Result<(), HostError> {
        if !self.is_on()? {
            return Ok(());
        }
        for attempt in 0..ATTEMPTS_MAX {
            let listens = attempt == 0 && qmp::execute(&self.qmp, "quit", json!({})).is_ok();
            if !listens {
                self.kill(); // it may just be starting: then the next attempt ends it
            }
            if self.is_off_within(EXIT_TIMEOUT)? {
                return Ok(());
            }
        }
        Err(self.power_error("its process does not end"))
    }

    /// The pid file, locked, for a process that is about to start.
    ///
    /// # Errors
    /// The host has power.
    pub(super) fn claim(&self) -> Result<File, HostError> {
        let failed = || HostError::file("lock", &self.pid);
        let mut options = File::options();
        let file =
            options.create(true).truncate(false).read(true).write(true).open(&self.pid).map_err(failed())?;
        let deadline = Instant::now() + LOCK_TIMEOUT;
        while !self.try_lock(&file, FlockOperation::NonBlockingLockExclusive)? {
            if Instant::now() > deadline {
                return Err(self.power_error("it runs already"));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        file.set_len(0).map_err(failed())?;
        Ok(file)
    }

    /// Writes down which process it is.
    pub(super) fn write_pid(&self, pid: u32) -> Result<(), HostError> {
        let file = File::options().write(true).open(&self.pid);
        file.and_then(|mut file| writeln!(file, "{pid}")).map_err(HostError::file("write", &self.pid))
    }

    fn try_lock(&self, file: &File, operation: FlockOperation) -> Result<bool, HostError> {
        match flock(file, operation) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(errno) => Err(HostError::file("lock", &self.pid)(errno.into())),
        }
    }

    fn is_off_within(&self, within: Duration) -> Result<bool, HostError> {
        let deadline = Instant::now() + within;
        while self.is_on()? {
            if Instant::now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(true)
    }

    /// Kills the process of the pid file if it is the one with the lock.
    fn kill(&self) {
        let pid = fs::read_to_string(&self.pid).ok().and_then(|pid| Pid::from_raw(pid.trim().parse().ok()?));
        // The descriptor first: what is looked at then is this process or none.
        let Some((pid, process)) =
            pid.and_then(|pid| Some((pid, pidfd_open(pid, PidfdFlags::empty()).ok()?)))
        else {
            return;
        };
        let holds = fs::read_link(format!("/proc/{}/fd/0", pid.as_raw_nonzero()));
        if holds.is_ok_and(|file| file == self.pid) {
            let _ = pidfd_send_signal(&process, Signal::KILL); // it may be gone
        }
    }

    fn power_error(&self, why: &str) -> HostError {
        HostError::Power { host: self.host.clone(), why: why.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that has a host's lock, and no ear.
    fn unresponsive_host(power: &Power) -> Child {
        let lock = power.claim().unwrap();
        let process = Command::new("sleep").arg("600").stdin(Stdio::from(lock)).spawn().unwrap();
        power.write_pid(process.id()).unwrap();
        process
    }

    #[test]
    fn unresponsive_host_is_killed_and_no_other_host() {
        let folder = tempfile::tempdir().unwrap();
        let powers = ["h0", "h1"].map(|host| Power::in_folder(&folder.path().canonicalize().unwrap(), host));
        let mut hosts = powers.each_ref().map(unresponsive_host);
        assert!(powers[0].claim().unwrap_err().to_string().contains("h0"), "it runs already");
        let power = Power::of(folder.path(), "h0").unwrap();
        // Not the pid decides: another's in the file is not killed for it.
        power.write_pid(hosts[1].id()).unwrap();
        power.kill();
        assert_eq!((power.is_on().unwrap(), hosts[1].try_wait().unwrap()), (true, None));
        power.write_pid(hosts[0].id()).unwrap();
        power.off().unwrap();
        power.off().unwrap();
        assert!(!power.is_on().unwrap() && powers[1].is_on().unwrap());
        powers[1].kill();
        for host in &mut hosts {
            assert!(!host.wait().unwrap().success());
        }
        assert!(!powers[1].is_on().unwrap());
    }

    #[test]
    fn unknown_host_is_an_error_and_not_off() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Power::of(folder.path(), "h0").unwrap_err().to_string().contains("h0.pid"));
        assert!(Power::of(&folder.path().join("nowhere"), "h0").is_err());
    }
}
