//! Operations on the memory of this machine, behind the trait [`Host`]. Only this module and
//! [`doctor`](crate::doctor) use paths of /proc, /sys and /dev. The agent in the crate `pool`
//! decides which operations are performed.

pub mod access_profile;
pub mod blocks;
pub mod cgroup;
pub mod cxl;
pub mod damon;
pub mod dax;
pub mod emulated;
pub mod fake;
mod interrupt;
pub mod latency;
mod local_memory;
pub mod memory;
pub mod memory_block;
mod memory_file;
pub mod memory_limit;
mod open_slices;
pub mod process;
pub(crate) mod process_memory;
pub mod ranges;
pub mod remote;
pub mod sampler;
pub mod slices;
pub mod sysfs;
pub mod tiers;
pub mod vm_counters;
pub mod vm_pressure;
mod zero;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::Arc,
};

use pool::{
    agent::{HostFailure, VmRecord},
    protocol::{FailureReason, Handle, Holding, ObservedVm, SeenDevice},
};
use units::{Bytes, ReservationId, UserId};

use crate::user::current_user;

/// Operations on the memory of a machine.
///
/// Calls for different slices may run concurrently; calls for the same slice run one after another.
/// All calls are idempotent. A failed call may leave a slice half open or half closed; repeating
/// the call or calling [`Host::close_orphaned_slice`] completes it. A failed call to close a slice still
/// revokes the VM's access.
pub trait Host: fmt::Debug + Send + Sync {
    /// Opens a slice, so that it can be passed to a VM. With `check_zero`, verifies first that the
    /// slice contains only zeros.
    ///
    /// # Errors
    /// [`HostError::NotZero`] if a byte is not zero; another variant if the operating system
    /// rejects an operation.
    fn online(&self, holding: Holding, handle: &Handle, check_zero: bool) -> Result<(), HostError>;

    /// Closes a slice. With `verify`, checks first that no process has the slice open or mapped.
    ///
    /// # Errors
    /// [`HostError::InUse`] if a process has the slice open or mapped; another variant if the
    /// operating system rejects an operation.
    fn offline(&self, holding: Holding, handle: &Handle, verify: bool) -> Result<(), HostError>;

    /// Returns the pool devices that are attached to this machine, to be reported to the manager.
    fn devices(&self) -> Vec<SeenDevice>;

    /// Returns the locations ([`Handle::place`]) of all slices that are open or half open on this
    /// machine, including slices that an earlier agent opened.
    ///
    /// # Errors
    /// The state of a device cannot be read.
    fn present_slices(&self) -> Result<Vec<Arc<str>>, HostError>;

    /// Closes an open or half open slice that no VM uses, by its location.
    ///
    /// # Errors
    /// [`HostError::InUse`] if removal would take the memory from a process, such as a child of a VM
    /// that ended; another variant if the operating system rejects an operation.
    fn close_orphaned_slice(&self, place: &str) -> Result<(), HostError>;

    /// Zeroes a slice, verifies the zeros, and closes the slice. Returns the number of verified
    /// bytes.
    ///
    /// # Errors
    /// [`HostError::NotZero`] if the verification fails; another variant if the operating system
    /// rejects an operation.
    fn scrub(&self, holding: Holding, handle: &Handle) -> Result<Bytes, HostError>;

    /// Returns the memory of a VM: local memory first, then its slices in order. Repeated calls
    /// return the same memory.
    ///
    /// # Errors
    /// [`HostError::NotOpen`] if a slice is not open; another variant if the operating system
    /// rejects an operation.
    fn memory(&self, record: &VmRecord, form: MemoryForm) -> Result<Vec<MemoryRegion>, HostError>;

    /// Moves the pool memory of a running VM to local memory without its VMM, if the backend can do
    /// this. Returns `None` if only the VMM can move it. Repeated calls continue the move.
    ///
    /// # Errors
    /// Some memory could not be moved. The VM uses its pool memory as before.
    fn rehome(&self, _: &VmRecord) -> Option<Result<(), HostError>> {
        None
    }

    /// Checks that no process has the slices of a VM open or mapped, after its VMM has reported that it
    /// does not use them.
    ///
    /// # Errors
    /// [`HostError::InUse`] if a process has a slice; another variant if the processes cannot be listed.
    fn check_slices_unused(&self, record: &VmRecord) -> Result<(), HostError>;

    /// Registers a running VM to which an earlier agent passed its memory.
    fn adopt_running_vm(&self, _: &VmRecord) {}

