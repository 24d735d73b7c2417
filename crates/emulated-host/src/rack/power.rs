//! Reports whether a host is on, and powers a host off reliably.
//!
//! QEMU inherits a lock on the host's pid file as its standard input. The kernel releases the lock
//! only when the QEMU process has ended. No process can then access the host's memory. Unlike a
//! process ID, the lock is never reused by another process.

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

/// Maximum time for QEMU to end in one attempt. QEMU needs time to free gigabytes of memory.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of attempts to end QEMU. The first attempt uses QMP, and later attempts kill
/// QEMU.
const POWER_OFF_ATTEMPTS_MAX: usize = 6;
/// Maximum time to acquire the lock, which other processes hold briefly while they test it.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);
/// Interval between tests of the lock.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Power switch of a host.
#[derive(Clone, Debug)]
pub struct Power {
    host: String,
    pid_file: PathBuf,
    qmp_socket: PathBuf,
}

impl Power {
    /// Opens the power switch of a host in the directory of a rack.
    ///
    /// # Errors
    /// [`HostError::File`] if the directory has no such host.
    pub fn open(folder: &Path, host: &str) -> Result<Self, HostError> {
        let folder = folder.canonicalize().map_err(HostError::file_error("resolve", folder))?;
        let power = Self::from_folder(&folder, host);
        File::open(&power.pid_file)
            .map(|_| power.clone())
            .map_err(HostError::file_error("open", &power.pid_file))
    }

    pub(super) fn from_folder(folder: &Path, host: &str) -> Self {
        let file = |kind| folder.join(format!("{host}.{kind}"));
        Self { host: host.to_owned(), pid_file: file("pid"), qmp_socket: file("qmp") }
    }

    /// Returns whether the QEMU process of the host is running.
    ///
    /// # Errors
    /// [`HostError::File`] if the lock cannot be tested.
    pub fn is_powered_on(&self) -> Result<bool, HostError> {
        let file = File::open(&self.pid_file).map_err(HostError::file_error("open", &self.pid_file))?;
        // The test uses a shared lock, because several processes may test at the same time.
        Ok(!self.try_lock(&file, FlockOperation::NonBlockingLockShared)?)
    }

    /// Powers the host off, and returns when its QEMU process has ended.
    ///
    /// # Errors
    /// [`HostError::Power`] if the process does not end.
    pub fn switch_off(&self) -> Result<(), HostError> {
        if !self.is_powered_on()? {
            return Ok(());
        }
        for attempt in 0..POWER_OFF_ATTEMPTS_MAX {
            let is_quitting = attempt == 0 && qmp::execute(&self.qmp_socket, "quit", json!({})).is_ok();
            if !is_quitting {
                self.kill(); // if the process ID is not written yet, the next attempt kills
            }
            if self.wait_until_off(EXIT_TIMEOUT)? {
                return Ok(());
            }
        }
        Err(self.power_error("the QEMU process does not end"))
    }

    /// Locks the pid file for a QEMU process that is about to start, and returns the locked file.
    ///
    /// # Errors
    /// [`HostError::Power`] if the host is on.
    pub(super) fn lock_pid_file(&self) -> Result<File, HostError> {
        let lock_error = || HostError::file_error("lock", &self.pid_file);
        let mut options = File::options();
        let file = options
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&self.pid_file)
            .map_err(lock_error())?;
        let deadline = Instant::now() + LOCK_TIMEOUT;
        while !self.try_lock(&file, FlockOperation::NonBlockingLockExclusive)? {
            if Instant::now() > deadline {
                return Err(self.power_error("the host is already running"));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        file.set_len(0).map_err(lock_error())?;
        Ok(file)
    }

    /// Writes the process ID to the pid file.
    pub(super) fn write_pid(&self, pid: u32) -> Result<(), HostError> {
        let file = File::options().write(true).open(&self.pid_file);
        file.and_then(|mut file| writeln!(file, "{pid}"))
            .map_err(HostError::file_error("write", &self.pid_file))
    }

    fn try_lock(&self, file: &File, operation: FlockOperation) -> Result<bool, HostError> {
        match flock(file, operation) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(errno) => Err(HostError::file_error("lock", &self.pid_file)(errno.into())),
        }
    }

    fn wait_until_off(&self, within: Duration) -> Result<bool, HostError> {
        let deadline = Instant::now() + within;
        while self.is_powered_on()? {
            if Instant::now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(true)
    }

    /// Reads the process ID in the pid file, and kills that process if it holds the lock.
    fn kill(&self) {
        let pid =
            fs::read_to_string(&self.pid_file).ok().and_then(|pid| Pid::from_raw(pid.trim().parse().ok()?));
        // The pidfd is opened before the check, so that both refer to the same process.
        let Some((pid, process)) =
            pid.and_then(|pid| Some((pid, pidfd_open(pid, PidfdFlags::empty()).ok()?)))
        else {
            return;
        };
        let stdin = fs::read_link(format!("/proc/{}/fd/0", pid.as_raw_nonzero()));
        if stdin.is_ok_and(|file| file == self.pid_file) {
            let _ = pidfd_send_signal(&process, Signal::KILL); // fails only if the process has ended
        }
    }

    fn power_error(&self, reason: &str) -> HostError {
        HostError::Power { host: self.host.clone(), reason: reason.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Starts a process that holds the lock of a host and does not reply on QMP.
    fn unresponsive_host(power: &Power) -> Child {
        let lock = power.lock_pid_file().unwrap();
        let process = Command::new("sleep").arg("600").stdin(Stdio::from(lock)).spawn().unwrap();
        power.write_pid(process.id()).unwrap();
        process
    }

    #[test]
    fn powering_off_kills_an_unresponsive_host_but_no_other_host() {
        let folder = tempfile::tempdir().unwrap();
        let powers =
            ["h0", "h1"].map(|host| Power::from_folder(&folder.path().canonicalize().unwrap(), host));
        let mut hosts = powers.each_ref().map(unresponsive_host);
        assert!(
            powers[0].lock_pid_file().unwrap_err().to_string().contains("h0"),
            "the power switch of a running host must be locked"
        );
        let power = Power::open(folder.path(), "h0").unwrap();
        // If the pid file of h0 contains the ID of h1's process, that process must not be killed.
        power.write_pid(hosts[1].id()).unwrap();
        power.kill();
        assert_eq!((power.is_powered_on().unwrap(), hosts[1].try_wait().unwrap()), (true, None));
        power.write_pid(hosts[0].id()).unwrap();
        power.switch_off().unwrap();
        power.switch_off().unwrap();
        assert!(!power.is_powered_on().unwrap() && powers[1].is_powered_on().unwrap());
        powers[1].kill();
        for host in &mut hosts {
            assert!(!host.wait().unwrap().success());
        }
        assert!(!powers[1].is_powered_on().unwrap());
    }

    #[test]
    fn opening_the_power_switch_of_an_unknown_host_fails() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Power::open(folder.path(), "h0").unwrap_err().to_string().contains("h0.pid"));
        assert!(Power::open(&folder.path().join("nowhere"), "h0").is_err());
    }
}
