//! Limit of open file descriptors of the manager's process.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Time limit for the start of the manager.
const TIMEOUT: Duration = Duration::from_secs(60);
const RACK: &str = "[manager]\nstore = \"store\"\nlisten = \"unix:manager.sock\"\n\
    [[emc]]\nname = \"emc0\"\nslices = 1\ndriver = \"emulated\"\npath = \"emc0\"\n\
    [[host]]\nname = \"h0\"\ncores = 1\nlocal_mib = 1\nemcs = [\"emc0\"]\n";

/// Process that is killed when this value is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill(); // fails only if the process has ended
        let _ = self.0.wait();
    }
}

/// Waits until the manager listens on its socket.
fn wait_for_socket(manager: &mut Process, socket: &Path) {
    let start = Instant::now();
    while !socket.exists() {
        assert_eq!(
            manager.0.try_wait().expect("the state of a child can be read"),
            None,
            "the manager ended"
        );
        assert!(start.elapsed() < TIMEOUT, "the manager does not listen");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the soft and the hard limit of open files of a process.
fn open_file_limits(pid: u32) -> [String; 2] {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("the process runs");
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let mut values = line.expect("the file has this line").split_whitespace().map(str::to_owned);
    std::array::from_fn(|_| values.next().expect("the line has both limits"))
}

#[test]
fn manager_raises_its_limit_of_open_files() {
    let folder = tempfile::tempdir().unwrap();
    let (rack_toml, log) = (folder.path().join("rack.toml"), folder.path().join("log"));
    fs::write(&rack_toml, RACK).unwrap();
    let program = env!("CARGO_BIN_EXE_pool-manager");
    let init = Command::new(program).args(["init", "--config"]).arg(&rack_toml).output().unwrap();
    assert!(init.status.success(), "{init:?}");
    let mut serve = Command::new("sh");
    serve.args(["-c", "ulimit -Sn 256 && exec \"$0\" serve --config \"$1\"", program]).arg(&rack_toml);
    serve.env("RUST_LOG", "debug").stderr(fs::File::create(&log).unwrap()).stdout(Stdio::null());
    let mut manager = Process(serve.spawn().unwrap());
    wait_for_socket(&mut manager, &folder.path().join("manager.sock"));
    let [soft, hard] = open_file_limits(manager.0.id());
    assert_eq!(soft, hard);
    let log = fs::read_to_string(&log).unwrap();
    assert!(log.contains("raised the limit of open file descriptors"), "{log}");
}
