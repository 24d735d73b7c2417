//! Operations on the machine, behind one trait. Paths of /proc, /sys and devices are used only in
//! this module and in [`doctor`](crate::doctor); the decisions are made elsewhere.

pub mod access_profile;
pub mod blocks;
pub mod cgroup;
pub mod cxl;
pub mod damon;
pub mod dax;
pub mod emulated;
pub mod fake;
mod interrupt;
mod local_memory;
pub mod memory;
pub mod memory_block;
mod memory_file;
mod open_slices;
pub mod process;
pub mod ranges;
pub mod remote;
pub mod sampler;
pub mod slices;
pub mod sysfs;
mod zero;

use std::{fmt, io, os::fd::OwnedFd, path::PathBuf, sync::Arc};

use pool::{
    agent::{HostFailure, VmRecord},
    protocol::{FailureReason, Handle, Holding, ObservedVm, SeenDevice},
};
use units::{Bytes, ReservationId, UserId};

use crate::user::current_user;

/// Operations on a machine's memory. Calls for different slices are concurrent; for one slice there
/// is one at a time. Every call may be repeated. A failed call may leave a part of a slice, which a
/// repeated call or [`Host::close_orphan`] removes; memory that a VM was to lose is lost in any case.
pub trait Host: fmt::Debug + Send + Sync {
    /// Opens a slice, so that it can be passed to a VM; verifies that it is zeroed if requested.
    ///
    /// # Errors
    /// [`HostError::NotZero`], or the error of the machine.
    fn online(&self, holding: Holding, handle: &Handle, check_zero: bool) -> Result<(), HostError>;

    /// Closes a slice; verifies that no process has it if requested.
    ///
    /// # Errors
    /// [`HostError::InUse`], or the error of the machine.
    fn offline(&self, holding: Holding, handle: &Handle, verify: bool) -> Result<(), HostError>;

    /// Returns pool devices that this machine sees itself.
    fn devices(&self) -> Vec<SeenDevice>;

    /// Returns the locations of slices on this machine, open or half open, independent of their
    /// origin; by [`Handle::place`].
    ///
    /// # Errors
    /// The error of the machine.
    fn present_slices(&self) -> Result<Vec<Arc<str>>, HostError>;

    /// Closes anything at a location that no VM has.
    ///
    /// # Errors
    /// The error of the machine, also if removal would take the memory from a process, such as a
    /// child of a VM that ended long ago.
    fn close_orphan(&self, place: &str) -> Result<(), HostError>;

    /// Zeroes, verifies and closes a slice. Returns the number of verified bytes.
    ///
    /// # Errors
    /// [`HostError::NotZero`], or the error of the machine.
    fn scrub(&self, holding: Holding, handle: &Handle) -> Result<Bytes, HostError>;

    /// Returns a VM's memory, local memory first, then its slices in order. Repeated calls return
    /// the same.
    ///
    /// # Errors
    /// A slice that is not open, or the error of the machine.
    fn memory(&self, record: &VmRecord, form: MemoryForm) -> Result<Vec<MemoryRegion>, HostError>;

    /// Registers a running VM that got its memory from an earlier agent.
    fn adopt(&self, _: &VmRecord) {}

    /// Measures how much of a running VM's memory has pages, by the descriptors that this host
    /// keeps of it.
    fn usage(&self, reservation: ReservationId, vm: &ObservedVm) -> Usage;

    /// Returns counters since the start.
    fn counters(&self) -> Counters;

    /// Releases a VM's local memory, if it has any.
    ///
    /// # Errors
    /// The error of the machine.
    fn free_local(&self, reservation: ReservationId) -> Result<(), HostError>;
}

/// Amount of a VM's memory that has pages; `None` where it is not measured, as for device-dax
/// memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Local memory.
    pub local: Option<Bytes>,
    /// Pool memory.
    pub pool: Option<Bytes>,
    /// Pool memory on other nodes than the pool's because those were full. `None` also where memory
    /// cannot overflow.
    pub overflow: Option<Bytes>,
}

/// Counters for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Memory zeroed, including scrubs in progress.
    pub scrubbed: Bytes,
    /// Pages of VMs moved back from local memory to the pool's node.
    pub pages_migrated: u64,
    /// Pages that could not be moved back.
    pub page_migration_failures: u64,
    /// Slices with a change in progress, including changes stuck in the kernel.
    pub slices_changing: u64,
}

/// Form in which a VMM takes memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryForm {
    /// Descriptors.
    Descriptors,
    /// Paths to files of the VM's user.
    Paths,
    /// Slices as paths to files of the VM's user, and the size of local memory.
    SlicePaths,
}

