//! Stand-in processes of a replay: started when a VM's slices are online, ended when it departs.
//! Their work is in `stand_in.rs`.

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
use units::limits::{REASON_BYTES_MAX, REPLAY_STAND_IN_TIMEOUT, REPLAY_STAND_INS_MAX};

use super::stand_in::{Found, Left};

/// Settings of stand-ins.
#[derive(Debug)]
pub(super) struct StandIns {
    program: PathBuf,
    touch_mib: u64,
    sockets: BTreeMap<String, PathBuf>,
    room: Arc<Semaphore>,
}

/// Result of starting a stand-in.
#[derive(Debug)]
pub(super) enum Started {
    /// It runs, with its findings.
    Runs(Box<Running>, Found),
    /// It cannot run: there is no agent on this machine, or there are too many stand-ins.
    Absent(String),
    /// It failed.
    Failed(String),
}

/// Running stand-in.
#[derive(Debug)]
pub(super) struct Running {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    _room: OwnedSemaphorePermit,
}

impl StandIns {
    /// Creates the settings for hosts whose agents are on this machine.
    pub(super) fn new(hosts: &[v1::Host], touch_mib: u64) -> Result<Self, Failure> {
        let program = std::env::current_exe();
        let program = program.map_err(|errno| Failure::File {
            operation: "find the program of",
            path: "/proc/self/exe".into(),
            errno,
        })?;
        let socket = |host: &v1::Host| (host.host.clone(), PathBuf::from(&host.host_memory_socket));
        let sockets = hosts.iter().filter(|host| !host.host_memory_socket.is_empty()).map(socket).collect();
        Ok(Self { program, touch_mib, sockets, room: Arc::new(Semaphore::new(REPLAY_STAND_INS_MAX)) })
    }

    /// Starts one and waits until it uses its slices.
    pub(super) async fn start(&self, vm: &str, host: &str) -> Started {
        let Some(socket) = self.sockets.get(host).filter(|socket| socket.exists()) else {
            return Started::Absent(format!("the agent of {host} is not on this machine"));
        };
        let Ok(room) = Arc::clone(&self.room).try_acquire_owned() else {
            return Started::Absent(format!("{REPLAY_STAND_INS_MAX} stand-ins ran already"));
        };
        let mut command = Command::new(&self.program);
        command.arg("stand-in-vm").arg("--socket").arg(socket).args(["--vm", vm]);
        command.args(["--touch", &self.touch_mib.to_string()]);
        // Ctrl-C is handled by the replay, which ends its stand-ins.
        command.process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        match command.spawn() {
            Ok(child) => first_word(child, room).await,
            Err(errno) => Started::Failed(format!("start {}: {errno}", self.program.display())),
        }
    }
}

async fn first_word(mut child: Child, room: OwnedSemaphorePermit) -> Started {
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let (stdin, stdout) = stdin.zip(stdout).expect("both are pipes");
    let mut lines = BufReader::new(stdout).lines();
    let line = match timeout(REPLAY_STAND_IN_TIMEOUT.as_duration(), lines.next_line()).await {
        Ok(Ok(Some(line))) => line,
        Ok(Ok(None)) => return Started::Failed(last_words(child).await),
        Ok(Err(errno)) => return Started::Failed(errno.to_string()),
        Err(_) => return Started::Failed(format!("no word of it within {REPLAY_STAND_IN_TIMEOUT}")),
    };
    match serde_json::from_str(&line) {
        Ok(found) => Started::Runs(Box::new(Running { child, stdin, lines, _room: room }), found),
        Err(wrong) => Started::Failed(format!("{line:?}: {wrong}")),
    }
}

/// Returns the reason why it ended without a result.
async fn last_words(mut child: Child) -> String {
    let mut said = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        // Best effort: the exit status also shows a failure.
        let _ = stderr.take(REASON_BYTES_MAX as u64).read_to_end(&mut said).await;
    }
    let ended = timeout(REPLAY_STAND_IN_TIMEOUT.as_duration(), child.wait()).await;
    let ended = ended.map_or_else(|_| "it hangs".into(), |ended| ended.map_or_else(|e| e.to_string(), shown));
    format!("{} ({ended})", String::from_utf8_lossy(&said).trim())
}

fn shown(status: ExitStatus) -> String {
    status.to_string()
}

impl Running {
    /// Waits for its death, which is a failure.
    pub(super) async fn died(&mut self) -> io::Result<ExitStatus> {
        // `Child::wait` would close its stdin and end it.
        self.lines.next_line().await?;
        self.child.wait().await
    }

    /// Ends it and returns its findings, or `None` if it had died.
    pub(super) async fn leave(self) -> Option<Left> {
        let Self { mut child, stdin, mut lines, _room } = self;
        drop(stdin);
        let word = async {
            let line = lines.next_line().await.ok().flatten();
            let ended = child.wait().await.is_ok_and(|status| status.success());
            line.filter(|_| ended).and_then(|line| serde_json::from_str(&line).ok())
        };
        timeout(REPLAY_STAND_IN_TIMEOUT.as_duration(), word).await.ok().flatten()
    }
}
