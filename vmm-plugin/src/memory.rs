//! A guest's memory: files mapped where the [`Layout`] says, and told to KVM. Where the files come from is the business of
//! whoever calls; what becomes of a guest whose memory goes away is [`fault`]'s, how much of it is in use [`touched`]'s.

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

/// The memory of a guest as devices and loaders see it. Nobody ever holds a reference into it.
pub type GuestMemory = GuestMemoryMmap<()>;

/// How a node's memory is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBackendOptions {
    /// Whether other processes that have the file see what the guest writes.
    pub shared: bool,
    /// Whether all of it is there before the guest starts.
    pub prefault: bool,
    /// The size of the host's pages, if not its ordinary ones.
    pub hugepage_size: Option<Bytes>,
    /// The host's NUMA node it must be of.
    pub host_numa_node: Option<u32>,
}

impl Default for MemoryBackendOptions {
    fn default() -> Self {
        Self { shared: true, prefault: false, hugepage_size: None, host_numa_node: None }
    }
}

/// Whose memory a file is, for whoever asks when it is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// This process's own.
    Local,
    /// A slice of the rack's.
    Slice {
        /// Its number.
        slice: u32,
        /// The EMC it is of.
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

/// A file that is to be memory.
#[derive(Clone, Debug)]
pub struct Backing {
    /// The file.
    pub file: Arc<File>,
    /// Where in it the memory begins.
    pub offset: u64,
    /// Whose it is.
    pub owner: Owner,
}

/// All files of a guest.
#[derive(Clone, Debug, Default)]
pub struct Backings {
    /// Of each node with processors.
    pub local: Vec<(Backing, MemoryBackendOptions)>,
    /// Of each pool node: its slices, in order.
    pub pool: Vec<(Vec<Backing>, MemoryBackendOptions)>,
}

/// Why there is no memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The operating system has none, or not like that.
    #[error("memory: cannot {doing} {bytes} for node {node}{hint}")]
    System {
        /// What was tried.
        doing: &'static str,
        /// How much.
        bytes: Bytes,
        /// For which node of the guest.
        node: u32,
        /// What may help.
        hint: &'static str,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// A file that is shorter than the memory it is to be.
    #[error("memory: {owner} has {has}, and {needs} were promised")]
    FileTooShort {
        /// Whose.
        owner: String,
        /// How long it is.
        has: Bytes,
        /// How long it should be.
        needs: Bytes,
    },
    /// More is to be there before the guest starts than this host has. Asking for it would have the kernel end some process.
    #[error("memory: prefault=on for {wanted}, and this host has {available} available")]
    InsufficientMemory {
        /// How much is to be there.
        wanted: Bytes,
        /// How much there is.
        available: Bytes,
    },
    /// Two pieces of a guest that are the same bytes of a file.
    #[error("memory: {one} and {other} are the same memory: each must be its own")]
    Overlap {
        /// Whose.
        one: String,
        /// And whose.
        other: String,
    },
    /// vm-memory does not take it.
    #[error("memory: regions that do not fit beside each other")]
    Regions(#[from] vm_memory::GuestRegionCollectionError),
}

/// Memory of this process's own, for a guest without an agent.
///
/// # Errors
/// The kernel makes no such file.
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

/// One mapped piece, for whoever wants to know what became of it.
#[derive(Debug)]
struct MappedRegion {
    /// In this process.
    addresses: Range<usize>,
    file: Arc<File>,
    /// Where in the file it is.
    file_range: Range<u64>,
    owner: Owner,
    node: u32,
    is_shared: bool,
}

/// A guest's memory, mapped.
#[derive(Debug)]
pub struct Memory {
    guest: GuestMemory,
    mapped: Vec<MappedRegion>,
}

impl Memory {
    /// Maps all pieces of a layout.
    ///
    /// # Errors
    /// [`MemoryError`]. Nothing stays mapped.
    pub fn map(layout: &Layout, backings: &Backings) -> Result<Self, MemoryError> {
        check::check_available_memory(layout, backings)?;
        let mut regions = Vec::with_capacity(layout.regions.len());
        let mut mapped = Vec::with_capacity(layout.regions.len());
        for region in &layout.regions {
            let (backing, offset, memory_options) = backing_of(region, backings);
            let mapping = map_region(region, backing, offset, memory_options)?;
            let start = mapping.get_mmap().as_ptr() as usize;
            mapped.push(MappedRegion {
                addresses: start..start + usize::try_from(mapping.len()).expect("it is mapped"),
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

    /// As devices and loaders see it.
    pub fn guest(&self) -> &GuestMemory {
        &self.guest
    }

    /// The slices of a node in the order in which they lie, each with its EMC.
    pub fn slices(&self, node: u32) -> impl Iterator<Item = (u32, &str)> {
        let mapped = self.mapped.iter().filter(move |mapped| mapped.node == node);
        mapped.filter_map(|mapped| match &mapped.owner {
            Owner::Slice { slice, emc } => Some((*slice, emc.as_str())),
            Owner::Local => None,
        })
    }

    /// The files of each node, by which it is measured how much of it was touched.
    ///
    /// # Errors
    /// The status of a file cannot be read.
    pub fn node_files(&self) -> io::Result<NodeFiles> {
        NodeFiles::new(&self.mapped)
    }

    /// Tells KVM about all of it.
    ///
    /// # Errors
    /// KVM takes no more of it.
    pub fn register_with(&self, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
        for (slot, region) in (0..).zip(self.guest.iter()) {
            let slot = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.get_mmap().as_ptr() as u64,
            };
            // SAFETY: the region is mapped and overlaps no other, as vm-memory has checked. It stays mapped for as long
            // as anybody can run the guest: a `Machine` holds the `Memory` and the `VmFd` both, and drops the VM first.
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

/// Which file a piece is of, and from where on.
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
    // Huge pages are few, so they are set aside here rather than found missing later.
    let reserve = if memory_options.hugepage_size.is_some() { 0 } else { libc::MAP_NORESERVE };
    let map_hint = if memory_options.hugepage_size.is_some() {
        "; are there enough free huge pages of that size?"
    } else {
        ""
    };
    let mapping = MmapRegionBuilder::new(usize::try_from(bytes).expect("64-bit"))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(kind | reserve)
        .with_file_offset(FileOffset::from_arc(Arc::clone(&backing.file), offset))
        .build()
        .map_err(io::Error::other)
        .map_err(error("map", map_hint))?;
    exclude_from_core_dumps(&mapping).map_err(error("leave out of core dumps", ""))?;
    if memory_options.hugepage_size.is_none() && !is_device(&backing.file) {
        advise_huge_pages(&mapping);
    }
    if let Some(node) = memory_options.host_numa_node {
        bind(&mapping, node, &backing.file)
            .map_err(error("bind to a node of this host", "; is there such a node, with memory?"))?;
    }
    if memory_options.prefault {
        prefault(&mapping).map_err(error("prefault", "; is there as much memory free?"))?;
    }
    Ok(GuestRegionMmap::new(mapping, GuestAddress(region.range.start))
        .expect("a layout does not wrap around"))
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

/// Memory of a mapping comes from one node of the host and from no other.
fn bind(region: &vm_memory::MmapRegion<()>, node: u32, file: &File) -> io::Result<()> {
    const WORD: u32 = u64::BITS;
    /// From linux/mempolicy.h: pages that are elsewhere are an error.
    const MPOL_MF_STRICT: u32 = 1;
    /// One more than the highest node that Linux can be built for.
    const NODES_MAX: u32 = 1024;
    if is_device(file) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "a device's memory is where it is"));
    }
    if node >= NODES_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut mask = [0_u64; (NODES_MAX / WORD) as usize];
    mask[(node / WORD) as usize] = 1 << (node % WORD);
    let (start, bytes, bits) = (region.as_ptr(), region.size(), u64::from(NODES_MAX) + 1);
    // SAFETY: the region is mapped, and the mask is as long as is said; the call changes from where pages are taken, and no
    // byte of memory.
    let done = unsafe {
        libc::syscall(libc::SYS_mbind, start, bytes, libc::MPOL_BIND, mask.as_ptr(), bits, MPOL_MF_STRICT)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What a guest has in its memory is not for whoever looks why its VMM crashed.
fn exclude_from_core_dumps(region: &vm_memory::MmapRegion<()>) -> io::Result<()> {
    // SAFETY: the region is mapped; the advice changes what a dump holds, and nothing that is read or written.
    let done = unsafe {
        rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxDontDump)
    };
    Ok(done?)
}

/// Requests huge pages for a mapping, which cost a guest fewer TLB misses. The kernel follows the advice where shmem_enabled is
/// `advise`, `within_size` or `always`, and ignores it elsewhere; one without huge pages refuses it, and nothing is lost.
fn advise_huge_pages(region: &vm_memory::MmapRegion<()>) {
    // SAFETY: the region is mapped; the advice changes the size of pages that are taken later, and nothing that is read or written.
    let _ = unsafe {
        rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxHugepage)
    };
}

/// All of a mapping is there afterwards, or the kernel says what is missing.
fn prefault(region: &vm_memory::MmapRegion<()>) -> io::Result<()> {
    // SAFETY: the region is mapped and stays as it is; pages that are missing are taken, as a write to each would do.
    let done = unsafe {
        rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxPopulateWrite)
    };
    Ok(done?)
}

/// Whether it is a device (DAX), whose memory is where it is and has no length to look at.
fn is_device(file: &File) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.file_type().is_char_device())
}
