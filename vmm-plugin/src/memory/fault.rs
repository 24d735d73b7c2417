//! Handles faults in guest memory. An access to a revoked slice causes a SIGBUS in any thread,
//! EFAULT or KVM_EXIT_MEMORY_FAULT from KVM_RUN, or an MMIO exit inside a RAM slot. Each of these
//! ends the VM with a message that names the slice. If no slice was revoked, the host has run out
//! of memory or the memory has an uncorrectable error. An uncorrectable error ends the VM only if
//! no vCPU can report the error to the guest, see [`poison`].

use std::{
    fs::File,
    io,
    ops::Range,
    os::fd::{AsFd as _, BorrowedFd},
    ptr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use rustix::{
    fs::{FileType, fstat},
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap, munmap},
};
use units::limits::MACHINE_CHECKS_LOGGED_MAX;

use super::{Memory, MemoryOwner, poison};
use crate::exit;

/// Memory region, with its messages. The messages are formatted in advance, because a signal handler
/// must not allocate memory.
#[derive(Debug)]
struct RegionMessages {
    addresses: Range<usize>,
    file: Arc<File>,
    file_range: Range<u64>,
    initial: FaultMessages,
    /// Messages after the region's contents were moved to local memory.
    moved: FaultMessages,
    is_moved: AtomicBool,
}

/// Messages about the faults of a memory region.
#[derive(Debug)]
struct FaultMessages {
    revoked: String,
    exhausted: String,
    poisoned: String,
    reported: String,
}

/// Messages about all memory regions of the guest.
#[derive(Debug, Default)]
struct Messages {
    regions: Vec<RegionMessages>,
    /// Message for exhausted host memory if the address is unknown.
    exhausted: String,
    /// Message for an uncorrectable error if the address is unknown.
    poisoned: String,
}

static MESSAGES: OnceLock<Messages> = OnceLock::new();

/// Installs the SIGBUS handler, which ends the process if guest memory is revoked or fails. Must be
/// called once per process.
///
/// # Errors
/// The error returned by sigaction(2).
pub fn install_handler(memory: &Memory, vm: &str) -> io::Result<()> {
    let regions = memory.mapped.iter().map(|mapped| RegionMessages {
        addresses: mapped.addresses.clone(),
        file: Arc::clone(&mapped.file),
        file_range: mapped.file_range.clone(),
        initial: FaultMessages::new(vm, &mapped.owner, mapped.node),
        moved: FaultMessages::new(vm, &MemoryOwner::Local, mapped.node),
        is_moved: AtomicBool::new(false),
    });
    let regions = regions.collect();
    let exhausted = format!("error: VM {vm}: host memory exhausted\n");
    let poisoned = format!("error: VM {vm}: uncorrectable memory error\n");
    assert!(MESSAGES.set(Messages { regions, exhausted, poisoned }).is_ok(), "a process runs one guest");
    vmm_sys_util::signal::register_signal_handler(libc::SIGBUS, on_bus_error).map_err(io::Error::from)
}

impl FaultMessages {
    fn new(vm: &str, owner: &MemoryOwner, node: u32) -> Self {
        let (revoked, description) = match owner {
            MemoryOwner::Slice { slice, emc } => (
                format!("error: VM {vm} lost slice {slice} of EMC {emc}: the rack revoked it\n"),
                format!("slice {slice} of EMC {emc}"),
            ),
            MemoryOwner::Local => (
                format!("error: VM {vm} lost local memory of node {node}\n"),
                format!("local memory of node {node}"),
            ),
        };
        Self {
            revoked,
            exhausted: format!(
                "error: VM {vm}: host memory exhausted: no page available for {description}\n"
            ),
            poisoned: format!("error: VM {vm}: uncorrectable memory error in {owner}\n"),
            reported: format!(
                "VM {vm}: uncorrectable memory error in {owner}: reported to the guest as a machine check\n"
            ),
        }
    }
}

/// Records that the memory at these address ranges is now local memory. The ranges can then no
/// longer be revoked.
pub fn mark_as_local(addresses: &[Range<usize>]) {
    for region in &installed_messages().regions {
        if addresses.contains(&region.addresses) {
            region.is_moved.store(true, Ordering::SeqCst);
        }
    }
}

/// Ends the process because a mapping of guest memory was lost.
pub fn exit_on_lost_mapping(errno: &io::Error) -> ! {
    exit::print(&format!("error: cannot map guest memory: {errno}"));
    exit::exit_now(exit::FAILED)
}

/// Fault in guest memory, with the address in this process if it is known.
#[derive(Clone, Copy, Debug)]
pub enum MemoryFault {
    /// The kernel could not map a page at the address.
    Missing(Option<usize>),
    /// The page at the address has an uncorrectable error.
    Poisoned(Option<usize>),
}

/// Values of `si_code` for an uncorrectable memory error, from asm-generic/siginfo.h: the error was
/// consumed (AR, action required), or was found before any access (AO, action optional).
const BUS_MCEERR_AR: libc::c_int = 4;
const BUS_MCEERR_AO: libc::c_int = 5;

