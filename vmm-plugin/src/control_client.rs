//! The commands about a guest that runs: what they ask at its control socket, what they print, and how a script sees that it was
//! not to be. The other end is `control`.

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
        ANSWER_SLACK, CONTROL_ANSWER_WITHIN, GUEST_GONE_WITHIN_DEFAULT, GUEST_GONE_WITHIN_MAX,
        MESSAGE_BYTES_MAX,
    },
};

use crate::{config::RunDirArg, control::socket};

/// How long a command waits for an answer: a little longer than the answer may take.
const REPLY_TIMEOUT: Duration =
    CONTROL_ANSWER_WITHIN.as_duration().saturating_add(ANSWER_SLACK.as_duration());

/// What a running guest is asked.
#[derive(Debug, clap::Subcommand)]
pub enum ControlCommand {
    /// Say what a VM is, how it fares, and how much of its memory it has touched
    Info(InfoArgs),
    /// Make a VM's processors stand still; clocks go on
    Pause(Target),
    /// Let a paused VM's processors go on
    Resume(Target),
    /// Press a VM's power button, and wait until it is gone
    Stop(StopArgs),
}

/// Which guest.
#[derive(Debug, clap::Args)]
pub struct Target {
    /// The VM's name
    pub vm: Name,
    #[command(flatten)]
    run_dir: RunDirArg,
}

/// What is to be said of a guest.
#[derive(Debug, clap::Args)]
pub struct InfoArgs {
    #[command(flatten)]
    target: Target,
    /// For people, or for programs
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// How an answer is printed.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Table,
    /// For programs.
    Json,
}

/// How a guest is to end.
#[derive(Debug, clap::Args)]
pub struct StopArgs {
    #[command(flatten)]
    target: Target,
    /// Without asking the guest, as if its power were cut
    #[arg(long)]
    force: bool,
    /// How long to wait until it is gone, such as 90s [default: a little longer than a guest may take]
    #[arg(long, value_name = "DURATION", value_parser = parse_timeout)]
    timeout: Option<Duration>,
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    let span = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let max = GUEST_GONE_WITHIN_MAX.as_duration();
    if span <= max { Ok(span) } else { Err(format!("must be at most {}", humantime::format_duration(max))) }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
enum CommandError {
    #[error("no VM {vm} runs here: nobody is at {}", path.display())]
    NotRunning { vm: Name, path: PathBuf },
    #[error("cannot {doing}")]
    System {
        doing: String,
        #[source]
        errno: io::Error,
    },
    #[error("cannot talk to VM {vm}")]
    Connect {
        vm: Name,
        #[source]
        error: tonic::transport::Error,
    },
    #[error("VM {vm}: {}", status.message())]
    Rejected { vm: Name, status: Box<Status> },
    #[error("VM {vm} does not answer within {REPLY_TIMEOUT:?}")]
    Timeout { vm: Name },
    #[error("VM {vm} is still there timeout {timeout:?}; --force ends it at once")]
    StillRunning { vm: Name, timeout: Duration },
}

impl CommandError {
    /// As `tarn` has them: 3 not found, 4 conflict, 6 unavailable, 124 timed out.
    fn exit(&self) -> u8 {
        match self {
            Self::NotRunning { .. } => 3,
            Self::Timeout { .. } | Self::StillRunning { .. } => 124,
            Self::Connect { .. } => 6,
            Self::System { errno, .. } if errno.kind() == io::ErrorKind::WouldBlock => 6, // too many command
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

/// Whether a status is this side's word about a connection that broke.
fn is_transport_error(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

/// Asks, and says how it went: on stdout, on stderr and by the exit code.
pub fn run(command: &ControlCommand) -> ExitCode {
    match execute(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", chain(&error));
            ExitCode::from(error.exit())
        }
    }
}

fn execute(command: &ControlCommand) -> Result<(), CommandError> {
    match command {
        ControlCommand::Info(info) => {
            let guest = Guest::find(&info.target)?.call(async |vmm| vmm.info(wire::InfoRequest {}).await)?;
            print(&match info.output {
                Format::Table => view::text(&guest),
                Format::Json => view::json(&guest),
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

/// A reader that has seen enough is no failure.
fn print(text: &str) -> Result<(), CommandError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(errno) if errno.kind() != io::ErrorKind::BrokenPipe => {
            Err(CommandError::System { doing: "write the answer".into(), errno })
        }
        _ => Ok(()),
    }
}

/// Answered when the process is gone, whatever became of the request's own answer on the way.
fn stop(stop: &StopArgs) -> Result<(), CommandError> {
    let timeout = stop.timeout.unwrap_or(GUEST_GONE_WITHIN_DEFAULT.as_duration());
    let deadline = Instant::now() + timeout;
    let guest = Guest::find(&stop.target)?;
    let Some(process) = guest.pidfd()? else { return Ok(()) };
    let force = stop.force;
    match guest.call(async |vmm| vmm.stop(wire::StopRequest { now: force }).await) {
        Err(CommandError::Rejected { status, .. }) if is_transport_error(&status) => {}
        result => drop(result?),
    }
    let wait_error = |errno| guest.system("wait for the process of")(errno);
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).expect("the timeout was in range");
    match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&left))
        .map_err(|errno| wait_error(errno.into()))?
    {
        0 => Err(CommandError::StillRunning { vm: guest.vm.clone(), timeout }),
        _ => Ok(()),
    }
}

/// A guest that runs.
struct Guest<'a> {
    vm: &'a Name,
    path: PathBuf,
    process: Pid,
}

impl<'a> Guest<'a> {
    fn find(Target { vm, run_dir }: &'a Target) -> Result<Self, CommandError> {
        let path = socket::path_of(&run_dir.run_dir, vm);
        let doing = || format!("look who is at {}", path.display());
        match socket::listener_pid(&path).map_err(|errno| CommandError::System { doing: doing(), errno })? {
            Some(process) => Ok(Self { vm, path, process }),
            None => Err(CommandError::NotRunning { vm: vm.clone(), path }),
        }
    }

    fn system(&self, doing: &'static str) -> impl FnOnce(io::Error) -> CommandError {
        let doing = format!("{doing} VM {}", self.vm);
        move |errno| CommandError::System { doing, errno }
    }

    /// A descriptor that tells when the process is gone; `None` if it is.
    fn pidfd(&self) -> Result<Option<OwnedFd>, CommandError> {
        match pidfd_open(self.process, PidfdFlags::empty()) {
            Ok(process) => Ok(Some(process)),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(errno) => Err(self.system("watch the process of")(errno.into())),
        }
    }

    fn call<T>(
        &self,
        request: impl AsyncFnOnce(&mut VmmClient<Channel>) -> Result<Response<T>, Status>,
    ) -> Result<T, CommandError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(self.system("make what is needed to talk to"))?;
        let vm = || self.vm.clone();
        let answer = async {
            let connect_error = |error| CommandError::Connect { vm: vm(), error };
            let endpoint = Endpoint::from_shared(format!("unix:{}", self.path.display()));
            let channel = endpoint.map_err(connect_error)?.connect().await.map_err(connect_error)?;
            let mut client = VmmClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
            let answer = request(&mut client).await;
            answer
                .map(Response::into_inner)
                .map_err(|status| CommandError::Rejected { vm: vm(), status: Box::new(status) })
        };
        let answer = async { tokio::time::timeout(REPLY_TIMEOUT, answer).await };
        runtime.block_on(answer).unwrap_or_else(|_| Err(CommandError::Timeout { vm: vm() }))
    }
}
