//! Process that does not outlive its owner: when dropped, it is killed by its pid and waited for.
//! Its output goes to a log file.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child as Process, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{failure::Failure, loopback::until};

/// How long a program may take to end by itself after SIGTERM.
const END_WITHIN: Duration = Duration::from_secs(30);
/// How many lines of a log are worth reading in an error.
const LOG_LINES_SHOWN: usize = 20;

/// One running process.
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
        let out =
            File::options().create(true).append(true).open(&log).map_err(Failure::file("open", &log))?;
        let err = out.try_clone().map_err(Failure::file("share", &log))?;
        let process = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .map_err(|source| Failure::Start { program: command.get_program().into(), source })?;
        Ok(Self { name: name.to_owned(), process, log })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the reason why it has ended, if it has.
    ///
    /// # Errors
    /// It has ended.
    pub fn still_runs(&mut self) -> Result<(), Failure> {
        let ended = self.process.try_wait().map_err(Failure::file("wait for", &self.name))?;
        match ended {
            None => Ok(()),
            Some(status) => Err(Failure::Ended { name: self.name.clone(), status, log: self.last_words() }),
        }
    }

    /// Asks it to end (SIGTERM) and waits until it has.
    ///
    /// # Errors
    /// It does not end in time. It is killed then.
    pub async fn stop(mut self) -> Result<(), Failure> {
        self.signal(Signal::TERM);
        until(&format!("the end of {}", self.name), END_WITHIN, async || {
            match self.process.try_wait().map_err(Failure::file("wait for", &self.name))? {
                Some(_) => Ok(Ok(())),
                None => Ok(Err("it still runs".to_owned())),
            }
        })
        .await
    }

    /// Ends it as a power loss would (SIGKILL) and waits until it is gone.
    pub fn kill(self) {
        drop(self);
    }

    /// Processor time of its threads so far. Threads that have ended do not count.
    pub fn cpu(&self) -> Duration {
        cpu_of(&format!("/proc/{}/task", self.process.id()))
    }

    /// The end of its log.
    pub fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_else(|error| format!("({error})"));
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n")
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw) {
            // It may have ended just now without having been waited for, so the pid is not reused.
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail only if it has ended and was waited for: then there is nothing left to do.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Processor time of this process's threads so far. Threads that have ended do not count.
pub fn own_cpu() -> Duration {
    cpu_of("/proc/self/task")
}

/// Processor time of all threads in a `/proc/PID/task`, in nanoseconds as the scheduler counts it: a tick of
/// `/proc/PID/stat` is longer than many requests. Zero once the process is gone.
fn cpu_of(threads: &str) -> Duration {
    let threads = fs::read_dir(threads).into_iter().flatten().filter_map(Result::ok);
    let stats = threads.filter_map(|thread| fs::read_to_string(thread.path().join("schedstat")).ok());
    stats.filter_map(|line| cpu_in(&line)).sum()
}

fn cpu_in(schedstat: &str) -> Option<Duration> {
    schedstat.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(logs: &Path) -> Child {
        Child::start("sleeper", Command::new("sleep").arg("600"), logs).unwrap()
    }

    #[test]
    fn a_dropped_process_is_gone() {
        let logs = tempfile::tempdir().unwrap();
        let child = sleeper(logs.path());
        let proc = PathBuf::from(format!("/proc/{}", child.pid()));
        assert!(proc.exists());
        drop(child);
        assert!(!proc.exists());
    }

    #[tokio::test]
    async fn a_stopped_process_is_gone() {
        let logs = tempfile::tempdir().unwrap();
        let child = sleeper(logs.path());
        let proc = PathBuf::from(format!("/proc/{}", child.pid()));
        child.stop().await.unwrap();
        assert!(!proc.exists());
    }

    #[tokio::test]
    async fn an_early_end_is_told_with_its_last_words() {
        let logs = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        let mut child =
            Child::start("talker", command.args(["-c", "echo no disk; exit 3"]), logs.path()).unwrap();
        let ended = until("an end", END_WITHIN, async || match child.still_runs() {
            Ok(()) => Ok(Err("runs".to_owned())),
            Err(failure) => Ok(Ok(failure)),
        });
        let Failure::Ended { status, log, .. } = ended.await.unwrap() else { panic!("not an end") };
        assert_eq!((status.code(), log.as_str()), (Some(3), "no disk"));
    }

    #[test]
    fn processor_time_is_the_first_number_of_schedstat() {
        assert_eq!(cpu_in("1170323 5867271 3\n"), Some(Duration::from_nanos(1_170_323)));
        assert_eq!(cpu_in(""), None);
    }

    #[test]
    fn processor_time_grows_with_work() {
        let before = own_cpu();
        let grew = (0..10_000_000).any(|_| {
            std::hint::black_box([1_u8; 4096]);
            own_cpu() > before
        });
        assert!(grew);
    }
}
