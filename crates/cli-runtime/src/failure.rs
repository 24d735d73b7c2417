//! Errors of commands, with their exit codes. An error is printed as text with a hint, as JSON or
//! as YAML. The hints are in `hint.rs`.

use std::{
    borrow::Cow,
    error::Error,
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use serde::Serialize;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use units::{Bytes, QuotedText, escaped};

use crate::{
    Format,
    hint::{self, RequestSubjects},
    print,
};

/// Error of a command, printed with its root cause and a hint.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The manager rejected the request, or the connection broke during the request.
    #[error("{}", status_message(.0))]
    Rejected(Box<Status>),
    /// The manager rejected the request, and a hint specific to this request is available.
    #[error("{}", status_message(.status))]
    RejectedWithHint {
        /// Status returned by the manager.
        status: Box<Status>,
        /// Hint, such as "did you mean ...".
        hint: String,
    },
    /// The connection or the TLS handshake failed.
    #[error("cannot reach a pool manager at {endpoint}")]
    Connect {
        /// Address of the manager.
        endpoint: String,
        /// Error of the transport.
        #[source]
        source: tonic::transport::Error,
    },
    /// None of several managers serves requests.
    #[error("no pool manager is the leader within {after:?}: {}", answers.join("; "))]
    NoLeader {
        /// Time limit that expired.
        after: Duration,
        /// Address and last answer of each manager.
        answers: Vec<String>,
    },
    /// The manager did not respond within the time limit. The request may have been executed.
    #[error("no response from {endpoint} within {after:?}")]
    TimedOut {
        /// Address of the manager.
        endpoint: String,
        /// Time limit that expired.
        after: Duration,
    },
    /// A watch ended because --timeout expired.
    #[error("watch ended by --timeout after {}", humantime::format_duration(*.after))]
    WatchTimedOut {
        /// Value of --timeout.
        after: Duration,
    },
    /// The arguments do not form a valid command.
    #[error("{0}")]
    Usage(String),
    /// The value of an option is invalid.
    #[error("{field}: {} {rule}", QuotedText(value))]
    InvalidValue {
        /// Option, such as `--endpoint`.
        field: &'static str,
        /// Value given by the user.
        value: String,
        /// Violated rule, such as "must be ...".
        rule: Cow<'static, str>,
    },
    /// The manager sent a response that violates the protocol.
    #[error("invalid response from the manager: {0}")]
    Protocol(String),
    /// An operation on a file failed.
    #[error("cannot {operation} {}", escaped(&path.to_string_lossy()))]
    File {
        /// Operation, such as "read" or "write".
        operation: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
    /// The output cannot be written.
    #[error("cannot write the output")]
    Output(#[source] io::Error),
    /// The command completed and printed the problems that it found, such as `tarn doctor`.
    #[error("{0}")]
    Problem(String),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Rejected(Box::new(status))
    }
}

/// Exit codes of failed commands. They are documented in `tarn --help` and do not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Error without a more specific exit code.
    Error = 1,
    /// Invalid arguments or values.
    Usage = 2,
    /// The resource does not exist.
    NotFound = 3,
    /// The resource exists already, or its state does not allow the request.
    Conflict = 4,
    /// Not enough free slices, memory or cores.
    Exhausted = 5,
    /// The manager cannot be reached or is not ready; the request can be retried.
    Unavailable = 6,
    /// A time limit expired.
    TimedOut = 124,
}

/// Maps a gRPC status code to an exit code. The match has no wildcard, so that a new status code
/// causes a compile error.
fn exit_for_code(code: Code) -> Exit {
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
    /// Returns the exit code of this error.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Rejected(_) | Self::RejectedWithHint { .. }
                if self.reason().as_deref() == Some(hint::NOT_LEADER) =>
            {
                Exit::Unavailable
            }
            Self::Rejected(status) | Self::RejectedWithHint { status, .. } => exit_for_code(code(status)),
            Self::Connect { .. } | Self::NoLeader { .. } => Exit::Unavailable,
            Self::TimedOut { .. } | Self::WatchTimedOut { .. } => Exit::TimedOut,
            Self::Usage(_) | Self::InvalidValue { .. } => Exit::Usage,
            Self::Protocol(_) | Self::File { .. } | Self::Output(_) | Self::Problem(_) => Exit::Error,
        }
    }

    /// Returns the manager's machine-readable reason, in UPPER_SNAKE_CASE.
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Rejected(status) | Self::RejectedWithHint { status, .. } => {
                status.get_details_error_info().map(|info| info.reason)
            }
            _ => None,
        }
    }
}

