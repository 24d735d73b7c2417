//! Seccomp allow lists: the system calls that each thread was observed to make. All other calls are
//! forbidden. Dangerous calls are allowed only with harmless arguments.

use std::collections::BTreeMap;

use libc::{
    AF_UNIX, F_DUPFD_CLOEXEC, F_GETFD, F_GETFL, FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, O_CLOEXEC,
    PROT_EXEC, SOCK_CLOEXEC, SOCK_NONBLOCK, SOCK_STREAM, SYS_accept4, SYS_brk, SYS_clock_gettime,
    SYS_clock_nanosleep, SYS_close, SYS_dup3, SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_wait, SYS_eventfd2,
    SYS_exit, SYS_exit_group, SYS_fallocate, SYS_fcntl, SYS_fdatasync, SYS_fstat, SYS_futex, SYS_getpid,
    SYS_getrandom, SYS_ioctl, SYS_lseek, SYS_madvise, SYS_mmap, SYS_mprotect, SYS_mremap, SYS_munmap,
    SYS_ppoll, SYS_pread64, SYS_pwrite64, SYS_read, SYS_recvfrom, SYS_restart_syscall, SYS_rt_sigaction,
    SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_sched_yield, SYS_sendto, SYS_shutdown, SYS_sigaltstack,
    SYS_socketpair, SYS_tgkill, SYS_write, TCSETS,
};
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

use self::ArgumentCondition::{HasNoBits, Is, IsNull, IsThisProcess};
use crate::thread_role::ThreadRole;

