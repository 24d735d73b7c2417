//! Errors of changes to slices. Messages contain the current values and, if known, the fix.

use std::io;

use units::{Bytes, limits::HUNG_SLICES_PER_REGION_MAX};

use super::{Driver, SysfsError};

/// One change to the dax device of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Create the device over the slice's range.
    Create,
    /// Set the alignment of the device's mappings.
    Align,
    /// Bind the device to a driver.
    Bind(Driver),
    /// Unbind the device from its driver.
    Unbind(Driver),
    /// Release the device's memory and delete the device.
    Delete,
}

/// Reason why slices cannot be used, or why a slice did not reach its target state.
#[derive(Debug, thiserror::Error)]
pub enum SliceError {
    /// A file in sysfs could not be read or written.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// The region has no slice of this index.
    #[error("slice index {index} is out of range: {region} has {count} slices")]
    IndexOutOfRange {
        /// Requested index.
        index: u32,
        /// Number of slices in the region.
        count: u32,
        /// Name of the region.
        region: String,
    },
    /// The start of the region is not aligned, so the kernel would map memory outside the requested
    /// range.
    #[error(
        "the region begins at {base:#x}, which is not aligned to {least}: the kernel would map the wrong memory"
    )]
    Misaligned {
        /// Physical address of the region's start.
        base: u64,
        /// Smallest supported alignment.
        least: Bytes,
    },
    /// Memory blocks are online. If their device were unbound now, the memory would stay with the
    /// kernel until a reboot.
    #[error(
        "cannot unbind {device}, because its memory blocks {} are online: offline them (echo offline > \
         /sys/devices/system/memory/memoryN/state), and boot with memhp_default_state=offline so that they do not come online \
         automatically",
        online.join(" ")
    )]
    BlocksOnline {
        /// Name of the dax device.
        device: String,
        /// Names of the memory blocks that are not offline.
        online: Vec<String>,
    },
    /// The kernel onlines added memory blocks automatically.
    #[error(
        "added memory comes online automatically (/sys/devices/system/memory/auto_online_blocks is {policy}): boot with \
         memhp_default_state=offline, or echo offline into that file"
    )]
    Policy {
        /// Value of `auto_online_blocks`.
        policy: String,
    },
    /// A slice is not a whole number of memory blocks.
    #[error("a slice of {} at {base:#x} is not a whole number of memory blocks of {block}", units::SLICE)]
    BlockSize {
        /// Size of a memory block.
        block: Bytes,
        /// Physical address of the region's start.
        base: u64,
    },
    /// The module of a driver could not be loaded.
    #[error("driver {driver} is missing, and `modprobe {driver}` failed: {}", output.trim_end())]
    NoDriver {
        /// Missing driver.
        driver: Driver,
        /// Error output of `modprobe`.
        output: String,
    },
    /// A dax device that is not a slice uses memory of the region.
    #[error(
        "{device} uses memory of the region, is {} and is not a slice: if it is unused, remove it (`daxctl destroy-device`)",
        driver.map_or_else(|| "not bound to a driver".to_owned(), |driver| format!("bound to {driver}"))
    )]
    ForeignDevice {
        /// Name of the dax device.
        device: String,
        /// Driver to which the device is bound, if any.
        driver: Option<Driver>,
    },
    /// A step exceeded its time limit, because the kernel waits until pages are unpinned.
    #[error(
        "{device} is stuck: the kernel has waited {seconds} s or more for pinned pages; end the process that pins them, \
         for example by VFIO or io_uring"
    )]
    Stuck {
        /// Name of the dax device.
        device: String,
        /// Time limit of the step, in seconds.
        seconds: u64,
    },
    /// The limit of stuck slices is reached.
    #[error("cannot change {device}: the limit of {HUNG_SLICES_PER_REGION_MAX} stuck slices is reached")]
    TooManyStuck {
        /// Name of the dax device.
        device: String,
    },
    /// The thread of a step could not be started, or panicked.
    #[error("cannot change {device}")]
    StepFailed {
        /// Name of the dax device.
        device: String,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// The kernel accepted a request for a new device, but no new device exists.
    #[error("the kernel reported a new dax device, but none exists")]
    DeviceNotCreated,
    /// The slice did not reach its target state, for example because another program changes it.
    #[error("slice {index} is not {} after {steps} steps", target.map_or_else(|| "removed".to_owned(), |driver| format!("bound to {driver}")))]
    NotSettled {
        /// Index of the slice.
        index: u32,
        /// Target state: bound to this driver, or `None` for removed.
        target: Option<Driver>,
        /// Number of performed steps.
        steps: usize,
    },
}