    /// Measures how much memory of a running VM is backed by pages.
    fn usage(&self, reservation: ReservationId, vm: &ObservedVm) -> Usage;

    /// Returns the files of a VM's slices in which the kernel can observe accesses, which excludes
    /// device memory.
    ///
    /// # Errors
    /// The reason why accesses cannot be observed.
    fn observable_files(&self, slices: &[Holding]) -> Result<BTreeSet<process::FileId>, &'static str>;

    /// Returns the counters for metrics. They are 0 when the agent starts.
    fn counters(&self) -> Counters;

    /// Releases the local memory of a VM, if any.
    ///
    /// # Errors
    /// The file of the memory cannot be removed.
    fn free_local_memory(&self, reservation: ReservationId) -> Result<(), HostError>;
}

/// Amount of a VM's memory that is backed by pages. `None` means not measured, as for device-dax
/// memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Used part of the local memory.
    pub local: Option<Bytes>,
    /// Used part of the pool memory.
    pub pool: Option<Bytes>,
    /// Used pool memory whose pages are on nodes without pool memory, because the nodes with pool
    /// memory were full. `None` if not measured, and for backends that cannot overflow.
    pub overflow: Option<Bytes>,
}

/// Describes numbers of pages by error number, such as `5 of them: Out of memory (os error 12)`.
fn describe_errors(errors: &BTreeMap<i32, u64>) -> String {
    let describe =
        |(errno, pages): (&i32, &u64)| format!("{pages} of them: {}", io::Error::from_raw_os_error(*errno));
    errors.iter().map(describe).collect::<Vec<_>>().join(", ")
}

/// Counters of a host for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Memory zeroed since the start, including scrubs in progress.
    pub scrubbed: Bytes,
    /// Pages of VMs migrated from local memory back to the pool's node.
    pub pages_migrated: u64,
    /// Pages of VMs that could not be migrated back.
    pub page_migration_failures: u64,
    /// Number of slices that are being changed, including slices stuck in the kernel.
    pub slices_changing: u64,
}

/// Form in which a VMM receives memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryForm {
    /// File descriptors.
    Descriptors,
    /// Paths of files that the VM's user owns.
    Paths,
    /// Paths of the slices' files. The VM's user owns the files. The VMM allocates local memory
    /// itself.
    SlicePaths,
}

/// Contiguous part of a VM's memory: its local memory or one slice.
#[derive(Clone, Debug)]
pub struct MemoryRegion {
    /// Slice with its epoch; `None` for local memory.
    pub slice: Option<Holding>,
    /// Name of the slice's EMC; empty for local memory.
    pub emc: Arc<str>,
    /// Size of the region.
    pub bytes: Bytes,
    /// Offset of the region in the file that backs it, in bytes.
    pub offset: u64,
    /// Size of the spare local memory, to which the VMM can move the pool memory. It follows the
    /// region in the same file. Zero for slices.
    pub spare: Bytes,
    /// File that backs the region.
    pub backing: RegionBacking,
}

/// File that backs a memory region, in the form that a VMM receives.
#[derive(Clone, Debug)]
pub enum RegionBacking {
    /// Descriptor of the file.
    Descriptor(Arc<OwnedFd>),
    /// Path of the file.
    Path(PathBuf),
    /// No file: the VMM allocates the memory.
    VmmAllocated,
}

/// Returns the owner of a VM's files: the user named by its reservation, or the agent's user.
fn file_owner(record: &VmRecord) -> UserId {
    record.uid.unwrap_or_else(current_user)
}

