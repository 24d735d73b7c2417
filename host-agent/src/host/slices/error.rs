//! Errors of a slice's state, with numbers and remedies.

use std::io;

use units::{Bytes, limits::SLICES_STUCK_MAX};

use super::{Driver, SysfsError};

/// One change to a slice's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Create it over its range.
    Create,
    /// Set the alignment of mappings.
    Align,
    /// Bind it to a driver.
    Bind(Driver),
    /// Unbind it from its driver.
    Unbind(Driver),
    /// Release its memory and delete it.
    Delete,
}

/// Reason why a slice did not reach its target state.
#[derive(Debug, thiserror::Error)]
pub enum SliceError {
    /// The kernel rejected an operation.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// The slice does not exist.
    #[error("slice index {index} is beyond {region}, which has {count} slices")]
    IndexOutOfRange {
        /// Index.
        index: u32,
        /// Number of slices.
        count: u32,
        /// Where.
        region: String,
    },
    /// The kernel would map other memory than the requested range.
    #[error(
        "the region begins at {base:#x}, which is not aligned to {least}: the kernel would map other memory"
    )]
    Misaligned {
        /// Start of the region.
        base: u64,
        /// Smallest supported alignment.
        least: Bytes,
    },
    /// Unbound now, its memory would stay with the kernel until a reboot.
    #[error(
        "{device} is memory of the kernel, and {} are online: take them offline first (echo offline > \
         /sys/devices/system/memory/memoryN/state), and boot with memhp_default_state=offline so that they do not come online \
         automatically",
        online.join(" ")
    )]
    BlocksOnline {
        /// Device.
        device: String,
        /// Blocks that are not offline.
        online: Vec<String>,
    },
    /// Blocks come online by themselves.
    #[error(
        "added memory comes online automatically (/sys/devices/system/memory/auto_online_blocks is {policy}): boot with \
         memhp_default_state=offline, or echo offline into that file"
    )]
    Policy {
        /// Policy of the kernel.
        policy: String,
    },
    /// A slice is not a whole number of memory blocks.
    #[error("memory blocks have {block}, which does not divide a slice of {} at {base:#x}", units::SLICE)]
    BlockSize {
        /// Size of a block.
        block: Bytes,
        /// Start of the region.
        base: u64,
    },
    /// The kernel has no such driver.
    #[error("driver {driver} is missing, and `modprobe {driver}` failed: {}", output.trim_end())]
    NoDriver {
        /// Index.
        driver: Driver,
        /// Output of `modprobe`.
        output: String,
    },
    /// Memory of the region that is no slice.
    #[error(
        "{device} has memory of the region, is {} and is not a slice: if it is unused, remove it (`daxctl destroy-device`)",
        driver.map_or_else(|| "without a driver".to_owned(), |driver| format!("bound to {driver}"))
    )]
    ForeignDevice {
        /// Device.
        device: String,
        /// User of the device.
        driver: Option<Driver>,
    },
    /// The kernel waits until the pages are unpinned.
    #[error(
        "{device} is stuck: the kernel has waited at least {seconds} s for its pages to be unpinned, for example by VFIO or io_uring; \
         it continues when the process that pins them ends"
    )]
    Stuck {
        /// Device.
        device: String,
        /// Time limit.
        seconds: u64,
    },
    /// The limit of stuck slices is reached.
    #[error("{device} is not changed: {SLICES_STUCK_MAX} slices are stuck, which is the limit")]
    TooManyStuck {
        /// Device.
        device: String,
    },
    /// A step was not started, or has no result.
    #[error("change {device}")]
    StepFailed {
        /// Device.
        device: String,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// The kernel created a device that does not appear.
    #[error("the kernel reported a new dax device, but none exists")]
    DeviceNotCreated,
    /// The kernel does not reach the target state, or another program interferes.
    #[error("slice {index} is not {} after {steps} steps", target.map_or_else(|| "gone".to_owned(), |driver| format!("bound to {driver}")))]
    NotSettled {
        /// Index.
        index: u32,
        /// Target state.
        target: Option<Driver>,
        /// Number of steps.
        steps: usize,
    },
}
