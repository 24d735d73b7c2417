//! State of one connection that commands read and change.

use std::{fmt, net::SocketAddr};

use crate::{answer::Answer, reply::Protocol, request::RequestLimits};

/// Address of a client, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Address and port.
    Tcp(SocketAddr),
    /// Process that connected to the unix socket, and its user. The process ID is 0 if the process is outside the PID
    /// namespace of the server.
    Unix { pid: i32, uid: u32 },
    /// The kernel does not report the process.
    Unknown,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix { pid, uid } => write!(f, "pid {pid}, uid {uid}"),
            Self::Unknown => f.write_str("unknown process"),
        }
    }
}

/// Number and address of a client, for the log.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    id: u64,
    peer: Peer,
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "client {} ({})", self.id, self.peer)
    }
}

/// State of one connection.
#[derive(Debug)]
pub struct Session {
    /// Number of the connection since the start of the server, from 1.
    pub id: u64,
    /// Address of the client.
    pub peer: Peer,
    /// Name that the client chose, or empty.
    pub name: Vec<u8>,
    /// Version of the protocol of replies.
    pub protocol: Protocol,
    /// Whether the client may execute commands.
    pub is_authenticated: bool,
    /// Whether the connection is closed after the next replies.
    pub is_closing: bool,
    /// Whether the client sent a line of an HTTP request. The connection is closed without a reply then.
    pub is_http: bool,
    /// Answer of the daemon for which the next command waits. It is executed again then.
    pub awaited_answer: Option<Answer>,
    /// Number of answers for which the next command has waited.
    pub budget_waits: u32,
}

impl Session {
    /// Creates the state of a new connection.
    pub fn new(id: u64, peer: Peer, is_authenticated: bool) -> Self {
        Self {
            id,
            peer,
            name: Vec::new(),
            protocol: Protocol::default(),
            is_authenticated,
            is_closing: false,
            is_http: false,
            awaited_answer: None,
            budget_waits: 0,
        }
    }

    /// Returns the number and address of the client.
    pub fn client(&self) -> Client {
        Client { id: self.id, peer: self.peer }
    }

    /// Returns the limits of the client's requests.
    pub fn limits(&self) -> RequestLimits {
        if self.is_authenticated { RequestLimits::Full } else { RequestLimits::NewClient }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_is_shown_with_its_address() {
        let shown = |peer| Session::new(7, peer, true).client().to_string();
        assert_eq!(shown(Peer::Tcp(([127, 0, 0, 1], 5000).into())), "client 7 (127.0.0.1:5000)");
        assert_eq!(shown(Peer::Unix { pid: 12, uid: 3 }), "client 7 (pid 12, uid 3)");
    }
}
