//! What the agent does to a machine, behind one trait. Paths of /proc, /sys and devices appear below here and nowhere
//! else; what is to be done is decided elsewhere.

pub mod blocks;
pub mod cgroup;
pub mod cxl;
pub mod damon;
pub mod dax;
pub mod doctor;
pub mod emulated;
pub mod fake;
mod interrupt;
mod local;
pub mod memory;
pub mod memory_block;
mod opened;
pub mod process;
pub mod ranges;
pub mod remote;
pub mod sampler;
pub mod slices;
pub mod sysfs;
pub mod watched;
mod zero;

use std::{fmt, io, os::fd::OwnedFd, path::PathBuf, sync::Arc};

use pool::{
    agent::{HostFailure, VmRecord},
    protocol::{FailedReason, Handle, HaveVm, Holding, SeenDevice},
};
use units::{Bytes, ReservationId, UserId};

/// Everything the agent does to a machine's memory. Calls for different slices come at the same time from many threads;
/// for one slice there is one at a time. Every call may be repeated. One that fails may leave a part of a slice, which a repeated call
/// or [`Host::clear`] takes away; what a VM was told to lose it has lost all the same.
pub trait Host: fmt::Debug + Send + Sync {
    /// Opens a slice, so that it can be handed out; sees that it holds only zeros if asked to.
    ///
    /// # Errors
    /// [`HostError::NotZero`], or what the machine said.
    fn online(&self, holding: Holding, handle: &Handle, check_zero: bool) -> Result<(), HostError>;

    /// Closes a slice; sees that no process has it if asked to.
    ///
    /// # Errors
    /// [`HostError::InUse`], or what the machine said.
    fn offline(&self, holding: Holding, handle: &Handle, verify: bool) -> Result<(), HostError>;

    /// Pool devices that this machine sees by itself.
    fn devices(&self) -> Vec<SeenDevice>;

    /// Where there are slices on this machine, open or half open, whoever brought them there; by [`Handle::place`].
    ///
    /// # Errors
    /// What the machine said.
    fn found(&self) -> Result<Vec<Arc<str>>, HostError>;

    /// Closes whatever there is at a place, which no VM was handed.
    ///
    /// # Errors
    /// What the machine said.
    fn clear(&self, place: &str) -> Result<(), HostError>;

    /// Zeroes a slice, sees that it is zero and closes it. Answers how much was seen to be zero.
    ///
    /// # Errors
    /// [`HostError::NotZero`], or what the machine said.
    fn scrub(&self, holding: Holding, handle: &Handle) -> Result<Bytes, HostError>;

    /// A VM's memory, local first, then its slices in order. The same again for the same VM.
    ///
    /// # Errors
    /// A slice that is not open, or what the machine said.
    fn memory(&self, record: &VmRecord, form: Form) -> Result<Vec<Part>, HostError>;

    /// Takes notice of a running VM that an agent before this one handed memory to.
    fn adopt(&self, _: &VmRecord) {}

    /// Measures how much of a running VM's memory has pages, from the descriptors that this host keeps of it.
    fn usage(&self, reservation: ReservationId, vm: &HaveVm) -> Usage;

    /// What it has done since the start.
    fn counters(&self) -> Counters;

    /// Gives back a VM's local memory, if it has any.
    ///
    /// # Errors
    /// What the machine said.
    fn free_local(&self, reservation: ReservationId) -> Result<(), HostError>;
}

/// How much of a VM's memory has pages; `None` where that is not measured, as of device-dax memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of its local memory.
    pub local: Option<Bytes>,
    /// Of its pool memory.
    pub pool: Option<Bytes>,
    /// Of its pool memory, what is on other nodes than the pool's because those were full. `None` also where memory cannot overflow.
    pub overflow: Option<Bytes>,
}

/// What was done, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Memory that was made zero, that of scrubs under way included.
    pub scrubbed: Bytes,
    /// Pages of VMs that the kernel had put on local memory, and that are on the pool's node again.
    pub pages_brought_back: u64,
    /// Pages that could not be brought back.
    pub pages_astray: u64,
    /// Slices whose devices are being changed now, those that are stuck in the kernel included.
    pub slices_changing: u64,
}

/// How a VMM wants its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As descriptors.
    Descriptors,
    /// As paths to files of the VM's user.
    Paths,
    /// Slices as paths to files of the VM's user, and of local memory only the size.
    Shown,
}

