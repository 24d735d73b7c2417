//! Maps a guest's memory files as the [`Layout`] defines, and registers the mappings with KVM. The
//! files come from `source`. [`fault`] handles memory that disappears, [`touched`] measures usage.

mod check;
pub mod fault;
pub mod poison;
pub mod touched;

use std::{fmt, fs::File, io, ops::Range, os::unix::fs::FileTypeExt as _, sync::Arc};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use rustix::fs::{MemfdFlags, SealFlags};
use units::Bytes;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
    GuestRegionMmap, mmap::MmapRegionBuilder,
};

use self::touched::NodeFiles;
use crate::layout::{Layout, MemoryRegion, RegionKind};

/// A guest's memory, as devices and loaders access it: by copying, never by reference.
pub type GuestMemory = GuestMemoryMmap<()>;

/// Options of a node's memory backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBackendOptions {
    /// Whether the mapping is shared (MAP_SHARED) or private.
    pub shared: bool,
    /// Whether all pages are allocated before the guest starts.
    pub prefault: bool,
    /// Size of the host's huge pages; `None` means ordinary pages.
    pub hugepage_size: Option<Bytes>,
    /// NUMA node of the host that the memory is bound to.
    pub host_numa_node: Option<u32>,
}

impl Default for MemoryBackendOptions {
    fn default() -> Self {
        Self { shared: true, prefault: false, hugepage_size: None, host_numa_node: None }
    }
}

/// Origin of a memory file, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Local memory of the host.
    Local,
    /// A slice of the rack.
    Slice {
        /// Number of the slice.
        slice: u32,
        /// EMC of the slice.
        emc: String,
    },
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("local memory"),
            Self::Slice { slice, emc } => write!(f, "slice {slice} of EMC {emc}"),
        }
    }
}

/// A file, or part of a file, that backs guest memory.
#[derive(Clone, Debug)]
pub struct Backing {
    /// The file.
    pub file: Arc<File>,
    /// Offset of the memory in the file, in bytes.
    pub offset: u64,
    /// Origin of the file.
    pub owner: Owner,
}

/// All memory files of a guest.
#[derive(Clone, Debug, Default)]
pub struct Backings {
    /// One file per node with CPUs.
    pub local: Vec<(Backing, MemoryBackendOptions)>,
    /// The slices of each pool node, in order.
    pub pool: Vec<(Vec<Backing>, MemoryBackendOptions)>,
}

/// Error returned when guest memory cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A system call failed.
    #[error("memory: cannot {doing}: {bytes} of node {node}{hint}")]
    System {
        /// The failed operation, completing "cannot …".
        doing: &'static str,
        /// Size of the mapping.
        bytes: Bytes,
        /// Node of the guest.
        node: u32,
        /// Advice appended to the message; may be empty.
        hint: &'static str,
        /// The underlying error.
        #[source]
        errno: io::Error,
    },
    /// A file is shorter than its mapping.
    #[error("memory: {owner} has {has}, expected {needs}")]
    FileTooShort {
        /// Origin of the file.
        owner: String,
        /// Length of the file.
        has: Bytes,
        /// Required length.
        needs: Bytes,
    },
    /// More memory is to be prefaulted than the host has available; the OOM killer would end some
    /// process.
    #[error("memory: cannot prefault {requested}: this host has {available} available")]
    InsufficientMemory {
        /// Memory to be prefaulted.
        requested: Bytes,
        /// Available memory (MemAvailable).
        available: Bytes,
    },
    /// Two regions of the guest overlap in one file.
    #[error("memory: {one} and {other} overlap")]
    Overlap {
        /// Origin of the first region.
        one: String,
        /// Origin of the second region.
        other: String,
    },
    /// vm-memory rejected the regions.
    #[error("memory: invalid regions")]
    Regions(#[from] vm_memory::GuestRegionCollectionError),
}