/// Region of a VM's memory.
#[derive(Clone, Debug)]
pub struct MemoryRegion {
    /// Slice; `None` for local memory.
    pub slice: Option<Holding>,
    /// Name of its EMC; empty for local memory.
    pub emc: Arc<str>,
    /// Size.
    pub bytes: Bytes,
    /// Offset in its backing.
    pub offset: u64,
    /// Backing.
    pub backing: RegionBacking,
}

/// Backing of memory.
#[derive(Clone, Debug)]
pub enum RegionBacking {
    /// Object of this descriptor.
    Descriptor(Arc<OwnedFd>),
    /// File of this name.
    Path(PathBuf),
    /// None: the VMM allocates it.
    VmmAllocated,
}

/// Returns the owner of a VM's files: the user named by its reservation, or the agent's user.
fn user_of(record: &VmRecord) -> UserId {
    record.uid.unwrap_or_else(current_user)
}

/// Error of a machine.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The operating system rejected an operation.
    #[error("{doing} {}", path.display())]
    Io {
        /// Operation.
        doing: &'static str,
        /// Object.
        path: PathBuf,
        /// Error.
        #[source]
        errno: io::Error,
    },
    /// The handle's file is no complete slice: it was revoked, or never was one.
    #[error("{} has {bytes} bytes: a slice has {}", path.display(), units::SLICE.get())]
    NotASlice {
        /// File.
        path: PathBuf,
        /// Length.
        bytes: u64,
    },
    /// The slice is not zeroed.
    #[error("{} is not zero at byte {at}", path.display())]
    NotZero {
        /// File.
        path: PathBuf,
        /// First non-zero byte, rounded down to the unit of reads.
        at: u64,
    },
    /// Processes still have it.
    #[error("{} is still in use by processes {pids:?}", path.display())]
    InUse {
        /// File.
        path: PathBuf,
        /// Processes.
        pids: Vec<u32>,
    },
    /// Its CXL memory is unusable or not present.
    #[error(transparent)]
    Cxl(#[from] cxl::CxlError),
    /// The kernel rejected an operation on a slice.
    #[error(transparent)]
    Slice(#[from] slices::SliceError),
    /// The kernel does not report the state.
    #[error(transparent)]
    Sysfs(#[from] sysfs::SysfsError),
    /// Processes cannot be inspected.
    #[error(transparent)]
    Process(#[from] process::ProcessError),
    /// A slice's memory cannot leave or join its node.
    #[error(transparent)]
    BlockSwitch(#[from] memory_block::BlockSwitchError),
    /// A slice may not leave its node: VMs would overflow to local memory.
    #[error("node {node} has {available} free beside this slice: VMs have {needed} in it")]
    NodeFull {
        /// Node.
        node: u32,
        /// Memory to be moved.
        needed: Bytes,
        /// Free memory.
        available: Bytes,
    },
    /// Files without a name have no path for users other than their owner.
    #[error(
        "a VMM of user {uid} cannot open memory blocks by path: it takes descriptors, or runs as the agent's user"
    )]
    NoPath {
        /// User of the VMM.
        uid: UserId,
    },
    /// A file of another user has the name of a device's node.
    #[error("{} is not the node of that device: /dev must be a devtmpfs", path.display())]
    NotTheDevice {
        /// File.
        path: PathBuf,
    },
    /// It was not brought online before.
    #[error("slice {} of epoch {} is not open", .0.slice, .0.epoch)]
    NotOpen(Holding),
    /// Local memory was requested as a path.
    #[error("local memory by path requires backend.local_dir")]
    NoLocalDirectory,
}

impl HostError {
    pub(crate) fn io(doing: &'static str, path: impl Into<PathBuf>, errno: impl Into<io::Error>) -> Self {
        Self::Io { doing, path: path.into(), errno: errno.into() }
    }

    /// Returns the failure as reported to the manager.
    pub fn failure(&self) -> HostFailure {
        let reason = match self {
            Self::NotZero { .. } => FailureReason::NotZero,
            Self::Io { .. }
            | Self::NotASlice { .. }
            | Self::InUse { .. }
            | Self::Cxl(_)
            | Self::Slice(_)
            | Self::Sysfs(_)
            | Self::Process(_)
            | Self::BlockSwitch(_)
            | Self::NodeFull { .. }
            | Self::NoPath { .. }
            | Self::NotTheDevice { .. }
            | Self::NotOpen(_)
            | Self::NoLocalDirectory => FailureReason::Host,
        };
        HostFailure { reason, message: units::chain(self) }
    }
}
