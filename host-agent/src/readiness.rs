//! Lets tasks wait for a descriptor, of a socket or a process: the only registration of descriptors
//! at tokio.

use std::{io, os::fd::OwnedFd};

use tokio::io::unix::AsyncFd;

/// Descriptor whose readiness tasks can await. It is owned here, so that it stays open.
///
/// # Errors
/// The kernel cannot watch it.
pub(crate) fn watch(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and names the same file until it is dropped, and it moves into
    // the `AsyncFd`, which drops it only after it has stopped watching.
    let watched = unsafe { AsyncFd::register(descriptor) };
    Ok(watched?)
}