/// One part of a VM's memory.
#[derive(Clone, Debug)]
pub struct Part {
    /// Which slice; `None` for local memory.
    pub slice: Option<Holding>,
    /// The name of the EMC it is of; empty for local memory.
    pub emc: Arc<str>,
    /// How much.
    pub bytes: Bytes,
    /// Where it starts in its place.
    pub offset: u64,
    /// Where it is.
    pub place: Place,
}

/// Where memory is.
#[derive(Clone, Debug)]
pub enum Place {
    /// In what this descriptor refers to.
    Descriptor(Arc<OwnedFd>),
    /// In the file of this name.
    Path(PathBuf),
    /// Nowhere: the VMM makes it.
    VmmsOwn,
}

/// Returns the user that gets the files of a VM: the one that its reservation names, or the agent's own.
fn user_of(record: &VmRecord) -> UserId {
    record.uid.unwrap_or_else(process::own_user)
}

/// What a machine could not do.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The operating system refused.
    #[error("{doing} {}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// What the handle names is not a whole slice: it was revoked, or never was one.
    #[error("{} has {bytes} bytes: a slice has {}", path.display(), units::SLICE.get())]
    NotASlice {
        /// Which file.
        path: PathBuf,
        /// How long it is.
        bytes: u64,
    },
    /// Somebody else's bytes.
    #[error("{} is not zero at byte {at}", path.display())]
    NotZero {
        /// Which file.
        path: PathBuf,
        /// The first byte that is not zero, in steps of what is read at once.
        at: u64,
    },
    /// Processes still have it.
    #[error("{} is still in use by processes {pids:?}", path.display())]
    InUse {
        /// Which file.
        path: PathBuf,
        /// Which processes.
        pids: Vec<u32>,
    },
    /// Its CXL memory cannot be used, or is not here.
    #[error(transparent)]
    Cxl(#[from] cxl::CxlError),
    /// The kernel does not do with a slice what is wanted.
    #[error(transparent)]
    Slice(#[from] slices::SliceError),
    /// The kernel does not say what there is.
    #[error(transparent)]
    Sysfs(#[from] sysfs::SysfsError),
    /// Processes cannot be looked into.
    #[error(transparent)]
    Process(#[from] process::ProcessError),
    /// A slice's memory does not leave its node, or does not come.
    #[error(transparent)]
    Refused(#[from] memory_block::Refused),
    /// A slice may not leave its node: VMs would be pushed out of the pool.
    #[error("node {node} has {room} free beside this slice: VMs have {needed} in it")]
    NoRoom {
        /// Which node.
        node: u32,
        /// What would have to go elsewhere.
        needed: Bytes,
        /// Where it could go.
        room: Bytes,
    },
    /// Files without a name show others than their owner no path.
    #[error(
        "a VMM of user {uid} cannot open memory blocks by path: it takes descriptors, or runs as the agent's user"
    )]
    NoPath {
        /// Whose VMM it is.
        uid: UserId,
    },
    /// Somebody else's file has the name of a device's node.
    #[error("{} is not the node of that device: /dev must be a devtmpfs", path.display())]
    NotTheDevice {
        /// Which file.
        path: PathBuf,
    },
    /// It was not brought online before.
    #[error("slice {} of epoch {} is not open", .0.slice, .0.epoch)]
    NotOpen(Holding),
    /// Local memory was asked for as a path.
    #[error("local memory can be had by path only if backend.local_dir is set")]
    NoLocalDirectory,
}

impl HostError {
    pub(crate) fn io(doing: &'static str, path: impl Into<PathBuf>, errno: impl Into<io::Error>) -> Self {
        Self::Io { doing, path: path.into(), errno: errno.into() }
    }

    /// As the manager hears it.
    pub fn told(&self) -> HostFailure {
        let reason = match self {
            Self::NotZero { .. } => FailedReason::NotZero,
            Self::Io { .. }
            | Self::NotASlice { .. }
            | Self::InUse { .. }
            | Self::Cxl(_)
            | Self::Slice(_)
            | Self::Sysfs(_)
            | Self::Process(_)
            | Self::Refused(_)
            | Self::NoRoom { .. }
            | Self::NoPath { .. }
            | Self::NotTheDevice { .. }
            | Self::NotOpen(_)
            | Self::NoLocalDirectory => FailedReason::Host,
        };
        HostFailure { reason, message: units::chain(self) }
    }
}
