//! Maps the memory files of a guest according to the [`Layout`], and registers the mappings with
//! KVM. `source` provides the files. [`fault`] handles memory that is revoked or fails. [`touched`]
//! measures which memory was ever used, and [`accessed`] which memory is in use.

pub mod accessed;
mod check;
pub mod fault;
pub mod poison;
pub mod pool_region;
mod spare;
pub mod touched;
mod write_log;

use std::{fmt, fs::File, io, ops::Range, sync::Arc};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use rustix::fs::{FileType, MemfdFlags, SealFlags};
use units::Bytes;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
    GuestRegionMmap, mmap::MmapRegionBuilder,
};

pub use self::spare::SpareMemory;
use self::{touched::NodeFiles, write_log::WriteLog};
use crate::layout::{Layout, MemoryRegion, RegionKind};

/// Memory of a guest. Devices and loaders copy data to and from this memory, and hold no references
/// to the memory.
pub type GuestMemory = GuestMemoryMmap<WriteLog>;

/// Size of an ordinary page.
pub const PAGE_BYTES: usize = 4096;

/// Options for allocating and mapping the memory of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBackendOptions {
    /// Whether the mapping is shared (MAP_SHARED) or private (MAP_PRIVATE).
    pub shared: bool,
    /// Whether all pages are allocated before the guest starts.
    pub prefault: bool,
    /// Size of the huge pages (hugetlbfs) that back the memory. `None` means ordinary pages.
    pub hugepage_size: Option<Bytes>,
    /// NUMA node of the host that the memory is bound to, if any.
    pub host_numa_node: Option<u32>,
}

impl Default for MemoryBackendOptions {
    fn default() -> Self {
        Self { shared: true, prefault: false, hugepage_size: None, host_numa_node: None }
    }
}

/// Origin of a memory file, used in messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryOwner {
    /// The file contains local memory of the host.
    Local,
    /// The file contains a slice of the memory pool.
    Slice {
        /// Number of the slice.
        slice: u32,
        /// Name of the EMC that contains the slice.
        emc: String,
    },
}

impl fmt::Display for MemoryOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("local memory"),
            Self::Slice { slice, emc } => write!(f, "slice {slice} of EMC {emc}"),
        }
    }
}

/// File, or part of a file, that backs guest memory.
#[derive(Clone, Debug)]
pub struct MemoryBacking {
    /// File that contains the memory.
    pub file: Arc<File>,
    /// Offset of the memory in the file, in bytes.
    pub offset: u64,
    /// Origin of the file.
    pub owner: MemoryOwner,
}

/// Memory files of all nodes of a guest.
#[derive(Clone, Debug, Default)]
pub struct MemoryBackings {
    /// Memory of each node with CPUs, one file or part of a file per node.
    pub local: Vec<(MemoryBacking, MemoryBackendOptions)>,
    /// Slices of each pool node, in address order.
    pub pool: Vec<(Vec<MemoryBacking>, MemoryBackendOptions)>,
    /// Local memory to which the pool memory can be moved.
    pub spare: Option<SpareMemory>,
}

/// Error returned when guest memory cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A mapping cannot be created or configured.
    #[error("memory: cannot {operation}: {bytes} of node {node}{hint}")]
    System {
        /// Failed operation, completing "cannot …".
        operation: &'static str,
        /// Size of the mapping.
        bytes: Bytes,
        /// Number of the node in the guest.
        node: u32,
        /// Advice that is appended to the message, or an empty string.
        hint: &'static str,
        /// Error returned by the system call.
        #[source]
        errno: io::Error,
    },
    /// A file is shorter than its mapping.
    #[error("memory: {owner} has {has}, but {needs} are needed")]
    FileTooShort {
        /// Origin of the file.
        owner: String,
        /// Actual length of the file.
        has: Bytes,
        /// Length that the mapping needs.
        needs: Bytes,
    },
    /// The options request to prefault more memory than the host has available. The OOM killer
    /// would end a process.
    #[error("memory: cannot prefault {requested}: this host has {available} available")]
    InsufficientMemory {
        /// Size of the memory to prefault.
        requested: Bytes,
        /// Available memory of the host (MemAvailable).
        available: Bytes,
    },
    /// Two memory regions of the guest overlap in one file.
    #[error("memory: {one} and {other} overlap")]
    Overlap {
        /// Origin of the first region.
        one: String,
        /// Origin of the second region.
        other: String,
    },
    /// vm-memory rejected the memory regions.
    #[error("memory: invalid regions")]
    Regions(#[from] vm_memory::GuestRegionCollectionError),
}

/// Creates a memfd whose size is sealed, of huge pages if `hugepage_size` is set.
///
/// # Errors
/// The error returned by the system call that failed.
pub fn create_memfd(name: &str, bytes: Bytes, hugepage_size: Option<Bytes>) -> io::Result<File> {
    let huge = hugepage_size.map_or(MemfdFlags::empty(), |size| {
        let log2 = size.get().trailing_zeros();
        MemfdFlags::HUGETLB | MemfdFlags::from_bits_retain(log2 << libc::MFD_HUGE_SHIFT)
    });
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge)?;
    rustix::fs::ftruncate(&file, bytes.get())?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(File::from(file))
}

