//! VM without a rack. Its kernel, console output and control socket are in a temporary folder.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use tempfile::TempDir;

use crate::rack::programs_dir;

/// Options that give a guest the minimum size of memory.
pub const SMALL_MEMORY_OPTIONS: [&str; 2] = ["--memory", "size=64MiB"];
/// Options that run the VMM as an unprivileged user. Used if the tests run as root.
const UNPRIVILEGED_USER_OPTIONS: [&str; 4] = ["--uid", "65534", "--gid", "65534"];

/// Adds [`UNPRIVILEGED_USER_OPTIONS`] to a VMM command if the tests run as root, because a VMM
/// refuses to run as root.
pub fn confine_command(command: &mut Command) {
    if rustix::process::geteuid().is_root() {
        command.args(UNPRIVILEGED_USER_OPTIONS);
    }
}

/// Folder of one VM. The name of the VM is `v`.
#[derive(Debug)]
pub struct StandaloneVm(TempDir);

impl StandaloneVm {
    /// Creates an empty temporary folder.
    #[allow(clippy::new_without_default, reason = "creates a folder")]
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder is created"))
    }

    /// Returns the path of a file in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file in the folder and returns its path.
    pub fn write_file(&self, name: &str, content: &[u8]) -> PathBuf {
        fs::write(self.path(name), content).expect("the folder is writable");
        self.path(name)
    }

    /// Returns a command that runs a guest. Without other options, the console is a file, and the
    /// VMM runs as an unprivileged user.
    pub fn command(&self, kernel: &[u8], options: &[&str]) -> Command {
        let kernel = self.write_file("kernel", kernel);
        let mut command = Command::new(programs_dir().join("vmm-plugin"));
        command.args(["run", "--vm", "v", "--standalone", "--kernel"]).arg(kernel);
        if !options.contains(&"--serial") {
            command.arg("--serial").arg(format!("file={}", self.path("console").display()));
        }
        if !options.iter().any(|option| ["--uid", "--unconfined"].contains(option)) {
            confine_command(&mut command);
        }
        command.args(options).arg("--run-dir").arg(self.run_dir()).stdin(Stdio::null());
        command
    }

    /// Runs a guest until the guest ends, and returns the output of the VMM.
    pub fn run(&self, kernel: &[u8], options: &[&str]) -> Output {
        self.command(kernel, options).output().expect("vmm-plugin runs")
    }

    /// Returns the console output of the guest so far.
    pub fn console(&self) -> String {
        fs::read_to_string(self.path("console")).unwrap_or_default()
    }

    /// Returns the folder of control sockets.
    pub fn run_dir(&self) -> PathBuf {
        self.path("run")
    }

    /// Runs a command on the control socket, such as `info v` or `stop v`.
    pub fn run_control_command(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(programs_dir().join("vmm-plugin"));
        command.args(arguments).arg("--run-dir").arg(self.run_dir()).stdin(Stdio::null());
        command.output().expect("vmm-plugin runs")
    }

    /// Returns the output of `vmm-plugin info` as JSON.
    pub fn info(&self) -> serde_json::Value {
        let output = self.run_control_command(&["info", "v", "-o", "json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("the output is JSON")
    }

    /// Checks that the VM is not running. A stale control socket may exist.
    pub fn assert_not_running(&self) {
        let output = self.run_control_command(&["info", "v"]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{stderr}");
        assert!(stderr.starts_with("error: VM v is not running: no listener on "), "{stderr}");
    }

    /// Returns whether a control socket exists. The socket may be stale.
    pub fn has_socket(&self) -> bool {
        self.run_dir().join("v.sock").exists()
    }
}