/// Creates a sealed memfd, optionally of huge pages.
///
/// # Errors
/// The error of the failed system call.
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

/// A mapped region and its file.
#[derive(Debug)]
struct MappedRegion {
    /// Address range in this process.
    addresses: Range<usize>,
    file: Arc<File>,
    /// Range in the file.
    file_range: Range<u64>,
    owner: Owner,
    node: u32,
    is_shared: bool,
}

/// The mapped memory of a guest.
#[derive(Debug)]
pub struct Memory {
    guest: GuestMemory,
    mapped: Vec<MappedRegion>,
}

impl Memory {
    /// Maps all regions of a layout.
    ///
    /// # Errors
    /// [`MemoryError`]; all mappings are removed.
    pub fn map(layout: &Layout, backings: &Backings) -> Result<Self, MemoryError> {
        check::check_available_memory(layout, backings)?;
        let mut regions = Vec::with_capacity(layout.regions.len());
        let mut mapped = Vec::with_capacity(layout.regions.len());
        for region in &layout.regions {
            let (backing, offset, memory_options) = backing_of(region, backings);
            let mapping = map_region(region, backing, offset, memory_options)?;
            let start = mapping.get_mmap().as_ptr() as usize;
            mapped.push(MappedRegion {
                addresses: start..start + usize::try_from(mapping.len()).expect("a mapping fits into usize"),
                file: Arc::clone(&backing.file),
                file_range: offset..offset + mapping.len(),
                owner: backing.owner.clone(),
                node: region.node,
                is_shared: memory_options.shared,
            });
            regions.push(mapping);
        }
        check::check_disjoint(&mapped)?;
        Ok(Self { guest: GuestMemory::from_regions(regions)?, mapped })
    }

    /// Returns the memory as devices and loaders access it.
    pub fn guest(&self) -> &GuestMemory {
        &self.guest
    }

    /// Returns the slices of a node in address order, each with its EMC.
    pub fn slices(&self, node: u32) -> impl Iterator<Item = (u32, &str)> {
        let mapped = self.mapped.iter().filter(move |mapped| mapped.node == node);
        mapped.filter_map(|mapped| match &mapped.owner {
            Owner::Slice { slice, emc } => Some((*slice, emc.as_str())),
            Owner::Local => None,
        })
    }

    /// Returns the files of each node, for measuring touched memory.
    ///
    /// # Errors
    /// The error of fstat(2).
    pub fn node_files(&self) -> io::Result<NodeFiles> {
        NodeFiles::new(&self.mapped)
    }

    /// Registers all regions with KVM.
    ///
    /// # Errors
    /// The error of KVM_SET_USER_MEMORY_REGION.
    pub fn register_with(&self, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
        for (slot, region) in (0..).zip(self.guest.iter()) {
            let slot = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.get_mmap().as_ptr() as u64,
            };
            // SAFETY: the region is mapped and overlaps no other, as vm-memory has checked. It
            // stays mapped while the guest can run: a `Machine` holds both the `Memory` and the
            // `VmFd`, and drops the VM first.
            unsafe { vm.set_user_memory_region(slot) }?;
        }
        Ok(())
    }
}

/// Returns the guest-physical address of an address of this process.
pub fn guest_address(memory: &GuestMemory, at: usize) -> Option<u64> {
    memory.iter().find_map(|region| {
        let offset = at.checked_sub(region.get_mmap().as_ptr() as usize)? as u64;
        (offset < region.len()).then(|| region.start_addr().0 + offset)
    })
}

