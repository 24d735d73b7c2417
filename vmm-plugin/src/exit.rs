//! How the process of a guest ends, and what it leaves tidy when there is no time.

use std::{ffi::CString, sync::OnceLock};

/// The guest switched itself off.
pub const POWERED_OFF: u8 = 0;
/// Nothing was started, or the VMM failed.
pub const FAILED: u8 = 1;
/// The guest asked to be started anew.
pub const RESET: u8 = 10;
/// The guest's processor gave up: a triple fault, or an instruction that KVM does not know.
pub const CRASHED: u8 = 11;
/// The guest was asked to switch itself off, did not, and was stopped.
pub const STOPPED: u8 = 12;
/// A slice was taken away under the guest.
pub const SLICE_LOST: u8 = 20;
/// The host had no memory left to put behind what the guest touched.
pub const MEMORY_EXHAUSTED: u8 = 21;

/// What is to be tidied even when the process ends at once.
#[derive(Debug, Default)]
pub struct Tidy {
    /// A terminal that was changed, as it was before.
    pub terminal: Option<rustix::termios::Termios>,
    /// A socket's file.
    pub socket: Option<CString>,
}

static TIDY: OnceLock<Tidy> = OnceLock::new();

/// Says what [`at_once`] is to tidy; only the first word counts.
pub fn tidy_at_end(tidy: Tidy) {
    let _ = TIDY.set(tidy);
}

/// Tidies. Safe in a signal handler.
pub fn tidy() {
    let Some(tidy) = TIDY.get() else { return };
    if let Some(terminal) = &tidy.terminal {
        let (stdin, at_once) = (rustix::stdio::stdin(), rustix::termios::OptionalActions::Now);
        let _ = rustix::termios::tcsetattr(stdin, at_once, terminal);
    }
    if let Some(socket) = &tidy.socket {
        let _ = rustix::fs::unlink(socket.as_c_str());
    }
}

/// Ends the process without another instruction of anybody else. Safe in a signal handler.
pub fn at_once(code: u8) -> ! {
    tidy();
    // SAFETY: it takes a number and does not return; nothing of this process is used any more.
    unsafe { libc::_exit(i32::from(code)) }
}
