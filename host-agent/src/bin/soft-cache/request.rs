//! Parser of requests of the Redis protocol: arrays of bulk strings, and inline commands.
//!
//! The crate `redis-protocol` is not used. It has no inline commands and no limits on the number and length of
//! arguments, decodes nested arrays recursively without a limit, and decodes an incomplete request from its start
//! again when more bytes arrive. This parser resumes where it stopped, and allocates nothing by declared sizes.

use std::ops::Range;

use units::limits::{
    SOFT_CACHE_ARGUMENTS_MAX, SOFT_CACHE_COMMAND_BYTES_MAX, SOFT_CACHE_HEADER_BYTES_MAX,
    SOFT_CACHE_INLINE_BYTES_MAX, SOFT_CACHE_NEW_CLIENT_ARGUMENT_BYTES_MAX,
    SOFT_CACHE_NEW_CLIENT_ARGUMENTS_MAX, SOFT_CACHE_VALUE_BYTES_MAX,
};

use crate::integer::parse_integer;

/// Number of arguments for which a parser retains memory.
const RETAINED_ARGUMENTS: usize = 64;

/// Violation of the protocol. The text is that of Redis, as far as Redis has this error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// An inline command without end.
    #[error("too big inline request")]
    InlineTooLong,
    /// A quote that is not closed, or that is followed by another character than a space.
    #[error("unbalanced quotes in request")]
    UnbalancedQuotes,
    /// A line with the number of arguments without end.
    #[error("too big mbulk count string")]
    CountTooLong,
    /// A number of arguments that is no number or too large.
    #[error("invalid multibulk length")]
    Count,
    /// Too many arguments for a client that has not authenticated.
    #[error("unauthenticated multibulk length")]
    CountOfNewClient,
    /// Another type than a bulk string as an argument.
    #[error("expected '$', got '{}'", char::from(*.0).escape_default())]
    NotABulkString(u8),
    /// A line with the length of an argument without end.
    #[error("too big bulk count string")]
    LengthTooLong,
    /// A length of an argument that is no number, negative or too large.
    #[error("invalid bulk length")]
    Length,
    /// An argument that is too long for a client that has not authenticated.
    #[error("unauthenticated bulk length")]
    LengthOfNewClient,
    /// An argument without CRLF at its end.
    #[error("expected CRLF after bulk string")]
    NoLineEnd,
    /// All arguments together are too long.
    #[error("too big request")]
    RequestTooLong,
}

/// Limits of the requests of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestLimits {
    /// A client that may execute commands.
    Full,
    /// A client that must authenticate first.
    NewClient,
}

/// Step of the parser.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Step {
    /// At the first byte of a request.
    #[default]
    Start,
    /// Before the length of an argument.
    Length { missing: usize },
    /// In an argument.
    Argument { missing: usize, len: usize },
}

/// Incremental parser of the requests of a connection.
#[derive(Debug, Default)]
pub struct RequestParser {
    step: Step,
    /// Position in the request. The bytes before it are parsed.
    position: usize,
    /// Arguments that are complete, as ranges of the request or of `unquoted`.
    arguments: Vec<Range<usize>>,
    /// Arguments of an inline command, without quotes.
    unquoted: Vec<u8>,
    is_inline: bool,
}

/// Complete request: the name of a command and its arguments. The number of arguments may be 0.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    bytes: &'a [u8],
    arguments: &'a [Range<usize>],
}

impl<'a> Request<'a> {
    /// Returns the number of arguments, including the name of the command.
    pub fn len(&self) -> usize {
        self.arguments.len()
    }

    /// Returns an argument. The name of the command is argument 0.
    pub fn get(&self, index: usize) -> Option<&'a [u8]> {
        self.arguments.get(index).map(|range| &self.bytes[range.clone()])
    }

    /// Returns the arguments from `first` on.
    pub fn arguments_from(&self, first: usize) -> impl ExactSizeIterator<Item = &'a [u8]> {
        let bytes = self.bytes;
        self.arguments.get(first..).unwrap_or_default().iter().map(|range| &bytes[range.clone()])
    }
}

