//! An eventfd that wakes a guest's event loop. The reason for a wakeup is in the queues that the
//! loop reads.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::event::{EventfdFlags, eventfd};

/// An eventfd that stays readable from the first notification until it is cleared.
#[derive(Debug)]
pub struct Wakeup(OwnedFd);

impl Wakeup {
    /// Creates an eventfd without a pending notification.
    ///
    /// # Errors
    /// The error of eventfd(2).
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes the eventfd readable. A full counter is ignored: the eventfd is readable then.
    pub fn notify(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Resets the eventfd until the next notification.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; size_of::<u64>()]); // EAGAIN: no notification is pending
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
