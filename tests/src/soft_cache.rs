//! Cache servers for tests: `soft-cache` and Redis, and clients that send raw bytes.

use std::{
    fs,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, ChildStderr, Command, ExitStatus, Output, Stdio},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal, kill_process},
};
use tempfile::TempDir;

use crate::rack::programs_dir;

/// Environment variable with the folder of Redis. `cargo xtask test` sets it.
const REDIS_ENV: &str = "TARN_REDIS";
/// Time limit of each read. It is high because test machines are shared.
const READ_TIMEOUT: Duration = Duration::from_secs(180);
/// Interval between two attempts to connect.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Returns the path of a program of Redis.
pub fn redis_program(name: &str) -> PathBuf {
    let folder = std::env::var_os(REDIS_ENV).map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/redis"));
    let program = folder.join(name);
    assert!(
        program.exists(),
        "no {name} in {}: run `cargo xtask test`, which downloads it",
        folder.display()
    );
    program
}

/// Running server with a unix socket. Dropping it kills the process.
#[derive(Debug)]
pub struct CacheServer {
    child: Child,
    dir: TempDir,
    /// Log of `soft-cache` after its start.
    log: Option<BufReader<ChildStderr>>,
    /// Address of the TCP socket of `soft-cache`, if it has one.
    pub address: Option<String>,
}

impl CacheServer {
    /// Starts `soft-cache` with a unix socket and these options, and waits until it listens.
    pub fn start(options: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder is created");
        let mut command = Command::new(programs_dir().join("soft-cache"));
        command.arg("--unix-socket").arg(dir.path().join("socket")).args(options).env_remove("RUST_LOG");
        let mut child = command.stderr(Stdio::piped()).spawn().expect("soft-cache starts");
        let mut log = BufReader::new(child.stderr.take().expect("the log is piped"));
        let mut address = None;
        loop {
            let mut line = String::new();
            let len = log.read_line(&mut line).expect("the log is readable");
            assert!(len > 0, "soft-cache ended");
            if let Some((_, value)) = line.split_once("address=") {
                address = Some(value.trim().to_owned());
            }
            // The unix socket is the last one.
            if line.contains("path=") {
                break;
            }
        }
        Self { child, dir, log: Some(log), address }
    }

    /// Starts Redis as a cache with a unix socket, and waits until it listens.
    pub fn start_redis() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder is created");
        let mut command = Command::new(redis_program("redis-server"));
        command.args([
            "--port",
            "0",
            "--save",
            "",
            "--maxmemory",
            "64mb",
            "--maxmemory-policy",
            "allkeys-lru",
        ]);
        command.arg("--unixsocket").arg(dir.path().join("socket")).arg("--dir").arg(dir.path());
        let mut child = command.stdout(Stdio::null()).spawn().expect("redis-server starts");
        while UnixStream::connect(dir.path().join("socket")).is_err() {
            let status = child.try_wait().expect("the process can be waited for");
            assert!(status.is_none(), "redis-server ended: {status:?}");
            std::thread::sleep(POLL_INTERVAL);
        }
        Self { child, dir, log: None, address: None }
    }

    /// Returns the path of the unix socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Opens a connection.
    pub fn connect(&self) -> RawClient {
        let stream = UnixStream::connect(self.socket()).expect("the server listens");
        stream.set_read_timeout(Some(READ_TIMEOUT)).expect("the time limit is valid");
        RawClient { stream }
    }

    /// Runs `redis-cli` with arguments, and returns its output.
    pub fn cli(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(redis_program("redis-cli"));
        command.arg("-s").arg(self.socket()).args(arguments).stdin(Stdio::null());
        command.output().expect("redis-cli runs")
    }

    /// Runs `redis-benchmark` with arguments, and returns its output.
    pub fn benchmark(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(redis_program("redis-benchmark"));
        command.arg("-s").arg(self.socket()).args(arguments).stdin(Stdio::null());
        command.output().expect("redis-benchmark runs")
    }

    /// Returns a field of INFO that is a number.
    pub fn info(&self, field: &str) -> u64 {
        let info = String::from_utf8_lossy(&self.cli(&["INFO"]).stdout).into_owned();
        let value = info.lines().find_map(|line| line.trim().strip_prefix(field)?.strip_prefix(':'));
        let number = value.and_then(|value| value.parse().ok());
        number.unwrap_or_else(|| panic!("no number {field} in {info}"))
    }

    /// Waits until a field of INFO has at least a value.
    pub fn wait_for_info(&self, field: &str, minimum: u64) {
        while self.info(field) < minimum {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the largest amount of memory that the server had resident, in KiB.
    pub fn peak_resident_kib(&self) -> u64 {
        let status =
            fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("the server runs");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        peak.and_then(|peak| peak.trim().strip_suffix(" kB")?.parse().ok()).expect("the kernel reports VmHWM")
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a process has an ID");
        kill_process(pid, Signal::TERM).expect("the process exists");
    }

    /// Waits for the end of the server. Returns its status and the rest of its log.
    pub fn wait(&mut self) -> (ExitStatus, String) {
        let mut rest = String::new();
        if let Some(log) = &mut self.log {
            log.read_to_string(&mut rest).expect("the log is readable");
        }
        (self.child.wait().expect("the process can be waited for"), rest)
    }
}

impl Drop for CacheServer {
    fn drop(&mut self) {
        // Both calls fail only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Connection that sends and receives raw bytes.
#[derive(Debug)]
pub struct RawClient {
    stream: UnixStream,
}

impl RawClient {
    /// Sends bytes.
    ///
    /// # Errors
    /// The error of the connection, such as that the server closed it.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Returns whether the server has sent bytes that were not received yet.
    pub fn has_reply(&self) -> bool {
        poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], Some(&Timespec::default())) == Ok(1)
    }

    /// Receives a number of bytes.
    pub fn receive(&mut self, len: usize) -> String {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("the server replies");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Sends inline commands and an ECHO, and returns the replies to the commands as text.
    pub fn run(&mut self, commands: &[u8]) -> String {
        const MARKER: &str = "$14\r\nend-of-replies\r\n";
        self.send(commands).expect("the server reads");
        self.send(b"ECHO end-of-replies\r\n").expect("the server reads");
        let mut replies = String::new();
        while !replies.ends_with(MARKER) {
            let mut bytes = [0; 4096];
            let len = self.stream.read(&mut bytes).expect("the server replies");
            assert!(len > 0, "the server closed the connection after {replies:?}");
            replies.push_str(&String::from_utf8_lossy(&bytes[..len]));
        }
        replies.truncate(replies.len() - MARKER.len());
        replies
    }

    /// Receives until the server closes the connection. An error of the connection counts as its end.
    pub fn receive_to_end(&mut self) -> Vec<u8> {
        let mut received = Vec::new();
        let result = self.stream.read_to_end(&mut received);
        let is_timeout = result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        assert!(!is_timeout, "the server did not close the connection");
        received
    }
}
