//! Error of a task, printed once at the end, with its causes.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
    process::{ExitCode, ExitStatus},
    time::Duration,
};

/// Error of a task.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A program that the task needs does not start.
    #[error("cannot start {program}")]
    Start {
        /// The program.
        program: String,
        /// The cause.
        source: io::Error,
    },
    /// A step of the task failed and has printed the reason.
    #[error("{step} failed: {status}")]
    Step {
        /// The step.
        step: String,
        /// Exit status.
        status: ExitStatus,
    },
    /// A file or folder cannot be used.
    #[error("cannot {operation} {}", path.display())]
    File {
        /// Operation.
        operation: &'static str,
        /// Object.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The output of a program cannot be parsed.
    #[error("unexpected output of {program}: {reason}")]
    UnexpectedOutput {
        /// The program.
        program: String,
        /// Problem of the output.
        reason: String,
    },
    /// A required program is missing, and this user cannot install it.
    #[error(
        "{program} is not installed: install the Debian package {package}, for example with apt-get install {package}"
    )]
    Missing {
        /// The program.
        program: &'static str,
        /// The package that holds it.
        package: &'static str,
    },
    /// Rules of the repository are violated; each violation was printed.
    #[error("{0} violations of the repository's rules")]
    RulesViolated(usize),
    /// A condition did not hold in time.
    #[error("timed out after {limit:?} waiting for {event}")]
    TimedOut {
        /// Condition.
        event: &'static str,
        /// Time limit.
        limit: Duration,
    },
    /// An emulated host failed.
    #[error(transparent)]
    Emulated(#[from] emulated_host::HostError),
    /// A process of the demo failed.
    #[error(transparent)]
    Process(#[from] local_rack::ProcessError),
    /// The user interrupted the task.
    #[error("interrupted")]
    Interrupted,
    /// The task ran, and its result is a failure.
    #[error("{0}")]
    Result(String),
}

impl Failure {
    /// Returns a closure for `map_err` where a file or folder is used.
    pub fn file(operation: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_owned();
        move |source| Self::File { operation, path, source }
    }

    /// Returns a closure for `map_err` where a program is started.
    pub fn start(program: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let program = program.into();
        move |source| Self::Start { program, source }
    }

    /// Prints the error with its causes on stderr, and returns an exit code.
    pub fn report(&self) -> ExitCode {
        eprint!("error: {self}");
        let mut cause = self.source();
        while let Some(error) = cause {
            eprint!(": {error}");
            cause = error.source();
        }
        eprintln!();
        match self {
            // As a shell reports a program ended by SIGINT.
            Self::Interrupted => ExitCode::from(130),
            _ => ExitCode::FAILURE,
        }
    }
}
