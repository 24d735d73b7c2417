//! Errors of a slice's state, with numbers and remedies.

use std::io;

use units::{Bytes, limits::SLICES_STUCK_MAX};

use super::{Driver, SysfsError};

/// One change to a slice's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make it at its place.
    Create,
    /// Hint on the alignment of mappings.
    Align,
    /// Give it to a driver.
    Bind(Driver),
    /// Take it from its driver.
    Unbind(Driver),
    /// Take its memory and remove it.
    Delete,
}

/// Why a slice is not as it was wanted.
#[derive(Debug, thiserror::Error)]
pub enum SliceError {
    /// The kernel refused.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// There is no such slice.
    #[error("slice index {index} is beyond {region}, which has {count} slices")]
    IndexOutOfRange {
        /// Which one.
        index: u32,
        /// How many there are.
        count: u32,
        /// Where.
        region: String,
    },
    /// The kernel would map other memory than asked for.
    #[error(
        "the region begins at {base:#x}, which is not aligned to {least}: the kernel would map other memory"
    )]
    Misaligned {
        /// Where it begins.
        base: u64,
        /// The least alignment there is.
        least: Bytes,
    },
    /// Unbound now, its memory would stay the kernel's and be lost until a reboot.
    #[error(
        "{device} is memory of the kernel's, and {} are online: offline them first (echo offline > \
         /sys/devices/system/memory/memoryN/state), and boot with memhp_default_state=offline so that they do not come online \
         by themselves",
        online.join(" ")
    )]
    BlocksOnline {
        /// The device.
        device: String,
        /// Its blocks that are not offline.
        online: Vec<String>,
    },
    /// Blocks come online by themselves.
    #[error(
        "memory that is added comes online by itself (/sys/devices/system/memory/auto_online_blocks is {policy}): boot with \
         memhp_default_state=offline, or echo offline into that file"
    )]
    Policy {
        /// Policy of the kernel.
        policy: String,
    },
    /// A slice cannot go online and offline on its own.
    #[error("memory blocks have {block}, which does not divide a slice of {} at {base:#x}", units::SLICE)]
    BlockSize {
        /// How large they are.
        block: Bytes,
        /// Where the region begins.
        base: u64,
    },
    /// The kernel has no such driver.
    #[error("there is no driver {driver}, and `modprobe {driver}` did not bring it: {}", output.trim_end())]
    NoDriver {
        /// Which one.
        driver: Driver,
        /// Output of `modprobe`.
        output: String,
    },
    /// Memory of the region that is no slice.
    #[error(
        "{device} has memory of the region, is {} and no slice: if nobody uses it, remove it (`daxctl destroy-device`)",
        driver.map_or_else(|| "bound to nothing".to_owned(), |driver| format!("bound to {driver}"))
    )]
    ForeignDevice {
        /// Which device.
        device: String,
        /// User of the device.
        driver: Option<Driver>,
    },
    /// The kernel waits until the pages are unpinned.
    #[error(
        "{device} is stuck: the kernel has waited for {seconds} s or more until no page of it is pinned, as by VFIO or io_uring; \
         it goes on by itself when the process that pins them ends"
    )]
    Stuck {
        /// The device.
        device: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// So many are stuck that another one is not tried.
    #[error("{device} is not changed: {SLICES_STUCK_MAX} slices are stuck, the most that may be")]
    TooManyStuck {
        /// The device.
        device: String,
    },
    /// A step was not tried, or has no outcome.
    #[error("change {device}")]
    StepFailed {
        /// The device.
        device: String,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// The kernel made a device that does not show.
    #[error("the kernel said that it made a dax device, and there is none")]
    DeviceNotCreated,
    /// The kernel does not reach the target state, or another program interferes.
    #[error("slice {index} is not {} after {steps} steps", target.map_or_else(|| "gone".to_owned(), |driver| format!("bound to {driver}")))]
    NotSettled {
        /// Which one.
        index: u32,
        /// Target state.
        target: Option<Driver>,
        /// How often it was tried.
        steps: usize,
    },
}
