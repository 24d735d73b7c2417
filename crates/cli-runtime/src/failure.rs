//! Why a command failed: said to people with what to do next, to programs as JSON, to scripts as an exit code.

use std::{
    error::Error,
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use serde::Serialize;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use units::Bytes;

use crate::{
    Format,
    hint::{self, Subjects},
    print,
};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The manager refused.
    #[error("{}", said(.0))]
    Said(Box<Status>),
    /// The manager does not know a name; here are those it knows.
    #[error("{}", said(.status))]
    Unknown {
        /// What the manager said.
        status: Box<Status>,
        /// "did you mean ...".
        hint: String,
    },
    /// Nobody there, or not one we understand or trust.
    #[error("cannot reach a pool manager at {endpoint}")]
    Connect {
        /// Where.
        endpoint: String,
        /// What the network said.
        #[source]
        source: tonic::transport::Error,
    },
    /// No answer in time. Whether anything was done is not known.
    #[error("no answer from {endpoint} within {after:?}")]
    TimedOut {
        /// Where.
        endpoint: String,
        /// How long was waited.
        after: Duration,
    },
    /// A watch ended because of --timeout.
    #[error("the watch ended after {}, as --timeout says", humantime::format_duration(*.after))]
    WatchOver {
        /// The value of --timeout.
        after: Duration,
    },
    /// Words that are no command.
    #[error("{0}")]
    Words(String),
    /// An option's value breaks its rule.
    #[error("{field}: {value:?} {rule}")]
    Value {
        /// Which option.
        field: &'static str,
        /// As given.
        value: String,
        /// "must be ...".
        rule: &'static str,
    },
    /// The manager broke a promise of its protocol.
    #[error("the manager answered out of turn: {0}")]
    Protocol(String),
    /// A file could not be used.
    #[error("{tried} {}", path.display())]
    File {
        /// "read", "write".
        tried: &'static str,
        /// Which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        errno: io::Error,
    },
    /// Printing failed.
    #[error("write the answer")]
    Output(#[source] io::Error),
    /// The command did its work and found something wrong; it has said what.
    #[error("{0}")]
    Found(String),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Said(Box::new(status))
    }
}

/// How `tarn` ends when it fails; the numbers are promised in `tarn --help`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Something else.
    Error = 1,
    /// The words make no sense.
    Usage = 2,
    /// No such thing.
    NotFound = 3,
    /// It exists already, or its state does not allow this.
    Conflict = 4,
    /// Out of slices, memory or cores.
    Exhausted = 5,
    /// No manager, or one that is not ready: try again.
    Unavailable = 6,
    /// Out of time.
    TimedOut = 124,
}

/// What a refusal of the manager means to a script. Every code has its line, so that a new one cannot slip by.
fn exit(code: Code) -> Exit {
    match code {
        Code::InvalidArgument => Exit::Usage,
        Code::NotFound => Exit::NotFound,
        Code::AlreadyExists | Code::FailedPrecondition | Code::Aborted => Exit::Conflict,
        Code::ResourceExhausted => Exit::Exhausted,
        Code::Unavailable => Exit::Unavailable,
        Code::DeadlineExceeded => Exit::TimedOut,
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::PermissionDenied
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::Internal
        | Code::DataLoss
        | Code::Unauthenticated => Exit::Error,
    }
}

impl Failure {
    /// What it means to a script.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Said(status) | Self::Unknown { status, .. } => exit(code(status)),
            Self::Connect { .. } => Exit::Unavailable,
            Self::TimedOut { .. } | Self::WatchOver { .. } => Exit::TimedOut,
            Self::Words(_) | Self::Value { .. } => Exit::Usage,
            Self::Protocol(_) | Self::File { .. } | Self::Output(_) | Self::Found(_) => Exit::Error,
        }
    }

    /// The manager's machine-readable reason, in UPPER_SNAKE_CASE.
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Said(status) | Self::Unknown { status, .. } => {
                status.get_details_error_info().map(|info| info.reason)
            }
            _ => None,
        }
    }
}

/// A failure as programs read it.
#[derive(Debug, Serialize)]
struct Report {
    error: String,
    reason: Option<String>,
    hint: Option<String>,
    exit_code: u8,
}

impl Failure {
    /// Prints the failure on stderr in the given format and turns it into an exit code. A reader that has seen enough
    /// (`tarn get slices | head`) is no failure, and nothing is printed.
    pub fn report(&self, format: Format) -> ExitCode {
        if matches!(self, Self::Output(errno) if errno.kind() == io::ErrorKind::BrokenPipe) {
            return ExitCode::SUCCESS;
        }
        // With stderr gone there is nobody left to tell; the exit code still says it.
        let _ = io::stderr().lock().write_all(self.text(format).as_bytes());
        ExitCode::from(self.exit() as u8)
    }

