//! Handler of SIGSYS, the signal for a system call that a seccomp filter forbids. The kernel does
//! not execute the call. The handler prints the name of the call and ends the process. If the
//! thread blocks SIGSYS, the kernel kills the process without a message.

use std::io::{self, Write as _};

use crate::{
    exit,
    thread_role::{self, ThreadRole},
};

/// Offset of `si_syscall` in siginfo_t, in 32-bit words (linux/signal.h).
const SYSCALL_INDEX: usize = 6;
/// Maximum length of the error message, in bytes.
const MESSAGE_LINE_BYTES: usize = 256;

/// Installs the SIGSYS handler, which ends the process with [`exit::FORBIDDEN_SYSCALL`].
///
/// # Errors
/// The error returned by sigaction(2).
pub fn install_handler() -> io::Result<()> {
    vmm_sys_util::signal::register_signal_handler(libc::SIGSYS, on_forbidden_call).map_err(io::Error::from)
}

extern "C" fn on_forbidden_call(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: vmm-sys-util registers handlers with SA_SIGINFO, so the kernel passes a valid
    // siginfo_t of 128 bytes, that is 32 words.
    let siginfo = unsafe { &*info.cast::<[libc::c_int; 32]>() };
    let number = siginfo[SYSCALL_INDEX];
    report_forbidden_call(number);
    exit::exit_now(exit::FORBIDDEN_SYSCALL)
}

/// Prints which system call was forbidden. Must not allocate memory, because the signal may have
/// interrupted the allocator.
fn report_forbidden_call(number: libc::c_int) {
    let thread = thread_role::current_role().map_or("a thread", ThreadRole::name);
    let call =
        usize::try_from(number).ok().and_then(syscalls::Sysno::new).map_or("unknown", |call| call.name());
    let mut line = [0; MESSAGE_LINE_BYTES];
    let mut unwritten = &mut line[..];
    let _ = writeln!(
        unwritten,
        "error: {thread} made the forbidden system call {call} ({number}): the guest may have escaped into the VMM"
    );
    let written = MESSAGE_LINE_BYTES - unwritten.len();
    let _ = rustix::io::write(rustix::stdio::stderr(), &line[..written]);
}
