//! Client of the control socket of a running guest, with the commands `info`, `pause`, `resume` and
//! `stop`. The server is in `control`.

mod view;

use std::{
    io::{self, Write as _},
    os::fd::OwnedFd,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use proto::v1::{self as wire, vmm_client::VmmClient};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open},
};
use tonic::{
    Code, Response, Status,
    transport::{Channel, Endpoint},
};
use units::{
    Name, chain,
    limits::{
        CONTROL_RESPONSE_TIMEOUT, GUEST_STOP_WAIT_DEFAULT, RESPONSE_TIMEOUT_SLACK, RPC_MESSAGE_BYTES_MAX,
    },
};

use crate::{
    config::{RunDirArg, parse_stop_timeout},
    control::socket,
};

/// Timeout of a request: the timeout of the server plus the time to transfer the reply.
const REPLY_TIMEOUT: Duration =
    CONTROL_RESPONSE_TIMEOUT.as_duration().saturating_add(RESPONSE_TIMEOUT_SLACK.as_duration());

/// Commands for a running guest.
#[derive(Debug, clap::Subcommand)]
pub enum ControlCommand {
    /// Show a VM's state, nodes, slices and devices, and how much of its memory it has touched
    Info(InfoArgs),
    /// Pause a VM's vCPUs. Clocks continue
    Pause(Target),
    /// Resume a paused VM's vCPUs
    Resume(Target),
    /// Press a VM's power button and wait until the VM has ended
    Stop(StopArgs),
}

/// Arguments that select the VM of a command.
#[derive(Debug, clap::Args)]
pub struct Target {
    /// Name of the VM
    pub vm: Name,
    #[command(flatten)]
    run_dir: RunDirArg,
}

/// Options of the command `info`.
#[derive(Debug, clap::Args)]
pub struct InfoArgs {
    #[command(flatten)]
    target: Target,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// Output format of the command `info`.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
pub enum Format {
    /// A table for people.
    #[default]
    Table,
    /// JSON for programs.
    Json,
}

/// Options of the command `stop`.
#[derive(Debug, clap::Args)]
pub struct StopArgs {
    #[command(flatten)]
    target: Target,
    /// Stop the VM at once, without pressing the power button
    #[arg(long)]
    force: bool,
    /// Maximum time to wait until the VM has ended, such as 90s [default: slightly longer than the
    /// default time limit for a guest to power off]
    #[arg(long, value_name = "DURATION", value_parser = parse_stop_timeout)]
    timeout: Option<Duration>,
}

/// Error of a command for a running guest.
#[derive(Debug, thiserror::Error)]
enum CommandError {
    #[error("VM {vm} is not running: no listener on {}", path.display())]
    NotRunning { vm: Name, path: PathBuf },
    #[error("cannot {operation}")]
    System {
        operation: String,
        #[source]
        errno: io::Error,
    },
    #[error("cannot connect to VM {vm}")]
    Connect {
        vm: Name,
        #[source]
        error: tonic::transport::Error,
    },
    #[error("VM {vm}: {}", status.message())]
    Rejected { vm: Name, status: Box<Status> },
    #[error("VM {vm} did not reply within {REPLY_TIMEOUT:?}")]
    Timeout { vm: Name },
    #[error("VM {vm} has not ended after {timeout:?}; use --force to stop it at once")]
    StillRunning { vm: Name, timeout: Duration },
}

impl CommandError {
    /// Returns the exit code of the command. The codes are the same as those of `tarn`: 3 not
    /// found, 4 conflict, 6 unavailable, 124 timeout.
    fn exit_code(&self) -> u8 {
        match self {
            Self::NotRunning { .. } => 3,
            Self::Timeout { .. } | Self::StillRunning { .. } => 124,
            Self::Connect { .. } => 6,
            // The backlog of the socket is full.
            Self::System { errno, .. } if errno.kind() == io::ErrorKind::WouldBlock => 6,
            Self::System { .. } => 1,
            Self::Rejected { status, .. } => match status.code() {
                Code::FailedPrecondition => 4,
                Code::DeadlineExceeded => 124,
                Code::Unavailable => 6,
                _ if is_transport_error(status) => 6,
                _ => 1,
            },
        }
    }
}

/// Returns whether the client, not the server, created a status because the connection failed.
fn is_transport_error(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

/// Executes a command. Prints the output or the error and returns the exit code.
pub fn run(command: &ControlCommand) -> ExitCode {
    match execute(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", chain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

fn execute(command: &ControlCommand) -> Result<(), CommandError> {
    match command {
        ControlCommand::Info(info) => {
            let guest = Guest::find(&info.target)?.call(async |vmm| vmm.info(wire::InfoRequest {}).await)?;
            print(&match info.output {
                Format::Table => view::to_table(&guest),
                Format::Json => view::to_json(&guest),
            })
        }
        ControlCommand::Pause(target) => {
            Guest::find(target)?.call(async |vmm| vmm.pause(wire::PauseRequest {}).await).map(drop)
        }
        ControlCommand::Resume(target) => {
            Guest::find(target)?.call(async |vmm| vmm.resume(wire::ResumeRequest {}).await).map(drop)
        }
        ControlCommand::Stop(stop) => self::stop(stop),
    }
}

/// Writes the output of a command to standard output. A closed pipe is not an error.
fn print(text: &str) -> Result<(), CommandError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(errno) if errno.kind() != io::ErrorKind::BrokenPipe => {
            Err(CommandError::System { operation: "write the output".into(), errno })
        }
        _ => Ok(()),
    }
}

/// Stops a VM and waits until its process has ended. A lost reply is not an error, because the
/// process may end before it replies.
fn stop(stop: &StopArgs) -> Result<(), CommandError> {
    let timeout = stop.timeout.unwrap_or(GUEST_STOP_WAIT_DEFAULT.as_duration());
    let deadline = Instant::now() + timeout;
    let guest = Guest::find(&stop.target)?;
    let Some(process) = guest.pidfd()? else { return Ok(()) };
    let force = stop.force;
    match guest.call(async |vmm| vmm.stop(wire::StopRequest { force }).await) {
        Err(CommandError::Rejected { status, .. }) if is_transport_error(&status) => {}
        result => drop(result?),
    }
    let wait_error = |errno| guest.system_error("wait for the process of")(errno);
    let remaining = deadline.saturating_duration_since(Instant::now());
    let remaining = Timespec::try_from(remaining).expect("the timeout was range-checked");
    match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&remaining))
        .map_err(|errno| wait_error(errno.into()))?
    {
        0 => Err(CommandError::StillRunning { vm: guest.vm.clone(), timeout }),
        _ => Ok(()),
    }
}

