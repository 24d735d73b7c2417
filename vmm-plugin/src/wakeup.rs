//! What wakes the loop that decides about a guest's life. What it is woken for lies elsewhere.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::event::{EventfdFlags, eventfd};

/// A bell that is heard until it is stilled, however often it was rung.
#[derive(Debug)]
pub struct Wakeup(OwnedFd);

impl Wakeup {
    /// A bell that was not rung.
    ///
    /// # Errors
    /// There is no descriptor to be had.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Rings. One that was rung too often to count is heard all the same.
    pub fn notify(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// It is heard no more until it is rung again.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; size_of::<u64>()]); // nothing to read: it was still
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
