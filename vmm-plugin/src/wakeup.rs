//! Eventfd that wakes the event loop of a guest. After a wakeup, the event loop reads the queues of
//! vCPU exits and control requests.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::event::{EventfdFlags, eventfd};

/// Eventfd that is readable from the first notification until [`Self::clear`].
#[derive(Debug)]
pub struct Wakeup(OwnedFd);

impl Wakeup {
    /// Creates an eventfd without pending notifications.
    ///
    /// # Errors
    /// The error returned by eventfd(2).
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes the eventfd readable. A write error is ignored: if the counter is full, the eventfd is
    /// already readable.
    pub fn notify(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes the eventfd unreadable until the next notification.
    pub fn clear(&self) {
        // Fails with EAGAIN if no notification is pending.
        let _ = rustix::io::read(&self.0, &mut [0; size_of::<u64>()]);
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
