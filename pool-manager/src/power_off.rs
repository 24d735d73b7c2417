//! Runs the operator's fence command: in a process group of its own, with a deadline, and with its
//! output. Only exit code 0 confirms that the machine is off. The caller decides which machine to
//! stop.

use std::{io, process::ExitStatus, process::Stdio, time::Duration};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::AsyncReadExt as _,
    net::unix::pipe,
    process::{Child, Command},
    time::timeout,
};
use units::{Ns, limits::FENCE_OUTPUT_BYTES_MAX};

/// Placeholder for the host's name.
pub const HOST: &str = "{host}";
/// Time for a killed process to end.
const KILLED_WITHIN: Duration = Duration::from_secs(5);

/// Fence command with its deadline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopCommand {
    /// Program and arguments, at least one word; [`HOST`] is replaced in each.
    pub words: Vec<String>,
    /// Deadline after which it is killed.
    pub within: Ns,
}

/// Stops a host's machine.
///
/// # Errors
/// The reason for an operator why the machine may not be off.
pub async fn stop(command: &StopCommand, host: &str) -> Result<(), String> {
    let words: Vec<String> = command.words.iter().map(|word| word.replace(HOST, host)).collect();
    let line = words.join(" ");
    tracing::warn!(host, command = line, "machine is being stopped");
    let (ended, said) = run(&words, command.within).await;
    let why = match ended {
        Ok(Some(status)) if status.success() => {
            tracing::warn!(host, said, "machine stopped");
            return Ok(());
        }
        Ok(Some(status)) => format!("ended with {status}"),
        Ok(None) => format!("took longer than {} and was killed", command.within),
        Err(errno) => format!("could not be run: {errno}"),
    };
    tracing::error!(host, why, said, "machine not stopped");
    let said = if said.is_empty() { said } else { format!(", saying {said:?}") };
    Err(format!("`{line}` {why}{said}"))
}

/// Exit status, `None` if it was killed, and the beginning of its output.
async fn run(words: &[String], within: Ns) -> (io::Result<Option<ExitStatus>>, String) {
    let mut said = Vec::new();
    let ended = match start(words) {
        Ok((child, output)) => end(child, output, &mut said, within).await,
        Err(errno) => Err(errno),
    };
    (ended, String::from_utf8_lossy(&said).trim().to_owned())
}

fn start(words: &[String]) -> io::Result<(Child, pipe::Receiver)> {
    let (output, said) = io::pipe()?;
    let (program, arguments) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said);
    let child = command.process_group(0).kill_on_drop(true).spawn()?;
    Ok((child, pipe::Receiver::from_owned_fd(output.into())?))
}

async fn end(
    mut child: Child,
    output: pipe::Receiver,
    said: &mut Vec<u8>,
    within: Ns,
) -> io::Result<Option<ExitStatus>> {
    match timeout(within.as_duration(), listen(&mut child, output, said)).await {
        Ok(ended) => ended.map(Some),
        Err(_) => kill(child).await.map(|()| None),
    }
}

/// Waits for its end. Children that it leaves behind are not awaited.
async fn listen(child: &mut Child, mut output: pipe::Receiver, said: &mut Vec<u8>) -> io::Result<ExitStatus> {
    let mut heard = [0; 1024];
    loop {
        tokio::select! {
            biased;
            read = output.read(&mut heard) => match read? {
                0 => return child.wait().await,
                n => keep(said, &heard[..n]),
            },
            ended = child.wait() => {
                while let Ok(n @ 1..) = output.try_read(&mut heard) {
                    keep(said, &heard[..n]);
                }
                return ended;
            }
        }
    }
}

fn keep(said: &mut Vec<u8>, heard: &[u8]) {
    let room = FENCE_OUTPUT_BYTES_MAX.saturating_sub(said.len()).min(heard.len());
    said.extend_from_slice(&heard[..room]);
}

/// Kills it with all processes that it started.
async fn kill(mut child: Child) -> io::Result<()> {
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid {
        kill_process_group(pid, Signal::KILL)?;
    }
    let _ = timeout(KILLED_WITHIN, child.wait()).await; // the runtime keeps waiting for it
    Ok(())
}

#[cfg(test)]
mod tests {
    use rustix::{
        event::{PollFd, PollFlags, poll},
        process::{PidfdFlags, pidfd_open},
    };

    use super::*;

    async fn outcome(words: &[&str], within: Ns) -> Result<(), String> {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        stop(&StopCommand { words, within }, "h1").await
    }

    const LONG: Ns = Ns::secs(60);

    #[tokio::test]
    async fn only_an_exit_code_of_0_says_that_a_machine_is_off() {
        assert_eq!(outcome(&["true", "{host}"], LONG).await, Ok(()));
        let why = outcome(&["sh", "-c", "echo no way to {host}; echo really >&2; exit 3"], LONG).await;
        let words = "`sh -c echo no way to h1; echo really >&2; exit 3` ended with exit status: 3";
        assert_eq!(why, Err(format!("{words}, saying \"no way to h1\\nreally\"")));
        let why = outcome(&["/nonexistent", "{host}"], LONG).await.unwrap_err();
        assert!(why.starts_with("`/nonexistent h1` could not be run: No such file"), "{why}");
    }

    #[tokio::test]
    async fn a_command_that_hangs_is_killed_with_all_that_it_started() {
        let directory = tempfile::tempdir().unwrap();
        let pids = directory.path().join("pids");
        let script = format!("sleep 600 & echo $! $$ > {}; echo {{host}}; wait", pids.display());
        let why = outcome(&["sh", "-c", &script], Ns::ms(500)).await.unwrap_err();
        assert!(why.ends_with("took longer than 500ms and was killed, saying \"h1\""), "{why}");
        for pid in std::fs::read_to_string(pids).unwrap().split_whitespace() {
            let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
            // A killed process may take a moment to end.
            let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
            let within = Ns::secs(10).as_duration().try_into().unwrap();
            let dead = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&within)).unwrap();
            assert_eq!(dead, 1, "{pid:?} lives");
        }
    }

    #[tokio::test]
    async fn what_a_command_leaves_running_is_not_waited_for_and_what_it_says_is_bounded() {
        assert_eq!(outcome(&["sh", "-c", "sleep 20 & true {host}"], LONG).await, Ok(()));
        let why = outcome(&["sh", "-c", "yes {host} | head -c 1000000; false"], LONG).await.unwrap_err();
        assert!(why.len() < 2 * FENCE_OUTPUT_BYTES_MAX, "{} bytes", why.len());
    }
}
