//! A folder in which guests run by themselves: kernels, consoles and control sockets lie in it, and are gone with it.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use tempfile::TempDir;

use crate::rack::programs;

/// As little memory as a guest may have.
pub const SMALL: [&str; 2] = ["--memory", "size=64MiB"];
/// As root, a VMM becomes this user, which owns nothing.
const NOBODY: [&str; 4] = ["--uid", "65534", "--gid", "65534"];

/// Adds the options that a VMM of this process's user needs to start.
pub fn confine(command: &mut Command) {
    if rustix::process::geteuid().is_root() {
        command.args(NOBODY);
    }
}

/// A folder for one VM, called v, and its VMM.
#[derive(Debug)]
pub struct Place(TempDir);

impl Place {
    /// An empty one.
    #[allow(clippy::new_without_default, reason = "a folder is made")]
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    /// Where something is in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file.
    pub fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        fs::write(self.path(name), content).expect("the folder is ours");
        self.path(name)
    }

    /// A command that runs a guest; its console is a file, and as root it becomes another user, unless the options say otherwise.
    pub fn command(&self, kernel: &[u8], options: &[&str]) -> Command {
        let kernel = self.file("kernel", kernel);
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

    /// Runs a guest to its end.
    pub fn run(&self, kernel: &[u8], options: &[&str]) -> Output {
        self.command(kernel, options).output().expect("it runs")
    }

    /// Returns the guest's console output.
    pub fn console(&self) -> String {
        fs::read_to_string(self.path("console")).unwrap_or_default()
    }

    /// Where control sockets are.
    pub fn run_dir(&self) -> PathBuf {
        self.path("run")
    }

    /// Asks running guests: `info v`, `stop v`.
    pub fn ask(&self, words: &[&str]) -> Output {
        let mut command = Command::new(programs().join("vmm-plugin"));
        command.args(words).arg("--run-dir").arg(self.run_dir()).stdin(Stdio::null());
        command.output().expect("it runs")
    }

    /// Returns the guest's state as JSON.
    pub fn info(&self) -> serde_json::Value {
        let told = self.ask(&["info", "v", "-o", "json"]);
        assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
        serde_json::from_slice(&told.stdout).expect("it is JSON")
    }

    /// Checks that the VM does not run, whether its control socket is still there or not.
    pub fn assert_not_running(&self) {
        let told = self.ask(&["info", "v"]);
        let said = String::from_utf8_lossy(&told.stderr);
        assert_eq!(told.status.code(), Some(3), "{said}");
        assert!(said.starts_with("error: VM v is not running: no listener on "), "{said}");
    }

    /// Whether there is a control socket, alive or dead.
    pub fn has_socket(&self) -> bool {
        self.run_dir().join("v.sock").exists()
    }
}
