//! Stops a process, and reads the CPU time and the resident memory of a process.

use std::{fs, time::Duration};

use local_rack::Process;
use rustix::process::Signal;

use crate::{failure::Failure, loopback::wait_until};

/// Maximum time from SIGTERM to the end of a process.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// Sends SIGTERM and waits until the process ends.
///
/// # Errors
/// [`Failure`] if the process does not end within 30 s. The process is then killed.
pub async fn stop(mut process: Process) -> Result<(), Failure> {
    process.signal(Signal::TERM);
    wait_until("the end of a process", STOP_TIMEOUT, async || {
        let status = process.exit_status()?;
        Ok(status.map(drop).ok_or_else(|| "the process still runs".to_owned()))
    })
    .await
}

/// Returns the resident memory of a process in bytes.
///
/// # Errors
/// [`Failure`] if the process has ended.
pub fn resident_bytes(pid: u32) -> Result<u64, Failure> {
    let path = format!("/proc/{pid}/statm");
    let statm = fs::read_to_string(&path).map_err(Failure::file_error("read", &path))?;
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages
        .map(|pages| pages * rustix::param::page_size() as u64)
        .ok_or_else(|| Failure::UnexpectedReply { subject: path, reply: statm })
}

/// Returns the CPU time of the running threads of a process. Threads that have ended are not
/// counted.
pub fn cpu_time(process: &Process) -> Duration {
    sum_thread_cpu_times(&format!("/proc/{}/task", process.pid()))
}

/// Returns the CPU time of the running threads of this process. Threads that have ended are not
/// counted.
pub fn own_cpu_time() -> Duration {
    sum_thread_cpu_times("/proc/self/task")
}

/// Returns the CPU time of all threads in the folder `/proc/PID/task`, or 0 if the process has
/// ended. Reads `schedstat`, which has nanoseconds: a clock tick in `stat` is longer than many
/// requests.
fn sum_thread_cpu_times(threads: &str) -> Duration {
    let threads = fs::read_dir(threads).into_iter().flatten().filter_map(Result::ok);
    let stats = threads.filter_map(|thread| fs::read_to_string(thread.path().join("schedstat")).ok());
    stats.filter_map(|line| parse_cpu_time(&line)).sum()
}

fn parse_cpu_time(schedstat: &str) -> Option<Duration> {
    schedstat.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use std::{path::Path, process::Command};

    use super::*;

    #[tokio::test]
    async fn stopped_process_has_ended() {
        let logs = tempfile::tempdir().unwrap();
        let mut command = Command::new("sleep");
        let process = Process::start("sleeper", command.arg("600"), logs.path().join("log")).unwrap();
        let proc = Path::new("/proc").join(process.pid().to_string());
        stop(process).await.unwrap();
        assert!(!proc.exists());
    }

    #[test]
    fn cpu_time_is_first_number_of_schedstat() {
        assert_eq!(parse_cpu_time("1170323 5867271 3\n"), Some(Duration::from_nanos(1_170_323)));
        assert_eq!(parse_cpu_time(""), None);
    }

    #[test]
    fn cpu_time_grows_with_work() {
        let before = own_cpu_time();
        let has_grown = (0..10_000_000).any(|_| {
            std::hint::black_box([1_u8; 4096]);
            own_cpu_time() > before
        });
        assert!(has_grown);
    }
}
