//! Messages between the clients of soft memory and the daemon.
//!
//! The socket has the type `SOCK_SEQPACKET`, and each datagram contains one message of [`MESSAGE_BYTES`] bytes:
//! three little-endian numbers, of which the first is the kind of the message.
//!
//! A client sends [`ClientMessage::Hello`] first. A client reduces the budget of its pool before it sends pages
//! back, and the daemon increases its record of the budget before it grants pages. So the pool never has a larger
//! budget than the daemon has recorded, whichever side ends at any time.

/// Version of the protocol.
pub const VERSION: u64 = 2;
/// Length of each message.
pub const MESSAGE_BYTES: usize = 24;

/// Encoded message.
pub type Datagram = [u8; MESSAGE_BYTES];

/// Message of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientMessage {
    /// First message.
    Hello {
        /// [`VERSION`] of the client.
        version: u64,
        /// Budget in pages that the client has from an earlier connection.
        budget: u64,
    },
    /// Requests more budget. The client sends no further request before [`DaemonMessage::Granted`].
    Request {
        /// Number of pages, at least 1.
        pages: u64,
        /// Pages that the client holds.
        held: u64,
    },
    /// Gives budget back, with or without a demand.
    Returned {
        /// Number of pages.
        pages: u64,
        /// Pages that the client holds.
        held: u64,
    },
    /// Answers a demand, after all messages with its pages.
    Answered {
        /// Number of the demand.
        demand: u64,
        /// Pages that the client holds.
        held: u64,
    },
    /// Reports the use of the budget.
    Usage {
        /// Pages that the client holds.
        held: u64,
    },
}

/// Message of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DaemonMessage {
    /// Answer to [`ClientMessage::Hello`].
    Welcome {
        /// Part of the stated budget that the client keeps. It must give the rest up.
        budget: u64,
        /// Largest budget of the client in pages. Requests beyond it are denied.
        maximum: u64,
    },
    /// The daemon closes the connection.
    Refused(Refusal),
    /// Answer to [`ClientMessage::Request`].
    Granted {
        /// Number of pages, or 0 if the request was denied.
        pages: u64,
    },
    /// Demands budget.
    Demand {
        /// Number of the demand.
        demand: u64,
        /// Number of pages. The client gives up unused budget first.
        pages: u64,
    },
}

/// Reason for the end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The user may not use the socket.
    #[error("this user is not in soft_memory.allowed_uids of host.toml")]
    UserNotAllowed,
    /// The host has too many clients, or the user has too many connections.
    #[error("there are too many clients")]
    TooManyClients,
    /// The process has a connection.
    #[error("this process is connected already")]
    AlreadyConnected,
    /// The daemon does not support the version of the client.
    #[error("the daemon has another version of the protocol")]
    Version,
    /// The client sent an invalid message, or a message at the wrong time.
    #[error("invalid message")]
    InvalidMessage,
    /// The daemon runs in a PID namespace that does not contain the process, so that it can neither measure the memory
    /// of the process nor notice its end.
    #[error(
        "the daemon does not see this process: it runs in a PID namespace that does not contain the process"
    )]
    PidNamespace,
}

/// Error of a message that cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The datagram has another length.
    #[error("message of {0} bytes: must have {MESSAGE_BYTES}")]
    Length(usize),
    /// No message has this kind, or a field is out of range.
    #[error("unknown message {0:?}")]
    Unknown([u64; 3]),
}

fn encode(fields: [u64; 3]) -> Datagram {
    let mut datagram = [0; MESSAGE_BYTES];
    let (chunks, _) = datagram.as_chunks_mut();
    chunks.iter_mut().zip(fields).for_each(|(chunk, field)| *chunk = field.to_le_bytes());
    datagram
}

fn decode(bytes: &[u8]) -> Result<[u64; 3], DecodeError> {
    match bytes.as_chunks() {
        ([first, second, third], []) => Ok([first, second, third].map(|field| u64::from_le_bytes(*field))),
        _ => Err(DecodeError::Length(bytes.len())),
    }
}

