//! Errors of a benchmark.

use std::{io, path::PathBuf};

/// Error that ends a benchmark before its report.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A program could not be started.
    #[error("cannot start {}", program.display())]
    Start {
        /// Path or name of the program.
        program: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The programs under test cannot be built.
    #[error(transparent)]
    Programs(#[from] local_rack::ProgramsError),
    /// A process cannot be started, or ended unexpectedly.
    #[error(transparent)]
    Process(#[from] local_rack::ProcessError),
    /// etcd was not downloaded.
    #[error(
        "TARN_ETCD is not set: this benchmark compares Tarn with Debian's etcd. \
         Run `cargo xtask bench`, which downloads etcd"
    )]
    EtcdMissing,
    /// LightGBM is not installed.
    #[error(
        "LightGBM is not installed: this benchmark compares Tarn with LightGBM. \
         Run `cargo xtask bench`, which installs LightGBM, \
         or set TARN_LIGHTGBM to the path of a Python environment that contains LightGBM"
    )]
    LightGbmMissing,
    /// Redis was not downloaded.
    #[error(
        "TARN_REDIS is not set: this benchmark compares Tarn with Debian's redis-server. \
         Run `cargo xtask bench`, which downloads Redis"
    )]
    RedisMissing,
    /// A condition did not hold in time.
    #[error("timed out after {seconds} s waiting for {event}; last state: {last_state}")]
    TimedOut {
        /// Description of the event that did not occur.
        event: String,
        /// Time limit in seconds.
        seconds: u64,
        /// State that was observed last.
        last_state: String,
    },
    /// A server rejected a request.
    #[error("cannot {action}")]
    Rejected {
        /// Description of the request, such as "read a key of etcd".
        action: String,
        /// Status that the server returned.
        #[source]
        status: Box<tonic::Status>,
    },
    /// A server or program returned an unexpected reply.
    #[error("{subject}: unexpected reply: {reply}")]
    UnexpectedReply {
        /// Description of the request, or name of the program.
        subject: String,
        /// Text of the reply.
        reply: String,
    },
    /// A connection failed.
    #[error("cannot connect to {uri}")]
    Connect {
        /// URI of the server.
        uri: String,
        /// Error of the transport.
        #[source]
        source: tonic::transport::Error,
    },
    /// A file or folder could not be used.
    #[error("cannot {action} {}", path.display())]
    File {
        /// Description of the operation, such as "read".
        action: &'static str,
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A folder is not on a disk.
    #[error(
        "{} is on {kind}, which stores files in memory: set --dir to a folder on a disk",
        path.display()
    )]
    NotADisk {
        /// Path of the folder.
        path: PathBuf,
        /// Type of the file system.
        kind: String,
    },
    /// An emulated host failed.
    #[error(transparent)]
    Emulated(#[from] emulated_host::HostError),
    /// SIGINT or SIGTERM interrupted the benchmark.
    #[error("interrupted; all processes were stopped and folders removed")]
    Interrupted,
}

impl Failure {
    /// Returns a closure for `map_err` that converts an error of a file operation.
    pub fn file_error(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }

    /// Returns a closure for `map_err` that converts the status of a rejected request.
    pub fn rejection(action: impl Into<String>) -> impl FnOnce(tonic::Status) -> Self {
        let action = action.into();
        move |status| Self::Rejected { action, status: Box::new(status) }
    }

    /// Returns the error message, followed by one line for each cause.
    pub fn error_chain(&self) -> String {
        let mut error_chain = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            error_chain.push_str(&format!("\n  because: {error}"));
            cause = error.source();
        }
        error_chain
    }
}
