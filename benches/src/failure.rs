//! Errors of a benchmark.

use std::{io, path::PathBuf};

/// Anything that ends a benchmark before its report.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A program could not be started.
    #[error("cannot start {}", program.display())]
    Start {
        /// The program.
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
    /// etcd is not installed.
    #[error(
        "no program `etcd` in PATH: this benchmark compares with the etcd of Debian. \
         Install it with `apt-get install -y etcd-server` as root (`cargo xtask bench` does), then run this again"
    )]
    EtcdMissing,
    /// LightGBM is not installed.
    #[error(
        "LightGBM is missing: this benchmark compares with it. \
         `cargo xtask bench` installs it; TARN_LIGHTGBM names the folder of a Python environment with it"
    )]
    LightGbmMissing,
    /// A condition did not hold in time.
    #[error("timed out after {seconds} s waiting for {what}; last state: {seen}")]
    TimedOut {
        /// Awaited condition.
        what: String,
        /// Time limit.
        seconds: u64,
        /// Observed state.
        seen: String,
    },
    /// A server rejected a request.
    #[error("{what}")]
    Rejected {
        /// Request.
        what: String,
        /// Status of the server.
        #[source]
        status: Box<tonic::Status>,
    },
    /// A server or program returned an unexpected reply.
    #[error("{what}: unexpected reply: {reply}")]
    UnexpectedReply {
        /// Request.
        what: String,
        /// Reply.
        reply: String,
    },
    /// A connection failed.
    #[error("cannot connect to {uri}")]
    Connect {
        /// Endpoint.
        uri: String,
        /// Error of the transport.
        #[source]
        source: tonic::transport::Error,
    },
    /// A file or folder could not be used.
    #[error("cannot {what} {}", path.display())]
    File {
        /// Operation.
        what: &'static str,
        /// Object.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A folder is not on a disk.
    #[error(
        "{} is on {kind}, which is not durable, so fsync is free there; \
         name a folder on a disk with --dir",
        path.display()
    )]
    NotADisk {
        /// Folder.
        path: PathBuf,
        /// Type of the file system.
        kind: String,
    },
    /// An emulated host failed.
    #[error(transparent)]
    Emulated(#[from] emulated_host::HostError),
    /// Interrupted by SIGINT or SIGTERM.
    #[error("interrupted; all processes were stopped and folders removed")]
    Interrupted,
}

impl Failure {
    /// Returns a closure for `map_err` where a file is used.
    pub fn file(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { what, path, source }
    }

    /// Returns a closure for `map_err` where a server rejects a request.
    pub fn rejected(what: impl Into<String>) -> impl FnOnce(tonic::Status) -> Self {
        let what = what.into();
        move |status| Self::Rejected { what, status: Box::new(status) }
    }

    /// Formats the error with its causes, one per line.
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
