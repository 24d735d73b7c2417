//! Detection of forked children.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::error::Error;

/// Number of forks between this process and the one that first used the library.
static DEPTH: AtomicUsize = AtomicUsize::new(0);
static IS_REGISTERED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    DEPTH.fetch_add(1, Ordering::Relaxed);
}

/// Returns the number of forks between this process and the one that first used the library. Registers the
/// handler in the first call. Waits for no other thread, which may not exist after a fork.
///
/// # Errors
/// Returns [`Error::System`] if the handler cannot be registered.
pub fn depth() -> Result<usize, Error> {
    if !IS_REGISTERED.load(Ordering::Relaxed) && !IS_REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: the handler accesses only an atomic variable, which is allowed in the child of a process with
        // threads.
        let result = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if result != 0 {
            IS_REGISTERED.store(false, Ordering::Relaxed);
            return Err(Error::System);
        }
    }
    Ok(DEPTH.load(Ordering::Relaxed))
}
