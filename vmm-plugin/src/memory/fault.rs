//! Memory that goes away under a guest. A slice that is revoked shows as SIGBUS in whichever thread touches it, as EFAULT or a
//! memory fault from KVM_RUN, or as an access to a device where there is memory; each ends the VM at once, and says what was
//! lost. A slice that is still there and cannot be touched means that the host has no memory left to put behind it, or that the
//! memory behind it is broken. Broken memory ends the VM only if no processor can report it to the guest.

use std::{
    fs::File,
    io,
    ops::Range,
    os::fd::{AsFd as _, BorrowedFd},
    ptr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use rustix::{
    fs::{FileType, fstat},
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap, munmap},
};
use units::limits::MACHINE_CHECKS_LOGGED_MAX;

use super::{Memory, Owner, poison};
use crate::exit;

/// What is said about a piece of memory that is lost. Written beforehand, as there is no writing of texts in a signal handler.
#[derive(Debug)]
struct RegionMessages {
    addresses: Range<usize>,
    file: Arc<File>,
    file_range: Range<u64>,
    revoked: String,
    exhausted: String,
    poisoned: String,
    reported: String,
}

/// All of a guest's memory.
#[derive(Debug, Default)]
struct Messages {
    regions: Vec<RegionMessages>,
    /// What is said when nothing is lost, and nobody knows where memory is missing.
    exhausted: String,
    /// What is said when nobody knows where it is broken.
    poisoned: String,
}

static MESSAGES: OnceLock<Messages> = OnceLock::new();

/// From now on this process ends when memory of its guest goes away. For one guest in the life of a process.
///
/// # Errors
/// The kernel takes no handler.
pub fn install_handler(memory: &Memory, vm: &str) -> io::Result<()> {
    let notices = memory.mapped.iter().map(|mapped| {
        let revoked = match &mapped.owner {
            Owner::Slice { slice, emc } => {
                format!("error: VM {vm} lost slice {slice} of EMC {emc}: the rack took it back\n")
            }
            Owner::Local => format!("error: VM {vm} lost its local memory of node {}\n", mapped.node),
        };
        let of = match &mapped.owner {
            Owner::Slice { slice, emc } => {
                format!("slice {slice} of EMC {emc} is still granted, and there is")
            }
            Owner::Local => format!("there is, for local memory of node {},", mapped.node),
        };
        RegionMessages {
            addresses: mapped.addresses.clone(),
            file: Arc::clone(&mapped.file),
            file_range: mapped.file_range.clone(),
            revoked,
            exhausted: format!("error: VM {vm}: host memory exhausted: {of} nothing left to put behind it\n"),
            poisoned: format!("error: VM {vm}: an uncorrectable memory error in {}\n", mapped.owner),
            reported: format!(
                "VM {vm}: an uncorrectable memory error in {}: reported to the guest as a machine check\n",
                mapped.owner
            ),
        }
    });
    let regions = notices.collect();
    let exhausted = format!("error: VM {vm}: host memory exhausted\n");
    let poisoned = format!("error: VM {vm}: an uncorrectable memory error\n");
    assert!(MESSAGES.set(Messages { regions, exhausted, poisoned }).is_ok(), "a process runs one guest");
    vmm_sys_util::signal::register_signal_handler(libc::SIGBUS, on_bus_error).map_err(io::Error::from)
}

/// What somebody found where memory should be, and at which address of this process, if that is known.
#[derive(Clone, Copy, Debug)]
pub enum MemoryFault {
    /// Nothing.
    Missing(Option<usize>),
    /// Memory that cannot hold what was written to it.
    Poisoned(Option<usize>),
}

/// From asm-generic/siginfo.h: broken memory was used, or was found without being used.
const BUS_MCEERR_AR: libc::c_int = 4;
const BUS_MCEERR_AO: libc::c_int = 5;

/// Ends the process because of what was found. Safe in a signal handler.
pub fn exit_on(found: MemoryFault) -> ! {
    let messages = messages();
    let region_at = |at: Option<usize>| {
        at.and_then(|at| messages.regions.iter().find(|region| region.addresses.contains(&at)))
    };
    let revoked = messages.regions.iter().find(|region| region.is_revoked());
    let (text, code) = match found {
        MemoryFault::Poisoned(at) => {
            (region_at(at).map_or(&messages.poisoned, |region| &region.poisoned), exit::MEMORY_POISONED)
        }
        MemoryFault::Missing(at) => {
            match (region_at(at).filter(|region| region.is_revoked()).or(revoked), region_at(at)) {
                (Some(region), _) => (&region.revoked, exit::SLICE_LOST),
                (None, Some(region)) => (&region.exhausted, exit::MEMORY_EXHAUSTED),
                (None, None) => (&messages.exhausted, exit::MEMORY_EXHAUSTED),
            }
        }
    };
    let _ = rustix::io::write(rustix::stdio::stderr(), text.as_bytes());
    exit::exit_now(code)
}

