//! Encoder of replies in RESP2 and RESP3.

use units::limits::SOFT_CACHE_REPLY_BYTES_MAX;

use crate::integer::push_integer;

/// Version of the protocol of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// RESP2, the default.
    #[default]
    Resp2,
    /// RESP3, selected by HELLO 3.
    Resp3,
}

impl Protocol {
    /// Returns the number of the version.
    pub fn number(self) -> i64 {
        match self {
            Self::Resp2 => 2,
            Self::Resp3 => 3,
        }
    }
}

/// Replies of a connection that are not sent yet.
#[derive(Debug, Default)]
pub struct Output {
    /// Encoded replies.
    pub bytes: Vec<u8>,
    /// Whether a reply exceeded the limit, so that `bytes` is incomplete and the connection must be closed.
    pub has_overflowed: bool,
}

/// Writer of the replies to one client.
#[derive(Debug)]
pub struct Reply<'a> {
    output: &'a mut Output,
    /// Version of the protocol.
    pub protocol: Protocol,
}

impl<'a> Reply<'a> {
    /// Returns a writer that appends to the output.
    pub fn new(output: &'a mut Output, protocol: Protocol) -> Self {
        Self { output, protocol }
    }

    /// Appends a status, such as `OK`.
    pub fn status(&mut self, text: &'static str) {
        self.line(b'+', text.as_bytes());
    }

    /// Appends an error. The text begins with a code, such as `ERR`. Line ends in the text become spaces.
    pub fn error(&mut self, text: &str) {
        let start = self.output.bytes.len() + 1;
        self.line(b'-', text.as_bytes());
        let end = self.output.bytes.len() - 2;
        let line = self.output.bytes.get_mut(start..end).unwrap_or_default();
        line.iter_mut().filter(|byte| matches!(byte, b'\r' | b'\n')).for_each(|byte| *byte = b' ');
    }

    /// Appends an integer.
    pub fn integer(&mut self, integer: i64) {
        self.header(b':', integer);
    }

    /// Appends a count.
    pub fn count(&mut self, count: usize) {
        self.integer(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Appends a string of bytes.
    pub fn bulk(&mut self, bytes: &[u8]) {
        if self.output.bytes.len() + bytes.len() > SOFT_CACHE_REPLY_BYTES_MAX {
            self.output.has_overflowed = true;
            return;
        }
        self.header(b'$', length(bytes.len()));
        self.output.bytes.extend_from_slice(bytes);
        self.output.bytes.extend_from_slice(b"\r\n");
    }

    /// Appends text for people.
    pub fn text(&mut self, text: &str) {
        match self.protocol {
            Protocol::Resp2 => self.bulk(text.as_bytes()),
            Protocol::Resp3 => {
                self.header(b'=', length(text.len() + 4));
                self.output.bytes.extend_from_slice(b"txt:");
                self.output.bytes.extend_from_slice(text.as_bytes());
                self.output.bytes.extend_from_slice(b"\r\n");
            }
        }
    }

    /// Appends the absence of a value.
    pub fn null(&mut self) {
        self.output.bytes.extend_from_slice(match self.protocol {
            Protocol::Resp2 => b"$-1\r\n",
            Protocol::Resp3 => b"_\r\n",
        });
    }

    /// Begins an array of replies.
    pub fn array(&mut self, len: usize) {
        self.header(b'*', length(len));
    }

    /// Begins a map of this number of pairs, each of which is two replies.
    pub fn map(&mut self, pairs: usize) {
        match self.protocol {
            Protocol::Resp2 => self.array(2 * pairs),
            Protocol::Resp3 => self.header(b'%', length(pairs)),
        }
    }

    fn header(&mut self, kind: u8, number: i64) {
        self.output.bytes.push(kind);
        push_integer(&mut self.output.bytes, number);
        self.output.bytes.extend_from_slice(b"\r\n");
    }

    fn line(&mut self, kind: u8, text: &[u8]) {
        self.output.bytes.push(kind);
        self.output.bytes.extend_from_slice(text);
        self.output.bytes.extend_from_slice(b"\r\n");
    }
}

fn length(len: usize) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(protocol: Protocol, write: impl FnOnce(&mut Reply<'_>)) -> String {
        let mut output = Output::default();
        write(&mut Reply::new(&mut output, protocol));
        String::from_utf8(output.bytes).unwrap()
    }

    fn write_all(reply: &mut Reply<'_>) {
        reply.map(1);
        reply.bulk(b"key");
        reply.null();
        reply.array(2);
        reply.integer(-5);
        reply.status("OK");
        reply.text("two");
    }

    #[test]
    fn replies_have_the_form_of_their_protocol() {
        assert_eq!(
            encoded(Protocol::Resp2, write_all),
            "*2\r\n$3\r\nkey\r\n$-1\r\n*2\r\n:-5\r\n+OK\r\n$3\r\ntwo\r\n"
        );
        assert_eq!(
            encoded(Protocol::Resp3, write_all),
            "%1\r\n$3\r\nkey\r\n_\r\n*2\r\n:-5\r\n+OK\r\n=7\r\ntxt:two\r\n"
        );
    }

    #[test]
    fn error_is_one_line() {
        assert_eq!(encoded(Protocol::Resp2, |reply| reply.error("ERR a\r\n+OK")), "-ERR a  +OK\r\n");
        assert_eq!(encoded(Protocol::Resp2, |reply| reply.error("")), "-\r\n");
    }

    #[test]
    fn output_is_limited() {
        let mut output = Output::default();
        let value = vec![0; SOFT_CACHE_REPLY_BYTES_MAX / 2 - 100];
        (0..3).for_each(|_| Reply::new(&mut output, Protocol::Resp2).bulk(&value));
        assert!(output.has_overflowed && output.bytes.len() <= SOFT_CACHE_REPLY_BYTES_MAX);
    }
}
