//! A system call that a thread may not make: it is not made, the process says which it was, and ends. A thread that has all
//! signals blocked cannot say so: the kernel ends the process by SIGSYS.

use std::io::{self, Write as _};

use super::threads;
use crate::exit;

/// From linux/signal.h: what a SIGSYS tells begins with three numbers, padded, then comes an address, then the call.
const SYSCALL_INDEX: usize = 6;
/// Longer than any line that is said.
const LINE_BYTES: usize = 256;

/// From now on such a call ends the process by [`exit::FORBIDDEN_SYSCALL`].
///
/// # Errors
/// The kernel takes no handler.
pub fn install_handler() -> io::Result<()> {
    vmm_sys_util::signal::register_signal_handler(libc::SIGSYS, on_forbidden_call).map_err(io::Error::from)
}

extern "C" fn on_forbidden_call(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel hands a handler that was registered with SA_SIGINFO, as vmm-sys-util does, a siginfo_t of 128 bytes
    // that is valid while the handler runs: as many numbers as this.
    let words = unsafe { &*info.cast::<[libc::c_int; 32]>() };
    let number = words[SYSCALL_INDEX];
    report(number);
    exit::exit_now(exit::FORBIDDEN_SYSCALL)
}

/// Allocates nothing, as it may interrupt whoever does.
fn report(number: libc::c_int) {
    let who = threads::role().map_or("a thread", threads::ThreadRole::name);
    let call =
        usize::try_from(number).ok().and_then(syscalls::Sysno::new).map_or("unknown", |call| call.name());
    let mut line = [0; LINE_BYTES];
    let mut rest = &mut line[..];
    let _ = writeln!(
        rest,
        "error: {who} made the system call {call} ({number}), which it never needs: the guest may have broken out"
    );
    let written = LINE_BYTES - rest.len();
    let _ = rustix::io::write(rustix::stdio::stderr(), &line[..written]);
}
