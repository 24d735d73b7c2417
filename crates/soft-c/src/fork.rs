//! Detection of forked children.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::error::Error;

/// Number of forks between this process and the one that loaded the library.
static DEPTH: AtomicUsize = AtomicUsize::new(0);
static IS_REGISTERED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    DEPTH.fetch_add(1, Ordering::Relaxed);
}

/// Returns the number of forks between this process and the one that first created a pool.
pub fn depth() -> usize {
    DEPTH.load(Ordering::Relaxed)
}

/// Lets the C library count forks from now on. Waits for no other thread, which may not exist after a fork.
///
/// # Errors
/// Returns [`Error::System`] if the handler cannot be registered.
pub fn register() -> Result<(), Error> {
    if IS_REGISTERED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    // SAFETY: the handler accesses only an atomic variable, which is allowed in the child of a process with threads.
    let result = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if result != 0 {
        IS_REGISTERED.store(false, Ordering::Relaxed);
        return Err(Error::System);
    }
    Ok(())
}
