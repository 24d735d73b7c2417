//! Cache servers on loopback ports: `soft-cache` and Redis.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use local_rack::{Process, program_dir};
use tempfile::TempDir;

use crate::{cache_client::Client, failure::Failure, loopback::free_port, process::resident_bytes};

/// Environment variable with the folder of Redis. `cargo xtask bench` sets it.
const REDIS_ENV: &str = "TARN_REDIS";
/// Maximum time from the start of a server to its first connection.
const READY_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between two attempts to connect.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Paths of the programs.
#[derive(Debug)]
pub struct Programs {
    soft_cache: PathBuf,
    redis: PathBuf,
}

/// Kind of server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `soft-cache`.
    SoftCache,
    /// Debian's redis-server.
    Redis,
}

/// Running server.
#[derive(Debug)]
pub struct Server {
    /// Process of the server.
    pub process: Process,
    /// Address that the server listens on.
    pub address: SocketAddr,
    _dir: TempDir,
}

impl Programs {
    /// Finds Redis, and builds `soft-cache`.
    ///
    /// # Errors
    /// [`Failure`] if Redis is missing or cargo fails.
    pub fn find() -> Result<Self, Failure> {
        let redis = std::env::var_os(REDIS_ENV).map(PathBuf::from).ok_or(Failure::RedisMissing)?;
        Ok(Self { soft_cache: program_dir(&["host-agent"])?.join("soft-cache"), redis })
    }

    /// Returns the path of `redis-benchmark`.
    pub fn redis_benchmark(&self) -> PathBuf {
        self.redis.join("redis-benchmark")
    }

    /// Starts a server with a budget, and waits until it accepts connections. The budget of `soft-cache` is that of
    /// its pages, and the budget of Redis is `maxmemory`.
    ///
    /// # Errors
    /// [`Failure`] if the server does not start.
    pub fn start(&self, kind: Kind, budget_bytes: u64) -> Result<Server, Failure> {
        self.start_at(free_address()?, kind, budget_bytes)
    }

    /// Starts a server as [`start`](Self::start) does, on this address.
    ///
    /// # Errors
    /// [`Failure`] if the server does not start.
    pub fn start_at(&self, address: SocketAddr, kind: Kind, budget_bytes: u64) -> Result<Server, Failure> {
        let dir = create_dir()?;
        let command = match kind {
            Kind::SoftCache => self.soft_cache_command(address, budget_bytes),
            Kind::Redis => self.redis_command(address, budget_bytes, dir.path()),
        };
        launch(kind, command, address, dir)
    }

    /// Starts `soft-cache` with at most this budget of the soft memory daemon at a socket.
    ///
    /// # Errors
    /// [`Failure`] if the server does not start.
    pub fn start_with_daemon(&self, socket: &Path, budget_bytes: u64) -> Result<Server, Failure> {
        let address = free_address()?;
        let mut command = self.soft_cache_command(address, budget_bytes);
        command.arg("--daemon").arg(socket);
        launch(Kind::SoftCache, command, address, create_dir()?)
    }

    fn soft_cache_command(&self, address: SocketAddr, budget_bytes: u64) -> Command {
        let mut command = Command::new(&self.soft_cache);
        command.arg("--listen").arg(address.to_string()).arg("--memory").arg(format!("{budget_bytes}B"));
        command
    }

    fn redis_command(&self, address: SocketAddr, budget_bytes: u64, dir: &Path) -> Command {
        let mut command = Command::new(self.redis.join("redis-server"));
        command.args(["--bind", "127.0.0.1", "--port"]).arg(address.port().to_string());
        command.args([
            "--save",
            "",
            "--appendonly",
            "no",
            "--maxmemory-policy",
            "allkeys-lru",
            "--maxmemory",
        ]);
        command.arg(budget_bytes.to_string()).arg("--dir").arg(dir);
        command
    }
}

impl Server {
    /// Opens a connection.
    ///
    /// # Errors
    /// [`Failure`] if the connection fails.
    pub fn connect(&self) -> Result<Client, Failure> {
        Client::connect(self.address)
    }

    /// Returns the resident memory of the server in bytes.
    ///
    /// # Errors
    /// [`Failure`] if the server has ended.
    pub fn resident_bytes(&self) -> Result<u64, Failure> {
        resident_bytes(self.process.pid())
    }
}

fn free_address() -> Result<SocketAddr, Failure> {
    Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?)))
}

fn create_dir() -> Result<TempDir, Failure> {
    tempfile::tempdir().map_err(Failure::file_error("create a folder in", std::env::temp_dir()))
}

fn launch(kind: Kind, mut command: Command, address: SocketAddr, dir: TempDir) -> Result<Server, Failure> {
    let mut process = Process::start(name(kind), &mut command, dir.path().join("log"))?;
    let end = Instant::now() + READY_TIMEOUT;
    while TcpStream::connect(address).is_err() {
        process.check_running()?;
        if Instant::now() > end {
            let event = format!("a connection to {}", name(kind));
            let last_state = process.log_tail();
            return Err(Failure::TimedOut { event, seconds: READY_TIMEOUT.as_secs(), last_state });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(Server { process, address, _dir: dir })
}

/// Returns the name of a kind of server.
pub fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::SoftCache => "soft-cache",
        Kind::Redis => "redis-server",
    }
}