impl RequestParser {
    /// Continues to parse the request at the start of `bytes`. Returns the length of the request if it is
    /// complete. Otherwise, the next call passes the same bytes and at least one more.
    ///
    /// # Errors
    /// [`ProtocolError`]. The position of the next request is unknown then.
    pub fn parse(&mut self, bytes: &[u8], limits: RequestLimits) -> Result<Option<usize>, ProtocolError> {
        loop {
            let next = match self.step {
                Step::Start => match bytes.first() {
                    None => return Ok(None),
                    Some(b'*') => self.parse_count(bytes, limits)?,
                    Some(_) => return self.parse_inline(bytes),
                },
                Step::Length { missing: 0 } => return Ok(Some(self.position)),
                Step::Length { missing } => self.parse_length(bytes, missing, limits)?,
                Step::Argument { missing, len } => self.parse_argument(bytes, missing, len)?,
            };
            let Some(next) = next else { return Ok(None) };
            self.step = next;
        }
    }

    /// Returns the request that [`parse`](Self::parse) completed. `bytes` are those that were passed to it.
    pub fn request<'a>(&'a self, bytes: &'a [u8]) -> Request<'a> {
        let bytes = if self.is_inline { &self.unquoted } else { bytes };
        Request { bytes, arguments: &self.arguments }
    }

    /// Prepares for the next request.
    pub fn finish(&mut self) {
        self.step = Step::Start;
        self.position = 0;
        self.arguments.clear();
        self.arguments.shrink_to(RETAINED_ARGUMENTS);
        if self.is_inline {
            (self.is_inline, self.unquoted) = (false, Vec::new());
        }
    }

    /// Returns the memory of the parser in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.arguments.capacity() * size_of::<Range<usize>>() + self.unquoted.capacity()
    }

    fn parse_count(&mut self, bytes: &[u8], limits: RequestLimits) -> Result<Option<Step>, ProtocolError> {
        let Some(line) = self.take_header(bytes, ProtocolError::CountTooLong, ProtocolError::Count)? else {
            return Ok(None);
        };
        let count = parse_integer(line).ok_or(ProtocolError::Count)?;
        // As in Redis, a request with a negative number of arguments is empty.
        let missing = usize::try_from(count.max(0)).map_err(|_| ProtocolError::Count)?;
        match limits {
            _ if missing > SOFT_CACHE_ARGUMENTS_MAX => Err(ProtocolError::Count),
            RequestLimits::NewClient if missing > SOFT_CACHE_NEW_CLIENT_ARGUMENTS_MAX => {
                Err(ProtocolError::CountOfNewClient)
            }
            _ => Ok(Some(Step::Length { missing })),
        }
    }

    fn parse_length(
        &mut self,
        bytes: &[u8],
        missing: usize,
        limits: RequestLimits,
    ) -> Result<Option<Step>, ProtocolError> {
        match bytes.get(self.position) {
            None => return Ok(None),
            Some(b'$') => {}
            Some(other) => return Err(ProtocolError::NotABulkString(*other)),
        }
        let Some(line) = self.take_header(bytes, ProtocolError::LengthTooLong, ProtocolError::Length)? else {
            return Ok(None);
        };
        let len = parse_integer(line).and_then(|len| usize::try_from(len).ok());
        let len = len.filter(|len| *len <= SOFT_CACHE_VALUE_BYTES_MAX).ok_or(ProtocolError::Length)?;
        if limits == RequestLimits::NewClient && len > SOFT_CACHE_NEW_CLIENT_ARGUMENT_BYTES_MAX {
            return Err(ProtocolError::LengthOfNewClient);
        }
        if self.position + len > SOFT_CACHE_COMMAND_BYTES_MAX {
            return Err(ProtocolError::RequestTooLong);
        }
        Ok(Some(Step::Argument { missing, len }))
    }

    fn parse_argument(
        &mut self,
        bytes: &[u8],
        missing: usize,
        len: usize,
    ) -> Result<Option<Step>, ProtocolError> {
        let end = self.position + len;
        let Some(line_end) = bytes.get(end..end + 2) else { return Ok(None) };
        if line_end != b"\r\n" {
            return Err(ProtocolError::NoLineEnd);
        }
        self.arguments.push(self.position..end);
        self.position = end + 2;
        Ok(Some(Step::Length { missing: missing - 1 }))
    }

    /// Takes a line of a type byte and a number. Returns the number as text, or `None` if the line is incomplete.
    fn take_header<'a>(
        &mut self,
        bytes: &'a [u8],
        too_long: ProtocolError,
        malformed: ProtocolError,
    ) -> Result<Option<&'a [u8]>, ProtocolError> {
        let rest = &bytes[self.position..];
        let searched = &rest[..rest.len().min(SOFT_CACHE_HEADER_BYTES_MAX)];
        match searched.iter().position(|byte| *byte == b'\n') {
            Some(end) => {
                self.position += end + 1;
                rest[1..end].strip_suffix(b"\r").map(Some).ok_or(malformed)
            }
            None if searched.len() == SOFT_CACHE_HEADER_BYTES_MAX => Err(too_long),
            None => Ok(None),
        }
    }

    /// Parses a command that is one line. `position` is the number of bytes without a line end.
    fn parse_inline(&mut self, bytes: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let Some(end) = bytes[self.position..].iter().position(|byte| *byte == b'\n') else {
            self.position = bytes.len();
            let is_too_long = bytes.len() > SOFT_CACHE_INLINE_BYTES_MAX;
            return if is_too_long { Err(ProtocolError::InlineTooLong) } else { Ok(None) };
        };
        let end = self.position + end;
        if end > SOFT_CACHE_INLINE_BYTES_MAX {
            return Err(ProtocolError::InlineTooLong);
        }
        let line = bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]);
        self.is_inline = true;
        let mut rest = line.trim_ascii_start();
        while !rest.is_empty() {
            let start = self.unquoted.len();
            rest = unquote(rest, &mut self.unquoted)?.trim_ascii_start();
            self.arguments.push(start..self.unquoted.len());
        }
        Ok(Some(end + 1))
    }
}

