//! Error of a task, printed once at the end, with its causes.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
    process::{ExitCode, ExitStatus},
    time::Duration,
};

/// Why a task did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A program that the task needs does not start.
    #[error("start {program}")]
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
        /// How it ended.
        status: ExitStatus,
    },
    /// A file or folder cannot be used.
    #[error("{tried} {}", path.display())]
    File {
        /// Operation.
        tried: &'static str,
        /// Object.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A program answered something that cannot be understood.
    #[error("what {program} said is not what was expected: {why}")]
    Answer {
        /// The program.
        program: String,
        /// Problem of its reply.
        why: String,
    },
    /// A program is needed and not installed, and cannot be installed from here.
    #[error(
        "{program} is needed: install the Debian package {package}, for example with apt-get install {package}"
    )]
    Missing {
        /// The program.
        program: &'static str,
        /// The package that holds it.
        package: &'static str,
    },
    /// House rules are broken; each was printed.
    #[error("{0} house rules broken")]
    Untidy(usize),
    /// Something did not happen in time.
    #[error("{what} did not come within {within:?}")]
    Late {
        /// Condition.
        what: &'static str,
        /// For how long it was waited for.
        within: Duration,
    },
    /// An emulated host failed.
    #[error(transparent)]
    Emulated(#[from] emulated_host::HostError),
    /// The person asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// The task ran and its result is not good.
    #[error("{0}")]
    Result(String),
}

impl Failure {
    /// For `map_err` where a file or folder is used.
    pub fn file(tried: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_owned();
        move |source| Self::File { tried, path, source }
    }

    /// For `map_err` where a program is started.
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