impl ClientMessage {
    /// Encodes the message.
    pub fn encode(self) -> Datagram {
        encode(match self {
            Self::Hello { version, budget } => [1, version, budget],
            Self::Request { pages, held } => [2, pages, held],
            Self::Returned { pages, held } => [3, pages, held],
            Self::Answered { demand, held } => [4, demand, held],
            Self::Usage { held } => [5, 0, held],
        })
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// [`DecodeError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        match decode(bytes)? {
            [1, version, budget] => Ok(Self::Hello { version, budget }),
            [2, pages, held] if pages > 0 => Ok(Self::Request { pages, held }),
            [3, pages, held] => Ok(Self::Returned { pages, held }),
            [4, demand, held] => Ok(Self::Answered { demand, held }),
            [5, 0, held] => Ok(Self::Usage { held }),
            fields => Err(DecodeError::Unknown(fields)),
        }
    }
}

impl DaemonMessage {
    /// Encodes the message.
    pub fn encode(self) -> Datagram {
        encode(match self {
            Self::Welcome { budget, maximum } => [101, budget, maximum],
            Self::Refused(refusal) => [102, refusal.code(), 0],
            Self::Granted { pages } => [103, pages, 0],
            Self::Demand { demand, pages } => [104, demand, pages],
        })
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// [`DecodeError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let fields = decode(bytes)?;
        let unknown = DecodeError::Unknown(fields);
        match fields {
            [101, budget, maximum] => Ok(Self::Welcome { budget, maximum }),
            [102, code, 0] => Refusal::from_code(code).map(Self::Refused).ok_or(unknown),
            [103, pages, 0] => Ok(Self::Granted { pages }),
            [104, demand, pages] => Ok(Self::Demand { demand, pages }),
            _ => Err(unknown),
        }
    }
}

impl Refusal {
    /// All reasons, in the order of their codes.
    const ALL: [Self; 6] = [
        Self::UserNotAllowed,
        Self::TooManyClients,
        Self::AlreadyConnected,
        Self::Version,
        Self::InvalidMessage,
        Self::PidNamespace,
    ];

    fn code(self) -> u64 {
        self as u64
    }

    fn from_code(code: u64) -> Option<Self> {
        usize::try_from(code).ok().and_then(|index| Self::ALL.get(index).copied())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_have_the_documented_layout() {
        let request = ClientMessage::Request { pages: 0x0102, held: 3 };
        let mut expected = [0; 24];
        (expected[0], expected[8], expected[9], expected[16]) = (2, 2, 1, 3);
        assert_eq!(request.encode(), expected);
        assert_eq!(DaemonMessage::Refused(Refusal::Version).encode()[..9], [102, 0, 0, 0, 0, 0, 0, 0, 3]);
    }

    #[test]
    fn reasons_keep_their_codes() {
        for (code, refusal) in (0..).zip(Refusal::ALL) {
            assert_eq!((refusal.code(), Refusal::from_code(code)), (code, Some(refusal)));
        }
        assert_eq!(Refusal::from_code(6), None);
    }

    #[test]
    fn invalid_messages_are_rejected() {
        assert_eq!(ClientMessage::decode(&[0; 23]), Err(DecodeError::Length(23)));
        assert_eq!(ClientMessage::decode(&[]), Err(DecodeError::Length(0)));
        assert_eq!(ClientMessage::decode(&[0; 24]), Err(DecodeError::Unknown([0; 3])));
        let nothing = ClientMessage::Request { pages: 0, held: 1 };
        assert_eq!(ClientMessage::decode(&nothing.encode()), Err(DecodeError::Unknown([2, 0, 1])));
        let granted = DaemonMessage::Granted { pages: 1 };
        assert_eq!(ClientMessage::decode(&granted.encode()), Err(DecodeError::Unknown([103, 1, 0])));
    }

    proptest! {
        #[test]
        fn accepted_messages_are_encoded_to_the_same_bytes(fields in any::<[u64; 3]>(), kind in 0..110_u64) {
            let bytes = encode([kind, fields[1] % 7, fields[2]]);
            if let Ok(message) = ClientMessage::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
            if let Ok(message) = DaemonMessage::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }
}