/// Structure of a printed error in JSON and YAML.
#[derive(Debug, Serialize)]
struct ErrorReport {
    error: String,
    reason: Option<String>,
    hint: Option<String>,
    exit_code: u8,
}

impl Failure {
    /// Prints the error on stderr in the given format and returns its exit code. A closed pipe
    /// (`tarn get slices | head`) counts as success and prints nothing.
    pub fn report(&self, format: Format) -> ExitCode {
        if matches!(self, Self::Output(errno) if errno.kind() == io::ErrorKind::BrokenPipe) {
            return ExitCode::SUCCESS;
        }
        // The exit code reports the error even if stderr is closed.
        let _ = io::stderr().lock().write_all(self.to_text(format).as_bytes());
        ExitCode::from(self.exit() as u8)
    }

    fn to_text(&self, format: Format) -> String {
        let report = ErrorReport {
            error: self.message(),
            reason: self.reason(),
            hint: self.hint(),
            exit_code: self.exit() as u8,
        };
        match format {
            Format::Json => {
                serde_json::to_string(&report).map_or_else(|_| report.to_text(), |line| line + "\n")
            }
            Format::Yaml => serde_norway::to_string(&report).unwrap_or_else(|_| report.to_text()),
            Format::Table | Format::Wide | Format::Csv => report.to_text(),
        }
    }

    /// Returns the message of this error, with its root cause. Intermediate causes are omitted,
    /// because they repeat the error or the root cause.
    pub fn message(&self) -> String {
        match self.source() {
            Some(cause) => format!("{self}: {}", root_cause(cause)),
            None => self.to_string(),
        }
    }

    /// Returns a hint for the next step, if there is one.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::RejectedWithHint { hint, .. } => Some(hint.clone()),
            Self::Rejected(status) if is_transport_error(status) => Some(hint::CONNECTION_BROKEN.to_owned()),
            Self::Rejected(status) => {
                hint::hint_for_rejection(code(status), self.reason().as_deref(), &RequestSubjects::default())
            }
            Self::Connect { .. } | Self::NoLeader { .. } => Some(hint::CONNECT_FAILED.to_owned()),
            Self::TimedOut { .. } => Some(hint::NO_RESPONSE.to_owned()),
            Self::Usage(_) => Some("see `tarn --help`, or --help after any command".to_owned()),
            Self::InvalidValue { .. }
            | Self::WatchTimedOut { .. }
            | Self::Protocol(_)
            | Self::File { .. }
            | Self::Output(_)
            | Self::Problem(_) => None,
        }
    }
}

impl ErrorReport {
    fn to_text(&self) -> String {
        let reason = self.reason.iter().map(|reason| format!(" ({reason})")).collect::<String>();
        let hint = self.hint.iter().map(|hint| format!("hint: {hint}\n")).collect::<String>();
        print::sanitize(&format!("error: {}{reason}\n{hint}", self.error))
    }
}

fn root_cause<'a>(cause: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    cause.source().map_or(cause, root_cause)
}

/// Returns whether the client library created a status from a transport error, so that the manager
/// did not send it.
pub fn is_transport_error(status: &Status) -> bool {
    status.source().is_some() && matches!(status.code(), Code::Unknown | Code::Cancelled | Code::Internal)
}

/// Returns the code of a status. Transport errors have various codes; all are mapped to
/// `UNAVAILABLE`, because the calls can be retried.
pub fn code(status: &Status) -> Code {
    if is_transport_error(status) { Code::Unavailable } else { status.code() }
}

/// Returns the message of a status, with names of request fields replaced by command-line options.
fn status_message(status: &Status) -> String {
    match (status.message(), status.source()) {
        (_, Some(cause)) if is_transport_error(status) => {
            format!("connection to the manager broke: {}", root_cause(cause))
        }
        ("", _) => status.code().description().to_owned(),
        (text, _) if status.code() == Code::InvalidArgument => replace_field_names(text),
        (text, _) => reused_request_id_message(text).unwrap_or_else(|| text.to_owned()),
    }
}

/// Request fields and the command-line options that set them.
const FIELD_OPTIONS: &[(&str, &str)] = &[
    ("vm", "--vm"),
    ("host", "--host"),
    ("pool_bytes", "--pool"),
    ("local_bytes", "--local"),
    ("memory_bytes", "--memory"),
    ("cores", "--cores"),
    ("pinned", "--pinned"),
    ("uid", "--uid"),
    ("client", "--client"),
    ("reason", "--reason"),
    ("commit_within_ms", "--commit-within"),
    ("timeout_ms", "--timeout"),
    ("request_id", "--request-id"),
    ("validate_only", "--validate-only"),
    ("wait_ready", "--wait-ready"),
    ("profile.key", "--customer"),
    ("profile.kind", "--vm-type"),
    ("profile.place", "--location"),
    ("profile.counters", "--counter"),
];

