//! Uncorrectable errors in guest memory, between the SIGBUS handler that notes them and the processor that reports them to its
//! guest. Everything here is safe in a signal handler.

use std::{
    cell::Cell,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// No address of guest memory.
const NONE: usize = 0;

thread_local! {
    static IS_IN_GUEST: Cell<bool> = const { Cell::new(false) };
    static CONSUMED: Cell<usize> = const { Cell::new(NONE) };
}

static CAN_REPORT: AtomicBool = AtomicBool::new(false);
/// The last error that was found before it was consumed. An earlier one that it replaces is seen when its page is used.
static FOUND: AtomicUsize = AtomicUsize::new(NONE);

/// States that the guest's processors can report errors from now on.
pub fn enable_reporting() {
    CAN_REPORT.store(true, Ordering::SeqCst);
}

/// Runs the guest on this thread: an error that this thread consumes meanwhile is the guest's.
pub fn in_guest<T>(run: impl FnOnce() -> T) -> T {
    IS_IN_GUEST.set(true);
    let exit = run();
    IS_IN_GUEST.set(false);
    exit
}

/// Notes an error at an address of this process, and returns whether a processor will report it. One that the VMM's own code has
/// consumed cannot be reported: that code cannot go on.
pub fn record(at: usize, is_consumed: bool) -> bool {
    if !CAN_REPORT.load(Ordering::SeqCst) {
        return false;
    }
    if !is_consumed {
        FOUND.store(at, Ordering::SeqCst);
        return true;
    }
    if IS_IN_GUEST.get() {
        CONSUMED.set(at);
    }
    IS_IN_GUEST.get()
}

/// Takes the error that the guest has consumed on this thread.
pub fn take_consumed() -> Option<usize> {
    Some(CONSUMED.replace(NONE)).filter(|at| *at != NONE)
}

/// Takes the error that was found and not consumed.
pub fn take_found() -> Option<usize> {
    Some(FOUND.swap(NONE, Ordering::SeqCst)).filter(|at| *at != NONE)
}

/// Whether an error was found that is not taken yet.
pub fn is_found() -> bool {
    FOUND.load(Ordering::SeqCst) != NONE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_consumed_outside_the_guest_is_not_reported() {
        enable_reporting();
        assert!(!record(4096, true));
        assert!(in_guest(|| record(8192, true)));
        assert!(std::thread::spawn(take_consumed).join().unwrap().is_none(), "it is another thread's");
        assert_eq!((take_consumed(), take_consumed()), (Some(8192), None));
    }
}
