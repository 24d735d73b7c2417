//! Runs the operator's fence command in a new process group, with a deadline, and captures its
//! output. Only exit code 0 confirms that the host is powered off. The caller decides which host to
//! fence.

use std::{io, process::ExitStatus, process::Stdio, time::Duration};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::AsyncReadExt as _,
    net::unix::pipe,
    process::{Child, Command},
    time::timeout,
};
use units::{FencingToken, Ns, limits::FENCE_OUTPUT_BYTES_MAX};

/// Placeholder for the host's name in the fence command.
pub const HOST_PLACEHOLDER: &str = "{host}";
/// Environment variable of the fence command with the fencing token of the manager. A device that stores the highest
/// token can reject a command of a manager that another one has replaced.
pub const TOKEN_VARIABLE: &str = "TARN_FENCING_TOKEN";
/// Maximum wait for a killed process to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Command that powers off a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FenceCommand {
    /// Program and arguments. [`HOST_PLACEHOLDER`] in them is replaced by the host's name.
    pub command: Vec<String>,
    /// Time limit after which the command is killed.
    pub within: Ns,
}

/// Runs the fence command for a host, and waits until it ends or is killed. The environment variable
/// [`TOKEN_VARIABLE`] contains the fencing token of the manager.
///
/// # Errors
/// Returns the reason, for an operator, why the host may still be running.
pub async fn run(command: &FenceCommand, host: &str, token: FencingToken) -> Result<(), String> {
    let argv: Vec<String> =
        command.command.iter().map(|argument| argument.replace(HOST_PLACEHOLDER, host)).collect();
    let command_line = argv.join(" ");
    tracing::warn!(host, command = command_line, "running fence command");
    let (status, output) = execute(&argv, token, command.within).await;
    let problem = match status {
        Ok(Some(status)) if status.success() => {
            tracing::warn!(host, output, "fence command succeeded");
            return Ok(());
        }
        Ok(Some(status)) => format!("ended with {status}"),
        Ok(None) => format!("took longer than {} and was killed", command.within),
        Err(errno) => format!("could not be run: {errno}"),
    };
    tracing::error!(host, problem, output, "fence command failed");
    let output = if output.is_empty() { output } else { format!(", output {output:?}") };
    Err(format!("`{command_line}` {problem}{output}"))
}

/// Runs a command, and returns its exit status and the beginning of its output. The status is
/// `None` if the command was killed at the deadline.
async fn execute(
    argv: &[String],
    token: FencingToken,
    within: Ns,
) -> (io::Result<Option<ExitStatus>>, String) {
    let mut output = Vec::new();
    let status = match spawn(argv, token) {
        Ok((child, pipe)) => wait_with_deadline(child, pipe, &mut output, within).await,
        Err(errno) => Err(errno),
    };
    (status, String::from_utf8_lossy(&output).trim().to_owned())
}

fn spawn(argv: &[String], token: FencingToken) -> io::Result<(Child, pipe::Receiver)> {
    let (reader, writer) = io::pipe()?;
    let (program, arguments) = argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.env(TOKEN_VARIABLE, token.to_string());
    command.args(arguments).stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let child = command.process_group(0).kill_on_drop(true).spawn()?;
    Ok((child, pipe::Receiver::from_owned_fd(reader.into())?))
}

async fn wait_with_deadline(
    mut child: Child,
    pipe: pipe::Receiver,
    output: &mut Vec<u8>,
    within: Ns,
) -> io::Result<Option<ExitStatus>> {
    match timeout(within.as_duration(), wait(&mut child, pipe, output)).await {
        Ok(status) => status.map(Some),
        Err(_) => kill(child).await.map(|()| None),
    }
}

/// Reads the program's output until the program ends. Does not wait for background processes that
/// the program started.
async fn wait(child: &mut Child, mut pipe: pipe::Receiver, output: &mut Vec<u8>) -> io::Result<ExitStatus> {
    let mut buffer = [0; 1024];
    loop {
        tokio::select! {
            biased;
            read = pipe.read(&mut buffer) => match read? {
                0 => return child.wait().await,
                n => append_output(output, &buffer[..n]),
            },
            status = child.wait() => {
                while let Ok(n @ 1..) = pipe.try_read(&mut buffer) {
                    append_output(output, &buffer[..n]);
                }
                return status;
            }
        }
    }
}

fn append_output(output: &mut Vec<u8>, buffer: &[u8]) {
    let length = FENCE_OUTPUT_BYTES_MAX.saturating_sub(output.len()).min(buffer.len());
    output.extend_from_slice(&buffer[..length]);
}

/// Kills the process group of the command.
async fn kill(mut child: Child) -> io::Result<()> {
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid {
        kill_process_group(pid, Signal::KILL)?;
    }
    let _ = timeout(KILL_TIMEOUT, child.wait()).await; // after the timeout the runtime reaps the process
    Ok(())
}

#[cfg(test)]
mod tests {
    use rustix::{
        event::{PollFd, PollFlags, poll},
        process::{PidfdFlags, pidfd_open},
    };

    use super::*;

    async fn outcome(command: &[&str], within: Ns) -> Result<(), String> {
        let command = command.iter().map(|argument| (*argument).to_owned()).collect();
        run(&FenceCommand { command, within }, "h1", FencingToken { generation: 1, election: 7 }).await
    }

    const LONG_TIMEOUT: Ns = Ns::secs(60);

    #[tokio::test]
    async fn only_exit_code_0_confirms_the_power_off() {
        assert_eq!(outcome(&["true", "{host}"], LONG_TIMEOUT).await, Ok(()));
        let problem =
            outcome(&["sh", "-c", "echo cannot reach {host}; echo timeout >&2; exit 3"], LONG_TIMEOUT).await;
        let prefix = "`sh -c echo cannot reach h1; echo timeout >&2; exit 3` ended with exit status: 3";
        assert_eq!(problem, Err(format!("{prefix}, output \"cannot reach h1\\ntimeout\"")));
        let problem = outcome(&["/nonexistent", "{host}"], LONG_TIMEOUT).await.unwrap_err();
        assert!(problem.starts_with("`/nonexistent h1` could not be run: No such file"), "{problem}");
    }

    #[tokio::test]
    async fn hanging_command_is_killed_with_its_children() {
        let directory = tempfile::tempdir().unwrap();
        let pids = directory.path().join("pids");
        let script = format!("sleep 600 & echo $! $$ > {}; echo {{host}}; wait", pids.display());
        let problem = outcome(&["sh", "-c", &script], Ns::ms(500)).await.unwrap_err();
        assert!(problem.ends_with("took longer than 500ms and was killed, output \"h1\""), "{problem}");
        for pid in std::fs::read_to_string(pids).unwrap().split_whitespace() {
            let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
            // A killed process can take a moment to end; an ended process has no pidfd.
            let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
            let within = Ns::secs(10).as_duration().try_into().unwrap();
            let ended = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&within)).unwrap();
            assert_eq!(ended, 1, "process {pid:?} still runs");
        }
    }

    #[tokio::test]
    async fn background_children_are_not_awaited_and_output_is_bounded() {
        assert_eq!(outcome(&["sh", "-c", "sleep 20 & true {host}"], LONG_TIMEOUT).await, Ok(()));
        let problem =
            outcome(&["sh", "-c", "yes {host} | head -c 1000000; false"], LONG_TIMEOUT).await.unwrap_err();
        assert!(problem.len() < 2 * FENCE_OUTPUT_BYTES_MAX, "{} bytes", problem.len());
    }
}