/// System call that is allowed if its arguments satisfy all conditions.
struct AllowedCall(i64, &'static [ArgumentCondition]);

/// Condition on one argument of a system call. The first field is the index of the argument.
#[derive(Clone, Copy)]
enum ArgumentCondition {
    /// The argument equals this 32-bit value.
    Is(u8, u64),
    /// All of these bits are clear in the argument.
    HasNoBits(u8, u64),
    /// The argument is a null pointer.
    IsNull(u8),
    /// The argument is the ID of this process.
    IsThisProcess(u8),
}

/// Allows a system call with any arguments.
const fn allow_any_arguments(call: i64) -> AllowedCall {
    AllowedCall(call, &[])
}

const UNIX_DOMAIN: u64 = AF_UNIX as u64;
/// Type of an allowed socket pair. Datagram sockets are forbidden, because they could send to any
/// other socket.
const STREAM_SOCKET_TYPE: u64 = (SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK) as u64;
/// Allows sendto(2) only with a null destination address, so that a socket can send only to its
/// connected peer.
const SENDTO_PEER: AllowedCall = AllowedCall(SYS_sendto, &[IsNull(4)]);
const EXEC_BITS: u64 = PROT_EXEC as u64;
/// Numbers of the allowed ioctls, from linux/kvm.h.
const KVM_RUN: u64 = 0xae80;
const KVM_KVMCLOCK_CTRL: u64 = 0xaead;
const KVM_GET_SREGS: u64 = 0x8138_ae83;
const KVM_GET_MSRS: u64 = 0xc008_ae88;
const KVM_X86_SET_MCE: u64 = 0x4040_ae9e;
const KVM_GET_DIRTY_LOG: u64 = 0x4010_ae42;
const KVM_SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
/// The only allowed mode of fallocate(2), which frees pages.
const PUNCH_HOLE: u64 = (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE) as u64;
/// Number of [`crate::vcpu::kick_signal`], the first real-time signal that glibc does not reserve.
const KICK_SIGNAL: u64 = 34;
/// Number of the ioctl TCSETS2 (asm-generic/ioctls.h), which is [`TCSETS`] with arbitrary baud
/// rates.
const TCSETS2: u64 = 0x402c_542b;

/// System calls that all threads may make.
const COMMON_CALLS: &[AllowedCall] = &[
    allow_any_arguments(SYS_futex),
    allow_any_arguments(SYS_write), // to consoles, eventfds and standard error
    // Allocation of memory that is not executable.
    allow_any_arguments(SYS_brk),
    AllowedCall(SYS_mmap, &[HasNoBits(2, EXEC_BITS)]),
    AllowedCall(SYS_mprotect, &[HasNoBits(2, EXEC_BITS)]),
    allow_any_arguments(SYS_mremap),
    allow_any_arguments(SYS_munmap),
    allow_any_arguments(SYS_madvise),
    // Clocks: on some virtual machines, the vDSO falls back to the system call.
    allow_any_arguments(SYS_clock_gettime),
    allow_any_arguments(SYS_sched_yield), // contention on a channel
    allow_any_arguments(SYS_close),       // any thread may be the last owner of a descriptor
    AllowedCall(SYS_fcntl, &[Is(1, F_GETFD as u64)]), // debug builds call F_GETFD before close
    // Signal handling.
    allow_any_arguments(SYS_rt_sigreturn),
    allow_any_arguments(SYS_rt_sigaction), // Rust's SIGSEGV handler restores the default action
    allow_any_arguments(SYS_rt_sigprocmask), // a thread blocks signals while it exits
    allow_any_arguments(SYS_restart_syscall), // SIGCONT resumes a wait with a timeout
    allow_any_arguments(SYS_sigaltstack),  // a thread frees its signal stack when it exits
    allow_any_arguments(SYS_exit),
    // Exit of the process: a thread checks for revoked memory and restores the terminal.
    allow_any_arguments(SYS_fstat),
    AllowedCall(SYS_ioctl, &[Is(1, TCSETS)]),
    AllowedCall(SYS_ioctl, &[Is(1, TCSETS2)]),
    allow_any_arguments(SYS_exit_group),
];

/// System calls of the main thread, in addition to [`COMMON_CALLS`].
const MAIN_CALLS: &[AllowedCall] = &[
    allow_any_arguments(SYS_ppoll),
    allow_any_arguments(SYS_read),
    allow_any_arguments(SYS_recvfrom), // the main thread receives signals as bytes on a socket
    SENDTO_PEER,                       // signal handlers send these bytes
    allow_any_arguments(SYS_clock_nanosleep),
    // Signals that make vCPUs leave KVM_RUN.
    allow_any_arguments(SYS_getpid),
    AllowedCall(SYS_tgkill, &[IsThisProcess(0), Is(2, KICK_SIGNAL)]),
];

/// System calls of vCPU threads, in addition to [`COMMON_CALLS`].
const VCPU_CALLS: &[AllowedCall] = &[
    AllowedCall(SYS_ioctl, &[Is(1, KVM_RUN)]),
    AllowedCall(SYS_ioctl, &[Is(1, KVM_KVMCLOCK_CTRL)]),
    // Machine checks, which report memory errors to the guest.
    AllowedCall(SYS_ioctl, &[Is(1, KVM_GET_SREGS)]),
    AllowedCall(SYS_ioctl, &[Is(1, KVM_GET_MSRS)]),
    AllowedCall(SYS_ioctl, &[Is(1, KVM_X86_SET_MCE)]),
];

/// System calls of all device threads, in addition to [`COMMON_CALLS`].
const DEVICE_CALLS: &[AllowedCall] =
    &[allow_any_arguments(SYS_epoll_wait), allow_any_arguments(SYS_epoll_ctl), allow_any_arguments(SYS_read)];

const BLOCK_CALLS: &[AllowedCall] = &[
    allow_any_arguments(SYS_pread64),
    allow_any_arguments(SYS_pwrite64),
    allow_any_arguments(SYS_fdatasync),
];

const RNG: &[AllowedCall] = &[allow_any_arguments(SYS_getrandom)];

const CONTROL_CALLS: &[AllowedCall] = &[
    // Creation of the tokio runtime at the first connection, with an eventfd and a signal socket.
    allow_any_arguments(SYS_ppoll),
    allow_any_arguments(SYS_epoll_create1),
    allow_any_arguments(SYS_eventfd2),
    AllowedCall(SYS_socketpair, &[Is(0, UNIX_DOMAIN), Is(1, STREAM_SOCKET_TYPE)]),
    AllowedCall(SYS_fcntl, &[Is(1, F_DUPFD_CLOEXEC as u64)]),
    AllowedCall(SYS_fcntl, &[Is(1, F_GETFL as u64)]),
    allow_any_arguments(SYS_epoll_ctl),
    allow_any_arguments(SYS_epoll_wait),
    // Connections of clients.
    allow_any_arguments(SYS_accept4),
    allow_any_arguments(SYS_recvfrom),
    SENDTO_PEER,
    allow_any_arguments(SYS_shutdown),
    allow_any_arguments(SYS_getrandom), // random seeds of hash maps, and random pages
    allow_any_arguments(SYS_read),      // the eventfd of the tokio runtime
    allow_any_arguments(SYS_pread64),   // page table entries of sampled pages
];

/// System calls of the thread that moves pool memory, in addition to [`COMMON_CALLS`].
const REHOME_CALLS: &[AllowedCall] = &[
    AllowedCall(SYS_ioctl, &[Is(1, KVM_SET_USER_MEMORY_REGION)]),
    AllowedCall(SYS_ioctl, &[Is(1, KVM_GET_DIRTY_LOG)]),
    // Copies to spare memory, and the search for holes in the files of slices.
    allow_any_arguments(SYS_lseek),
    allow_any_arguments(SYS_pwrite64),
    AllowedCall(SYS_fallocate, &[Is(1, PUNCH_HOLE)]),
    AllowedCall(SYS_dup3, &[Is(2, O_CLOEXEC as u64)]),
    // Waits, and signals that make vCPUs leave KVM_RUN.
    allow_any_arguments(SYS_clock_nanosleep),
    allow_any_arguments(SYS_getpid),
    AllowedCall(SYS_tgkill, &[IsThisProcess(0), Is(2, KICK_SIGNAL)]),
];

/// Returns the seccomp rules of a role, by number of the system call. A system call is allowed if
/// one of its rules matches. A system call with an empty list of rules is allowed with any
/// arguments.
pub(super) fn rules_for_role(role: ThreadRole) -> BTreeMap<i64, Vec<SeccompRule>> {
    let tables: &[&[AllowedCall]] = match role {
        ThreadRole::Main => &[COMMON_CALLS, MAIN_CALLS],
        ThreadRole::Vcpu => &[COMMON_CALLS, VCPU_CALLS],
        ThreadRole::Block => &[COMMON_CALLS, DEVICE_CALLS, BLOCK_CALLS],
        ThreadRole::Net => &[COMMON_CALLS, DEVICE_CALLS],
        ThreadRole::Rng => &[COMMON_CALLS, DEVICE_CALLS, RNG],
        ThreadRole::Control => &[COMMON_CALLS, CONTROL_CALLS],
        ThreadRole::Rehome => &[COMMON_CALLS, REHOME_CALLS],
    };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for AllowedCall(number, conditions) in tables.iter().copied().flatten() {
        rules.entry(*number).or_default().extend((!conditions.is_empty()).then(|| seccomp_rule(conditions)));
    }
    rules
}

fn seccomp_rule(conditions: &[ArgumentCondition]) -> SeccompRule {
    const INT: SeccompCmpArgLen = SeccompCmpArgLen::Dword;
    let condition = |argument: &ArgumentCondition| {
        let (index, bytes, operator, value) = match *argument {
            Is(index, value) => (index, INT, SeccompCmpOp::Eq, value),
            HasNoBits(index, bits) => (index, INT, SeccompCmpOp::MaskedEq(bits), 0),
            IsNull(index) => (index, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0),
            IsThisProcess(index) => (index, INT, SeccompCmpOp::Eq, u64::from(std::process::id())),
        };
        SeccompCondition::new(index, bytes, operator, value).expect("the index is below 6")
    };
    SeccompRule::new(conditions.iter().map(condition).collect()).expect("there is at least one condition")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn main_thread_may_send_the_kick_signal() {
        assert_eq!(u64::try_from(crate::vcpu::kick_signal()), Ok(KICK_SIGNAL));
    }
}
