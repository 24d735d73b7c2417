//! How the process of a guest ends. It removes no file: its control socket stays, and is replaced when the VM starts again.

use std::{
    io::{self, Write as _},
    panic,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::termios::{OptionalActions, Termios, tcsetattr};

use crate::confine::threads::{self, ThreadRole};

/// The guest switched itself off.
pub const POWERED_OFF: u8 = 0;
/// Nothing was started, or the VMM failed.
pub const FAILED: u8 = 1;
/// Wrong usage.
pub const USAGE: u8 = 2;
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
/// Memory of the guest cannot hold what was written to it.
pub const MEMORY_POISONED: u8 = 22;
/// A thread tried what it never needs: the guest may have broken out into it.
pub const FORBIDDEN_SYSCALL: u8 = 30;

static SAVED_TERMINAL: OnceLock<Termios> = OnceLock::new();
static TERMINAL_RESTORED: AtomicBool = AtomicBool::new(false);

/// Says how the terminal was before it was changed; only the first word counts.
pub fn save_terminal(before: Termios) {
    let _ = SAVED_TERMINAL.set(before);
}

/// Restores the terminal, once. Safe in a signal handler.
pub fn restore_terminal() {
    if TERMINAL_RESTORED.swap(true, Ordering::SeqCst) {
        return;
    }
    if let Some(before) = SAVED_TERMINAL.get() {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, before);
    }
}

/// Says something on standard error, if anybody listens: a guest goes on without.
pub fn print(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// A panic of a thread that the guest needs ends the process, as a guest that lost a processor or a device is none any more.
/// Its message is all that is said: a backtrace would read files, which threads that serve a guest may not.
pub fn install_panic_hook() {
    panic::set_hook(Box::new(|panic| {
        print(&format!("error: {panic}"));
        if threads::role().is_none_or(ThreadRole::is_essential) {
            exit_now(FAILED)
        }
    }));
}

/// Ends the process, never to return to the guest. Safe in a signal handler.
pub fn exit_now(code: u8) -> ! {
    restore_terminal();
    // SAFETY: it takes a number and does not return; nothing of this process is used any more.
    unsafe { libc::_exit(i32::from(code)) }
}
