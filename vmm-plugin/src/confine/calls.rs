//! Which system calls each thread makes, as they were seen: what is not in these tables is not made. A call that a thread could
//! do harm with is allowed with harmless arguments only.

use std::collections::BTreeMap;

use libc::{
    AF_UNIX, F_DUPFD_CLOEXEC, F_GETFD, F_GETFL, PROT_EXEC, SYS_accept4, SYS_brk, SYS_clock_gettime,
    SYS_clock_nanosleep, SYS_close, SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_wait, SYS_eventfd2, SYS_exit,
    SYS_exit_group, SYS_fcntl, SYS_fdatasync, SYS_fstat, SYS_futex, SYS_getpid, SYS_getrandom, SYS_ioctl,
    SYS_madvise, SYS_mmap, SYS_mprotect, SYS_mremap, SYS_munmap, SYS_ppoll, SYS_pread64, SYS_pwrite64,
    SYS_read, SYS_recvfrom, SYS_restart_syscall, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn,
    SYS_sched_yield, SYS_sendto, SYS_shutdown, SYS_sigaltstack, SYS_socketpair, SYS_tgkill, SYS_unlinkat,
    SYS_write, TCSETS,
};
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

use super::threads::Work;

/// A call, what an argument of it must be, and whether its first one must be this process.
struct Call(i64, Option<(u8, SeccompCmpOp, u64)>, bool);

const fn any(call: i64) -> Call {
    Call(call, None, false)
}

/// Only with this argument.
const fn with(call: i64, argument: u8, value: u64) -> Call {
    Call(call, Some((argument, SeccompCmpOp::Eq, value)), false)
}

/// Only if the argument has none of these bits.
const fn without(call: i64, argument: u8, bits: u64) -> Call {
    Call(call, Some((argument, SeccompCmpOp::MaskedEq(bits), 0)), false)
}

/// Only with this argument, and towards this process.
const fn own(call: i64, argument: u8, value: u64) -> Call {
    Call(call, Some((argument, SeccompCmpOp::Eq, value)), true)
}

const UNIX: u64 = AF_UNIX as u64;
const EXEC: u64 = PROT_EXEC as u64;
/// From linux/kvm.h.
const KVM_RUN: u64 = 0xae80;
const KVM_KVMCLOCK_CTRL: u64 = 0xaead;
/// [`crate::vcpu::kick_signal`]: the first that glibc does not keep for itself.
const KICK: u64 = 34;
/// From asm-generic/ioctls.h: as [`TCSETS`], with any speed.
const TCSETS2: u64 = 0x402c_542b;

/// Every thread.
const EVERY: &[Call] = &[
    any(SYS_futex),
    any(SYS_write), // consoles, event descriptors, standard error
    // Allocating and giving back. Nothing of it ever holds code.
    any(SYS_brk),
    without(SYS_mmap, 2, EXEC),
    without(SYS_mprotect, 2, EXEC),
    any(SYS_mremap),
    any(SYS_munmap),
    any(SYS_madvise),
    // Where the kernel's page with clocks knows no clock, as on some virtual machines.
    any(SYS_clock_gettime),
    any(SYS_sched_yield),               // a channel whose other end is just at it
    any(SYS_close),                     // whoever goes last closes what was shared
    with(SYS_fcntl, 1, F_GETFD as u64), // built for debugging, Rust looks whether what it closes is open
    // Signals, and what they interrupted.
    any(SYS_rt_sigreturn),
    any(SYS_rt_sigaction), // a crash of this program's own is reported by the signal that it is
    any(SYS_rt_sigprocmask), // a thread blocks signals while it ends
    any(SYS_restart_syscall), // a wait with a deadline, after the process was stopped and continued
    any(SYS_sigaltstack),  // a thread gives its own back when it ends
    any(SYS_exit),
    // The end of everything, from wherever it is seen: whether memory is lost, and the terminal as it was.
    any(SYS_fstat),
    with(SYS_ioctl, 1, TCSETS),
    with(SYS_ioctl, 1, TCSETS2),
    any(SYS_exit_group),
];

const MAIN: &[Call] = &[
    with(SYS_unlinkat, 2, 0), // the control socket's file, at the end
    any(SYS_ppoll),
    any(SYS_read),
    any(SYS_recvfrom), // signals arrive as bytes of a stream
    any(SYS_sendto),   // and are sent there by their handler
    any(SYS_clock_nanosleep),
    // Calls processors out of KVM.
    any(SYS_getpid),
    own(SYS_tgkill, 2, KICK),
];

const PROCESSOR: &[Call] = &[with(SYS_ioctl, 1, KVM_RUN), with(SYS_ioctl, 1, KVM_KVMCLOCK_CTRL)];

/// Every device.
const DEVICE: &[Call] = &[any(SYS_epoll_wait), any(SYS_epoll_ctl), any(SYS_read)];

const DISK: &[Call] = &[any(SYS_pread64), any(SYS_pwrite64), any(SYS_fdatasync)];

const RANDOM: &[Call] = &[any(SYS_getrandom)];

const CONTROL: &[Call] = &[
    // What an answer needs comes up with the first caller: a runtime, its bell, and its own stream of signals.
    any(SYS_ppoll),
    any(SYS_epoll_create1),
    any(SYS_eventfd2),
    with(SYS_socketpair, 0, UNIX),
    with(SYS_fcntl, 1, F_DUPFD_CLOEXEC as u64),
    with(SYS_fcntl, 1, F_GETFL as u64),
    any(SYS_epoll_ctl),
    any(SYS_epoll_wait),
    // Callers.
    any(SYS_accept4),
    any(SYS_recvfrom),
    any(SYS_sendto),
    any(SYS_shutdown),
    any(SYS_getrandom), // maps that nobody can make slow
    any(SYS_read),      // the runtime's bell
];

/// The rules of a thread: a call passes if one of them fits; a call without rules passes always.
pub(super) fn of(work: Work) -> BTreeMap<i64, Vec<SeccompRule>> {
    let tables: &[&[Call]] = match work {
        Work::Main => &[EVERY, MAIN],
        Work::Processor => &[EVERY, PROCESSOR],
        Work::Disk => &[EVERY, DEVICE, DISK],
        Work::Card => &[EVERY, DEVICE],
        Work::Random => &[EVERY, DEVICE, RANDOM],
        Work::Control => &[EVERY, CONTROL],
    };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for Call(number, argument, own) in tables.iter().copied().flatten() {
        rules.entry(*number).or_default().extend(argument.clone().map(|argument| rule(argument, *own)));
    }
    rules
}

fn rule(argument: (u8, SeccompCmpOp, u64), own: bool) -> SeccompRule {
    let this = u64::from(std::process::id());
    let arguments = [argument].into_iter().chain(own.then_some((0, SeccompCmpOp::Eq, this)));
    let condition = |(argument, operator, value)| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
            .expect("an argument that calls have")
    };
    SeccompRule::new(arguments.map(condition).collect()).expect("one condition or two")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signal_that_the_main_thread_may_send_is_the_one_it_sends() {
        assert_eq!(u64::try_from(crate::vcpu::kick_signal()), Ok(KICK));
    }
}
