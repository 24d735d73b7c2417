//! Command line of the cache server.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
};

use exposition::logs::LogArgs;
use soft::PAGE_BYTES;
use units::{
    Bytes,
    limits::{
        SOFT_CACHE_CLIENTS_DEFAULT, SOFT_CACHE_CLIENTS_MAX, SOFT_CACHE_MEMORY_DEFAULT, SOFT_CACHE_MEMORY_MAX,
        SOFT_CACHE_MEMORY_MIN,
    },
};

use crate::size::parse_size;

/// Address on which the server listens if no address is given, as Redis does.
const LISTEN_DEFAULT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 6379);

/// Cache in soft memory for clients of the Redis protocol.
#[derive(Debug, clap::Parser)]
#[command(name = "soft-cache", version)]
pub struct Args {
    /// Options of the log.
    #[command(flatten)]
    pub log: LogArgs,
    /// Address and port; requires --password-file unless it is a loopback address [default:
    /// 127.0.0.1:6379, or none with --unix-socket]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Path of a unix socket
    #[arg(long, value_name = "PATH")]
    unix_socket: Option<PathBuf>,
    /// Mode of the unix socket: all users with write permission can use the cache
    #[arg(long, value_name = "OCTAL", default_value = "600", value_parser = parse_mode)]
    unix_socket_mode: u32,
    /// Budget of keys and values, such as 64MiB; with --daemon, the largest budget
    #[arg(long, value_name = "SIZE", default_value_t = SOFT_CACHE_MEMORY_DEFAULT, value_parser = parse_memory)]
    memory: Bytes,
    /// Socket of the soft memory daemon of the host agent, which provides the budget; without it, the
    /// budget is constant
    #[arg(long, value_name = "PATH")]
    daemon: Option<PathBuf>,
    /// File with the password that clients must send with AUTH; only its owner may access the file
    #[arg(long, value_name = "PATH")]
    password_file: Option<PathBuf>,
    /// Maximum number of connected clients
    #[arg(long, value_name = "N", default_value_t = SOFT_CACHE_CLIENTS_DEFAULT,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(SOFT_CACHE_CLIENTS_MAX)))]
    max_clients: u32,
}

/// Contradiction between options.
#[derive(Debug, thiserror::Error)]
pub enum OptionError {
    /// Clients of other hosts could use the cache without a password.
    #[error("--listen: {0} is not a loopback address: requires --password-file")]
    PasswordRequired(SocketAddr),
}

/// Checked options.
#[derive(Debug)]
pub struct Options {
    /// Address of the TCP socket.
    pub listen: Option<SocketAddr>,
    /// Path and mode of the unix socket.
    pub unix_socket: Option<(PathBuf, u32)>,
    /// Budget in pages, or the largest budget of the daemon.
    pub pages: usize,
    /// Socket of the daemon that provides the budget.
    pub daemon: Option<PathBuf>,
    /// File with the password.
    pub password_file: Option<PathBuf>,
    /// Maximum number of clients.
    pub clients_max: u32,
}

impl Args {
    /// Checks the options.
    ///
    /// # Errors
    /// [`OptionError`].
    pub fn check(self) -> Result<Options, OptionError> {
        let listen = self.listen.or(self.unix_socket.is_none().then_some(LISTEN_DEFAULT));
        if let Some(address) = listen.filter(|address| !address.ip().to_canonical().is_loopback())
            && self.password_file.is_none()
        {
            return Err(OptionError::PasswordRequired(address));
        }
        Ok(Options {
            listen,
            unix_socket: self.unix_socket.map(|path| (path, self.unix_socket_mode)),
            pages: usize::try_from(self.memory.get()).map_or(usize::MAX, |bytes| bytes / PAGE_BYTES),
            daemon: self.daemon,
            password_file: self.password_file,
            clients_max: self.max_clients,
        })
    }
}

fn parse_memory(text: &str) -> Result<Bytes, String> {
    let bytes = parse_size(text.as_bytes()).ok_or("must be a size such as 64MiB or 64mb")?;
    let memory = Bytes::new(bytes);
    match (SOFT_CACHE_MEMORY_MIN.get()..=SOFT_CACHE_MEMORY_MAX.get()).contains(&memory.get()) {
        true => Ok(memory),
        false => Err(format!("must be {SOFT_CACHE_MEMORY_MIN} to {SOFT_CACHE_MEMORY_MAX}")),
    }
}

fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777 && mode & 0o600 == 0o600);
    mode.ok_or_else(|| {
        "must be an octal mode from 600 to 777 that permits its owner to read and write".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn options(arguments: &str) -> Result<Options, String> {
        let arguments = std::iter::once("soft-cache").chain(arguments.split_whitespace());
        let args = Args::try_parse_from(arguments).map_err(|error| error.to_string())?;
        args.check().map_err(|error| error.to_string())
    }

    #[test]
    fn server_listens_on_loopback_or_on_the_given_sockets() {
        let default = options("").unwrap();
        assert_eq!(
            (default.listen.unwrap().to_string(), default.pages),
            ("127.0.0.1:6379".to_owned(), 16_384)
        );
        let unix = options("--unix-socket /run/s --unix-socket-mode 660").unwrap();
        assert_eq!((unix.listen, unix.unix_socket), (None, Some(("/run/s".into(), 0o660))));
        let both = options("--unix-socket /run/s --listen [::1]:1").unwrap();
        assert!(both.listen.is_some() && both.unix_socket.is_some());
    }

    #[test]
    fn other_addresses_require_a_password() {
        for address in ["0.0.0.0:6379", "10.0.0.1:6379", "[::]:6379", "[::ffff:10.0.0.1]:6379"] {
            let error = options(&format!("--listen {address}")).unwrap_err();
            let reason = "is not a loopback address: requires --password-file";
            assert_eq!(error, format!("--listen: {address} {reason}"));
            assert!(options(&format!("--listen {address} --password-file /p")).is_ok());
        }
        assert!(options("--listen [::ffff:127.0.0.1]:6379").is_ok());
    }

    #[test]
    fn memory_has_the_notation_of_redis_or_binary_units() {
        for text in ["16MiB", "16mb", "16777216"] {
            assert_eq!(options(&format!("--memory {text}")).unwrap().pages, 4096);
        }
        let error = options("--memory many").unwrap_err();
        assert!(error.contains("must be a size such as 64MiB or 64mb"), "{error}");
    }

    #[test]
    fn values_out_of_range_are_rejected() {
        for arguments in [
            "--memory 1m",
            "--memory 1TiB",
            "--memory 512KiB",
            "--memory 65GiB",
            "--unix-socket-mode 888",
            "--unix-socket-mode 4600",
            "--unix-socket-mode 060",
            "--max-clients 0",
            "--max-clients 60001",
            "--listen 127.0.0.1",
        ] {
            assert!(options(arguments).is_err(), "{arguments}");
        }
    }
}