/// Running guest, with its control socket and process.
struct Guest<'a> {
    vm: &'a Name,
    path: PathBuf,
    process: Pid,
}

impl<'a> Guest<'a> {
    /// Finds the process that listens on the control socket of a VM.
    fn find(Target { vm, run_dir }: &'a Target) -> Result<Self, CommandError> {
        let path = socket::socket_path(&run_dir.run_dir, vm);
        let operation = || format!("find the listener on {}", path.display());
        match socket::listener_pid(&path)
            .map_err(|errno| CommandError::System { operation: operation(), errno })?
        {
            Some(process) => Ok(Self { vm, path, process }),
            None => Err(CommandError::NotRunning { vm: vm.clone(), path }),
        }
    }

    fn system_error(&self, operation: &'static str) -> impl FnOnce(io::Error) -> CommandError {
        let operation = format!("{operation} VM {}", self.vm);
        move |errno| CommandError::System { operation, errno }
    }

    /// Opens a pidfd of the process that runs the VM. Returns `None` if the process has ended.
    fn pidfd(&self) -> Result<Option<OwnedFd>, CommandError> {
        match pidfd_open(self.process, PidfdFlags::empty()) {
            Ok(process) => Ok(Some(process)),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(errno) => Err(self.system_error("watch the process of")(errno.into())),
        }
    }

    /// Connects to the control socket, sends a request and returns the reply.
    fn call<T>(
        &self,
        request: impl AsyncFnOnce(&mut VmmClient<Channel>) -> Result<Response<T>, Status>,
    ) -> Result<T, CommandError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(self.system_error("start a runtime to connect to"))?;
        let vm = || self.vm.clone();
        let reply = async {
            let connect_error = |error| CommandError::Connect { vm: vm(), error };
            let endpoint = Endpoint::from_shared(format!("unix:{}", self.path.display()));
            let channel = endpoint.map_err(connect_error)?.connect().await.map_err(connect_error)?;
            let mut client = VmmClient::new(channel).max_decoding_message_size(RPC_MESSAGE_BYTES_MAX);
            let reply = request(&mut client).await;
            reply
                .map(Response::into_inner)
                .map_err(|status| CommandError::Rejected { vm: vm(), status: Box::new(status) })
        };
        let reply = async { tokio::time::timeout(REPLY_TIMEOUT, reply).await };
        runtime.block_on(reply).unwrap_or_else(|_| Err(CommandError::Timeout { vm: vm() }))
    }
}
