//! Finds and ends processes that the demo started indirectly. A process is found by a folder in its
//! command line. Signals are sent through a pidfd, so that a reused process id cannot affect
//! another process.

use std::{
    fs,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::Path,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// Handle of a process, backed by a pidfd.
#[derive(Debug)]
pub struct Process {
    descriptor: OwnedFd,
}

impl Process {
    /// Sends SIGKILL to the process.
    pub fn kill(&self) {
        // The call fails if the process has already ended.
        let _ = pidfd_send_signal(&self.descriptor, Signal::KILL);
    }

    /// Waits until the process has ended.
    pub fn wait(&self) {
        let mut exit = [PollFd::new(&self.descriptor, PollFlags::IN)];
        // A signal can interrupt the wait. Callers repeat the search until no process is left.
        let _ = poll(&mut exit, None);
    }
}

/// Returns all processes, except this process, with this folder or a path in this folder as an
/// argument.
pub fn find_by_argument_in(folder: &Path) -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
    let others = pids.filter(|pid| *pid != rustix::process::getpid());
    others.filter_map(|pid| open_if_matching(pid, folder)).collect()
}

fn open_if_matching(pid: Pid, folder: &Path) -> Option<Process> {
    // The pidfd is opened before the command line is read, so that both belong to the same process.
    let descriptor = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    let arguments = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
    let matches = arguments
        .split(|byte| *byte == 0)
        .any(|argument| is_in_folder(argument, folder.as_os_str().as_bytes()));
    matches.then_some(Process { descriptor })
}

fn is_in_folder(argument: &[u8], folder: &[u8]) -> bool {
    argument.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::process::ExitStatusExt,
        process::{Command, Stdio},
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn only_processes_with_folder_argument_are_killed() {
        let folder = tempfile::tempdir().unwrap();
        let sleeper = |argument: &Path| {
            let script =
                Command::new("sh").args(["-c", "read forever"]).arg(argument).stdin(Stdio::piped()).spawn();
            script.unwrap()
        };
        let mut matching_child = sleeper(&folder.path().join("host.sock"));
        let mut other_child = sleeper(&folder.path().with_extension("other"));
        // A child process has the command line of its parent until it calls exec, so the search is
        // repeated.
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut found = Vec::new();
        while found.is_empty() && Instant::now() < deadline {
            found = find_by_argument_in(folder.path());
        }
        assert_eq!(found.len(), 1);
        found[0].kill();
        assert_eq!(matching_child.wait().unwrap().signal(), Some(9));
        assert_eq!(other_child.try_wait().unwrap(), None);
        other_child.kill().unwrap();
        other_child.wait().unwrap();
        assert_eq!(find_by_argument_in(folder.path()).len(), 0);
    }
}