/// Mapped memory region with its file.
#[derive(Debug)]
struct MappedRegion {
    /// Address range of the mapping in this process.
    addresses: Range<usize>,
    file: Arc<File>,
    /// Byte range in the file.
    file_range: Range<u64>,
    owner: MemoryOwner,
    node: u32,
    is_shared: bool,
    is_pool: bool,
    log: WriteLog,
}

impl MappedRegion {
    fn bytes(&self) -> u64 {
        self.file_range.end - self.file_range.start
    }
}

/// Mapped memory of a guest.
#[derive(Debug)]
pub struct Memory {
    guest: GuestMemory,
    mapped: Vec<MappedRegion>,
    spare: Option<SpareMemory>,
}

impl Memory {
    /// Maps all regions of a layout.
    ///
    /// # Errors
    /// [`MemoryError`] if a region cannot be mapped. All mappings are then removed.
    pub fn map(layout: &Layout, backings: &MemoryBackings) -> Result<Self, MemoryError> {
        check::check_available_memory(layout, backings)?;
        let mut regions = Vec::with_capacity(layout.regions.len());
        let mut mapped = Vec::with_capacity(layout.regions.len());
        for region in &layout.regions {
            let (backing, offset, memory_options) = backing_for_region(region, backings);
            let log = WriteLog::default();
            let mapping = map_region(region, (backing, offset), memory_options, log.clone())?;
            let start = mapping.get_mmap().as_ptr() as usize;
            mapped.push(MappedRegion {
                addresses: start..start + usize::try_from(mapping.len()).expect("a mapping fits into usize"),
                file: Arc::clone(&backing.file),
                file_range: offset..offset + mapping.len(),
                owner: backing.owner.clone(),
                node: region.node,
                is_shared: memory_options.shared,
                is_pool: matches!(region.kind, RegionKind::Slice { .. }),
                log,
            });
            regions.push(mapping);
        }
        check::check_disjoint(&mapped)?;
        backings.spare.as_ref().map_or(Ok(()), SpareMemory::prepare)?;
        Ok(Self { guest: GuestMemory::from_regions(regions)?, mapped, spare: backings.spare.clone() })
    }

    /// Returns the guest's memory, for access by devices and loaders.
    pub fn guest(&self) -> &GuestMemory {
        &self.guest
    }

    /// Returns the number of each slice of a node with the name of its EMC, in address order.
    pub fn slices(&self, node: u32) -> impl Iterator<Item = (u32, &str)> {
        let mapped = self.mapped.iter().filter(move |mapped| mapped.node == node);
        mapped.filter_map(|mapped| match &mapped.owner {
            MemoryOwner::Slice { slice, emc } => Some((*slice, emc.as_str())),
            MemoryOwner::Local => None,
        })
    }

    /// Returns the files of each node, for measuring touched memory.
    ///
    /// # Errors
    /// The error returned by fstat(2).
    pub fn node_files(&self) -> io::Result<NodeFiles> {
        NodeFiles::new(&self.mapped, self.spare.as_ref())
    }

    /// Registers all memory regions with KVM.
    ///
    /// # Errors
    /// The error returned by KVM_SET_USER_MEMORY_REGION.
    pub fn register_with_kvm(&self, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
        for slot in self.kvm_slots() {
            // SAFETY: the region is mapped, and vm-memory has checked that regions do not overlap.
            // The region stays mapped while the guest can run, because a `Machine` holds both the
            // `Memory` and the `VmFd`, and drops the VM first.
            unsafe { vm.set_user_memory_region(slot) }?;
        }
        Ok(())
    }

    /// Returns the memory slots of KVM, in the order of the mapped regions.
    fn kvm_slots(&self) -> impl Iterator<Item = kvm_userspace_memory_region> {
        (0..).zip(self.guest.iter()).map(|(slot, region)| kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.get_mmap().as_ptr() as u64,
        })
    }
}

/// Converts an address of this process to a guest-physical address. Returns `None` if the address
/// is outside guest memory.
pub fn guest_address(memory: &GuestMemory, at: usize) -> Option<u64> {
    memory.iter().find_map(|region| {
        let offset = at.checked_sub(region.get_mmap().as_ptr() as usize)? as u64;
        (offset < region.len()).then(|| region.start_addr().0 + offset)
    })
}

/// Returns the backing of a memory region, the offset of the region in the file, and the region's
/// options.
fn backing_for_region<'a>(
    region: &MemoryRegion,
    backings: &'a MemoryBackings,
) -> (&'a MemoryBacking, u64, &'a MemoryBackendOptions) {
    match region.kind {
        RegionKind::Local { node, offset } => {
            let (backing, memory_options) = &backings.local[node];
            (backing, backing.offset + offset, memory_options)
        }
        RegionKind::Slice { pool, slice } => {
            let (slices, memory_options) = &backings.pool[pool];
            let backing = &slices[slice as usize];
            (backing, backing.offset, memory_options)
        }
    }
}

