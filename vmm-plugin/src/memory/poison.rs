//! Uncorrectable errors in guest memory. The SIGBUS handler records an error, and a vCPU reports
//! the error to the guest. All functions are safe in a signal handler.

use std::{
    cell::Cell,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// Address that means no error: 0 is not an address of guest memory.
const NO_ERROR: usize = 0;

thread_local! {
    static IS_IN_GUEST: Cell<bool> = const { Cell::new(false) };
    static CONSUMED: Cell<usize> = const { Cell::new(NO_ERROR) };
}

static CAN_REPORT: AtomicBool = AtomicBool::new(false);
/// Address of the latest error that the hardware found before any access (action optional). It may
/// be overwritten: an access to the page of an earlier error reports that error again.
static UNCONSUMED: AtomicUsize = AtomicUsize::new(NO_ERROR);

/// Enables reporting of errors to the guest. Called if the vCPUs support machine checks.
pub fn enable_reporting() {
    CAN_REPORT.store(true, Ordering::SeqCst);
}

/// Calls `run`, which runs the guest on this thread. Errors that are consumed on this thread during
/// the call are attributed to the guest, not to the VMM.
pub fn run_in_guest<T>(run: impl FnOnce() -> T) -> T {
    IS_IN_GUEST.set(true);
    let exit = run();
    IS_IN_GUEST.set(false);
    exit
}

/// Records an error at an address of this process. Returns whether a vCPU will report the error to
/// the guest. An error consumed by the VMM's own code cannot be reported, because that code cannot
/// continue.
pub fn record_error(at: usize, is_consumed: bool) -> bool {
    if !CAN_REPORT.load(Ordering::SeqCst) {
        return false;
    }
    if !is_consumed {
        UNCONSUMED.store(at, Ordering::SeqCst);
        return true;
    }
    if IS_IN_GUEST.get() {
        CONSUMED.set(at);
    }
    IS_IN_GUEST.get()
}

/// Removes and returns the address of the error that the guest consumed on this thread.
pub fn take_consumed_error() -> Option<usize> {
    Some(CONSUMED.replace(NO_ERROR)).filter(|at| *at != NO_ERROR)
}

/// Removes and returns the address of the error that was found before any access.
pub fn take_unconsumed_error() -> Option<usize> {
    Some(UNCONSUMED.swap(NO_ERROR, Ordering::SeqCst)).filter(|at| *at != NO_ERROR)
}

/// Returns whether an unconsumed error was found that no vCPU has reported to the guest yet.
pub fn has_unconsumed_error() -> bool {
    UNCONSUMED.load(Ordering::SeqCst) != NO_ERROR
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_consumed_outside_the_guest_is_not_reported() {
        enable_reporting();
        assert!(!record_error(4096, true));
        assert!(run_in_guest(|| record_error(8192, true)));
        assert!(
            std::thread::spawn(take_consumed_error).join().unwrap().is_none(),
            "another thread must not take the error"
        );
        assert_eq!((take_consumed_error(), take_consumed_error()), (Some(8192), None));
    }
}
