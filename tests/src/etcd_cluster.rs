//! Clusters of Debian's etcd on loopback addresses, for tests.

use std::{
    fs::File,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Environment variable with the folder of etcd. `cargo xtask test` sets it.
const ETCD_ENV: &str = "TARN_ETCD";

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
fn program() -> PathBuf {
    let folder = std::env::var_os(ETCD_ENV).map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/etcd"));
    let program = folder.join("etcd");
    assert!(program.exists(), "no etcd in {}: run `cargo xtask test`, which downloads it", folder.display());
    program
}

impl EtcdCluster {
    /// Starts members with these additional options. The members accept calls some time after their start.
    pub fn start(members: usize, options: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder is created");
        // All listeners exist at the same time, so that the ports differ.
        let listeners: Vec<_> =
            (0..2 * members).map(|_| TcpListener::bind("127.0.0.1:0").expect("a port is free")).collect();
        let urls: Vec<String> = listeners
            .iter()
            .map(|listener| format!("http://{}", listener.local_addr().expect("the listener is bound")))
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

impl Drop for EtcdCluster {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|member| self.kill(member));
    }
}
