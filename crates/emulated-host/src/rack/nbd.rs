//! Drives over the network: processes of Debian's nbd-server on this machine serve the content of drives to
//! QEMU, through unix sockets.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use super::host::open_log;
use crate::{Artifacts, HostError};

/// Name of the content that a server exports.
pub(super) const EXPORT_NAME: &str = "drive";
/// Time limit for a server to create its socket.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of checks for the socket.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Running server of one drive. It is killed when the value is dropped, or when the calling thread ends.
#[derive(Debug)]
pub struct NbdServer {
    process: Child,
    /// Socket, which is removed with the server.
    socket: PathBuf,
}

impl NbdServer {
    /// Starts a server for the file `content`, which listens at `socket`, and waits until it listens.
    /// `config` is the path of its configuration, which is overwritten.
    pub(super) fn start(
        artifacts: &Artifacts,
        socket: &Path,
        content: &Path,
        config: &Path,
        log: &Path,
    ) -> Result<Self, HostError> {
        let _ = fs::remove_file(socket); // may exist if an earlier rack was killed
        let text = format!(
            "[generic]\nunixsock = {}\n[{EXPORT_NAME}]\nexportname = {}\n",
            socket.display(),
            content.display()
        );
        fs::write(config, text).map_err(HostError::file_error("write", config))?;
        let log = open_log(log)?;
        let mut command = artifacts.nbd_server_command();
        command.arg("-C").arg(config).arg("-d").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let process =
            command.spawn().map_err(HostError::file_error("start", &artifacts.tool_path("nbd-server")))?;
        let mut server = Self { process, socket: socket.to_owned() };
        let started = Instant::now();
        while !socket.exists() {
            let has_ended = server.process.try_wait().is_ok_and(|status| status.is_some());
            if has_ended || started.elapsed() > START_TIMEOUT {
                return Err(HostError::file_error("create", socket)(std::io::ErrorKind::NotFound.into()));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(server)
    }

    /// Stops the server, so that requests of the host wait.
    ///
    /// # Errors
    /// The server has ended.
    pub fn pause(&self) -> std::io::Result<()> {
        self.send(Signal::STOP)
    }

    /// Continues a stopped server.
    ///
    /// # Errors
    /// The server has ended.
    pub fn resume(&self) -> std::io::Result<()> {
        self.send(Signal::CONT)
    }

    /// Kills the server, so that requests of the host fail.
    pub fn kill(&mut self) {
        let _ = self.process.kill(); // it may have ended
        let _ = self.process.wait();
    }

    fn send(&self, signal: Signal) -> std::io::Result<()> {
        Ok(kill_process(Pid::from_child(&self.process), signal)?)
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.kill();
        let _ = fs::remove_file(&self.socket); // errors cannot be returned from drop
    }
}
