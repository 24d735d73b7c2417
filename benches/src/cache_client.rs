//! Client of the Redis protocol that sends commands in batches.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
};

use crate::failure::Failure;

/// Number of commands that [`Client::set_all`] sends together.
const BATCH: usize = 100;

/// Reply to a command of the benchmark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Status, integer or value.
    Success,
    /// GET found no value.
    Missing,
    /// Text of an error.
    Error(String),
}

/// Connection to a server.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<TcpStream>,
    address: SocketAddr,
    request: Vec<u8>,
    value: Vec<u8>,
}

impl Client {
    /// Opens a connection.
    ///
    /// # Errors
    /// [`Failure`] if the connection fails.
    pub fn connect(address: SocketAddr) -> Result<Self, Failure> {
        let failed = Failure::file_error("connect to", address.to_string());
        let stream = TcpStream::connect(address).and_then(|stream| {
            stream.set_nodelay(true)?;
            Ok(stream)
        });
        let stream = BufReader::with_capacity(1 << 20, stream.map_err(failed)?);
        Ok(Self { stream, address, request: Vec::new(), value: Vec::new() })
    }

    /// Adds a command to the batch.
    pub fn add(&mut self, arguments: &[&[u8]]) {
        // Writing to a vector cannot fail.
        let _ = write!(self.request, "*{}\r\n", arguments.len());
        for argument in arguments {
            let _ = write!(self.request, "${}\r\n", argument.len());
            self.request.extend_from_slice(argument);
            self.request.extend_from_slice(b"\r\n");
        }
    }

    /// Sends the batch.
    ///
    /// # Errors
    /// [`Failure`] if the connection fails.
    pub fn send(&mut self) -> Result<(), Failure> {
        let result = self.stream.get_mut().write_all(&self.request);
        self.request.clear();
        result.map_err(Failure::file_error("send commands to", self.address.to_string()))
    }

    /// Receives the reply to the next command.
    ///
    /// # Errors
    /// [`Failure`] if the connection fails.
    pub fn receive(&mut self) -> Result<Reply, Failure> {
        self.read_reply().map_err(Failure::file_error("receive replies from", self.address.to_string()))
    }

    fn read_reply(&mut self) -> std::io::Result<Reply> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let line = line.trim_end();
        match line.split_at_checked(1) {
            Some(("+" | ":", _)) => Ok(Reply::Success),
            Some(("-", error)) => Ok(Reply::Error(error.to_owned())),
            Some(("$", "-1")) => Ok(Reply::Missing),
            Some(("$", len)) => {
                let len: usize = len.parse().map_err(std::io::Error::other)?;
                self.value.resize(len + 2, 0);
                self.stream.read_exact(&mut self.value)?;
                Ok(Reply::Success)
            }
            _ => Err(std::io::Error::other(format!("unexpected reply {line:?}"))),
        }
    }

    /// Returns the value of the last reply that had one.
    pub fn value(&self) -> &[u8] {
        self.value.strip_suffix(b"\r\n").unwrap_or(&self.value)
    }

    /// Stores a value for each key. Returns the number of error replies.
    ///
    /// # Errors
    /// [`Failure`] if the connection fails.
    pub fn set_all(&mut self, keys: impl IntoIterator<Item = String>, value: &[u8]) -> Result<u64, Failure> {
        let mut keys = keys.into_iter();
        let mut errors = 0;
        loop {
            let mut sent = 0;
            for key in keys.by_ref().take(BATCH) {
                self.add(&[b"SET", key.as_bytes(), value]);
                sent += 1;
            }
            if sent == 0 {
                return Ok(errors);
            }
            self.send()?;
            for _ in 0..sent {
                errors += u64::from(matches!(self.receive()?, Reply::Error(_)));
            }
        }
    }

    /// Executes one command.
    ///
    /// # Errors
    /// [`Failure`] if the connection fails.
    pub fn execute(&mut self, arguments: &[&[u8]]) -> Result<Reply, Failure> {
        self.add(arguments);
        self.send()?;
        self.receive()
    }
}
