//! Clusters of Debian's etcd on loopback addresses, for tests.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Environment variable with the folder of etcd. `cargo xtask test` sets it.
const ETCD_ENV: &str = "TARN_ETCD";
/// Time limit of every wait. It is high because test machines are shared.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between two attempts of a call.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Members of a cluster. Dropping it kills them.
#[derive(Debug)]
pub struct EtcdCluster {
    members: Vec<Member>,
    _dir: TempDir,
}

#[derive(Debug)]
struct Member {
    command: Command,
    endpoint: String,
    /// Running process.
    process: Option<Child>,
}

/// Returns the path of etcd.
pub fn program() -> PathBuf {
    let folder = std::env::var_os(ETCD_ENV).map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/etcd"));
    let program = folder.join("etcd");
    assert!(program.exists(), "no etcd in {}: run `cargo xtask test`, which downloads it", folder.display());
    program
}

impl EtcdCluster {
    /// Starts members with these additional options. The members accept calls some time after their start.
    pub fn start(members: usize, options: &[&str]) -> Self {
        Self::start_with_scheme(members, "http", options)
    }

    /// Starts one member that accepts only clients with a certificate. `folder` contains `ca.pem`, `server.pem` and
    /// `server.key`.
    pub fn start_with_tls(folder: &Path) -> Self {
        let file = |name: &str| folder.join(name).display().to_string();
        let (ca, certificate, key) = (file("ca.pem"), file("server.pem"), file("server.key"));
        let files =
            ["--client-cert-auth", "--trusted-ca-file", &ca, "--cert-file", &certificate, "--key-file", &key];
        Self::start_with_scheme(1, "https", &files)
    }

    fn start_with_scheme(members: usize, scheme: &str, options: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder is created");
        // All listeners exist at the same time, so that the ports differ.
        let listeners: Vec<_> =
            (0..2 * members).map(|_| TcpListener::bind("127.0.0.1:0").expect("a port is free")).collect();
        let scheme_of = |index: usize| if index.is_multiple_of(2) { "http" } else { scheme }; // members use http among each other
        let urls: Vec<String> = (0..)
            .zip(&listeners)
            .map(|(index, listener)| {
                format!("{}://{}", scheme_of(index), listener.local_addr().expect("the listener is bound"))
            })
            .collect();
        drop(listeners);
        let initial: Vec<_> = (0..members).map(|i| format!("m{i}={}", urls[2 * i])).collect();
        let members = (0..members).map(|i| {
            let (peer, client) = (&urls[2 * i], &urls[2 * i + 1]);
            let mut command = Command::new(program());
            command.env_clear(); // variables may contain the settings of another cluster
            command.args(["--name", &format!("m{i}"), "--initial-cluster", &initial.join(",")]);
            command.args(["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]);
            command.args(["--listen-client-urls", client, "--advertise-client-urls", client]);
            command.arg("--data-dir").arg(dir.path().join(format!("m{i}"))).args(options);
            let log = File::create(dir.path().join(format!("m{i}.log"))).expect("a log is created");
            command.stdout(log.try_clone().expect("a descriptor is copied")).stderr(log);
            Member { command, endpoint: client.clone(), process: None }
        });
        let mut cluster = Self { members: members.collect(), _dir: dir };
        (0..cluster.members.len()).for_each(|member| cluster.restart(member));
        cluster
    }

    /// Returns the addresses for clients.
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(|member| member.endpoint.clone()).collect()
    }

    /// Calls the JSON interface of the first member until it accepts the call, and returns the response.
    pub fn call_json(&self, path: &str, body: &str) -> String {
        let address = self.members[0].endpoint.trim_start_matches("http://");
        let started = Instant::now();
        loop {
            match post(address, path, body) {
                Ok(response) if response.starts_with("HTTP/1.1 200") => return response,
                response => assert!(started.elapsed() < WAIT_TIMEOUT, "{path}: {response:?}"),
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Kills a member, if it runs.
    pub fn kill(&mut self, member: usize) {
        if let Some(mut process) = self.members[member].process.take() {
            process.kill().expect("the process exists");
            process.wait().expect("the process has ended");
        }
    }

    /// Starts a member that was killed.
    pub fn restart(&mut self, member: usize) {
        self.kill(member);
        let member = &mut self.members[member];
        member.process = Some(member.command.spawn().expect("etcd starts"));
    }

    /// Stops a running member until [`Self::resume`].
    pub fn pause(&self, member: usize) {
        self.signal(member, Signal::STOP);
    }

    /// Continues a paused member.
    pub fn resume(&self, member: usize) {
        self.signal(member, Signal::CONT);
    }

    fn signal(&self, member: usize, signal: Signal) {
        let process = self.members[member].process.as_ref().expect("the member runs");
        kill_process(Pid::from_child(process), signal).expect("the process exists");
    }
}

/// Sends a POST request, and returns the response.
fn post(address: &str, path: &str, body: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    let length = body.len();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    Ok(response)
}

impl Drop for EtcdCluster {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|member| self.kill(member));
    }
}