/// Logs that an error at an address of this process was reported to the guest; the first ones only, as a guest can consume it as
/// often as it likes.
pub fn log_reported(at: usize) {
    static REPORTED: AtomicU32 = AtomicU32::new(0);
    let is_logged = REPORTED.fetch_add(1, Ordering::Relaxed) < MACHINE_CHECKS_LOGGED_MAX;
    if let Some(region) = messages().regions.iter().find(|region| is_logged && region.addresses.contains(&at))
    {
        let _ = rustix::io::write(rustix::stdio::stderr(), region.reported.as_bytes());
    }
}

/// Ends the process if memory is gone that nobody has touched since, or that KVM tries to reach again and again: a fault of a
/// guest with interrupts enabled it hands to a worker, which nobody hears of when that fails.
pub fn exit_if_revoked() {
    if messages().regions.iter().any(RegionMessages::is_revoked) {
        exit_on(MemoryFault::Missing(None));
    }
}

/// Nothing, before there is a guest.
fn messages() -> &'static Messages {
    static NONE: Messages =
        Messages { regions: Vec::new(), exhausted: String::new(), poisoned: String::new() };
    MESSAGES.get().unwrap_or(&NONE)
}

impl RegionMessages {
    /// Whether this memory is gone.
    fn is_revoked(&self) -> bool {
        is_revoked_file(self.file.as_fd(), self.file_range.clone())
    }
}

/// What is left of a slice after it was taken away: of a file nothing, or less than a slice; of a device (DAX) a node that no
/// driver has, and that is not mapped any more. Safe in a signal handler, and where a guest's threads are confined.
fn is_revoked_file(file: BorrowedFd<'_>, file_range: Range<u64>) -> bool {
    fstat(file).is_ok_and(|stat| match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => u64::try_from(stat.st_size).unwrap_or(0) < file_range.end,
        FileType::CharacterDevice => probe_mapping(file, file_range) == Err(Errno::NXIO),
        _ => false,
    })
}

/// Asks the kernel whether it would. It looks for no page then.
fn probe_mapping(file: BorrowedFd<'_>, file_range: Range<u64>) -> rustix::io::Result<()> {
    let bytes = usize::try_from(file_range.end - file_range.start).expect("64-bit");
    let (access, flags) = (ProtFlags::empty(), MapFlags::SHARED | MapFlags::NORESERVE);
    // SAFETY: the kernel chooses a place where nothing is, and nobody may touch what is there then.
    let at = unsafe { mmap(ptr::null_mut(), bytes, access, flags, file, file_range.start) }?;
    // SAFETY: it is the mapping just made, of which nobody else knows.
    unsafe { munmap(at, bytes) }
}

extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel hands a handler that was registered with SA_SIGINFO, as vmm-sys-util does, a siginfo_t that is
    // valid while the handler runs.
    let info = unsafe { &*info };
    // SAFETY: the signal is SIGBUS, for which the kernel fills in an address.
    let at = unsafe { info.si_addr() } as usize;
    let poisoned = matches!(info.si_code, BUS_MCEERR_AR | BUS_MCEERR_AO);
    if messages().regions.iter().any(|region| region.addresses.contains(&at)) {
        if poisoned && poison::record(at, info.si_code == BUS_MCEERR_AR) {
            return; // a processor reports it to the guest
        }
        exit_on(if poisoned { MemoryFault::Poisoned(Some(at)) } else { MemoryFault::Missing(Some(at)) });
    }
    // Not the guest's memory: a file of this program's own, or a bug in it.
    let _ = rustix::io::write(rustix::stdio::stderr(), b"error: a bus error outside the guest's memory\n");
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
    fn character_device_is_not_taken_for_revoked() {
        assert!(!is_revoked_file("/dev/zero", 0..1 << 30));
        assert!(!is_revoked_file("/dev/null", 0..1 << 30));
    }
}
