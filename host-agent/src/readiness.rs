//! Registration of file descriptors of sockets and processes with tokio, so that tasks can wait for
//! them.

use std::{io, os::fd::OwnedFd};

use tokio::io::unix::AsyncFd;

/// Registers a descriptor, so that tasks can wait until it is readable or writable. The result owns
/// the descriptor and keeps it open.
///
/// # Errors
/// The descriptor cannot be registered.
pub(crate) fn watch(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and refers to the same file until it is dropped. The `AsyncFd`
    // owns it, and drops it only after it is deregistered.
    let watched = unsafe { AsyncFd::register(descriptor) };
    Ok(watched?)
}
