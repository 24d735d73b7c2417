//! Handles memory that is removed or damaged while this process accesses it. The kernel raises
//! SIGBUS in the accessing thread, which ends the process by default. Within [`survive`] the thread
//! continues on empty pages in place of the whole mapping, and its work results in an error. A bus
//! error elsewhere is a bug, and ends the process.

use std::{
    io,
    sync::{
        OnceLock,
        atomic::{AtomicI32, AtomicUsize, Ordering, compiler_fence},
    },
};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use vm_memory::MmapRegion;

/// From asm-generic/siginfo.h: damaged memory was accessed, or was detected without an access.
const BUS_MCEERR_AR: libc::c_int = 4;
const BUS_MCEERR_AO: libc::c_int = 5;

/// Range that a thread accesses, for the handler of its signals.
struct AccessedRange {
    start: AtomicUsize,
    bytes: AtomicUsize,
    /// Error with which the memory was lost; 0 while it exists.
    lost: AtomicI32,
}

thread_local! {
    // It needs no initialization and no drop, so a signal handler may access it.
    static ACCESSED_RANGE: AccessedRange =
        const { AccessedRange { start: AtomicUsize::new(0), bytes: AtomicUsize::new(0), lost: AtomicI32::new(0) } };
}

/// Installs the signal handler, so that memory may be removed within [`survive`].
///
/// # Errors
/// The kernel rejects the handler.
pub(super) fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let register = || vmm_sys_util::signal::register_signal_handler(libc::SIGBUS, on_bus_error);
    let installed = INSTALLED.get_or_init(|| register().map_err(|error| error.errno()));
    installed.map_err(io::Error::from_raw_os_error)
}

/// Accesses a mapping whose memory may be removed meanwhile. After an error, empty private pages
/// replace the memory: the caller must not use its contents.
///
/// # Errors
/// ENXIO: it was removed. EHWPOISON: it is damaged.
pub(super) fn survive<T>(mapping: &MmapRegion<()>, access: impl FnOnce() -> T) -> io::Result<T> {
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
        self.lost.store(0, Ordering::Relaxed);
        self.start.store(mapping.as_ptr() as usize, Ordering::Relaxed);
        self.bytes.store(mapping.size(), Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst); // before anything is touched
    }

    fn end(&self) -> i32 {
        compiler_fence(Ordering::SeqCst);
        self.bytes.store(0, Ordering::Relaxed);
        self.lost.load(Ordering::Relaxed)
    }

    /// Replaces the mapping by empty pages if this address is in it. Returns whether that
    /// succeeded.
    fn replace(&self, at: usize, errno: i32) -> bool {
        let (start, bytes) = (self.start.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
        if !(start..start + bytes).contains(&at) {
            return false;
        }
        self.lost.store(errno, Ordering::Relaxed);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: all of the range is one mapping that `survive` borrows for as long as this thread
        // accesses it, and into which no references exist: its contents may change at any time.
        unsafe { mmap_anonymous(start as *mut _, bytes, access, flags) }.is_ok()
    }
}

extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a handler registered with SA_SIGINFO, as vmm-sys-util does, a
    // siginfo_t that is valid while the handler runs.
    let info = unsafe { &*info };
    // SAFETY: the signal is SIGBUS, for which the kernel fills in an address.
    let at = unsafe { info.si_addr() } as usize;
    let broken = matches!(info.si_code, BUS_MCEERR_AR | BUS_MCEERR_AO);
    let errno = if broken { libc::EHWPOISON } else { libc::ENXIO };
    if !ACCESSED_RANGE.with(|range| range.replace(at, errno)) {
        let _ = signal_hook::low_level::emulate_default_handler(libc::SIGBUS); // it does not return
    }
}