/// Returns the backing of a region, its offset in the file, and its options.
fn backing_of<'a>(
    region: &MemoryRegion,
    backings: &'a Backings,
) -> (&'a Backing, u64, &'a MemoryBackendOptions) {
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
    backing: &Backing,
    offset: u64,
    memory_options: &MemoryBackendOptions,
) -> Result<GuestRegionMmap<()>, MemoryError> {
    let bytes = region.range.end - region.range.start;
    check_file_length(backing, offset + bytes)?;
    let error = |doing, hint| {
        move |errno| MemoryError::System { doing, bytes: Bytes::new(bytes), node: region.node, hint, errno }
    };
    let kind = if memory_options.shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
    // Huge pages are scarce, so they are reserved here rather than allocated at the first access.
    let reserve = if memory_options.hugepage_size.is_some() { 0 } else { libc::MAP_NORESERVE };
    let map_hint = if memory_options.hugepage_size.is_some() {
        "; are there enough free huge pages of that size?"
    } else {
        ""
    };
    let mapping = MmapRegionBuilder::new(usize::try_from(bytes).expect("usize has 64 bits"))
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
        bind(&mapping, node, &backing.file)
            .map_err(error("bind to a host NUMA node", "; does the node exist and have memory?"))?;
    }
    if memory_options.prefault {
        prefault(&mapping).map_err(error("prefault", "; is enough memory free?"))?;
    }
    Ok(GuestRegionMmap::new(mapping, GuestAddress(region.range.start)).expect("a layout ends below 2^64"))
}

fn check_file_length(backing: &Backing, needs: u64) -> Result<(), MemoryError> {
    let wrong = |has| MemoryError::FileTooShort {
        owner: backing.owner.to_string(),
        has: Bytes::new(has),
        needs: Bytes::new(needs),
    };
    let metadata = backing.file.metadata().map_err(|_| wrong(0))?;
    if metadata.is_file() && metadata.len() < needs { Err(wrong(metadata.len())) } else { Ok(()) }
}

/// Binds a mapping to one NUMA node of the host.
fn bind(region: &vm_memory::MmapRegion<()>, node: u32, file: &File) -> io::Result<()> {
    const WORD: u32 = u64::BITS;
    /// From linux/mempolicy.h: fail if existing pages are on other nodes.
    const MPOL_MF_STRICT: u32 = 1;
    /// Linux's maximum number of nodes.
    const NODES_MAX: u32 = 1024;
    if is_device(file) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "device memory cannot be bound"));
    }
    if node >= NODES_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut mask = [0_u64; (NODES_MAX / WORD) as usize];
    mask[(node / WORD) as usize] = 1 << (node % WORD);
    let (start, bytes, bits) = (region.as_ptr(), region.size(), u64::from(NODES_MAX) + 1);
    // SAFETY: the region is mapped and the mask has `bits` - 1 bits; the call changes the
    // allocation policy, not the content of memory.
    let done = unsafe {
        libc::syscall(libc::SYS_mbind, start, bytes, libc::MPOL_BIND, mask.as_ptr(), bits, MPOL_MF_STRICT)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Excludes guest memory from core dumps: it contains the guest's secrets.
fn exclude_from_core_dumps(region: &vm_memory::MmapRegion<()>) -> io::Result<()> {
    // SAFETY: the region is mapped; the advice does not change its content.
    let done = unsafe {
        rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxDontDump)
    };
    Ok(done?)
}

/// Requests huge pages for a mapping, which reduce TLB misses. The kernel follows the advice if
/// shmem_enabled is `advise`, `within_size` or `always`. A kernel without huge pages rejects it,
/// which is harmless.
fn advise_huge_pages(region: &vm_memory::MmapRegion<()>) {
    // SAFETY: the region is mapped; the advice affects the size of future pages, not the content.
    let _ = unsafe {
        rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxHugepage)
    };
}

/// Allocates all pages of a mapping.
fn prefault(region: &vm_memory::MmapRegion<()>) -> io::Result<()> {
    // SAFETY: the region is mapped; missing pages are allocated as by a write, and no content
    // changes.
    let done = unsafe {
        rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxPopulateWrite)
    };
    Ok(done?)
}

/// Returns whether a file is a device (DAX), whose length is unknown.
fn is_device(file: &File) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.file_type().is_char_device())
}
