//! Child process with a log file, killed when its handle is dropped.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};

/// Number of lines at the end of a log that an error message contains.
const LOG_TAIL_LINES: usize = 20;

/// Error of starting or waiting for a process.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The log of the process cannot be opened.
    #[error("cannot open {}", path.display())]
    Log {
        /// Path of the log.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The program cannot be started.
    #[error("cannot start {}", program.display())]
    Start {
        /// Path of the program.
        program: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The exit status of the process cannot be read.
    #[error("cannot wait for {name}")]
    Wait {
        /// Name of the process.
        name: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The process ended although it should still run.
    #[error("{name} ended ({status}); the end of its log:\n{log}")]
    Ended {
        /// Name of the process.
        name: String,
        /// Exit status of the process.
        status: ExitStatus,
        /// Last lines of the log of the process.
        log: String,
    },
}

/// Handle of a child process. Dropping the handle kills the process and waits for its end.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a program without standard input, and appends its output to the file `log`.
    ///
    /// # Errors
    /// [`ProcessError::Log`] if the log cannot be opened, [`ProcessError::Start`] if the program
    /// cannot be started.
    pub fn start(name: &str, command: &mut Command, log: PathBuf) -> Result<Self, ProcessError> {
        let output = File::options().create(true).append(true).open(&log);
        let output = output.and_then(|file| Ok((file.try_clone()?, file)));
        let (stdout, stderr) = match output {
            Ok(files) => files,
            Err(source) => return Err(ProcessError::Log { path: log, source }),
        };
        let child = command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn();
        let child =
            child.map_err(|source| ProcessError::Start { program: command.get_program().into(), source })?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// Returns the process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the path of the log.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns the exit status of the process, or `None` while the process runs.
    ///
    /// # Errors
    /// [`ProcessError::Wait`] if the exit status cannot be read.
    pub fn exit_status(&mut self) -> Result<Option<ExitStatus>, ProcessError> {
        self.child.try_wait().map_err(|source| ProcessError::Wait { name: self.name.clone(), source })
    }

    /// Waits for the end of the process and returns its exit status.
    ///
    /// # Errors
    /// [`ProcessError::Wait`] if the exit status cannot be read.
    pub fn wait(&mut self) -> Result<ExitStatus, ProcessError> {
        self.child.wait().map_err(|source| ProcessError::Wait { name: self.name.clone(), source })
    }

    /// Checks that the process runs.
    ///
    /// # Errors
    /// [`ProcessError::Ended`] if the process has ended, [`ProcessError::Wait`] if its exit status
    /// cannot be read.
    pub fn check_running(&mut self) -> Result<(), ProcessError> {
        match self.exit_status()? {
            None => Ok(()),
            Some(status) => {
                Err(ProcessError::Ended { name: self.name.clone(), status, log: self.log_tail() })
            }
        }
    }

    /// Sends a signal to the process. Does nothing if the process has ended.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // The signal cannot reach another process: the kernel does not reuse the PID of a child
            // before the parent has waited for it. An error means that the process has ended.
            let _ = kill_process(pid, signal);
        }
    }

    /// Kills the process and waits for its end.
    pub fn kill(self) {
        drop(self);
    }

    /// Returns the last lines of the log, or the error of reading it in parentheses.
    pub fn log_tail(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_else(|error| format!("({error})"));
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both calls fail only if the process has already ended and its status was read.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn killed_process_does_not_exist_afterwards() {
        let logs = tempfile::tempdir().unwrap();
        let mut command = Command::new("sleep");
        let process = Process::start("sleeper", command.arg("600"), logs.path().join("log")).unwrap();
        let proc = Path::new("/proc").join(process.pid().to_string());
        assert!(proc.exists());
        process.kill();
        assert!(!proc.exists());
    }

    #[test]
    fn ended_process_is_reported_with_its_log() {
        let logs = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no disk; exit 3"]);
        let mut process = Process::start("talker", &mut command, logs.path().join("log")).unwrap();
        process.wait().unwrap();
        let error = process.check_running().unwrap_err();
        assert_eq!(error.to_string(), "talker ended (exit status: 3); the end of its log:\nno disk");
    }

    #[test]
    fn error_for_missing_program_contains_its_path() {
        let logs = tempfile::tempdir().unwrap();
        let missing = Process::start("x", &mut Command::new("/nowhere/x"), logs.path().join("log"));
        assert_eq!(missing.unwrap_err().to_string(), "cannot start /nowhere/x");
    }
}