fn map_region(
    region: &MemoryRegion,
    (backing, offset): (&MemoryBacking, u64),
    memory_options: &MemoryBackendOptions,
    log: WriteLog,
) -> Result<GuestRegionMmap<WriteLog>, MemoryError> {
    let bytes = region.range.end - region.range.start;
    check_file_length(backing, offset + bytes)?;
    let error = |operation, hint| {
        move |errno| MemoryError::System {
            operation,
            bytes: Bytes::new(bytes),
            node: region.node,
            hint,
            errno,
        }
    };
    let kind = if memory_options.shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
    // Huge pages are scarce. The mapping reserves them, so that a lack of huge pages is an error
    // here and not at the first access.
    let reserve = if memory_options.hugepage_size.is_some() { 0 } else { libc::MAP_NORESERVE };
    let map_hint = if memory_options.hugepage_size.is_some() {
        "; are there enough free huge pages of that size?"
    } else {
        ""
    };
    let mapping = MmapRegionBuilder::new_with_bitmap(usize::try_from(bytes).expect("usize has 64 bits"), log)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(kind | reserve)
        .with_file_offset(FileOffset::from_arc(Arc::clone(&backing.file), offset))
        .build()
        .map_err(io::Error::other)
        .map_err(error("map", map_hint))?;
    exclude_from_core_dumps(&mapping).map_err(error("exclude from core dumps", ""))?;
    if memory_options.hugepage_size.is_none() && !is_device(&backing.file) {
        advise_huge_pages(&mapping);
    }
    if let Some(node) = memory_options.host_numa_node {
        bind_to_numa_node((mapping.as_ptr(), mapping.size()), node, &backing.file)
            .map_err(error("bind to a host NUMA node", "; does the node exist and have memory?"))?;
    }
    if memory_options.prefault {
        prefault(&mapping).map_err(error("prefault", "; is enough memory free?"))?;
    }
    Ok(GuestRegionMmap::new(mapping, GuestAddress(region.range.start)).expect("guest memory ends below 2^64"))
}

fn check_file_length(backing: &MemoryBacking, needs: u64) -> Result<(), MemoryError> {
    let too_short = |has| MemoryError::FileTooShort {
        owner: backing.owner.to_string(),
        has: Bytes::new(has),
        needs: Bytes::new(needs),
    };
    let metadata = backing.file.metadata().map_err(|_| too_short(0))?;
    if metadata.is_file() && metadata.len() < needs { Err(too_short(metadata.len())) } else { Ok(()) }
}

/// Binds a mapping to one NUMA node of the host.
fn bind_to_numa_node((start, bytes): (*mut u8, usize), node: u32, file: &File) -> io::Result<()> {
    const WORD_BITS: u32 = u64::BITS;
    /// Flag of mbind(2), from linux/mempolicy.h: fail if existing pages are on other nodes.
    const MPOL_MF_STRICT: u32 = 1;
    /// Maximum number of NUMA nodes that Linux supports.
    const NUMA_NODES_MAX: u32 = 1024;
    if is_device(file) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "device memory cannot be bound"));
    }
    if node >= NUMA_NODES_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut mask = [0_u64; (NUMA_NODES_MAX / WORD_BITS) as usize];
    mask[(node / WORD_BITS) as usize] = 1 << (node % WORD_BITS);
    let bits = u64::from(NUMA_NODES_MAX) + 1;
    // SAFETY: the range is mapped and the mask has `bits` - 1 bits. The call changes the
    // allocation policy, not the content of the memory.
    let done = unsafe {
        libc::syscall(libc::SYS_mbind, start, bytes, libc::MPOL_BIND, mask.as_ptr(), bits, MPOL_MF_STRICT)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Excludes guest memory from core dumps, because the memory may contain secrets of the guest.
fn exclude_from_core_dumps(region: &vm_memory::MmapRegion<WriteLog>) -> io::Result<()> {
    // SAFETY: the region is mapped. The advice does not change the content of the region.
    let done = unsafe {
        rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxDontDump)
    };
    Ok(done?)
}

/// Advises the kernel to use transparent huge pages for a mapping, which reduces TLB misses. The
/// kernel follows the advice if shmem_enabled is `advise`, `within_size` or `always`. The error of
/// a kernel without huge pages is ignored.
fn advise_huge_pages(region: &vm_memory::MmapRegion<WriteLog>) {
    // SAFETY: the region is mapped. The advice affects the size of future pages, not the content.
    let _ = unsafe {
        rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxHugepage)
    };
}

/// Allocates all pages of a mapping.
fn prefault(region: &vm_memory::MmapRegion<WriteLog>) -> io::Result<()> {
    // SAFETY: the region is mapped. The kernel allocates missing pages and does not change the
    // content of the region.
    let done = unsafe {
        rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxPopulateWrite)
    };
    Ok(done?)
}

/// Returns whether a file is a DAX device. The length of a device is not in its metadata.
fn is_device(file: &File) -> bool {
    // fstat(2) is allowed in confined threads, and statx(2) is not.
    let status = rustix::fs::fstat(file);
    status.is_ok_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::CharacterDevice)
}
