//! What manager and agent say to each other, as values: [`Want`] flows down, [`Have`] flows up. Both are the whole truth
//! about one host, so a lost one costs time and never correctness. How they travel is the services' business.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};
use units::{Bytes, Epoch, InstanceId, Name, OrderNumber, ReservationId, SliceId, UnixMs};

/// One owner of one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Holding {
    /// Which slice.
    pub slice: SliceId,
    /// Which of its owners.
    pub epoch: Epoch,
}

/// How a device's driver names one grant on a host: for `emulated`, the path of its file.
pub type Handle = Arc<str>;

/// Orders to one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    /// Newer ones win.
    pub number: OrderNumber,
    /// The agent instance it is for; any other ignores it.
    pub instance: InstanceId,
    /// Bring these online for their VMs.
    pub vms: BTreeMap<Name, WantVm>,
    /// Give these back, then say so for exactly these. The value is *force*: even from a VM that still runs.
    pub release: BTreeMap<Holding, bool>,
    /// Zero, verify and give back.
    pub scrub: BTreeMap<Holding, Handle>,
    /// The host was fenced: end everything that is left of before, then report [`Have::clean`].
    pub fenced: bool,
}

/// The memory of one VM, as its host should have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantVm {
    /// Which reservation gave it.
    pub reservation: ReservationId,
    /// Local memory to hand out with the slices.
    pub local: Bytes,
    /// Whether its pages must stay where they are.
    pub pinned: bool,
    /// Its slices.
    pub slices: BTreeMap<Holding, Handle>,
}

/// Facts about one host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Have {
    /// The order this answers; zero before the first.
    pub number: OrderNumber,
    /// Usable by their VMs.
    pub online: Vec<Holding>,
    /// Given back, no mapping left; repeated until the order no longer asks.
    pub released: Vec<Holding>,
    /// Zeroed and verified; repeated until the order no longer asks.
    pub scrubbed: Vec<Scrubbed>,
    /// Could not be done; repeated until the order no longer asks.
    pub failed: Vec<Failed>,
    /// Registered VMs whose process lives. By reservation: a VM's name may be reserved again while its last life ends.
    pub vms: BTreeMap<ReservationId, HaveVm>,
    /// Reservations whose registered process is gone; repeated until the order no longer names them.
    pub ended: Vec<ReservationId>,
    /// Nothing is left from before this instance: no registered process, no mapping, no descriptor.
    pub clean: bool,
}

/// A VM that runs on memory of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HaveVm {
    /// Its name.
    pub vm: Name,
    /// Its process on that host.
    pub pid: u32,
    /// The slices it was handed.
    pub slices: Vec<Holding>,
}

/// What a scrubber did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Scrubbed {
    /// Which slice, under which epoch of its own.
    pub holding: Holding,
    /// When it began, as people read time.
    pub started: UnixMs,
    /// When the last byte was verified.
    pub ended: UnixMs,
    /// How many bytes were seen to be zero.
    pub verified: Bytes,
}

/// What a host could not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// With which slice.
    pub holding: Holding,
    /// Why.
    pub reason: FailedReason,
    /// In the host's words, errno included.
    pub message: String,
}

/// Why a host could not do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailedReason {
    /// The slice did not arrive as zeros.
    NotZero,
    /// The host could not open or map it.
    Host,
}

/// Who speaks for a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The newest instance wins.
    pub instance: InstanceId,
    /// Changes when the machine restarts.
    pub boot_id: String,
    /// Where a VMM on this host fetches memory.
    pub host_memory_socket: String,
}
