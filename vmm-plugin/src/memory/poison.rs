//! Uncorrectable errors in guest memory. The SIGBUS handler records an error, and a vCPU reports
//! the error to the guest. All functions are safe in a signal handler.

use std::{
    cell::Cell,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// Address that means no error: 0 is not an address of guest memory.
const NONE: usize = 0;

thread_local! {
    static IS_IN_GUEST: Cell<bool> = const { Cell::new(false) };
    static CONSUMED: Cell<usize> = const { Cell::new(NONE) };
}

static CAN_REPORT: AtomicBool = AtomicBool::new(false);
/// Address of the latest error that was found without being consumed. A replaced error is reported
/// again when its page is accessed.
static FOUND: AtomicUsize = AtomicUsize::new(NONE);

/// Enables reporting of errors to the guest. Called if the vCPUs support machine checks.
pub fn enable_reporting() {
    CAN_REPORT.store(true, Ordering::SeqCst);
}

/// Calls `run`, which runs the guest on this thread. The guest, not the VMM, consumes the errors
/// that occur on this thread during the call.
pub fn in_guest<T>(run: impl FnOnce() -> T) -> T {
    IS_IN_GUEST.set(true);
    let exit = run();
    IS_IN_GUEST.set(false);
    exit
}

/// Records an error at an address of this process. Returns whether a vCPU will report the error to
/// the guest. An error that code of the VMM has consumed cannot be reported, because that code
/// cannot continue.
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

/// Removes and returns the address of the error that the guest consumed on this thread.
pub fn take_consumed() -> Option<usize> {
    Some(CONSUMED.replace(NONE)).filter(|at| *at != NONE)
}

/// Removes and returns the address of the error that was found without being consumed.
pub fn take_found() -> Option<usize> {
    Some(FOUND.swap(NONE, Ordering::SeqCst)).filter(|at| *at != NONE)
}

/// Returns whether an error was found that no vCPU has reported yet.
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
        assert!(
            std::thread::spawn(take_consumed).join().unwrap().is_none(),
            "another thread must not take the error"
        );
        assert_eq!((take_consumed(), take_consumed()), (Some(8192), None));
    }
}
