//! Exit codes of the VMM, and functions that end its process. The file of the control socket
//! remains and is replaced when the VM starts again.

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

/// Exit code if the guest powered off.
pub const GUEST_POWERED_OFF: u8 = 0;
/// Exit code for an error before the guest started, or in the VMM.
pub const FAILED: u8 = 1;
/// Exit code for invalid command-line options.
pub const USAGE_ERROR: u8 = 2;
/// Exit code if the guest requested a reset.
pub const GUEST_RESET: u8 = 10;
/// Exit code if the guest crashed, by a triple fault or an instruction that KVM cannot emulate.
pub const GUEST_CRASHED: u8 = 11;
/// Exit code if the VMM stopped the guest, on request or because the guest did not power off in
/// time.
pub const GUEST_STOPPED: u8 = 12;
/// Exit code if a slice of the running guest was revoked.
pub const SLICE_LOST: u8 = 20;
/// Exit code if the host had no free memory for a page that the guest accessed.
pub const MEMORY_EXHAUSTED: u8 = 21;
/// Exit code for an uncorrectable error in the guest's memory that could not be reported to the
/// guest.
pub const MEMORY_POISONED: u8 = 22;
/// Exit code if a thread made a system call that its seccomp filter forbids. The guest may have
/// escaped into the VMM.
pub const FORBIDDEN_SYSCALL: u8 = 30;

static SAVED_TERMINAL: OnceLock<Termios> = OnceLock::new();
static TERMINAL_RESTORED: AtomicBool = AtomicBool::new(false);

/// Saves the terminal settings for [`restore_terminal_settings`]. Only the first call has an effect.
pub fn save_terminal_settings(settings: Termios) {
    let _ = SAVED_TERMINAL.set(settings);
}

/// Restores the saved terminal settings. Only the first call has an effect. Safe in a signal
/// handler.
pub fn restore_terminal_settings() {
    if TERMINAL_RESTORED.swap(true, Ordering::SeqCst) {
        return;
    }
    if let Some(settings) = SAVED_TERMINAL.get() {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, settings);
    }
}

/// Prints a line to standard error. Write errors are ignored, so that the guest continues without a
/// log.
pub fn print(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Installs a panic hook that prints the panic, and ends the process if the thread is essential. A
/// guest cannot continue without one of its vCPUs or devices. The hook prints no backtrace, because
/// confined threads cannot read the files that a backtrace needs.
pub fn install_panic_hook() {
    panic::set_hook(Box::new(|panic| {
        print(&format!("error: {panic}"));
        if thread_role::current_role().is_none_or(ThreadRole::is_essential) {
            exit_now(FAILED)
        }
    }));
}

/// Ends the process without returning to the guest. Safe in a signal handler.
pub fn exit_now(code: u8) -> ! {
    restore_terminal_settings();
    // SAFETY: _exit takes an integer and does not return, so no memory of this process is used
    // afterwards.
    unsafe { libc::_exit(i32::from(code)) }
}
