//! Child process that is killed by its pid and waited for when dropped. Its output goes to a log
//! file.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child as Process, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{failure::Failure, loopback::wait_until};

/// Time limit for a program to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// Lines of a log in an error.
const LOG_LINES_SHOWN: usize = 20;

/// Running process.
#[derive(Debug)]
pub struct Child {
    name: String,
    process: Process,
    log: PathBuf,
}

impl Child {
    /// Starts a program; its log is `LOGS/NAME.log`, appended to if the program ran before.
    ///
    /// # Errors
    /// The log cannot be written or the program cannot be started.
    pub fn start(name: &str, command: &mut Command, logs: &Path) -> Result<Self, Failure> {
        let log = logs.join(format!("{name}.log"));
        let stdout =
            File::options().create(true).append(true).open(&log).map_err(Failure::file("open", &log))?;
        let stderr = stdout.try_clone().map_err(Failure::file("share", &log))?;
        let process = command
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
            .map_err(|source| Failure::Start { program: command.get_program().into(), source })?;
        Ok(Self { name: name.to_owned(), process, log })
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Checks that the process runs.
    ///
    /// # Errors
    /// [`Failure::Ended`] if the process has ended.
    pub fn check_running(&mut self) -> Result<(), Failure> {
        let status = self.process.try_wait().map_err(Failure::file("wait for", &self.name))?;
        match status {
            None => Ok(()),
            Some(status) => Err(Failure::Ended { name: self.name.clone(), status, log: self.log_tail() }),
        }
    }

    /// Sends SIGTERM and waits until the process ends.
    ///
    /// # Errors
    /// It does not end in time, and is killed.
    pub async fn stop(mut self) -> Result<(), Failure> {
        self.signal(Signal::TERM);
        wait_until(&format!("the end of {}", self.name), STOP_TIMEOUT, async || {
            match self.process.try_wait().map_err(Failure::file("wait for", &self.name))? {
                Some(_) => Ok(Ok(())),
                None => Ok(Err("the process still runs".to_owned())),
            }
        })
        .await
    }

    /// Sends SIGKILL and waits until the process has ended.
    pub fn kill(self) {
        drop(self);
    }

    /// Returns the CPU time of the running threads. Threads that have ended do not count.
    pub fn cpu(&self) -> Duration {
        cpu_of(&format!("/proc/{}/task", self.process.id()))
    }

    /// Returns the last lines of the log.
    pub fn log_tail(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_else(|error| format!("({error})"));
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n")
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw) {
            // The process was not waited for, so the pid is not reused.
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail only if the process has ended and was waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the CPU time of the running threads of this process. Threads that have ended do not
/// count.
pub fn own_cpu() -> Duration {
    cpu_of("/proc/self/task")
}

/// Returns the CPU time of all threads in a `/proc/PID/task`, with the nanoseconds of the
/// scheduler: a tick of `/proc/PID/stat` is longer than many requests. Zero once the process has
/// ended.
fn cpu_of(threads: &str) -> Duration {
    let threads = fs::read_dir(threads).into_iter().flatten().filter_map(Result::ok);
    let stats = threads.filter_map(|thread| fs::read_to_string(thread.path().join("schedstat")).ok());
    stats.filter_map(|line| parse_cpu(&line)).sum()
}

fn parse_cpu(schedstat: &str) -> Option<Duration> {
    schedstat.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(logs: &Path) -> Child {
        Child::start("sleeper", Command::new("sleep").arg("600"), logs).unwrap()
    }

    #[test]
    fn dropped_process_is_killed() {
        let logs = tempfile::tempdir().unwrap();
        let child = sleeper(logs.path());
        let proc = PathBuf::from(format!("/proc/{}", child.pid()));
        assert!(proc.exists());
        drop(child);
        assert!(!proc.exists());
    }

    #[tokio::test]
    async fn stopped_process_has_ended() {
        let logs = tempfile::tempdir().unwrap();
        let child = sleeper(logs.path());
        let proc = PathBuf::from(format!("/proc/{}", child.pid()));
        child.stop().await.unwrap();
        assert!(!proc.exists());
    }

    #[tokio::test]
    async fn unexpected_end_is_reported_with_log_tail() {
        let logs = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        let mut child =
            Child::start("talker", command.args(["-c", "echo no disk; exit 3"]), logs.path()).unwrap();
        let status = wait_until("an end", STOP_TIMEOUT, async || match child.check_running() {
            Ok(()) => Ok(Err("runs".to_owned())),
            Err(failure) => Ok(Ok(failure)),
        });
        let Failure::Ended { status, log, .. } = status.await.unwrap() else {
            panic!("expected an unexpected end")
        };
        assert_eq!((status.code(), log.as_str()), (Some(3), "no disk"));
    }

    #[test]
    fn cpu_time_is_first_number_of_schedstat() {
        assert_eq!(parse_cpu("1170323 5867271 3\n"), Some(Duration::from_nanos(1_170_323)));
        assert_eq!(parse_cpu(""), None);
    }

    #[test]
    fn cpu_time_grows_with_work() {
        let before = own_cpu();
        let has_grown = (0..10_000_000).any(|_| {
            std::hint::black_box([1_u8; 4096]);
            own_cpu() > before
        });
        assert!(has_grown);
    }
}
