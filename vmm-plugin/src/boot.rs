//! What a kernel finds when it starts: itself, its initrd, its command line, the map of memory and the tables, in guest memory;
//! and the state of the first processor. A bzImage is entered at its 64-bit entry (Linux's boot protocol 2.12), an ELF kernel
//! at its PVH entry.

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
    layout::{HIGH_MEMORY, Layout},
    memory::GuestMemory,
    platform::{RESET_PORT, RESET_VALUE, RESET_VECTOR, Window},
};

pub use self::cpu_tables::{Segments, write_page_tables};

/// The longest command line a kernel takes.
pub const COMMAND_LINE_BYTES_MAX: usize = 2047;
/// Where the command line lies.
const COMMAND_LINE_ADDRESS: u64 = 0x2_0000;
/// Where what the kernel is told lies: Linux's zero page or PVH's start info.
const BOOT_PARAMS_ADDRESS: u64 = 0x7000;
/// Where usable memory below 1 MiB ends.
const EBDA_START: u64 = 0x9_fc00;
const PAGE_BYTES: u64 = 4096;
/// The boot protocol since which a kernel says whether it has a 64-bit entry.
const ENTRY64_MIN_PROTOCOL: u16 = 0x20c;
/// What tells kernels apart lies in so much of them.
const KERNEL_HEADER_BYTES: u64 = 0x210;
/// Writes the reset port, and waits: `mov dx, PORT; mov al, VALUE; out dx, al; hlt; jmp $-1`.
const RESET_CODE: [u8; 9] = {
    let [low, high] = RESET_PORT.to_le_bytes();
    [0xba, low, high, 0xb0, RESET_VALUE, 0xee, 0xf4, 0xeb, 0xfd]
};

/// What to boot.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// A bzImage or an ELF with a PVH entry.
    pub kernel: PathBuf,
    /// A first file system.
    pub initrd: Option<PathBuf>,
    /// What the kernel is told.
    pub command_line: String,
}

/// How the first processor begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPoint {
    /// Its first instruction.
    pub address: u64,
    /// Where what it is told lies.
    pub parameters: u64,
    /// How it expects the processor.
    pub protocol: Protocol,
}

/// How a kernel expects the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// In 64-bit mode, memory mapped as it is, the parameters in RSI.
    Linux64,
    /// In 32-bit mode, paging off, the parameters in EBX.
    Pvh,
}

