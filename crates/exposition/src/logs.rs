//! The log of a service: lines on standard error, as text or as JSON, filtered by `RUST_LOG`.

use std::io::{IsTerminal as _, stderr};

use clap::ValueEnum;
use tracing_subscriber::{
    EnvFilter,
    filter::{FromEnvError, LevelFilter},
};

/// Format of the lines of a service's log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One readable line for each event.
    #[default]
    Text,
    /// One JSON object for each event: `timestamp`, `level`, `message` and its fields.
    Json,
}

/// Command-line options for the log of a service.
#[derive(Clone, Debug, clap::Args)]
pub struct LogArgs {
    /// Format of log lines on standard error; `RUST_LOG` sets the level, such as warn or
    /// pool_manager=debug
    #[arg(long, env = "TARN_LOG_FORMAT", value_enum, default_value_t, global = true)]
    log_format: LogFormat,
}

impl LogArgs {
    /// Starts logging to stderr, at level info unless `RUST_LOG` sets another level.
    ///
    /// # Errors
    /// [`FromEnvError`] if `RUST_LOG` is not a valid list of directives.
    pub fn start(&self) -> Result<(), FromEnvError> {
        let filter = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env()?;
        let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr).with_target(false);
        match self.log_format {
            LogFormat::Text => log.with_ansi(stderr().is_terminal()).init(),
            LogFormat::Json => log.json().flatten_event(true).init(),
        }
        Ok(())
    }
}
