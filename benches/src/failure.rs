//! Errors of a benchmark.

use std::{io, path::PathBuf, process::ExitStatus};

/// Anything that ends a benchmark before its report.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A program could not be started.
    #[error("start {}", program.display())]
    Start {
        /// Which.
        program: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Cargo did not build the services.
    #[error("cargo could not build the services ({status}); its own words are above")]
    Build {
        /// How it ended.
        status: ExitStatus,
    },
    /// There is nothing to compare with.
    #[error(
        "no program `etcd` in PATH: this benchmark measures against Debian's etcd and proves nothing without it. \
         Install it with `apt-get install -y etcd-server` as root (`cargo xtask bench` does), then run this again"
    )]
    NoEtcd,
    /// There is no LightGBM to compare with.
    #[error(
        "no LightGBM: this benchmark measures against it and proves nothing without it. \
         `cargo xtask bench` fetches one; TARN_LIGHTGBM names the folder of a Python that has it"
    )]
    NoLightGbm,
    /// A program ended while it was needed.
    #[error("{name} ended ({status}) while it was needed; the end of its log:\n{log}")]
    Ended {
        /// Which.
        name: String,
        /// How.
        status: ExitStatus,
        /// Its last lines.
        log: String,
    },
    /// Something did not come about in time.
    #[error("{what} did not come about within {seconds} s; last seen: {seen}")]
    NotInTime {
        /// Awaited condition.
        what: String,
        /// How long.
        seconds: u64,
        /// Observed state.
        seen: String,
    },
    /// A server refused.
    #[error("{what}")]
    Refused {
        /// Request.
        what: String,
        /// Its answer.
        #[source]
        status: Box<tonic::Status>,
    },
    /// A server answered something that it never should.
    #[error("{what}: {answer}")]
    Answer {
        /// Request.
        what: String,
        /// Reply.
        answer: String,
    },
    /// No connection.
    #[error("connect to {uri}")]
    Connect {
        /// Where to.
        uri: String,
        /// Why not.
        #[source]
        source: tonic::transport::Error,
    },
    /// A file or folder could not be used.
    #[error("{what} {}", path.display())]
    File {
        /// Operation.
        what: &'static str,
        /// With which.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A durable write would cost nothing there.
    #[error(
        "{} is on {kind}, which forgets everything on power loss, so fsync costs nothing there; \
         name a folder on a disk with --dir",
        path.display()
    )]
    NotADisk {
        /// Where.
        path: PathBuf,
        /// Which file system.
        kind: String,
    },
    /// An emulated host failed.
    #[error(transparent)]
    Emulated(#[from] emulated_host::HostError),
    /// Interrupted by SIGINT or SIGTERM.
    #[error("interrupted; what was started has been ended and removed")]
    Interrupted,
}

impl Failure {
    /// Turns a kernel's answer about a file into a failure.
    pub fn file(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { what, path, source }
    }

    /// Turns a server's refusal into a failure.
    pub fn refused(what: impl Into<String>) -> impl FnOnce(tonic::Status) -> Self {
        let what = what.into();
        move |status| Self::Refused { what, status: Box::new(status) }
    }

    /// Formats the chain of causes, one per line.
    pub fn story(&self) -> String {
        let mut story = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            story.push_str(&format!("\n  because: {error}"));
            cause = error.source();
        }
        story
    }
}
