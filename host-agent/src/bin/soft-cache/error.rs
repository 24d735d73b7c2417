//! Error replies of commands, with the texts of Redis.

use std::fmt;

use soft::SoftError;
use units::limits::SOFT_CACHE_ERROR_BYTES_MAX;

use crate::{answer::Answer, request::Request};

/// Error of a command. The text is the error reply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// The command does not exist.
    #[error("ERR unknown command '{name}', with args beginning with: {arguments}")]
    UnknownCommand {
        /// Name, shortened.
        name: String,
        /// First arguments, shortened.
        arguments: String,
    },
    /// The subcommand does not exist.
    #[error("ERR unknown subcommand '{subcommand}'. Try {command} HELP.")]
    UnknownSubcommand {
        /// Name of the command.
        command: &'static str,
        /// Subcommand, shortened.
        subcommand: String,
    },
    /// The command has too few or too many arguments.
    #[error("ERR wrong number of arguments for '{0}' command")]
    ArgumentCount(&'static str),
    /// An option does not exist or contradicts another one.
    #[error("ERR syntax error")]
    Syntax,
    /// An argument or a value is no integer of 64 bits.
    #[error("ERR value is not an integer or out of range")]
    NotAnInteger,
    /// The result of INCR or similar is no integer of 64 bits.
    #[error("ERR increment or decrement would overflow")]
    Overflow,
    /// The decrement has no negative counterpart.
    #[error("ERR decrement would overflow")]
    DecrementOverflow,
    /// An expiry time is not positive or too large.
    #[error("ERR invalid expire time in '{0}' command")]
    ExpireTime(&'static str),
    /// The key or the value is too long.
    #[error("ERR string exceeds maximum allowed size ({0} bytes)")]
    TooLong(usize),
    /// The value does not fit into the memory.
    #[error("OOM command not allowed when used memory > 'maxmemory'.")]
    OutOfMemory,
    /// The command must be executed again after the daemon's answer. The client receives no reply.
    #[error("the command waits for budget")]
    BudgetRequested(Answer),
    /// The client must authenticate first.
    #[error("NOAUTH Authentication required.")]
    NotAuthenticated,
    /// HELLO without AUTH on a connection that must authenticate.
    #[error(
        "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> \
         option can be used to authenticate the client and select the RESP protocol version at the same time"
    )]
    HelloNotAuthenticated,
    /// The user or the password is wrong.
    #[error("WRONGPASS invalid username-password pair or user is disabled.")]
    WrongPassword,
    /// The server has no password.
    #[error(
        "ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration is \
         correct?"
    )]
    NoPassword,
    /// The protocol version is not 2 or 3.
    #[error("NOPROTO unsupported protocol version")]
    Protocol,
    /// The protocol version is not a number.
    #[error("ERR Protocol version is not an integer or out of range")]
    ProtocolNotAnInteger,
    /// The database is not 0.
    #[error("ERR DB index is out of range")]
    Database,
    /// The name of a client has other characters than printable ones, or is too long.
    #[error("ERR Client names cannot contain spaces, newlines or special characters.")]
    ClientName,
    /// A parameter of CONFIG SET cannot be changed.
    #[error("ERR Unknown option or number of arguments for CONFIG SET - '{0}'")]
    UnknownParameter(String),
    /// The value of maxmemory is not a size.
    #[error(
        "ERR CONFIG SET failed (possibly related to argument 'maxmemory') - argument must be a memory value"
    )]
    MaxMemorySyntax,
    /// The value of maxmemory is not allowed.
    #[error(
        "ERR CONFIG SET failed (possibly related to argument 'maxmemory') - argument must be between {minimum} and {maximum}"
    )]
    MaxMemory {
        /// Smallest value in bytes.
        minimum: u64,
        /// Largest value in bytes.
        maximum: u64,
    },
    /// Another change of maxmemory has not ended.
    #[error(
        "ERR CONFIG SET failed (possibly related to argument 'maxmemory') - another change is in progress"
    )]
    MaxMemoryBusy,
    /// The daemon determines the budget.
    #[error(
        "ERR CONFIG SET failed (possibly related to argument 'maxmemory') - the soft memory daemon determines the budget"
    )]
    MaxMemoryOfDaemon,
}

impl CommandError {
    /// Returns the error for a command that does not exist.
    pub fn unknown_command(request: Request<'_>) -> Self {
        let mut arguments = String::new();
        for argument in request.arguments_from(1) {
            let Some(space) =
                SOFT_CACHE_ERROR_BYTES_MAX.checked_sub(arguments.len()).filter(|space| *space > 0)
            else {
                break;
            };
            arguments.push_str(&format!("'{}' ", Shortened(argument, space)));
        }
        Self::UnknownCommand { name: shortened(request.get(0).unwrap_or_default()), arguments }
    }
}

/// Text of an argument of a client, for an error reply.
pub fn shortened(bytes: &[u8]) -> String {
    Shortened(bytes, SOFT_CACHE_ERROR_BYTES_MAX).to_string()
}

/// Argument of a client, and the maximum number of its bytes that are printed.
struct Shortened<'a>(&'a [u8], usize);

impl fmt::Display for Shortened<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        String::from_utf8_lossy(&self.0[..self.0.len().min(self.1)]).fmt(f)
    }
}

impl From<SoftError> for CommandError {
    fn from(error: SoftError) -> Self {
        match error {
            SoftError::OutOfBudget { .. }
            | SoftError::OutOfAddressSpace { .. }
            | SoftError::TooLarge
            | SoftError::AlignmentTooLarge { .. }
            | SoftError::TooManyStructures(_)
            | SoftError::TooManyBlocks(_) => Self::OutOfMemory,
            SoftError::KeyTooLong { maximum, .. } => Self::TooLong(maximum),
        }
    }
}