/// Appends the first argument of a line to `to`, without quotes. Returns the rest of the line.
fn unquote<'a>(mut line: &'a [u8], to: &mut Vec<u8>) -> Result<&'a [u8], ProtocolError> {
    while let Some((first, rest)) = line.split_first() {
        line = match first {
            b' ' | b'\t' | b'\r' | 0 => return Ok(rest),
            quote @ (b'"' | b'\'') => {
                let rest = unquote_string(rest, *quote, to)?;
                let is_end = rest.first().is_none_or(u8::is_ascii_whitespace);
                return if is_end { Ok(rest) } else { Err(ProtocolError::UnbalancedQuotes) };
            }
            byte => {
                to.push(*byte);
                rest
            }
        };
    }
    Ok(line)
}

/// Appends a string up to its closing quote. Returns the bytes after the quote.
fn unquote_string<'a>(mut line: &'a [u8], quote: u8, to: &mut Vec<u8>) -> Result<&'a [u8], ProtocolError> {
    loop {
        let (byte, rest) = match line {
            [] => return Err(ProtocolError::UnbalancedQuotes),
            [first, rest @ ..] if *first == quote => return Ok(rest),
            [b'\\', b'x', high, low, rest @ ..]
                if quote == b'"' && high.is_ascii_hexdigit() && low.is_ascii_hexdigit() =>
            {
                (hex_digit(*high) << 4 | hex_digit(*low), rest)
            }
            [b'\\', escaped, rest @ ..] if quote == b'"' => (escaped_byte(*escaped), rest),
            [b'\\', b'\'', rest @ ..] if quote == b'\'' => (b'\'', rest),
            [first, rest @ ..] => (*first, rest),
        };
        to.push(byte);
        line = rest;
    }
}

fn hex_digit(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => digit.to_ascii_lowercase() - b'a' + 10,
    }
}

fn escaped_byte(escaped: u8) -> u8 {
    match escaped {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 8,
        b'a' => 7,
        other => other,
    }
}

#[cfg(test)]
mod tests;
