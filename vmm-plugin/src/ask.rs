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
        CONTROL_RESPONSE_TIMEOUT, GUEST_STOP_WAIT_DEFAULT, GUEST_STOP_WAIT_MAX, MESSAGE_BYTES_MAX,
        RESPONSE_TIMEOUT_SLACK,
    },
};

use crate::{config::RunDir, control::socket};

/// How long a command waits for an answer: a little longer than the answer may take.
const ANSWER_WITHIN: Duration =
    CONTROL_RESPONSE_TIMEOUT.as_duration().saturating_add(RESPONSE_TIMEOUT_SLACK.as_duration());

/// What a running guest is asked.
#[derive(Debug, clap::Subcommand)]
pub enum Ask {
    /// Say what a VM is, how it fares, and how much of its memory it has touched
    Info(Info),
    /// Make a VM's processors stand still; clocks go on
    Pause(Target),
    /// Let a paused VM's processors go on
    Resume(Target),
    /// Press a VM's power button, and wait until it is gone
    Stop(Stop),
}

/// Which guest.
#[derive(Debug, clap::Args)]
pub struct Target {
    /// The VM's name
    pub vm: Name,
    #[command(flatten)]
    at: RunDir,
}

/// What is to be said of a guest.
#[derive(Debug, clap::Args)]
pub struct Info {
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
pub struct Stop {
    #[command(flatten)]
    target: Target,
    /// Without asking the guest, as if its power were cut
    #[arg(long)]
    now: bool,
    /// How long to wait until it is gone, such as 90s [default: a little longer than a guest may take]
    #[arg(long, value_name = "DURATION", value_parser = patience)]
    timeout: Option<Duration>,
}

fn patience(text: &str) -> Result<Duration, String> {
    let span = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let max = GUEST_STOP_WAIT_MAX.as_duration();
    if span <= max { Ok(span) } else { Err(format!("must be at most {}", humantime::format_duration(max))) }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
enum AskError {
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
    Said { vm: Name, status: Box<Status> },
    #[error("VM {vm} does not answer within {ANSWER_WITHIN:?}")]
    Silent { vm: Name },
    #[error("VM {vm} is still there after {after:?}; --now ends it at once")]
    StillThere { vm: Name, after: Duration },
}

impl AskError {
    /// As `tarn` has them: 3 not found, 4 conflict, 6 unavailable, 124 timed out.
    fn exit(&self) -> u8 {
        match self {
            Self::NotRunning { .. } => 3,
            Self::Silent { .. } | Self::StillThere { .. } => 124,
            Self::Connect { .. } => 6,
            Self::System { errno, .. } if errno.kind() == io::ErrorKind::WouldBlock => 6, // too many ask
            Self::System { .. } => 1,
            Self::Said { status, .. } => match status.code() {
                Code::FailedPrecondition => 4,
                Code::DeadlineExceeded => 124,
                Code::Unavailable => 6,
                _ if broke(status) => 6,
                _ => 1,
            },
        }
    }
}

/// Whether a status is this side's word about a connection that broke.
fn broke(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

/// Asks, and says how it went: on stdout, on stderr and by the exit code.
pub fn run(ask: &Ask) -> ExitCode {
    match follow(ask) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", chain(&error));
            ExitCode::from(error.exit())
        }
    }
}

fn follow(ask: &Ask) -> Result<(), AskError> {
    match ask {
        Ask::Info(info) => {
            let guest = Guest::find(&info.target)?.ask(async |vmm| vmm.info(wire::InfoRequest {}).await)?;
            print(&match info.output {
                Format::Table => view::text(&guest),
                Format::Json => view::json(&guest),
            })
        }
        Ask::Pause(target) => {
            Guest::find(target)?.ask(async |vmm| vmm.pause(wire::PauseRequest {}).await).map(drop)
        }
        Ask::Resume(target) => {
            Guest::find(target)?.ask(async |vmm| vmm.resume(wire::ResumeRequest {}).await).map(drop)
        }
        Ask::Stop(stop) => self::stop(stop),
    }
}

/// A reader that has seen enough is no failure.
fn print(text: &str) -> Result<(), AskError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(errno) if errno.kind() != io::ErrorKind::BrokenPipe => {
            Err(AskError::System { doing: "write the answer".into(), errno })
        }
        _ => Ok(()),
    }
}

/// Answered when the process is gone, whatever became of the request's own answer on the way.
fn stop(stop: &Stop) -> Result<(), AskError> {
    let after = stop.timeout.unwrap_or(GUEST_STOP_WAIT_DEFAULT.as_duration());
    let give_up = Instant::now() + after;
    let guest = Guest::find(&stop.target)?;
    let Some(process) = guest.watch()? else { return Ok(()) };
    let now = stop.now;
    match guest.ask(async |vmm| vmm.stop(wire::StopRequest { now }).await) {
        Err(AskError::Said { status, .. }) if broke(&status) => {}
        asked => drop(asked?),
    }
    let gone = |errno| guest.system("wait for the process of")(errno);
    let left = give_up.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).expect("the timeout was in range");
    match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&left))
        .map_err(|errno| gone(errno.into()))?
    {
        0 => Err(AskError::StillThere { vm: guest.vm.clone(), after }),
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
    fn find(Target { vm, at }: &'a Target) -> Result<Self, AskError> {
        let path = socket::path_of(&at.run_dir, vm);
        let doing = || format!("look who is at {}", path.display());
        match socket::process_at(&path).map_err(|errno| AskError::System { doing: doing(), errno })? {
            Some(process) => Ok(Self { vm, path, process }),
            None => Err(AskError::NotRunning { vm: vm.clone(), path }),
        }
    }

    fn system(&self, doing: &'static str) -> impl FnOnce(io::Error) -> AskError {
        let doing = format!("{doing} VM {}", self.vm);
        move |errno| AskError::System { doing, errno }
    }

    /// A descriptor that tells when the process is gone; `None` if it is.
    fn watch(&self) -> Result<Option<OwnedFd>, AskError> {
        match pidfd_open(self.process, PidfdFlags::empty()) {
            Ok(process) => Ok(Some(process)),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(errno) => Err(self.system("watch the process of")(errno.into())),
        }
    }

    fn ask<T>(
        &self,
        call: impl AsyncFnOnce(&mut VmmClient<Channel>) -> Result<Response<T>, Status>,
    ) -> Result<T, AskError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(self.system("make what is needed to talk to"))?;
        let vm = || self.vm.clone();
        let answer = async {
            let connect_error = |error| AskError::Connect { vm: vm(), error };
            let endpoint = Endpoint::from_shared(format!("unix:{}", self.path.display()));
            let channel = endpoint.map_err(connect_error)?.connect().await.map_err(connect_error)?;
            let mut client = VmmClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
            let answer = call(&mut client).await;
            answer
                .map(Response::into_inner)
                .map_err(|status| AskError::Said { vm: vm(), status: Box::new(status) })
        };
        let answer = async { tokio::time::timeout(ANSWER_WITHIN, answer).await };
        runtime.block_on(answer).unwrap_or_else(|_| Err(AskError::Silent { vm: vm() }))
    }
}
