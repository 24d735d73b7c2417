//! Options that every command of `tarn` takes: where the manager is, with which credentials, how long to wait and how to
//! print. The commands' own options are beside the commands.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};

/// Options that every command takes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// The pool manager: http://HOST:PORT, https://HOST:PORT or unix:/PATH [default: unix:/run/tarn/manager.sock]
    #[arg(long, env = "TARN_ENDPOINT", global = true, value_name = "URI")]
    pub endpoint: Option<String>,
    /// Token of this client's role, for a manager on a loopback address: STORE/roles/admin.token or scheduler.token
    #[arg(long, env = "TARN_TOKEN_FILE", global = true, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Certificate authority of the manager, a PEM file
    #[arg(long, env = "TARN_CA", global = true, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// This client's certificate, a PEM file; needs --key
    #[arg(long, env = "TARN_CERT", global = true, value_name = "FILE")]
    pub cert: Option<PathBuf>,
    /// This client's private key, a PEM file; needs --cert
    #[arg(long, env = "TARN_KEY", global = true, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Name in the manager's certificate, if it is not the endpoint's host
    #[arg(long, env = "TARN_SERVER_NAME", global = true, value_name = "NAME")]
    pub server_name: Option<String>,
    /// How long to wait for an answer, such as 500ms, 30s or 5m; a watch ends after it [default: 30s, or 5m when waiting
    /// for slices; a watch has none]
    #[arg(long, global = true, value_name = "TIME", value_parser = span)]
    pub timeout: Option<Duration>,
    /// Output format
    #[arg(short, long, global = true, value_enum, default_value_t)]
    pub output: Format,
}

/// Format of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table.
    #[default]
    Table,
    /// A table with every column.
    Wide,
    /// JSON; errors, too, are JSON on stderr.
    Json,
    /// The same structure as YAML.
    Yaml,
}

/// Parses a time such as 500ms, 30s, 5m or 1h30m.
///
/// # Errors
/// A message for the user, if the text is no time or the time is zero.
pub fn span(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => Err("must be longer than 0".to_owned()),
        Ok(span) => Ok(span),
        Err(wrong) => Err(format!("{wrong}: must be a time such as 500ms, 30s or 5m")),
    }
}
