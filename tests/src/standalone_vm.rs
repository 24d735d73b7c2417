//! A VM without a rack, in a temporary folder with its kernel, console and control socket.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use tempfile::TempDir;

use crate::rack::programs;

/// Option for the minimum memory of a guest.
pub const SMALL_MEMORY: [&str; 2] = ["--memory", "size=64MiB"];
/// Unprivileged user of the VMM if the tests run as root.
const NOBODY: [&str; 4] = ["--uid", "65534", "--gid", "65534"];

/// Adds the options that a VMM requires if this process is root.
pub fn confine(command: &mut Command) {
    if rustix::process::geteuid().is_root() {
        command.args(NOBODY);
    }
}

/// Folder of one VM, named `v`.
#[derive(Debug)]
pub struct StandaloneVm(TempDir);

impl StandaloneVm {
    /// Creates an empty folder.
    #[allow(clippy::new_without_default, reason = "creates a folder")]
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder is created"))
    }

    /// Returns the path of a file in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file.
    pub fn write_file(&self, name: &str, content: &[u8]) -> PathBuf {
        fs::write(self.path(name), content).expect("the folder is writable");
        self.path(name)
    }

    /// Returns a command that runs a guest. Unless the options say otherwise, its console is a
    /// file, and the VMM drops root.
    pub fn command(&self, kernel: &[u8], options: &[&str]) -> Command {
        let kernel = self.write_file("kernel", kernel);
        let mut command = Command::new(programs().join("vmm-plugin"));
        command.args(["run", "--vm", "v", "--standalone", "--kernel"]).arg(kernel);
        if !options.contains(&"--serial") {
            command.arg("--serial").arg(format!("file={}", self.path("console").display()));
        }
        if !options.iter().any(|option| ["--uid", "--unconfined"].contains(option)) {
            confine(&mut command);
        }
        command.args(options).arg("--run-dir").arg(self.run_dir()).stdin(Stdio::null());
        command
    }

    /// Runs a guest until it ends.
    pub fn run(&self, kernel: &[u8], options: &[&str]) -> Output {
        self.command(kernel, options).output().expect("vmm-plugin runs")
    }

    /// Returns the guest's console output.
    pub fn console(&self) -> String {
        fs::read_to_string(self.path("console")).unwrap_or_default()
    }

    /// Returns the folder of control sockets.
    pub fn run_dir(&self) -> PathBuf {
        self.path("run")
    }

    /// Runs a command on the control socket, such as `info v` or `stop v`.
    pub fn control(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(programs().join("vmm-plugin"));
        command.args(arguments).arg("--run-dir").arg(self.run_dir()).stdin(Stdio::null());
        command.output().expect("vmm-plugin runs")
    }

    /// Returns the guest's state as JSON.
    pub fn info(&self) -> serde_json::Value {
        let output = self.control(&["info", "v", "-o", "json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("the output is JSON")
    }

    /// Asserts that the VM is not running. A stale control socket may exist.
    pub fn assert_not_running(&self) {
        let output = self.control(&["info", "v"]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{stderr}");
        assert!(stderr.starts_with("error: VM v is not running: no listener on "), "{stderr}");
    }

    /// Returns whether a control socket exists, possibly a stale one.
    pub fn has_socket(&self) -> bool {
        self.run_dir().join("v.sock").exists()
    }
}
