//! Loads a kernel, its initrd, its command line, the memory map and the ACPI tables into guest
//! memory. Also defines the entry state of the first vCPU. A bzImage starts at its 64-bit entry
//! point (Linux boot protocol 2.12), and an ELF kernel starts at its PVH entry point.

mod cpu_tables;
mod linux;
mod pvh;

use std::{
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
};

use linux_loader::loader::{BzImage, Elf, KernelLoader, KernelLoaderResult, PvhBootCapability};
use units::limits::KERNEL_SEGMENTS_MAX;
use vm_memory::{Bytes as _, GuestAddress};

use crate::{
    acpi,
    layout::{HIGH_MEMORY_START, Layout},
    memory::GuestMemory,
    platform::{MmioWindow, RESET_PORT, RESET_VALUE, RESET_VECTOR},
};

pub use self::cpu_tables::{Segments, write_page_tables};

/// Maximum length of a kernel command line, in bytes, without the terminating NUL.
pub const COMMAND_LINE_BYTES_MAX: usize = 2047;
/// Guest-physical address of the command line.
const COMMAND_LINE_ADDRESS: u64 = 0x2_0000;
/// Guest-physical address of the zero page (Linux boot protocol) or the start info (PVH).
const BOOT_PARAMS_ADDRESS: u64 = 0x7000;
/// Start of the Extended BIOS Data Area, which ends the usable memory below 1 MiB.
const EBDA_START: u64 = 0x9_fc00;
const PAGE_BYTES: u64 = 4096;
/// Minimum version of the Linux boot protocol, 2.12: older kernels do not state in their header
/// whether there is a 64-bit entry point.
const ENTRY64_MIN_PROTOCOL: u16 = 0x20c;
/// Number of bytes at the start of a kernel image that are read to identify its format.
const KERNEL_HEADER_BYTES: u64 = 0x210;
/// Machine code at the reset vector, which writes the reset port and halts:
/// `mov dx, PORT; mov al, VALUE; out dx, al; hlt; jmp $-1`.
const RESET_CODE: [u8; 9] = {
    let [low, high] = RESET_PORT.to_le_bytes();
    [0xba, low, high, 0xb0, RESET_VALUE, 0xee, 0xf4, 0xeb, 0xfd]
};

/// Kernel, initrd and command line of a guest.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Path of the kernel: a bzImage, or an ELF file with a PVH entry point.
    pub kernel: PathBuf,
    /// Path of the initial RAM disk, if the guest has one.
    pub initrd: Option<PathBuf>,
    /// Kernel command line, at most [`COMMAND_LINE_BYTES_MAX`] bytes.
    pub command_line: String,
}

/// State of the first vCPU when the kernel starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPoint {
    /// Guest-physical address of the first instruction.
    pub address: u64,
    /// Guest-physical address of the zero page or the start info.
    pub parameters: u64,
    /// Boot protocol of the kernel.
    pub protocol: BootProtocol,
}

/// Boot protocol, which defines the processor state that a kernel expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootProtocol {
    /// 64-bit mode with identity-mapped memory. RSI contains the address of the zero page.
    Linux64,
    /// 32-bit mode without paging. EBX contains the address of the start info.
    Pvh,
}

