//! Management of the test VMMs of a replay, one process per VM. A test VMM is started when the
//! slices of a VM are online, and ended when the VM departs. `test_vmm.rs` implements the process.

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    sync::Arc,
};

use cli_runtime::Failure;
use proto::v1;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use units::limits::{REASON_BYTES_MAX, REPLAY_TEST_VMM_TIMEOUT, REPLAY_TEST_VMMS_MAX};

use super::test_vmm::{FinalFindings, InitialFindings};

/// Settings for starting test VMMs.
#[derive(Debug)]
pub(super) struct TestVmmLauncher {
    program: PathBuf,
    touch_mib: u64,
    sockets: BTreeMap<String, PathBuf>,
    permits: Arc<Semaphore>,
}

/// Result of starting a test VMM.
#[derive(Debug)]
pub(super) enum StartResult {
    /// The test VMM runs and reported its initial findings.
    Running(Box<RunningTestVmm>, InitialFindings),
    /// No test VMM was started: the host's agent is not on this machine, or too many of them run.
    Unavailable(String),
    /// The test VMM could not be started or failed before its initial findings.
    Failed(String),
}

/// Running test VMM.
#[derive(Debug)]
pub(super) struct RunningTestVmm {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    _permit: OwnedSemaphorePermit,
}

impl TestVmmLauncher {
    /// Creates the settings, with the sockets of the agents of all hosts.
    pub(super) fn new(hosts: &[v1::Host], touch_mib: u64) -> Result<Self, Failure> {
        let program = std::env::current_exe();
        let program = program.map_err(|errno| Failure::File {
            operation: "find the program of",
            path: "/proc/self/exe".into(),
            errno,
        })?;
        let socket = |host: &v1::Host| (host.host.clone(), PathBuf::from(&host.host_memory_socket));
        let sockets = hosts.iter().filter(|host| !host.host_memory_socket.is_empty()).map(socket).collect();
        Ok(Self { program, touch_mib, sockets, permits: Arc::new(Semaphore::new(REPLAY_TEST_VMMS_MAX)) })
    }

    /// Starts a test VMM for a VM and waits until it uses the VM's slices.
    pub(super) async fn start(&self, vm: &str, host: &str) -> StartResult {
        let Some(socket) = self.sockets.get(host).filter(|socket| socket.exists()) else {
            return StartResult::Unavailable(format!("the agent of {host} is not on this machine"));
        };
        let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else {
            return StartResult::Unavailable(format!(
                "the limit of {REPLAY_TEST_VMMS_MAX} test VMMs is reached"
            ));
        };
        let mut command = Command::new(&self.program);
        command.arg("test-vmm").arg("--socket").arg(socket).args(["--vm", vm]);
        command.args(["--touch", &self.touch_mib.to_string()]);
        // A process group of its own protects the test VMM from Ctrl-C. The replay handles Ctrl-C
        // and ends the test VMMs.
        command.process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        match command.spawn() {
            Ok(child) => wait_until_running(child, permit).await,
            Err(errno) => StartResult::Failed(format!("cannot start {}: {errno}", self.program.display())),
        }
    }
}

async fn wait_until_running(mut child: Child, permit: OwnedSemaphorePermit) -> StartResult {
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let (stdin, stdout) = stdin.zip(stdout).expect("both are pipes");
    let mut lines = BufReader::new(stdout).lines();
    let line = match timeout(REPLAY_TEST_VMM_TIMEOUT.as_duration(), lines.next_line()).await {
        Ok(Ok(Some(line))) => line,
        Ok(Ok(None)) => return StartResult::Failed(failure_reason(child).await),
        Ok(Err(errno)) => return StartResult::Failed(errno.to_string()),
        Err(_) => {
            return StartResult::Failed(format!(
                "the test VMM did not report within {REPLAY_TEST_VMM_TIMEOUT}"
            ));
        }
    };
    match serde_json::from_str(&line) {
        Ok(found) => {
            StartResult::Running(Box::new(RunningTestVmm { child, stdin, lines, _permit: permit }), found)
        }
        Err(error) => StartResult::Failed(format!("invalid report of the test VMM: {line:?}: {error}")),
    }
}

/// Returns the reason why a test VMM ended without a result: its stderr and exit status.
async fn failure_reason(mut child: Child) -> String {
    let mut output = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        // An error is ignored, because the exit status also indicates the failure.
        let _ = stderr.take(REASON_BYTES_MAX as u64).read_to_end(&mut output).await;
    }
    let ended = timeout(REPLAY_TEST_VMM_TIMEOUT.as_duration(), child.wait()).await;
    let ended = ended
        .map_or_else(|_| "still running".into(), |ended| ended.map_or_else(|e| e.to_string(), describe_exit));
    format!("{} ({ended})", String::from_utf8_lossy(&output).trim())
}

fn describe_exit(status: ExitStatus) -> String {
    status.to_string()
}

impl RunningTestVmm {
    /// Waits until the test VMM ends by itself, which is a failure.
    pub(super) async fn wait_for_exit(&mut self) -> io::Result<ExitStatus> {
        // `Child::wait` closes stdin, which would end the test VMM. Waiting for a line does not.
        self.lines.next_line().await?;
        self.child.wait().await
    }

    /// Ends the test VMM and returns its final findings, or `None` if it failed before.
    pub(super) async fn end(self) -> Option<FinalFindings> {
        let Self { mut child, stdin, mut lines, _permit } = self;
        drop(stdin);
        let findings = async {
            let line = lines.next_line().await.ok().flatten();
            let ended = child.wait().await.is_ok_and(|status| status.success());
            line.filter(|_| ended).and_then(|line| serde_json::from_str(&line).ok())
        };
        timeout(REPLAY_TEST_VMM_TIMEOUT.as_duration(), findings).await.ok().flatten()
    }
}
