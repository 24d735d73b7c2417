//! A process that does not outlive its owner: dropped, it is killed by its own pid and waited for. What it says goes to a
//! log file. It knows nothing of what the process does.

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

    /// Says why it is gone, if it is gone.
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

    /// Time on a processor so far, its threads together.
    pub fn cpu(&self) -> Duration {
        cpu_of(&format!("/proc/{}/stat", self.process.id()))
    }

    /// The end of its log.
    pub fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_else(|error| format!("({error})"));
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n")
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw) {
            // It may have ended just now, and has not been waited for, so the pid is nobody else's.
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

/// Time of this process on a processor so far.
pub fn own_cpu() -> Duration {
    cpu_of("/proc/self/stat")
}

/// User and system time in a `/proc/PID/stat`; zero once the process is gone.
fn cpu_of(stat: &str) -> Duration {
    fs::read_to_string(stat).ok().and_then(|line| cpu_in(&line)).unwrap_or_default()
}

fn cpu_in(line: &str) -> Option<Duration> {
    // The second field is the program's name in parentheses, which may hold spaces.
    let mut fields = line.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(Duration::from_millis((user + system) * 1000 / rustix::param::clock_ticks_per_second()))
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
    fn processor_time_is_read_past_a_name_with_spaces() {
        let line = "7 (a b) c) S 1 1 1 0 -1 0 0 0 0 0 150 50 0 0 20 0";
        assert_eq!(
            cpu_in(line),
            Some(Duration::from_millis(200_000 / rustix::param::clock_ticks_per_second()))
        );
    }
}