/// Error returned when a kernel cannot be booted.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The kernel or the initrd cannot be read.
    #[error("--{file}: cannot read {}", path.display())]
    File {
        /// Name of the option that contains the path.
        file: &'static str,
        /// Path that cannot be read.
        path: PathBuf,
        /// Cause of the failure.
        #[source]
        errno: io::Error,
    },
    /// The kernel file has an unsupported format.
    #[error("--kernel: {} is {found}: must be a bzImage, or an ELF for x86-64 with a PVH entry", path.display())]
    NotAKernel {
        /// Path of the kernel file.
        path: PathBuf,
        /// Description of the content, completing "the file is …".
        found: String,
    },
    /// The kernel or the initrd does not fit into local memory below the MMIO hole.
    #[error(
        "--{file}: {bytes} bytes do not fit: {available} are free in the guest's local memory below 3 GiB"
    )]
    TooLarge {
        /// Name of the option that contains the path.
        file: &'static str,
        /// Size that the file needs in guest memory, in bytes.
        bytes: u64,
        /// Free local memory below the MMIO hole, in bytes.
        available: u64,
    },
    /// The kernel command line exceeds [`COMMAND_LINE_BYTES_MAX`] or contains a NUL byte.
    #[error("--cmdline: {bytes} bytes: must be at most {COMMAND_LINE_BYTES_MAX}, without NUL bytes")]
    CommandLine {
        /// Length of the command line, in bytes.
        bytes: usize,
    },
    /// The ACPI tables do not fit below the reset vector.
    #[error(transparent)]
    Tables(#[from] acpi::TablesTooLarge),
    /// [`check`] cannot allocate temporary memory for the kernel.
    #[error("--kernel: cannot allocate temporary memory to check the kernel")]
    Scratch(#[source] vm_memory::mmap::FromRangesError),
    /// An address is outside guest memory.
    #[error("cannot write guest memory")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// Loads the kernel and its boot data into guest memory. Returns the entry state of the first vCPU.
///
/// # Errors
/// [`BootError`] if a file or the command line is unsuitable. Guest memory then has undefined
/// content.
pub fn load(
    kernel: &Kernel,
    layout: &Layout,
    windows: &[MmioWindow],
    memory: &GuestMemory,
) -> Result<EntryPoint, BootError> {
    let tables = acpi::build_tables(layout, windows)?;
    memory.write_slice(&tables, GuestAddress(acpi::ACPI_TABLES_START))?;
    memory.write_slice(&RESET_CODE, GuestAddress(RESET_VECTOR))?;
    let loaded = load_kernel(&kernel.kernel, layout, memory)?;
    let initrd =
        kernel.initrd.as_deref().map(|path| load_initrd(path, &loaded, layout, memory)).transpose()?;
    let command_line = write_command_line(&kernel.command_line, memory)?;
    let info = BootInfo { initrd, command_line, map: memory_map(layout) };
    match (loaded.setup_header, loaded.pvh_boot_cap) {
        (Some(header), _) => linux::prepare_boot(header, &loaded, &info, memory),
        (None, PvhBootCapability::PvhEntryPresent(entry)) => pvh::prepare_boot(entry, &info, memory),
        (None, _) => Err(BootError::NotAKernel {
            path: kernel.kernel.clone(),
            found: "an ELF without a PVH entry".into(),
        }),
    }
}

/// Checks that [`load`] will succeed, by loading the kernel into temporary memory.
///
/// # Errors
/// The errors of [`load`], and [`BootError::Scratch`] if the temporary memory cannot be mapped.
pub fn check(kernel: &Kernel, layout: &Layout, windows: &[MmioWindow]) -> Result<(), BootError> {
    let low = layout.memory().into_iter().filter(|range| range.start < layout.low_memory_end());
    let low = low.map(|range| {
        let bytes = range.end.min(layout.low_memory_end()) - range.start;
        (GuestAddress(range.start), usize::try_from(bytes).expect("low memory is less than 3 GiB"))
    });
    let memory = GuestMemory::from_ranges(&low.collect::<Vec<_>>()).map_err(BootError::Scratch)?;
    load(kernel, layout, windows, &memory).map(drop)
}

/// Boot data that both boot protocols pass to the kernel.
struct BootInfo {
    /// Guest-physical address of the initrd, and its size in bytes.
    initrd: Option<(u64, u64)>,
    /// Guest-physical address of the command line, and its length in bytes without the NUL.
    command_line: (u64, u64),
    map: Vec<MemoryMapEntry>,
}

/// Entry of the guest's memory map, with a type as in an e820 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MemoryMapEntry {
    address: u64,
    bytes: u64,
    kind: u32,
}

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// Returns the guest's memory map, in address order. An address outside all entries is not memory.
fn memory_map(layout: &Layout) -> Vec<MemoryMapEntry> {
    let low = [
        MemoryMapEntry { address: 0, bytes: EBDA_START, kind: E820_RAM },
        MemoryMapEntry { address: EBDA_START, bytes: HIGH_MEMORY_START - EBDA_START, kind: E820_RESERVED },
    ];
    let high = layout.memory().into_iter().map(|range| {
        let at = range.start.max(HIGH_MEMORY_START);
        MemoryMapEntry { address: at, bytes: range.end - at, kind: E820_RAM }
    });
    low.into_iter().chain(high).collect()
}

fn load_kernel(path: &Path, layout: &Layout, memory: &GuestMemory) -> Result<KernelLoaderResult, BootError> {
    let file_error = |errno| BootError::File { file: "kernel", path: path.to_owned(), errno };
    let mut file = open_image(path).map_err(file_error)?;
    let mut head = Vec::new();
    (&file).take(KERNEL_HEADER_BYTES).read_to_end(&mut head).map_err(file_error)?;
    let bytes = file.seek(SeekFrom::End(0)).map_err(file_error)?;
    file.seek(SeekFrom::Start(0)).map_err(file_error)?;
    let available = layout.low_memory_end().saturating_sub(HIGH_MEMORY_START);
    if bytes > available {
        return Err(BootError::TooLarge { file: "kernel", bytes, available });
    }
    let floor = Some(GuestAddress(HIGH_MEMORY_START));
    let unsupported = |found| BootError::NotAKernel { path: path.to_owned(), found };
    let loaded = match elf_segment_count(&head) {
        Some(count) if count > KERNEL_SEGMENTS_MAX => {
            return Err(unsupported(format!("an ELF of {count} segments")));
        }
        Some(_) => Elf::load(memory, None, &mut file, floor),
        None if bytes < bzimage_bytes(&head) => {
            return Err(unsupported(format!("truncated at {bytes} bytes")));
        }
        None => BzImage::load(memory, None, &mut file, floor),
    };
    let loaded = loaded.map_err(|error| unsupported(error.to_string()))?;
    if loaded
        .setup_header
        .is_some_and(|header| header.version < ENTRY64_MIN_PROTOCOL || header.xloadflags & 1 == 0)
    {
        return Err(unsupported("a bzImage without a 64-bit entry".into()));
    }
    let (needs, end) = (decompression_end(&loaded), layout.low_memory_end());
    if needs > end {
        return Err(BootError::TooLarge { file: "kernel", bytes: needs, available: end });
    }
    Ok(loaded)
}

/// Opens a kernel or an initrd, which must be a regular file: other files have no size to compare
/// with the guest's memory, and opening a pipe would block.
fn open_image(path: &Path) -> io::Result<File> {
    if std::fs::metadata(path)?.is_file() {
        File::open(path)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "must be a regular file"))
    }
}