/// Prints the message for a fault and ends the process with the exit code of the fault. Safe in a
/// signal handler.
pub fn exit_on_fault(fault: MemoryFault) -> ! {
    let messages = installed_messages();
    let region_at = |at: Option<usize>| {
        at.and_then(|at| messages.regions.iter().find(|region| region.addresses.contains(&at)))
    };
    let revoked = messages.regions.iter().find(|region| region.is_revoked());
    let (text, code) = match fault {
        MemoryFault::Poisoned(at) => (
            region_at(at).map_or(&messages.poisoned, |region| &region.messages().poisoned),
            exit::MEMORY_POISONED,
        ),
        MemoryFault::Missing(at) => {
            match (region_at(at).filter(|region| region.is_revoked()).or(revoked), region_at(at)) {
                (Some(region), _) => (&region.messages().revoked, exit::SLICE_LOST),
                (None, Some(region)) => (&region.messages().exhausted, exit::MEMORY_EXHAUSTED),
                (None, None) => (&messages.exhausted, exit::MEMORY_EXHAUSTED),
            }
        }
    };
    let _ = rustix::io::write(rustix::stdio::stderr(), text.as_bytes());
    exit::exit_now(code)
}

/// Logs that the error at an address of this process was reported to the guest. The number of
/// messages is limited, because a guest can consume an error repeatedly.
pub fn log_reported_error(at: usize) {
    static REPORTED: AtomicU32 = AtomicU32::new(0);
    let is_logged = REPORTED.fetch_add(1, Ordering::Relaxed) < MACHINE_CHECKS_LOGGED_MAX;
    if let Some(region) =
        installed_messages().regions.iter().find(|region| is_logged && region.addresses.contains(&at))
    {
        let _ = rustix::io::write(rustix::stdio::stderr(), region.messages().reported.as_bytes());
    }
}

/// Ends the process if a memory region has been revoked. This check detects revoked memory that the
/// guest does not access. It is also needed because KVM does not report errors of asynchronous page
/// faults.
pub fn exit_if_revoked() {
    if installed_messages().regions.iter().any(RegionMessages::is_revoked) {
        exit_on_fault(MemoryFault::Missing(None));
    }
}

/// Returns the messages, which are empty before [`install_handler`].
fn installed_messages() -> &'static Messages {
    static NONE: Messages =
        Messages { regions: Vec::new(), exhausted: String::new(), poisoned: String::new() };
    MESSAGES.get().unwrap_or(&NONE)
}

impl RegionMessages {
    fn messages(&self) -> &FaultMessages {
        if self.is_moved.load(Ordering::SeqCst) { &self.moved } else { &self.initial }
    }

    /// Returns whether the memory region has been revoked. Moved memory cannot be revoked. The check
    /// is made last, because the file of a region is replaced after the region is marked as moved.
    fn is_revoked(&self) -> bool {
        is_revoked_file(self.file.as_fd(), self.file_range.clone()) && !self.is_moved.load(Ordering::SeqCst)
    }
}

/// Returns whether the memory behind a range of a file has been revoked. A revoked regular file is
/// truncated. A revoked DAX device has no driver and cannot be mapped. Safe in a signal handler,
/// and allowed by the seccomp filters of all threads.
fn is_revoked_file(file: BorrowedFd<'_>, file_range: Range<u64>) -> bool {
    fstat(file).is_ok_and(|stat| match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => u64::try_from(stat.st_size).unwrap_or(0) < file_range.end,
        FileType::CharacterDevice => probe_mapping(file, file_range) == Err(Errno::NXIO),
        _ => false,
    })
}

/// Maps and unmaps a range of a file without accessing its pages. Returns the error of mmap(2).
fn probe_mapping(file: BorrowedFd<'_>, file_range: Range<u64>) -> rustix::io::Result<()> {
    let bytes = usize::try_from(file_range.end - file_range.start).expect("usize has 64 bits");
    let (access, flags) = (ProtFlags::empty(), MapFlags::SHARED | MapFlags::NORESERVE);
    // SAFETY: the kernel chooses an unused address, and PROT_NONE prevents access.
    let at = unsafe { mmap(ptr::null_mut(), bytes, access, flags, file, file_range.start) }?;
    // SAFETY: the mapping was created above and no reference to it exists.
    unsafe { munmap(at, bytes) }
}

extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: vmm-sys-util registers handlers with SA_SIGINFO, so the kernel passes a valid
    // siginfo_t.
    let info = unsafe { &*info };
    // SAFETY: the signal is SIGBUS, for which the kernel sets si_addr.
    let at = unsafe { info.si_addr() } as usize;
    let is_poisoned = matches!(info.si_code, BUS_MCEERR_AR | BUS_MCEERR_AO);
    if installed_messages().regions.iter().any(|region| region.addresses.contains(&at)) {
        if is_poisoned && poison::record_error(at, info.si_code == BUS_MCEERR_AR) {
            return; // a vCPU reports the error to the guest
        }
        exit_on_fault(if is_poisoned {
            MemoryFault::Poisoned(Some(at))
        } else {
            MemoryFault::Missing(Some(at))
        });
    }
    // The address is outside guest memory: in another mapped file, or invalid because of a bug.
    let _ = rustix::io::write(rustix::stdio::stderr(), b"error: SIGBUS outside guest memory\n");
    exit::exit_now(exit::FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_revoked_file(path: &str, file_range: Range<u64>) -> bool {
        super::is_revoked_file(File::options().read(true).write(true).open(path).unwrap().as_fd(), file_range)
    }

    #[test]
    fn truncated_file_is_revoked() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let path = file.path().to_str().unwrap();
        assert!(!is_revoked_file(path, 4096..8192));
        assert!(is_revoked_file(path, 4096..8193));
    }

    #[test]
    fn mappable_device_is_not_revoked() {
        assert!(!is_revoked_file("/dev/zero", 0..1 << 30));
        assert!(!is_revoked_file("/dev/null", 0..1 << 30));
    }
}