    fn text(&self, format: Format) -> String {
        let report = Report {
            error: self.sentence(),
            reason: self.reason(),
            hint: self.hint(),
            exit_code: self.exit() as u8,
        };
        match format {
            Format::Json => {
                serde_json::to_string(&report).map_or_else(|_| report.lines(), |line| line + "\n")
            }
            Format::Yaml => serde_norway::to_string(&report).unwrap_or_else(|_| report.lines()),
            Format::Table | Format::Wide => report.lines(),
        }
    }

    /// What failed and the cause at the bottom of it; what lies between repeats one or the other.
    pub fn sentence(&self) -> String {
        match self.source() {
            Some(cause) => format!("{self}: {}", root(cause)),
            None => self.to_string(),
        }
    }

    /// What to do next.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Unknown { hint, .. } => Some(hint.clone()),
            Self::Said(status) if broke(status) => Some(hint::BROKEN.to_owned()),
            Self::Said(status) => {
                hint::for_refusal(code(status), self.reason().as_deref(), &Subjects::default())
            }
            Self::Connect { .. } => Some(hint::NOBODY_THERE.to_owned()),
            Self::TimedOut { .. } => Some(hint::NO_ANSWER.to_owned()),
            Self::Words(_) => Some("`tarn --help`, or --help after any command".to_owned()),
            Self::Value { .. }
            | Self::WatchOver { .. }
            | Self::Protocol(_)
            | Self::File { .. }
            | Self::Output(_)
            | Self::Found(_) => None,
        }
    }
}

impl Report {
    fn lines(&self) -> String {
        let reason = self.reason.iter().map(|reason| format!(" ({reason})")).collect::<String>();
        let hint = self.hint.iter().map(|hint| format!("hint: {hint}\n")).collect::<String>();
        print::plain(&format!("error: {}{reason}\n{hint}", self.error))
    }
}

fn root<'a>(cause: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    cause.source().map_or(cause, root)
}

/// Whether a status is the network's word instead of the manager's: made on this side, from what the transport said.
pub fn broke(status: &Status) -> bool {
    status.source().is_some() && matches!(status.code(), Code::Unknown | Code::Cancelled | Code::Internal)
}

/// A connection that breaks in the middle of a call has many names in the transport; all mean "try again".
pub fn code(status: &Status) -> Code {
    if broke(status) { Code::Unavailable } else { status.code() }
}

fn said(status: &Status) -> String {
    match (status.message(), status.source()) {
        (_, Some(cause)) if broke(status) => format!("the connection to the manager broke: {}", root(cause)),
        ("", _) => status.code().description().to_owned(),
        (text, _) if status.code() == Code::InvalidArgument => as_typed(text),
        (text, _) => text.to_owned(),
    }
}

/// Options by the field of a request that they become; a field of another name is an argument or is called like its option.
const OPTIONS: &[(&str, &str)] = &[
    ("pool_bytes", "--pool"),
    ("local_bytes", "--local"),
    ("memory_bytes", "--memory"),
    ("commit_within_ms", "--commit-within"),
    ("timeout_ms", "--timeout"),
    ("request_id", "--request-id"),
    ("validate_only", "--validate-only"),
    ("wait_ready", "--wait-ready"),
];

/// Replaces a request's field by the option that was typed, and bytes by a size.
fn as_typed(text: &str) -> String {
    let option = OPTIONS
        .iter()
        .find_map(|(field, option)| Some((*field, *option, text.strip_prefix(field)?.strip_prefix(": ")?)));
    let Some((field, option, problem)) = option else { return text.to_owned() };
    let (value, rule) = problem.split_once(' ').unwrap_or((problem, ""));
    match value.parse::<u64>() {
        Ok(bytes) if field.ends_with("_bytes") => format!("{option}: {} {rule}", Bytes::new(bytes)),
        _ => format!("{option}: {problem}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_value_names_the_option() {
        let refusals = [
            ("pool_bytes: 1610612736 must be whole slices", "--pool: 1536MiB must be whole slices"),
            ("local_bytes: 5 must be whole MiB", "--local: 5B must be whole MiB"),
            ("commit_within_ms: 7 must be at most 5", "--commit-within: 7 must be at most 5"),
            ("vm: \"r-1\" must not be r- and a number", "vm: \"r-1\" must not be r- and a number"),
        ];
        for (text, typed) in refusals {
            assert_eq!(said(&Status::invalid_argument(text)), typed);
        }
    }
}
