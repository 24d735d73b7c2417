//! Processes that the demo started indirectly. They are found by a folder in their command line,
//! and signalled by pidfd, so that no other process can be hit.

use std::{
    fs,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::Path,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// Handle of a process.
#[derive(Debug)]
pub struct Process {
    descriptor: OwnedFd,
}

impl Process {
    /// Sends SIGKILL.
    pub fn kill(&self) {
        // It may have ended meanwhile; the descriptor never refers to another process.
        let _ = pidfd_send_signal(&self.descriptor, Signal::KILL);
    }

    /// Waits until the process has ended.
    pub fn wait(&self) {
        let mut exit = [PollFd::new(&self.descriptor, PollFlags::IN)];
        // A signal can interrupt it; callers repeat the search until no process is left.
        let _ = poll(&mut exit, None);
    }
}

/// Returns all other processes with an argument that is this folder or a path in it.
pub fn with_argument_in(folder: &Path) -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
    let others = pids.filter(|pid| *pid != rustix::process::getpid());
    others.filter_map(|pid| matching(pid, folder)).collect()
}

fn matching(pid: Pid, folder: &Path) -> Option<Process> {
    // The descriptor is opened first, so that it refers to this process or none.
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
        // A process exists before its command line is set.
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut found = Vec::new();
        while found.is_empty() && Instant::now() < deadline {
            found = with_argument_in(folder.path());
        }
        assert_eq!(found.len(), 1);
        found[0].kill();
        assert_eq!(matching_child.wait().unwrap().signal(), Some(9));
        assert_eq!(other_child.try_wait().unwrap(), None);
        other_child.kill().unwrap();
        other_child.wait().unwrap();
        assert_eq!(with_argument_in(folder.path()).len(), 0);
    }
}