/// Returns the number of program headers in an ELF header, or `None` if `head` is not ELF. The
/// number must be limited because the loader reads every segment.
fn elf_segment_count(head: &[u8]) -> Option<u16> {
    const SEGMENT_COUNT_FIELD: std::ops::Range<usize> = 56..58;
    let count = head
        .get(SEGMENT_COUNT_FIELD)
        .map_or([0; 2], |bytes| bytes.try_into().expect("the range has two bytes"));
    head.starts_with(b"\x7fELF").then_some(u16::from_le_bytes(count))
}

/// Returns the size of a bzImage in bytes, according to its header. The size includes the setup
/// code and the protected-mode kernel.
fn bzimage_bytes(head: &[u8]) -> u64 {
    const BZIMAGE_SECTOR_BYTES: u64 = 512;
    const SETUP_SECTORS_FIELD: usize = 0x1f1;
    const KERNEL_PARAGRAPHS_FIELD: std::ops::Range<usize> = 0x1f4..0x1f8;
    let paragraphs = head
        .get(KERNEL_PARAGRAPHS_FIELD)
        .map_or([0; 4], |bytes| bytes.try_into().expect("the range has four bytes"));
    let setup = head.get(SETUP_SECTORS_FIELD).map_or(0, |sectors| u64::from(*sectors) + 1);
    setup * BZIMAGE_SECTOR_BYTES + u64::from(u32::from_le_bytes(paragraphs)) * 16
}

/// Loads an initrd at the highest address that the kernel allows, so that the kernel can decompress
/// itself at lower addresses. Returns the address and the size of the initrd.
fn load_initrd(
    path: &Path,
    kernel: &KernelLoaderResult,
    layout: &Layout,
    memory: &GuestMemory,
) -> Result<(u64, u64), BootError> {
    let file_error = |errno| BootError::File { file: "initrd", path: path.to_owned(), errno };
    let mut file = open_image(path).map_err(file_error)?;
    let bytes = file.metadata().map_err(file_error)?.len();
    let highest =
        kernel.setup_header.map_or(u64::MAX, |header| u64::from(header.initrd_addr_max).saturating_add(1));
    let end = layout.low_memory_end().min(highest);
    let needs = kernel.kernel_end.max(decompression_end(kernel)).checked_next_multiple_of(PAGE_BYTES);
    let available = needs.map_or(0, |needs| end.saturating_sub(needs));
    if bytes.next_multiple_of(PAGE_BYTES) > available {
        return Err(BootError::TooLarge { file: "initrd", bytes, available });
    }
    let at = (end - bytes) / PAGE_BYTES * PAGE_BYTES;
    let count = usize::try_from(bytes).expect("low memory is less than 3 GiB");
    memory
        .read_exact_volatile_from(GuestAddress(at), &mut file, count)
        .map_err(|error| file_error(io::Error::new(io::ErrorKind::UnexpectedEof, error)))?;
    Ok((at, bytes))
}

/// Returns the end address of the memory that a bzImage needs to decompress itself. Returns 0 for
/// an ELF kernel, which is not compressed.
fn decompression_end(kernel: &KernelLoaderResult) -> u64 {
    kernel.setup_header.map_or(0, |header| {
        let at = header.pref_address.max(kernel.kernel_load.0);
        at.saturating_add(u64::from(header.init_size))
    })
}

fn write_command_line(text: &str, memory: &GuestMemory) -> Result<(u64, u64), BootError> {
    let bytes = text.len();
    if bytes > COMMAND_LINE_BYTES_MAX || text.contains('\0') {
        return Err(BootError::CommandLine { bytes });
    }
    let mut nul_terminated = text.as_bytes().to_vec();
    nul_terminated.push(0);
    memory.write_slice(&nul_terminated, GuestAddress(COMMAND_LINE_ADDRESS))?;
    Ok((COMMAND_LINE_ADDRESS, bytes as u64))
}

#[cfg(test)]
mod tests;
