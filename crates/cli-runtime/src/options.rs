//! Global options of the commands of `tarn`: endpoint, credentials, timeout and output format.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use units::shortened;

/// Options that every command accepts.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Address of the pool manager: http://HOST:PORT, https://HOST:PORT or unix:/PATH; of several
    /// managers, separated by commas, the leader is used [default: unix:/run/tarn/manager.sock]
    #[arg(long, env = "TARN_ENDPOINT", global = true, value_name = "URI")]
    pub endpoint: Option<String>,
    /// File with the token of this client's role, for a manager on a loopback address or unix
    /// socket: STORE/roles/admin.token or scheduler.token
    #[arg(long, env = "TARN_TOKEN_FILE", global = true, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Certificate authority that signed the manager's certificate (PEM)
    #[arg(long, env = "TARN_CA", global = true, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Client certificate (PEM); requires --key
    #[arg(long, env = "TARN_CERT", global = true, value_name = "FILE")]
    pub cert: Option<PathBuf>,
    /// Private key of the client certificate (PEM); requires --cert
    #[arg(long, env = "TARN_KEY", global = true, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Name expected in the manager's certificate [default: the host in --endpoint]
    #[arg(long, env = "TARN_SERVER_NAME", global = true, value_name = "NAME")]
    pub server_name: Option<String>,
    /// Time limit of a request, or of a whole watch, such as 500ms, 30s or 5m [default: 30s; 5m
    /// when waiting for slices or models; none for a watch]
    #[arg(long, global = true, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Output format
    #[arg(short, long, global = true, value_enum, default_value_t)]
    pub output: Format,
}

/// Output format of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Table with the most important columns
    #[default]
    Table,
    /// Table with all columns
    Wide,
    /// JSON; errors are also printed as JSON, on stderr
    Json,
    /// YAML, with the same structure as JSON
    Yaml,
    /// Comma-separated values; only for `tarn plan`
    Csv,
}

/// Parses a duration such as 500ms, 30s, 5m or 1h30m.
///
/// # Errors
/// A message for the user if the text is not a duration or the duration is 0.
pub fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => Err("must be longer than 0".to_owned()),
        Ok(duration) => Ok(duration),
        Err(error) => {
            let reason = error.to_string();
            Err(format!("{}: must be a duration such as 500ms, 30s or 5m", shortened(&reason)))
        }
    }
}
