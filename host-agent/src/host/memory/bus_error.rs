//! Handling of memory that is removed or damaged while this process accesses it. The kernel then
//! raises SIGBUS in the accessing thread. This signal ends the process by default. Within
//! [`catch_bus_errors`], the signal handler replaces the whole mapping by empty pages, the thread
//! continues, and `catch_bus_errors` returns an error. A bus error outside `catch_bus_errors` is a
//! bug and ends the process.

use std::{
    io,
    sync::{
        OnceLock,
        atomic::{AtomicI32, AtomicUsize, Ordering, compiler_fence},
    },
};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use vm_memory::MmapRegion;

/// Signal code from asm-generic/siginfo.h: the thread accessed damaged memory.
const BUS_MCEERR_AR: libc::c_int = 4;
/// Signal code from asm-generic/siginfo.h: damaged memory was detected without an access.
const BUS_MCEERR_AO: libc::c_int = 5;

/// Address range that a thread accesses within [`catch_bus_errors`], for the signal handler.
struct AccessedRange {
    start: AtomicUsize,
    bytes: AtomicUsize,
    /// Error number if the memory was lost; 0 if it is intact.
    loss_errno: AtomicI32,
}

thread_local! {
    // A signal handler may access this variable, because it needs no initialization and no drop.
    static ACCESSED_RANGE: AccessedRange =
        const {
            AccessedRange {
                start: AtomicUsize::new(0),
                bytes: AtomicUsize::new(0),
                loss_errno: AtomicI32::new(0),
            }
        };
}

/// Installs the handler of SIGBUS, which [`catch_bus_errors`] requires. Repeated calls have no
/// effect.
///
/// # Errors
/// The kernel rejects the handler.
pub(super) fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let register = || vmm_sys_util::signal::register_signal_handler(libc::SIGBUS, on_bus_error);
    let installed = INSTALLED.get_or_init(|| register().map_err(|error| error.errno()));
    installed.map_err(io::Error::from_raw_os_error)
}

/// Runs `access` on a mapping whose memory may be removed meanwhile. After an error, the mapping
/// consists of empty private pages, whose contents the caller must not use.
///
/// # Errors
/// ENXIO if the memory was removed, EHWPOISON if it is damaged.
pub(super) fn catch_bus_errors<T>(mapping: &MmapRegion<()>, access: impl FnOnce() -> T) -> io::Result<T> {
    ACCESSED_RANGE.with(|range| {
        range.begin(mapping);
        let result = access();
        match range.end() {
            0 => Ok(result),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    })
}

impl AccessedRange {
    fn begin(&self, mapping: &MmapRegion<()>) {
        self.loss_errno.store(0, Ordering::Relaxed);
        self.start.store(mapping.as_ptr() as usize, Ordering::Relaxed);
        self.bytes.store(mapping.size(), Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst); // store the range before the first access
    }

    fn end(&self) -> i32 {
        compiler_fence(Ordering::SeqCst);
        self.bytes.store(0, Ordering::Relaxed);
        self.loss_errno.load(Ordering::Relaxed)
    }

    /// Replaces the whole range by empty pages if it contains the address `at`. Returns whether the
    /// range was replaced.
    fn replace(&self, at: usize, errno: i32) -> bool {
        let (start, bytes) = (self.start.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
        if !(start..start + bytes).contains(&at) {
            return false;
        }
        self.loss_errno.store(errno, Ordering::Relaxed);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the range is exactly one mapping, which `catch_bus_errors` borrows while this
        // thread accesses it. No references into the mapping exist, so its contents may change at
        // any time.
        unsafe { mmap_anonymous(start as *mut _, bytes, access, flags) }.is_ok()
    }
}

extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: vmm-sys-util registers the handler with SA_SIGINFO, so the kernel passes a siginfo_t
    // that is valid while the handler runs.
    let info = unsafe { &*info };
    // SAFETY: the signal is SIGBUS, for which the kernel fills in an address.
    let at = unsafe { info.si_addr() } as usize;
    let is_damaged = matches!(info.si_code, BUS_MCEERR_AR | BUS_MCEERR_AO);
    let errno = if is_damaged { libc::EHWPOISON } else { libc::ENXIO };
    if !ACCESSED_RANGE.with(|range| range.replace(at, errno)) {
        let _ = signal_hook::low_level::emulate_default_handler(libc::SIGBUS); // ends the process
    }
}
