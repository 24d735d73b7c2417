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

    /// A command that runs a guest; its console is a file unless the options say where it is.
    pub fn command(&self, kernel: &[u8], options: &[&str]) -> Command {
        let kernel = self.file("kernel", kernel);
        let mut command = Command::new(programs().join("vmm-plugin"));
        command.args(["run", "--vm", "v", "--standalone", "--kernel"]).arg(kernel);
        if !options.contains(&"--serial") {
            command.arg("--serial").arg(format!("file={}", self.path("console").display()));
        }
        command.args(options).arg("--run-dir").arg(self.run_dir()).stdin(Stdio::null());
        command
    }

    /// Runs a guest to its end.
    pub fn run(&self, kernel: &[u8], options: &[&str]) -> Output {
        self.command(kernel, options).output().expect("it runs")
    }

    /// What the guest has said.
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

    /// What a guest tells programs of itself.
    pub fn info(&self) -> serde_json::Value {
        let told = self.ask(&["info", "v", "-o", "json"]);
        assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
        serde_json::from_slice(&told.stdout).expect("it is JSON")
    }

    /// Names of control sockets that are there.
    pub fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.run_dir()).into_iter().flatten();
        entries
            .map(|entry| entry.expect("the folder is ours").file_name().into_string().expect("a name"))
            .collect()
    }
}
