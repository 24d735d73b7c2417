//! Exit codes and the end of a guest's process. The control socket's file is not removed: it is
//! replaced when the VM starts again.

use std::{
    io::{self, Write as _},
    panic,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::termios::{OptionalActions, Termios, tcsetattr};

use crate::thread_role::{self, ThreadRole};

/// The guest powered off.
pub const POWERED_OFF: u8 = 0;
/// An error before the guest started, or in the VMM.
pub const FAILED: u8 = 1;
/// Usage error.
pub const USAGE: u8 = 2;
/// The guest requested a reset.
pub const RESET: u8 = 10;
/// The guest crashed: a triple fault, or an instruction that KVM cannot emulate.
pub const CRASHED: u8 = 11;
/// The guest was stopped, at once or because it did not power off in time.
pub const STOPPED: u8 = 12;
/// A slice was revoked under the guest.
pub const SLICE_LOST: u8 = 20;
/// The host had no free memory for a page that the guest touched.
pub const MEMORY_EXHAUSTED: u8 = 21;
/// An uncorrectable error in the guest's memory could not be reported to the guest.
pub const MEMORY_POISONED: u8 = 22;
/// A thread made a system call that its filter forbids: the guest may have escaped into the VMM.
pub const FORBIDDEN_SYSCALL: u8 = 30;

static SAVED_TERMINAL: OnceLock<Termios> = OnceLock::new();
static TERMINAL_RESTORED: AtomicBool = AtomicBool::new(false);

/// Saves the terminal settings that [`restore_terminal`] restores. Only the first call has an
/// effect.
pub fn save_terminal(before: Termios) {
    let _ = SAVED_TERMINAL.set(before);
}

/// Restores the terminal settings, once. Safe in a signal handler.
pub fn restore_terminal() {
    if TERMINAL_RESTORED.swap(true, Ordering::SeqCst) {
        return;
    }
    if let Some(before) = SAVED_TERMINAL.get() {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, before);
    }
}

/// Prints a line to standard error. A write error is ignored: the guest continues without its log.
pub fn print(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Installs a panic hook that ends the process if the thread is essential: a guest cannot continue
/// without one of its vCPUs or devices. No backtrace is printed, as it would read files, which
/// confined threads may not.
pub fn install_panic_hook() {
    panic::set_hook(Box::new(|panic| {
        print(&format!("error: {panic}"));
        if thread_role::role().is_none_or(ThreadRole::is_essential) {
            exit_now(FAILED)
        }
    }));
}

/// Ends the process without returning to the guest. Safe in a signal handler.
pub fn exit_now(code: u8) -> ! {
    restore_terminal();
    // SAFETY: _exit takes an integer and does not return; no memory of this process is used
    // afterwards.
    unsafe { libc::_exit(i32::from(code)) }
}