/// Error of an operation on the memory of this machine.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The operating system rejected an operation.
    #[error("cannot {operation} {}", path.display())]
    Io {
        /// Operation, such as `open`.
        operation: &'static str,
        /// File or object of the operation.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
    /// The file does not have the size of a slice, for example because the slice was revoked.
    #[error("{} is not a slice: its size is {bytes} bytes, must be {}", path.display(), units::SLICE.get())]
    NotASlice {
        /// File named by the handle.
        path: PathBuf,
        /// Size of the file, in bytes.
        bytes: u64,
    },
    /// The file of a slice has another path, by which another user may open it.
    #[error("{} has {links} links: the file of a slice must have one", path.display())]
    LinkedSlice {
        /// File named by the handle.
        path: PathBuf,
        /// Number of links.
        links: u64,
    },
    /// The slice contains a byte other than zero.
    #[error("{} is not zero at byte {at}", path.display())]
    NotZero {
        /// File of the slice.
        path: PathBuf,
        /// Offset of the first non-zero byte, rounded down to a multiple of the read size.
        at: u64,
    },
    /// Processes still have the slice open or mapped.
    #[error("{} is still in use by processes {pids:?}", path.display())]
    InUse {
        /// File of the slice.
        path: PathBuf,
        /// Identifiers of the processes.
        pids: Vec<u32>,
    },
    /// A CXL memory device is missing or cannot be used.
    #[error(transparent)]
    Cxl(#[from] cxl::CxlError),
    /// The dax device of a slice could not be changed.
    #[error(transparent)]
    Slice(#[from] slices::SliceError),
    /// A file in sysfs could not be read or written.
    #[error(transparent)]
    Sysfs(#[from] sysfs::SysfsError),
    /// A process could not be inspected.
    #[error(transparent)]
    Process(#[from] process::ProcessError),
    /// The memory blocks of a slice could not be onlined or offlined.
    #[error(transparent)]
    BlockSwitch(#[from] memory_block::BlockSwitchError),
    /// A slice cannot be removed from its node, because the VMs' pages do not fit into the other
    /// slices.
    #[error(
        "cannot remove the slice from node {node}: VMs use {needed} of it, but the node has only {available} free elsewhere"
    )]
    NodeFull {
        /// NUMA node of the slice.
        node: u32,
        /// Memory of VMs that would have to be migrated out of the slice.
        needed: Bytes,
        /// Free memory of the node outside the slice.
        available: Bytes,
    },
    /// Pages of a VM could not be moved to local memory.
    #[error(
        "cannot migrate {remaining} of {pages} pages to local nodes: {}; is local memory free, and does no device use the pages?",
        describe_errors(errors)
    )]
    PagesNotMoved {
        /// Number of pages outside local memory before the move.
        pages: u64,
        /// Number of pages that were not moved.
        remaining: u64,
        /// Number of pages that were not moved, by error number.
        errors: BTreeMap<i32, u64>,
    },
    /// The backend `memory_block` cannot pass memory by path to a VMM that runs as a different user
    /// than the agent: other users cannot open the path of a memfd.
    #[error(
        "a VMM of user {uid} cannot open memory blocks by path: pass descriptors, or run the VMM as the agent's user"
    )]
    NoPath {
        /// User of the VMM.
        uid: UserId,
    },
    /// The file belongs to another user, and its file system cannot let a third user open it.
    #[error(
        "user {user} cannot open {} by path: it belongs to user {owner}, and its file system has no access control lists: pass descriptors, or run the manager as the agent's user",
        path.display()
    )]
    NoAcl {
        /// File of the slice.
        path: PathBuf,
        /// User of the VMM.
        user: UserId,
        /// Owner of the file, in general the manager's user.
        owner: u32,
    },
    /// The file in /dev is not the device node of the slice.
    #[error("{} is not the device node of the slice: /dev must be a devtmpfs", path.display())]
    NotTheDevice {
        /// Path in /dev.
        path: PathBuf,
    },
    /// The slice was not opened before.
    #[error("slice {} of epoch {} is not open", .0.slice, .0.epoch)]
    NotOpen(Holding),
    /// The directory of local memory cannot be used, or another user can change it.
    #[error(transparent)]
    Dir(#[from] crate::protected_dir::DirError),
    /// Local memory was requested by path, but no directory for it is configured.
    #[error("local memory by path requires backend.local_dir in host.toml")]
    NoLocalDirectory,
}

impl HostError {
    pub(crate) fn io(operation: &'static str, path: impl Into<PathBuf>, errno: impl Into<io::Error>) -> Self {
        Self::Io { operation, path: path.into(), errno: errno.into() }
    }

    /// Converts the error to the failure reported to the manager.
    pub fn to_failure(&self) -> HostFailure {
        let reason = match self {
            Self::NotZero { .. } => FailureReason::NotZero,
            Self::Io { .. }
            | Self::NotASlice { .. }
            | Self::LinkedSlice { .. }
            | Self::InUse { .. }
            | Self::Cxl(_)
            | Self::Slice(_)
            | Self::Sysfs(_)
            | Self::Process(_)
            | Self::BlockSwitch(_)
            | Self::NodeFull { .. }
            | Self::NoPath { .. }
            | Self::PagesNotMoved { .. }
            | Self::NoAcl { .. }
            | Self::NotTheDevice { .. }
            | Self::NotOpen(_)
            | Self::Dir(_)
            | Self::NoLocalDirectory => FailureReason::Host,
        };
        HostFailure { reason, message: units::chain(self) }
    }
}
