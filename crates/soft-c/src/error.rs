//! Error codes. `include/tarnsoft.h` contains the same numbers.

use std::{
    cell::Cell,
    ffi::{CStr, c_char},
};

use soft::{HandleError, PoolError, SoftError, client::ConnectError, protocol::Refusal};

/// Reason of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Error {
    InvalidArgument = 1,
    InvalidPool,
    InvalidContext,
    StaleHandle,
    Pinned,
    NotPinned,
    TooManyPins,
    OutOfBudget,
    OutOfAddressSpace,
    TooLarge,
    TooMany,
    System,
    Forked,
    Internal,
    Daemon,
    AlreadyConnected,
}

/// All errors with their messages, in the order of their numbers.
const MESSAGES: [(Error, &CStr); 16] = [
    (Error::InvalidArgument, c"invalid argument"),
    (Error::InvalidPool, c"the pool does not exist or was destroyed"),
    (Error::InvalidContext, c"the context does not exist or was destroyed"),
    (Error::StaleHandle, c"the block was freed or revoked, or the handle is invalid"),
    (Error::Pinned, c"a block is pinned"),
    (Error::NotPinned, c"the block is not pinned"),
    (Error::TooManyPins, c"too many pins"),
    (Error::OutOfBudget, c"the budget of the pool does not suffice"),
    (Error::OutOfAddressSpace, c"the address space of the pool has no free range of this length"),
    (Error::TooLarge, c"the size exceeds the maximum"),
    (Error::TooMany, c"too many pools, contexts or blocks"),
    (Error::System, c"the operating system refused the address space or a handler"),
    (Error::Forked, c"the object belongs to the parent process"),
    (Error::Internal, c"internal error of libtarnsoft"),
    (Error::Daemon, c"the soft memory daemon cannot be reached, or refused the process"),
    (Error::AlreadyConnected, c"the process has a connected pool already, or contexts of one"),
];

/// Size of a description. The path of a socket has at most 108 bytes.
const MESSAGE_BYTES: usize = 512;

thread_local! {
    /// Number of the last error of this thread, or 0.
    static LAST: Cell<i32> = const { Cell::new(0) };
    /// Description of the last [`Error::Daemon`] of this thread, with a zero byte at its end. It has no destructor, so
    /// that it is valid until the thread has ended, also in functions of atexit().
    static DAEMON_MESSAGE: Cell<[u8; MESSAGE_BYTES]> = const { Cell::new([0; MESSAGE_BYTES]) };
}

/// Returns the number of the last error of this thread, or 0.
pub fn last() -> i32 {
    LAST.get()
}

/// Records an error of this thread.
pub fn set_last(error: Error) {
    LAST.set(error as i32);
}

/// Returns the message of an error number.
pub fn message(number: i32) -> &'static CStr {
    let entry = MESSAGES.iter().find(|(error, _)| *error as i32 == number);
    match entry {
        Some((_, message)) => message,
        None if number == 0 => c"no error",
        None => c"unknown error",
    }
}

/// Returns the message of the last error of this thread, valid until the next [`connect_failed`].
pub fn last_message() -> *const c_char {
    let number = last();
    if number == Error::Daemon as i32 {
        DAEMON_MESSAGE.with(|message| message.as_ptr().cast_const().cast())
    } else {
        message(number).as_ptr()
    }
}

/// Returns the error of a failed connection, and keeps the description of an [`Error::Daemon`] for [`last_message`].
pub fn connect_failed(failure: ConnectError) -> Error {
    let text = failure.to_string();
    let error = failure.into();
    if error == Error::Daemon {
        DAEMON_MESSAGE.set(terminated(&text));
    }
    error
}

/// Returns the start of a text with a zero byte at its end.
fn terminated(text: &str) -> [u8; MESSAGE_BYTES] {
    let mut end = text.len().min(MESSAGE_BYTES - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut bytes = [0; MESSAGE_BYTES];
    bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
    bytes
}

impl From<HandleError> for Error {
    fn from(error: HandleError) -> Self {
        match error {
            HandleError::Stale => Self::StaleHandle,
            HandleError::Pinned => Self::Pinned,
            HandleError::TooManyPins => Self::TooManyPins,
        }
    }
}

impl From<SoftError> for Error {
    fn from(error: SoftError) -> Self {
        match error {
            SoftError::OutOfBudget { .. } => Self::OutOfBudget,
            SoftError::OutOfAddressSpace { .. } => Self::OutOfAddressSpace,
            SoftError::TooLarge | SoftError::KeyTooLong { .. } | SoftError::AlignmentTooLarge { .. } => {
                Self::TooLarge
            }
            SoftError::TooManyStructures(_) | SoftError::TooManyBlocks(_) => Self::TooMany,
        }
    }
}

impl From<ConnectError> for Error {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Pool(error) => error.into(),
            ConnectError::Refused { reason: Refusal::AlreadyConnected, .. } => Self::AlreadyConnected,
            ConnectError::Io { .. } | ConnectError::Refused { .. } => Self::Daemon,
        }
    }
}

impl From<PoolError> for Error {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::AddressSpace { .. } => Self::TooLarge,
            PoolError::Reserve { .. } | PoolError::PageSize(_) => Self::System,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_numbered_in_the_order_of_their_messages() {
        for (number, (error, message)) in (1..).zip(MESSAGES) {
            assert_eq!((error as i32, super::message(number)), (number, message));
        }
        assert_eq!((message(0), message(-1), message(17)), (c"no error", c"unknown error", c"unknown error"));
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        let bytes = terminated(&"ä".repeat(MESSAGE_BYTES));
        assert_eq!((&bytes[MESSAGE_BYTES - 4..], bytes[0]), (&[0xc3, 0xa4, 0, 0][..], 0xc3));
        assert_eq!(terminated("ab")[..3], *b"ab\0");
    }

    #[test]
    fn header_has_the_numbers_of_the_errors() {
        let header = include_str!("../include/tarnsoft.h");
        let numbers = header.lines().filter_map(|line| {
            let (name, number) = line.trim().strip_prefix("SOFT_ERROR_")?.split_once(" = ")?;
            Some((name.to_owned(), number.trim_end_matches(',').parse::<i32>().ok()?))
        });
        let name = |error: Error| format!("{error:?}").to_uppercase();
        let expected: Vec<_> = MESSAGES.iter().map(|(error, _)| (name(*error), *error as i32)).collect();
        assert_eq!(
            numbers.map(|(name, number)| (name.replace('_', ""), number)).collect::<Vec<_>>(),
            expected
        );
    }
}
