//! Error type of all tasks. `main` prints the error of a task with its causes.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
    process::{ExitCode, ExitStatus},
    time::Duration,
};

use emulated_host::HostError;

/// Error that ends a task.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A program that the task needs cannot be started.
    #[error("cannot start {program}")]
    Start {
        /// Name of the program.
        program: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// A command failed. The command has printed the reason.
    #[error("{step} failed: {status}")]
    Step {
        /// Title of the step, or the command.
        step: String,
        /// Exit status of the command.
        status: ExitStatus,
    },
    /// An operation on a file or folder failed.
    #[error("cannot {operation} {}", path.display())]
    File {
        /// Verb for the message, such as "read".
        operation: &'static str,
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The output of a program cannot be parsed.
    #[error("unexpected output of {program}: {reason}")]
    UnexpectedOutput {
        /// Name of the program.
        program: String,
        /// Description of the problem.
        reason: String,
    },
    /// A required program is missing, and this user cannot install packages.
    #[error(
        "{program} is not installed: install the Debian package {package}, for example with apt-get install {package}"
    )]
    Missing {
        /// Name of the program.
        program: &'static str,
        /// Debian package that contains the program.
        package: &'static str,
    },
    /// Files violate rules of the repository. All violations were printed before.
    #[error("found {0} violations of the repository's rules")]
    RulesViolated(usize),
    /// An event did not occur within a time limit.
    #[error("timed out after {limit:?} waiting for {event}")]
    TimedOut {
        /// Description of the event.
        event: &'static str,
        /// Time limit of the wait.
        limit: Duration,
    },
    /// An emulated host cannot be started or fails.
    #[error(transparent)]
    Emulated(HostError),
    /// A process of the demo cannot be started or fails.
    #[error(transparent)]
    Process(#[from] local_rack::ProcessError),
    /// The user interrupted the task.
    #[error("interrupted")]
    Interrupted,
    /// The task completed with a bad result, such as a failed audit.
    #[error("{0}")]
    BadResult(String),
}

impl From<HostError> for Failure {
    fn from(error: HostError) -> Self {
        match error {
            HostError::Interrupted => Self::Interrupted,
            other => Self::Emulated(other),
        }
    }
}

impl Failure {
    /// Returns a closure for `map_err` that converts an I/O error of a file or folder.
    pub fn file_error(operation: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_owned();
        move |source| Self::File { operation, path, source }
    }

    /// Returns a closure for `map_err` that converts an error from starting a program.
    pub fn start_error(program: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let program = program.into();
        move |source| Self::Start { program, source }
    }

    /// Prints the error with its causes to stderr, and returns the exit code of the task.
    pub fn report(&self) -> ExitCode {
        eprint!("error: {self}");
        let mut cause = self.source();
        while let Some(error) = cause {
            eprint!(": {error}");
            cause = error.source();
        }
        eprintln!();
        match self {
            // 128 + SIGINT: the exit code that shells use for a program ended by SIGINT.
            Self::Interrupted => ExitCode::from(130),
            _ => ExitCode::FAILURE,
        }
    }
}