/// Why a kernel cannot be booted.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// A file that cannot be read.
    #[error("{file}: cannot read {}", path.display())]
    File {
        /// Which one.
        file: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// Something else.
    #[error("kernel: {} is {found}: must be a bzImage, or an ELF for x86-64 with a PVH entry", path.display())]
    NotAKernel {
        /// Where.
        path: PathBuf,
        /// What it is.
        found: String,
    },
    /// Too much.
    #[error("{file}: {bytes} bytes do not fit: {available} are free in the guest's local memory below 3 GiB")]
    TooLarge {
        /// Of what.
        file: &'static str,
        /// How much.
        bytes: u64,
        /// What there is.
        available: u64,
    },
    /// A command line that a kernel would cut.
    #[error("cmdline: {bytes} bytes are too long: at most {COMMAND_LINE_BYTES_MAX}, without zeros")]
    CommandLine {
        /// How long it is.
        bytes: usize,
    },
    /// More tables than there is room for.
    #[error(transparent)]
    Tables(#[from] acpi::TablesTooLarge),
    /// No memory to try it in.
    #[error("cannot make memory to check the kernel in")]
    Scratch(#[source] vm_memory::mmap::FromRangesError),
    /// Guest memory that cannot be written.
    #[error("cannot write the guest's memory")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// Puts everything where the kernel expects it.
///
/// # Errors
/// [`BootError`]; guest memory is then of no use.
pub fn load(
    kernel: &Kernel,
    layout: &Layout,
    windows: &[Window],
    memory: &GuestMemory,
) -> Result<EntryPoint, BootError> {
    let tables = acpi::tables(layout, windows)?;
    memory.write_slice(&tables, GuestAddress(acpi::TABLES_START))?;
    memory.write_slice(&RESET_CODE, GuestAddress(RESET_VECTOR))?;
    let loaded = load_kernel(&kernel.kernel, layout, memory)?;
    let initrd =
        kernel.initrd.as_deref().map(|path| load_initrd(path, &loaded, layout, memory)).transpose()?;
    let command_line = write_command_line(&kernel.command_line, memory)?;
    let info = BootInfo { initrd, command_line, map: memory_map(layout) };
    match (loaded.setup_header, loaded.pvh_boot_cap) {
        (Some(header), _) => linux::prepare(header, &loaded, &info, memory),
        (None, PvhBootCapability::PvhEntryPresent(entry)) => pvh::prepare(entry, &info, memory),
        (None, _) => Err(BootError::NotAKernel {
            path: kernel.kernel.clone(),
            found: "an ELF without a PVH entry".into(),
        }),
    }
}

/// Checks that [`load`] will succeed, in memory that is given back.
///
/// # Errors
/// Those of [`load`].
pub fn check(kernel: &Kernel, layout: &Layout, windows: &[Window]) -> Result<(), BootError> {
    let low = layout.memory().into_iter().filter(|range| range.start < layout.low_memory_end());
    let low = low.map(|range| {
        let bytes = range.end.min(layout.low_memory_end()) - range.start;
        (GuestAddress(range.start), usize::try_from(bytes).expect("less than 3 GiB"))
    });
    let memory = GuestMemory::from_ranges(&low.collect::<Vec<_>>()).map_err(BootError::Scratch)?;
    load(kernel, layout, windows, &memory).map(drop)
}

/// What every kernel is told, however.
struct BootInfo {
    /// Where, and how long.
    initrd: Option<(u64, u64)>,
    /// Where, and how long without its zero.
    command_line: (u64, u64),
    map: Vec<MapEntry>,
}

/// A stretch of the map of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MapEntry {
    at: u64,
    bytes: u64,
    kind: u32,
}

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// Usable memory by address; what is in no stretch is not memory.
fn memory_map(layout: &Layout) -> Vec<MapEntry> {
    let low = [
        MapEntry { at: 0, bytes: EBDA_START, kind: E820_RAM },
        MapEntry { at: EBDA_START, bytes: HIGH_MEMORY - EBDA_START, kind: E820_RESERVED },
    ];
    let high = layout.memory().into_iter().map(|range| {
        let at = range.start.max(HIGH_MEMORY);
        MapEntry { at, bytes: range.end - at, kind: E820_RAM }
    });
    low.into_iter().chain(high).collect()
}

fn load_kernel(path: &Path, layout: &Layout, memory: &GuestMemory) -> Result<KernelLoaderResult, BootError> {
    let file_error = |errno| BootError::File { file: "kernel", path: path.to_owned(), errno };
    let mut file = File::open(path).map_err(file_error)?;
    let mut head = Vec::new();
    (&file).take(KERNEL_HEADER_BYTES).read_to_end(&mut head).map_err(file_error)?;
    let bytes = file.seek(SeekFrom::End(0)).map_err(file_error)?;
    file.seek(SeekFrom::Start(0)).map_err(file_error)?;
    let available = layout.low_memory_end().saturating_sub(HIGH_MEMORY);
    if bytes > available {
        return Err(BootError::TooLarge { file: "kernel", bytes, available });
    }
    let floor = Some(GuestAddress(HIGH_MEMORY));
    let not = |found| BootError::NotAKernel { path: path.to_owned(), found };
    let loaded = match elf_segments(&head) {
        Some(count) if count > KERNEL_SEGMENTS_MAX => return Err(not(format!("an ELF of {count} segments"))),
        Some(_) => Elf::load(memory, None, &mut file, floor),
        None if bytes < bzimage_bytes(&head) => return Err(not(format!("truncated at {bytes} bytes"))),
        None => BzImage::load(memory, None, &mut file, floor),
    };
    let loaded = loaded.map_err(|error| not(error.to_string()))?;
    if loaded
        .setup_header
        .is_some_and(|header| header.version < ENTRY64_MIN_PROTOCOL || header.xloadflags & 1 == 0)
    {
        return Err(not("a bzImage without a 64-bit entry".into()));
    }
    let (needs, end) = (unpacked_end(&loaded), layout.low_memory_end());
    if needs > end {
        return Err(BootError::TooLarge { file: "kernel", bytes: needs, available: end });
    }
    Ok(loaded)
}

/// How many segments an ELF says that it has. The loader takes each of them in, however often they are the same.
fn elf_segments(head: &[u8]) -> Option<u16> {
    const COUNT: std::ops::Range<usize> = 56..58;
    let count = head.get(COUNT).map_or([0; 2], |bytes| bytes.try_into().expect("two"));
    head.starts_with(b"\x7fELF").then_some(u16::from_le_bytes(count))
}

/// How long a bzImage says that it is: its setup code and the kernel proper.
fn bzimage_bytes(head: &[u8]) -> u64 {
    const SECTOR: u64 = 512;
    const SETUP_SECTORS: usize = 0x1f1;
    const KERNEL_PARAGRAPHS: std::ops::Range<usize> = 0x1f4..0x1f8;
    let paragraphs = head.get(KERNEL_PARAGRAPHS).map_or([0; 4], |bytes| bytes.try_into().expect("four"));
    let setup = head.get(SETUP_SECTORS).map_or(0, |sectors| u64::from(*sectors) + 1);
    setup * SECTOR + u64::from(u32::from_le_bytes(paragraphs)) * 16
}

/// As high as it may lie, so that the kernel can unpack itself below.
fn load_initrd(
    path: &Path,
    kernel: &KernelLoaderResult,
    layout: &Layout,
    memory: &GuestMemory,
) -> Result<(u64, u64), BootError> {
    let file_error = |errno| BootError::File { file: "initrd", path: path.to_owned(), errno };
    let mut file = File::open(path).map_err(file_error)?;
    let bytes = file.metadata().map_err(file_error)?.len();
    let highest =
        kernel.setup_header.map_or(u64::MAX, |header| u64::from(header.initrd_addr_max).saturating_add(1));
    let end = layout.low_memory_end().min(highest);
    let needs = kernel.kernel_end.max(unpacked_end(kernel)).checked_next_multiple_of(PAGE_BYTES);
    let available = needs.map_or(0, |needs| end.saturating_sub(needs));
    if bytes.next_multiple_of(PAGE_BYTES) > available {
        return Err(BootError::TooLarge { file: "initrd", bytes, available });
    }
    let at = (end - bytes) / PAGE_BYTES * PAGE_BYTES;
    let count = usize::try_from(bytes).expect("less than 3 GiB");
    memory
        .read_exact_volatile_from(GuestAddress(at), &mut file, count)
        .map_err(|error| file_error(io::Error::new(io::ErrorKind::UnexpectedEof, error)))?;
    Ok((at, bytes))
}

/// Up to where a bzImage needs memory to unpack itself.
fn unpacked_end(kernel: &KernelLoaderResult) -> u64 {
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