/// Returns the option that sets a request field, or `None` if no option does.
fn option_for_field(field: &str) -> Option<&'static str> {
    FIELD_OPTIONS.iter().find(|(known, _)| *known == field).map(|(_, option)| *option)
}

/// Replaces request fields in an error message by the corresponding command-line options, and
/// numbers of bytes and milliseconds by values with a unit.
fn replace_field_names(text: &str) -> String {
    let named =
        text.split_once(": ").and_then(|(field, problem)| Some((field, option_for_field(field)?, problem)));
    let Some((field, option, problem)) = named else { return text.to_owned() };
    // The quoted value was entered by the user and is not changed.
    let (value, rule) = problem.split_at(problem.rfind('"').map_or(0, |at| at + 1));
    let rule: Vec<_> = rule.split(' ').map(|word| format_rule_word(field, word)).collect();
    format!("{option}: {value}{}", rule.join(" "))
}

/// Formats one word of a rule such as "must be at most 4096": adds a unit to a number, or replaces
/// a field name by its option.
fn format_rule_word(field: &str, word: &str) -> String {
    match word.parse::<u64>() {
        Ok(bytes) if bytes > 0 && field.ends_with("_bytes") => Bytes::new(bytes).to_string(),
        Ok(ms) if field.ends_with("_ms") => humantime::format_duration(Duration::from_millis(ms)).to_string(),
        // Other field names, such as "host", are also ordinary words of the rule.
        Err(_) if word.contains('_') || word == "cores" => option_for_field(word).unwrap_or(word).to_owned(),
        _ => word.to_owned(),
    }
}

/// Replaces field names in the error message about a reused request ID. Returns `None` for other
/// messages.
fn reused_request_id_message(text: &str) -> Option<String> {
    let (used, field) = text.strip_prefix("request_id ")?.strip_suffix(" differs")?.rsplit_once(' ')?;
    Some(format!("--request-id {used} {} differs", option_for_field(field).unwrap_or(field)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_about_rejected_value_names_the_option() {
        let rejections = [
            ("pool_bytes: 1610612736 must be whole slices", "--pool: 1536MiB must be whole slices"),
            ("local_bytes: 5 must be whole MiB", "--local: 5B must be whole MiB"),
            (
                "commit_within_ms: 90000000 must be at most 86400000",
                "--commit-within: 1day 1h must be at most 1day",
            ),
            (
                "memory_bytes: 0 must be whole MiB and more than 0",
                "--memory: 0 must be whole MiB and more than 0",
            ),
            (
                "local_bytes: 99999999999999 must be at most 70368744177664",
                "--local: 99999999999999B must be at most 65536GiB",
            ),
            (
                "pool_bytes: 0 must be more than 0 if local_bytes and cores are 0",
                "--pool: 0 must be more than 0 if --local and --cores are 0",
            ),
            ("cores: 5000 must be at most 4096", "--cores: 5000 must be at most 4096"),
            ("profile.place: 300 bytes: must be at most 256", "--location: 300 bytes: must be at most 256"),
            ("vm: \"r-1\" must not be r- and a number", "--vm: \"r-1\" must not be r- and a number"),
            ("target.vm: \"cores 5\" is not a name", "target.vm: \"cores 5\" is not a name"),
            ("request_id: \"local_bytes a\" is not a name", "--request-id: \"local_bytes a\" is not a name"),
        ];
        for (text, message) in rejections {
            assert_eq!(status_message(&Status::invalid_argument(text)), message);
        }
        let reused = Status::already_exists(
            "request_id cores was used for r-1 with other content: commit_within_ms differs",
        );
        let message = "--request-id cores was used for r-1 with other content: --commit-within differs";
        assert_eq!(status_message(&reused), message);
    }

    #[test]
    fn rejected_value_is_escaped_and_shortened() {
        let failure = Failure::InvalidValue {
            field: "--to",
            value: format!("a\n{}", "x".repeat(3000)),
            rule: "must not exist".into(),
        };
        let message = failure.message();
        assert!(
            message.starts_with("--to: \"a\\nxxx") && message.ends_with("xxx…\" must not exist"),
            "{message}"
        );
        assert!(message.len() < 400, "{message}");
        let failure =
            Failure::File { operation: "read", path: "/a\nb".into(), errno: io::Error::other("no") };
        assert_eq!(failure.message(), "cannot read /a\\nb: no");
    }
}
