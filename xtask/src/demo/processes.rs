//! Processes that this demo started indirectly, found by the folder their command line names and ended by descriptor, so
//! that no other process can be meant.

use std::{
    fs,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::Path,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// A process that was alive when it was found.
#[derive(Debug)]
pub struct Process {
    descriptor: OwnedFd,
}

impl Process {
    /// Ends it as a power loss would.
    pub fn kill(&self) {
        // It may have ended by itself meanwhile; the descriptor is no other process's then.
        let _ = pidfd_send_signal(&self.descriptor, Signal::KILL);
    }

    /// Waits until the process has ended.
    pub fn wait(&self) {
        let mut gone = [PollFd::new(&self.descriptor, PollFlags::IN)];
        // Interrupted by a signal it returns early; callers that need certainty repeat it.
        let _ = poll(&mut gone, None);
    }
}

/// Every process but this one with an argument that is this folder or lies in it.
pub fn naming(folder: &Path) -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
    let others = pids.filter(|pid| *pid != rustix::process::getpid());
    others.filter_map(|pid| named(pid, folder)).collect()
}

fn named(pid: Pid, folder: &Path) -> Option<Process> {
    // The descriptor is opened first, so that it refers to this process or none.
    let descriptor = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    let words = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
    let here = words.split(|byte| *byte == 0).any(|word| lies_in(word, folder.as_os_str().as_bytes()));
    here.then_some(Process { descriptor })
}

fn lies_in(word: &[u8], folder: &[u8]) -> bool {
    word.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
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
    fn only_a_process_that_names_the_folder_is_found_and_ended() {
        let folder = tempfile::tempdir().unwrap();
        let sleeper = |word: &Path| {
            let script =
                Command::new("sh").args(["-c", "read forever"]).arg(word).stdin(Stdio::piped()).spawn();
            script.unwrap()
        };
        let mut meant = sleeper(&folder.path().join("host.sock"));
        let mut other = sleeper(&folder.path().with_extension("other"));
        // A process is there a moment before its command line is.
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut found = Vec::new();
        while found.is_empty() && Instant::now() < deadline {
            found = naming(folder.path());
        }
        assert_eq!(found.len(), 1);
        found[0].kill();
        assert_eq!(meant.wait().unwrap().signal(), Some(9));
        assert_eq!(other.try_wait().unwrap(), None);
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(naming(folder.path()).len(), 0);
    }
}
